"""MLA decode, second kernel: merges the partial outputs of a sequence's splits by their log-sum-exps."""

import tilelang.language as T

from mha2mla.kernels.mla_decode.selection import MAX_SPLITS
from mha2mla.kernels.mla_decode.swap_ab import LN2, LOG2E, MASKED


def make_combine(
    *,
    heads: int,
    kv_lora_rank: int,
    dtype: str,
    block_columns: int = 128,
    block_splits: int = 8,
    threads: int = 128,
    on_cpu: bool = False,
):
    """A TileLang function ``mla_decode_combine``; batch, new tokens and splits (<= MAX_SPLITS) are run-time values.

    Partials whose lse is -inf are never read, so they may hold anything (flash-decoding; FAILURES 1).

    The function's arguments: partial_out [B,splits,S_q,H,d_c] and partial_lse [B,splits,S_q,H] (float32, natural log),
    and the outputs out [B,S_q,H,d_c] (run-time strides, ``dtype``) and lse [B,H,S_q] (float32). A query without tokens
    gets zeros and -inf.
    """
    accum = T.float32
    batch, seqlen_q, num_splits = T.dynamic("batch"), T.dynamic("seqlen_q"), T.dynamic("num_splits")
    o_b, o_s, o_h = T.dynamic("o_b"), T.dynamic("o_s"), T.dynamic("o_h")
    columns = min(block_columns, 1 << (kv_lora_rank - 1).bit_length())  # a power of two: others find no layout
    column_blocks = -(-kv_lora_rank // columns)
    alloc_shared = T.alloc_local if on_cpu else T.alloc_shared
    alloc_fragment = T.alloc_local if on_cpu else T.alloc_fragment
    parallel = T.grid if on_cpu else T.Parallel

    def strided(shape, strides):  # the CPU target's wrapper passes no run-time strides
        return T.Tensor(shape, dtype) if on_cpu else T.StridedTensor(shape, strides, dtype)

    @T.prim_func
    def mla_decode_combine(
        partial_out: T.Tensor([batch, num_splits, seqlen_q, heads, kv_lora_rank], accum),
        partial_lse: T.Tensor([batch, num_splits, seqlen_q, heads], accum),
        out: strided([batch, seqlen_q, heads, kv_lora_rank], [o_b, o_s, o_h, 1]),
        lse: T.Tensor([batch, heads, seqlen_q], accum),
    ):
        with T.Kernel(heads * column_blocks, seqlen_q, batch, threads=threads) as (x, q, b):
            weight = alloc_fragment([1, MAX_SPLITS], accum)
            weights = alloc_shared([MAX_SPLITS], accum)
            top = alloc_fragment([1], accum)
            total = alloc_fragment([1], accum)
            sums = alloc_shared([2], accum)
            part = alloc_fragment([block_splits, columns], accum)
            merged = alloc_fragment([columns], accum)
            h = x // column_blocks
            c0 = x % column_blocks * columns

            for i, k in parallel(1, MAX_SPLITS):
                weight[i, k] = T.if_then_else(k < num_splits, partial_lse[b, k, q, h], -T.infinity(accum))
            T.reduce_max(weight, top, dim=1)
            for i, k in parallel(1, MAX_SPLITS):
                weight[i, k] = T.exp2((weight[i, k] - T.max(top[i], MASKED)) * LOG2E)
            T.reduce_sum(weight, total, dim=1)
            for i, k in parallel(1, MAX_SPLITS):
                weights[k] = weight[i, k]
            for i in parallel(1):
                sums[0] = top[i]
                sums[1] = total[i]
            T.fill(part, 0)
            T.sync_threads()
            for k in T.serial(T.ceildiv(num_splits, block_splits)):
                for i, c in parallel(block_splits, columns):
                    part[i, c] += T.if_then_else(
                        (k * block_splits + i < num_splits) & (c0 + c < kv_lora_rank),
                        T.if_then_else(
                            weights[k * block_splits + i] == 0,
                            0.0,
                            weights[k * block_splits + i] * partial_out[b, k * block_splits + i, q, h, c0 + c],
                        ),
                        0.0,
                    )
            T.reduce_sum(part, merged, dim=0)
            for c in parallel(columns):
                if c0 + c < kv_lora_rank:
                    out[b, q, h, c0 + c] = T.if_then_else(sums[1] == 0, 0.0, merged[c] / sums[1])
            for i in parallel(1):
                if x % column_blocks == 0:
                    lse[b, h, q] = T.if_then_else(sums[1] == 0, -T.infinity(accum), sums[0] + T.log2(sums[1]) * LN2)

    return mla_decode_combine
