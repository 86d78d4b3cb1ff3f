"""Merging partial attention results on the GPU: a block per row and columns of it, float32 throughout."""

from functools import cache

import tilelang.language as T
import torch
from torch import Tensor

from mha2mla.kernels.devices import capability, dtype_name
from mha2mla.kernels.layouts import aligned
from mha2mla.kernels.machine import SMALL_PASS_CONFIGS, Machine, compile_for
from mha2mla.kernels.split_kv.device import LN2, LOG2E, MASKED


def make_attention_combine(*, v_head_dim: int, partial_dtype: str, dtype: str, on_cpu: bool = False):
    """A TileLang function ``attention_combine``; splits, batch, new tokens and heads are run-time values.

    Args:
        v_head_dim: d_v.
        partial_dtype, dtype: of the partial outputs and of the output.
        on_cpu: compile for TileLang's C target.

    The function's arguments: partial_out [N,B,S_q,H,d_v], partial_lse [N,B,H,S_q] float32, num_splits [B] int32, and
    the outputs out [B,S_q,H,d_v] and lse [B,H,S_q] float32.
    """
    accum = T.float32
    num, batch, seqlen_q, heads = T.dynamic("num"), T.dynamic("batch"), T.dynamic("seqlen_q"), T.dynamic("heads")
    columns = min(512, 1 << (v_head_dim - 1).bit_length())
    column_blocks = -(-v_head_dim // columns)
    threads = 1 if on_cpu else max(32, min(128, columns // 4))
    machine = Machine(on_cpu)

    @T.prim_func
    def attention_combine(
        partial_out: T.Tensor([num, batch, seqlen_q, heads, v_head_dim], partial_dtype),
        partial_lse: T.Tensor([num, batch, heads, seqlen_q], accum),
        num_splits: T.Tensor([batch], T.int32),
        out: T.Tensor([batch, seqlen_q, heads, v_head_dim], dtype),
        lse: T.Tensor([batch, heads, seqlen_q], accum),
    ):
        # All but the batch in one dimension: the others end at 65535, which a prompt's tokens may exceed.
        with T.Kernel(seqlen_q * heads * column_blocks, batch, threads=threads) as (x, b):
            merged = machine.alloc_fragment([columns], accum)
            state = T.alloc_local([3], accum)  # largest lse, sum of weights, weight of a part
            q = T.truncdiv(x, heads * column_blocks)
            h = T.truncmod(x, heads * column_blocks) // column_blocks
            c0 = x % column_blocks * columns
            state[0] = MASKED  # not -inf: (-inf) - (-inf) would be NaN
            state[1] = 0.0
            for c in machine.parallel(columns):
                merged[c] = 0.0
            for n in T.serial(T.min(num_splits[b], num)):
                state[0] = T.max(state[0], partial_lse[n, b, h, q])
            for n in T.serial(T.min(num_splits[b], num)):
                state[2] = T.exp2((partial_lse[n, b, h, q] - state[0]) * LOG2E)
                state[1] += state[2]
                for c in machine.parallel(columns):
                    merged[c] += T.if_then_else(
                        (state[2] > 0) & (c0 + c < v_head_dim),
                        state[2] * T.cast(partial_out[n, b, q, h, T.min(c0 + c, v_head_dim - 1)], accum),
                        0.0,
                    )
            for c in machine.parallel(columns):
                if c0 + c < v_head_dim:
                    out[b, q, h, c0 + c] = T.if_then_else(state[1] > 0, merged[c] / state[1], 0.0)
            if x % column_blocks == 0:
                lse[b, h, q] = T.if_then_else(state[1] > 0, state[0] + T.log2(state[1]) * LN2, -T.infinity(accum))

    return attention_combine


@cache
def compile_attention_combine(major_minor: int, v_head_dim: int, partial_dtype: str, dtype: str):
    """The compiled kernel. One compilation serves every number of splits, batch, S_q and H."""
    function = make_attention_combine(v_head_dim=v_head_dim, partial_dtype=partial_dtype, dtype=dtype)
    return compile_for(function, major_minor, SMALL_PASS_CONFIGS)


def launch_attention_combine(
    partial_out: Tensor, partial_lse: Tensor, num_splits: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """Run the kernel; shapes as in :func:`mha2mla.kernels.attention_combine`."""
    if out.numel() == 0:
        return
    splits, batch = partial_out.shape[0], out.shape[0]
    if splits == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    if num_splits is None:
        num_splits = torch.full((batch,), splits, dtype=torch.int32, device=out.device)
    static = (capability(out.device), out.shape[-1], dtype_name(partial_out.dtype), dtype_name(out.dtype))
    with torch.cuda.device(out.device):
        compile_attention_combine(*static)(
            aligned(partial_out), partial_lse.contiguous(), num_splits.contiguous(), out, lse
        )
