"""Requests and their progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Sampling:
    """Sampling of a request's tokens, and its end.

    Args:
        max_new_tokens: at most so many.
        temperature: of the softmax; 0: the likeliest token (greedy).
        top_k: only the so many likeliest; 0: all.
        top_p: only the likeliest that together have this probability (nucleus, arXiv 1904.09751).
        min_p: only those at least so likely as this share of the likeliest (arXiv 2407.01082).
        repetition_penalty: logits of tokens that occurred are divided by it, negative ones multiplied (arXiv
            1909.05858).
        seed: of this request alone: what runs beside it changes nothing.
        stop_tokens: ids that end the answer; the one that came is its last token.

    Raises:
        ValueError: a value out of its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "more than 0"),
            ("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1"),
        ):
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {expected}")


@dataclass(eq=False)
class Request:
    """A prompt and its answer; the scheduler's to change.

    Attributes:
        prompt: token ids, one at least.
        sampling: how it goes on.
        tokens: prompt and answer, as far as the host has read them.
        in_flight: tokens behind these that the device has been told to choose and nobody has read.
        sequence: of the page allocator, while the request runs.
        slot: where the device keeps its last token, while it runs.
        finished: "length" or "stop" once it is.
        shared_tokens: of the prompt, found in the cache when it was first admitted.
        preemptions: how often its pages were taken away.
    """

    prompt: Sequence[int]
    sampling: Sampling = Sampling()
    tokens: list[int] = field(init=False)
    in_flight: int = field(default=0, init=False)
    sequence: int | None = field(default=None, init=False)
    slot: int | None = field(default=None, init=False)
    finished: Literal["length", "stop"] | None = field(default=None, init=False)
    shared_tokens: int = field(default=0, init=False)
    preemptions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.prompt = tuple(self.prompt)
        if not self.prompt:
            raise ValueError("prompt is empty; expected one token at least")
        self.tokens = list(self.prompt)

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def is_asked_for(self) -> bool:
        """True if tokens are still to be chosen, beside those in flight."""
        return self.finished is None and self.length - len(self.prompt) < self.sampling.max_new_tokens

    def receive(self, token: int) -> None:
        """The oldest token in flight was read; nobody wants it where the request ended before."""
        self.in_flight -= 1
        if self.finished is not None:
            return
        self.tokens.append(token)
        if token in self.sampling.stop_tokens:
            self.finished = "stop"
        elif len(self.answer) >= self.sampling.max_new_tokens:
            self.finished = "length"
