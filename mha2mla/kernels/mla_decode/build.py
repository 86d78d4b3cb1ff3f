"""From a kernel choice to TileLang functions: the one room that knows every kernel file and its pass settings."""

from __future__ import annotations

from mha2mla.kernels.mla_decode.combine import make_combine
from mha2mla.kernels.mla_decode.selection import DecodeShape, KernelChoice, rope_blocks
from mha2mla.kernels.mla_decode.swap_ab import make_swap_ab
from mha2mla.kernels.mla_decode.swap_ab_ws import make_swap_ab_ws

PASS_CONFIGS = {"tl.enable_fast_math": True, "tl.disable_warp_specialized": True}


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
        rope = rope_blocks(choice.tiling, shape.qk_rope_head_dim)
        return make_swap_ab_ws(**common, rope=rope, num_stages=choice.num_stages, rope_stages=choice.rope_stages)
    return make_swap_ab(**common, block_tokens=choice.block_tokens, threads=choice.threads, on_cpu=on_cpu)


def make_merge(shape: DecodeShape, *, dtype: str | None = None, on_cpu: bool = False):
    """The TileLang function that merges the splits of ``shape`` (not compiled)."""
    return make_combine(heads=shape.heads, kv_lora_rank=shape.kv_lora_rank, dtype=dtype or shape.dtype, on_cpu=on_cpu)
