"""Calibration text that the source model writes itself: as diverse as its training, and nothing to download."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mha2mla.conversion.calibration.batch_decoder import decoder, rows_at_once
from mha2mla.conversion.calibration.texts import DIVERSE, OwnText, end_tokens, plain_tokens, prompts, start_tokens
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


def write_windows(
    folder: Path,
    tokenizer: Any,
    wanted: Sequence[OwnText],
    *,
    seed: int,
    device: torch.device,
    progress: bool | Span = False,
    work: WorkFolder | None = None,
) -> list[torch.Tensor]:
    """:func:`generate_windows` by the model in ``folder``: bfloat16 on CUDA, float32 on a CPU. Nothing is loaded where
    nothing is wanted."""
    if not wanted:
        return []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=usual_dtype(device), trust_remote_code=False)
    model = model.eval().to(device)
    return generate_windows(model, tokenizer, wanted, seed=seed, progress=progress, work=work)


@torch.inference_mode()
def generate_windows(
    model: torch.nn.Module,
    tokenizer: Any,
    wanted: Sequence[OwnText],
    *,
    seed: int,
    row: int = ROW,
    progress: bool | Span = False,
    work: WorkFolder | None = None,
) -> list[torch.Tensor]:
    """Samples windows, at temperature 1 as LLM-QAT (arXiv 2305.17888) does for its training data.

    A window is one document after another, each begun by a prompt (``texts.prompts``), an instruction through the chat
    template where there is one, or the opening of a plain text; or by a word drawn from the vocabulary, for text that
    no prompt thought of. Documents of ``"generated-diverse"`` also begin by openings in many languages and formats and,
    where there is a chat template, as a user's turn that the model writes before it answers (Magpie, arXiv 2406.08464);
    there each kind is as likely. When the model ends a document, the next one begins. Half of the windows lose their
    first tokens: attention leans on the first token of a window, and in other text that may be any.

    A window longer than ``row`` tokens is put together of rows of that length: a small model rambles when it goes on
    for long, and short texts behind one another are what it was trained on (docs/notes/calibration.md). Rows of equal
    length are written side by side, whatever window they are for.

    Args:
        work: keeps every batch of rows as a piece, so that the same call after an interrupt goes on behind them.

    Returns:
        int64 [count, length] on the CPU for each of ``wanted``.
    """
    draw = random.Random(seed)
    generator = torch.Generator(model.device).manual_seed(seed)
    vocab_size, kinds = _vocab_size(model), sorted({each.name for each in wanted})
    ends = frozenset({*end_tokens(model), tokenizer.eos_token_id} - {None}) & frozenset(range(vocab_size))
    starts = {name: _documents(tokenizer, vocab_size, ends, draw, name == DIVERSE) for name in kinds}
    by_size: dict[int, list[str]] = {}  # length of a row → the text of each
    for each in wanted:
        size = min(each.length, row)
        by_size.setdefault(size, []).extend([each.name] * (each.count * -(-each.length // size)))
    batches = []
    for size, names in by_size.items():
        at_once = rows_at_once(model, size + _LONGEST_CUT)
        batches += [(size, first, names[first : first + at_once]) for first in range(0, len(names), at_once)]
    made: dict[int, list[torch.Tensor]] = {size: [] for size in by_size}
    parts = split(progress, *(float(size) for size, _, _ in batches))
    for number, ((size, first, names), part) in enumerate(zip(batches, parts, strict=True), 1):
        piece = f"{PIECES}{'-'.join(starts)}-{seed}-{size}-{first:07d}"
        if work is not None and (kept := work.get(piece)):
            (tensors, (version, state, gauss)) = kept
            generator.set_state(tensors["generator"])
            draw.setstate((version, tuple(state), gauss))
            made[size].append(tensors["rows"])
            continue
        what = f"text {number} of {len(batches)}, {len(names)} rows"
        documents = [starts[name] for name in names]
        made[size].append(_write(model, ends, documents, size + _LONGEST_CUT, generator, part, what))
        if work is not None:
            work.put(piece, {"rows": made[size][-1], "generator": generator.get_state()}, draw.getstate())
    rows = {size: iter(torch.cat(each)) for size, each in made.items()}
    begin, windows = torch.tensor(start_tokens(tokenizer), dtype=torch.int64), []
    for each in wanted:
        size = min(each.length, row)
        pieces = -(-each.length // size)
        written = (torch.stack([*islice(rows[size], pieces)]) for _ in range(each.count))
        windows.append(torch.stack([_cut(_joined(window, size), each.length, begin, draw) for window in written]))
    return windows


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
    documents: Sequence[Iterator[list[list[int]]]],
    length: int,
    generator: torch.Generator,
    progress: bool | Span,
    what: str,
) -> torch.Tensor:
    """int64 [rows, length], a row of each of ``documents``; the host reads a step's tokens while the device already
    makes the next step.

    Raises:
        ValueError: the model's logits are NaN.
    """
    rows = len(documents)
    parts = [next(each) for each in documents]  # by row: its document's next parts, for when a part ends
    forced = [part.pop(0) for part in parts]  # tokens that each row must emit before it may choose
    current = torch.tensor([queue.pop(0) for queue in forced], device=model.device)
    written = [current]
    started = time.perf_counter()
    logits_of = decoder(model, rows, length)
    captured = time.perf_counter() - started
    is_end = torch.zeros(_vocab_size(model), dtype=torch.bool)
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
                parts[row] = parts[row] or next(documents[row])
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


def _vocab_size(model: torch.nn.Module) -> int:
    """Tokens that the model has; a tokenizer may know more, added without resizing the embedding."""
    return model.config.get_text_config(decoder=True).vocab_size


def _documents(
    tokenizer: Any, vocab_size: int, ends: frozenset[int], draw: random.Random, diverse: bool
) -> Iterator[list[list[int]]]:
    """Documents without end, each as parts: the tokens that begin it, and those that follow when the model ends."""
    instructions, openings, topics, documents = prompts()
    start = start_tokens(tokenizer)
    words = sorted(set(range(min(len(tokenizer), vocab_size))) - set(tokenizer.all_special_ids))

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
