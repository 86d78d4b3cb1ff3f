"""Calibration text in windows of several lengths, in blocks of equally many tokens: a step costs the same at each.

Activations of the blocks wait between two layers, in memory or in a file without a name.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mha2mla.conversion.families import SourceSpec

SPILL_BYTES = 1 << 30
LENGTHS = (512, 2048, 8192)  # default lengths of windows
Windows = torch.Tensor | Sequence[torch.Tensor]  # int64 [windows, length], or one of these per length


def listed(windows: Windows) -> list[torch.Tensor]:
    """A tensor for each length."""
    return [windows] if isinstance(windows, torch.Tensor) else list(windows)


@dataclass(frozen=True)
class TokenBlocks:
    """Blocks of tokens, each of whole windows of one length; short windows come first.

    Attributes:
        tokens: int64 [blocks, size].
        lengths: window length of every block; divides ``size`` and never falls.
    """

    tokens: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, windows: Windows) -> TokenBlocks:
        """Blocks as large as the longest window.

        Raises:
            ValueError: windows of a length do not fill whole blocks.
        """
        parts = sorted(listed(windows), key=lambda part: part.shape[1])
        size = parts[-1].shape[1]
        for part in parts:
            if size % part.shape[1] or part.numel() % size:
                raise ValueError(
                    f"windows are {part.shape[0]} of length {part.shape[1]}; expected whole blocks of {size} tokens,"
                    " the longest window"
                )
        blocks = [part.reshape(-1, size) for part in parts]
        lengths = [part.shape[1] for part, made in zip(parts, blocks, strict=True) for _ in made]
        return cls(torch.cat(blocks), tuple(lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    @property
    def window_lengths(self) -> tuple[int, ...]:
        """The different lengths, the shortest first."""
        return tuple(dict.fromkeys(self.lengths))

    def of_length(self, length: int) -> range:
        """Numbers of the blocks of one length."""
        first = self.lengths.index(length)
        return range(first, first + self.lengths.count(length))

    def of_lengths(self, lengths: Sequence[int]) -> TokenBlocks:
        """The blocks of windows of these lengths."""
        kept = [block for block, length in enumerate(self.lengths) if length in lengths]
        return TokenBlocks(self.tokens[kept], tuple(self.lengths[block] for block in kept))

    def batches(self, tokens: int) -> Iterator[slice]:
        """Neighbouring blocks of one length, at most so many ``tokens`` and at least one block at a time."""
        step = max(1, tokens // self.size)
        for length in self.window_lengths:
            blocks = self.of_length(length)
            for start in range(blocks.start, blocks.stop, step):
                yield slice(start, min(start + step, blocks.stop))

    def spread(self, tokens: int) -> dict[int, torch.Tensor]:
        """Window length -> numbers of blocks with the same share of at least so many ``tokens``, where there are more:
        evenly over the blocks of that length."""
        share = tokens / len(self.window_lengths)
        chosen = {}
        for length in self.window_lengths:
            blocks = self.of_length(length)
            chosen[length] = torch.tensor(blocks[:: max(1, int(len(blocks) * self.size // share))])
        return chosen

    def divided(self, fitted: int, judged: int) -> tuple[TokenBlocks, TokenBlocks]:
        """About so many tokens to fit on, and others to judge by where a length has more than one block."""
        count = len(self.window_lengths)
        of_fit, of_judgement = (max(1, tokens // count // self.size) for tokens in (fitted, judged))
        fit: list[int] = []
        judge: list[int] = []
        for length in self.window_lengths:
            blocks = self.of_length(length)
            chosen = blocks[:: max(1, len(blocks) // (of_fit + of_judgement))][: of_fit + of_judgement]
            held = min(of_judgement, max(1, len(chosen) // 4))
            fit += chosen[held:] if len(chosen) > 1 else chosen
            judge += chosen[:held]
        parts = (TokenBlocks(self.tokens[part], tuple(self.lengths[block] for block in part)) for part in (fit, judge))
        return tuple(parts)

    def shortened(self, tokens: int) -> TokenBlocks:
        """These windows, or where they are more about ``tokens`` of them, equally many of each length. Long windows of
        which not one fits are left out, and lengths that do not divide the longest that stays; of the shortest there is
        always one."""
        if self.tokens.numel() <= tokens:
            return self
        lengths = self.window_lengths
        fit = [lengths[:count] for count in range(1, len(lengths) + 1) if count * lengths[count - 1] <= tokens]
        kept = fit[-1] if fit else lengths[:1]
        kept = tuple(length for length in kept if kept[-1] % length == 0)
        size = max(1, tokens // len(kept) // kept[-1]) * kept[-1]
        chosen = [self.tokens[list(self.of_length(length))].flatten()[:size] for length in kept]
        return TokenBlocks.of([part.view(-1, length) for part, length in zip(chosen, kept, strict=True)])


def default_lengths(context: int | None) -> tuple[int, ...]:
    """:data:`LENGTHS` as far as a model's context reaches, and the longest length that it does reach.

    Args:
        context: ``max_position_embeddings``; None where a model has no limit.
    """
    longest = min(LENGTHS[-1], context or LENGTHS[-1])
    shorter = [length for length in LENGTHS if 2 * length <= longest]
    if shorter:  # they divide it
        longest -= longest % shorter[-1]
    return (*shorter, longest)


def calibration_lengths(spec: SourceSpec, asked: int | Sequence[int] | str, context: int | None) -> tuple[int, ...]:
    """Lengths of the calibration windows, the shortest first.

    Raises:
        ValueError: a length at which the source rotates by another table.
    """
    if asked != "auto":
        lengths = tuple(sorted({asked} if isinstance(asked, int) else set(asked)))
        for length in lengths:
            check_length(spec, length, f"calibration.lengths is {asked}")
        return lengths
    least, most = spec.table_lengths
    limits = [limit for limit in (context, most) if limit is not None]
    lengths = default_lengths(min(limits, default=None))
    return tuple(length for length in lengths if length >= least) or (nearest_length(spec, lengths[-1]),)


def nearest_length(spec: SourceSpec, length: int) -> int:
    """The window length next to ``length`` at which the source uses the rotary table of ``spec``."""
    least, most = spec.table_lengths
    return max(least, length if most is None else min(length, most))


def check_length(spec: SourceSpec, length: int, said: str) -> None:
    """Refuses windows for which the source uses longrope's other table.

    Args:
        said: beginning of the message, such as "calibration.lengths is 512".

    Raises:
        ValueError: ``length`` is none of ``spec.table_lengths``.
    """
    near = nearest_length(spec, length)
    if length == near:
        return
    bound, other = ("at least", "short") if length < near else ("at most", "long")
    raise ValueError(f"{said}; expected {bound} {near}: the source uses its {other} table there ({spec.rope_note})")


def calibrated_length(spec: SourceSpec, lengths: Iterable[int]) -> int | None:
    """The longest sequence that a conversion was made for; None where nothing bounds it.

    Args:
        lengths: of the windows whose statistics entered the weights; none for an exact conversion.
    """
    bounds = [max(lengths, default=None), spec.table_lengths[1]]
    return min((bound for bound in bounds if bound is not None), default=None)


def device_for_activations(device: torch.device, size: int) -> torch.device:
    """Device for ``size`` bytes of activations: the accelerator if they fit half of its unused memory, else the CPU.
    Call it once for all stores that exist together, since each of them uses memory."""
    if device.type != "cuda":
        return torch.device("cpu")
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    fits = size <= (torch.cuda.mem_get_info(device)[0] + unused) // 2
    return device if fits else torch.device("cpu")


class ActivationStore:
    """Hidden states of all tokens at one layer boundary: in memory, or in a mapped file when larger than a limit.

    What is read comes as windows of the length of its blocks.

    Args:
        blocks: tokens, and how they are cut into windows.
        dtype: of the activations (bfloat16 is stored as its bits).
        folder: whose disk the file goes to when one is needed; it has no name there.
        spill_bytes: larger stores go to disk, unless their memory is an accelerator's.
        device: where the memory is; files are read through the CPU.

    Raises:
        OSError: the disk has no room for the file.
    """

    def __init__(
        self,
        blocks: TokenBlocks,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        folder: Path,
        spill_bytes: int = SPILL_BYTES,
        device: torch.device | str = "cpu",
    ) -> None:
        self.blocks = blocks
        shape = (*blocks.tokens.shape, hidden_size)
        size = blocks.tokens.numel() * hidden_size * dtype.itemsize
        if size <= spill_bytes or torch.device(device).type != "cpu":
            self._data = torch.empty(shape, dtype=dtype, device=device)
        else:
            self._data = _on_disk(folder, size).view(dtype).view(shape)

    def __len__(self) -> int:
        return self._data.shape[0]

    def read(self, blocks: slice, device: torch.device) -> torch.Tensor:
        """Neighbouring blocks of one length as a tensor of its own, [windows, length, hidden]."""
        data = self._data[blocks].to(device, copy=True)
        return data.view(-1, self.blocks.lengths[blocks.start], data.shape[-1])

    def tokens(self, block: int, tokens: slice, device: torch.device) -> torch.Tensor:
        """Neighbouring tokens of one block, [tokens, hidden]."""
        return self._data[block, tokens].to(device)

    def gather(self, blocks: torch.Tensor, device: torch.device, length: int) -> torch.Tensor:
        """Blocks of one ``length`` by their numbers, int64 [n]: [windows, length, hidden]."""
        found = self._data.index_select(0, blocks.to(self._data.device)).to(device)
        return found.view(-1, length, found.shape[-1])

    def write(self, blocks: slice, values: torch.Tensor) -> None:
        self._data[blocks] = values.to(self._data.device).reshape(self._data[blocks].shape)

    def close(self) -> None:
        """Frees the memory or the room on disk."""
        self._data = torch.empty(0, 0, 0)


def _on_disk(folder: Path, size: int) -> torch.Tensor:
    """uint8 [size] mapped from a file without a name, so that no other run finds it and no killed one leaves it."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # A full disk shows here, and not as a signal when a page is touched.
            os.posix_fallocate(file.fileno(), 0, size)
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    except OSError as error:
        error.filename = str(folder / "activations")
        raise
