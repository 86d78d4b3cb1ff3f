"""Plans a decode step on the device: one CTA computes as ``reference.plan_fragments`` does, from lengths in memory."""

import tilelang.language as T
from torch import Tensor

from mha2mla.kernels.machine import SMALL_PASS_CONFIGS, compile_for, compiled_once
from mha2mla.kernels.ops import capability as capability_of
from mha2mla.kernels.ops import on_device
from mha2mla.kernels.split_kv.choice import FIELDS, FRAGMENT_TILES, MAX_BATCH, TILE_TOKENS, Column

PIECES = 8  # sizes of the aligned way of cutting that are tried at once


def make_plan(*, threads: int = 256, on_cpu: bool = False):
    """A TileLang function ``mla_decode_plan``; batch, CTAs and all lengths are run-time values.

    Args:
        threads: of the one CTA, a power of two; 1 on the CPU.
        on_cpu: compile for TileLang's C target.

    The function's arguments: cache_seqlens [B], cache_starts [B] (int32), the outputs schedule [num_ctas+B,FIELDS] and
    splits [B,2] (``Column``), num_ctas, capacity (tokens a page table holds), seqlen_q, causal and use_starts (0
    or 1), window (negative: none), sinks and num_splits (0: what balances best).
    """
    batch, fragments = T.dynamic("batch"), T.dynamic("fragments")
    alloc_shared = T.alloc_local if on_cpu else T.alloc_shared
    v = FRAGMENT_TILES
    steps = threads.bit_length() - 1
    lanes = max(1, threads // PIECES)

    @T.macro
    def attended(b, cache_seqlens, cache_starts, capacity, seqlen_q, causal, use_starts, window, sinks, x):
        """``reference.attended_span``: x = [start, stop, low, sink_stop, tile0, sink_tiles, window_tile, tiles, -]."""
        x[1] = T.max(0, T.min(cache_seqlens[b], capacity))
        x[0] = T.max(0, T.min(cache_starts[b] * use_starts, x[1]))
        x[2] = T.if_then_else(window < 0, x[0], T.max(x[0], x[1] - (seqlen_q - 1) * causal - window))
        x[3] = T.min(x[0] + sinks, x[2])
        x[4] = T.if_then_else(x[3] > x[0], x[0], x[2]) // TILE_TOKENS
        x[8] = T.if_then_else(x[3] > x[0], T.max(x[4], (x[3] + TILE_TOKENS - 1) // TILE_TOKENS), x[4])
        x[6] = T.max(x[2] // TILE_TOKENS, x[8])
        x[5] = x[8] - x[4]
        x[7] = T.if_then_else(x[1] > x[0], x[5] + (x[1] + TILE_TOKENS - 1) // TILE_TOKENS - x[6], 0)

    @T.macro
    def accumulate(tx, strip, batch, values, low, high, run):
        """``values[batch]`` becomes the sums of all earlier ones, ``values[batch]`` (one more) the sum of all."""
        run[0] = 0
        for i in T.serial(strip[0]):  # neighbours in one thread, so that one scan over the threads is enough
            if tx * strip[0] + i < batch:
                run[0] += values[tx * strip[0] + i]
        low[tx] = run[0]
        T.sync_threads()
        for i in list(range(steps)):
            if i % 2 == 0:
                high[tx] = low[tx] + T.if_then_else(tx >= 2**i, low[T.max(tx - 2**i, 0)], 0)
            else:
                low[tx] = high[tx] + T.if_then_else(tx >= 2**i, high[T.max(tx - 2**i, 0)], 0)
            T.sync_threads()
        run[1] = high[tx] if steps % 2 else low[tx]
        if tx == threads - 1:
            values[batch] = run[1]
        run[1] -= run[0]
        for i in T.serial(strip[0]):
            if tx * strip[0] + i < batch:
                run[0] = values[tx * strip[0] + i]
                values[tx * strip[0] + i] = run[1]
                run[1] += run[0]
        T.sync_threads()

    @T.macro
    def find_cut(i, num_ctas, batch, piece, tiles, cost, pieces, cut, at):
        """cut[at], cut[at+1] = sequence and tile where CTA ``i`` begins; cut[4:7] is scratch."""
        if piece > 0:
            cut[6] = i
        else:
            cut[6] = T.cast(T.cast(cost[batch], "int64") * i // num_ctas, "int32")
        cut[4] = 0  # one statement each: a tuple would rename the dynamic size
        cut[5] = batch
        # the last sequence that begins at or before the position and is not empty
        for probe in T.serial(32):
            if cut[5] - cut[4] > 1:
                if T.if_then_else(piece > 0, pieces[(cut[4] + cut[5]) // 2], cost[(cut[4] + cut[5]) // 2]) <= cut[6]:
                    cut[4] = (cut[4] + cut[5]) // 2
                else:
                    cut[5] = (cut[4] + cut[5]) // 2
        if (i >= num_ctas) | ((piece > 0) & (i >= pieces[batch])):
            cut[at] = batch
            cut[at + 1] = 0
        else:
            cut[at] = cut[4]
            if piece > 0:
                cut[at + 1] = T.cast(
                    T.cast(tiles[cut[4]], "int64")
                    * (i - pieces[cut[4]])
                    // T.max(1, pieces[cut[4] + 1] - pieces[cut[4]]),
                    "int32",
                )
            else:
                cut[at + 1] = T.max(0, cut[6] - cost[cut[4]] - v)

    @T.prim_func
    def mla_decode_plan(
        cache_seqlens: T.Tensor([batch], T.int32),
        cache_starts: T.Tensor([batch], T.int32),
        schedule: T.Tensor([fragments, FIELDS], T.int32),
        splits: T.Tensor([batch, 2], T.int32),
        num_ctas: T.int32,
        capacity: T.int32,
        seqlen_q: T.int32,
        causal: T.int32,
        use_starts: T.int32,
        window: T.int32,
        sinks: T.int32,
        num_splits: T.int32,
    ):
        with T.Kernel(1, threads=threads):
            tiles = alloc_shared([MAX_BATCH], T.int32)
            cost = alloc_shared([MAX_BATCH + 1], T.int32)  # tiles and fixed costs of all sequences before b
            rank = alloc_shared([MAX_BATCH + 1], T.int32)  # non-empty sequences before b
            pieces = alloc_shared([MAX_BATCH + 1], T.int32)  # pieces before b, cut the aligned way
            low = alloc_shared([threads], T.int32)
            high = alloc_shared([threads], T.int32)
            parts = alloc_shared([PIECES * lanes], T.int32)
            totals = alloc_shared([PIECES], T.int32)
            x = T.alloc_local([9], T.int32)
            run = T.alloc_local([2], T.int32)
            cut = T.alloc_local([7], T.int32)
            # smallest and largest piece tried, the piece (0: stream; 1: as asked for), fragments
            base = T.alloc_local([4], T.int32)
            tx = 0 if on_cpu else T.get_thread_binding()
            strip = T.alloc_local([1], T.int32)
            strip[0] = (batch + threads - 1) // threads

            for i in T.serial(strip[0]):
                if tx + i * threads < batch:
                    attended(
                        tx + i * threads, cache_seqlens, cache_starts, capacity, seqlen_q, causal, use_starts, window,
                        sinks, x,
                    )  # fmt: skip
                    tiles[tx + i * threads] = x[7]
                    cost[tx + i * threads] = x[7] + T.if_then_else(x[7] > 0, v, 0)
                    rank[tx + i * threads] = T.if_then_else(x[7] > 0, 1, 0)
                    if x[7] == 0:
                        splits[tx + i * threads, 0] = 0
                        splits[tx + i * threads, 1] = -1
            T.sync_threads()
            accumulate(tx, strip, batch, cost, low, high, run)
            accumulate(tx, strip, batch, rank, low, high, run)

            base[0] = T.max(1, (cost[batch] - v * rank[batch] + num_ctas - 1) // num_ctas)
            base[1] = (cost[batch] + num_ctas - 1) // num_ctas + 1
            base[2] = T.min(num_splits, 1)
            if rank[batch] <= num_ctas:
                for i in T.serial(PIECES * lanes // threads if threads < PIECES * lanes else 1):
                    run[0] = 0
                    for b in T.serial((batch + lanes - 1) // lanes):
                        if (tx + i * threads) % lanes + b * lanes < batch:
                            run[0] += (
                                tiles[(tx + i * threads) % lanes + b * lanes]
                                + base[0]
                                + (tx + i * threads) // lanes
                                - 1
                            ) // (base[0] + (tx + i * threads) // lanes)
                    parts[tx + i * threads] = run[0]
            T.sync_threads()
            for i in T.serial(PIECES if threads < PIECES else 1):
                if tx + i < PIECES:
                    run[0] = 0
                    for j in T.serial(lanes):
                        run[0] += parts[(tx + i) * lanes + j]
                    totals[tx + i] = run[0]
            T.sync_threads()
            for i in T.serial(PIECES):
                if (base[2] == 0) & (rank[batch] <= num_ctas) & (base[0] + i <= base[1]) & (totals[i] <= num_ctas):
                    base[2] = base[0] + i
            for i in T.serial(strip[0]):
                if tx + i * threads < batch:
                    pieces[tx + i * threads] = T.if_then_else(
                        num_splits > 0,
                        T.min(tiles[tx + i * threads], num_splits),
                        (tiles[tx + i * threads] + base[2] - 1) // T.max(1, base[2]),
                    )
            T.sync_threads()
            accumulate(tx, strip, batch, pieces, low, high, run)

            for i in T.serial((num_ctas + threads - 1) // threads):
                if tx + i * threads < num_ctas:
                    find_cut(tx + i * threads, num_ctas, batch, base[2], tiles, cost, pieces, cut, 0)
                    find_cut(tx + i * threads + 1, num_ctas, batch, base[2], tiles, cost, pieces, cut, 2)
                    base[3] = 0
                    for j in T.serial(T.min(cut[2], batch - 1) - cut[0] + 1):
                        # the part of sequence cut[0] + j: tiles cut[4] ... cut[5] - 1
                        cut[4] = T.if_then_else(j == 0, cut[1], 0)
                        cut[5] = T.if_then_else(cut[0] + j == cut[2], cut[3], tiles[cut[0] + j])
                        if cut[5] > cut[4]:
                            cut[6] = T.if_then_else(base[3] == 0, tx + i * threads, num_ctas + rank[cut[0]] + base[3])
                            attended(
                                cut[0] + j, cache_seqlens, cache_starts, capacity, seqlen_q, causal, use_starts,
                                window, sinks, x,
                            )  # fmt: skip
                            schedule[cut[6], Column.SEQUENCE] = cut[0] + j
                            schedule[cut[6], Column.FIRST] = cut[4]
                            schedule[cut[6], Column.TILES] = cut[5] - cut[4]
                            for column in list(range(Column.START, Column.WINDOW_TILE + 1)):
                                schedule[cut[6], column] = x[column - Column.START]
                            run[0] = T.if_then_else(
                                (cut[4] == 0) & (cut[5] == x[7]),
                                -1,
                                2 * (tx + i * threads) + T.if_then_else(base[3] > 0, 1, 0),
                            )
                            schedule[cut[6], Column.SLOT] = run[0]
                            if cut[4] == 0:
                                splits[cut[0] + j, 1] = run[0]
                            if cut[5] == x[7]:  # the last CTA of a sequence knows the number of all
                                if base[2] > 0:
                                    run[1] = pieces[cut[0] + j]
                                else:
                                    run[1] = T.cast(
                                        (T.cast(cost[cut[0] + j] + v + 1, "int64") * num_ctas + cost[batch] - 1)
                                        // T.max(1, cost[batch])
                                        - 1,
                                        "int32",
                                    )
                                splits[cut[0] + j, 0] = tx + i * threads - T.min(run[1], num_ctas - 1) + 1
                            base[3] += 1
                    schedule[tx + i * threads, Column.COUNT] = base[3]
                    schedule[tx + i * threads, Column.NEXT] = num_ctas + rank[T.min(cut[0], batch - 1)]

    return mla_decode_plan


@compiled_once
def compile_planner(capability: int):
    """The compiled planner, one for all shapes."""
    return compile_for(make_plan(), capability, SMALL_PASS_CONFIGS)


def launch_plan(cache_seqlens: Tensor, cache_starts: Tensor | None, *call) -> None:
    """Runs the planner; arguments as the op ``split_kv_plan`` takes them."""
    capacity, seqlen_q, causal, window, sinks, schedule, splits, num_splits = call
    batch, use_starts = splits.shape[0], cache_starts is not None
    if batch:
        with on_device(splits.device):
            compile_planner(capability_of(splits.device))(
                cache_seqlens, cache_starts if use_starts else cache_seqlens, schedule, splits,
                schedule.shape[0] - batch, capacity, seqlen_q, int(causal), int(use_starts), window, sinks, num_splits,
            )  # fmt: skip
