"""Compiles the decode kernels once per static shape and launches them on torch's current stream."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mha2mla.kernels.compilation import compile_for
from mha2mla.kernels.devices import device_name
from mha2mla.kernels.mla_decode.build import make_split
from mha2mla.kernels.mla_decode.selection import DecodeShape, KernelChoice, select_kernel
from mha2mla.kernels.split_kv.launch import NO_WINDOW, compile_merge, merge_splits
from mha2mla.kernels.split_kv.tuning import BATCHES, batch_bucket


@cache
def compile_choice(shape: DecodeShape, choice: KernelChoice, capability: int):
    """The compiled decode kernel of a choice. One compilation serves every batch, length, page count and plan."""
    return compile_for(make_split(shape, choice), capability)


@cache
def compile_mla_decode(shape: DecodeShape, capability: int, gpu: str | None = None, bucket: int = BATCHES[-1]):
    """The compiled decode kernel that dispatch chooses for a shape and a bucket of batch sizes."""
    return compile_choice(shape, select_kernel(shape, capability, gpu, bucket), capability)


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
        compile_merge(
            shape.heads, shape.kv_lora_rank, shape.dtype, merge_splits(partial_lse.shape[0], batch), capability
        )(splits, partial_out, partial_lse, out, lse)
