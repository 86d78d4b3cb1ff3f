"""The recipe's stage for the rotary part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from mha2mla.conversion.stage import Stage
from mha2mla.conversion.value_rules import Rule, is_number, one_of

if TYPE_CHECKING:
    from mha2mla.conversion.rope.rules import RopeRule

Selection = Literal["high", "low", "uniform", "2-norm", "rotation", "rorope", "rorope-2", "rorope-4"]
LongropeTable = Literal["short", "long"]


@dataclass(frozen=True)
class Rope(Stage):
    """Which rotary pairs of a layer stay rotary, and how much of a budget they get.

    Args:
        selection: the rule. ``"high"`` / ``"low"``: highest / lowest frequencies; ``"uniform"``: evenly spaced;
            ``"2-norm"``: largest |q| · |k| (arXiv 2502.14837); ``"rotation"``: what leaving a pair un-rotated costs, in
            the shared layout over a unitary basis of all heads; ``"rorope"``, ``"rorope-2"``, ``"rorope-4"``: RoRoPE
            with FreqFold (arXiv 2502.07864). Each is a class of ``rope.rules``.
        share: rotary share of a ``cache_ratio``'s budget; None: the layout's own.
        longrope_table: which of longrope's two tables becomes the layer's: ``"short"`` (lengths up to the original
            maximum) or ``"long"``.
    """

    prefix: ClassVar[str] = "rope."
    rules: ClassVar[Mapping[str, Rule]] = {
        "selection": one_of(*get_args(Selection)),
        "share": Rule(
            "null or a number above 0 and less than 1 (the latent needs the rest)",
            lambda value: value is None or (is_number(value) and 0 < value < 1),
        ),
        "longrope_table": one_of(*get_args(LongropeTable)),
    }

    selection: Selection = "rotation"
    share: float | None = None
    longrope_table: LongropeTable = "short"

    @property
    def rule(self) -> RopeRule:
        from mha2mla.conversion.rope.rules import SELECTIONS  # with torch, which takes longer than a --help

        return SELECTIONS[self.selection]
