"""From a kernel choice to TileLang functions: the one room that knows every kernel file and its pass settings."""

from __future__ import annotations

from mha2mla.kernels.mla_decode.fp8 import make_mla_decode_fp8
from mha2mla.kernels.mla_decode.fp8_selection import Fp8Choice
from mha2mla.kernels.mla_decode.heads_on_m import make_heads_on_m
from mha2mla.kernels.mla_decode.selection import DecodeShape, KernelChoice, rope_blocks
from mha2mla.kernels.mla_decode.swap_ab import make_swap_ab
from mha2mla.kernels.mla_decode.swap_ab_ws import make_swap_ab_ws


def make_split(shape: DecodeShape, choice: KernelChoice, *, dtype: str | None = None, on_cpu: bool = False):
    """The TileLang function of ``choice`` (not compiled); ``dtype`` overrides the shape's, for the CPU target."""
    common = {
        "heads": shape.heads,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "num_rope_heads": shape.num_rope_heads,
        "page_size": shape.page_size,
        "dtype": dtype or shape.dtype,
        "tiling": choice.tiling,
    }
    if choice.kernel == "swap_ab_ws":
        return make_swap_ab_ws(
            **common,
            rope=rope_blocks(choice.tiling, shape.qk_rope_head_dim, choice.variant),
            num_stages=choice.num_stages,
            rope_stages=choice.rope_stages,
            warpgroups=choice.warpgroups,
            ctas_per_sm=choice.ctas_per_sm,
        )
    if choice.kernel == "heads_on_m":
        return make_heads_on_m(
            **common,
            num_stages=choice.num_stages,
            **({} if choice.variant == "plain" else {choice.variant: True}),
        )
    return make_swap_ab(**common, block_tokens=choice.block_tokens, threads=choice.threads, on_cpu=on_cpu)


def make_split_fp8(shape: DecodeShape, choice: Fp8Choice):
    """The TileLang function of ``choice`` (not compiled)."""
    return make_mla_decode_fp8(
        heads=shape.heads,
        kv_lora_rank=shape.kv_lora_rank,
        qk_rope_head_dim=shape.qk_rope_head_dim,
        num_rope_heads=shape.num_rope_heads,
        page_size=shape.page_size,
        dtype=shape.dtype,
        tiling=choice.tiling,
        num_stages=choice.num_stages,
    )
