"""Compiles the fp8 decode kernel once per static shape and launches it, and the combine, on torch's current stream."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mha2mla.kernels.compilation import SMALL_PASS_CONFIGS, compile_for
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.mla_decode_fp8.kernel import make_mla_decode_fp8
from mha2mla.kernels.mla_decode_fp8.selection import CAPABILITY, Fp8Choice, select_fp8
from mha2mla.kernels.split_kv.launch import NO_WINDOW, compile_merge, merge_splits

PASS_CONFIGS = SMALL_PASS_CONFIGS


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


@cache
def compile_mla_decode_fp8(shape: DecodeShape):
    """The compiled kernel. One compilation serves every batch, length, page count and plan."""
    return compile_for(make_split_fp8(shape, select_fp8(shape)), CAPABILITY, PASS_CONFIGS)


def launch_mla_decode_fp8(
    shape: DecodeShape,
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    latent_scale: Tensor,
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
    """Run decode and combine kernel. Shapes as in :func:`mha2mla.kernels.mla_decode_fp8` and ``DecodePlan``."""
    batch, seqlen_q = q_latent.shape[:2]
    if batch == 0 or seqlen_q == 0:
        return
    if block_table.shape[1] == 0 or latent_cache.shape[0] == 0:  # no page to point a tensor map at
        out.zero_()
        lse.fill_(-torch.inf)
        return
    with torch.cuda.device(q_latent.device):
        compile_mla_decode_fp8(shape)(
            q_latent, q_pe, latent_cache, latent_scale, rope_cache.flatten(2), block_table, schedule, partial_out,
            partial_lse, out, lse, softmax_scale, int(causal), NO_WINDOW if window < 0 else window, sinks,
        )  # fmt: skip
        compile_merge(
            shape.heads, shape.kv_lora_rank, shape.dtype, merge_splits(partial_lse.shape[0], batch), CAPABILITY
        )(splits, partial_out, partial_lse, out, lse)
