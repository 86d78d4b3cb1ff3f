"""GQA decode for Hopper, query rows on the N side of wgmma: one warpgroup computes, one warp streams keys and values.

A CTA serves the query rows of one kv head (H / G * S_q of them, padded to 8, 16, 32 or 64). Scores are Kᵀ-major,
Sᵀ[tokens, rows] = K Qᵀ, and Oᵀ[d_v, rows] += Vᵀ Pᵀ, so that 64 cached tokens, not the few query rows, fill the M of a
product. The arithmetic is next to nothing beside the bytes: several small CTAs a multiprocessor hide each other's
softmax, and keys and values wait in rings that run on into the next sequence of the CTA's schedule.
"""

import tilelang.language as T

from mha2mla.kernels.gqa_decode.selection import padded_columns
from mha2mla.kernels.split_kv.fragment import (
    LN2,
    LOG2E,
    MASKED,
    SPAN_FIELDS,
    first_token,
    holds_unseen,
    last_page,
    needs_mask,
    read_fragment,
    sees,
    tile_origin,
    unseen,
)
from mha2mla.kernels.split_kv.schedule import COUNT, FIELDS, NEXT, SEQUENCE, SLOT, STOP, TILES
from mha2mla.kernels.split_kv.tiling import RowTiling

CONSUMERS = 128  # threads that compute: one warpgroup
THREADS = CONSUMERS + 32
BLOCK = 64  # cached tokens per tile: the M of one wgmma
BARRIER = 8  # named barriers below 8 belong to the compiler


def make_gqa_decode_streamed(
    *,
    heads: int,
    num_kv_heads: int,
    qk_head_dim: int,
    v_head_dim: int,
    page_size: int,
    dtype: str,
    tiling: RowTiling,
    num_stages: int = 2,
    ctas_per_sm: int = 1,
):
    """A TileLang function ``gqa_decode_streamed`` for one static shape; called as :func:`make_gqa_decode_portable`'s.

    Args:
        heads, num_kv_heads, qk_head_dim, v_head_dim: H, G, d_qk, d_v.
        page_size: tokens per page, a power of two >= 16.
        dtype: "bfloat16" or "float16".
        tiling: which query rows one CTA serves, packed, of one kv head.
        num_stages: tiles of keys, and of values, in flight.
        ctas_per_sm: CTAs that must fit into the registers of one multiprocessor.
    """
    rows = tiling.rows
    qk_cols, v_cols = padded_columns(qk_head_dim), padded_columns(v_head_dim)
    accum = T.float32
    pieces = max(1, BLOCK // page_size)
    piece_list = list(range(pieces))
    qk_panels, v_panels = list(range(0, qk_cols, 64)), list(range(0, v_cols, 64))
    piece = min(64, 1024 // rows)  # columns of q at a time
    warps = BLOCK // 16
    warp_list = list(range(warps))
    by_row = T.GemmWarpPolicy.FullRow

    batch, seqlen_q = T.dynamic("batch"), T.dynamic("seqlen_q")
    num_pages, max_pages = T.dynamic("num_pages"), T.dynamic("max_pages")
    num_ctas, fragments = T.dynamic("num_ctas"), T.dynamic("fragments")
    q_b, q_s, q_h = T.dynamic("q_b"), T.dynamic("q_s"), T.dynamic("q_h")
    o_b, o_s, o_h = T.dynamic("o_b"), T.dynamic("o_s"), T.dynamic("o_h")
    k_p, k_t, k_h = T.dynamic("k_p"), T.dynamic("k_t"), T.dynamic("k_h")
    v_p, v_t, v_h = T.dynamic("v_p"), T.dynamic("v_t"), T.dynamic("v_h")

    token, head = tiling.token, tiling.head

    @T.macro
    def load_tile(source, panels, kv_head, ring, slot, full, t0, pages, thread):
        """64 tokens of one kv head; columns beyond the head's width come as zeros."""
        for v in piece_list:
            if pieces == 1:
                T.tma_copy(
                    source[pages[0], t0 % page_size : t0 % page_size + BLOCK, kv_head, 0 : len(panels) * 64],
                    ring[slot, :, :],
                    barrier=full[slot],
                )
            else:
                for c in panels:  # panels of the swizzled tile are contiguous per page
                    T.tma_copy(
                        source[pages[v], 0:page_size, kv_head, c : c + 64],
                        ring[slot, v * page_size : (v + 1) * page_size, c : c + 64],
                        barrier=full[slot],
                    )
        if thread == CONSUMERS:
            T.barrier_arrive(full[slot])

    @T.macro
    def stream(
        k_cache, v_cache, kv_head, k_ring, v_ring, k_full, k_free, v_full, v_free, thread, block_table, schedule, cta,
        work, span, pages,
    ):  # fmt: skip
        """One warp: the keys and values of every tile of this CTA's fragments."""
        for f in T.serial(work[0]):
            read_fragment(span, schedule, cta, work, f)
            for k in T.serial(span[TILES]):
                t0 = first_token(span, k)
                slot = (work[2] + k) % num_stages
                for v in piece_list:
                    pages[v] = block_table[span[SEQUENCE], T.min(t0 // page_size + v, last_page(span, page_size))]
                T.barrier_wait(k_free[slot], (((work[2] + k) // num_stages) & 1) ^ 1)
                load_tile(k_cache, qk_panels, kv_head, k_ring, slot, k_full, t0, pages, thread)
                T.barrier_wait(v_free[slot], (((work[2] + k) // num_stages) & 1) ^ 1)
                load_tile(v_cache, v_panels, kv_head, v_ring, slot, v_full, t0, pages, thread)
            work[2] += span[TILES]

    @T.macro
    def consume(
        cta, token0, head0, valid, q, schedule, span, work, q_tile, k_ring, v_ring, p_tile, stage, k_full, k_free,
        v_full, v_free, out, lse, partial_out, partial_lse, seqlen_q, softmax_scale, causal, window, sinks,
    ):  # fmt: skip
        """All fragments of this CTA."""
        s = T.alloc_fragment([BLOCK, rows], accum)
        p = T.alloc_fragment([BLOCK, rows], accum)
        o = T.alloc_fragment([v_cols, rows], accum)
        r = T.alloc_fragment([warps, rows], accum)
        m = T.alloc_fragment([rows], accum)
        mn = T.alloc_fragment([rows], accum)
        al = T.alloc_fragment([rows], accum)
        den = T.alloc_fragment([rows], accum)
        scale = softmax_scale * LOG2E
        tail = (seqlen_q - 1) * causal
        for f in T.serial(work[0]):
            read_fragment(span, schedule, cta, work, f)
            for c in T.serial(qk_cols // piece):  # loads of all rows at once would spill registers
                # Indices are clamped beside their guards: TileLang's bounds check fails to lower for some widths.
                for i, d in T.Parallel(rows, piece):
                    q_tile[i, c * piece + d] = T.if_then_else(
                        (token0 + token(i) < seqlen_q) & (head(i) < valid) & (c * piece + d < qk_head_dim),
                        q[
                            span[SEQUENCE],
                            T.min(token0 + token(i), seqlen_q - 1),
                            T.min(head0 + head(i), heads - 1),
                            T.min(c * piece + d, qk_head_dim - 1),
                        ],
                        T.cast(0, dtype),
                    )
            T.fence_proxy_async()
            T.sync_threads(barrier_id=BARRIER, arrive_count=CONSUMERS)
            T.fill(o, 0)
            T.fill(p, 0)
            T.fill(m, MASKED)
            for k in T.serial(span[TILES]):
                t0 = first_token(span, k)
                slot = (work[2] + k) % num_stages
                T.barrier_wait(k_full[slot], ((work[2] + k) // num_stages) & 1)
                T.wgmma_gemm(k_ring[slot, :, :], q_tile, s, transpose_B=True, clear_accum=True, policy=by_row)
                T.wait_wgmma(0)
                T.barrier_arrive(k_free[slot])
                if needs_mask(span, t0, BLOCK, tail):
                    for i, j in T.Parallel(BLOCK, rows):
                        limit = span[STOP] - tail + T.min(token0 + token(j), tail)  # first token that row j can't see
                        s[i, j] = T.if_then_else(sees(span, t0 + i, limit, window, sinks), s[i, j], MASKED)
                view = T.view(s, [warps, 16, rows])
                T.reduce_max(view, r, dim=1)
                T.sync_threads(barrier_id=BARRIER, arrive_count=CONSUMERS)
                T.copy(r, stage)
                T.sync_threads(barrier_id=BARRIER, arrive_count=CONSUMERS)
                for j in T.Parallel(rows):
                    mn[j] = m[j]
                    for v in warp_list:
                        mn[j] = T.max(mn[j], stage[v, j])
                for j in T.Parallel(rows):
                    al[j] = T.exp2((m[j] - mn[j]) * scale)
                    m[j] = mn[j]
                    mn[j] = T.if_then_else(mn[j] == MASKED, 0.0, mn[j])  # so that masked scores weigh nothing
                for i, j in T.Parallel(BLOCK, rows):
                    s[i, j] = T.exp2((s[i, j] - mn[j]) * scale)
                for i, j in T.Parallel(BLOCK, rows):
                    p_tile[j, i] = s[i, j]
                for i, j in T.Parallel(BLOCK, rows):
                    p[i, j] = p[i, j] * al[j] + s[i, j]
                for d, j in T.Parallel(v_cols, rows):
                    o[d, j] *= al[j]
                T.barrier_wait(v_full[slot], ((work[2] + k) // num_stages) & 1)
                if holds_unseen(span, t0, BLOCK):  # a weight of 0 does not clean a NaN
                    for c in v_panels:
                        for i, d in T.Parallel(BLOCK, 64):
                            if unseen(span, t0 + i):
                                v_ring[slot, i, c + d] = T.cast(0, dtype)
                T.fence_proxy_async()
                T.sync_threads(barrier_id=BARRIER, arrive_count=CONSUMERS)
                T.wgmma_gemm(v_ring[slot, :, :], p_tile, o, transpose_A=True, transpose_B=True, policy=by_row)
                T.wait_wgmma(0)
                T.barrier_arrive(v_free[slot])
            work[2] += span[TILES]
            p_view = T.view(p, [warps, 16, rows])
            T.reduce_sum(p_view, r, dim=1)
            T.sync_threads(barrier_id=BARRIER, arrive_count=CONSUMERS)
            T.copy(r, stage)
            T.sync_threads(barrier_id=BARRIER, arrive_count=CONSUMERS)
            for j in T.Parallel(rows):
                den[j] = 0
                for v in warp_list:
                    den[j] += stage[v, j]
            for j in T.Parallel(rows):
                m[j] = T.if_then_else(den[j] == 0, -T.infinity(accum), (T.log2(den[j]) + m[j] * scale) * LN2)
                den[j] = 1.0 / T.max(den[j], 1e-30)
            if span[SLOT] < 0:
                for j in T.Parallel(rows):
                    if token0 + token(j) < seqlen_q and head(j) < valid:
                        lse[span[SEQUENCE], head0 + head(j), token0 + token(j)] = m[j]
                for d, j in T.Parallel(v_cols, rows):
                    if token0 + token(j) < seqlen_q and head(j) < valid:
                        if d < v_head_dim:
                            out[span[SEQUENCE], token0 + token(j), head0 + head(j), d] = o[d, j] * den[j]
            else:
                for j in T.Parallel(rows):
                    if token0 + token(j) < seqlen_q and head(j) < valid:
                        partial_lse[span[SLOT] // 2, span[SLOT] % 2, token0 + token(j), head0 + head(j)] = m[j]
                for d, j in T.Parallel(v_cols, rows):
                    if token0 + token(j) < seqlen_q and head(j) < valid:
                        if d < v_head_dim:
                            partial_out[span[SLOT] // 2, span[SLOT] % 2, token0 + token(j), head0 + head(j), d] = (
                                o[d, j] * den[j]
                            )

    @T.prim_func
    def gqa_decode_streamed(
        q: T.StridedTensor([batch, seqlen_q, heads, qk_head_dim], [q_b, q_s, q_h, 1], dtype),
        k_cache: T.StridedTensor([num_pages, page_size, num_kv_heads, qk_head_dim], [k_p, k_t, k_h, 1], dtype),
        v_cache: T.StridedTensor([num_pages, page_size, num_kv_heads, v_head_dim], [v_p, v_t, v_h, 1], dtype),
        block_table: T.Tensor([batch, max_pages], T.int32),
        schedule: T.Tensor([fragments, FIELDS], T.int32),
        partial_out: T.Tensor([num_ctas, 2, seqlen_q, heads, v_head_dim], accum),
        partial_lse: T.Tensor([num_ctas, 2, seqlen_q, heads], accum),
        out: T.StridedTensor([batch, seqlen_q, heads, v_head_dim], [o_b, o_s, o_h, 1], dtype),
        lse: T.Tensor([batch, heads, seqlen_q], accum),
        softmax_scale: T.float32,
        causal: T.int32,
        window: T.int32,
        sinks: T.int32,
    ):
        with T.Kernel(tiling.num_tiles, num_ctas, threads=THREADS) as (tile, cta):
            T.annotate_min_blocks_per_sm(ctas_per_sm)
            q_tile = T.alloc_shared([rows, qk_cols], dtype)
            k_ring = T.alloc_shared([num_stages, BLOCK, qk_cols], dtype)
            v_ring = T.alloc_shared([num_stages, BLOCK, v_cols], dtype)
            p_tile = T.alloc_shared([rows, BLOCK], dtype)
            stage = T.alloc_shared([warps, rows], accum)
            k_full = T.alloc_barrier([1] * num_stages)
            k_free = T.alloc_barrier([CONSUMERS] * num_stages)
            v_full = T.alloc_barrier([1] * num_stages)
            v_free = T.alloc_barrier([CONSUMERS] * num_stages)
            thread = T.get_thread_binding()

            token0, head0, kv_head, valid = tile_origin(tiling, tile, heads, 1)

            span = T.alloc_local([SPAN_FIELDS], T.int32)
            work = T.alloc_local([3], T.int32)  # fragments, row of the second one less 1, tiles done before this one
            pages = T.alloc_local([pieces], T.int32)
            work[0] = schedule[cta, COUNT]
            work[1] = schedule[cta, NEXT]
            work[2] = 0
            T.pdl_trigger()

            if thread < CONSUMERS:
                consume(
                    cta, token0, head0, valid, q, schedule, span, work, q_tile, k_ring, v_ring, p_tile, stage, k_full,
                    k_free, v_full, v_free, out, lse, partial_out, partial_lse, seqlen_q, softmax_scale, causal,
                    window, sinks,
                )  # fmt: skip
            else:
                stream(
                    k_cache, v_cache, kv_head, k_ring, v_ring, k_full, k_free, v_full, v_free, thread, block_table,
                    schedule, cta, work, span, pages,
                )  # fmt: skip

    return gqa_decode_streamed
