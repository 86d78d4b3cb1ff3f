"""MLA decode for Hopper, heads on the N side of wgmma: warpgroups compute, three warps stream cache and queries.

The latent and the rotary keys travel through two independent TMA rings, so many rope heads (a converted MHA model
caches one rotary key per head) cost bytes but no pipeline stages of the latent; both rings run on into the next
sequence of the CTA's schedule while the last one is being written. Scores and output as in ``swap_ab``; the rope scores
in one of several ways (``selection.rope_blocks``). Two computing warpgroups share every tile and split the query rows;
they exchange nothing but turns at the tensor cores (not even these where ``selection.takes_turns`` says no).
"""

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from mha2mla.kernels.mla_decode.selection import RopeBlocks, padded_latent_columns, takes_turns
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
from mha2mla.kernels.split_kv.stream import make_streams
from mha2mla.kernels.split_kv.tiling import RowTiling

WARPGROUP = 128  # threads
BLOCK = 64  # cached tokens per tile: the M of one wgmma
BARRIER = 8  # named barriers below 8 belong to the compiler
TURN = 12  # and the next: whose turn it is at the score products
PRODUCER_REGISTERS = 56


def make_swap_ab_ws(
    *,
    heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    num_rope_heads: int,
    page_size: int,
    dtype: str,
    tiling: RowTiling,
    rope: RopeBlocks,
    num_stages: int = 2,
    rope_stages: int = 2,
    warpgroups: int = 1,
    ctas_per_sm: int = 1,
):
    """A TileLang function ``mla_decode_swap_ab_ws`` for one static shape; arguments as :func:`make_swap_ab` describes.

    Args:
        heads, kv_lora_rank, qk_rope_head_dim, num_rope_heads: H, d_c, d_r, G.
        page_size: tokens per page, a power of two >= 16.
        dtype: "bfloat16" or "float16".
        tiling: which query rows one CTA serves.
        rope: how the rope scores are cut into products, and who computes them.
        num_stages: latent tiles in flight.
        rope_stages: chunks of rotary keys in flight.
        warpgroups: 1 or 2 that compute; each takes ``tiling.rows / warpgroups`` rows.
        ctas_per_sm: CTAs that must fit into the registers of one multiprocessor.
    """
    d_c, d_r = kv_lora_rank, qk_rope_head_dim
    rows = tiling.rows // warpgroups  # of one warpgroup
    groups, group = tiling.groups_per_tile, tiling.heads_per_group
    one_token = tiling.tokens_per_tile == 1 and tiling.token_tiles == 1
    latent_cols = padded_latent_columns(d_c, WARPGROUP)
    chunk, chunks = rope.chunk_columns, rope.chunks_per_block
    part = rope.block_rows  # rows that a rope block is for
    by_block = part < tiling.rows
    piece = chunks * chunk if chunks * chunk <= 128 else 64  # columns of q_pe at a time
    accum = T.float32
    pieces = max(1, BLOCK // page_size)
    warps = BLOCK // 16
    consumers = warpgroups * WARPGROUP
    threads = consumers + WARPGROUP
    total_chunks = rope.num_blocks * chunks
    turns = warpgroups > 1 and takes_turns(tiling, rope, rope_stages)
    # A "full" barrier belongs to a chunk's place in the tile, not to a ring slot: who waits for it then sees all its
    # phases, and a wait for one parity cannot be answered by an earlier phase of the same parity.
    rope_phases = total_chunks * -(-rope_stages // total_chunks)
    chunk_list, warp_list = list(range(chunks)), list(range(warps))
    piece_list = list(range(pieces))
    rope_panels, block_list = list(range(0, chunk, 64)), list(range(rope.num_blocks))
    by_row = T.GemmWarpPolicy.FullRow
    pool = 65536 // (ctas_per_sm * threads) // 8 * 8 * threads  # registers of a CTA at launch
    registers = min(240, (pool - PRODUCER_REGISTERS * WARPGROUP) // consumers // 8 * 8)

    batch, seqlen_q = T.dynamic("batch"), T.dynamic("seqlen_q")
    num_pages, max_pages = T.dynamic("num_pages"), T.dynamic("max_pages")
    num_ctas, fragments = T.dynamic("num_ctas"), T.dynamic("fragments")
    ql_b, ql_s, ql_h = T.dynamic("ql_b"), T.dynamic("ql_s"), T.dynamic("ql_h")
    qp_b, qp_s, qp_h = T.dynamic("qp_b"), T.dynamic("qp_s"), T.dynamic("qp_h")
    o_b, o_s, o_h = T.dynamic("o_b"), T.dynamic("o_s"), T.dynamic("o_h")
    lc_p, lc_t, rc_p, rc_t = T.dynamic("lc_p"), T.dynamic("lc_t"), T.dynamic("rc_p"), T.dynamic("rc_t")

    token, head = tiling.token, tiling.head

    stream, stream_queries = make_streams(tiling, latent_cols, page_size, num_stages)

    def own_blocks(w):
        """The rope blocks of a warpgroup, and its first chunk of a tile's."""
        mine = [q for q in block_list if not by_block or q * part // rows == w]
        return mine, mine[0] * chunks if mine else 0

    @T.macro
    def consume(
        w, cta, token0, head0, valid, q_pe, schedule, span, work, q_tile, qp_tile, c_ring, k_ring, p_tile, stage,
        q_full, q_free, c_full, c_free, k_full, k_free, out, lse, partial_out, partial_lse, seqlen_q,
        softmax_scale, causal, window, sinks,
    ):  # fmt: skip
        """All fragments of this CTA, for rows ``w * rows ...`` of its tile."""
        mine, base = own_blocks(w)
        own_chunks = len(mine) * chunks
        first_row = w * rows
        T.set_max_nreg(registers, 1)
        s = T.alloc_fragment([BLOCK, rows], accum)
        p = T.alloc_fragment([BLOCK, rows], accum)
        rs = [T.alloc_fragment([BLOCK, part], accum) for _ in mine] if by_block and not rope.on_cuda_cores else []
        dots = T.alloc_fragment([BLOCK, rows], accum) if rope.on_cuda_cores else None
        key = T.alloc_local([8], dtype)
        query = T.alloc_local([8], dtype)
        o = T.alloc_fragment([latent_cols, rows], accum)
        r = T.alloc_fragment([warps, rows], accum)
        m = T.alloc_fragment([rows], accum)
        mn = T.alloc_fragment([rows], accum)
        al = T.alloc_fragment([rows], accum)
        den = T.alloc_fragment([rows], accum)
        limit = T.alloc_fragment([rows], T.int32)  # first token that a row's query does not see
        scale = softmax_scale * LOG2E
        tail = (seqlen_q - 1) * causal
        work[2] = 0
        if turns and w == 1:
            if work[0] > 0:
                T.named_barrier_arrive(TURN, consumers)
        for f in T.serial(work[0]):
            read_fragment(span, schedule, cta, work, f)
            # Indices are clamped beside their guards: for some widths TileLang's bounds check fails to lower otherwise.
            for c in T.serial(chunks * chunk // piece):  # loads of a whole wide row at once would spill registers
                if by_block:  # row i is head i; its block holds the columns of its own heads only
                    if len(mine) > 0:
                        for i, d in T.Parallel(len(mine) * part, piece):
                            qp_tile[base // chunks * part + i, c * piece + d] = T.if_then_else(
                                (first_row + i < valid) & ((c * piece + d) // d_r == i % part // group),
                                q_pe[span[SEQUENCE], 0, T.min(head0 + first_row + i, heads - 1), (c * piece + d) % d_r],
                                T.cast(0, dtype),
                            )
                else:
                    for i, d in T.Parallel(rows, piece):
                        qp_tile[first_row + i, c * piece + d] = T.if_then_else(
                            (token0 + token(first_row + i) < seqlen_q)
                            & (head(first_row + i) < valid)
                            & ((c * piece + d) // d_r == head(first_row + i) // group % groups),
                            q_pe[
                                span[SEQUENCE],
                                T.min(token0 + token(first_row + i), seqlen_q - 1),
                                T.min(head0 + head(first_row + i), heads - 1),
                                (c * piece + d) % d_r,
                            ],
                            T.cast(0, dtype),
                        )
            T.fence_proxy_async()
            T.sync_threads(barrier_id=BARRIER + w, arrive_count=WARPGROUP)
            T.fill(o, 0)
            T.fill(p, 0)
            T.fill(m, MASKED)
            for j in T.Parallel(rows):
                limit[j] = span[STOP] - tail + T.min(token0 + token(first_row + j), tail)
            T.barrier_wait(q_full, f & 1)
            for k in T.serial(span[TILES]):
                t0 = first_token(span, k)
                slot = (work[2] + k) % num_stages
                T.barrier_wait(c_full[slot], ((work[2] + k) // num_stages) & 1)
                if turns:  # one multiplies while the other is at its softmax
                    T.sync_threads(barrier_id=TURN + w, arrive_count=consumers)
                T.wgmma_gemm(
                    c_ring[slot, :, :],
                    q_tile[first_row : first_row + rows, :],
                    s,
                    transpose_B=True,
                    clear_accum=True,
                    policy=by_row,
                )
                if rope.on_cuda_cores:
                    T.fill(dots, 0)
                for v in list(range(own_chunks)):
                    n = (work[2] + k) * total_chunks + base + v
                    T.barrier_wait(k_full[n % rope_phases], (n // rope_phases) & 1)
                    if rope.on_cuda_cores:
                        for i, j in T.Parallel(BLOCK, part if by_block else rows):
                            # where the keys of the row's rope head begin in the chunk
                            column = (j if by_block else first_row + j) // group % groups * d_r - v % chunks * chunk
                            if column >= 0 and column + d_r <= chunk:
                                for e in T.serial(d_r // 8):
                                    for x in T.vectorized(8):
                                        key[x] = k_ring[n % rope_stages, i, column + e * 8 + x]
                                    for x in T.vectorized(8):
                                        query[x] = qp_tile[
                                            (base + v) // chunks * part + j if by_block else first_row + j,
                                            v % chunks * chunk + column + e * 8 + x,
                                        ]
                                    for x in T.unroll(8):
                                        dots[i, v // chunks * part + j if by_block else j] += T.cast(
                                            key[x], accum
                                        ) * T.cast(query[x], accum)
                    elif by_block:
                        T.wgmma_gemm(
                            k_ring[n % rope_stages, :, :],
                            qp_tile[
                                (base + v) // chunks * part : ((base + v) // chunks + 1) * part,
                                v % chunks * chunk : (v % chunks + 1) * chunk,
                            ],
                            rs[v // chunks],
                            transpose_B=True,
                            clear_accum=v % chunks == 0,
                            policy=by_row,
                        )
                    else:
                        T.wgmma_gemm(
                            k_ring[n % rope_stages, :, :],
                            qp_tile[first_row : first_row + rows, v * chunk : (v + 1) * chunk],
                            s,
                            transpose_B=True,
                            policy=by_row,
                        )
                    if rope.on_cuda_cores:
                        if v < own_chunks - rope_stages:
                            T.barrier_arrive(k_free[n % rope_stages])
                    elif v >= rope_stages - 1 and v < own_chunks - 1:
                        # the ring is shorter than a tile's chunks: free the oldest slot as soon as it is read
                        T.wait_wgmma(rope_stages - 1)
                        T.barrier_arrive(k_free[(n - (rope_stages - 1)) % rope_stages])
                T.wait_wgmma(0)
                for v in list(range(max(0, own_chunks - rope_stages), own_chunks)):
                    T.barrier_arrive(k_free[((work[2] + k) * total_chunks + base + v) % rope_stages])
                if turns:
                    if w == 0 or f < work[0] - 1 or k < span[TILES] - 1:
                        T.named_barrier_arrive(TURN + 1 - w, consumers)
                if rope.on_cuda_cores:
                    for i, j in T.Parallel(BLOCK, rows):
                        s[i, j] += dots[i, j]
                elif by_block:
                    for q in list(range(len(mine))):
                        for i, j in T.Parallel(BLOCK, part):
                            s[i, q * part + j] += rs[q][i, j]
                if needs_mask(span, t0, BLOCK, tail):
                    for i, j in T.Parallel(BLOCK, rows):
                        s[i, j] = T.if_then_else(sees(span, t0 + i, limit[j], window, sinks), s[i, j], MASKED)
                if holds_unseen(span, t0, BLOCK):  # a weight of 0 does not clean a NaN
                    if warpgroups > 1:  # the other one may still be reading the tile for its scores
                        T.sync_threads(barrier_id=BARRIER + 2, arrive_count=consumers)
                    for c in list(range(w * 64, latent_cols, 64 * warpgroups)):
                        # by panels: other widths cost registers for divisions by 3, 5 or 7
                        for i, d in T.Parallel(BLOCK, 64):
                            if unseen(span, t0 + i):
                                c_ring[slot, i, c + d] = T.cast(0, dtype)
                    T.fence_proxy_async()
                    if warpgroups > 1:
                        T.sync_threads(barrier_id=BARRIER + 2, arrive_count=consumers)
                view = T.view(s, [warps, 16, rows])
                T.reduce_max(view, r, dim=1)
                T.sync_threads(barrier_id=BARRIER + w, arrive_count=WARPGROUP)
                T.copy(r, stage[w, :, :])
                T.sync_threads(barrier_id=BARRIER + w, arrive_count=WARPGROUP)
                for j in T.Parallel(rows):
                    mn[j] = m[j]
                    for v in warp_list:
                        mn[j] = T.max(mn[j], stage[w, v, j])
                for j in T.Parallel(rows):
                    al[j] = T.exp2((m[j] - mn[j]) * scale)
                    m[j] = mn[j]
                    mn[j] = T.if_then_else(mn[j] == MASKED, 0.0, mn[j])  # so that masked scores weigh nothing
                for i, j in T.Parallel(BLOCK, rows):
                    s[i, j] = T.exp2((s[i, j] - mn[j]) * scale)
                T.copy(s, p_tile[w, :, :])
                for i, j in T.Parallel(BLOCK, rows):
                    p[i, j] = p[i, j] * al[j] + s[i, j]
                for d, j in T.Parallel(latent_cols, rows):
                    o[d, j] *= al[j]
                T.gemm(c_ring[slot, :, :], p_tile[w, :, :], o, transpose_A=True, policy=by_row)
                T.barrier_arrive(c_free[slot])
            T.barrier_arrive(q_free)
            work[2] += span[TILES]
            p_view = T.view(p, [warps, 16, rows])
            T.reduce_sum(p_view, r, dim=1)
            T.sync_threads(barrier_id=BARRIER + w, arrive_count=WARPGROUP)
            T.copy(r, stage[w, :, :])
            T.sync_threads(barrier_id=BARRIER + w, arrive_count=WARPGROUP)
            for j in T.Parallel(rows):
                den[j] = 0
                for v in warp_list:
                    den[j] += stage[w, v, j]
            for j in T.Parallel(rows):
                m[j] = T.if_then_else(den[j] == 0, -T.infinity(accum), (T.log2(den[j]) + m[j] * scale) * LN2)
                den[j] = 1.0 / T.max(den[j], 1e-30)
            if span[SLOT] < 0:
                for j in T.Parallel(rows):
                    if (one_token or token0 + token(first_row + j) < seqlen_q) and head(first_row + j) < valid:
                        lse[span[SEQUENCE], head0 + head(first_row + j), token0 + token(first_row + j)] = m[j]
                for d, j in T.Parallel(latent_cols, rows):
                    if (one_token or token0 + token(first_row + j) < seqlen_q) and head(first_row + j) < valid:
                        if d < d_c:
                            out[span[SEQUENCE], token0 + token(first_row + j), head0 + head(first_row + j), d] = (
                                o[d, j] * den[j]
                            )
            else:
                for j in T.Parallel(rows):
                    if (one_token or token0 + token(first_row + j) < seqlen_q) and head(first_row + j) < valid:
                        partial_lse[
                            span[SLOT] // 2, span[SLOT] % 2, token0 + token(first_row + j), head0 + head(first_row + j)
                        ] = m[j]
                for d, j in T.Parallel(latent_cols, rows):
                    if (one_token or token0 + token(first_row + j) < seqlen_q) and head(first_row + j) < valid:
                        if d < d_c:
                            partial_out[
                                span[SLOT] // 2,
                                span[SLOT] % 2,
                                token0 + token(first_row + j),
                                head0 + head(first_row + j),
                                d,
                            ] = o[d, j] * den[j]

    @T.prim_func
    def mla_decode_swap_ab_ws(
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
        with T.Kernel(tiling.num_tiles, num_ctas, threads=threads) as (tile, cta):
            if ctas_per_sm > 1:
                T.annotate_min_blocks_per_sm(ctas_per_sm)
            q_tile = T.alloc_shared([tiling.rows, latent_cols], dtype)
            qp_tile = T.alloc_shared([rope.num_blocks * rope.block_rows, chunks * chunk], dtype)
            c_ring = T.alloc_shared([num_stages, BLOCK, latent_cols], dtype)
            k_ring = T.alloc_shared([rope_stages, BLOCK, chunk], dtype)
            if rope.on_cuda_cores:  # no product swizzles the ring, and a panel of a page's rows has to be contiguous
                T.annotate_layout({k_ring: make_full_bank_swizzled_layout(k_ring)})
            p_tile = T.alloc_shared([warpgroups, BLOCK, rows], dtype)
            stage = T.alloc_shared([warpgroups, warps, rows], accum)
            q_full = T.alloc_barrier(1)
            q_free = T.alloc_barrier(consumers)
            c_full = T.alloc_barrier([1] * num_stages)
            c_free = T.alloc_barrier([consumers] * num_stages)
            k_full = T.alloc_barrier([1] * rope_phases)
            k_free = T.alloc_barrier([WARPGROUP if by_block else consumers] * rope_stages)
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
                consume(
                    0, cta, token0, head0, valid, q_pe, schedule, span, work, q_tile, qp_tile, c_ring, k_ring, p_tile,
                    stage, q_full, q_free, c_full, c_free, k_full, k_free, out, lse, partial_out, partial_lse, seqlen_q,
                    softmax_scale, causal, window, sinks,
                )  # fmt: skip
            elif warpgroups == 2 and thread < 2 * WARPGROUP:
                consume(
                    warpgroups - 1, cta, token0, head0, valid, q_pe, schedule, span, work, q_tile, qp_tile, c_ring,
                    k_ring, p_tile, stage, q_full, q_free, c_full, c_free, k_full, k_free, out, lse, partial_out,
                    partial_lse, seqlen_q, softmax_scale, causal, window, sinks,
                )  # fmt: skip
            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if thread < consumers + 32:
                    stream(
                        latent_cache, latent_cols, 0, [c_ring], c_full, c_free, thread, consumers, block_table,
                        schedule, cta, work, span, pages,
                    )  # fmt: skip
                elif thread < consumers + 64:
                    for f in T.serial(work[0]):
                        read_fragment(span, schedule, cta, work, f)
                        for k in T.serial(span[TILES]):
                            t0 = first_token(span, k)
                            for v in piece_list:
                                pages[v] = block_table[
                                    span[SEQUENCE], T.min(t0 // page_size + v, last_page(span, page_size))
                                ]
                            for q in block_list:
                                for u in chunk_list:
                                    n = (work[2] + k) * total_chunks + q * chunks + u
                                    left = column + q * rope.block_columns + u * chunk
                                    T.barrier_wait(k_free[n % rope_stages], ((n // rope_stages) & 1) ^ 1)
                                    for v in piece_list:
                                        if pieces == 1:
                                            T.tma_copy(
                                                rope_cache[
                                                    pages[0],
                                                    t0 % page_size : t0 % page_size + BLOCK,
                                                    left : left + chunk,
                                                ],
                                                k_ring[n % rope_stages, :, :],
                                                barrier=k_full[n % rope_phases],
                                            )
                                        else:
                                            for c in rope_panels:
                                                T.tma_copy(
                                                    rope_cache[
                                                        pages[v], 0:page_size, left + c : left + c + min(64, chunk)
                                                    ],
                                                    k_ring[
                                                        n % rope_stages,
                                                        v * page_size : (v + 1) * page_size,
                                                        c : c + min(64, chunk),
                                                    ],
                                                    barrier=k_full[n % rope_phases],
                                                )
                                    if thread == consumers + 32:
                                        T.barrier_arrive(k_full[n % rope_phases])
                        work[2] += span[TILES]
                elif thread < consumers + 96:
                    stream_queries(
                        q_latent, token0, head0, q_tile, q_full, q_free, thread, consumers + 64, schedule, cta, work
                    )

    return mla_decode_swap_ab_ws
