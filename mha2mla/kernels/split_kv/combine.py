"""Combine kernels, by log-sum-exps: of partials of a sequence that several CTAs read, and of any partial results."""

import tilelang.language as T
import torch
from torch import Tensor

from mha2mla.kernels.machine import SMALL_PASS_CONFIGS, Machine, compile_for, compiled_once, compiler
from mha2mla.kernels.ops import aligned, dtype_name, on_device
from mha2mla.kernels.ops import capability as capability_of
from mha2mla.kernels.split_kv.choice import MAX_SPLITS
from mha2mla.kernels.split_kv.device import LN2, LOG2E, MASKED

FEW = 16  # partials that a thread weighs by itself
SIZES = {4: (512, 128), 16: (128, 128), 64: (128, 512)}  # partials in flight: columns and threads of a block


def combine_splits(num_ctas: int, batch: int) -> int:
    """Size of the kernel (one of SIZES), by the partials a sequence has if all are equally long."""
    return next((splits for splits in SIZES if num_ctas // batch <= splits), max(SIZES))


def combine_rows(heads: int, seqlen_q: int, splits: int, partials: int = 0) -> int:
    """Heads that a block serves. With few partials a sequence there are many sequences, and as many blocks of each as
    16 rows had have room at a time. Where ``partials`` and one that lies at an end are more than a thread weighs by
    itself, a block would merge its heads one after the other."""
    each = [rows for rows in (4, 2) if heads % rows == 0 and heads * seqlen_q >= 16 * rows]
    return next((rows for rows in each if splits * rows <= 2 * FEW and partials < splits), 1)


def combine_batches(heads: int, seqlen_q: int, num_ctas: int) -> list[int]:
    """Batch sizes, one for each combine kernel that plans for ``num_ctas`` blocks take."""
    kernels: dict[tuple[int, int], int] = {}
    for batch in range(1, num_ctas + 2):
        splits = combine_splits(num_ctas, batch)
        kernels.setdefault((splits, combine_rows(heads, seqlen_q, splits, num_ctas // batch)), batch)
    return list(kernels.values())


@compiled_once
def compile_combine(heads: int, width: int, dtype: str, splits: int, capability: int, rows: int = 1):
    """The compiled kernel; arguments as :func:`make_combine`'s."""
    function = make_combine(heads, width, dtype, splits, rows, dependent=capability >= 90)
    return compile_for(function, capability, SMALL_PASS_CONFIGS)


def make_combine(
    heads: int, width: int, dtype: str, splits: int, rows: int = 1, *, dependent: bool = True, on_cpu: bool = False
):
    """A TileLang function ``mla_decode_combine``; batch, new tokens and CTAs (<= MAX_SPLITS) are run-time values.

    Sequences that one CTA read are left alone: their output is written. Partials whose lse is -inf get no weight, so
    they may hold anything (flash-decoding). A thread holds 16 elements of a row of partials.

    Args:
        heads, width: H, elements of an output row.
        dtype: of the output.
        splits: partials in flight per step, one of SIZES. A block takes its columns of a row, half or a quarter where
            that divides a longer row, and then more rows or fewer threads.
        rows: heads that a block serves, a divisor of H, as :func:`combine_rows` says.
        dependent: launched before the decode kernel ends, and waits for it (programmatic dependent launch, sm_90).
        on_cpu: compile for TileLang's C target.

    The function's arguments: splits [B,2] (:class:`DecodePlan`), partial_out [num_ctas,2,S_q,H,width] and partial_lse
    [num_ctas,2,S_q,H] (float32, natural log), and the outputs out [B,S_q,H,width] (run-time strides, ``dtype``) and lse
    [B,H,S_q] (float32). A sequence without tokens gets zeros and -inf.
    """
    (block_columns, threads), block_splits = SIZES[splits], splits
    dependent = dependent and not on_cpu
    accum = T.float32
    batch, seqlen_q, num_ctas = T.dynamic("batch"), T.dynamic("seqlen_q"), T.dynamic("num_ctas")
    machine = Machine(on_cpu)
    parallel = machine.parallel
    columns = min(block_columns, 1 << (width - 1).bit_length())  # a power of two: others find no layout
    few = block_splits <= FEW
    if width > columns and width % (columns // 4) == 0:
        columns = min(columns, width & -width)
        if not few:
            threads = threads * columns // block_columns
        elif columns < block_columns and heads % (2 * rows) == 0:
            rows *= 2
    column_blocks = -(-width // columns)
    whole = width % columns == 0  # then no column needs a guard, and loads vectorise
    lanes = 1 if on_cpu else threads // rows  # of the way for few: threads of a head, and a thread's columns
    each = -(-columns // lanes)
    in_step = whole and columns % lanes == 0  # then no column needs a guard there
    ahead = min(8, block_splits // 2)  # partials that a thread has under way there
    ways = min(block_splits, max(1, threads * (4 if whole else 1) // columns))  # sums of the way for many

    room = 896 if few and ways > FEW // 4 else 1024  # threads of a multiprocessor: more sums take more registers

    def place(i, count, q, h):
        """Index of the i-th partial of a row."""
        return T.min(count[1] + i, num_ctas - 1), T.if_then_else(i == 0, count[2], 0), q, h

    def clamped(column):
        return column if whole else T.min(column, width - 1)

    def halved(values):
        """Their sum, in the order of threads that add up."""
        while len(values) > 1:
            values = [x + y for x, y in zip(values[: len(values) // 2], values[len(values) // 2 :], strict=True)]
        return values[0]

    @T.macro
    def load(first, count, q, h, c0, lane, part, partial_out):
        for i in machine.rounds(ahead):
            for j in machine.rounds(each):
                part[i, j] = T.if_then_else(
                    (first + i < count[0]) & (in_step or c0 + j * lanes + lane < width),
                    partial_out[(*place(first + i, count, q, h), c0 + j * lanes + lane)],
                    0.0,
                )

    @T.macro
    def add(first, weight, part, merged):
        for i in machine.rounds(ahead):
            for j in machine.rounds(each):
                merged[(first + i) % ways, j] += T.if_then_else(
                    weight[first + i] == 0, 0.0, weight[first + i] * part[i, j]
                )

    @T.macro
    def merge_few(count, q, h, b, c0, lane, partial_out, partial_lse, out, lse):
        """At most FEW partials: every thread weighs them by itself, and nothing waits for another's. The bits are those
        of the way for many: sums are in its order."""
        part = T.alloc_local([ahead, each], accum)
        weight = T.alloc_local([block_splits], accum)
        row_max = T.alloc_local([1], accum)
        total = T.alloc_local([1], accum)
        merged = T.alloc_local([ways, each], accum)
        load(0, count, q, h, c0, lane, part, partial_out)
        row_max[0] = -T.infinity(accum)
        for i in machine.rounds(block_splits):
            weight[i] = T.if_then_else(i < count[0], partial_lse[place(i, count, q, h)], -T.infinity(accum))
        for i in machine.rounds(block_splits):
            row_max[0] = T.max(row_max[0], weight[i])
        for i in machine.rounds(block_splits):
            weight[i] = T.exp2((weight[i] - T.max(row_max[0], MASKED)) * LOG2E)
        total[0] = halved([weight[i] for i in range(block_splits)])
        for i in machine.rounds(ways):
            for j in machine.rounds(each):
                merged[i, j] = 0
        add(0, weight, part, merged)
        for k in list(range(ahead, block_splits, ahead)):
            for _round in T.serial(T.if_then_else(count[0] > k, 1, 0)):
                load(k, count, q, h, c0, lane, part, partial_out)
                add(k, weight, part, merged)
        for j in machine.rounds(each):
            if in_step or c0 + j * lanes + lane < width:
                out[b, q, h, c0 + j * lanes + lane] = T.if_then_else(
                    total[0] == 0, 0.0, halved([merged[i, j] for i in range(ways)]) / total[0]
                )
        if (lane == 0) & (c0 == 0):
            lse[b, h, q] = T.if_then_else(total[0] == 0, -T.infinity(accum), row_max[0] + T.log2(total[0]) * LN2)

    @T.prim_func
    def mla_decode_combine(
        splits: T.Tensor([batch, 2], T.int32),
        partial_out: T.Tensor([num_ctas, 2, seqlen_q, heads, width], accum),
        partial_lse: T.Tensor([num_ctas, 2, seqlen_q, heads], accum),
        out: machine.strided("o", [batch, seqlen_q, heads, width], dtype),
        lse: T.Tensor([batch, heads, seqlen_q], accum),
    ):
        with T.Kernel(heads // rows * column_blocks, seqlen_q, batch, threads=threads) as (x, q, b):
            if (whole or few) and not on_cpu:
                T.annotate_min_blocks_per_sm(room // threads)
            weight = machine.alloc_fragment([1, MAX_SPLITS], accum)
            weights = machine.alloc_shared([MAX_SPLITS], accum)
            row_max = machine.alloc_fragment([1], accum)
            total = machine.alloc_fragment([1], accum)
            sums = machine.alloc_shared([2], accum)
            part = machine.alloc_fragment([block_splits, columns], accum)
            merged = machine.alloc_fragment([columns], accum)
            count = T.alloc_local([3], T.int32)  # partials, CTA of the first one, its place there
            h0 = x // column_blocks * rows
            c0 = x % column_blocks * columns

            # before the wait: whoever may start while a decode kernel runs may read the plan that it reads
            count[0] = splits[b, 0]
            count[1] = T.max(0, splits[b, 1] // 2)
            count[2] = T.max(0, splits[b, 1] % 2)
            if dependent:
                T.pdl_sync()
                T.pdl_trigger()
            if few:
                thread = machine.thread
                # a loop of one round or none keeps the loads together, as a branch does not
                for _round in T.serial(T.if_then_else((count[0] != 1) & (count[0] <= block_splits), 1, 0)):
                    for row in range(rows) if on_cpu else [thread // lanes]:
                        merge_few(count, q, h0 + row, b, c0, thread % lanes, partial_out, partial_lse, out, lse)
            # Not a branch either: barriers must not stand in one.
            for row in T.serial(T.if_then_else(count[0] > block_splits if few else count[0] != 1, rows, 0)):
                h = h0 + row
                # The first partials are on their way before their weights are known.
                for i, c in parallel(block_splits, columns):
                    part[i, c] = T.if_then_else(
                        (few or i < count[0]) & (whole or c0 + c < width),
                        partial_out[(*place(i, count, q, h), clamped(c0 + c))],
                        0.0,
                    )
                for i, k in parallel(1, MAX_SPLITS):
                    weight[i, k] = T.if_then_else(k < count[0], partial_lse[place(k, count, q, h)], -T.infinity(accum))
                T.reduce_max(weight, row_max, dim=1)
                for i, k in parallel(1, MAX_SPLITS):
                    weight[i, k] = T.exp2((weight[i, k] - T.max(row_max[i], MASKED)) * LOG2E)
                T.reduce_sum(weight, total, dim=1)
                for i, k in parallel(1, MAX_SPLITS):
                    weights[k] = weight[i, k]
                for i in parallel(1):
                    sums[0] = row_max[i]
                    sums[1] = total[i]
                T.sync_threads()
                for i, c in parallel(block_splits, columns):
                    part[i, c] = T.if_then_else(weights[i] == 0, 0.0, weights[i] * part[i, c])
                for k in T.serial(1, T.ceildiv(T.max(count[0], 1), block_splits)):
                    for i, c in parallel(block_splits, columns):
                        part[i, c] += T.if_then_else(
                            (k * block_splits + i < count[0]) & (whole or c0 + c < width),
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
                    if c0 + c < width:
                        out[b, q, h, c0 + c] = T.if_then_else(sums[1] == 0, 0.0, merged[c] / sums[1])
                for i in parallel(1):
                    if x % column_blocks == 0:
                        lse[b, h, q] = T.if_then_else(sums[1] == 0, -T.infinity(accum), sums[0] + T.log2(sums[1]) * LN2)

    return mla_decode_combine


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
                    out[b, q, h, c0 + c] = T.if_then_else(state[1] == 0, 0.0, merged[c] / state[1])
            if x % column_blocks == 0:
                lse[b, h, q] = T.if_then_else(state[1] == 0, -T.infinity(accum), state[0] + T.log2(state[1]) * LN2)

    return attention_combine


compile_attention_combine = compiler(make_attention_combine, SMALL_PASS_CONFIGS)


def launch_attention_combine(
    partial_out: Tensor, partial_lse: Tensor, num_splits: Tensor | None, _: torch.dtype, out: Tensor, lse: Tensor
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
    dtypes = {"partial_dtype": dtype_name(partial_out.dtype), "dtype": dtype_name(out.dtype)}
    with on_device(out.device):
        kernel = compile_attention_combine(capability_of(out.device), v_head_dim=out.shape[-1], **dtypes)
        kernel(aligned(partial_out), partial_lse.contiguous(), num_splits.contiguous(), out, lse)
