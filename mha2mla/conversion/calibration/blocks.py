"""Calibration text in windows of several lengths, in blocks of equally many tokens: a step costs the same at each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mha2mla.conversion.families.spec import SourceSpec

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
        """Tokens of a block."""
        return self.tokens.shape[1]

    @property
    def window_lengths(self) -> tuple[int, ...]:
        """The different lengths, the shortest first."""
        return tuple(dict.fromkeys(self.lengths))

    def of_length(self, length: int) -> range:
        """Numbers of the blocks of one length."""
        first = self.lengths.index(length)
        return range(first, first + self.lengths.count(length))

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

    Args:
        asked: ``Calibration.lengths`` of a recipe.
        context: ``max_position_embeddings`` of the source.

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
    """Refuses windows that the source serves by longrope's other table.

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
