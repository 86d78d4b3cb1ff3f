"""MLA decode, second kernel: merges the partials of sequences that several CTAs read, by their log-sum-exps."""

import tilelang.language as T

from mha2mla.kernels.machine import Machine
from mha2mla.kernels.split_kv.fragment import LN2, LOG2E, MASKED
from mha2mla.kernels.split_kv.limits import MAX_SPLITS


def make_combine(
    *,
    heads: int,
    kv_lora_rank: int,
    dtype: str,
    block_columns: int = 128,
    block_splits: int = 8,
    threads: int = 128,
    dependent: bool = False,
    on_cpu: bool = False,
):
    """A TileLang function ``mla_decode_combine``; batch, new tokens and CTAs (<= MAX_SPLITS) are run-time values.

    Sequences that one CTA read are left alone: their output is written. Partials whose lse is -inf get no weight, so
    they may hold anything (flash-decoding; FAILURES 1).

    Args:
        heads, kv_lora_rank: H, d_c.
        dtype: of the output.
        block_columns: columns of a row that a block merges.
        block_splits: partials in flight per step.
        threads: of a block.
        dependent: launched before the decode kernel ends, and waits for it (programmatic dependent launch, sm_90).
        on_cpu: compile for TileLang's C target.

    The function's arguments: splits [B,2] (``schedule.py``), partial_out [num_ctas,2,S_q,H,d_c] and partial_lse
    [num_ctas,2,S_q,H] (float32, natural log), and the outputs out [B,S_q,H,d_c] (run-time strides, ``dtype``) and lse
    [B,H,S_q] (float32). A sequence without tokens gets zeros and -inf.
    """
    accum = T.float32
    batch, seqlen_q, num_ctas = T.dynamic("batch"), T.dynamic("seqlen_q"), T.dynamic("num_ctas")
    machine = Machine(on_cpu)
    parallel = machine.parallel
    columns = min(block_columns, 1 << (kv_lora_rank - 1).bit_length())  # a power of two: others find no layout
    column_blocks = -(-kv_lora_rank // columns)
    whole = kv_lora_rank % columns == 0  # then no column needs a guard, and loads vectorise

    def place(i, count, q, h):
        """Of the i-th partial of a row."""
        return T.min(count[1] + i, num_ctas - 1), T.if_then_else(i == 0, count[2], 0), q, h

    def clamped(column):
        return column if whole else T.min(column, kv_lora_rank - 1)

    @T.prim_func
    def mla_decode_combine(
        splits: T.Tensor([batch, 2], T.int32),
        partial_out: T.Tensor([num_ctas, 2, seqlen_q, heads, kv_lora_rank], accum),
        partial_lse: T.Tensor([num_ctas, 2, seqlen_q, heads], accum),
        out: machine.strided("o", [batch, seqlen_q, heads, kv_lora_rank], dtype),
        lse: T.Tensor([batch, heads, seqlen_q], accum),
    ):
        with T.Kernel(heads * column_blocks, seqlen_q, batch, threads=threads) as (x, q, b):
            if whole and not on_cpu:
                T.annotate_min_blocks_per_sm(1024 // threads)
            weight = machine.alloc_fragment([1, MAX_SPLITS], accum)
            weights = machine.alloc_shared([MAX_SPLITS], accum)
            top = machine.alloc_fragment([1], accum)
            total = machine.alloc_fragment([1], accum)
            sums = machine.alloc_shared([2], accum)
            part = machine.alloc_fragment([block_splits, columns], accum)
            merged = machine.alloc_fragment([columns], accum)
            count = T.alloc_local([3], T.int32)  # partials, CTA of the first one, its place there
            h = x // column_blocks
            c0 = x % column_blocks * columns

            if dependent:
                T.pdl_sync()
            count[0] = splits[b, 0]
            count[1] = T.max(0, splits[b, 1] // 2)
            count[2] = T.max(0, splits[b, 1] % 2)
            # A loop of one round or none, not a branch: barriers must not stand in a branch.
            for _round in T.serial(T.if_then_else(count[0] == 1, 0, 1)):
                # The first partials are on their way before their weights are known.
                for i, c in parallel(block_splits, columns):
                    part[i, c] = T.if_then_else(
                        (i < count[0]) & (whole or c0 + c < kv_lora_rank),
                        partial_out[(*place(i, count, q, h), clamped(c0 + c))],
                        0.0,
                    )
                for i, k in parallel(1, MAX_SPLITS):
                    weight[i, k] = T.if_then_else(
                        k < count[0],
                        partial_lse[place(k, count, q, h)],
                        -T.infinity(accum),
                    )
                T.reduce_max(weight, top, dim=1)
                for i, k in parallel(1, MAX_SPLITS):
                    weight[i, k] = T.exp2((weight[i, k] - T.max(top[i], MASKED)) * LOG2E)
                T.reduce_sum(weight, total, dim=1)
                for i, k in parallel(1, MAX_SPLITS):
                    weights[k] = weight[i, k]
                for i in parallel(1):
                    sums[0] = top[i]
                    sums[1] = total[i]
                T.sync_threads()
                for i, c in parallel(block_splits, columns):
                    part[i, c] = T.if_then_else(weights[i] == 0, 0.0, weights[i] * part[i, c])
                for k in T.serial(1, T.ceildiv(T.max(count[0], 1), block_splits)):
                    for i, c in parallel(block_splits, columns):
                        part[i, c] += T.if_then_else(
                            (k * block_splits + i < count[0]) & (whole or c0 + c < kv_lora_rank),
                            T.if_then_else(
                                weights[k * block_splits + i] == 0,
                                0.0,
                                weights[k * block_splits + i]
                                * partial_out[
                                    T.min(count[1] + k * block_splits + i, num_ctas - 1), 0, q, h, clamped(c0 + c)
                                ],
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
