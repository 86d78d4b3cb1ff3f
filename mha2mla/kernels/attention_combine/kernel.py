"""Merging partial attention results on the GPU: a block per row and columns of it, float32 throughout."""

import tilelang.language as T

from mha2mla.kernels.machine import Machine
from mha2mla.kernels.split_kv.fragment import LN2, LOG2E, MASKED


def make_attention_combine(
    *, v_head_dim: int, partial_dtype: str, dtype: str, packed: bool = False, on_cpu: bool = False
):
    """A TileLang function ``attention_combine``; splits, batch, new tokens and heads are run-time values.

    Args:
        v_head_dim: d_v.
        partial_dtype, dtype: of the partial outputs and of the output.
        packed: parts of all sequences lie one behind the other.
        on_cpu: compile for TileLang's C target.

    The function's arguments: partial_out [N,B,S_q,H,d_v], partial_lse [N,B,H,S_q] float32, num_splits [B] int32, and
    the outputs out [B,S_q,H,d_v] and lse [B,H,S_q] float32. Packed: partial_out [N,S_q,H,d_v], partial_lse [N,H,S_q]
    and in place of num_splits cu_splits [B+1].
    """
    accum = T.float32
    num, batch, seqlen_q, heads = T.dynamic("num"), T.dynamic("batch"), T.dynamic("seqlen_q"), T.dynamic("heads")
    columns = min(512, 1 << (v_head_dim - 1).bit_length())
    column_blocks = -(-v_head_dim // columns)
    threads = 1 if on_cpu else max(32, min(128, columns // 4))
    machine = Machine(on_cpu)
    of_sequence, bounds = ([], T.dynamic("bounds")) if packed else ([batch], batch)

    def part(n, b):
        """Where the n-th part is, in front of what is in it."""
        return (n,) if packed else (n, b)

    def parts(splits, b):
        """The parts of a sequence."""
        if packed:
            return T.serial(T.max(splits[b], 0), T.max(T.max(splits[b], 0), T.min(splits[b + 1], num)))
        return T.serial(T.min(splits[b], num))

    @T.prim_func
    def attention_combine(
        partial_out: T.Tensor([num, *of_sequence, seqlen_q, heads, v_head_dim], partial_dtype),
        partial_lse: T.Tensor([num, *of_sequence, heads, seqlen_q], accum),
        num_splits: T.Tensor([bounds], T.int32),
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
            for n in parts(num_splits, b):
                state[0] = T.max(state[0], partial_lse[(*part(n, b), h, q)])
            for n in parts(num_splits, b):
                state[2] = T.exp2((partial_lse[(*part(n, b), h, q)] - state[0]) * LOG2E)
                state[1] += state[2]
                for c in machine.parallel(columns):
                    merged[c] += T.if_then_else(
                        (state[2] > 0) & (c0 + c < v_head_dim),
                        state[2] * T.cast(partial_out[(*part(n, b), q, h, T.min(c0 + c, v_head_dim - 1))], accum),
                        0.0,
                    )
            for c in machine.parallel(columns):
                if c0 + c < v_head_dim:
                    out[b, q, h, c0 + c] = T.if_then_else(state[1] > 0, merged[c] / state[1], 0.0)
            if x % column_blocks == 0:
                lse[b, h, q] = T.if_then_else(state[1] > 0, state[0] + T.log2(state[1]) * LN2, -T.infinity(accum))

    return attention_combine
