"""Compiles the decode kernels once per static shape and launches them on torch's current stream."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mha2mla.kernels.compilation import SMALL_PASS_CONFIGS, compile_for
from mha2mla.kernels.devices import capability as capability_of
from mha2mla.kernels.devices import device_name
from mha2mla.kernels.mla_decode.build import MERGES, make_merge, make_planner, make_split
from mha2mla.kernels.mla_decode.selection import DecodeShape, KernelChoice, select_kernel
from mha2mla.kernels.mla_decode.tuning import BATCHES, batch_bucket

NO_WINDOW = 2**30  # longer than any sequence


@cache
def compile_choice(shape: DecodeShape, choice: KernelChoice, capability: int):
    """The compiled decode kernel of a choice. One compilation serves every batch, length, page count and plan."""
    return compile_for(make_split(shape, choice), capability)


@cache
def compile_merge(shape: DecodeShape, splits: int, capability: int):
    """The compiled combine kernel for about ``splits`` partials a sequence."""
    return compile_for(make_merge(shape, splits, dependent=capability >= 90), capability, SMALL_PASS_CONFIGS)


def merge_splits(num_ctas: int, batch: int) -> int:
    """Which combine kernel: by the partials a sequence has if all are equally long."""
    return next((splits for splits in MERGES if num_ctas // batch <= splits), max(MERGES))


@cache
def compile_planner(capability: int):
    """The compiled planner, one for all shapes."""
    return compile_for(make_planner(), capability, SMALL_PASS_CONFIGS)


@cache
def compile_mla_decode(shape: DecodeShape, capability: int, gpu: str | None = None, bucket: int = BATCHES[-1]):
    """The compiled decode kernel that dispatch chooses for a shape and a bucket of batch sizes."""
    return compile_choice(shape, select_kernel(shape, capability, gpu, bucket), capability)


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


def launch_mla_decode(
    shape: DecodeShape,
    capability: int,
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
    window: int,
    sinks: int,
    schedule: Tensor,
    splits: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Run decode and combine kernel. Shapes as in :func:`mha2mla.kernels.mla_decode` and ``plan.DecodePlan``.

    Nothing is allocated, nothing synchronises.
    """
    batch, seqlen_q = q_latent.shape[:2]
    if batch == 0 or seqlen_q == 0:
        return
    if block_table.shape[1] == 0 or latent_cache.shape[0] == 0:  # no page to point a tensor map at
        out.zero_()
        lse.fill_(-torch.inf)
        return
    device = q_latent.device
    with torch.cuda.device(device):
        compile_mla_decode(shape, capability, device_name(device), batch_bucket(batch))(
            q_latent,
            q_pe,
            latent_cache,
            rope_cache.flatten(2),
            block_table,
            schedule,
            partial_out,
            partial_lse,
            out,
            lse,
            softmax_scale,
            int(causal),
            NO_WINDOW if window < 0 else window,
            sinks,
        )
        compile_merge(shape, merge_splits(partial_lse.shape[0], batch), capability)(
            splits, partial_out, partial_lse, out, lse
        )
