"""Cache of a converted layer: layouts, and the rule from a share of the source's cache to a geometry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from mha2mla.conversion.stages import Check, Stage, int_from, is_int, one_of, positive
from mha2mla.geometry import CODE_BLOCK, LATENT_BITS, MLAGeometry, coded_width

if TYPE_CHECKING:
    from mha2mla.conversion.families import SourceSpec

LayoutName = Literal["per-group", "shared", "latent"]
DEFAULT_CACHE_RATIO = 0.5
DEFAULT_LAYOUT: LayoutName = "latent"  # taken where recipes and presets name none, and so by "auto"
# Keys wider than this have no fused attention: not torch's, whose gradients then keep every score of a long window, not
# FlashAttention's, and no prefill kernel of ours.
FUSED_WIDTH = 256
GRANULE = 8  # the kernels take latent and rotary widths in multiples of 8
WIDEST_LATENT = 1024  # that the decode kernels read
WIDEST_ROTARY = 128  # that they compute from the latent
# Over 1,024 elements they compute 64 rotary dims in 185 µs and 128 in 2,096 (docs/notes/decode.md): wider latents than
# this get no more than 64.
WIDEST_LATENT_OF_WIDE_ROTARY, NARROW_ROTARY = 768, 64
WIDEST_CODES_OF_WIDE_ROTARY = 512  # the same of latents that are integer codes: wider ones have no kernel
WIDTHS = ("cache_ratio", "kv_lora_rank", "qk_rope_head_dim")  # together one target: one of them replaces all of another
_WIDTH = 1 << 24


@dataclass(frozen=True)
class Layout:
    """Form in which rotary keys are cached.

    Attributes:
        rope_share: of a budget that is rotary, by default: the best of those tried.
        per_group: one rotary key per kv head (G = h_kv; MHA gives G = H), every head the same number of pairs; else one
            for all heads (G = 1), and un-rotated queries keep all their dims.
        has_rope_cache: rotary keys are cached; else the one key is computed from the latent, which is all of a budget.
    """

    rope_share: float
    per_group: bool = False
    has_rope_cache: bool = True

    def nope_width(self, head_dim: int, rope: int) -> int:
        """Width of a head's un-rotated queries, where some pairs do not rotate."""
        return head_dim - rope if self.per_group else head_dim

    def share_of(self, budget: int, head_dim: int) -> float:
        """The layout's own share of a budget, less where queries and keys would be wider than :data:`FUSED_WIDTH`."""
        room = FUSED_WIDTH - self.nope_width(head_dim, 0)
        return self.rope_share if self.per_group or room < GRANULE else min(self.rope_share, room / max(budget, 1))

    def free_width(self, key_width: int, head_dim: int, rank: int, has_codes: bool) -> int:
        """d_r where it costs no cache: the widest that fast kernels serve at d_c = ``rank``, with keys of at most
        :data:`FUSED_WIDTH` where there is room for a rotary part at all."""
        room = FUSED_WIDTH - head_dim
        widest = NARROW_ROTARY if _widest_of_wide_rotary(has_codes) < rank <= WIDEST_LATENT else WIDEST_ROTARY
        widest = min(widest, room // GRANULE * GRANULE) if room >= GRANULE else widest
        return min(widest, key_width // 2 * 2)


LAYOUTS: Mapping[LayoutName, Layout] = MappingProxyType(
    {
        "per-group": Layout(rope_share=0.25, per_group=True),
        "shared": Layout(rope_share=0.21),
        "latent": Layout(rope_share=0.0, has_rope_cache=False),
    }
)


def _widest_of_wide_rotary(has_codes: bool) -> int:
    return WIDEST_CODES_OF_WIDE_ROTARY if has_codes else WIDEST_LATENT_OF_WIDE_ROTARY


def fast_rank(geometry: MLAGeometry) -> int:
    """d_c up to which a layer with these rotary keys is decoded by a fast kernel."""
    is_wide = not geometry.has_rope_cache and geometry.qk_rope_head_dim > NARROW_ROTARY
    return _widest_of_wide_rotary(geometry.has_codes) if is_wide else WIDEST_LATENT


@dataclass(frozen=True)
class Target(Stage):
    """Elements per token that a layer may cache, and the layout of its rotary keys.

    Either ``cache_ratio`` or the pair ``kv_lora_rank`` and ``qk_rope_head_dim``; with neither, ``cache_ratio`` is 0.5.

    Args:
        layout: ``"per-group"`` keeps one rotary key per kv head, ``"shared"`` one for all heads (DeepSeek's layout);
            ``"latent"`` caches none: one for all heads is computed from the latent when it is read.
        cache_ratio: cached bytes of a token after / before, both with elements of 16 bits but where ``latent.bits``
            says fewer, in (0, 1]; exceeded by given ``latent.ranks`` alone. 1.0 is full rank: every pair stays
            rotary, the latent holds the values, the model is the source to rounding. Otherwise ``rope.share`` of the
            budget is rotary, rounded to the nearest multiple of 8 per rope head (at least 8), and what is left, rounded
            down to a multiple of 8, is latent. In the latent layout all of it is, and 1.0 holds keys and values;
            ``qk_rope_head_dim`` is as wide as kernels and fused attention take.
        kv_lora_rank: latent width d_c; needs ``qk_rope_head_dim``.
        qk_rope_head_dim: rotary width d_r of a rope head, even; needs ``kv_lora_rank``.
    """

    prefix: ClassVar[str] = ""
    checks: ClassVar[Mapping[str, Check]] = {
        "layout": one_of(*LAYOUTS),
        "cache_ratio": positive(1).or_none(),
        "kv_lora_rank": int_from(1, _WIDTH).or_none(),
        "qk_rope_head_dim": Check(
            "an even int from 2 on (RoPE turns pairs), or null",
            lambda value: value is None or (is_int(value) and 2 <= value <= _WIDTH and value % 2 == 0),
        ),
    }

    layout: LayoutName = DEFAULT_LAYOUT
    cache_ratio: float | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.kv_lora_rank is None) != (self.qk_rope_head_dim is None):
            given, missing = ("kv_lora_rank", "qk_rope_head_dim")[:: 1 if self.kv_lora_rank is not None else -1]
            raise ValueError(f"{given} is {getattr(self, given)} but {missing} is not given; expected both or neither")
        if self.kv_lora_rank is not None and self.cache_ratio is not None:
            raise ValueError(
                f"cache_ratio is {self.cache_ratio!r} beside kv_lora_rank={self.kv_lora_rank}; expected one of them"
            )
        if self.kv_lora_rank is None and self.cache_ratio is None:  # so that records say what was meant
            object.__setattr__(self, "cache_ratio", DEFAULT_CACHE_RATIO)

    def geometry(
        self, spec: SourceSpec, rope_share: float | None, *, per_query_head: bool, bits: int | None = 16
    ) -> MLAGeometry:
        """The geometry of a converted layer of ``spec``.

        Args:
            rope_share: of a ``cache_ratio``'s budget; None: the layout's own.
            per_query_head: whether W_UK and W_UV are given per query head.
            bits: None where layers have their own: 16 in what is returned, with rotary keys for the widest latent.

        Raises:
            ValueError: the target does not fit the source (more pairs or more rank than it has, or a budget too small);
                or codes are asked for in a layout that caches rotary keys.
        """
        layout = LAYOUTS[self.layout]
        kv_heads, head_dim = spec.num_key_value_heads, spec.head_dim
        groups = kv_heads if layout.per_group else 1
        key_width = kv_heads * head_dim
        all_pairs = key_width // groups
        if bits != 16 and layout.has_rope_cache:
            raise ValueError(f"latent.bits is {bits} in the {self.layout} layout; expected 16, or layout: latent")
        rope, rank = self._widths(key_width, head_dim, groups, rope_share, bits)
        if rope > all_pairs:
            raise ValueError(
                f"qk_rope_head_dim is {rope}; expected at most {all_pairs}, all the pairs that {kv_heads} kv heads"
                f" of width {head_dim} have in the {self.layout} layout"
            )
        full = 2 * key_width - (rope * groups if layout.has_rope_cache else 0)
        if rank > full:
            raise ValueError(
                f"kv_lora_rank is {rank}; expected at most {full}, which with {2 * key_width - full} rotary elements is"
                " already everything that the source caches"
            )
        return MLAGeometry(
            num_attention_heads=spec.num_attention_heads,
            num_rope_heads=groups,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            qk_nope_head_dim=0 if rope == all_pairs else layout.nope_width(head_dim, rope),
            v_head_dim=head_dim,
            num_key_value_heads=kv_heads,
            num_up_projection_heads=spec.num_attention_heads if per_query_head else kv_heads,
            rope_from_latent=not layout.has_rope_cache,
            latent_bits=bits or 16,
        )

    def _widths(
        self, key_width: int, head_dim: int, groups: int, rope_share: float | None, bits: int | None
    ) -> tuple[int, int]:
        """d_r and d_c."""
        if self.kv_lora_rank is not None:
            return self.qk_rope_head_dim, self.kv_lora_rank
        all_pairs, layout = key_width // groups, LAYOUTS[self.layout]
        budget = math.floor(self.cache_ratio * 2 * key_width + 1e-9)
        granule, coded = GRANULE, coded_width(2 * budget, bits or min(LATENT_BITS))
        if bits is not None and bits < 16:  # elements that the budget's bytes hold in codes
            granule, budget = CODE_BLOCK, coded
        if self.cache_ratio == 1.0 or budget >= 2 * key_width:
            return all_pairs, key_width if layout.has_rope_cache else 2 * key_width
        if not layout.has_rope_cache:
            rank = self._rank(budget, 0, "", granule)
            widest = rank if bits else max(rank, min(coded, WIDEST_LATENT, 2 * key_width))
            return layout.free_width(key_width, head_dim, widest, bits != 16), rank
        if rope_share is None:
            rope_share = layout.share_of(budget, head_dim)
        rope = max(GRANULE, GRANULE * math.floor(rope_share * budget / groups / GRANULE + 0.5))
        rope = min(rope, all_pairs // 2 * 2)
        return rope, self._rank(budget, rope * groups, f" beside the smallest rotary part ({groups} x {rope})", granule)

    def _rank(self, budget: int, rotary: int, what: str, granule: int) -> int:
        """d_c of a budget less ``rotary`` elements, which ``what`` names in an error."""
        rank = (budget - rotary) // granule * granule
        if rank < granule:
            smaller = {"per-group": ", or the shared or latent layout", "shared": ", or the latent layout"}
            others = smaller.get(self.layout, "")
            raise ValueError(
                f"cache_ratio is {self.cache_ratio}, {budget} elements per token and layer, which leaves"
                f" {budget - rotary} for the latent{what}; expected {granule} or more: use a larger ratio{others}"
            )
        return rank
