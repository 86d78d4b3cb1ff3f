"""Compiles the GQA decode kernels once per static shape and launches them on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from mha2mla.kernels.compilation import compile_for
from mha2mla.kernels.gqa_decode.portable import make_gqa_decode_portable
from mha2mla.kernels.gqa_decode.selection import GQAChoice, GQAShape, select_kernel
from mha2mla.kernels.gqa_decode.streamed import make_gqa_decode_streamed
from mha2mla.kernels.split_kv.launch import NO_WINDOW, compile_merge, merge_splits


def make_split(shape: GQAShape, choice: GQAChoice, *, dtype: str | None = None, on_cpu: bool = False):
    """The TileLang function of ``choice`` (not compiled); ``dtype`` overrides the shape's, for the CPU target."""
    common = {
        "heads": shape.heads,
        "num_kv_heads": shape.num_kv_heads,
        "qk_head_dim": shape.qk_head_dim,
        "v_head_dim": shape.v_head_dim,
        "page_size": shape.page_size,
        "dtype": dtype or shape.dtype,
        "tiling": choice.tiling,
    }
    if choice.kernel == "streamed":
        return make_gqa_decode_streamed(**common, num_stages=choice.num_stages, ctas_per_sm=choice.ctas_per_sm)
    return make_gqa_decode_portable(**common, block_tokens=choice.block_tokens, on_cpu=on_cpu)


@cache
def compile_choice(shape: GQAShape, choice: GQAChoice, capability: int):
    """The compiled decode kernel of a choice. One compilation serves every batch, length, page count and plan."""
    return compile_for(make_split(shape, choice), capability)


def launch_gqa_decode(
    shape: GQAShape,
    capability: int,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
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
    split: Callable[..., None] | None = None,
) -> None:
    """Run decode and combine kernel. Shapes as in :func:`mha2mla.kernels.gqa_decode` and ``DecodePlan``.

    Nothing is allocated, nothing synchronises. ``split``: a compiled decode kernel in place of the rule's.
    """
    batch, seqlen_q = q.shape[:2]
    if batch == 0 or seqlen_q == 0:
        return
    if block_table.shape[1] == 0 or k_cache.shape[0] == 0:  # no page to point a tensor map at
        out.zero_()
        lse.fill_(-torch.inf)
        return
    with torch.cuda.device(q.device):
        (split or compile_choice(shape, select_kernel(shape, capability), capability))(
            q,
            k_cache,
            v_cache,
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
            shape.heads, shape.v_head_dim, shape.dtype, merge_splits(partial_lse.shape[0], batch), capability
        )(splits, partial_out, partial_lse, out, lse)
