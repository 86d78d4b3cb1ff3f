"""The recipe's stage for the latent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from mha2mla.conversion.stage import Stage
from mha2mla.conversion.value_rules import BOOL, Rule, each_is, int_from, one_of

if TYPE_CHECKING:
    from mha2mla.conversion.latent.rules import LowRankRule

LowRank = Literal["svd-joint", "svd-split", "balanced-pca", "whitened-joint"]
UpProjections = Literal["kv-head", "query-head"]

_RANKS = each_is(int_from(1, 1 << 24))


@dataclass(frozen=True)
class Latent(Stage):
    """How un-rotated keys and values become one latent, and how the rank is shared out among the layers.

    Args:
        rule: ``"svd-joint"``: truncated SVD of the stacked weights [W_K; W_V] (arXiv 2502.14837); ``"svd-split"``: two
            SVDs, the rank divided in proportion to their widths; ``"balanced-pca"``: principal components of keys and
            values on calibration text, both scaled to the same energy (arXiv 2502.07864); ``"whitened-joint"``: errors
            count as scores and outputs do, on what attention makes of the text. Each is a class of ``latent.rules``.
        centered: put the values' mean, as far as the latent loses it, into ``o_proj.bias`` (a value bias goes there
            anyway): an un-rotated key's mean is invisible to softmax. Off: no bias is created, for engines that cannot
            hold one.
        ranks: ``"uniform"``: every layer's is the target's. ``"measured"``: layers get different ranks with the same
            sum, by what each loses when it alone is converted (``latent.ranks``). Or the ranks, one per layer.
        up_projections: whether W_UK and W_UV are given per ``"kv-head"``, as the source's maps are, or per
            ``"query-head"``, as DeepSeek's: the same cache and the same decode kernel, more weights and longer
            prefills, and gradient steps lose less with them. Without gradient steps the same model.
    """

    prefix: ClassVar[str] = "latent."
    rules: ClassVar[Mapping[str, Rule]] = {
        "rule": one_of(*get_args(LowRank)),
        "centered": BOOL,
        "ranks": Rule(
            "'uniform', 'measured' or a list of ints from 1 on",
            lambda value: value in ("uniform", "measured") or (bool(value) and _RANKS.allows(value)),
        ),
        "up_projections": one_of(*get_args(UpProjections)),
    }

    rule: LowRank = "whitened-joint"
    centered: bool = True
    ranks: list[int] | Literal["uniform", "measured"] = "uniform"
    up_projections: UpProjections = "kv-head"

    @property
    def low_rank(self) -> LowRankRule:
        from mha2mla.conversion.latent.rules import LOW_RANKS  # with torch, which takes longer than a --help

        return LOW_RANKS[self.rule]
