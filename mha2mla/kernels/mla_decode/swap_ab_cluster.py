"""MLA decode for Hopper over latents too wide for one CTA: two of a cluster own half of the columns each.

Each computes what its columns contribute to the scores of a tile, Sᵀ[tokens, rows], and stores it into the other's
shared memory; both add the same two numbers, so both have the same weights, and each multiplies its own columns of the
output with them. So every number of the cache is read once, by one multiprocessor. Otherwise as in ``swap_ab_ws``; a
tile's columns are streamed in pieces, each free again as soon as its part of the output is computed, so that a ring may
hold two and a half tiles.
"""

from dataclasses import dataclass

import tilelang.language as T
from tilelang import tvm

from mha2mla.kernels.machine import BARRIER, BY_ROW, GPU, WARPGROUP, Buffers
from mha2mla.kernels.mla_decode.selection import CLUSTER, DecodeShape, Halves, halve
from mha2mla.kernels.mla_decode.static import MLAStatic, MLATypes
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
from mha2mla.kernels.split_kv.schedule import TILES
from mha2mla.kernels.split_kv.softmax import Softmax, write_columns, zero_masked
from mha2mla.kernels.split_kv.stream import stream, stream_queries

BLOCK = 64  # cached tokens per tile: the M of one wgmma
PRODUCER_REGISTERS = 56

# A thread's scores go to the thread of the same number in the other CTA, which holds the same places of the tile: four
# at a time, which the receiving CTA's barrier counts (PTX ISA, st.async). There are two places for them: nobody sends a
# tile's scores before it has the other's of the tile before, which were sent after those of two tiles before were read.
INLINE = """
#include <tl_templates/cuda/common.h>
static __device__ __forceinline__ void put(float* held, int place, float value) { held[place] = value; }
static __device__ __forceinline__ float get(const float* held, int place) { return held[place]; }
template <int count>
static __device__ __forceinline__ void send_scores(const float* scores, const float* place, const void* full,
                                                   int other) {
  unsigned to, barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(smem_ptr_to_uint(place)), "r"(other));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(smem_ptr_to_uint(full)), "r"(other));
#pragma unroll
  for (int i = 0; i < count; i += 4)
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::
                     "r"(to + i * 512), "f"(scores[i]), "f"(scores[i + 1]), "f"(scores[i + 2]), "f"(scores[i + 3]),
                     "r"(barrier) : "memory");
}
template <int count>
static __device__ __forceinline__ void add_scores(float* scores, const float* place) {
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    float4 more = *reinterpret_cast<const float4*>(place + i * 128);
    scores[i] += more.x, scores[i + 1] += more.y, scores[i + 2] += more.z, scores[i + 3] += more.w;
  }
}
"""


@dataclass(frozen=True)
class Static(MLAStatic):
    cut: Halves
    rows: int  # of one warpgroup
    held: int  # scores of a tile that a thread holds
    consumers: int  # threads that compute
    registers: int  # of one of these


def static_of(shape: DecodeShape, choice: KernelChoice) -> Static:
    consumers, rows = choice.warpgroups * WARPGROUP, choice.tiling.rows // choice.warpgroups
    threads = consumers + WARPGROUP
    pool = 65536 // threads // 8 * 8 * threads  # registers of a CTA at launch
    return Static(
        shape,
        choice,
        halve(choice.tiling, shape.kv_lora_rank, shape.qk_rope_head_dim),
        rows,
        BLOCK * rows // WARPGROUP,
        consumers,
        registers=min(240, (pool - PRODUCER_REGISTERS * WARPGROUP) // consumers // 8 * 8),
    )


def allocate(k: Static) -> Buffers:
    """Shared memory and barriers of a CTA; ``scores``: the other's, for even and odd tiles."""
    stages, rope_stages, warpgroups = k.choice.num_stages, k.choice.rope_stages, k.choice.warpgroups
    return Buffers(
        q_tile=T.alloc_shared([k.tiling.rows, k.cut.columns], k.dtype),
        qp_tile=T.alloc_shared([k.tiling.rows, k.cut.rope_columns], k.dtype),
        c_ring=T.alloc_shared([stages, BLOCK, k.cut.unit], k.dtype),
        k_ring=T.alloc_shared([rope_stages, BLOCK, k.cut.rope_columns], k.dtype),
        p_tile=T.alloc_shared([warpgroups, BLOCK, k.rows], k.dtype),
        stage=T.alloc_shared([warpgroups, BLOCK // 16, k.rows], T.float32),
        scores=T.alloc_shared([warpgroups, 2, k.held // 4, WARPGROUP, 4], T.float32),
        q_full=T.alloc_barrier(1),
        q_free=T.alloc_barrier(k.consumers),
        c_full=T.alloc_barrier([1] * stages),
        c_free=T.alloc_barrier([k.consumers] * stages),
        k_full=T.alloc_barrier([1] * rope_stages),
        k_free=T.alloc_barrier([k.consumers] * rope_stages),
        s_full=T.alloc_cluster_barrier([1] * (2 * warpgroups)),
    )


@T.macro
def load_own_rope_queries(k, w, work, tile, half, q_pe, qp_tile):
    """Those of warpgroup ``w``, zeros where a column is another rope head's or the other CTA's."""
    piece = min(k.cut.rope_columns, 64)
    for c in T.serial(k.cut.rope_columns // piece):
        for i, d in T.Parallel(k.rows, piece):
            column = half * k.cut.rope_own + c * piece + d
            qp_tile[w * k.rows + i, c * piece + d] = T.if_then_else(
                tvm.tirx.all(
                    tile.holds(w * k.rows + i), c * piece + d < k.cut.rope_own, k.meets(w * k.rows + i, column)
                ),
                q_pe[(*tile.query(work.span, w * k.rows + i), column % k.d_r)],
                T.cast(0, k.dtype),
            )


@T.macro
def multiply_latent(k, w, n, slots, memory, s):
    """Contribution of this CTA's latent columns to the scores of its n-th tile, whose pieces lie in ``slots``."""
    stages, first, units = k.choice.num_stages, w * k.rows, k.cut.units
    for u in list(range(units)):
        T.barrier_wait(memory.c_full[slots[u]], T.truncdiv(n * units + u, stages) & 1)
        T.wgmma_gemm(
            memory.c_ring[slots[u], :, :],
            memory.q_tile[first : first + k.rows, u * k.cut.unit : (u + 1) * k.cut.unit],
            s,
            transpose_B=True,
            clear_accum=u == 0,
            policy=BY_ROW,
        )


@T.macro
def multiply_rope(k, w, n, memory, s):
    """Contribution of its cached rotary columns."""
    rope_stages, first = k.choice.rope_stages, w * k.rows
    T.barrier_wait(memory.k_full[n % rope_stages], (n // rope_stages) & 1)
    T.wgmma_gemm(
        memory.k_ring[n % rope_stages, :, :],
        memory.qp_tile[first : first + k.rows, :],
        s,
        transpose_B=True,
        policy=BY_ROW,
    )
    T.wait_wgmma(0)
    T.barrier_arrive(memory.k_free[n % rope_stages])


def place_of(i, j):
    """Index of a score among those of its thread: the accumulators of a wgmma (PTX ISA, register fragments)."""
    return j // 8 * 4 + i % 16 // 8 * 2 + j % 2


@T.macro
def share_scores(k, w, n, half, thread, memory, s, held):
    """Adds the other CTA's part of the scores."""
    at, mine = w * 2 + n % 2, thread - w * WARPGROUP
    for i, j in T.Parallel(BLOCK, k.rows):
        T.call_extern("handle", "put", T.address_of(held[0]), place_of(i, j), s[i, j])
    if mine == 0:
        T.mbarrier_arrive_expect_tx(memory.s_full[at], BLOCK * k.rows * 4)
    T.call_extern(
        "handle",
        f"send_scores<{k.held}>",
        T.address_of(held[0]),
        T.address_of(memory.scores[w, n % 2, 0, mine, 0]),
        T.address_of(memory.s_full[at]),
        1 - half,
    )
    T.barrier_wait(memory.s_full[at], (n // 2) & 1)
    T.call_extern(
        "handle",
        f"add_scores<{k.held}>",
        T.address_of(held[0]),
        T.address_of(memory.scores[w, n % 2, 0, mine, 0]),
    )
    for i, j in T.Parallel(BLOCK, k.rows):
        s[i, j] = T.call_extern("float32", "get", T.address_of(held[0]), place_of(i, j))


@T.macro
def zero_masked_latent(k, w, work, t0, slots, memory):
    """Warpgroups share the columns; another one may still be reading the tile for its scores."""
    warpgroups = k.choice.warpgroups
    if has_masked(work.span, t0, BLOCK):
        if warpgroups > 1:
            T.sync_threads(barrier_id=BARRIER + 2, arrive_count=k.consumers)
        for u in list(range(w, k.cut.units, warpgroups)):
            zero_masked(GPU, work.span, t0, BLOCK, range(0, k.cut.unit, 64), memory.c_ring, slots[u])
        T.fence_proxy_async()
        if warpgroups > 1:
            T.sync_threads(barrier_id=BARRIER + 2, arrive_count=k.consumers)


@T.macro
def attend(k, w, i, work, half, thread, memory, x, o, held, slots, multiply_rope):
    """The i-th tile of the fragment at hand, for the rows of warpgroup ``w``: scores, softmax, output."""
    t0 = first_token(work.span, i)
    n = work.state[DONE] + i
    units = k.cut.units
    for u in list(range(units)):
        slots[u] = T.truncmod(n * units + u, k.choice.num_stages)
    multiply_latent(k, w, n, slots, memory, x.s)
    multiply_rope(k, w, n, memory, x.s)
    share_scores(k, w, n, half, thread, memory, x.s, held)
    softmax.apply_mask(x, work.span, t0)
    zero_masked_latent(k, w, work, t0, slots, memory)
    softmax.reduce_row_max(x)
    softmax.find_rescale(x)
    softmax.find_weights(x)
    T.copy(x.s, memory.p_tile[w, :, :])
    softmax.add_weights(x)
    T.fence_proxy_async()
    x.sync()
    for u in list(range(units)):
        for d, j in T.Parallel(k.cut.unit, k.rows):
            o[u][d, j] *= x.rescale[j]
        T.wgmma_gemm(memory.c_ring[slots[u], :, :], memory.p_tile[w, :, :], o[u], transpose_A=True, policy=BY_ROW)
    for u in list(range(units)):
        T.wait_wgmma(units - 1 - u)
        T.barrier_arrive(memory.c_free[slots[u]])


@T.macro
def consume(
    k, w, work, tile, half, memory, call, q_pe, thread, load_queries=load_own_rope_queries, multiply_rope=multiply_rope
):
    """One warpgroup: all fragments of this CTA, for rows ``w * rows ...`` of its tile."""
    T.set_max_nreg(k.registers, 1)
    scale = call.softmax_scale * LOG2E
    tail = (tile.seqlen_q - 1) * call.causal
    x = Softmax(
        GPU, call, tile, BLOCK, k.rows, memory.stage, (w,),
        lambda: T.sync_threads(barrier_id=BARRIER + w, arrive_count=WARPGROUP), scale, tail, w * k.rows,
    )  # fmt: skip
    o = [T.alloc_fragment([k.cut.unit, k.rows], T.float32) for _ in range(k.cut.units)]
    held, slots = T.alloc_local([k.held], T.float32), T.alloc_local([k.cut.units], T.int32)
    work.state[DONE] = 0
    for f in T.serial(work.state[FRAGMENTS]):
        read_fragment(work, f)
        load_queries(k, w, work, tile, half, q_pe, memory.qp_tile)
        T.fence_proxy_async()
        x.sync()
        for u in list(range(k.cut.units)):
            T.fill(o[u], 0)
        softmax.begin(x, work.span)
        T.barrier_wait(memory.q_full, f & 1)
        for i in T.serial(work.span[TILES]):
            attend(k, w, i, work, half, thread, memory, x, o, held, slots, multiply_rope)
        T.barrier_arrive(memory.q_free)
        work.state[DONE] += work.span[TILES]
        softmax.finish(x, x.row_max)
        for u in list(range(k.cut.units)):
            store(call, work.span, write_columns, x, o[u], x.row_sum, x.row_max, half * k.cut.columns + u * k.cut.unit)


def make_swap_ab_cluster(shape: DecodeShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_swap_ab_cluster`` for sm_90; :class:`MLATypes` has its arguments."""
    k, types = static_of(shape, choice), MLATypes(shape)

    @T.prim_func
    def mla_decode_swap_ab_cluster(
        q_latent: types.q_latent, q_pe: types.q_pe, latent_cache: types.latent_cache, rope_cache: types.rope_cache,
        block_table: types.block_table, schedule: types.schedule, partial_out: types.partial_out,
        partial_lse: types.partial_lse, out: types.out, lse: types.lse, softmax_scale: T.float32, causal: T.int32,
        window: T.int32, sinks: T.int32,
    ):  # fmt: skip
        with T.Kernel(
            k.tiling.num_tiles * CLUSTER, types.num_ctas, threads=k.consumers + WARPGROUP, cluster_dims=CLUSTER
        ) as (y, cta):
            T.import_source(INLINE)
            call = Call(block_table, schedule, partial_out, partial_lse, out, lse, softmax_scale, causal, window, sinks)
            memory = allocate(k)
            thread = T.get_thread_binding()
            half = y % CLUSTER
            tile = locate(types, k.tiling, y // CLUSTER, k.d_r)
            T.pdl_sync()  # TileLang launches clusters as programmatic dependents
            work = take_work(call, cta, k.page_size, BLOCK)
            T.pdl_trigger()

            if thread < WARPGROUP:
                consume(k, 0, work, tile, half, memory, call, q_pe, thread)
            elif k.choice.warpgroups == 2 and thread < 2 * WARPGROUP:
                consume(k, k.choice.warpgroups - 1, work, tile, half, memory, call, q_pe, thread)
            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if thread < k.consumers + 32:
                    lefts = [half * k.cut.columns + u * k.cut.unit for u in range(k.cut.units)]
                    stream(
                        work, latent_cache, lefts, [memory.c_ring], memory.c_full, memory.c_free, thread, k.consumers
                    )
                elif thread < k.consumers + 64:
                    stream(
                        work, rope_cache, [tile.column + half * k.cut.rope_own], [memory.k_ring], memory.k_full,
                        memory.k_free, thread, k.consumers + 32,
                    )  # fmt: skip
                elif thread < k.consumers + 96:
                    stream_queries(
                        work, tile, q_latent, memory.q_tile, memory.q_full, memory.q_free, thread, k.consumers + 64,
                        half * k.cut.columns,
                    )  # fmt: skip
            T.cluster_sync()  # what this CTA sent may still be on its way

    return mla_decode_swap_ab_cluster
