"""The token windows that a conversion is calibrated on and compared by, from texts by name or from the caller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mha2mla.conversion.calibration.blocks import TokenBlocks, Windows, listed
from mha2mla.conversion.calibration.generated_text import write_windows
from mha2mla.conversion.calibration.texts import (
    CHARACTERS_PER_TOKEN,
    OwnText,
    in_turns,
    load_text,
    text_shares,
    token_windows,
)
from mha2mla.conversion.destination import DestinationError, ResumeError
from mha2mla.conversion.extension import CalibrationSource
from mha2mla.conversion.resume import WorkFolder
from mha2mla.conversion.source.opening import OpenedFolder, Source, read_tokenizer
from mha2mla.terminal import Span


def calibration_windows(
    source: Source,
    text: str | CalibrationSource | Windows,
    *,
    lengths: Sequence[int],
    tokens: int,
    seed: int,
    device: torch.device,
    progress: bool | Span = False,
    work: WorkFolder | None = None,
) -> TokenBlocks:
    """Windows of every length, the same number of tokens of each, drawn from ``text`` or written by the source.

    Args:
        source: whose tokenizer cuts the text, and which writes generated text.
        text: what ``texts.text_shares`` takes, or an object that gives windows; or windows, taken as they are.
        lengths: of the windows; they divide the longest.
        tokens: in all, but at least one block for every length.
        work: keeps what the source has written so far.

    Raises:
        CheckpointError: the source has no usable tokenizer.
        ValueError: an unusable text or window, by name.
    """
    if not isinstance(text, str | CalibrationSource):
        return TokenBlocks.of([checked_windows(part, "calibration", source) for part in listed(text)])
    tokenizer, longest = read_tokenizer(str(source.folder), "source"), max(lengths)
    blocks = max(1, tokens // len(lengths) // longest)
    shares, parts = [], []
    with named_in_errors("calibration", text):
        for length in lengths:
            count = blocks * (longest // length)
            if isinstance(text, CalibrationSource):
                given = checked_windows(text.windows(tokenizer, length, count, seed=seed), "windows", source)
                if given.shape[1] != length or len(given) > count:
                    raise ValueError(
                        f"windows gave {len(given)} of length {given.shape[1]}; expected at most {count} of {length}"
                    )
                shares.append([given])
            else:
                shares.append(text_shares(tokenizer, text, length, count, seed=seed))
        wanted = [each for share in shares for each in share if isinstance(each, OwnText)]
        keys = {"seed": seed, "device": device, "progress": progress, "work": work}
        written = iter(write_windows(source.folder, tokenizer, wanted, **keys))
    for length, share in zip(lengths, shares, strict=True):
        windows = in_turns([next(written) if isinstance(each, OwnText) else each for each in share])
        whole = len(windows) // (longest // length) * (longest // length)
        if not whole:
            raise ValueError(
                f"calibration {text!r} has {windows.numel()} tokens; expected at least {longest}, the longest window"
            )
        parts.append(checked_windows(windows[:whole], "calibration", source))
    return TokenBlocks.of(parts)


def evaluation_windows(source: OpenedFolder, text: str | torch.Tensor, *, length: int, tokens: int) -> torch.Tensor:
    """The first windows of ``text``, int64 [windows, length]: at most so many ``tokens``, but at least one window.

    Raises:
        CheckpointError, ValueError: as :func:`calibration_windows`.
    """
    if not isinstance(text, str):
        return checked_windows(text, "evaluation", source)
    tokenizer, count = read_tokenizer(str(source.folder), "source"), max(1, tokens // length)
    with named_in_errors("evaluation", text):
        windows = token_windows(tokenizer, load_text(text, CHARACTERS_PER_TOKEN * length * count), length, count)
    return checked_windows(windows, "evaluation", source)


@contextmanager
def named_in_errors(name: str, text: Any) -> Iterator[None]:
    """Names a text in errors, but for those of the folder that what is written of it is kept in."""
    try:
        yield
    except (DestinationError, ResumeError):
        raise
    except ValueError as error:
        raise ValueError(f"{name} {text!r}: {error}") from error


def checked_windows(windows: torch.Tensor, name: str, source: OpenedFolder) -> torch.Tensor:
    """``windows`` on the CPU.

    Raises:
        ValueError: no int64 [windows, length], or tokens that the model has not.
    """
    if not isinstance(windows, torch.Tensor):
        raise ValueError(f"{name} has {windows!r:.80}; expected tensors int64 [windows >= 1, length >= 2]")
    if windows.dtype != torch.int64 or windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ValueError(
            f"{name} is {windows.dtype} {tuple(windows.shape)}; expected int64 [windows >= 1, length >= 2]"
        )
    vocab_size, lowest, highest = source.config.vocab_size, int(windows.min()), int(windows.max())
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{name} has token {lowest if lowest < 0 else highest}; expected tokens from 0, below"
            f" vocab_size={vocab_size} of {source.config.model_type}"
        )
    return windows.cpu()
