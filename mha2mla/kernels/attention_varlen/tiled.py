"""Varlen attention anywhere from sm_80 on: plain tiles, loads that guard themselves; also runs on the CPU."""

import tilelang.language as T

from mha2mla.kernels.attention_varlen.tiling import VarlenShape
from mha2mla.kernels.split_kv.fragment import LN2, LOG2E


def make_tiled(shape: VarlenShape, *, block_rows: int = 64, block_keys: int = 64, on_cpu: bool = False):
    """A TileLang function ``attention_varlen_tiled`` for one static shape; batch, tokens and lengths are run-time.

    Args:
        shape: of the call; its dtype is that of the inputs and the output.
        block_rows, block_keys: of a tile; the former is 16 rows a warp.
        on_cpu: compile for TileLang's C target.

    The function's arguments: q [T_q,H,d_0], q_pe [T_q,H,d_1], k [T_k,G_0,d_0], k_pe [T_k,G_1,d_1], v [T_k,G_v,d_v]
    (token and head strides at run time, multiples of 8 elements; without a second part q_pe and k_pe are q and k
    again), cu_seqlens_q and cu_seqlens_k [B+1] int32, out [T_q,H,d_v], lse [H,T_q] float32; softmax_scale float32;
    row_tiles int32, tiles of rows that the longest query has; section int32, how many heads (of all sequences, counted
    through) are worked on before the next ones. Grid: row_tiles * H * B.
    """
    heads, causal, dtype = shape.heads, shape.causal, shape.dtype
    rows, block = block_rows, block_keys
    accum = T.float32
    threads = 1 if on_cpu else rows // 16 * 32
    widths = (*shape.widths, shape.widths[0])[:2]  # a call without a second part passes the first again
    key_heads = (*shape.key_heads, shape.key_heads[0])[:2]
    columns = [-(-width // 16) * 16 for width in shape.widths]
    d_v, v_columns = shape.v_head_dim, -(-shape.v_head_dim // 16) * 16
    alloc_shared = T.alloc_local if on_cpu else T.alloc_shared
    alloc_fragment = T.alloc_local if on_cpu else T.alloc_fragment
    parallel = T.grid if on_cpu else T.Parallel
    by_row = T.GemmWarpPolicy.FullRow

    tokens_q, tokens_k, bounds = T.dynamic("tokens_q"), T.dynamic("tokens_k"), T.dynamic("bounds")
    q_t, q_h, r_t, r_h = T.dynamic("q_t"), T.dynamic("q_h"), T.dynamic("r_t"), T.dynamic("r_h")
    k_t, k_h, p_t, p_h = T.dynamic("k_t"), T.dynamic("k_h"), T.dynamic("p_t"), T.dynamic("p_h")
    v_t, v_h = T.dynamic("v_t"), T.dynamic("v_h")

    def strided(shape, strides):  # the CPU target's wrapper passes no run-time strides
        return T.Tensor(shape, dtype) if on_cpu else T.StridedTensor(shape, strides, dtype)

    @T.macro
    def load(source, first, last, head, width, tile, tile_rows, tile_columns):
        """Rows ``first ...`` below ``last``; zeros beyond them, so that nobody else's NaN comes in."""
        for c in T.serial(tile_columns // 16):  # in pieces: loads of whole rows at once cost registers
            for i, d in parallel(tile_rows, 16):
                tile[i, c * 16 + d] = T.if_then_else(
                    (first + i < last) & ((c * 16 + d < width) | (width == tile_columns)),
                    source[T.min(first + i, T.max(last - 1, 0)), head, T.min(c * 16 + d, width - 1)],
                    T.cast(0, dtype),
                )

    @T.prim_func
    def attention_varlen_tiled(
        q: strided([tokens_q, heads, widths[0]], [q_t, q_h, 1]),
        q_pe: strided([tokens_q, heads, widths[1]], [r_t, r_h, 1]),
        k: strided([tokens_k, key_heads[0], widths[0]], [k_t, k_h, 1]),
        k_pe: strided([tokens_k, key_heads[1], widths[1]], [p_t, p_h, 1]),
        v: strided([tokens_k, shape.value_heads, d_v], [v_t, v_h, 1]),
        cu_seqlens_q: T.Tensor([bounds], T.int32),
        cu_seqlens_k: T.Tensor([bounds], T.int32),
        out: T.Tensor([tokens_q, heads, d_v], dtype),
        lse: T.Tensor([heads, tokens_q], accum),
        softmax_scale: T.float32,
        row_tiles: T.int32,
        section: T.int32,
    ):
        with T.Kernel(row_tiles * heads * (bounds - 1), threads=threads) as x:
            q_tiles = [alloc_shared([rows, columns[part]], dtype) for part in shape.parts]
            k_tiles = [alloc_shared([block, columns[part]], dtype) for part in shape.parts]
            v_tile = alloc_shared([block, v_columns], dtype)
            s = alloc_fragment([rows, block], accum)
            p = alloc_fragment([rows, block], dtype)
            o = alloc_fragment([rows, v_columns], accum)
            m = alloc_fragment([rows], accum)
            z = alloc_fragment([rows], accum)
            use = alloc_fragment([rows], accum)
            al = alloc_fragment([rows], accum)
            den = alloc_fragment([rows], accum)
            total = alloc_fragment([rows], accum)
            limit = alloc_fragment([rows], T.int32)  # first key that a row does not see
            sources = [(q, k), (q_pe, k_pe)]
            scale = softmax_scale * LOG2E

            place = T.alloc_local([4], T.int32)  # section's first head, its heads, tile of rows, head and sequence
            place[0] = T.truncdiv(x, section * row_tiles) * section
            place[1] = T.min(section, heads * (bounds - 1) - place[0])
            place[2] = row_tiles - 1 - T.truncdiv(x - place[0] * row_tiles, place[1])
            place[3] = place[0] + T.truncmod(x - place[0] * row_tiles, place[1])
            h = place[3] % heads
            # first query, queries, first key, keys, tiles that some row sees, row of the tile
            span = T.alloc_local([6], T.int32)
            span[0] = cu_seqlens_q[place[3] // heads]
            span[1] = cu_seqlens_q[place[3] // heads + 1] - span[0]
            span[2] = cu_seqlens_k[place[3] // heads]
            span[3] = cu_seqlens_k[place[3] // heads + 1] - span[2]
            span[5] = place[2] * rows
            if causal:
                span[4] = T.max(0, span[3] - span[1] + T.min(span[1], span[5] + rows))
                span[4] = (T.min(span[4], span[3]) + block - 1) // block
            else:
                span[4] = (span[3] + block - 1) // block
            if span[5] < span[1]:
                for part in list(shape.parts):
                    load(
                        sources[part][0], span[0] + span[5], span[0] + span[1], h, shape.widths[part], q_tiles[part],
                        rows, columns[part],
                    )  # fmt: skip
                T.fill(o, 0)
                T.fill(den, 0)
                T.fill(m, -T.infinity(accum))
                T.fill(z, -T.infinity(accum))
                for i in parallel(rows):
                    if causal:
                        limit[i] = T.min(span[3], span[3] - span[1] + span[5] + i + 1)
                    else:
                        limit[i] = span[3]
                for n in T.serial(span[4]):
                    t0 = n * block
                    T.sync_threads()
                    for part in list(shape.parts):
                        load(
                            sources[part][1], span[2] + t0, span[2] + span[3], h // (heads // key_heads[part]),
                            shape.widths[part], k_tiles[part], block, columns[part],
                        )  # fmt: skip
                    load(
                        v, span[2] + t0, span[2] + span[3], h // (heads // shape.value_heads), d_v, v_tile, block,
                        v_columns,
                    )  # fmt: skip
                    T.sync_threads()
                    for part in list(shape.parts):
                        T.gemm(q_tiles[part], k_tiles[part], s, transpose_B=True, clear_accum=part == 0, policy=by_row)
                    for i, j in parallel(rows, block):
                        s[i, j] = T.if_then_else(t0 + j < limit[i], s[i, j], -T.infinity(accum))
                    # Online softmax (arXiv 1805.02867); z is the scaled maximum, rounded once, see warp_specialised.py
                    T.reduce_max(s, m, dim=1, clear=False)
                    for i in parallel(rows):
                        al[i] = z[i]
                        z[i] = m[i] * scale
                        use[i] = T.if_then_else(m[i] == -T.infinity(accum), 0.0, z[i])
                        al[i] = T.exp2(al[i] - use[i])
                    for i, j in parallel(rows, block):
                        s[i, j] = T.exp2(s[i, j] * scale - use[i])
                    T.reduce_sum(s, total, dim=1)
                    for i in parallel(rows):
                        den[i] = den[i] * al[i] + total[i]
                    for i, d in parallel(rows, v_columns):
                        o[i, d] *= al[i]
                    T.copy(s, p)
                    T.gemm(p, v_tile, o, policy=by_row)
                for i in parallel(rows):
                    z[i] = T.if_then_else(den[i] == 0, -T.infinity(accum), (T.log2(den[i]) + z[i]) * LN2)
                    den[i] = 1.0 / T.max(den[i], 1e-30)
                for i in parallel(rows):
                    if span[5] + i < span[1]:
                        lse[h, span[0] + span[5] + i] = z[i]
                for i, d in parallel(rows, v_columns):
                    if (span[5] + i < span[1]) & (d < d_v):
                        out[span[0] + span[5] + i, h, d] = o[i, d] * den[i]

    return attention_varlen_tiled
