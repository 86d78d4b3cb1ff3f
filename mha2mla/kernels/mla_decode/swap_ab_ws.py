"""MLA decode for Hopper, heads on the N side of wgmma: warpgroups compute, three warps stream cache and queries.

The latent and the rotary keys travel through two independent TMA rings, so many rope heads (a converted MHA model
caches one rotary key per head) cost bytes but no pipeline stages of the latent; both rings run on into the next
sequence of the CTA's schedule while the last one is being written. Scores and output as in ``swap_ab``; the rope scores
by the products of ``selection.rope_blocks``. Two computing warpgroups share every tile and split the query rows;
they exchange nothing but turns at the tensor cores (not even these where ``selection.takes_turns`` says no).
"""

from dataclasses import dataclass

import tilelang.language as T

from mha2mla.kernels.machine import BARRIER, GPU, WARPGROUP, Buffers
from mha2mla.kernels.mla_decode.selection import (
    DecodeShape,
    RopeBlocks,
    padded_latent_columns,
    rope_blocks,
    takes_turns,
)
from mha2mla.kernels.mla_decode.static import MLAStatic, MLATypes, load_rope_queries
from mha2mla.kernels.split_kv import softmax
from mha2mla.kernels.split_kv.call import (
    DONE,
    FRAGMENTS,
    LOG2E,
    Call,
    first_token,
    has_masked,
    locate,
    read_fragment,
    store,
    take_work,
)
from mha2mla.kernels.split_kv.choice import KernelChoice
from mha2mla.kernels.split_kv.schedule import SEQUENCE, TILES
from mha2mla.kernels.split_kv.softmax import Softmax, write_columns, zero_masked
from mha2mla.kernels.split_kv.stream import stream, stream_queries

BLOCK = 64  # cached tokens per tile: the M of one wgmma
TURN = 12  # and the next: whose turn it is at the score products
PRODUCER_REGISTERS = 56
SCALE, LOG_SCALE, INVERSE_SCALE = range(3)  # of a token whose latent is codes: rows of ``scales``


@dataclass(frozen=True)
class Static(MLAStatic):
    rope: RopeBlocks  # products of the rope scores
    by_block: bool  # a rope block is for part of the rows
    rows: int  # of one warpgroup
    latent_cols: int
    rope_cols: int  # of a rope block
    consumers: int  # threads that compute
    registers: int  # of one of these
    turns: bool
    # A "full" barrier belongs to a chunk's place in the tile, not to a ring slot: who waits for it then sees all its
    # phases, and a wait for one parity cannot be answered by an earlier phase of the same parity.
    chunks: int  # of a tile
    rope_phases: int

    @property
    def latent_readers(self) -> int:
        """Threads that read a tile of the latent."""
        return self.consumers

    @property
    def latent_writers(self) -> int:
        """Threads that say that a tile of the latent is there."""
        return 1

    @property
    def rope_writers(self) -> int:
        """Threads that say that a chunk of rotary keys is there."""
        return 1

    @property
    def scaled(self) -> bool:
        """The tile holds codes, and ``scales`` what they are to be multiplied by (``latent_fp8``)."""
        return False

    def blocks_of(self, w: int) -> list[int]:
        """The rope blocks of a warpgroup."""
        every = range(self.rope.num_blocks)
        return [q for q in every if not self.by_block or q * self.rope.block_rows // self.rows == w]

    def rope_lefts(self, column) -> list:
        """First columns of a tile's chunks."""
        of_block = [u * self.rope.chunk_columns for u in range(self.rope.chunks_per_block)]
        return [column + q * self.rope.block_columns + left for q in range(self.rope.num_blocks) for left in of_block]

    def first_chunk(self, w: int) -> int:
        """Its number among a tile's."""
        return min(self.blocks_of(w), default=0) * self.rope.chunks_per_block


def static_of(shape: DecodeShape, choice: KernelChoice) -> Static:
    rope = rope_blocks(choice.tiling, shape.qk_rope_head_dim)
    chunks, consumers = rope.num_blocks * rope.chunks_per_block, choice.warpgroups * WARPGROUP
    threads = consumers + WARPGROUP
    pool = 65536 // (choice.ctas_per_sm * threads) // 8 * 8 * threads  # registers of a CTA at launch
    return Static(
        shape,
        choice,
        rope,
        by_block=rope.block_rows < choice.tiling.rows,
        rows=choice.tiling.rows // choice.warpgroups,
        latent_cols=padded_latent_columns(shape.kv_lora_rank, WARPGROUP),
        rope_cols=rope.chunks_per_block * rope.chunk_columns,
        consumers=consumers,
        registers=min(240, (pool - PRODUCER_REGISTERS * WARPGROUP) // consumers // 8 * 8),
        turns=choice.warpgroups > 1 and takes_turns(choice.tiling, rope, choice.rope_stages),
        chunks=chunks,
        rope_phases=chunks * -(-choice.rope_stages // chunks),
    )


def allocate(k: Static) -> Buffers:
    """Shared memory and barriers of a CTA."""
    stages, rope_stages, warpgroups = k.choice.num_stages, k.choice.rope_stages, k.choice.warpgroups
    return Buffers(
        q_tile=T.alloc_shared([k.tiling.rows, k.latent_cols], k.dtype),
        qp_tile=T.alloc_shared([k.rope.num_blocks * k.rope.block_rows, k.rope_cols], k.dtype),
        c_ring=T.alloc_shared([stages, BLOCK, k.latent_cols], k.dtype),
        k_ring=T.alloc_shared([rope_stages, BLOCK, k.rope.chunk_columns], k.dtype),
        p_tile=T.alloc_shared([warpgroups, BLOCK, k.rows], k.dtype),
        stage=T.alloc_shared([warpgroups, BLOCK // 16, k.rows], T.float32),
        q_full=T.alloc_barrier(1),
        q_free=T.alloc_barrier(k.consumers),
        c_full=T.alloc_barrier([k.latent_writers] * stages),
        c_free=T.alloc_barrier([k.latent_readers] * stages),
        k_full=T.alloc_barrier([k.rope_writers] * k.rope_phases),
        k_free=T.alloc_barrier([WARPGROUP if k.by_block else k.consumers] * rope_stages),
    )


@T.macro
def load_own_rope_queries(k, w, work, tile, q_pe, qp_tile):
    """Those of warpgroup ``w``, each beside zeros where other rope heads have their columns."""
    group, first_row, part, mine = k.tiling.heads_per_group, w * k.rows, k.rope.block_rows, k.blocks_of(w)
    piece = k.rope_cols if k.rope_cols <= 128 else 64
    for c in T.serial(k.rope_cols // piece):  # loads of a whole wide row at once would spill registers
        if not k.by_block:
            load_rope_queries(k, GPU, work, tile, q_pe, qp_tile, first_row, k.rows, c * piece, piece)
        elif len(mine) > 0:  # row i is head i; its block holds the columns of its own heads only
            for i, d in T.Parallel(len(mine) * part, piece):
                qp_tile[mine[0] * part + i, c * piece + d] = T.if_then_else(
                    (first_row + i < tile.valid) & ((c * piece + d) // k.d_r == i % part // group),
                    q_pe[
                        work.span[SEQUENCE],
                        0,
                        T.min(tile.head0 + first_row + i, k.shape.heads - 1),
                        (c * piece + d) % k.d_r,
                    ],
                    T.cast(0, k.dtype),
                )


@T.macro
def multiply_rope(k, w, n, memory, s, parts):
    """Rope scores of tile ``n``: products into ``s``, or of each block into one of ``parts``."""
    chunks, columns, part, stages = (
        k.rope.chunks_per_block,
        k.rope.chunk_columns,
        k.rope.block_rows,
        k.choice.rope_stages,
    )
    first, own = k.first_chunk(w), len(k.blocks_of(w)) * chunks
    for v in list(range(own)):
        u = n * k.chunks + first + v
        left = v % chunks * columns
        T.barrier_wait(memory.k_full[u % k.rope_phases], (u // k.rope_phases) & 1)
        if k.by_block:
            T.wgmma_gemm(
                memory.k_ring[u % stages, :, :],
                memory.qp_tile[
                    (first + v) // chunks * part : ((first + v) // chunks + 1) * part, left : left + columns
                ],
                parts[v // chunks],
                transpose_B=True,
                clear_accum=v % chunks == 0,
                policy=T.GemmWarpPolicy.FullRow,
            )
        else:
            T.wgmma_gemm(
                memory.k_ring[u % stages, :, :],
                memory.qp_tile[w * k.rows : (w + 1) * k.rows, v * columns : (v + 1) * columns],
                s,
                transpose_B=True,
                policy=T.GemmWarpPolicy.FullRow,
            )
        if v >= stages - 1 and v < own - 1:
            # the ring is shorter than a tile's chunks: free the oldest slot as soon as it is read
            T.wait_wgmma(stages - 1)
            T.barrier_arrive(memory.k_free[(u - (stages - 1)) % stages])
    T.wait_wgmma(0)
    for v in list(range(max(0, own - stages), own)):
        T.barrier_arrive(memory.k_free[(n * k.chunks + first + v) % stages])


@T.macro
def zero_masked_latent(k, w, work, t0, memory, slot):
    """Two warpgroups share the columns; the other one may still be reading the tile for its scores."""
    if has_masked(work.span, t0, BLOCK):
        if k.choice.warpgroups > 1:
            T.sync_threads(barrier_id=BARRIER + 2, arrive_count=k.consumers)
        zero_masked(
            GPU, work.span, t0, BLOCK, range(w * 64, k.latent_cols, 64 * k.choice.warpgroups), memory.c_ring, slot
        )
        T.fence_proxy_async()
        if k.choice.warpgroups > 1:
            T.sync_threads(barrier_id=BARRIER + 2, arrive_count=k.consumers)


@T.macro
def attend(k, w, f, i, work, memory, x, o, parts):
    """The i-th tile of the f-th fragment, for the rows of warpgroup ``w``: scores, softmax, output."""
    t0 = first_token(work.span, i)
    n = work.state[DONE] + i
    slot = n % k.choice.num_stages
    T.barrier_wait(memory.c_full[slot], (n // k.choice.num_stages) & 1)
    if k.turns:  # one multiplies while the other is at its softmax
        T.sync_threads(barrier_id=TURN + w, arrive_count=k.consumers)
    T.wgmma_gemm(
        memory.c_ring[slot, :, :],
        memory.q_tile[w * k.rows : (w + 1) * k.rows, :],
        x.s,
        transpose_B=True,
        clear_accum=True,
        policy=T.GemmWarpPolicy.FullRow,
    )
    if k.scaled:
        T.wait_wgmma(0)
        for h, j in T.Parallel(BLOCK, k.rows):
            x.s[h, j] *= memory.scales[slot, SCALE, h]
    multiply_rope(k, w, n, memory, x.s, parts)
    if k.turns:
        if w == 0 or f < work.state[FRAGMENTS] - 1 or i < work.span[TILES] - 1:
            T.named_barrier_arrive(TURN + 1 - w, k.consumers)
    for q in list(range(len(parts))):
        for h, j in T.Parallel(BLOCK, k.rope.block_rows):
            x.s[h, q * k.rope.block_rows + j] += parts[q][h, j]
    if k.scaled:  # weights shall contain their scales
        for h, j in T.Parallel(BLOCK, k.rows):
            x.s[h, j] += memory.scales[slot, LOG_SCALE, h]
    softmax.apply_mask(x, work.span, t0)
    zero_masked_latent(k, w, work, t0, memory, slot)
    softmax.reduce_row_max(x)
    softmax.find_rescale(x)
    softmax.find_weights(x)
    T.copy(x.s, memory.p_tile[w, :, :])
    if k.scaled:  # the softmax's own weights are without
        for h, j in T.Parallel(BLOCK, k.rows):
            x.s[h, j] *= memory.scales[slot, INVERSE_SCALE, h]
    softmax.add_weights(x)
    for d, j in T.Parallel(k.latent_cols, k.rows):
        o[d, j] *= x.rescale[j]
    T.gemm(memory.c_ring[slot, :, :], memory.p_tile[w, :, :], o, transpose_A=True, policy=T.GemmWarpPolicy.FullRow)
    T.barrier_arrive(memory.c_free[slot])


@T.macro
def consume(k, w, work, tile, memory, call, q_pe):
    """One warpgroup: all fragments of this CTA, for rows ``w * rows ...`` of its tile."""
    T.set_max_nreg(k.registers, 1)
    scale = call.softmax_scale * LOG2E
    tail = (tile.seqlen_q - 1) * call.causal
    x = Softmax(
        GPU, call, tile, BLOCK, k.rows, memory.stage, (w,),
        lambda: T.sync_threads(barrier_id=BARRIER + w, arrive_count=WARPGROUP), scale, tail, w * k.rows,
    )  # fmt: skip
    o = T.alloc_fragment([k.latent_cols, k.rows], T.float32)
    parts = [T.alloc_fragment([BLOCK, k.rope.block_rows], T.float32) for _ in (k.blocks_of(w) if k.by_block else ())]
    work.state[DONE] = 0
    if k.turns and w == 1:
        if work.state[FRAGMENTS] > 0:
            T.named_barrier_arrive(TURN, k.consumers)
    for f in T.serial(work.state[FRAGMENTS]):
        read_fragment(work, f)
        load_own_rope_queries(k, w, work, tile, q_pe, memory.qp_tile)
        T.fence_proxy_async()
        x.sync()
        T.fill(o, 0)
        softmax.begin(x, work.span)
        T.barrier_wait(memory.q_full, f & 1)
        for i in T.serial(work.span[TILES]):
            attend(k, w, f, i, work, memory, x, o, parts)
        T.barrier_arrive(memory.q_free)
        work.state[DONE] += work.span[TILES]
        softmax.finish(x, x.row_max)
        store(call, work.span, write_columns, x, o, x.row_sum, x.row_max)


def make_swap_ab_ws(shape: DecodeShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_swap_ab_ws`` for sm_90; :class:`MLATypes` has its arguments."""
    k, types = static_of(shape, choice), MLATypes(shape)

    @T.prim_func
    def mla_decode_swap_ab_ws(
        q_latent: types.q_latent, q_pe: types.q_pe, latent_cache: types.latent_cache, rope_cache: types.rope_cache,
        block_table: types.block_table, schedule: types.schedule, partial_out: types.partial_out,
        partial_lse: types.partial_lse, out: types.out, lse: types.lse, softmax_scale: T.float32, causal: T.int32,
        window: T.int32, sinks: T.int32,
    ):  # fmt: skip
        with T.Kernel(k.tiling.num_tiles, types.num_ctas, threads=k.consumers + WARPGROUP) as (y, cta):
            if k.choice.ctas_per_sm > 1:
                T.annotate_min_blocks_per_sm(k.choice.ctas_per_sm)
            call = Call(block_table, schedule, partial_out, partial_lse, out, lse, softmax_scale, causal, window, sinks)
            memory = allocate(k)
            thread = T.get_thread_binding()
            tile = locate(types, k.tiling, y, k.d_r)
            work = take_work(call, cta, k.page_size, BLOCK)
            T.pdl_trigger()

            if thread < WARPGROUP:
                consume(k, 0, work, tile, memory, call, q_pe)
            elif k.choice.warpgroups == 2 and thread < 2 * WARPGROUP:
                consume(k, k.choice.warpgroups - 1, work, tile, memory, call, q_pe)
            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if thread < k.consumers + 32:
                    stream(work, latent_cache, [0], [memory.c_ring], memory.c_full, memory.c_free, thread, k.consumers)
                elif thread < k.consumers + 64:
                    stream(
                        work, rope_cache, k.rope_lefts(tile.column), [memory.k_ring], memory.k_full, memory.k_free,
                        thread, k.consumers + 32,
                    )  # fmt: skip
                elif thread < k.consumers + 96:
                    stream_queries(
                        work, tile, q_latent, memory.q_tile, memory.q_full, memory.q_free, thread, k.consumers + 64
                    )

    return mla_decode_swap_ab_ws
