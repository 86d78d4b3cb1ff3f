"""Compiles the decode kernels once per static shape and launches them on torch's current stream."""

from __future__ import annotations

from functools import cache

import tilelang
import torch
from torch import Tensor

from mha2mla.kernels.mla_decode.build import PASS_CONFIGS, make_merge, make_split
from mha2mla.kernels.mla_decode.selection import DecodeShape, select_kernel


@cache
def compile_mla_decode(shape: DecodeShape, capability: int):
    """The compiled split and combine kernels of a shape. One compilation serves every batch, length and page count."""
    choice = select_kernel(shape, capability)
    target = {"kind": "cuda", "arch": f"sm_{capability}a" if capability in (90, 100, 103, 120) else f"sm_{capability}"}
    return tuple(
        tilelang.compile(function, target=target, pass_configs=PASS_CONFIGS)
        for function in (make_split(shape, choice), make_merge(shape))
    )


def launch_mla_decode(
    shape: DecodeShape,
    capability: int,
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    cache_starts: Tensor | None,
    softmax_scale: float,
    causal: bool,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Run both kernels. Shapes as in :func:`mha2mla.kernels.mla_decode`; nothing is allocated, nothing synchronises."""
    batch, seqlen_q = q_latent.shape[:2]
    if batch == 0 or seqlen_q == 0:
        return
    if block_table.shape[1] == 0 or latent_cache.shape[0] == 0:  # no page to point a tensor map at
        out.zero_()
        lse.fill_(-torch.inf)
        return
    split, merge = compile_mla_decode(shape, capability)
    with torch.cuda.device(q_latent.device):
        split(
            q_latent,
            q_pe,
            latent_cache,
            rope_cache.flatten(2),
            block_table,
            cache_seqlens,
            cache_seqlens if cache_starts is None else cache_starts,
            partial_out,
            partial_lse,
            softmax_scale,
            int(causal),
            int(cache_starts is not None),
        )
        merge(partial_out, partial_lse, out, lse)
