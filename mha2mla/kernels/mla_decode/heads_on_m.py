"""MLA decode for Hopper, 64 query rows on the M side of wgmma: for tiles whose rows are full, where arithmetic counts.

Three computing warpgroups: the first does scores and softmax and hands the weights over in shared memory, the other two
multiply one half of the latent's columns each. So the scores and the softmax of one tile run beside the output products
of the tile before without any interleaving by hand (FlashMLA's seesaw and FlashAttention-3's pair of warpgroups leave
the tensor cores idle where a warpgroup that holds half of the output also has a softmax to do; here that one holds no
output, and registers suffice for a fourth warpgroup that streams the cache).

Variants: ``lazy`` rescales the output only when a row's maximum has grown by more than ``GROWTH``; until then weights
are taken relative to the older maximum, which is exact: sum and logsumexp are relative to it too. ``plain``: always.
"""

import tilelang.language as T

from mha2mla.kernels.machine import BARRIER, BY_ROW, GPU, WARPGROUP, Buffers
from mha2mla.kernels.mla_decode.selection import (
    HEADS_ON_M_THREADS,
    DecodeShape,
    padded_latent_columns,
    padded_rope_columns,
)
from mha2mla.kernels.mla_decode.static import MLAStatic, MLATypes, load_rope_queries
from mha2mla.kernels.split_kv import device
from mha2mla.kernels.split_kv.choice import KernelChoice

CONSUMERS = 3 * WARPGROUP
BLOCK = 64  # cached tokens per tile
ROWS = 64  # the M of one wgmma
# Registers a thread of each role keeps; 512 in all for four warpgroups.
SCORE_REGISTERS, OUTPUT_REGISTERS, PRODUCER_REGISTERS = 120, 168, 56
GROWTH = 8.0  # of a maximum, in powers of 2, that weights may exceed 1 by: 256 is exact in every dtype


class Static(MLAStatic):
    latent_cols = property(lambda k: padded_latent_columns(k.d_c, HEADS_ON_M_THREADS))
    quarter = property(lambda k: k.latent_cols // 4)  # of its columns: an instruction over half has too few registers
    rope_cols = property(lambda k: padded_rope_columns(k.tiling.groups_per_tile * k.d_r))
    stages = property(lambda k: k.choice.num_stages)  # tiles in flight
    lazy = property(lambda k: k.choice.variant == "lazy")


def allocate(k: Static) -> Buffers:
    """Shared memory and barriers of a CTA; ``latent``: rings of the quarters."""
    stages = k.stages
    return Buffers(
        q_tile=T.alloc_shared([ROWS, k.latent_cols], k.dtype),
        qp_tile=T.alloc_shared([ROWS, k.rope_cols], k.dtype),
        latent=[T.alloc_shared([stages, BLOCK, k.quarter], k.dtype) for _ in range(4)],
        k_ring=T.alloc_shared([stages, BLOCK, k.rope_cols], k.dtype),
        p_tile=T.alloc_shared([ROWS, BLOCK], k.dtype),
        rescale=T.alloc_shared([ROWS], T.float32),
        inverses=T.alloc_shared([2, ROWS], T.float32),  # of even and odd fragments
        q_full=T.alloc_barrier(1),
        q_free=T.alloc_barrier(WARPGROUP),
        half_full=[T.alloc_barrier([1] * stages) for _ in range(2)],
        half_free=[T.alloc_barrier([WARPGROUP] * stages) for _ in range(2)],
        k_full=T.alloc_barrier([1] * stages),
        k_free=T.alloc_barrier([WARPGROUP] * stages),
        p_full=T.alloc_barrier(WARPGROUP),
        p_free=T.alloc_barrier(2 * WARPGROUP),
        end=T.alloc_barrier(WARPGROUP),
    )


@T.macro
def multiply_scores(k, n, memory, s):
    """Scores of the n-th tile of this CTA."""
    slot, phase = n % k.stages, (n // k.stages) & 1
    for i in list(range(4)):
        if i % 2 == 0:
            T.barrier_wait(memory.half_full[i // 2][slot], phase)
        T.wgmma_gemm(
            memory.q_tile[:, i * k.quarter : (i + 1) * k.quarter],
            memory.latent[i][slot, :, :],
            s,
            transpose_B=True,
            clear_accum=i == 0,
            policy=BY_ROW,
        )
    T.barrier_wait(memory.k_full[slot], phase)
    T.wgmma_gemm(memory.qp_tile, memory.k_ring[slot, :, :], s, transpose_B=True, policy=BY_ROW)
    T.wait_wgmma(0)
    T.barrier_arrive(memory.k_free[slot])


@T.macro
def find_weights(k, x, scale):
    """Online softmax (arXiv 1805.02867): ``s`` becomes weights, ``rescale`` the factor for what was summed before."""
    T.copy(x.row_max, x.new_max)
    T.reduce_max(x.s, x.new_max, dim=1, clear=False)
    if k.lazy:
        for i in T.Parallel(ROWS):
            x.new_max[i] = T.if_then_else((x.new_max[i] - x.row_max[i]) * scale > GROWTH, x.new_max[i], x.row_max[i])
    for i in T.Parallel(ROWS):
        x.rescale[i] = T.exp2((x.row_max[i] - x.new_max[i]) * scale)
        x.row_max[i] = x.new_max[i]
        x.new_max[i] = T.if_then_else(
            x.new_max[i] == device.MASKED, 0.0, x.new_max[i]
        )  # so that masked scores weigh nothing
    for i, j in T.Parallel(ROWS, BLOCK):
        x.s[i, j] = T.exp2((x.s[i, j] - x.new_max[i]) * scale)


@T.macro
def weigh(k, work, tile, memory, call):
    """The first warpgroup: scores and weights of all fragments, and their log-sum-exps."""
    T.set_max_nreg(SCORE_REGISTERS, 0)
    x = Buffers(
        s=T.alloc_fragment([ROWS, BLOCK], T.float32),
        row_max=T.alloc_fragment([ROWS], T.float32),
        new_max=T.alloc_fragment([ROWS], T.float32),
        rescale=T.alloc_fragment([ROWS], T.float32),
        row_sum=T.alloc_fragment([ROWS], T.float32),
        tile_sum=T.alloc_fragment([ROWS], T.float32),
        limit=T.alloc_fragment([ROWS], T.int32),  # first token that a row's query does not see
    )
    scale = call.softmax_scale * device.LOG2E
    tail = (tile.seqlen_q - 1) * call.causal
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for c in T.serial(k.rope_cols // 16):  # in pieces: loads of a whole row at once cost registers
            load_rope_queries(k, GPU, work, tile, call.q_pe, memory.qp_tile, 0, ROWS, c * 16, 16)
        T.fence_proxy_async()
        T.sync_threads(barrier_id=BARRIER, arrive_count=WARPGROUP)
        T.fill(x.row_sum, 0)
        T.fill(x.row_max, device.MASKED)
        for i in T.Parallel(ROWS):
            x.limit[i] = work.stop - tail + T.min(tile.token(i), tail)
        T.barrier_wait(memory.q_full, f & 1)
        for u in T.serial(work.tiles):
            t0 = work.first_token(u)
            n = work.done + u
            multiply_scores(k, n, memory, x.s)
            if work.needs_mask(t0, BLOCK, tail):
                for i, j in T.Parallel(ROWS, BLOCK):
                    x.s[i, j] = T.if_then_else(
                        work.is_visible(t0 + j, x.limit[i], call.window, call.sinks), x.s[i, j], device.MASKED
                    )
            find_weights(k, x, scale)
            T.barrier_wait(memory.p_free, (n & 1) ^ 1)
            T.copy(x.s, memory.p_tile)
            T.copy(x.rescale, memory.rescale)
            T.fence_proxy_async()
            T.barrier_arrive(memory.p_full)
            T.reduce_sum(x.s, x.tile_sum, dim=1)
            for i in T.Parallel(ROWS):
                x.row_sum[i] = x.row_sum[i] * x.rescale[i] + x.tile_sum[i]
        T.barrier_arrive(memory.q_free)
        device.end_fragment(work)
        for i in T.Parallel(ROWS):
            x.row_max[i] = T.if_then_else(
                x.row_sum[i] == 0, -T.infinity(T.float32), (T.log2(x.row_sum[i]) + x.row_max[i] * scale) * device.LN2
            )
            x.row_sum[i] = 1.0 / T.max(x.row_sum[i], 1e-30)
        T.copy(x.row_sum, memory.inverses[f & 1, :])
        T.barrier_arrive(memory.end)
        for i in T.Parallel(ROWS):
            if tile.holds(i):
                device.store(call, work, device.write_lse, tile, i, x.row_max, i)


@T.macro
def write_rows(target, tile, o, inverse, left):
    """Columns ``left ...`` of all rows."""
    for i, d in T.Parallel(ROWS, int(o.shape[1])):
        if tile.holds(i):
            if left + d < target.out.shape[-1]:
                target.out[target.row(tile, i, left + d)] = o[i, d] * inverse[i]


@T.macro
def multiply(k, w, work, tile, memory, call):
    """One warpgroup: half ``w`` of the output's columns, for all fragments."""
    T.set_max_nreg(OUTPUT_REGISTERS, 1)
    quarters = memory.latent[2 * w : 2 * w + 2]
    o = [T.alloc_fragment([ROWS, k.quarter], T.float32) for _ in range(2)]
    factor = T.alloc_fragment([ROWS], T.float32)
    grown = T.alloc_local([1], T.int32)
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for u in list(range(2)):
            T.fill(o[u], 0)
        for i in T.serial(work.tiles):
            t0 = work.first_token(i)
            n = work.done + i
            slot = n % k.stages
            T.barrier_wait(memory.half_full[w][slot], (n // k.stages) & 1)
            T.barrier_wait(memory.p_full, n & 1)
            T.copy(memory.rescale, factor)
            if k.lazy:
                grown[0] = 0
                for r in T.Parallel(ROWS):
                    if factor[r] != 1.0:
                        grown[0] = 1
            if (not k.lazy) or T.any_sync(grown[0] != 0):
                for u in list(range(2)):
                    for r, d in T.Parallel(ROWS, k.quarter):
                        o[u][r, d] *= factor[r]
            if work.has_masked(t0, BLOCK):
                for u in list(range(2)):
                    device.zero_masked(GPU, work, t0, BLOCK, range(0, k.quarter, 64), quarters[u], slot)
                    T.fence_proxy_async()
                T.sync_threads(barrier_id=BARRIER + 1 + w, arrive_count=WARPGROUP)
            for u in list(range(2)):
                T.wgmma_gemm(memory.p_tile, quarters[u][slot, :, :], o[u], policy=BY_ROW)
            T.wait_wgmma(0)
            T.barrier_arrive(memory.p_free)
            T.barrier_arrive(memory.half_free[w][slot])
        device.end_fragment(work)
        T.barrier_wait(memory.end, f & 1)
        T.copy(memory.inverses[f & 1, :], factor)
        for u in list(range(2)):
            device.store(call, work, write_rows, tile, o[u], factor, (2 * w + u) * k.quarter)


def make_heads_on_m(shape: DecodeShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_heads_on_m`` for sm_90; :class:`MLATypes` has its arguments."""
    k, types = Static(shape, choice), MLATypes(shape)

    @T.macro
    def body(call):
        with T.Kernel(k.tiling.num_tiles, types.num_ctas, threads=HEADS_ON_M_THREADS) as (y, cta):
            m = allocate(k)
            thread = T.get_thread_binding()
            tile = device.locate(types, k.tiling, y, k.d_r)
            work = device.take_work(call, cta, k.page_size, BLOCK)
            T.pdl_trigger()
            halves = [
                (device.stream, work, call.latent_cache, [2 * w * k.quarter], m.latent[2 * w : 2 * w + 2], *barriers)
                for w, barriers in enumerate(zip(m.half_full, m.half_free, strict=True))
            ]
            keys = (device.stream, work, call.rope_cache, [tile.column], [m.k_ring], m.k_full, m.k_free)
            queries = (device.stream_queries, work, tile, call.q_latent, m.q_tile, m.q_full, m.q_free, 0)
            device.run_roles(
                thread,
                [
                    (WARPGROUP, weigh, k, work, tile, m, call),
                    (2 * WARPGROUP, multiply, k, 0, work, tile, m, call),
                    (3 * WARPGROUP, multiply, k, 1, work, tile, m, call),
                    (None, device.run_loaders, PRODUCER_REGISTERS, thread, CONSUMERS, [*halves, keys, queries]),
                ],
            )

    return types.make("heads_on_m", body)
