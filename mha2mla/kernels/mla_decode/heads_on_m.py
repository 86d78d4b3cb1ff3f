"""MLA decode for Hopper, 64 query rows on the M side of wgmma: for tiles whose rows are full, where arithmetic counts.

Three computing warpgroups: the first does scores and softmax and hands the weights over in shared memory, the other two
multiply one half of the latent's columns each. So the scores and the softmax of one tile run beside the output products
of the tile before without any interleaving by hand (FlashMLA's seesaw and FlashAttention-3's pair of warpgroups leave
the tensor cores idle where a warpgroup that holds half of the output also has a softmax to do; here that one holds no
output, and registers suffice for a fourth warpgroup that streams the cache).
"""

import tilelang.language as T

from mha2mla.kernels.mla_decode.selection import HEADS_ON_M_THREADS, padded_latent_columns, padded_rope_columns
from mha2mla.kernels.split_kv.fragment import (
    LN2,
    LOG2E,
    MASKED,
    SPAN_FIELDS,
    first_token,
    holds_unseen,
    needs_mask,
    read_fragment,
    sees,
    tile_origin,
    unseen,
)
from mha2mla.kernels.split_kv.schedule import COUNT, FIELDS, NEXT, SEQUENCE, SLOT, STOP, TILES
from mha2mla.kernels.split_kv.stream import make_streams
from mha2mla.kernels.split_kv.tiling import RowTiling

WARPGROUP = 128  # threads
BLOCK = 64  # cached tokens per tile
ROWS = 64  # the M of one wgmma
BARRIER = 8  # named barriers below 8 belong to the compiler
# Registers a thread of each role keeps; 512 in all for four warpgroups.
SCORE_REGISTERS, OUTPUT_REGISTERS, PRODUCER_REGISTERS = 120, 168, 56
GROWTH = 8.0  # of a maximum, in powers of 2, that weights may exceed 1 by: 256 is exact in every dtype


def make_heads_on_m(
    *,
    heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    num_rope_heads: int,
    page_size: int,
    dtype: str,
    tiling: RowTiling,
    num_stages: int = 2,
    paired: bool = False,
    lazy: bool = False,
):
    """A TileLang function ``mla_decode_heads_on_m`` for one static shape; arguments as :func:`make_swap_ab` describes.

    Args:
        heads, kv_lora_rank, qk_rope_head_dim, num_rope_heads: H, d_c, d_r, G.
        page_size: tokens per page, a power of two >= 16.
        dtype: "bfloat16" or "float16".
        tiling: which 64 query rows one CTA serves; its rope heads fill at most 64 columns.
        num_stages: tiles in flight.
        paired: CTAs of neighbouring tiles form a cluster and share what they read: the first sends it to both. Their
            rope columns must be the same (``selection.can_pair``).
        lazy: the output is rescaled only when a row's maximum has grown by more than ``GROWTH``; until then weights are
            taken relative to the older maximum, which is exact: sum and logsumexp are relative to it too.
    """
    d_c, d_r = kv_lora_rank, qk_rope_head_dim
    groups, group = tiling.groups_per_tile, tiling.heads_per_group
    one_token = tiling.tokens_per_tile == 1 and tiling.token_tiles == 1
    latent_cols = padded_latent_columns(d_c, HEADS_ON_M_THREADS)
    half, quarter = latent_cols // 2, latent_cols // 4  # an instruction over a half would not fit the registers
    rope_cols = padded_rope_columns(groups * d_r)
    accum = T.float32
    pieces = max(1, BLOCK // page_size)
    consumers = 3 * WARPGROUP
    by_row = T.GemmWarpPolicy.FullRow

    batch, seqlen_q = T.dynamic("batch"), T.dynamic("seqlen_q")
    num_pages, max_pages = T.dynamic("num_pages"), T.dynamic("max_pages")
    num_ctas, fragments = T.dynamic("num_ctas"), T.dynamic("fragments")
    ql_b, ql_s, ql_h = T.dynamic("ql_b"), T.dynamic("ql_s"), T.dynamic("ql_h")
    qp_b, qp_s, qp_h = T.dynamic("qp_b"), T.dynamic("qp_s"), T.dynamic("qp_h")
    o_b, o_s, o_h = T.dynamic("o_b"), T.dynamic("o_s"), T.dynamic("o_h")
    lc_p, lc_t, rc_p, rc_t = T.dynamic("lc_p"), T.dynamic("lc_t"), T.dynamic("rc_p"), T.dynamic("rc_t")

    token, head = tiling.token, tiling.head

    stream, stream_queries = make_streams(tiling, latent_cols, page_size, num_stages, 0b11 if paired else None)
    new_free = T.alloc_cluster_barrier if paired else T.alloc_barrier
    readers = 2 * WARPGROUP // 32 if paired else WARPGROUP  # that a slot waits for: warps of both CTAs, or threads

    @T.macro
    def release(free, slot, thread):
        """Tells whoever fills a slot that this warpgroup has read it."""
        if paired:
            if thread % 32 == 0:
                T.mbarrier_arrive(free[slot], 0)
                T.mbarrier_arrive(free[slot], 1)
        else:
            T.barrier_arrive(free[slot])

    @T.macro
    def clean(ring, slot, columns, span, t0):
        """Zeroes what no row sees: a weight of 0 does not clean a NaN."""
        for c in list(range(0, columns, 64)):
            for i, d in T.Parallel(BLOCK, 64):
                if unseen(span, t0 + i):
                    ring[slot, i, c + d] = T.cast(0, dtype)
        T.fence_proxy_async()

    @T.macro
    def write(o, inverse, columns, offset, span, token0, head0, valid, seqlen_q, out, partial_out):
        """Columns ``offset ...`` of all rows, to the output or to this fragment's partial."""
        if span[SLOT] < 0:
            for i, d in T.Parallel(ROWS, columns):
                if (one_token or token0 + token(i) < seqlen_q) and head(i) < valid:
                    if offset + d < d_c:
                        out[span[SEQUENCE], token0 + token(i), head0 + head(i), offset + d] = o[i, d] * inverse[i]
        else:
            for i, d in T.Parallel(ROWS, columns):
                if (one_token or token0 + token(i) < seqlen_q) and head(i) < valid:
                    if offset + d < d_c:
                        partial_out[span[SLOT] // 2, span[SLOT] % 2, token0 + token(i), head0 + head(i), offset + d] = (
                            o[i, d] * inverse[i]
                        )

    @T.macro
    def multiply(
        w, pair, full, free, cta, token0, head0, valid, schedule, work, span, p_tile, rescale, inverses, p_full, p_free,
        end, out, partial_out, seqlen_q, thread,
    ):  # fmt: skip
        """One warpgroup: columns ``w * half ...`` of the output, for all fragments."""
        T.set_max_nreg(OUTPUT_REGISTERS, 1)
        o = [T.alloc_fragment([ROWS, quarter], accum) for _ in range(2)]
        factor = T.alloc_fragment([ROWS], accum)
        grown = T.alloc_local([1], T.int32)
        for f in T.serial(work[0]):
            read_fragment(span, schedule, cta, work, f)
            for i in list(range(2)):
                T.fill(o[i], 0)
            for k in T.serial(span[TILES]):
                t0 = first_token(span, k)
                n = work[2] + k
                T.barrier_wait(full[n % num_stages], (n // num_stages) & 1)
                T.barrier_wait(p_full, n & 1)
                T.copy(rescale, factor)
                if lazy:
                    grown[0] = 0
                    for i in T.Parallel(ROWS):
                        if factor[i] != 1.0:
                            grown[0] = 1
                if (not lazy) or T.any_sync(grown[0] != 0):
                    for u in list(range(2)):
                        for i, d in T.Parallel(ROWS, quarter):
                            o[u][i, d] *= factor[i]
                if holds_unseen(span, t0, BLOCK):
                    for u in list(range(2)):
                        clean(pair[u], n % num_stages, quarter, span, t0)
                    T.sync_threads(barrier_id=BARRIER + 1 + w, arrive_count=WARPGROUP)
                for u in list(range(2)):
                    T.wgmma_gemm(p_tile, pair[u][n % num_stages, :, :], o[u], policy=by_row)
                T.wait_wgmma(0)
                T.barrier_arrive(p_free)
                release(free, n % num_stages, thread)
            work[2] += span[TILES]
            T.barrier_wait(end, f & 1)
            T.copy(inverses[f & 1, :], factor)
            for u in list(range(2)):
                write(
                    o[u],
                    factor,
                    quarter,
                    w * half + u * quarter,
                    span,
                    token0,
                    head0,
                    valid,
                    seqlen_q,
                    out,
                    partial_out,
                )

    @T.prim_func
    def mla_decode_heads_on_m(
        q_latent: T.StridedTensor([batch, seqlen_q, heads, d_c], [ql_b, ql_s, ql_h, 1], dtype),
        q_pe: T.StridedTensor([batch, seqlen_q, heads, d_r], [qp_b, qp_s, qp_h, 1], dtype),
        latent_cache: T.StridedTensor([num_pages, page_size, d_c], [lc_p, lc_t, 1], dtype),
        rope_cache: T.StridedTensor([num_pages, page_size, num_rope_heads * d_r], [rc_p, rc_t, 1], dtype),
        block_table: T.Tensor([batch, max_pages], T.int32),
        schedule: T.Tensor([fragments, FIELDS], T.int32),
        partial_out: T.Tensor([num_ctas, 2, seqlen_q, heads, d_c], accum),
        partial_lse: T.Tensor([num_ctas, 2, seqlen_q, heads], accum),
        out: T.StridedTensor([batch, seqlen_q, heads, d_c], [o_b, o_s, o_h, 1], dtype),
        lse: T.Tensor([batch, heads, seqlen_q], accum),
        softmax_scale: T.float32,
        causal: T.int32,
        window: T.int32,
        sinks: T.int32,
    ):
        with T.Kernel(tiling.num_tiles, num_ctas, threads=HEADS_ON_M_THREADS, cluster_dims=2 if paired else None) as (
            tile,
            cta,
        ):
            q_tile = T.alloc_shared([ROWS, latent_cols], dtype)
            qp_tile = T.alloc_shared([ROWS, rope_cols], dtype)
            rings = [T.alloc_shared([num_stages, BLOCK, quarter], dtype) for _ in range(4)]
            k_ring = T.alloc_shared([num_stages, BLOCK, rope_cols], dtype)
            p_tile = T.alloc_shared([ROWS, BLOCK], dtype)
            rescale = T.alloc_shared([ROWS], accum)
            inverses = T.alloc_shared([2, ROWS], accum)  # of even and odd fragments
            q_full = T.alloc_barrier(1)
            q_free = T.alloc_barrier(WARPGROUP)
            halves_full = [T.alloc_barrier([1] * num_stages) for _ in range(2)]
            halves_free = [new_free([readers] * num_stages) for _ in range(2)]
            k_full = T.alloc_barrier([1] * num_stages)
            k_free = new_free([readers] * num_stages)
            p_full = T.alloc_barrier(WARPGROUP)
            p_free = T.alloc_barrier(2 * WARPGROUP)
            end = T.alloc_barrier(WARPGROUP)
            thread = T.get_thread_binding()

            token0, head0, column, valid = tile_origin(tiling, tile, heads, d_r)

            span = T.alloc_local([SPAN_FIELDS], T.int32)
            work = T.alloc_local([3], T.int32)  # fragments, row of the second one less 1, tiles done before this one
            pages = T.alloc_local([pieces], T.int32)
            work[0] = schedule[cta, COUNT]
            work[1] = schedule[cta, NEXT]
            work[2] = 0
            T.pdl_trigger()

            if thread < WARPGROUP:
                T.set_max_nreg(SCORE_REGISTERS, 0)
                s = T.alloc_fragment([ROWS, BLOCK], accum)
                m = T.alloc_fragment([ROWS], accum)
                mn = T.alloc_fragment([ROWS], accum)
                al = T.alloc_fragment([ROWS], accum)
                den = T.alloc_fragment([ROWS], accum)
                tile_sum = T.alloc_fragment([ROWS], accum)
                limit = T.alloc_fragment([ROWS], T.int32)  # first token that a row's query does not see
                scale = softmax_scale * LOG2E
                tail = (seqlen_q - 1) * causal
                for f in T.serial(work[0]):
                    read_fragment(span, schedule, cta, work, f)
                    for c in T.serial(rope_cols // 16):  # in pieces: loads of a whole row at once cost registers
                        for i, d in T.Parallel(ROWS, 16):
                            qp_tile[i, c * 16 + d] = T.if_then_else(
                                (token0 + token(i) < seqlen_q)
                                & (head(i) < valid)
                                & ((c * 16 + d) // d_r == head(i) // group % groups),
                                q_pe[
                                    span[SEQUENCE],
                                    T.min(token0 + token(i), seqlen_q - 1),
                                    T.min(head0 + head(i), heads - 1),
                                    (c * 16 + d) % d_r,
                                ],
                                T.cast(0, dtype),
                            )
                    T.fence_proxy_async()
                    T.sync_threads(barrier_id=BARRIER, arrive_count=WARPGROUP)
                    T.fill(den, 0)
                    T.fill(m, MASKED)
                    for i in T.Parallel(ROWS):
                        limit[i] = span[STOP] - tail + T.min(token0 + token(i), tail)
                    T.barrier_wait(q_full, f & 1)
                    for k in T.serial(span[TILES]):
                        t0 = first_token(span, k)
                        n = work[2] + k
                        for i in list(range(4)):
                            if i % 2 == 0:
                                T.barrier_wait(halves_full[i // 2][n % num_stages], (n // num_stages) & 1)
                            T.wgmma_gemm(
                                q_tile[:, i * quarter : (i + 1) * quarter],
                                rings[i][n % num_stages, :, :],
                                s,
                                transpose_B=True,
                                clear_accum=i == 0,
                                policy=by_row,
                            )
                        T.barrier_wait(k_full[n % num_stages], (n // num_stages) & 1)
                        T.wgmma_gemm(qp_tile, k_ring[n % num_stages, :, :], s, transpose_B=True, policy=by_row)
                        T.wait_wgmma(0)
                        release(k_free, n % num_stages, thread)
                        if needs_mask(span, t0, BLOCK, tail):
                            for i, j in T.Parallel(ROWS, BLOCK):
                                s[i, j] = T.if_then_else(sees(span, t0 + j, limit[i], window, sinks), s[i, j], MASKED)
                        T.copy(m, mn)
                        T.reduce_max(s, mn, dim=1, clear=False)
                        if lazy:
                            for i in T.Parallel(ROWS):
                                mn[i] = T.if_then_else((mn[i] - m[i]) * scale > GROWTH, mn[i], m[i])
                        for i in T.Parallel(ROWS):
                            al[i] = T.exp2((m[i] - mn[i]) * scale)
                            m[i] = mn[i]
                            mn[i] = T.if_then_else(mn[i] == MASKED, 0.0, mn[i])  # so that masked scores weigh nothing
                        for i, j in T.Parallel(ROWS, BLOCK):
                            s[i, j] = T.exp2((s[i, j] - mn[i]) * scale)
                        T.barrier_wait(p_free, (n & 1) ^ 1)
                        T.copy(s, p_tile)
                        T.copy(al, rescale)
                        T.fence_proxy_async()
                        T.barrier_arrive(p_full)
                        T.reduce_sum(s, tile_sum, dim=1)
                        for i in T.Parallel(ROWS):
                            den[i] = den[i] * al[i] + tile_sum[i]
                    T.barrier_arrive(q_free)
                    work[2] += span[TILES]
                    for i in T.Parallel(ROWS):
                        m[i] = T.if_then_else(den[i] == 0, -T.infinity(accum), (T.log2(den[i]) + m[i] * scale) * LN2)
                        den[i] = 1.0 / T.max(den[i], 1e-30)
                    T.copy(den, inverses[f & 1, :])
                    T.barrier_arrive(end)
                    for i in T.Parallel(ROWS):
                        if (one_token or token0 + token(i) < seqlen_q) and head(i) < valid:
                            if span[SLOT] < 0:
                                lse[span[SEQUENCE], head0 + head(i), token0 + token(i)] = m[i]
                            else:
                                partial_lse[span[SLOT] // 2, span[SLOT] % 2, token0 + token(i), head0 + head(i)] = m[i]
            elif thread < 2 * WARPGROUP:
                multiply(
                    0, rings[0:2], halves_full[0], halves_free[0], cta, token0, head0, valid, schedule, work, span,
                    p_tile, rescale, inverses, p_full, p_free, end, out, partial_out, seqlen_q, thread,
                )  # fmt: skip
            elif thread < 3 * WARPGROUP:
                multiply(
                    1, rings[2:4], halves_full[1], halves_free[1], cta, token0, head0, valid, schedule, work, span,
                    p_tile, rescale, inverses, p_full, p_free, end, out, partial_out, seqlen_q, thread,
                )  # fmt: skip
            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if thread < consumers + 32:
                    stream(
                        latent_cache, quarter, 0, rings[0:2], halves_full[0], halves_free[0], thread, consumers,
                        block_table, schedule, cta, work, span, pages,
                    )  # fmt: skip
                elif thread < consumers + 64:
                    stream(
                        latent_cache, quarter, half, rings[2:4], halves_full[1], halves_free[1], thread, consumers + 32,
                        block_table, schedule, cta, work, span, pages,
                    )  # fmt: skip
                elif thread < consumers + 96:
                    stream(
                        rope_cache, rope_cols, column, [k_ring], k_full, k_free, thread, consumers + 64,
                        block_table, schedule, cta, work, span, pages,
                    )  # fmt: skip
                else:
                    stream_queries(
                        q_latent, token0, head0, q_tile, q_full, q_free, thread, consumers + 96, schedule, cta, work
                    )
            if paired:
                T.cluster_sync()  # the other CTA may still arrive at this one's barriers

    return mla_decode_heads_on_m
