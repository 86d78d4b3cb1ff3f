"""Compiles the varlen attention kernels once per static shape, and launches them on torch's current stream."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mha2mla.kernels.attention_varlen.tiled import make_tiled
from mha2mla.kernels.attention_varlen.tiling import VarlenShape, hopper_tiling, portable_tiling
from mha2mla.kernels.attention_varlen.warp_specialised import make_warp_specialised
from mha2mla.kernels.compilation import SMALL_PASS_CONFIGS, compile_for
from mha2mla.kernels.devices import capability, dtype_name

# Bytes of keys and values that are worked on at a time. An H200 caches 50 MB, but a line that both halves of its
# multiprocessors read lies in both halves of the cache, and a section's first blocks run beside the last one's last.
L2_SHARE = 16 * 2**20
LONGEST = 2**30  # window or sinks as kernels take them: longer than a sequence, and no sum with a token overflows


@cache
def compile_attention_varlen(major_minor: int, shape: VarlenShape):
    """The compiled kernel and the query rows of its tiles. One compilation serves all batches, lengths and strides."""
    if major_minor == 90:
        tiling = hopper_tiling(shape)
        return compile_for(make_warp_specialised(shape, tiling), major_minor, SMALL_PASS_CONFIGS), tiling.block_rows
    rows, keys = portable_tiling(shape)
    function = make_tiled(shape, block_rows=rows, block_keys=keys)
    return compile_for(function, major_minor, SMALL_PASS_CONFIGS), rows


def launch_attention_varlen(
    q: Tensor,
    q_pe: Tensor | None,
    k: Tensor,
    k_pe: Tensor | None,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window: int,
    sinks: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Run the kernel; arguments as in :func:`mha2mla.kernels.attention_varlen`, a second part of q and k or None, and a
    window of -1 is none."""
    batch = cu_seqlens_q.shape[0] - 1
    if out.numel() == 0 or batch == 0 or max_seqlen_q == 0:
        return
    if k.shape[0] == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    parts = (k,) if k_pe is None else (k, k_pe)
    widths, key_heads = tuple([part.shape[2] for part in parts]), tuple([part.shape[1] for part in parts])
    shape = VarlenShape(q.shape[1], widths, key_heads, v.shape[1], v.shape[2], causal, dtype_name(v.dtype), window >= 0)
    with torch.cuda.device(out.device):
        kernel, rows = compile_attention_varlen(capability(out.device), shape)
        kernel(
            q, q if q_pe is None else q_pe, k, k if k_pe is None else k_pe, v, cu_seqlens_q.contiguous(),
            cu_seqlens_k.contiguous(), out, lse, softmax_scale, -(-max_seqlen_q // rows),
            heads_at_a_time(shape, k, batch), min(window, LONGEST), min(sinks, LONGEST),
        )  # fmt: skip


def heads_at_a_time(shape: VarlenShape, k: Tensor, batch: int) -> int:
    """Query heads whose keys and values take about ``L2_SHARE`` together, whole groups of them."""
    tokens = -(-k.shape[0] // batch)  # of a sequence, on average: lengths are on the device
    group = shape.heads // shape.value_heads
    parts = zip(shape.widths, shape.key_heads, strict=True)  # one that groups share counts in part for each
    width = sum(width * heads / shape.value_heads for width, heads in parts) + shape.v_head_dim
    return max(1, round(L2_SHARE / max(1.0, tokens * width * k.element_size()))) * group
