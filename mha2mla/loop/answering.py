"""Texts in, texts out: what ``mha2mla generate`` and ``mha2mla chat`` do with a loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mha2mla.loop.loop import Loop
from mha2mla.loop.scheduler import Request, Sampling
from mha2mla.modeling import MHA2MLAForCausalLM
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.prompts import Answers
from mha2mla.terminal import progress_bar


def served(model: PreTrainedModel) -> PreTrainedModel:
    """The model as a loop takes it: a source's attention runs the ops here from now on."""
    if not isinstance(model, MHA2MLAForCausalLM):
        model.set_attn_implementation("mha2mla")
    return model


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end an answer, by the generation config, else by the tokenizer."""
    found = model.generation_config.eos_token_id
    found = tokenizer.eos_token_id if found is None else found
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)


def token_ids(tokenizer: PreTrainedTokenizerBase, task: Mapping[str, Any], chat: bool) -> list[int]:
    """Tokens of a prompt as it stands, or, of messages and with ``chat``, by the tokenizer's chat template.

    Raises:
        ValueError: the tokenizer has no such template, or it or its template refuses the text or the messages.
    """
    name = "messages" if "messages" in task else "prompt"
    by_template = chat or name == "messages"
    if by_template and not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; expected one for messages, or prompts without --chat")
    try:
        if not by_template:
            return tokenizer(task["prompt"]).input_ids
        messages = task["messages"] if name == "messages" else [{"role": "user", "content": task["prompt"]}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # templates are programs of the checkpoint's; half a surrogate pair is no text
        what = "chat template" if by_template else "tokenizer"
        raise ValueError(f"the {what} does not take {name} {task[name]!r:.200}: {error}") from error


def answer_text(tokenizer: PreTrainedTokenizerBase, request: Request) -> str:
    return tokenizer.decode(request.answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def loop_for(
    model: PreTrainedModel, prompts: Sequence[int], max_new_tokens: int, max_sequences: int, **options: Any
) -> Loop:
    """A loop with pages for the answers to prompts of so many tokens, ``max_sequences`` of them at a time."""
    lengths = (tokens + max_new_tokens + 1 for tokens in prompts)  # a step runs ahead of the token that is read
    pages = sorted((-(-length // PAGE_SIZE) for length in lengths), reverse=True)
    rows = min(max_sequences, len(prompts))  # more than prompts need kernels and graphs that nothing runs
    return Loop(served(model), max_pages=sum(pages[:rows]), max_sequences=rows, **options)


def answer_all(
    loop: Loop,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Mapping[str, Any]],
    answers: Answers,
    sampling: Sampling,
    *,
    chat: bool = False,
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Answers what ``answers`` has not, writes each answer when it ends, and gives it.

    Args:
        tasks: as :func:`mha2mla.prompts.read_prompts` gives them.
        sampling: of all; the n-th task has the n-th seed from its own on.

    Raises:
        ValueError: a prompt that the loop cannot take, before anything runs.
    """
    asked: dict[Request, Mapping[str, Any]] = {}
    for number, task in answers.remaining(tasks):
        try:
            request = loop.add(token_ids(tokenizer, task, chat), replace(sampling, seed=sampling.seed + number))
        except ValueError as error:
            raise ValueError(f"prompt {number + 1}: {error}") from error
        asked[request] = task
    with progress_bar(
        total=len(tasks), initial=len(tasks) - len(asked), desc="generating", unit="answer", show=True
    ) as bar:
        for given in loop.steps():
            bar.set_postfix_str(f"{loop.progress.tokens_per_second:.0f} tokens/s", refresh=False)
            for request in given:
                if request.finished:
                    text = answer_text(tokenizer, request)
                    sizes = {"prompt_tokens": len(request.prompt), "new_tokens": len(request.answer)}
                    answers.write(asked[request], answer=text, finished=request.finished, **sizes)
                    bar.update()
                    yield asked[request], text


@dataclass(frozen=True)
class Turn:
    """Cost of an answer in a conversation: tokens, seconds to the first and for all, and bytes in the cache."""

    new_tokens: int
    first_seconds: float
    seconds: float
    cache_bytes: int

    def __str__(self) -> str:
        after = self.seconds - self.first_seconds
        rate = f"{(self.new_tokens - 1) / after:.1f} tokens/s" if self.new_tokens > 1 and after > 0 else "one token"
        first = f"first after {self.first_seconds:.2f} s"
        return f"[{self.new_tokens} tokens, {first}, {rate}, {self.cache_bytes:,} bytes cached]"


class Conversation:
    """Messages back and forth with one model; what earlier turns cached is used again.

    Args:
        model, tokenizer: whose chat template is used where there is one; else texts just go on.
        sampling: of every answer; its tokens to stop at are the model's.
        loop: options of :class:`Loop`.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, **loop: Any
    ) -> None:
        self._loop, self._tokenizer = Loop(served(model), max_sequences=1, **loop), tokenizer
        self._sampling = replace(sampling, stop_tokens=stop_tokens(model, tokenizer))
        self._messages: list[dict[str, str]] = []
        self.last: Turn | None = None

    def clear(self) -> None:
        self._messages = []

    def say(self, text: str) -> Iterator[str]:
        """The answer to ``text``, in pieces as they come; it ends, and is forgotten, where no more are taken.

        Raises:
            ValueError: the conversation is longer than the loop takes.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        whole = {"prompt": "".join(message["content"] for message in messages)}
        prompt = token_ids(self._tokenizer, {"messages": messages} if self._tokenizer.chat_template else whole, False)
        began, first, shown = time.perf_counter(), None, ""
        request = self._loop.add(prompt, self._sampling)
        try:
            for given in self._loop.steps():
                if request not in given:
                    continue
                first = first or time.perf_counter() - began
                whole = answer_text(self._tokenizer, request)
                # Else the last character may be half of one, so far.
                if request.finished or not whole.endswith("\N{REPLACEMENT CHARACTER}"):
                    yield whole[len(shown) :]
                    shown = whole
        finally:
            self._loop.scheduler.cancel(request)  # where the caller took no more pieces, or an error came
        seconds = time.perf_counter() - began
        cached = round(len(request.tokens) * self._loop.cache_bytes_per_token)
        self.last = Turn(len(request.answer), first or seconds, seconds, cached)
        self._messages = [*messages, {"role": "assistant", "content": shown}]
