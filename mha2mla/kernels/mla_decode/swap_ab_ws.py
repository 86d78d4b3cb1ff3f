"""MLA decode for Hopper, heads on the N side of wgmma: one warpgroup computes, two warps stream the cache.

The latent and the rotary keys travel through two independent TMA rings, so many rope heads (a converted MHA model
caches one rotary key per head) cost bytes but no pipeline stages of the latent. Scores and output as in ``swap_ab``.
"""

import tilelang.language as T

from mha2mla.kernels.mla_decode.selection import RopeBlocks, padded_latent_columns
from mha2mla.kernels.mla_decode.swap_ab import LN2, LOG2E, MASKED
from mha2mla.kernels.mla_decode.tiling import RowTiling

CONSUMERS = 128  # threads of the computing warpgroup; a second warpgroup holds the two streaming warps
BLOCK = 64  # cached tokens per tile: the M of one wgmma
BARRIER = 8  # named barriers below 8 belong to the compiler


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
):
    """A TileLang function ``mla_decode_swap_ab_ws`` for one static shape; arguments as :func:`make_swap_ab` describes.

    Args:
        heads, kv_lora_rank, qk_rope_head_dim, num_rope_heads: H, d_c, d_r, G.
        page_size: tokens per page, a power of two >= 16.
        dtype: "bfloat16" or "float16".
        tiling: which query rows one CTA serves.
        rope: how the rope scores are cut into matrix products.
        num_stages: latent tiles in flight.
        rope_stages: chunks of rotary keys in flight.
    """
    d_c, d_r, tile_tokens = kv_lora_rank, qk_rope_head_dim, tiling.tokens_per_tile
    rows, head_rows = tiling.rows, tiling.head_rows
    groups, group = tiling.groups_per_tile, tiling.heads_per_group
    tile_heads, tiles_per_group = tiling.heads_per_tile, tiling.tiles_per_group
    even = tile_heads * tiling.head_tiles == heads
    latent_cols = padded_latent_columns(d_c, CONSUMERS)
    chunk, chunks = rope.chunk_columns, rope.chunks_per_block
    octets = rope.block_rows < rows
    accum = T.float32
    pieces = max(1, BLOCK // page_size)
    warps = BLOCK // 16
    row_blocks, chunk_list, warp_list = list(range(rope.num_blocks)), list(range(chunks)), list(range(warps))
    total_chunks = rope.num_blocks * chunks
    piece_list, panel_list = list(range(pieces)), list(range(0, latent_cols, 64))
    rope_panels = list(range(0, chunk, 64))
    by_row = T.GemmWarpPolicy.FullRow

    batch, seqlen_q = T.dynamic("batch"), T.dynamic("seqlen_q")
    num_pages, max_pages, num_splits = T.dynamic("num_pages"), T.dynamic("max_pages"), T.dynamic("num_splits")
    ql_b, ql_s, ql_h = T.dynamic("ql_b"), T.dynamic("ql_s"), T.dynamic("ql_h")
    qp_b, qp_s, qp_h = T.dynamic("qp_b"), T.dynamic("qp_s"), T.dynamic("qp_h")
    lc_p, lc_t, rc_p, rc_t = T.dynamic("lc_p"), T.dynamic("lc_t"), T.dynamic("rc_p"), T.dynamic("rc_t")

    def token(row):
        return row // head_rows if tile_tokens > 1 else 0

    def head(row):
        return row % head_rows if tile_tokens > 1 else row

    @T.prim_func
    def mla_decode_swap_ab_ws(
        q_latent: T.StridedTensor([batch, seqlen_q, heads, d_c], [ql_b, ql_s, ql_h, 1], dtype),
        q_pe: T.StridedTensor([batch, seqlen_q, heads, d_r], [qp_b, qp_s, qp_h, 1], dtype),
        latent_cache: T.StridedTensor([num_pages, page_size, d_c], [lc_p, lc_t, 1], dtype),
        rope_cache: T.StridedTensor([num_pages, page_size, num_rope_heads * d_r], [rc_p, rc_t, 1], dtype),
        block_table: T.Tensor([batch, max_pages], T.int32),
        cache_seqlens: T.Tensor([batch], T.int32),
        cache_starts: T.Tensor([batch], T.int32),
        partial_out: T.Tensor([batch, num_splits, seqlen_q, heads, d_c], accum),
        partial_lse: T.Tensor([batch, num_splits, seqlen_q, heads], accum),
        softmax_scale: T.float32,
        causal: T.int32,
        use_starts: T.int32,
    ):
        with T.Kernel(batch, tiling.num_tiles, num_splits, threads=2 * CONSUMERS) as (b, tile, z):
            q_tile = T.alloc_shared([rows, latent_cols], dtype)
            qp_tile = T.alloc_shared([rope.num_blocks * rope.block_rows, chunks * chunk], dtype)
            c_ring = T.alloc_shared([num_stages, BLOCK, latent_cols], dtype)
            k_ring = T.alloc_shared([rope_stages, BLOCK, chunk], dtype)
            p_tile = T.alloc_shared([BLOCK, rows], dtype)
            stage = T.alloc_shared([warps, rows], accum)
            q_full = T.alloc_barrier(1)
            c_full = T.alloc_barrier([1] * num_stages)
            c_free = T.alloc_barrier([CONSUMERS] * num_stages)
            k_full = T.alloc_barrier([1] * rope_stages)
            k_free = T.alloc_barrier([CONSUMERS] * rope_stages)
            thread = T.get_thread_binding()

            y = tile % tiling.head_tiles if tiling.token_tiles > 1 else tile
            token0 = tile // tiling.head_tiles * tile_tokens if tiling.token_tiles > 1 else 0
            head0 = y // tiles_per_group * (groups * group) + y % tiles_per_group * tile_heads
            column = y // tiles_per_group * (groups * d_r)
            # heads of this tile: the last tile of a group, or of all groups, may have fewer
            first = y % tiles_per_group * tile_heads if tiles_per_group > 1 else y * tile_heads
            valid = tile_heads if even else T.min(tile_heads, (group if tiles_per_group > 1 else heads) - first)

            # In memory on purpose: see swap_ab. [stop, start, last page, first tile, tiles]
            span = T.alloc_local([6], T.int32)
            span[0] = T.max(0, T.min(cache_seqlens[b], max_pages * page_size))
            span[1] = T.max(0, T.min(cache_starts[b] * use_starts, span[0]))
            span[2] = T.max(0, (span[0] - 1) // page_size)
            span[5] = (span[0] + BLOCK - 1) // BLOCK - span[1] // BLOCK
            span[3] = span[1] // BLOCK + T.truncdiv(span[5] * z, num_splits)
            span[4] = span[1] // BLOCK + T.truncdiv(span[5] * (z + 1), num_splits) - span[3]

            # Indices are clamped beside their guards: for some widths TileLang's bounds check fails to lower otherwise.
            if thread < CONSUMERS:  # a power-of-two count of threads: others fail to lower
                for i, d in T.Parallel(rope.num_blocks * rope.block_rows, chunks * chunk):
                    if octets:  # row i is head i; its block holds 8 heads and their own columns only
                        qp_tile[i, d] = T.if_then_else(
                            (i < valid) & (d // d_r == i % 8 // group),
                            q_pe[b, 0, T.min(head0 + i, heads - 1), d % d_r],
                            T.cast(0, dtype),
                        )
                    else:
                        qp_tile[i, d] = T.if_then_else(
                            (token0 + token(i) < seqlen_q)
                            & (head(i) < valid)
                            & (d // d_r == head(i) // group % groups),
                            q_pe[b, T.min(token0 + token(i), seqlen_q - 1), T.min(head0 + head(i), heads - 1), d % d_r],
                            T.cast(0, dtype),
                        )
            T.sync_threads()

            if thread < CONSUMERS:
                T.set_max_nreg(240, 1)
                s = T.alloc_fragment([BLOCK, rows], accum)
                p = T.alloc_fragment([BLOCK, rows], accum)
                rs = [T.alloc_fragment([BLOCK, rope.block_rows], accum) for _ in row_blocks]
                o = T.alloc_fragment([latent_cols, rows], accum)
                r = T.alloc_fragment([warps, rows], accum)
                m = T.alloc_fragment([rows], accum)
                mn = T.alloc_fragment([rows], accum)
                al = T.alloc_fragment([rows], accum)
                den = T.alloc_fragment([rows], accum)
                limit = T.alloc_fragment([rows], T.int32)  # first token that a row's query does not see
                scale = softmax_scale * LOG2E
                T.fill(o, 0)
                T.fill(p, 0)
                T.fill(m, MASKED)
                for j in T.Parallel(rows):
                    limit[j] = span[0] - (seqlen_q - 1) * causal + T.min(token0 + token(j), (seqlen_q - 1) * causal)
                T.barrier_wait(q_full, 0)
                for k in T.serial(span[4]):
                    t0 = (span[3] + k) * BLOCK
                    T.barrier_wait(c_full[k % num_stages], (k // num_stages) & 1)
                    T.wgmma_gemm(
                        c_ring[k % num_stages, :, :], q_tile, s, transpose_B=True, clear_accum=True, policy=by_row
                    )
                    for q in row_blocks:
                        for u in chunk_list:
                            n = k * total_chunks + q * chunks + u
                            T.barrier_wait(k_full[n % rope_stages], (n // rope_stages) & 1)
                            if octets:
                                T.wgmma_gemm(
                                    k_ring[n % rope_stages, :, :],
                                    qp_tile[q * 8 : (q + 1) * 8, u * chunk : (u + 1) * chunk],
                                    rs[q],
                                    transpose_B=True,
                                    clear_accum=u == 0,
                                    policy=by_row,
                                )
                            else:
                                T.wgmma_gemm(
                                    k_ring[n % rope_stages, :, :],
                                    qp_tile[:, u * chunk : (u + 1) * chunk],
                                    s,
                                    transpose_B=True,
                                    policy=by_row,
                                )
                            if q * chunks + u >= rope_stages - 1 and q * chunks + u < total_chunks - 1:
                                # the ring is shorter than a tile's chunks: free the oldest slot as soon as it is read
                                T.wait_wgmma(rope_stages - 1)
                                T.barrier_arrive(k_free[(n - (rope_stages - 1)) % rope_stages])
                    T.wait_wgmma(0)
                    for v in list(range(max(0, total_chunks - rope_stages), total_chunks)):
                        T.barrier_arrive(k_free[(k * total_chunks + v) % rope_stages])
                    if octets:
                        for q in row_blocks:
                            for i, j in T.Parallel(BLOCK, 8):
                                s[i, q * 8 + j] += rs[q][i, j]
                    for i, j in T.Parallel(BLOCK, rows):
                        s[i, j] = T.if_then_else((t0 + i >= span[1]) & (t0 + i < limit[j]), s[i, j], MASKED)
                    if (t0 < span[1]) | (t0 + BLOCK > span[0]):  # a weight of 0 does not clean a NaN
                        for c in panel_list:  # by panels: other widths cost registers for divisions by 3, 5 or 7
                            for i, d in T.Parallel(BLOCK, 64):
                                if (t0 + i < span[1]) | (t0 + i >= span[0]):
                                    c_ring[k % num_stages, i, c + d] = T.cast(0, dtype)
                        T.fence_proxy_async()
                    view = T.view(s, [warps, 16, rows])
                    T.reduce_max(view, r, dim=1)
                    T.sync_threads(barrier_id=BARRIER, arrive_count=CONSUMERS)
                    T.copy(r, stage)
                    T.sync_threads(barrier_id=BARRIER, arrive_count=CONSUMERS)
                    for j in T.Parallel(rows):
                        mn[j] = m[j]
                        for w in warp_list:
                            mn[j] = T.max(mn[j], stage[w, j])
                    for j in T.Parallel(rows):
                        al[j] = T.exp2((m[j] - mn[j]) * scale)
                        m[j] = mn[j]
                    for i, j in T.Parallel(BLOCK, rows):
                        s[i, j] = T.if_then_else(s[i, j] == MASKED, 0.0, T.exp2((s[i, j] - mn[j]) * scale))
                    T.copy(s, p_tile)
                    for i, j in T.Parallel(BLOCK, rows):
                        p[i, j] = p[i, j] * al[j] + s[i, j]
                    for d, j in T.Parallel(latent_cols, rows):
                        o[d, j] *= al[j]
                    T.gemm(c_ring[k % num_stages, :, :], p_tile, o, transpose_A=True, policy=by_row)
                    T.barrier_arrive(c_free[k % num_stages])
                p_view = T.view(p, [warps, 16, rows])
                T.reduce_sum(p_view, r, dim=1)
                T.sync_threads(barrier_id=BARRIER, arrive_count=CONSUMERS)
                T.copy(r, stage)
                T.sync_threads(barrier_id=BARRIER, arrive_count=CONSUMERS)
                for j in T.Parallel(rows):
                    den[j] = 0
                    for w in warp_list:
                        den[j] += stage[w, j]
                for j in T.Parallel(rows):
                    if (token0 + token(j) < seqlen_q) & (head(j) < valid):
                        partial_lse[b, z, token0 + token(j), head0 + head(j)] = T.if_then_else(
                            den[j] == 0, -T.infinity(accum), (T.log2(den[j]) + m[j] * scale) * LN2
                        )
                if span[4] > 0:
                    for d, j in T.Parallel(latent_cols, rows):
                        if (token0 + token(j) < seqlen_q) & (head(j) < valid):
                            if d < d_c:
                                partial_out[b, z, token0 + token(j), head0 + head(j), d] = o[d, j] / T.max(
                                    den[j], 1e-30
                                )
            else:
                T.set_max_nreg(40, 0)
                if thread < CONSUMERS + 32:
                    if tile_tokens == 1:
                        T.tma_copy(q_latent[b, token0, head0 : head0 + rows, 0:latent_cols], q_tile, barrier=q_full)
                    else:
                        for v in list(range(tile_tokens)):
                            for c in panel_list:
                                T.tma_copy(
                                    q_latent[b, token0 + v, head0 : head0 + head_rows, c : c + 64],
                                    q_tile[v * head_rows : (v + 1) * head_rows, c : c + 64],
                                    barrier=q_full,
                                )
                    if thread == CONSUMERS:
                        T.barrier_arrive(q_full)
                    for k in T.serial(span[4]):
                        t0 = (span[3] + k) * BLOCK
                        T.barrier_wait(c_free[k % num_stages], ((k // num_stages) & 1) ^ 1)
                        for v in piece_list:
                            if pieces == 1:
                                T.tma_copy(
                                    latent_cache[
                                        block_table[b, t0 // page_size],
                                        t0 % page_size : t0 % page_size + BLOCK,
                                        0:latent_cols,
                                    ],
                                    c_ring[k % num_stages, :, :],
                                    barrier=c_full[k % num_stages],
                                )
                            else:
                                for c in panel_list:  # panels of the swizzled tile are contiguous per page
                                    T.tma_copy(
                                        latent_cache[
                                            block_table[b, T.min(t0 // page_size + v, span[2])], 0:page_size, c : c + 64
                                        ],
                                        c_ring[k % num_stages, v * page_size : (v + 1) * page_size, c : c + 64],
                                        barrier=c_full[k % num_stages],
                                    )
                        if thread == CONSUMERS:
                            T.barrier_arrive(c_full[k % num_stages])
                elif thread < CONSUMERS + 64:
                    for k in T.serial(span[4]):
                        t0 = (span[3] + k) * BLOCK
                        for q in row_blocks:
                            for u in chunk_list:
                                n = k * total_chunks + q * chunks + u
                                T.barrier_wait(k_free[n % rope_stages], ((n // rope_stages) & 1) ^ 1)
                                for v in piece_list:
                                    if pieces == 1:
                                        T.tma_copy(
                                            rope_cache[
                                                block_table[b, t0 // page_size],
                                                t0 % page_size : t0 % page_size + BLOCK,
                                                column + q * rope.block_columns + u * chunk : column
                                                + q * rope.block_columns
                                                + (u + 1) * chunk,
                                            ],
                                            k_ring[n % rope_stages, :, :],
                                            barrier=k_full[n % rope_stages],
                                        )
                                    else:
                                        for c in rope_panels:
                                            T.tma_copy(
                                                rope_cache[
                                                    block_table[b, T.min(t0 // page_size + v, span[2])],
                                                    0:page_size,
                                                    column + q * rope.block_columns + u * chunk + c : column
                                                    + q * rope.block_columns
                                                    + u * chunk
                                                    + c
                                                    + min(64, chunk),
                                                ],
                                                k_ring[
                                                    n % rope_stages,
                                                    v * page_size : (v + 1) * page_size,
                                                    c : c + min(64, chunk),
                                                ],
                                                barrier=k_full[n % rope_stages],
                                            )
                                if thread == CONSUMERS + 32:
                                    T.barrier_arrive(k_full[n % rope_stages])

    return mla_decode_swap_ab_ws
