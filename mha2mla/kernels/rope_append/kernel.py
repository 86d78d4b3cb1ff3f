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

    The function's arguments: rows [N,width], keys [N,G,d_r] and queries [N,H,d_r] (run-time strides: parts of one
    projection are read where they lie), positions [N] int32, slots [N] int32, inv_freq [num_tables,d_r/2] float32;
    row_cache [P,page,width] and rope_cache [P,page,G*d_r] (run-time strides), out [N,H,d_r]; scaling float32. What is
    left out is passed as any tensor with a size of at least one everywhere.
    """
    accum = T.float32
    half = qk_rope_head_dim // 2
    tokens, pages = T.dynamic("tokens"), T.dynamic("pages")
    r_p, r_t = T.dynamic("r_p"), T.dynamic("r_t")
    k_p, k_t = T.dynamic("k_p"), T.dynamic("k_t")
    rows_t, keys_t, keys_g = T.dynamic("rows_t"), T.dynamic("keys_t"), T.dynamic("keys_g")
    query_t, query_h = T.dynamic("query_t"), T.dynamic("query_h")
    groups, width, queries = max(1, num_rope_heads), max(1, row_width), max(1, heads)
    alloc_shared = T.alloc_local if on_cpu else T.alloc_shared
    threads = 1 if on_cpu else threads
    # Elements of each kind that a block handles; they go round the threads one by one. (T.Parallel finds no layout for
    # some of these shapes, such as 9 heads of 8 pairs.)
    angles, numbers = block_tokens * num_tables * half, block_tokens * row_width
    key_pairs, query_pairs = block_tokens * num_rope_heads * half, block_tokens * heads * half

    def strided(shape, strides):  # the CPU target's wrapper passes no run-time strides
        return T.Tensor(shape, dtype) if on_cpu else T.StridedTensor(shape, strides, dtype)

    def thread():
        return 0 if on_cpu else T.get_thread_binding()

    def rounds(count):
        return -(-count // threads)

    def first(pair):
        return 2 * pair if interleaved else pair

    def second(pair):
        return 2 * pair + 1 if interleaved else pair + half

    @T.prim_func
    def rope_append(
        rows: strided([tokens, width], [rows_t, 1]),
        keys: strided([tokens, groups, qk_rope_head_dim], [keys_t, keys_g, 1]),
        query: strided([tokens, queries, qk_rope_head_dim], [query_t, query_h, 1]),
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
            pair = T.alloc_local([2], accum)
            t0 = x * block_tokens
            for r in T.serial(rounds(angles)):
                e = r * threads + thread()
                if e < angles:
                    i, g, p = e // (num_tables * half), e // half % num_tables, e % half
                    pair[0] = T.cast(positions[T.min(t0 + i, tokens - 1)], accum) * inv_freq[g, p]
                    cos[i, g, p] = T.cos(pair[0]) * T.if_then_else(inv_freq[g, p] == 0, 1.0, scaling)
                    sin[i, g, p] = T.sin(pair[0]) * scaling
            for r in T.serial(rounds(block_tokens)):
                i = r * threads + thread()
                if i < block_tokens:
                    # -1: nothing to write, also where a slot lies outside the cache
                    slot[i] = T.if_then_else(
                        (t0 + i < tokens) & (slots[T.min(t0 + i, tokens - 1)] < pages * page_size),
                        slots[T.min(t0 + i, tokens - 1)],
                        -1,
                    )
            T.sync_threads()
            for r in T.serial(rounds(numbers)):
                e = r * threads + thread()
                if (e < numbers) & (slot[T.min(e // width, block_tokens - 1)] >= 0):
                    i = e // width
                    row_cache[slot[i] // page_size, slot[i] % page_size, e % width] = rows[t0 + i, e % width]
            for r in T.serial(rounds(key_pairs)):
                e = r * threads + thread()
                if (e < key_pairs) & (slot[T.min(e // (groups * half), block_tokens - 1)] >= 0):
                    i, g, p = e // (groups * half), e // half % groups, e % half
                    table = g * num_tables // groups
                    pair[0] = T.cast(keys[t0 + i, g, first(p)], accum)
                    pair[1] = T.cast(keys[t0 + i, g, second(p)], accum)
                    rope_cache[slot[i] // page_size, slot[i] % page_size, g * qk_rope_head_dim + first(p)] = (
                        pair[0] * cos[i, table, p] - pair[1] * sin[i, table, p]
                    )
                    rope_cache[slot[i] // page_size, slot[i] % page_size, g * qk_rope_head_dim + second(p)] = (
                        pair[1] * cos[i, table, p] + pair[0] * sin[i, table, p]
                    )
            for r in T.serial(rounds(query_pairs)):
                e = r * threads + thread()
                if (e < query_pairs) & (t0 + e // (queries * half) < tokens):
                    i, h, p = e // (queries * half), e // half % queries, e % half
                    table = h * num_tables // queries
                    pair[0] = T.cast(query[t0 + i, h, first(p)], accum)
                    pair[1] = T.cast(query[t0 + i, h, second(p)], accum)
                    out[t0 + i, h, first(p)] = pair[0] * cos[i, table, p] - pair[1] * sin[i, table, p]
                    out[t0 + i, h, second(p)] = pair[1] * cos[i, table, p] + pair[0] * sin[i, table, p]

    return rope_append
