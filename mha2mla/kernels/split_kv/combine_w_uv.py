"""Combine and W_UV in one kernel: W_UV reads partials, in place of latents merged before.

A cluster of blocks has a head. Each merges 128 columns of all rows and multiplies them with its columns of the map; all
add up in each other's shared memory. Nothing that is merged is written, and no kernel ends and begins in between.
"""

import tilelang.language as T

from mha2mla.kernels.machine import SMALL_PASS_CONFIGS, Buffers, compiler
from mha2mla.kernels.skinny_linear.up_projections import lane, multiply_step, warp
from mha2mla.kernels.split_kv.choice import MERGED_ROWS as ROWS
from mha2mla.kernels.split_kv.device import LOG2E, MASKED

SLICE = 128  # columns of a latent in a block
WARPS = 8  # of a block, each for 16 outputs
THREADS = WARPS * 32
_STEP = 32  # columns of two products: 16 bytes of a map's row for each of the four threads that share it
_AHEAD = 9  # partials that a warp has under way: two rounds for the 17 of eight sequences on 132 multiprocessors
_LANES = 32 // _AHEAD * _AHEAD  # threads of a warp that have the lse of a partial each
# State of a warp: warps that share its row, its number among them, the row's sequence and token; then of the sequence:
# its partials, the CTA of the first one, its place there; and which thread has the next one's weight. In memory, since
# expressions are substituted into every index.
SHARE, PART, SEQUENCE, TOKEN, COUNT, FIRST, PLACE, LANE = range(8)

# Two numbers into the shared memory of a block of the cluster (PTX ISA, mapa, st.shared::cluster).
INLINE = """
#include <tl_templates/cuda/common.h>
static __device__ __forceinline__ void put_pair(float first, float second, const float* place, int rank) {
  unsigned to;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(smem_ptr_to_uint(place)), "r"(rank));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" :: "r"(to), "f"(first), "f"(second) : "memory");
}
"""


def make_combine_w_uv(*, heads: int, maps: int, width: int, outputs: int, dtype: str):
    """A TileLang function ``combine_w_uv`` for sm_90, of B S_q <= 8 rows; B, S_q and CTAs are run-time values.

    A merged row is rounded to ``dtype`` before it is multiplied, and the sum once after, as by a merge and a product.

    Args:
        heads, maps: H, and how many maps there are, each for H / maps heads.
        width: of a latent, a multiple of 32 up to 1024.
        outputs: elements that a map makes of it, a multiple of 16 up to 128.
        dtype: of maps, latents and result.

    The function's arguments: splits [B,2], partial_out [num_ctas,2,S_q,H,width] and partial_lse [num_ctas,2,S_q,H] as
    ``make_combine`` has them; merged [B,S_q,H,width], what sequences that one CTA read have; up [maps,outputs,
    width] and out [B,S_q,H,outputs] (contiguous). A sequence without tokens gets zeros.
    """
    accum = T.float32
    batch, seqlen_q, num_ctas = T.dynamic("batch"), T.dynamic("seqlen_q"), T.dynamic("num_ctas")
    cluster = -(-width // SLICE)
    steps, busy = SLICE // _STEP, outputs // 16  # warps that multiply
    written = -(-busy // cluster)  # of whose outputs a block writes

    def place(m, i, h):
        """Index of the i-th partial of the warp's row."""
        return T.min(m.own[FIRST] + i, num_ctas - 1), T.if_then_else(i == 0, m.own[PLACE], 0), m.own[TOKEN], h

    @T.macro
    def fetch_map(up, m, h, c0):
        """A warp's 16 rows of the map: a thread's two, 8 numbers a step."""
        for s in T.unroll(steps):
            for u in list(range(2)):
                for v in T.vectorized(8):
                    [m.first, m.other][u][s * 8 + v] = up[
                        h // (heads // maps),
                        T.min(warp() * 16 + u * 8 + lane() // 4, outputs - 1),
                        T.min(c0 + s * _STEP, width - _STEP) + lane() % 4 * 8 + v,
                    ]

    @T.macro
    def find_row(splits, m, rows):
        """Fills this warp's state."""
        m.own[SHARE] = T.if_then_else(rows == 1, 8, T.if_then_else(rows == 2, 4, T.if_then_else(rows <= 4, 2, 1)))
        m.own[PART] = warp() % m.own[SHARE]
        m.own[SEQUENCE] = T.min(warp() // m.own[SHARE], rows - 1) // seqlen_q
        m.own[TOKEN] = T.min(warp() // m.own[SHARE], rows - 1) % seqlen_q
        m.own[COUNT] = splits[m.own[SEQUENCE], 0]
        m.own[FIRST] = T.max(0, splits[m.own[SEQUENCE], 1] // 2)
        m.own[PLACE] = T.max(0, splits[m.own[SEQUENCE], 1] % 2)

    def partial(m, j):
        """Number of the warp's j-th among those of its row, which its warps take in turn."""
        return m.own[PART] + j * m.own[SHARE]

    @T.macro
    def fetch_partials(partial_out, m, h, c, first):
        """The warp's from the ``first``-th on: 4 columns a thread."""
        for u in T.unroll(_AHEAD):
            for v in T.vectorized(4):
                m.part[u * 4 + v] = partial_out[
                    (*place(m, T.min(partial(m, first + u), m.own[COUNT] - 1), h), T.min(c, width - 4) + v)
                ]

    @T.macro
    def fetch_lse(partial_lse, m, h, first):
        """One a thread, of the warp's partials from the ``first``-th on."""
        m.weight[0] = T.if_then_else(
            (lane() < _LANES) & (partial(m, first + lane()) < m.own[COUNT]),
            partial_lse[place(m, T.min(partial(m, first + lane()), m.own[COUNT] - 1), h)],
            -T.infinity(accum),
        )

    @T.macro
    def add_partials(m):
        """By their weights. What is without may be anything."""
        for u in T.unroll(_AHEAD):
            m.weight[1] = T.shfl_sync(m.weight[0], m.own[LANE] + u)
            m.total[0] += m.weight[1]
            for v in T.unroll(4):
                m.sums[v] += T.if_then_else(m.weight[1] == 0, 0.0, m.weight[1] * m.part[u * 4 + v])

    @T.macro
    def merge_own(partial_out, partial_lse, m, h, c):
        """The warp's partials, by weights beside their own largest lse."""
        rounds = T.ceildiv(T.max(0, m.own[COUNT] - m.own[PART]), m.own[SHARE] * _AHEAD)
        fetch_partials(partial_out, m, h, c, 0)  # on their way before their weights are known
        for k in T.serial(T.max(1, T.ceildiv(rounds * _AHEAD, _LANES))):  # the last that are fetched are the first
            fetch_lse(partial_lse, m, h, (T.max(1, T.ceildiv(rounds * _AHEAD, _LANES)) - 1 - k) * _LANES)
            m.row_max[0] = T.max(m.row_max[0], m.weight[0])
        m.row_max[0] = T.warp_reduce_max(m.row_max[0])
        for k in T.serial(T.max(1, rounds)):
            m.own[LANE] = k * _AHEAD % _LANES
            if k > 0:
                fetch_partials(partial_out, m, h, c, k * _AHEAD)
                if m.own[LANE] == 0:
                    fetch_lse(partial_lse, m, h, k * _AHEAD)
            if m.own[LANE] == 0:
                m.weight[0] = T.exp2((m.weight[0] - m.row_max[0]) * LOG2E)
            add_partials(m)

    @T.macro
    def merge(partial_out, partial_lse, merged, m, h, c0, rows):
        """The block's columns of every row into ``m.given``."""
        c = c0 + lane() * 4
        for v in T.unroll(4):
            m.sums[v] = 0.0
        m.total[0] = 0.0
        m.row_max[0] = MASKED
        if m.own[COUNT] > 1:
            merge_own(partial_out, partial_lse, m, h, c)
        if (m.own[COUNT] == 1) & (m.own[PART] == 0):
            m.total[0] = 1.0
            for v in T.vectorized(4):
                m.held[v] = merged[m.own[SEQUENCE], m.own[TOKEN], h, T.min(c, width - 4) + v]
            for v in T.unroll(4):
                m.sums[v] = T.cast(m.held[v], accum)
        for v in T.vectorized(4):
            m.parts[warp(), lane() * 4 + v] = m.sums[v]
        if lane() == 0:
            m.totals[warp()] = m.total[0]
            m.maxima[warp()] = m.row_max[0]
        T.sync_threads()
        for j in T.serial(T.ceildiv(rows * SLICE, THREADS)):
            e = j * THREADS + T.get_thread_binding()
            if e < rows * SLICE:
                first = e // SLICE * m.own[SHARE]
                m.row_max[0] = MASKED
                for w in T.serial(m.own[SHARE]):
                    m.row_max[0] = T.max(m.row_max[0], m.maxima[T.min(first + w, WARPS - 1)])
                for i in T.unroll(2):
                    m.weight[i] = 0.0
                for w in T.serial(m.own[SHARE]):
                    m.total[0] = T.exp2((m.maxima[T.min(first + w, WARPS - 1)] - m.row_max[0]) * LOG2E)
                    m.weight[0] += m.total[0] * m.parts[T.min(first + w, WARPS - 1), e % SLICE]
                    m.weight[1] += m.total[0] * m.totals[T.min(first + w, WARPS - 1)]
                m.given[e // SLICE, e % SLICE] = T.if_then_else(
                    (c0 + e % SLICE < width) & (m.weight[1] != 0),  # NaN stays
                    T.cast(m.weight[0] / m.weight[1], dtype),
                    T.cast(0.0, dtype),
                )
        T.sync_threads()

    @T.macro
    def multiply(m, rows):
        """The warp's outputs of the block's columns: a thread has two rows of the map and two of ``given``."""
        for i in T.unroll(4):
            m.sums[i] = 0.0
        for s in T.unroll(steps):
            for v in T.vectorized(8):  # rows past the last repeat it; their sums are not used
                m.right[v] = m.given[T.min(lane() // 4, rows - 1), s * _STEP + lane() % 4 * 8 + v]
            multiply_step(m, s, dtype)

    @T.prim_func
    def combine_w_uv(
        splits: T.Tensor([batch, 2], T.int32),
        partial_out: T.Tensor([num_ctas, 2, seqlen_q, heads, width], accum),
        partial_lse: T.Tensor([num_ctas, 2, seqlen_q, heads], accum),
        merged: T.Tensor([batch, seqlen_q, heads, width], dtype),
        up: T.Tensor([maps, outputs, width], dtype),
        out: T.Tensor([batch, seqlen_q, heads, outputs], dtype),
    ):
        with T.Kernel(heads * cluster, threads=THREADS, cluster_dims=cluster) as x:
            T.import_source(INLINE)
            T.annotate_min_blocks_per_sm(2)
            m = Buffers(
                first=T.alloc_local([steps * 8], dtype),
                other=T.alloc_local([steps * 8], dtype),
                left=T.alloc_local([8], dtype),
                right=T.alloc_local([8], dtype),
                held=T.alloc_local([4], dtype),
                part=T.alloc_local([_AHEAD * 4], accum),
                sums=T.alloc_local([4], accum),
                weight=T.alloc_local([2], accum),
                row_max=T.alloc_local([1], accum),
                total=T.alloc_local([1], accum),
                own=T.alloc_local([8], T.int32),
                totals=T.alloc_shared([WARPS], accum),
                maxima=T.alloc_shared([WARPS], accum),
                parts=T.alloc_shared([WARPS, SLICE], accum),
                given=T.alloc_shared([ROWS, SLICE], dtype),
                came=T.alloc_shared([cluster, written, 16, ROWS], accum),  # from each block of the cluster
            )
            h, rank, rows = x // cluster, x % cluster, batch * seqlen_q
            # From the first line to the last nothing else lies where other blocks write, once all have begun.
            for j in T.serial(T.ceildiv(cluster * written * 16 * ROWS, THREADS)):
                e = j * THREADS + T.get_thread_binding()
                if e < cluster * written * 16 * ROWS:
                    m.came[e // (written * 16 * ROWS), e // (16 * ROWS) % written, e // ROWS % 16, e % ROWS] = 0.0
            T.cluster_arrive()
            fetch_map(up, m, h, rank * SLICE)
            T.pdl_sync()
            T.pdl_trigger()
            find_row(splits, m, rows)
            merge(partial_out, partial_lse, merged, m, h, rank * SLICE, rows)
            multiply(m, rows)
            T.cluster_wait()
            if warp() < busy:
                for i in T.unroll(2):
                    T.call_extern(
                        "handle",
                        "put_pair",
                        m.sums[i * 2],
                        m.sums[i * 2 + 1],
                        T.address_of(m.came[rank, warp() // cluster, lane() // 4 + i * 8, lane() % 4 * 2]),
                        warp() % cluster,
                    )
            T.cluster_sync()
            for j in T.serial(T.ceildiv(written * 16 * ROWS, THREADS)):
                e = j * THREADS + T.get_thread_binding()
                w, o, r = e // (16 * ROWS), e % 16, e // 16 % ROWS
                if (w < written) & (w * cluster + rank < busy) & (r < rows):
                    m.weight[0] = 0.0
                    for s in T.unroll(cluster):
                        m.weight[0] += m.came[s, T.min(w, written - 1), o, r]
                    out[r // seqlen_q, r % seqlen_q, h, (w * cluster + rank) * 16 + o] = T.cast(m.weight[0], dtype)

    return combine_w_uv


compile_combine_w_uv = compiler(make_combine_w_uv, SMALL_PASS_CONFIGS)
