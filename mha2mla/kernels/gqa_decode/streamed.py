"""GQA decode for Hopper, query rows on the N side of wgmma: one warpgroup computes, one warp streams keys and values.

A CTA serves the query rows of one kv head (H / G * S_q of them, padded to 8, 16, 32 or 64). Scores are Kᵀ-major,
Sᵀ[tokens, rows] = K Qᵀ, and Oᵀ[d_v, rows] += Vᵀ Pᵀ, so that 64 cached tokens, not the few query rows, fill the M of a
product. The arithmetic is next to nothing beside the bytes: several small CTAs a multiprocessor apply_mask each other's
softmax, and keys and values wait in rings that run on into the next sequence of the CTA's schedule.
"""

import tilelang.language as T

from mha2mla.kernels.gqa_decode.portable import GQAStatic, GQATypes
from mha2mla.kernels.gqa_decode.selection import GQAShape
from mha2mla.kernels.machine import BARRIER, BY_ROW, GPU, WARPGROUP, Buffers
from mha2mla.kernels.split_kv import softmax
from mha2mla.kernels.split_kv.call import (
    DONE,
    FRAGMENTS,
    LOG2E,
    Call,
    find_pages,
    first_token,
    has_masked,
    locate,
    read_fragment,
    store,
    take_work,
)
from mha2mla.kernels.split_kv.choice import KernelChoice
from mha2mla.kernels.split_kv.schedule import TILES
from mha2mla.kernels.split_kv.softmax import Softmax, write_columns, zero_masked
from mha2mla.kernels.split_kv.stream import fill_slot, load_queries

CONSUMERS = WARPGROUP  # threads that compute
BLOCK = 64  # cached tokens per tile: the M of one wgmma


def allocate(k: GQAStatic) -> Buffers:
    """Shared memory and barriers of a CTA."""
    stages, dtype = k.choice.num_stages, k.shape.dtype
    return Buffers(
        q_tile=T.alloc_shared([k.rows, k.qk_cols], dtype),
        k_ring=T.alloc_shared([stages, BLOCK, k.qk_cols], dtype),
        v_ring=T.alloc_shared([stages, BLOCK, k.v_cols], dtype),
        p_tile=T.alloc_shared([k.rows, BLOCK], dtype),
        stage=T.alloc_shared([BLOCK // 16, k.rows], T.float32),
        k_full=T.alloc_barrier([1] * stages),
        k_free=T.alloc_barrier([CONSUMERS] * stages),
        v_full=T.alloc_barrier([1] * stages),
        v_free=T.alloc_barrier([CONSUMERS] * stages),
    )


@T.macro
def stream(work, kv_head, k_cache, v_cache, memory, thread):
    """One warp: the keys and values of every tile of this CTA's fragments."""
    for f in T.serial(work.state[FRAGMENTS]):
        read_fragment(work, f)
        for i in T.serial(work.span[TILES]):
            t0 = first_token(work.span, i)
            n = work.state[DONE] + i
            find_pages(work, t0)
            # Not a loop over the two: it would give both caches one name.
            m = memory
            fill_slot(work, t0, k_cache, (kv_head,), 0, [m.k_ring], n, m.k_full, m.k_free, thread, CONSUMERS)
            fill_slot(work, t0, v_cache, (kv_head,), 0, [m.v_ring], n, m.v_full, m.v_free, thread, CONSUMERS)
        work.state[DONE] += work.span[TILES]


@T.macro
def attend(k, i, work, memory, x, o):
    """The i-th tile of the fragment: scores, softmax, output."""
    t0 = first_token(work.span, i)
    n = work.state[DONE] + i
    slot, phase = n % k.choice.num_stages, (n // k.choice.num_stages) & 1
    T.barrier_wait(memory.k_full[slot], phase)
    T.wgmma_gemm(memory.k_ring[slot, :, :], memory.q_tile, x.s, transpose_B=True, clear_accum=True, policy=BY_ROW)
    T.wait_wgmma(0)
    T.barrier_arrive(memory.k_free[slot])
    softmax.apply_mask(x, work.span, t0)
    softmax.reduce_row_max(x)
    softmax.find_rescale(x)
    softmax.find_weights(x)
    for u, j in T.Parallel(BLOCK, k.rows):
        memory.p_tile[j, u] = x.s[u, j]
    softmax.add_weights(x)
    for d, j in T.Parallel(k.v_cols, k.rows):
        o[d, j] *= x.rescale[j]
    T.barrier_wait(memory.v_full[slot], phase)
    if has_masked(work.span, t0, BLOCK):
        zero_masked(GPU, work.span, t0, BLOCK, range(0, k.v_cols, 64), memory.v_ring, slot)
    T.fence_proxy_async()
    x.sync()
    T.wgmma_gemm(memory.v_ring[slot, :, :], memory.p_tile, o, transpose_A=True, transpose_B=True, policy=BY_ROW)
    T.wait_wgmma(0)
    T.barrier_arrive(memory.v_free[slot])


@T.macro
def consume(k, work, tile, memory, call, q):
    """One warpgroup: all fragments of this CTA."""
    scale = call.softmax_scale * LOG2E
    tail = (tile.seqlen_q - 1) * call.causal
    x = Softmax(
        GPU, call, tile, BLOCK, k.rows, memory.stage, (),
        lambda: T.sync_threads(barrier_id=BARRIER, arrive_count=CONSUMERS), scale, tail, keeps_limit=False,
    )  # fmt: skip
    o = T.alloc_fragment([k.v_cols, k.rows], T.float32)
    piece = min(64, 1024 // k.rows)
    for f in T.serial(work.state[FRAGMENTS]):
        read_fragment(work, f)
        for c in T.serial(k.qk_cols // piece):  # loads of all rows at once would spill registers
            load_queries(GPU, work, tile, q, memory.q_tile, c * piece, piece)
        T.fence_proxy_async()
        x.sync()
        T.fill(o, 0)
        softmax.begin(x, work.span)
        for i in T.serial(work.span[TILES]):
            attend(k, i, work, memory, x, o)
        work.state[DONE] += work.span[TILES]
        softmax.finish(x, x.row_max)
        store(call, work.span, write_columns, x, o, x.row_sum, x.row_max)


def make_streamed(shape: GQAShape, choice: KernelChoice):
    """A TileLang function ``gqa_decode_streamed`` for sm_90; :class:`GQATypes` has its arguments."""
    k = GQAStatic(shape, choice)
    types = GQATypes(k)

    @T.prim_func
    def gqa_decode_streamed(
        q: types.q, k_cache: types.k_cache, v_cache: types.v_cache, block_table: types.block_table,
        schedule: types.schedule, partial_out: types.partial_out, partial_lse: types.partial_lse, out: types.out,
        lse: types.lse, softmax_scale: T.float32, causal: T.int32, window: T.int32, sinks: T.int32,
    ):  # fmt: skip
        with T.Kernel(choice.tiling.num_tiles, types.num_ctas, threads=choice.threads) as (y, cta):
            T.annotate_min_blocks_per_sm(choice.ctas_per_sm)
            call = Call(block_table, schedule, partial_out, partial_lse, out, lse, softmax_scale, causal, window, sinks)
            memory = allocate(k)
            thread = T.get_thread_binding()
            tile = locate(types, choice.tiling, y, 1)
            work = take_work(call, cta, shape.page_size, BLOCK)
            T.pdl_trigger()

            if thread < CONSUMERS:
                consume(k, work, tile, memory, call, q)
            else:
                stream(work, tile.column, k_cache, v_cache, memory, thread)

    return gqa_decode_streamed
