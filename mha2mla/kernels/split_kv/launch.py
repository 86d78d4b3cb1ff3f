"""Compiles and launches what every split-KV op shares: the planner, and the kernel that merges partials."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mha2mla.kernels.compilation import SMALL_PASS_CONFIGS, compile_for
from mha2mla.kernels.devices import capability as capability_of
from mha2mla.kernels.split_kv.combine import make_combine
from mha2mla.kernels.split_kv.plan_kernel import make_plan

NO_WINDOW = 2**30  # longer than any sequence
MERGES = {4: (512, 128), 16: (128, 128), 64: (128, 512)}  # partials in flight: columns and threads of a block


def make_merge(heads: int, width: int, dtype: str, splits: int, *, dependent: bool = True, on_cpu: bool = False):
    """The TileLang function that merges partials of rows of ``width`` numbers (not compiled).

    ``splits``: one of MERGES, about the number of partials; it decides how much of a row a block takes, so that a
    thread holds 16 numbers.
    ``dependent``: launch it as a programmatic dependent of the decode kernel (sm_90 and newer).
    """
    columns, threads = MERGES[splits]
    return make_combine(
        heads=heads,
        kv_lora_rank=width,
        dtype=dtype,
        block_columns=columns,
        block_splits=splits,
        threads=threads,
        dependent=dependent and not on_cpu,
        on_cpu=on_cpu,
    )


@cache
def compile_merge(heads: int, width: int, dtype: str, splits: int, capability: int):
    """The compiled combine kernel for about ``splits`` partials a sequence (one of MERGES)."""
    function = make_merge(heads, width, dtype, splits, dependent=capability >= 90)
    return compile_for(function, capability, SMALL_PASS_CONFIGS)


def merge_splits(num_ctas: int, batch: int) -> int:
    """Which combine kernel: by the partials a sequence has if all are equally long."""
    return next((splits for splits in MERGES if num_ctas // batch <= splits), max(MERGES))


@cache
def compile_planner(capability: int):
    """The compiled planner, one for all shapes."""
    return compile_for(make_plan(), capability, SMALL_PASS_CONFIGS)


def launch_plan(
    cache_seqlens: Tensor,
    cache_starts: Tensor | None,
    capacity: int,
    seqlen_q: int,
    causal: bool,
    window: int,
    sinks: int,
    schedule: Tensor,
    splits: Tensor,
) -> None:
    """Run the planner; arguments as ``plan_kernel`` describes them."""
    batch = splits.shape[0]
    if batch == 0:
        return
    with torch.cuda.device(splits.device):
        compile_planner(capability_of(splits.device))(
            cache_seqlens,
            cache_seqlens if cache_starts is None else cache_starts,
            schedule,
            splits,
            schedule.shape[0] - batch,
            capacity,
            seqlen_q,
            int(causal),
            int(cache_starts is not None),
            window,
            sinks,
        )
