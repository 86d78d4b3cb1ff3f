"""GQA decode for every GPU from sm_80 on, and for TileLang's CPU target: the algebra of ``streamed`` without its roles.

Sᵀ[tokens, rows] = K Qᵀ and Oᵀ[d_v, rows] += Vᵀ Pᵀ for the query rows of one kv head, tile after tile.
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
from mha2mla.kernels.split_kv.schedule import COUNT, FIELDS, NEXT, SEQUENCE, SLOT, STOP, TILE_TOKENS, TILES
from mha2mla.kernels.split_kv.tiling import RowTiling

THREADS = 128


def make_gqa_decode_portable(
    *,
    heads: int,
    num_kv_heads: int,
    qk_head_dim: int,
    v_head_dim: int,
    page_size: int,
    dtype: str,
    tiling: RowTiling,
    block_tokens: int = 64,
    on_cpu: bool = False,
):
    """A TileLang function ``gqa_decode_portable`` for one static shape.

    Args:
        heads, num_kv_heads, qk_head_dim, v_head_dim: H, G, d_qk, d_v.
        page_size: tokens per page, a power of two >= 16.
        dtype: "bfloat16" or "float16" ("float32" on the CPU).
        tiling: which query rows one CTA serves, packed, of one kv head.
        block_tokens: cached tokens per step, 32 or 64.
        on_cpu: compile for TileLang's C target: thread-local buffers, one thread.

    The function's arguments: q [B,S_q,H,d_qk], k_cache [P,page,G,d_qk], v_cache [P,page,G,d_v] (all with run-time
    strides), block_table [B,max_pages], schedule [num_ctas+B,FIELDS] (int32; ``split_kv/schedule.py``), the outputs
    partial_out [num_ctas,2,S_q,H,d_v] and partial_lse [num_ctas,2,S_q,H] (float32) for sequences in several fragments,
    out [B,S_q,H,d_v] (run-time strides, ``dtype``) and lse [B,H,S_q] (float32) for those in one; then softmax_scale,
    causal (0 or 1), window (2**30: none) and sinks. All lse are natural logs, -inf where a row sees none of the tokens;
    rows that nothing points at are left as they were.
    """
    rows, block = tiling.rows, block_tokens
    steps = TILE_TOKENS // block  # per tile of the schedule
    qk_cols, v_cols = padded_columns(qk_head_dim), padded_columns(v_head_dim)
    qk_panels, v_panels = list(range(0, qk_cols, 64)), list(range(0, v_cols, 64))
    pieces = max(1, block // page_size)  # pages per step
    piece = block // pieces
    whole = 1 if pieces == 1 else 0  # a step lies within one page; else it starts on a page
    warps = block // 16
    accum = T.float32
    by_row = T.GemmWarpPolicy.FullRow

    alloc_shared = T.alloc_local if on_cpu else T.alloc_shared
    alloc_fragment = T.alloc_local if on_cpu else T.alloc_fragment
    parallel = T.grid if on_cpu else T.Parallel

    def strided(shape, strides):  # the CPU target's wrapper passes no run-time strides
        return T.Tensor(shape, dtype) if on_cpu else T.StridedTensor(shape, strides, dtype)

    batch, seqlen_q = T.dynamic("batch"), T.dynamic("seqlen_q")
    num_pages, max_pages = T.dynamic("num_pages"), T.dynamic("max_pages")
    num_ctas, fragments = T.dynamic("num_ctas"), T.dynamic("fragments")
    q_b, q_s, q_h = T.dynamic("q_b"), T.dynamic("q_s"), T.dynamic("q_h")
    o_b, o_s, o_h = T.dynamic("o_b"), T.dynamic("o_s"), T.dynamic("o_h")
    k_p, k_t, k_h = T.dynamic("k_p"), T.dynamic("k_t"), T.dynamic("k_h")
    v_p, v_t, v_h = T.dynamic("v_p"), T.dynamic("v_t"), T.dynamic("v_h")

    token, head = tiling.token, tiling.head

    @T.macro
    def load_tile(source, panels, kv_head, tile, t0, pages):
        for u in list(range(pieces)):
            for c in panels:
                T.copy(
                    source[pages[u], t0 % page_size * whole : t0 % page_size * whole + piece, kv_head, c : c + 64],
                    tile[u * piece : (u + 1) * piece, c : c + 64],
                )

    @T.prim_func
    def gqa_decode_portable(
        q: strided([batch, seqlen_q, heads, qk_head_dim], [q_b, q_s, q_h, 1]),
        k_cache: strided([num_pages, page_size, num_kv_heads, qk_head_dim], [k_p, k_t, k_h, 1]),
        v_cache: strided([num_pages, page_size, num_kv_heads, v_head_dim], [v_p, v_t, v_h, 1]),
        block_table: T.Tensor([batch, max_pages], T.int32),
        schedule: T.Tensor([fragments, FIELDS], T.int32),
        partial_out: T.Tensor([num_ctas, 2, seqlen_q, heads, v_head_dim], accum),
        partial_lse: T.Tensor([num_ctas, 2, seqlen_q, heads], accum),
        out: strided([batch, seqlen_q, heads, v_head_dim], [o_b, o_s, o_h, 1]),
        lse: T.Tensor([batch, heads, seqlen_q], accum),
        softmax_scale: T.float32,
        causal: T.int32,
        window: T.int32,
        sinks: T.int32,
    ):
        with T.Kernel(tiling.num_tiles, num_ctas, threads=1 if on_cpu else THREADS) as (tile, cta):
            q_tile = alloc_shared([rows, qk_cols], dtype)
            k_tile = alloc_shared([block, qk_cols], dtype)
            v_tile = alloc_shared([block, v_cols], dtype)
            p_tile = alloc_shared([block, rows], dtype)
            stage = alloc_shared([warps, rows], accum)
            factor = alloc_shared([rows], accum)  # for the output, whose rows other threads hold than the scores' rows
            s = alloc_fragment([block, rows], accum)
            p = alloc_fragment([block, rows], accum)
            o = alloc_fragment([v_cols, rows], accum)
            r = alloc_fragment([warps, rows], accum)
            m = alloc_fragment([rows], accum)
            mn = alloc_fragment([rows], accum)
            al = alloc_fragment([rows], accum)
            den = alloc_fragment([rows], accum)
            limit = alloc_fragment([rows], T.int32)  # first token that a row's query does not see

            token0, head0, kv_head, valid = tile_origin(tiling, tile, heads, 1)
            scale = softmax_scale * LOG2E
            tail = (seqlen_q - 1) * causal  # the last `tail` tokens are hidden from some queries

            span = T.alloc_local([SPAN_FIELDS], T.int32)
            work = T.alloc_local([2], T.int32)  # fragments, row of the second one less 1
            pages = T.alloc_local([pieces], T.int32)
            holes = T.alloc_local([pieces + 1], T.int32)
            work[0] = schedule[cta, COUNT]
            work[1] = schedule[cta, NEXT]  # no pdl_trigger: there is none before sm_90

            for f in T.serial(work[0]):
                read_fragment(span, schedule, cta, work, f)
                T.sync_threads()
                for c in qk_panels:
                    # Indices are clamped beside their guards: TileLang's bounds check fails to lower for some widths.
                    for i, d in parallel(rows, 64):
                        q_tile[i, c + d] = T.if_then_else(
                            (token0 + token(i) < seqlen_q) & (head(i) < valid) & (c + d < qk_head_dim),
                            q[
                                span[SEQUENCE],
                                T.min(token0 + token(i), seqlen_q - 1),
                                T.min(head0 + head(i), heads - 1),
                                T.min(c + d, qk_head_dim - 1),
                            ],
                            T.cast(0, dtype),
                        )
                T.fill(o, 0)
                T.fill(p, 0)
                T.fill(m, MASKED)
                for j in parallel(rows):
                    limit[j] = span[STOP] - tail + T.min(token0 + token(j), tail)

                for k in T.serial(span[TILES] * steps):
                    t0 = first_token(span, k // steps) + k % steps * block
                    T.sync_threads()
                    # Table entries may be anything, of pages that no query sees and by mistake: some page stands in for
                    # what is none, and `holes` says so, the last one for all together.
                    holes[pieces] = 0
                    for u in list(range(pieces)):
                        pages[u] = block_table[span[SEQUENCE], T.min(t0 // page_size + u, last_page(span, page_size))]
                        holes[u] = T.if_then_else((pages[u] < 0) | (pages[u] >= num_pages), 1, 0)
                        holes[pieces] += holes[u]
                        pages[u] = T.max(0, T.min(pages[u], num_pages - 1))
                    load_tile(k_cache, qk_panels, kv_head, k_tile, t0, pages)
                    load_tile(v_cache, v_panels, kv_head, v_tile, t0, pages)
                    T.sync_threads()
                    if holds_unseen(span, t0, block):  # a weight of 0 does not clean a NaN
                        for c in v_panels:
                            for i, d in parallel(block, 64):
                                if unseen(span, t0 + i):
                                    v_tile[i, c + d] = T.cast(0, dtype)
                        T.sync_threads()
                    if holes[pieces] > 0:  # what has no page must not show another sequence's
                        for u in list(range(pieces)):
                            if holes[u] > 0:
                                for c in qk_panels:
                                    for i, d in parallel(piece, 64):
                                        k_tile[u * piece + i, c + d] = T.cast(0, dtype)
                                for c in v_panels:
                                    for i, d in parallel(piece, 64):
                                        v_tile[u * piece + i, c + d] = T.cast(0, dtype)
                        T.sync_threads()
                    T.gemm(k_tile, q_tile, s, transpose_B=True, clear_accum=True, policy=by_row)
                    if needs_mask(span, t0, block, tail):
                        for i, j in parallel(block, rows):
                            s[i, j] = T.if_then_else(sees(span, t0 + i, limit[j], window, sinks), s[i, j], MASKED)
                    # Online softmax (arXiv 1805.02867); the denominator stays per position until the end.
                    view = T.view(s, [warps, 16, rows])
                    T.reduce_max(view, r, dim=1)
                    T.copy(r, stage)
                    T.sync_threads()
                    for j in parallel(rows):
                        mn[j] = m[j]
                        for w in T.unroll(warps):
                            mn[j] = T.max(mn[j], stage[w, j])
                    for j in parallel(rows):
                        al[j] = T.exp2((m[j] - mn[j]) * scale)
                        m[j] = mn[j]
                        mn[j] = T.if_then_else(mn[j] == MASKED, 0.0, mn[j])  # so that masked scores weigh nothing
                    T.copy(al, factor)
                    for i, j in parallel(block, rows):
                        s[i, j] = T.exp2((s[i, j] - mn[j]) * scale)
                    T.copy(s, p_tile)
                    for i, j in parallel(block, rows):
                        p[i, j] = p[i, j] * al[j] + s[i, j]
                    T.sync_threads()
                    for d, j in parallel(v_cols, rows):
                        o[d, j] *= factor[j]
                    T.gemm(v_tile, p_tile, o, transpose_A=True, policy=by_row)

                p_view = T.view(p, [warps, 16, rows])
                T.reduce_sum(p_view, r, dim=1)
                T.sync_threads()
                T.copy(r, stage)
                T.sync_threads()
                for j in parallel(rows):
                    den[j] = 0
                    for w in T.unroll(warps):
                        den[j] += stage[w, j]
                for j in parallel(rows):
                    m[j] = T.if_then_else(den[j] == 0, -T.infinity(accum), (T.log2(den[j]) + m[j] * scale) * LN2)
                    den[j] = 1.0 / T.max(den[j], 1e-30)
                T.copy(den, factor)
                T.sync_threads()
                if span[SLOT] < 0:  # the whole sequence
                    for j in parallel(rows):
                        if (token0 + token(j) < seqlen_q) & (head(j) < valid):
                            lse[span[SEQUENCE], head0 + head(j), token0 + token(j)] = m[j]
                    for d, j in parallel(v_cols, rows):
                        if (token0 + token(j) < seqlen_q) & (head(j) < valid):
                            if d < v_head_dim:
                                out[span[SEQUENCE], token0 + token(j), head0 + head(j), d] = o[d, j] * factor[j]
                else:
                    for j in parallel(rows):
                        if (token0 + token(j) < seqlen_q) & (head(j) < valid):
                            partial_lse[span[SLOT] // 2, span[SLOT] % 2, token0 + token(j), head0 + head(j)] = m[j]
                    for d, j in parallel(v_cols, rows):
                        if (token0 + token(j) < seqlen_q) & (head(j) < valid):
                            if d < v_head_dim:
                                partial_out[span[SLOT] // 2, span[SLOT] % 2, token0 + token(j), head0 + head(j), d] = (
                                    o[d, j] * factor[j]
                                )

    return gqa_decode_portable
