"""MLA decode for Hopper over latents too wide for one CTA: two of a cluster own half of the columns each.

Each computes what its columns contribute to the scores of a tile, Sᵀ[tokens, rows], and stores it into the other's
shared memory; both add the same two parts, so both have the same weights, and each multiplies its own columns of the
output with them. So every element of the cache is read once, by one multiprocessor. Otherwise as in ``swap_ab_ws``; a
tile's columns are streamed in pieces, each free again as soon as its part of the output is computed, so that a ring may
hold two and a half tiles.

``latent_cluster``, over a cache of the latent alone: each CTA makes keys of its own columns, as in ``latent_ws``.
K = R(t)(W_KR c + b_KR) is a sum over columns, and so is the score. What a CTA's part of the keys adds to the scores
goes to the other one with what its part of the latent adds; b_KR is in the first one's. So W_KR too is cut in halves,
which fit into registers.
"""

import tilelang.language as T
from tilelang import tvm

from mha2mla.kernels.machine import BY_ROW, ROW_GROUP, SWIZZLE_128, WARPGROUP
from mha2mla.kernels.mla_decode import latent_ws, swap_ab_ws
from mha2mla.kernels.mla_decode.selection import PANEL_BYTES, DecodeShape, RopeBlocks, halve, key_steps
from mha2mla.kernels.mla_decode.static import MLATypes
from mha2mla.kernels.split_kv import device, softmax
from mha2mla.kernels.split_kv.choice import KernelChoice

# A thread's scores go to the thread of the same number in the other CTA, which holds the same places of the tile: four
# at a time, which the receiving CTA's barrier counts (PTX ISA, st.async). There are two places for them: a CTA
# sends a tile's scores once it has the other's of the tile before, sent after those of two tiles before were read.
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


class Columns:
    """Columns and memory of a CTA of the cluster, beside those of ``swap_ab_ws``."""

    clustered = True
    latent_cols = property(lambda k: k.cut.columns)
    slot_cols = property(lambda k: k.cut.unit)
    held = property(lambda k: swap_ab_ws.BLOCK * k.rows // WARPGROUP)  # scores of a tile that a thread holds
    source = property(lambda k: super().source + INLINE)

    def lefts(self, half) -> list:
        return [half * self.cut.columns + u * self.cut.unit for u in range(self.cut.units)]

    def allocate(self) -> dict:
        """``scores``: the other CTA's, for even and odd tiles."""
        warpgroups = self.choice.warpgroups
        return {
            **self.allocate_tiles(),
            "scores": T.alloc_shared([warpgroups, 2, self.held // 4, WARPGROUP, 4], T.float32),
            **self.allocate_barriers(),
            "s_full": T.alloc_cluster_barrier([1] * (2 * warpgroups)),
        }


class Static(Columns, swap_ab_ws.Static):
    cut = property(lambda k: halve(k.tiling, k.d_c, k.d_r, k.choice.variant))
    rope_chunks = property(lambda k: k.cut.rope_columns // k.cut.rope_chunk)
    rope = property(lambda k: RopeBlocks(1, k.tiling.rows, k.cut.rope_columns, k.rope_chunks, k.cut.rope_chunk))

    def rope_lefts(self, column, half) -> list:
        return [column + half * self.cut.rope_own + u * self.cut.rope_chunk for u in range(self.rope_chunks)]


@T.macro
def load_own_rope_queries(k, w, work, tile, half, q_pe, qp_tile):
    """Loads the rotary queries of warpgroup ``w``, zeros in the columns of other rope heads and of the other CTA."""
    piece = min(k.cut.rope_columns, 64)
    for c in T.serial(k.cut.rope_columns // piece):
        for i, d in T.Parallel(k.rows, piece):
            column = half * k.cut.rope_own + c * piece + d
            qp_tile[w * k.rows + i, c * piece + d] = T.if_then_else(
                tvm.tirx.all(
                    tile.holds(w * k.rows + i), c * piece + d < k.cut.rope_own, k.meets(w * k.rows + i, column)
                ),
                q_pe[(*tile.query(work, w * k.rows + i), column % k.d_r)],
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


def place_of(i, j):
    """Index of a score among those of its thread: the accumulators of a wgmma (PTX ISA, register fragments)."""
    return j // 8 * 4 + i % 16 // 8 * 2 + j % 2


@T.macro
def share_scores(k, w, n, half, thread, memory, s, held):
    """Adds the other CTA's part of the scores."""
    at, mine = w * 2 + n % 2, thread - w * WARPGROUP
    for i, j in T.Parallel(swap_ab_ws.BLOCK, k.rows):
        T.call_extern("handle", "put", T.address_of(held[0]), place_of(i, j), s[i, j])
    if mine == 0:
        T.mbarrier_arrive_expect_tx(memory.s_full[at], swap_ab_ws.BLOCK * k.rows * 4)
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
        "handle", f"add_scores<{k.held}>", T.address_of(held[0]), T.address_of(memory.scores[w, n % 2, 0, mine, 0])
    )
    for i, j in T.Parallel(swap_ab_ws.BLOCK, k.rows):
        s[i, j] = T.call_extern("float32", "get", T.address_of(held[0]), place_of(i, j))


@T.macro
def attend(k, w, i, work, half, thread, memory, x, o, held, slots):
    """The i-th tile of the fragment, for the rows of warpgroup ``w``: scores, softmax, output."""
    t0 = work.first_token(i)
    n = work.done + i
    units = k.cut.units
    for u in list(range(units)):
        slots[u] = T.truncmod(n * units + u, k.choice.num_stages)
    multiply_latent(k, w, n, slots, memory, x.s)
    swap_ab_ws.multiply_rope(k, w, n, memory, x.s, [])
    share_scores(k, w, n, half, thread, memory, x.s, held)
    own = range(w, units, k.choice.warpgroups)  # warpgroups share the columns
    swap_ab_ws.weigh(k, w, work, t0, memory, x, [(slots[u], range(0, k.cut.unit, 64)) for u in own])
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
def consume(k, w, work, tile, half, memory, call, thread):
    """One warpgroup: all fragments of this CTA, for rows ``w * rows ...`` of its tile."""
    T.set_max_nreg(k.registers, 1)
    x = swap_ab_ws.make_own_softmax(k, w, tile, memory, call)
    o = [T.alloc_fragment([k.cut.unit, k.rows], T.float32) for _ in range(k.cut.units)]
    held, slots = T.alloc_local([k.held], T.float32), T.alloc_local([k.cut.units], T.int32)
    device.restart(work)
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        if k.makes_keys:
            swap_ab_ws.load_own_rope_queries(k, w, work, tile, call.q_pe, memory.qp_tile, k.first_key_column(half))
        else:
            load_own_rope_queries(k, w, work, tile, half, call.q_pe, memory.qp_tile)
        T.fence_proxy_async()
        x.sync()
        for u in list(range(k.cut.units)):
            T.fill(o[u], 0)
        softmax.begin(x, work)
        T.barrier_wait(memory.q_full, f & 1)
        for i in T.serial(work.tiles):
            attend(k, w, i, work, half, thread, memory, x, o, held, slots)
        T.barrier_arrive(memory.q_free)
        device.end_fragment(work)
        softmax.finish(x, x.row_max)
        for u in list(range(k.cut.units)):
            device.store(call, work, softmax.write_columns, x, o[u], x.row_sum, x.row_max, k.lefts(half)[u])


def make_swap_ab_cluster(shape: DecodeShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_swap_ab_cluster`` for sm_90; :class:`MLATypes` has its arguments."""
    return swap_ab_ws.make_streaming(Static(shape, choice), MLATypes(shape), consume)


class LatentStatic(Columns, latent_ws.Static):
    cut = property(lambda k: halve(k.tiling, k.d_c, 8))
    steps = property(lambda k: key_steps(k.cut.columns))


@T.macro
def multiply(k, c, n, slots, memory):
    """The sums of the n-th tile's columns: under way, not awaited."""
    units, stages = k.cut.units, k.choice.num_stages
    latent_ws.begin_sums(k, c)
    for u in list(range(units)):
        slots[u] = T.truncmod(n * units + u, stages)
        T.barrier_wait(memory.c_full[slots[u]], T.truncdiv(n * units + u, stages) & 1)
        if u == 0:
            T.warpgroup_fence_operand(c.sums, num_regs=latent_ws.SUMS)
            T.warpgroup_arrive()
        for s in T.unroll(k.cut.unit // 16):
            T.call_extern(
                "handle",
                f"multiply_weight<{k.half}>",
                T.access_ptr(c.w[4 * (u * (k.cut.unit // 16) + s)], "r", 4),
                c.tile_desc.data,
                (slots[u] * (swap_ab_ws.BLOCK * k.cut.unit * 2) + s // 4 * PANEL_BYTES + s % 4 * 32) >> 4,
                T.access_ptr(c.sums[0], "rw", latent_ws.SUMS),
            )
    T.warpgroup_commit_batch()


@T.macro
def make_keys(k, half, work, memory, call, thread):
    """One warpgroup: what this CTA's columns contribute to its 64 columns of the keys of all tiles."""
    T.set_max_nreg(k.choice.registers[1], k.key_grows)
    c, slots = latent_ws.KeyMaker(k, thread), T.alloc_local([k.cut.units], T.int32)
    T.initialize_wgmma_descriptor(c.tile_desc, memory.c_ring.access_ptr("r"), SWIZZLE_128, 1, ROW_GROUP)
    latent_ws.load_weight(k, c, call, half * k.cut.columns)
    for e in list(range(2)):
        c.bias[e] = T.if_then_else(half == 0, c.bias[e], 0.0)
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for i in T.serial(work.tiles):
            n = work.done + i
            at = n * k.chunks + c.v
            multiply(k, c, n, slots, memory)
            latent_ws.find_first_turns(c, work, call, work.first_token(i))
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(c.sums, num_regs=latent_ws.SUMS)
            for u in list(range(k.cut.units)):
                T.barrier_arrive(memory.c_free[slots[u]])
            latent_ws.rotate(c)
            latent_ws.hand_over(k, c, memory, at)
        device.end_fragment(work)


def make_latent_cluster(shape: DecodeShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_latent_cluster`` for sm_90; :class:`MLATypes` has its arguments, without a
    rope_cache."""
    k, types = LatentStatic(shape, choice), MLATypes(shape, has_rope_cache=False)
    return swap_ab_ws.make_streaming(k, types, consume, make_keys)
