"""From a kernel choice to TileLang functions: the one room that knows every kernel file and its pass settings."""

from __future__ import annotations

from mha2mla.kernels.mla_decode.combine import make_combine
from mha2mla.kernels.mla_decode.heads_on_m import make_heads_on_m
from mha2mla.kernels.mla_decode.plan_kernel import make_plan
from mha2mla.kernels.mla_decode.selection import DecodeShape, KernelChoice, rope_blocks
from mha2mla.kernels.mla_decode.swap_ab import make_swap_ab
from mha2mla.kernels.mla_decode.swap_ab_ws import make_swap_ab_ws

MERGES = {4: (512, 128), 16: (128, 128), 64: (128, 512)}  # partials in flight: columns and threads of a block


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


def make_merge(
    shape: DecodeShape, splits: int, *, dependent: bool = True, dtype: str | None = None, on_cpu: bool = False
):
    """The TileLang function that merges the partials of ``shape`` (not compiled).

    ``splits``: one of MERGES, about the number of partials; it decides how much of a row a block takes, so that a
    thread holds 16 numbers.
    ``dependent``: launch it as a programmatic dependent of the decode kernel (sm_90 and newer).
    """
    columns, threads = MERGES[splits]
    return make_combine(
        heads=shape.heads,
        kv_lora_rank=shape.kv_lora_rank,
        dtype=dtype or shape.dtype,
        block_columns=columns,
        block_splits=splits,
        threads=threads,
        dependent=dependent and not on_cpu,
        on_cpu=on_cpu,
    )


def make_planner(*, on_cpu: bool = False):
    """The TileLang function that plans (not compiled); one serves every shape."""
    return make_plan(threads=1 if on_cpu else 256, on_cpu=on_cpu)
