"""Calibration text that the source model writes itself: as diverse as its training, and nothing to download."""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mha2mla.conversion.calibration.batch_decoder import decoder, rows_at_once
from mha2mla.conversion.calibration.texts import DIVERSE, end_tokens, plain_tokens, prompts, start_tokens
from mha2mla.conversion.resume import WorkFolder
from mha2mla.environment import usual_dtype
from mha2mla.terminal import Span, progress_bar, split

_LOGGER = logging.getLogger(__name__)
_BLANK_SHARE = 1 / 3  # share of documents that begin with any word
_CUT_SHARE = 0.5  # share of windows that begin within a document
_LONGEST_CUT = 64  # tokens
_MARK = "WHAT-THE-USER-SAYS"
ROW = 512  # tokens that are written in one go, unless said otherwise
PIECES = "rows-"  # prefix of the names of unfinished pieces


def generator_of(
    folder: Path,
    tokenizer: Any,
    *,
    seed: int,
    device: torch.device,
    progress: Iterable[bool | Span] = (),
    work: WorkFolder | None = None,
) -> Callable[[str, int, int], torch.Tensor]:
    """Name of a generated text, length and number of windows -> as many windows of tokens, for ``texts.mixed_windows``.

    The whole model is loaded when it first writes, and kept for other lengths: bfloat16 on CUDA, float32 on a CPU.
    ``progress`` has the span of each call.
    """

    @functools.cache
    def model() -> torch.nn.Module:
        made = AutoModelForCausalLM.from_pretrained(folder, dtype=usual_dtype(device), trust_remote_code=False)
        return made.eval().to(device)

    calls = iter(progress)

    def generate(name: str, length: int, count: int) -> torch.Tensor:
        how = {"diverse": name == DIVERSE, "progress": next(calls, False), "work": work}
        # Texts of different lengths begin with different prompts.
        return generate_windows(model(), tokenizer, length, count, seed=seed + length, **how)

    return generate


@torch.inference_mode()
def generate_windows(
    model: torch.nn.Module,
    tokenizer: Any,
    length: int,
    count: int,
    *,
    seed: int,
    diverse: bool = False,
    row: int = ROW,
    progress: bool | Span = False,
    work: WorkFolder | None = None,
) -> torch.Tensor:
    """Samples windows, at temperature 1 as LLM-QAT (arXiv 2305.17888) does for its training data.

    A window is one document after another, each begun by a prompt (``texts.prompts``), an instruction through the chat
    template where there is one, or the opening of a plain text; or by a word drawn from the vocabulary, for text that
    no prompt thought of. When the model ends a document, the next one begins. Half of the windows lose their first
    tokens: attention leans on the first token of a window, and in other text that may be any.

    A window longer than ``row`` tokens is put together of rows of that length: a small model rambles when it goes on
    for long, and short texts behind one another are what it was trained on (docs/notes/calibration.md).

    Args:
        diverse: documents also begin by openings in many languages and formats and, where there is a chat template, as
            a user's turn that the model writes before it answers (Magpie, arXiv 2406.08464); each kind is as likely.
        work: keeps every batch of rows as a piece, so that the same call after an interrupt goes on behind them.

    Returns:
        int64 [count, length] on the CPU.
    """
    row = min(length, row)
    pieces = -(-length // row)
    written = row + _LONGEST_CUT
    rows = rows_at_once(model, written)
    draw = random.Random(seed)
    generator = torch.Generator(model.device).manual_seed(seed)
    ends = frozenset({*end_tokens(model), tokenizer.eos_token_id} - {None})
    starts = _documents(tokenizer, ends, draw, diverse)
    write = functools.partial(_write, model, ends, starts, written)
    made = []
    batches = range(0, count * pieces, rows)
    for number, (done, part) in enumerate(zip(batches, split(progress, *[1.0] * len(batches)), strict=True), 1):
        piece = f"{PIECES}{'diverse-' if diverse else ''}{length}-{done:07d}"
        if work is not None and (kept := work.get(piece)):
            (tensors, (version, state, gauss)) = kept
            generator.set_state(tensors["generator"])
            draw.setstate((version, tuple(state), gauss))
            made.append(tensors["rows"])
            continue
        what = f"text {number} of {len(batches)}, windows of {length:,}"
        made.append(write(min(rows, count * pieces - done), generator, part, what))
        if work is not None:
            work.put(piece, {"rows": made[-1], "generator": generator.get_state()}, draw.getstate())
    first = torch.tensor(start_tokens(tokenizer), dtype=torch.int64)
    windows = torch.cat(made).view(count, pieces, written)
    return torch.stack([_cut(_joined(window, row), length, first, draw) for window in windows])


def _joined(rows: torch.Tensor, row: int) -> torch.Tensor:
    """Rows [pieces, written] behind one another, the last one whole."""
    return torch.cat([rows[:-1, :row].flatten(), rows[-1]])


def _cut(written: torch.Tensor, length: int, first: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """A window of what was written, from its beginning, or from within behind the start tokens ``first``."""
    if draw.random() >= _CUT_SHARE:
        return written[:length]
    skipped = draw.randint(1, _LONGEST_CUT)
    return torch.cat([first, written[skipped:]])[:length]


def _write(
    model: torch.nn.Module,
    ends: frozenset[int],
    starts: Iterator[list[list[int]]],
    length: int,
    rows: int,
    generator: torch.Generator,
    progress: bool | Span,
    what: str,
) -> torch.Tensor:
    """int64 [rows, length]; the host reads a step's tokens while the device already makes the next step.

    Raises:
        ValueError: the model's logits are NaN.
    """
    parts = [next(starts) for _ in range(rows)]  # by row: its document's next parts, for when a part ends
    forced = [part.pop(0) for part in parts]  # tokens that each row must emit before it may choose
    current = torch.tensor([queue.pop(0) for queue in forced], device=model.device)
    written = [current]
    started = time.perf_counter()
    logits_of = decoder(model, rows, length)
    captured = time.perf_counter() - started
    is_end = torch.zeros(model.config.get_text_config(decoder=True).vocab_size, dtype=torch.bool)
    is_end[list(ends)] = True
    is_forced = torch.tensor(list(map(bool, forced)))
    is_nan, noise = torch.zeros(rows, dtype=torch.bool, device=model.device), None
    on_cuda = model.device.type == "cuda"
    was_forced = is_forced.clone()
    chosen = read = None  # tokens of the step before on the host, once the event ``read`` has happened
    for _ in progress_bar(range(length - 1), desc=what, unit="token", show=progress):
        logits = logits_of(current)
        noise = torch.empty(logits.shape, device=model.device) if noise is None else noise
        best = sample(logits, generator, noise)
        is_nan |= best.values.isnan()
        if read is not None:
            read.synchronize()
        if chosen is not None:  # a row whose token was an end is told its next part
            for row in (is_end[chosen] & ~was_forced).nonzero()[:, 0].tolist():
                parts[row] = parts[row] or next(starts)
                forced[row].extend(parts[row].pop(0))
                is_forced[row] = bool(forced[row])
        told = torch.full((rows,), -1)
        for row in is_forced.nonzero()[:, 0].tolist():
            told[row] = forced[row].pop(0)
        was_forced = is_forced.clone()
        is_forced &= torch.tensor(list(map(bool, forced)))
        told = (told.pin_memory() if on_cuda else told).to(model.device, non_blocking=True)
        current = torch.where(told < 0, best.indices, told)
        chosen = current.to("cpu", non_blocking=True)
        read = torch.cuda.current_stream(model.device).record_event() if on_cuda else None
        written.append(current)
    if is_nan.any():
        raise ValueError(f"the source's logits are NaN in {int(is_nan.sum())} of {rows} rows that it wrote")
    made = torch.stack(written, 1).cpu()
    seconds = time.perf_counter() - started
    _LOGGER.info("%d rows of %d tokens: %.1f s, %.1f s of it to compile and capture", rows, length, seconds, captured)
    return made


def sample(logits: torch.Tensor, generator: torch.Generator, noise: torch.Tensor) -> torch.return_types.max:
    """Samples at temperature 1 in ``indices`` [rows], by Gumbel's trick: argmax of log p - log e, e exponential.

    Two thirds of the memory traffic of softmax and multinomial, which also waits for the device to check its input.

    Args:
        logits: [rows, vocabulary].
        noise: float32 of the same shape, overwritten.
    """
    noise.exponential_(generator=generator).log_()
    return torch.sub(logits, noise, out=noise).max(-1)


def _documents(tokenizer: Any, ends: frozenset[int], draw: random.Random, diverse: bool) -> Iterator[list[list[int]]]:
    """Documents without end, each as parts: the tokens that begin it, and those that follow when the model ends."""
    instructions, openings, topics, documents = prompts()
    start = start_tokens(tokenizer)
    words = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))

    def word() -> list[list[int]]:
        return [[*start, draw.choice(words)]]

    def topic() -> list[list[int]]:
        return [start + plain_tokens(tokenizer, draw.choice(openings).format(draw.choice(topics)))]

    def instruction() -> list[list[int]]:
        text = draw.choice(instructions).format(draw.choice(topics))
        return [plain_tokens(tokenizer, _chat(tokenizer, text))]

    has_chat = tokenizer.chat_template is not None
    if not diverse:
        while True:
            if draw.random() < _BLANK_SHARE:
                yield word()
            else:
                yield instruction() if has_chat and draw.random() < 0.5 else topic()
    # More tokens than letters: the tokenizer has no pieces for this script, so the model has hardly seen it.
    known = [tokens for line in documents if len(tokens := plain_tokens(tokenizer, line)) <= len(line)]
    # Tokens of a chat before and behind what a user says.
    before, _, behind = _chat(tokenizer, _MARK).partition(_MARK) if has_chat else ("", "", "")
    turn, answer = plain_tokens(tokenizer, before), plain_tokens(tokenizer, behind)
    kinds = [word, topic]
    if known:
        kinds.append(lambda: [start + draw.choice(known)])
    if has_chat:
        kinds.append(instruction)
    if answer and answer[0] in ends:  # else the model would not know where the user's turn ends
        kinds.append(lambda: [list(turn), answer[1:]])
    while True:
        yield draw.choice(kinds)()


def _chat(tokenizer: Any, text: str) -> str:
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
