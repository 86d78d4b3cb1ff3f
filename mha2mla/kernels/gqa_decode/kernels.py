"""GQA decode kernels. ``streamed``: Hopper; ``portable``: every GPU from sm_80 on, and TileLang's C target.

A CTA serves the query rows of one kv head (H / G * S_q of them, padded to 8, 16, 32 or 64). Scores are Kᵀ-major,
Sᵀ[tokens, rows] = K Qᵀ, and Oᵀ[d_v, rows] += Vᵀ Pᵀ, so that 64 cached tokens, not the few query rows, fill the M of a
product. The arithmetic is next to nothing beside the bytes: in ``streamed`` one warpgroup computes and one warp streams
keys and values; several small CTAs a multiprocessor hide each other's softmax, and the rings run on into the next
sequence of the CTA's schedule.
"""

from dataclasses import dataclass

import tilelang.language as T

from mha2mla.kernels.gqa_decode.selection import GQAShape, padded_columns
from mha2mla.kernels.machine import BARRIER, BY_ROW, GPU, WARPGROUP, Buffers, Machine
from mha2mla.kernels.split_kv import device, softmax
from mha2mla.kernels.split_kv.choice import TILE_TOKENS, KernelChoice

CONSUMERS = WARPGROUP  # threads that compute
BLOCK = 64  # cached tokens per tile: the M of one wgmma


@dataclass(frozen=True)
class GQAStatic:
    """Static parameters of a kernel body."""

    shape: GQAShape
    choice: KernelChoice
    machine: Machine = GPU

    rows = property(lambda k: k.choice.tiling.rows)
    qk_cols = property(lambda k: padded_columns(k.shape.qk_head_dim))
    v_cols = property(lambda k: padded_columns(k.shape.v_head_dim))


class GQATypes(device.Types):
    """:class:`Types`, behind q [B,S_q,H,d_qk], k_cache [P,page,G,d_qk] and v_cache [P,page,G,d_v], all with run-time
    strides."""

    def __init__(self, k: GQAStatic):
        s = k.shape
        super().__init__("gqa_decode", s.heads, s.v_head_dim, s.page_size, s.dtype, k.machine)
        self.data = {
            "q": self.rows("q", s.qk_head_dim),
            "k_cache": self.cache("k", s.num_kv_heads, s.qk_head_dim),
            "v_cache": self.cache("v", s.num_kv_heads, s.v_head_dim),
        }


def allocate_portable(k: GQAStatic) -> Buffers:
    """Shared memory of a CTA, and the output."""
    block, dtype, shared = k.choice.block_tokens, k.shape.dtype, k.machine.alloc_shared
    return Buffers(
        q_tile=shared([k.rows, k.qk_cols], dtype),
        k_tile=shared([block, k.qk_cols], dtype),
        v_tile=shared([block, k.v_cols], dtype),
        p_tile=shared([block, k.rows], dtype),
        stage=shared([block // 16, k.rows], T.float32),
        factor=shared([k.rows], T.float32),  # for the output, whose rows other threads hold than the scores' rows
        o=k.machine.alloc_fragment([k.v_cols, k.rows], T.float32),
        holes=T.alloc_local([max(1, block // k.shape.page_size) + 1], T.int32),
    )


@T.macro
def attend_portable(k, t0, work, memory, x):
    """Scores, softmax and output of one step."""
    T.gemm(memory.k_tile, memory.q_tile, x.s, transpose_B=True, clear_accum=True, policy=BY_ROW)
    softmax.apply_mask(x, work, t0)
    softmax.reduce_row_max(x, guarded=False)
    softmax.find_rescale(x)
    T.copy(x.rescale, memory.factor)
    softmax.find_weights(x)
    T.copy(x.s, memory.p_tile)
    softmax.add_weights(x)
    T.sync_threads()
    for d, j in x.parallel(k.v_cols, k.rows):
        memory.o[d, j] *= memory.factor[j]
    T.gemm(memory.v_tile, memory.p_tile, memory.o, transpose_A=True, policy=BY_ROW)


def make_portable(shape: GQAShape, choice: KernelChoice, machine: Machine = GPU):
    """A TileLang function ``gqa_decode_portable``; :class:`GQATypes` has its arguments."""
    k = GQAStatic(shape, choice, machine)
    types, tiling, block = GQATypes(k), choice.tiling, choice.block_tokens
    steps = TILE_TOKENS // block  # per tile of the schedule

    @T.macro
    def body(call):
        with T.Kernel(tiling.num_tiles, types.num_ctas, threads=1 if machine.on_cpu else choice.threads) as (y, cta):
            memory = allocate_portable(k)
            tile = device.locate(types, tiling, y, 1)
            work = device.take_work(call, cta, shape.page_size, block)  # no pdl_trigger: there is none before sm_90
            x = softmax.make_softmax(machine, call, tile, block, k.rows, memory.stage, (), T.sync_threads)
            sources = [
                (device.copy_tile, call.k_cache, (tile.column,), 0, memory.k_tile),
                (device.copy_tile, call.v_cache, (tile.column,), 0, memory.v_tile),
            ]
            for f in T.serial(work.fragments):
                device.read_fragment(work, f)
                T.sync_threads()
                for c in list(range(0, k.qk_cols, 64)):
                    device.load_queries(machine, work, tile, call.q, memory.q_tile, c, 64)
                T.fill(memory.o, 0)
                softmax.begin(x, work)
                for i in T.serial(work.tiles * steps):
                    t0 = work.first_token(i // steps) + i % steps * block
                    device.load_tiles(machine, work, t0, sources, memory.v_tile, memory.holes, types.num_pages)
                    attend_portable(k, t0, work, memory, x)
                softmax.finish(x, x.row_max)
                T.copy(x.row_sum, memory.factor)
                T.sync_threads()
                device.store(call, work, softmax.write_columns, x, memory.o, memory.factor, x.row_max)

    return types.make("portable", body)


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
def stream(work, kv_head, call, memory, thread):
    """One warp: the keys and values of every tile of this CTA's fragments."""
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for i in T.serial(work.tiles):
            t0 = work.first_token(i)
            n = work.done + i
            device.find_pages(work, t0)
            # Not a loop over the two: it would give both caches one name.
            m = memory
            device.fill_slot(
                work, t0, call.k_cache, (kv_head,), 0, [m.k_ring], n, m.k_full, m.k_free, thread, CONSUMERS
            )
            device.fill_slot(
                work, t0, call.v_cache, (kv_head,), 0, [m.v_ring], n, m.v_full, m.v_free, thread, CONSUMERS
            )
        device.end_fragment(work)


@T.macro
def attend(k, i, work, memory, x, o):
    """The i-th tile of the fragment: scores, softmax, output."""
    t0 = work.first_token(i)
    n = work.done + i
    slot, phase = n % k.choice.num_stages, (n // k.choice.num_stages) & 1
    T.barrier_wait(memory.k_full[slot], phase)
    T.wgmma_gemm(memory.k_ring[slot, :, :], memory.q_tile, x.s, transpose_B=True, clear_accum=True, policy=BY_ROW)
    T.wait_wgmma(0)
    T.barrier_arrive(memory.k_free[slot])
    softmax.apply_mask(x, work, t0)
    softmax.reduce_row_max(x)
    softmax.find_rescale(x)
    softmax.find_weights(x)
    for u, j in T.Parallel(BLOCK, k.rows):
        memory.p_tile[j, u] = x.s[u, j]
    softmax.add_weights(x)
    for d, j in T.Parallel(k.v_cols, k.rows):
        o[d, j] *= x.rescale[j]
    T.barrier_wait(memory.v_full[slot], phase)
    if work.has_masked(t0, BLOCK):
        device.zero_masked(GPU, work, t0, BLOCK, range(0, k.v_cols, 64), memory.v_ring, slot)
    T.fence_proxy_async()
    x.sync()
    T.wgmma_gemm(memory.v_ring[slot, :, :], memory.p_tile, o, transpose_A=True, transpose_B=True, policy=BY_ROW)
    T.wait_wgmma(0)
    T.barrier_arrive(memory.v_free[slot])


@T.macro
def consume(k, work, tile, memory, call):
    """One warpgroup: all fragments of this CTA."""
    x = softmax.make_softmax(
        GPU, call, tile, BLOCK, k.rows, memory.stage, (),
        lambda: T.sync_threads(barrier_id=BARRIER, arrive_count=CONSUMERS), keeps_limit=False,
    )  # fmt: skip
    o = T.alloc_fragment([k.v_cols, k.rows], T.float32)
    piece = min(64, 1024 // k.rows)
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for c in T.serial(k.qk_cols // piece):  # loads of all rows at once would spill registers
            device.load_queries(GPU, work, tile, call.q, memory.q_tile, c * piece, piece)
        T.fence_proxy_async()
        x.sync()
        T.fill(o, 0)
        softmax.begin(x, work)
        for i in T.serial(work.tiles):
            attend(k, i, work, memory, x, o)
        device.end_fragment(work)
        softmax.finish(x, x.row_max)
        device.store(call, work, softmax.write_columns, x, o, x.row_sum, x.row_max)


def make_streamed(shape: GQAShape, choice: KernelChoice):
    """A TileLang function ``gqa_decode_streamed`` for sm_90; :class:`GQATypes` has its arguments."""
    k = GQAStatic(shape, choice)
    types = GQATypes(k)

    @T.macro
    def body(call):
        with T.Kernel(choice.tiling.num_tiles, types.num_ctas, threads=choice.threads) as (y, cta):
            T.annotate_min_blocks_per_sm(choice.ctas_per_sm)
            memory = allocate(k)
            thread = T.get_thread_binding()
            tile = device.locate(types, choice.tiling, y, 1)
            work = device.take_work(call, cta, shape.page_size, BLOCK)
            T.pdl_trigger()
            if thread < CONSUMERS:
                consume(k, work, tile, memory, call)
            else:
                stream(work, tile.column, call, memory, thread)

    return types.make("streamed", body)
