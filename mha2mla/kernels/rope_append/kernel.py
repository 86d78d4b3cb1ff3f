"""Rotates queries and keys of new tokens and writes keys, and rows beside them, into a paged cache, in one pass."""

import tilelang.language as T


def make_rope_append(
    *,
    heads: int,
    num_rope_heads: int,
    row_width: int,
    qk_rope_head_dim: int,
    num_tables: int,
    page_size: int,
    dtype: str,
    interleaved: bool,
    block_tokens: int = 4,
    threads: int = 128,
    on_cpu: bool = False,
):
    """A TileLang function ``rope_append``; tokens and pages are run-time values.

    Args:
        heads: query heads H to rotate; 0 leaves the queries out.
        num_rope_heads, row_width: G and the width of a row; with G = 0 nothing is written to a cache.
        qk_rope_head_dim: d_r.
        num_tables: rows of inv_freq; divides H and G.
        page_size: tokens per page.
        dtype: of rows, keys, queries and caches.
        interleaved: pairs are neighbours (x_0, x_1), …; else halves (x_0, x_{d_r / 2}), ….
        block_tokens, threads: of a block.
        on_cpu: compile for TileLang's C target.

    The function's arguments: rows [N,width], keys [N,G,d_r] and queries [N,H,d_r] (contiguous), positions [N] int32,
    slots [N] int32, inv_freq [num_tables,d_r/2] float32; row_cache [P,page,width] and rope_cache [P,page,G*d_r]
    (run-time strides), out [N,H,d_r]; scaling float32. What is left out is passed as any tensor with a size of at least
    one everywhere.
    """
    accum = T.float32
    half = qk_rope_head_dim // 2
    tokens, pages = T.dynamic("tokens"), T.dynamic("pages")
    r_p, r_t = T.dynamic("r_p"), T.dynamic("r_t")
    k_p, k_t = T.dynamic("k_p"), T.dynamic("k_t")
    groups, width, queries = max(1, num_rope_heads), max(1, row_width), max(1, heads)
    alloc_shared = T.alloc_local if on_cpu else T.alloc_shared
    parallel = T.grid if on_cpu else T.Parallel
    threads = 1 if on_cpu else threads

    def strided(shape, strides):  # the CPU target's wrapper passes no run-time strides
        return T.Tensor(shape, dtype) if on_cpu else T.StridedTensor(shape, strides, dtype)

    def first(pair):
        return 2 * pair if interleaved else pair

    def second(pair):
        return 2 * pair + 1 if interleaved else pair + half

    @T.prim_func
    def rope_append(
        rows: T.Tensor([tokens, width], dtype),
        keys: T.Tensor([tokens, groups, qk_rope_head_dim], dtype),
        query: T.Tensor([tokens, queries, qk_rope_head_dim], dtype),
        positions: T.Tensor([tokens], T.int32),
        slots: T.Tensor([tokens], T.int32),
        inv_freq: T.Tensor([num_tables, half], accum),
        row_cache: strided([pages, page_size, width], [r_p, r_t, 1]),
        rope_cache: strided([pages, page_size, groups * qk_rope_head_dim], [k_p, k_t, 1]),
        out: T.Tensor([tokens, queries, qk_rope_head_dim], dtype),
        scaling: T.float32,
    ):
        with T.Kernel(T.ceildiv(tokens, block_tokens), threads=threads) as x:
            cos = alloc_shared([block_tokens, num_tables, half], accum)
            sin = alloc_shared([block_tokens, num_tables, half], accum)
            slot = alloc_shared([block_tokens], T.int32)
            t0 = x * block_tokens
            for i, g, p in parallel(block_tokens, num_tables, half):
                cos[i, g, p] = T.cos(T.cast(positions[T.min(t0 + i, tokens - 1)], accum) * inv_freq[g, p])
                sin[i, g, p] = T.sin(T.cast(positions[T.min(t0 + i, tokens - 1)], accum) * inv_freq[g, p])
                cos[i, g, p] *= T.if_then_else(inv_freq[g, p] == 0, 1.0, scaling)
                sin[i, g, p] *= scaling
            if num_rope_heads:
                for i in parallel(block_tokens):
                    # -1: nothing to write, also where a slot lies outside the cache
                    slot[i] = T.if_then_else(
                        (t0 + i < tokens) & (slots[T.min(t0 + i, tokens - 1)] < pages * page_size),
                        slots[T.min(t0 + i, tokens - 1)],
                        -1,
                    )
            T.sync_threads()
            if num_rope_heads:
                for i, c in parallel(block_tokens, row_width):
                    if slot[i] >= 0:
                        row_cache[slot[i] // page_size, slot[i] % page_size, c] = rows[t0 + i, c]
                for i, g, p in parallel(block_tokens, groups, half):
                    if slot[i] >= 0:
                        rope_cache[slot[i] // page_size, slot[i] % page_size, g * qk_rope_head_dim + first(p)] = (
                            T.cast(keys[t0 + i, g, first(p)], accum) * cos[i, g * num_tables // groups, p]
                            - T.cast(keys[t0 + i, g, second(p)], accum) * sin[i, g * num_tables // groups, p]
                        )
                        rope_cache[slot[i] // page_size, slot[i] % page_size, g * qk_rope_head_dim + second(p)] = (
                            T.cast(keys[t0 + i, g, second(p)], accum) * cos[i, g * num_tables // groups, p]
                            + T.cast(keys[t0 + i, g, first(p)], accum) * sin[i, g * num_tables // groups, p]
                        )
            if heads:
                for i, h, p in parallel(block_tokens, queries, half):
                    if t0 + i < tokens:
                        out[t0 + i, h, first(p)] = (
                            T.cast(query[t0 + i, h, first(p)], accum) * cos[i, h * num_tables // queries, p]
                            - T.cast(query[t0 + i, h, second(p)], accum) * sin[i, h * num_tables // queries, p]
                        )
                        out[t0 + i, h, second(p)] = (
                            T.cast(query[t0 + i, h, second(p)], accum) * cos[i, h * num_tables // queries, p]
                            + T.cast(query[t0 + i, h, first(p)], accum) * sin[i, h * num_tables // queries, p]
                        )

    return rope_append
