"""Rotates queries and keys of new tokens and writes keys, and rows beside them, into a paged cache, in one pass."""

from math import gcd

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
    vector: int = 1,
    block_tokens: int = 4,
    threads: int = 128,
    on_cpu: bool = False,
):
    """A TileLang function ``rope_append``; tokens and pages are run-time values.

    Args:
        heads: query heads H to rotate; 0 leaves the queries out.
        num_rope_heads, row_width: G and the width of a row; what is 0 is not written.
        qk_rope_head_dim: d_r.
        num_tables: rows of inv_freq; divides H and G.
        page_size: tokens per page.
        dtype: of rows, keys, queries and caches.
        interleaved: pairs are neighbours (x_0, x_1), …; else halves (x_0, x_{d_r / 2}), ….
        vector: numbers that a thread moves at a time, at most; every row and pointer is aligned to so many.
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
    # some of these shapes, such as 9 heads of 8 pairs.) Rows and pairs do so in vectors.
    row_vector, pairs = gcd(width, vector), gcd(half, max(1, vector // 2) if interleaved else vector)
    row_vectors, half_vectors = width // row_vector, half // pairs
    angles, numbers = block_tokens * num_tables * half, block_tokens * row_vectors if row_width else 0
    key_vectors, query_vectors = block_tokens * num_rope_heads * half_vectors, block_tokens * heads * half_vectors

    def strided(shape, strides):  # the CPU target's wrapper passes no run-time strides
        return T.Tensor(shape, dtype) if on_cpu else T.StridedTensor(shape, strides, dtype)

    def thread():
        return 0 if on_cpu else T.get_thread_binding()

    def rounds(count):
        return -(-count // threads)

    def first(pair):  # of a vector of pairs in registers
        return 2 * pair if interleaved else pair

    def second(pair):
        return 2 * pair + 1 if interleaved else pairs + pair

    def product(a, b):
        # Rounded by itself: which of two products is fused into their sum is the compiler's choice, another for each
        # width of row, and a cached key must not depend on what else its token writes.
        return a * b if on_cpu else T.ieee_mul(a, b)

    @T.macro
    def turn(x, pair, cos, sin, i, table, p):
        for v in T.unroll(pairs):
            pair[0] = T.cast(x[first(v)], accum)
            pair[1] = T.cast(x[second(v)], accum)
            x[first(v)] = product(pair[0], cos[i, table, p + v]) - product(pair[1], sin[i, table, p + v])
            x[second(v)] = product(pair[1], cos[i, table, p + v]) + product(pair[0], sin[i, table, p + v])

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
            if vector > 1 and not on_cpu:  # else stores are not known to be aligned, and stay scalar
                T.assume(rows_t % vector == 0)
                T.assume(keys_t % vector == 0)
                T.assume(keys_g % vector == 0)
                T.assume(query_t % vector == 0)
                T.assume(query_h % vector == 0)
                T.assume(r_p % vector == 0)
                T.assume(r_t % vector == 0)
                T.assume(k_p % vector == 0)
                T.assume(k_t % vector == 0)
            cos = alloc_shared([block_tokens, num_tables, half], accum)
            sin = alloc_shared([block_tokens, num_tables, half], accum)
            slot = alloc_shared([block_tokens], T.int32)
            pair = T.alloc_local([2], accum)
            held = T.alloc_local([2 * pairs], dtype)
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
                if (e < numbers) & (slot[T.min(e // row_vectors, block_tokens - 1)] >= 0):
                    i, c = e // row_vectors, e % row_vectors * row_vector
                    for v in T.vectorized(row_vector):
                        row_cache[slot[i] // page_size, slot[i] % page_size, c + v] = rows[t0 + i, c + v]
            for r in T.serial(rounds(key_vectors)):
                e = r * threads + thread()
                if (e < key_vectors) & (slot[T.min(e // (groups * half_vectors), block_tokens - 1)] >= 0):
                    i, g, p = e // (groups * half_vectors), e // half_vectors % groups, e % half_vectors * pairs
                    if interleaved:
                        for v in T.vectorized(2 * pairs):
                            held[v] = keys[t0 + i, g, 2 * p + v]
                    else:
                        for v in T.vectorized(pairs):
                            held[v] = keys[t0 + i, g, p + v]
                        for v in T.vectorized(pairs):
                            held[pairs + v] = keys[t0 + i, g, half + p + v]
                    turn(held, pair, cos, sin, i, g * num_tables // groups, p)
                    if interleaved:
                        for v in T.vectorized(2 * pairs):
                            rope_cache[slot[i] // page_size, slot[i] % page_size, g * qk_rope_head_dim + 2 * p + v] = (
                                held[v]
                            )
                    else:
                        for v in T.vectorized(pairs):
                            rope_cache[slot[i] // page_size, slot[i] % page_size, g * qk_rope_head_dim + p + v] = held[
                                v
                            ]
                        for v in T.vectorized(pairs):
                            rope_cache[
                                slot[i] // page_size, slot[i] % page_size, g * qk_rope_head_dim + half + p + v
                            ] = held[pairs + v]
            for r in T.serial(rounds(query_vectors)):
                e = r * threads + thread()
                if (e < query_vectors) & (t0 + e // (queries * half_vectors) < tokens):
                    i, h, p = e // (queries * half_vectors), e // half_vectors % queries, e % half_vectors * pairs
                    if interleaved:
                        for v in T.vectorized(2 * pairs):
                            held[v] = query[t0 + i, h, 2 * p + v]
                    else:
                        for v in T.vectorized(pairs):
                            held[v] = query[t0 + i, h, p + v]
                        for v in T.vectorized(pairs):
                            held[pairs + v] = query[t0 + i, h, half + p + v]
                    turn(held, pair, cos, sin, i, h * num_tables // queries, p)
                    if interleaved:
                        for v in T.vectorized(2 * pairs):
                            out[t0 + i, h, 2 * p + v] = held[v]
                    else:
                        for v in T.vectorized(pairs):
                            out[t0 + i, h, p + v] = held[v]
                        for v in T.vectorized(pairs):
                            out[t0 + i, h, half + p + v] = held[pairs + v]

    return rope_append
