"""MLA decode, heads on the N side of the matrix instruction, pipelined by the compiler: the path that runs everywhere.

``S^T[tokens, rows] = C Q^T`` (+ rope scores) and ``O^T[d_c, rows] += C^T P^T`` take both operands from one tile of the
latent cache, so a handful of heads needs no padding to the 64 rows of a Hopper matrix instruction. The same body is
compiled for sm_90 (wgmma, TMA), for sm_80 and newer (mma, cp.async) and, unpipelined on one thread, for the CPU.
"""

import tilelang.language as T

from mha2mla.kernels.mla_decode.selection import padded_latent_columns, padded_rope_columns
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


def make_swap_ab(
    *,
    heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    num_rope_heads: int,
    page_size: int,
    dtype: str,
    tiling: RowTiling,
    block_tokens: int = 64,
    threads: int = 256,
    on_cpu: bool = False,
):
    """A TileLang function ``mla_decode_swap_ab`` for one static shape; batch, pages, lengths, CTAs at run time.

    Args:
        heads, kv_lora_rank, qk_rope_head_dim, num_rope_heads: H, d_c, d_r, G.
        page_size: tokens per page, a power of two >= 16.
        dtype: "bfloat16" or "float16" ("float32" on the CPU).
        tiling: which query rows one CTA serves.
        block_tokens: cached tokens per step, a divisor of the schedule's tiles: 32 or 64.
        threads: 128 or 256; 256 splits heads (scores) and d_c (output) over two warpgroups.
        on_cpu: compile for TileLang's C target: thread-local buffers, one thread.

    The function's arguments: q_latent [B,S_q,H,d_c], q_pe [B,S_q,H,d_r], latent_cache [P,page,d_c], rope_cache
    [P,page,G*d_r] (all with run-time strides), block_table [B,max_pages], schedule [num_ctas+B,FIELDS] (int32;
    ``schedule.py``), the outputs partial_out [num_ctas,2,S_q,H,d_c] and partial_lse [num_ctas,2,S_q,H] (float32) for
    sequences in several fragments, out [B,S_q,H,d_c] (run-time strides, ``dtype``) and lse [B,H,S_q] (float32) for
    those in one; then softmax_scale, causal (0 or 1), window (2**30: none) and sinks. All lse are natural logs, -inf
    where a row sees none of the tokens; rows that nothing points at are left as they were.
    """
    d_c, d_r, rows, block = kv_lora_rank, qk_rope_head_dim, tiling.rows, block_tokens
    steps = TILE_TOKENS // block  # per tile of the schedule
    groups, group = tiling.groups_per_tile, tiling.heads_per_group
    latent_cols = padded_latent_columns(d_c, threads)
    rope_cols = padded_rope_columns(groups * d_r)
    block_diagonal = groups > 1
    pieces = max(1, block // page_size)  # pages per step
    piece = block // pieces
    whole = 1 if pieces == 1 else 0  # a step lies within one page; else it starts on a page
    panels = list(range(0, latent_cols, 64))
    warps = block // 16
    accum = T.float32

    alloc_shared = T.alloc_local if on_cpu else T.alloc_shared
    alloc_fragment = T.alloc_local if on_cpu else T.alloc_fragment
    parallel = T.grid if on_cpu else T.Parallel

    def strided(shape, strides):  # the CPU target's wrapper passes no run-time strides
        return T.Tensor(shape, dtype) if on_cpu else T.StridedTensor(shape, strides, dtype)

    by_row, by_column = T.GemmWarpPolicy.FullRow, T.GemmWarpPolicy.FullCol
    score_policy = by_column if threads > 128 else by_row

    batch, seqlen_q = T.dynamic("batch"), T.dynamic("seqlen_q")
    num_pages, max_pages = T.dynamic("num_pages"), T.dynamic("max_pages")
    num_ctas, fragments = T.dynamic("num_ctas"), T.dynamic("fragments")
    ql_b, ql_s, ql_h = T.dynamic("ql_b"), T.dynamic("ql_s"), T.dynamic("ql_h")
    qp_b, qp_s, qp_h = T.dynamic("qp_b"), T.dynamic("qp_s"), T.dynamic("qp_h")
    o_b, o_s, o_h = T.dynamic("o_b"), T.dynamic("o_s"), T.dynamic("o_h")
    lc_p, lc_t, rc_p, rc_t = T.dynamic("lc_p"), T.dynamic("lc_t"), T.dynamic("rc_p"), T.dynamic("rc_t")

    token, head = tiling.token, tiling.head

    @T.macro
    def load_queries(q_latent, q_pe, b, token0, head0, valid, seqlen_q, q_tile, qp_tile):
        # Indices are clamped beside their guards: for some widths TileLang's bounds check fails to lower otherwise.
        for c in panels:
            for i, d in parallel(rows, 64):
                q_tile[i, c + d] = T.if_then_else(
                    (token0 + token(i) < seqlen_q) & (head(i) < valid) & (c + d < d_c),
                    q_latent[b, T.min(token0 + token(i), seqlen_q - 1), T.min(head0 + head(i), heads - 1), c + d],
                    T.cast(0, dtype),
                )
        for i, d in parallel(rows, rope_cols):
            if block_diagonal:
                qp_tile[i, d] = T.if_then_else(
                    (token0 + token(i) < seqlen_q) & (head(i) < valid) & (d // d_r == head(i) // group),
                    q_pe[b, T.min(token0 + token(i), seqlen_q - 1), T.min(head0 + head(i), heads - 1), d % d_r],
                    T.cast(0, dtype),
                )
            else:
                qp_tile[i, d] = T.if_then_else(
                    (token0 + token(i) < seqlen_q) & (head(i) < valid) & (d < d_r),
                    q_pe[b, T.min(token0 + token(i), seqlen_q - 1), T.min(head0 + head(i), heads - 1), d],
                    T.cast(0, dtype),
                )

    @T.macro
    def load_step(latent_cache, rope_cache, block_table, num_pages, span, pages, holes, t0, column, c_tile, k_tile):
        """Tokens ``t0 ...`` of the cache. Table entries may be anything, of pages that no query sees and by mistake:
        some page stands in for what is none, and ``holes`` says so, the last one for all together."""
        holes[pieces] = 0
        for u in list(range(pieces)):
            pages[u] = block_table[span[SEQUENCE], T.min(t0 // page_size + u, last_page(span, page_size))]
            holes[u] = T.if_then_else((pages[u] < 0) | (pages[u] >= num_pages), 1, 0)
            holes[pieces] += holes[u]
            pages[u] = T.max(0, T.min(pages[u], num_pages - 1))
        for u in list(range(pieces)):
            for c in panels:  # panels of the swizzled tile are contiguous per page
                T.copy(
                    latent_cache[pages[u], t0 % page_size * whole : t0 % page_size * whole + piece, c : c + 64],
                    c_tile[u * piece : (u + 1) * piece, c : c + 64],
                )
            for c in list(range(0, rope_cols, 64)):
                T.copy(
                    rope_cache[
                        pages[u],
                        t0 % page_size * whole : t0 % page_size * whole + piece,
                        column + c : column + c + min(64, rope_cols),
                    ],
                    k_tile[u * piece : (u + 1) * piece, c : c + min(64, rope_cols)],
                )

    @T.macro
    def attend(
        span, t0, tail, limit, window, sinks, scale, q_tile, qp_tile, c_tile, k_tile, p_tile, stage, s, p, o, r, m, mn,
        al, mo, mon, ao,
    ):  # fmt: skip
        """Online softmax over one step (arXiv 1805.02867); the denominator stays per position until the end."""
        T.gemm(c_tile, q_tile, s, transpose_B=True, clear_accum=True, policy=score_policy)
        T.gemm(k_tile, qp_tile, s, transpose_B=True, policy=score_policy)
        if needs_mask(span, t0, block, tail):
            for i, j in parallel(block, rows):
                s[i, j] = T.if_then_else(sees(span, t0 + i, limit[j], window, sinks), s[i, j], MASKED)
        view = T.view(s, [warps, 16, rows])
        T.reduce_max(view, r, dim=1)
        T.copy(r, stage)
        T.sync_threads()
        for j in parallel(rows):  # running maximum, in the scores' layout
            mn[j] = m[j]
            for w in T.unroll(warps):
                mn[j] = T.max(mn[j], stage[w, j])
        for j in parallel(rows):  # and in the accumulator's
            mon[j] = mo[j]
            for w in T.unroll(warps):
                mon[j] = T.max(mon[j], stage[w, j])
        for j in parallel(rows):
            al[j] = T.exp2((m[j] - mn[j]) * scale)
            m[j] = mn[j]
            mn[j] = T.if_then_else(mn[j] == MASKED, 0.0, mn[j])  # so that masked scores weigh nothing
        for j in parallel(rows):
            ao[j] = T.exp2((mo[j] - mon[j]) * scale)
            mo[j] = mon[j]
        for i, j in parallel(block, rows):
            s[i, j] = T.exp2((s[i, j] - mn[j]) * scale)
        T.copy(s, p_tile)
        for i, j in parallel(block, rows):
            p[i, j] = p[i, j] * al[j] + s[i, j]
        for d, j in parallel(latent_cols, rows):
            o[d, j] *= ao[j]
        T.gemm(c_tile, p_tile, o, transpose_A=True, policy=by_row)

    @T.prim_func
    def mla_decode_swap_ab(
        q_latent: strided([batch, seqlen_q, heads, d_c], [ql_b, ql_s, ql_h, 1]),
        q_pe: strided([batch, seqlen_q, heads, d_r], [qp_b, qp_s, qp_h, 1]),
        latent_cache: strided([num_pages, page_size, d_c], [lc_p, lc_t, 1]),
        rope_cache: strided([num_pages, page_size, num_rope_heads * d_r], [rc_p, rc_t, 1]),
        block_table: T.Tensor([batch, max_pages], T.int32),
        schedule: T.Tensor([fragments, FIELDS], T.int32),
        partial_out: T.Tensor([num_ctas, 2, seqlen_q, heads, d_c], accum),
        partial_lse: T.Tensor([num_ctas, 2, seqlen_q, heads], accum),
        out: strided([batch, seqlen_q, heads, d_c], [o_b, o_s, o_h, 1]),
        lse: T.Tensor([batch, heads, seqlen_q], accum),
        softmax_scale: T.float32,
        causal: T.int32,
        window: T.int32,
        sinks: T.int32,
    ):
        with T.Kernel(tiling.num_tiles, num_ctas, threads=threads) as (tile, cta):
            q_tile = alloc_shared([rows, latent_cols], dtype)
            qp_tile = alloc_shared([rows, rope_cols], dtype)
            c_tile = alloc_shared([block, latent_cols], dtype)
            k_tile = alloc_shared([block, rope_cols], dtype)
            p_tile = alloc_shared([block, rows], dtype)
            stage = alloc_shared([warps, rows], accum)
            s = alloc_fragment([block, rows], accum)
            p = alloc_fragment([block, rows], accum)
            o = alloc_fragment([latent_cols, rows], accum)
            r = alloc_fragment([warps, rows], accum)
            m = alloc_fragment([rows], accum)
            mn = alloc_fragment([rows], accum)
            al = alloc_fragment([rows], accum)
            mo = alloc_fragment([rows], accum)
            mon = alloc_fragment([rows], accum)
            ao = alloc_fragment([rows], accum)
            den = alloc_fragment([rows], accum)
            limit = alloc_fragment([rows], T.int32)  # first token that a row's query does not see

            token0, head0, column, valid = tile_origin(tiling, tile, heads, d_r)
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
                load_queries(q_latent, q_pe, span[SEQUENCE], token0, head0, valid, seqlen_q, q_tile, qp_tile)
                T.fill(o, 0)
                T.fill(p, 0)
                T.fill(m, MASKED)
                T.fill(mo, MASKED)
                for j in parallel(rows):
                    limit[j] = span[STOP] - tail + T.min(token0 + token(j), tail)

                for k in T.serial(span[TILES] * steps):
                    t0 = first_token(span, k // steps) + k % steps * block
                    T.sync_threads()
                    load_step(
                        latent_cache, rope_cache, block_table, num_pages, span, pages, holes, t0, column, c_tile, k_tile
                    )
                    T.sync_threads()
                    if holds_unseen(span, t0, block):  # a weight of 0 does not clean a NaN
                        for c in panels:
                            for i, d in parallel(block, 64):
                                if unseen(span, t0 + i):
                                    c_tile[i, c + d] = T.cast(0, dtype)
                        T.sync_threads()
                    if holes[pieces] > 0:  # what has no page must not show another sequence's
                        for u in list(range(pieces)):
                            if holes[u] > 0:
                                for c in panels:
                                    for i, d in parallel(piece, 64):
                                        c_tile[u * piece + i, c + d] = T.cast(0, dtype)
                                for i, d in parallel(piece, rope_cols):
                                    k_tile[u * piece + i, d] = T.cast(0, dtype)
                        T.sync_threads()
                    attend(
                        span, t0, tail, limit, window, sinks, scale, q_tile, qp_tile, c_tile, k_tile, p_tile, stage,
                        s, p, o, r, m, mn, al, mo, mon, ao,
                    )  # fmt: skip

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
                    mo[j] = T.if_then_else(den[j] == 0, -T.infinity(accum), (T.log2(den[j]) + mo[j] * scale) * LN2)
                    den[j] = 1.0 / T.max(den[j], 1e-30)
                if span[SLOT] < 0:  # the whole sequence
                    for j in parallel(rows):
                        if (token0 + token(j) < seqlen_q) & (head(j) < valid):
                            lse[span[SEQUENCE], head0 + head(j), token0 + token(j)] = mo[j]
                    for d, j in parallel(latent_cols, rows):
                        if (token0 + token(j) < seqlen_q) & (head(j) < valid):
                            if d < d_c:
                                out[span[SEQUENCE], token0 + token(j), head0 + head(j), d] = o[d, j] * den[j]
                else:
                    for j in parallel(rows):
                        if (token0 + token(j) < seqlen_q) & (head(j) < valid):
                            partial_lse[span[SLOT] // 2, span[SLOT] % 2, token0 + token(j), head0 + head(j)] = mo[j]
                    for d, j in parallel(latent_cols, rows):
                        if (token0 + token(j) < seqlen_q) & (head(j) < valid):
                            if d < d_c:
                                partial_out[span[SLOT] // 2, span[SLOT] % 2, token0 + token(j), head0 + head(j), d] = (
                                    o[d, j] * den[j]
                                )

    return mla_decode_swap_ab
