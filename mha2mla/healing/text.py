"""Text of healing: what the source writes, or the caller's, in short and long windows; some of it is held out."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mha2mla.conversion.calibration.blocks import TokenBlocks, Windows, listed
from mha2mla.conversion.calibration.generated_text import PIECES, ROW, generate_windows
from mha2mla.conversion.calibration.texts import (
    DIVERSE,
    GENERATED,
    OwnText,
    in_turns,
    start_tokens,
    text_identity,
    text_parts,
    text_shares,
)
from mha2mla.conversion.calibration.windows import checked_windows
from mha2mla.conversion.predictions import Predictor, perplexity, windows_at_once
from mha2mla.conversion.resume import WorkFolder, keep_text, kept_text, read_piece, tensor_hash, text_code_hash
from mha2mla.conversion.source.opening import Source, read_tokenizer
from mha2mla.environment import device_name, installed_version, usual_dtype
from mha2mla.healing.settings import Settings

HELD_OUT_SHARE = 1 / 20
MAX_HELD_OUT = 1 << 17  # tokens
_MAX_MEASURED = 1 << 15  # tokens whose perplexity is measured
_GRAM = 4  # tokens


def text_name(text: str | Windows) -> str:
    """Identity of a text: names, hashes of files and of token windows."""
    return text_identity(text) if isinstance(text, str) else "+".join(map(tensor_hash, listed(text)))


def training_text(
    source: Source,
    text: str | Windows,
    settings: Settings,
    tokens: int,
    device: torch.device,
    *,
    digests: Mapping[str, str],
    work: WorkFolder,
    progress: bool,
) -> TokenBlocks:
    """Blocks of ``settings.long_length`` tokens, each one long window or several short ones.

    Text that the source writes is kept in the cache folder for later runs, and what was written before an interrupt is
    taken up. A text that is named n times has n times as much of the tokens, each in one window only.

    Args:
        text: ``"generated"``, ``"generated-diverse"``, names of ``texts.load_text``, or these joined by ``+``; or token
            windows of :func:`~mha2mla.conversion.calibration.windows.checked_windows`, as they are.
        tokens: to return at most, in whole blocks; other text than the source's own may be shorter.
        digests: SHA-256 of the source's files.

    Raises:
        ValueError: an unusable text, by name.
        CheckpointError: the source has no usable tokenizer.
    """
    if not isinstance(text, str):
        return TokenBlocks.of(text)
    tokenizer, size = read_tokenizer(str(source.folder), "source"), settings.long_length
    names = text_parts(text)
    own = Counter(name for name in names if name in (GENERATED, DIVERSE))
    others = [name for name in names if name not in own]
    count = max(2, tokens // size)
    written = count - count * len(others) // len(names)
    parts: list[Tensor] = []
    if count > written:
        read = in_turns(text_shares(tokenizer, "+".join(others), size, count - written, seed=settings.seed))
        long, _ = _share(len(read), settings)
        windows = read[long:].reshape(-1, settings.length).clone()
        start = start_tokens(tokenizer)  # models lean on it
        windows[:, : len(start)] = torch.tensor(start, dtype=torch.int64)
        parts += [read[:long], windows]
    for name, times in own.items():
        long, short = _share(written * times // own.total(), settings)
        asked = {size: long, settings.length: short * (size // settings.length)}
        parts += _written(source.folder, tokenizer, name, asked, settings, device, digests, work, progress)
    by_length: dict[int, list[Tensor]] = {}
    for part in parts:
        if len(part):
            by_length.setdefault(part.shape[1], []).append(part)
    return TokenBlocks.of([checked_windows(_mixed(same, size), "text", source) for same in by_length.values()])


def _mixed(parts: list[Tensor], size: int) -> Tensor:
    """Windows of all ``parts`` [windows, length], in blocks by their places within each part: the last few, which are
    held out, are of each part by its share, and of a part of few blocks none."""
    blocks = [part.reshape(-1, size // part.shape[1], part.shape[1]) for part in parts]
    places = torch.cat([(torch.arange(len(each)) + 0.5) / len(each) for each in blocks])
    return torch.cat(blocks)[places.argsort(stable=True)].flatten(0, 1)


def _share(blocks: int, settings: Settings) -> tuple[int, int]:
    """Numbers of blocks with a long window and with short ones; of three and more at least one each where both are
    asked for."""
    if settings.length == settings.long_length:
        return 0, blocks
    long = round(blocks * settings.long_share)
    if blocks == 2:
        long -= long % 2  # of one block of each length none can be held out
    elif blocks > 2 and 0 < settings.long_share < 1:
        long = min(max(long, 1), blocks - 1)
    return long, blocks - long


def _written(
    folder: Path,
    tokenizer: Any,
    name: str,
    asked: Mapping[int, int],
    settings: Settings,
    device: torch.device,
    digests: Mapping[str, str],
    work: WorkFolder,
    progress: bool,
) -> list[Tensor]:
    """Windows of each length, as many as ``asked``, that the model in ``folder`` writes, or wrote for an earlier run.

    Long windows are put together of rows of ``settings.row``; short ones of rows as calibration writes them.
    """
    asked = {length: count for length, count in asked.items() if count}
    machine = [device_name(device), torch.__version__, installed_version("transformers"), text_code_hash()]
    rows = {length: min(length, settings.row if length > settings.length else ROW) for length in asked}
    windows = [(length, count, rows[length]) for length, count in sorted(asked.items())]
    kept = kept_text([name, dict(digests), machine, windows, settings.seed])
    if (found := read_piece(kept, kept.stem)) is not None:
        return [found[0][str(length)] for length in asked]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=usual_dtype(device), trust_remote_code=False)
    model = model.eval().to(device)
    made = {}
    for length, count in asked.items():
        options = {"seed": settings.seed + length, "row": rows[length], "progress": progress, "work": work}
        (made[str(length)],) = generate_windows(model, tokenizer, [OwnText(name, length, count)], **options)
    if why := keep_text(kept, made):
        warnings.warn(f"the text is not kept for later runs of this source: {why}", stacklevel=2)
    else:
        work.discard(PIECES)
    return list(made.values())


def with_own_windows(
    blocks: TokenBlocks,
    converted: Path,
    settings: Settings,
    device: torch.device,
    *,
    digests: Mapping[str, str],
    work: WorkFolder,
    progress: bool,
) -> TokenBlocks:
    """``blocks`` of which the converted model has written the first, ``settings.own_share`` of the tokens: it is also
    trained where its own mistakes lead (arXiv 2306.13649). At most half of the short windows are replaced.

    Args:
        converted: its folder.
        digests: SHA-256 of the conversion's files.
    """
    short = blocks.window_lengths[0]
    count = min(round(settings.own_share * len(blocks)), len(blocks.of_length(short)) // 2)
    if not count:
        return blocks
    asked = {short: count * blocks.size // short}
    settings = replace(settings, seed=(settings.seed + 1) % 2**32)  # other documents than the source's
    tokenizer = read_tokenizer(str(converted), "converted")
    (own,) = _written(converted, tokenizer, GENERATED, asked, settings, device, digests, work, progress)
    return replace(blocks, tokens=torch.cat((own.view(count, -1), blocks.tokens[count:])))


def hold_out(blocks: TokenBlocks) -> tuple[TokenBlocks, TokenBlocks]:
    """Blocks to train on, and the last few of each length, which no step sees.

    Raises:
        ValueError: there are not two blocks of any length.
    """
    train: list[int] = []
    held: list[int] = []
    share = min(HELD_OUT_SHARE, MAX_HELD_OUT / blocks.tokens.numel())
    for length in blocks.window_lengths:
        of_length = list(blocks.of_length(length))
        count = max(1, round(len(of_length) * share)) if len(of_length) > 1 else 0
        train += of_length[: len(of_length) - count]
        held += of_length[len(of_length) - count :]
    if not held:
        raise ValueError(
            f"text has {len(blocks)} blocks of {blocks.size} tokens; expected two of a length at least: more tokens, or"
            " a smaller long_length"
        )
    parts = (TokenBlocks(blocks.tokens[part], tuple(blocks.lengths[block] for block in part)) for part in (train, held))
    return tuple(parts)


def describe_text(blocks: TokenBlocks, vocabulary: int) -> dict[str, Any]:
    """Tokens, and the share of different runs of four tokens among all of them; both by window length, too."""
    grams = torch.zeros_like(blocks.tokens[:, : 1 - _GRAM])
    for place in range(_GRAM):  # a hash where a vocabulary's fourth power overflows
        grams = grams * vocabulary + blocks.tokens[:, place : blocks.size + place - _GRAM + 1]
    parts = {length: blocks.of_length(length) for length in blocks.window_lengths}
    return {
        "unique_tokens": blocks.tokens.numel(),
        "tokens_by_window": {length: len(part) * blocks.size for length, part in parts.items()},
        "distinct_4grams": len(grams.unique()) / grams.numel(),
        "distinct_4grams_by_window": {
            length: len(grams[part.start : part.stop].unique()) / (len(part) * grams.shape[1])
            for length, part in parts.items()
        },
    }


@torch.inference_mode()
def source_perplexity(source: torch.nn.Module, blocks: TokenBlocks) -> float:
    """Perplexity of the source on the first windows of each length, at most 32,768 tokens of each."""
    # float32 of grouped heads would keep all scores of a long window on CUDA. Layers that training compiled would be
    # compiled for every number of windows.
    autocast = torch.autocast(source.device.type, torch.bfloat16, enabled=source.device.type == "cuda")
    with torch.compiler.set_stance("force_eager"), autocast:
        return _perplexity(Predictor(source), blocks)


def _perplexity(predictor: Predictor, blocks: TokenBlocks) -> float:
    device, total, count = predictor.model.device, 0.0, 0
    for length in blocks.window_lengths:
        windows = blocks.tokens[blocks.of_length(length).start : blocks.of_length(length).stop].reshape(-1, length)
        for ids in windows[: max(1, _MAX_MEASURED // length)].split(windows_at_once(length)):
            logits, targets = predictor.next_tokens(ids), ids[:, 1:].flatten().to(device)
            for start in range(0, len(targets), 512):
                part = slice(start, start + 512)
                total += torch.nn.functional.cross_entropy(logits(part).float(), targets[part], reduction="sum").item()
            count += len(targets)
    return perplexity(total / count)
