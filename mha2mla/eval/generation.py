"""Greedy continuations of source and converted model: tokens in common, and how often either ends in a loop."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import torch

from mha2mla.conversion.calibration.texts import end_tokens, load_text, plain_tokens, start_tokens
from mha2mla.conversion.predictions import Predictor
from mha2mla.terminal import progress_bar

TAIL = 64  # tokens at the end of a continuation, where a loop shows
LONGEST_PERIOD = 16  # small models repeat a clause, of nine to sixteen tokens, as often as a word
_PROMPTS_AT_ONCE = 16
# Options of ``generate``: greedy, whatever the checkpoint's own generation config prefers.
GREEDY: Mapping[str, Any] = MappingProxyType(
    {
        "do_sample": False,
        "num_beams": 1,
        "num_return_sequences": 1,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "bad_words_ids": None,
        "suppress_tokens": None,
        "temperature": None,
        "top_p": None,
        "top_k": None,
    }
)

COLUMNS = {
    "text": "text",
    "prompt_tokens": "prompt",
    "new_tokens": "new tokens",
    "num_prompts": "prompts",
    "same_tokens": "same tokens before the first difference",
    "identical": "identical",
    "agreement": "agreement, given the source's",
    "degenerate_source": "loops, source",
    "degenerate_converted": "loops, converted",
}


@dataclass(frozen=True)
class GenerationSettings:
    """Amount of generation.

    Attributes:
        prompt_lengths: tokens of running text that are continued.
        new_tokens: tokens of a continuation, at least ``TAIL``.
        seed: draws the prompts.
        text: where they come from; a name for :func:`~mha2mla.conversion.calibration.texts.load_text`.
    """

    prompt_lengths: tuple[int, ...] = (64, 2048)
    new_tokens: int = 128
    prompts: int = 16
    seed: int = 0
    text: str = "builtin:opticks"

    def __post_init__(self) -> None:
        if self.new_tokens < TAIL:
            raise ValueError(f"new_tokens is {self.new_tokens}; expected at least {TAIL}, in which a loop shows")
        if self.prompts < 1:
            raise ValueError(f"prompts is {self.prompts}; expected at least 1")
        for length in self.prompt_lengths:
            if length < 1:
                raise ValueError(f"prompt_lengths has {length}; expected at least 1")


@dataclass(frozen=True)
class GenerationRow:
    """Greedy continuations of prompts of one length.

    Attributes:
        text, prompt_tokens, new_tokens, num_prompts, seed: the settings. A continuation that ends itself is shorter.
        same_tokens: mean number of tokens before the first that differs.
        identical: share of prompts where none differs.
        agreement: share of the source's tokens that the converted model ranks first after the source's tokens before:
            one difference is counted once, not for all that follows from it.
        degenerate_source, degenerate_converted: share of continuations that end in a loop (:func:`is_loop`).
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    num_prompts: int
    seed: int
    same_tokens: float
    identical: float
    agreement: float
    degenerate_source: float
    degenerate_converted: float

    to_dict = asdict


@torch.inference_mode()
def compare_generation(
    source: torch.nn.Module,
    converted: torch.nn.Module,
    tokenizer: Any,
    settings: GenerationSettings,
    *,
    longest: int | None = None,
    progress: bool = True,
) -> tuple[list[GenerationRow], list[str]]:
    """Continues the same prompts with both models, greedily, each with the cache that it is served with.

    Args:
        source, converted: loaded causal language models of one vocabulary.
        longest: tokens that both models take; longer prompts are left out.

    Returns:
        Rows, and why others are missing: prompts that are longer than the models take, or than the text.

    Raises:
        ValueError: a prompt has no more than the tokenizer's start tokens.
    """
    tokens, start = plain_tokens(tokenizer, load_text(settings.text)), start_tokens(tokenizer)
    rows, skipped = [], []
    for length in progress_bar(settings.prompt_lengths, desc="generation", unit="length", show=progress):
        if longest is not None and length + settings.new_tokens > longest:
            skipped.append(f"continuations of {length} tokens: the models take at most {longest}")
            continue
        if len(tokens) < (body := length - len(start)):
            found = f"text {settings.text!r} has {len(tokens)} tokens"
            skipped.append(f"continuations of {length} tokens: {found}; expected at least {body}")
            continue
        prompts = _prompts(tokens, start, length, settings)
        rows.append(_row(prompts, settings, source, converted))
    return rows, skipped


def is_loop(tokens: Sequence[int]) -> bool:
    """True if the last ``TAIL`` tokens repeat with a period of at most ``LONGEST_PERIOD``; False for shorter texts."""
    tail = list(tokens[-TAIL:])
    return len(tail) == TAIL and any(tail[period:] == tail[:-period] for period in range(1, LONGEST_PERIOD + 1))


def _prompts(tokens: Sequence[int], start: Sequence[int], length: int, settings: GenerationSettings) -> torch.Tensor:
    """int64 [prompts, length], drawn from the whole text."""
    body = length - len(start)
    if body < 1:
        raise ValueError(f"prompt_lengths has {length}; expected more than {len(start)} start tokens")
    draw = random.Random(f"{settings.seed} {length}")
    firsts = [draw.randint(0, len(tokens) - body) for _ in range(settings.prompts)]
    return torch.tensor([[*start, *tokens[first : first + body]] for first in firsts])


def _row(
    prompts: torch.Tensor, settings: GenerationSettings, source: torch.nn.Module, converted: torch.nn.Module
) -> GenerationRow:
    ours = [_continuations(model, prompts, settings.new_tokens) for model in (source, converted)]
    same = [sum(takewhile(bool, map(operator.eq, *pair))) for pair in zip(*ours, strict=True)]
    return GenerationRow(
        text=settings.text,
        prompt_tokens=prompts.shape[1],
        new_tokens=settings.new_tokens,
        num_prompts=len(prompts),
        seed=settings.seed,
        same_tokens=sum(same) / len(same),
        identical=sum(map(operator.eq, *ours)) / len(prompts),
        agreement=_agreement(prompts, ours[0], converted),
        degenerate_source=sum(map(is_loop, ours[0])) / len(prompts),
        degenerate_converted=sum(map(is_loop, ours[1])) / len(prompts),
    )


def _continuations(model: torch.nn.Module, prompts: torch.Tensor, new_tokens: int) -> list[list[int]]:
    """Tokens that ``generate`` adds to each prompt, up to and with the token that ends it."""
    ends = set(end_tokens(model))
    found = []
    for part in prompts.split(_PROMPTS_AT_ONCE):
        ids = part.to(model.device)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            pad_token_id=min(ends, default=0),
            **GREEDY,
        )
        for row in made[:, part.shape[1] :].tolist():
            end = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
            found.append(row[: end + 1])
    return found


def _agreement(prompts: torch.Tensor, continuations: Sequence[Sequence[int]], converted: torch.nn.Module) -> float:
    """Share of the continuations' tokens that ``converted`` ranks first, given all tokens before."""
    predictor, agreeing = Predictor(converted), []
    for prompt, made in zip(prompts, continuations, strict=True):
        tokens = torch.tensor(made)
        logits_of = predictor.next_tokens(torch.cat([prompt, tokens])[None])
        chosen = logits_of(slice(len(prompt) - 1, len(prompt) - 1 + len(tokens))).argmax(-1).cpu()
        agreeing += (chosen == tokens).tolist()
    return sum(agreeing) / len(agreeing)
