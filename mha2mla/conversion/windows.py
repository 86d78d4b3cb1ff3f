"""The token windows that a conversion is calibrated on and compared by, from texts by name or from the caller."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from mha2mla.conversion.blocks import TokenBlocks
from mha2mla.conversion.generated import generator_of
from mha2mla.conversion.source import CheckpointError
from mha2mla.texts import load_text, mixed_windows, token_windows

Windows = torch.Tensor | Sequence[torch.Tensor]  # int64 [windows, length], or one of these per length


def calibration_windows(
    folder: Path,
    text: str | Windows,
    *,
    lengths: Sequence[int],
    tokens: int,
    vocab_size: int,
    seed: int,
    device: torch.device,
    progress: bool = False,
) -> TokenBlocks:
    """Windows of every length, the same number of tokens of each, drawn from ``text`` or written by the source.

    Args:
        folder: of the source: its tokenizer, and its weights for ``"generated"`` text.
        text: what ``texts.mixed_windows`` takes; or windows, which are taken as they are.
        lengths: of the windows; they divide the longest.
        tokens: in all, but at least one block for every length.
        seed: of the draw.
        device: what the source writes on.

    Raises:
        CheckpointError: the source has no usable tokenizer.
        ValueError: an unusable text or window, by name.
    """
    if not isinstance(text, str):
        return TokenBlocks.of([_checked(part, "calibration", vocab_size) for part in _listed(text)])
    tokenizer, longest = tokenizer_of(folder, "calibration"), max(lengths)
    generate = generator_of(folder, tokenizer, seed=seed, device=device, progress=progress)
    blocks = max(1, tokens // len(lengths) // longest)
    parts = []
    for length in lengths:
        per_block = longest // length
        windows = _named("calibration", text, mixed_windows, tokenizer, text, length, blocks * per_block, seed=seed,
                         generate=generate)  # fmt: skip
        whole = len(windows) // per_block * per_block
        if not whole:
            raise ValueError(
                f"calibration {text!r} has {windows.numel()} tokens; expected at least {longest}, the longest window"
            )
        parts.append(_checked(windows[:whole], "calibration", vocab_size))
    return TokenBlocks.of(parts)


def evaluation_windows(
    folder: Path, text: str | torch.Tensor, *, length: int, tokens: int, vocab_size: int
) -> torch.Tensor:
    """The first windows of ``text``, int64 [windows, length]: at most so many ``tokens``, but at least one window.

    Raises:
        CheckpointError, ValueError: as :func:`calibration_windows`.
    """
    if not isinstance(text, str):
        return _checked(text, "evaluation", vocab_size)
    tokenizer, count = tokenizer_of(folder, "evaluation"), max(1, tokens // length)
    windows = _named("evaluation", text, lambda: token_windows(tokenizer, load_text(text), length, count))
    return _checked(windows, "evaluation", vocab_size)


def tokenizer_of(folder: Path, name: str) -> Any:
    """The source's own tokenizer.

    Raises:
        CheckpointError: there is none that can be used, so that ``name`` must be token windows.
    """
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"source {str(folder)!r} has no usable tokenizer, so {name} must be token windows: {error}"
        ) from error


def _named(name: str, text: str, make: Any, *args: Any, **keys: Any) -> torch.Tensor:
    try:
        return make(*args, **keys)
    except ValueError as error:
        raise ValueError(f"{name} {text!r}: {error}") from error


def _listed(windows: Windows) -> list[torch.Tensor]:
    return [windows] if isinstance(windows, torch.Tensor) else list(windows)


def _checked(windows: torch.Tensor, name: str, vocab_size: int) -> torch.Tensor:
    """On the CPU.

    Raises:
        ValueError: no int64 [windows, length], or tokens that the model has not.
    """
    if windows.dtype != torch.int64 or windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ValueError(
            f"{name} is {windows.dtype} {tuple(windows.shape)}; expected int64 [windows >= 1, length >= 2]"
        )
    least, most = int(windows.min()), int(windows.max())
    if least < 0 or most >= vocab_size:
        wrong = least if least < 0 else most
        raise ValueError(f"{name} has token {wrong}; expected tokens from 0 to below vocab_size={vocab_size}")
    return windows.cpu()
