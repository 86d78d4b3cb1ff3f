"""Window lengths that say something about a conversion: at others the source rotates by another table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mha2mla.conversion.calibration.blocks import default_lengths
from mha2mla.conversion.families import SourceSpec


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
