"""Rotates queries and keys of new tokens and writes keys, and rows beside them, into a paged cache, in one pass."""

from math import gcd
from types import SimpleNamespace

import tilelang.language as T

from mha2mla.kernels.machine import Buffers, Machine


def append_parts(
    *,
    heads: int,
    num_rope_heads: int,
    row_width: int,
    qk_rope_head_dim: int,
    num_tables: int,
    page_size: int,
    dtype: str,
    interleaved: bool,
    vector: int,
    block_tokens: int,
    threads: int,
    on_cpu: bool = False,
) -> SimpleNamespace:
    """What a block does, for kernels that do it beside something else; arguments as of :func:`make_rope_append`.

    Returns:
        ``alloc()``: buffers by name; ``find_angles(positions, inv_freq, scaling, m, t0, tokens)`` and
        ``find_slots(slots, m, t0, tokens, pages)`` of the block's tokens, from ``t0`` on, and once they are there
        ``write(rows, keys, query, row_cache, rope_cache, out, m, t0, tokens)``.
    """
    accum = T.float32
    machine = Machine(on_cpu)
    half = qk_rope_head_dim // 2
    groups, queries = max(1, num_rope_heads), max(1, heads)
    threads = 1 if on_cpu else threads
    # Elements of each kind that a block handles; they go round the threads one by one. (T.Parallel finds no layout for
    # some of these shapes, such as 9 heads of 8 pairs.) Rows and pairs do so in vectors.
    row_vector, pairs = gcd(max(1, row_width), vector), gcd(half, max(1, vector // 2) if interleaved else vector)
    row_vectors, half_vectors = max(1, row_width) // row_vector, half // pairs
    angles, numbers = block_tokens * num_tables * half, block_tokens * row_vectors if row_width else 0
    key_vectors, query_vectors = block_tokens * num_rope_heads * half_vectors, block_tokens * heads * half_vectors

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

    def parts(p):
        """Of pairs from ``p`` on: where they lie in a head, where in registers, and how many numbers."""
        return [(2 * p, 0, 2 * pairs)] if interleaved else [(p, 0, pairs), (half + p, pairs, pairs)]

    @T.macro
    def turn(x, i, table, p):
        for v in T.unroll(pairs):
            x.pair[0] = T.cast(x.held[first(v)], accum)
            x.pair[1] = T.cast(x.held[second(v)], accum)
            x.held[first(v)] = product(x.pair[0], x.cos[i, table, p + v]) - product(x.pair[1], x.sin[i, table, p + v])
            x.held[second(v)] = product(x.pair[1], x.cos[i, table, p + v]) + product(x.pair[0], x.sin[i, table, p + v])

    @T.macro
    def rotate(x, i, table, p, source, head, target, to, left):
        """Pairs from ``p`` on of ``source[head]`` to ``target[to]``, where the head's columns begin at ``left``."""
        for there, here, count in parts(p):
            for v in T.vectorized(count):
                x.held[here + v] = source[(*head, there + v)]
        turn(x, i, table, p)
        for there, here, count in parts(p):
            for v in T.vectorized(count):
                target[(*to, left + there + v)] = x.held[here + v]

    def alloc():
        return {
            "cos": machine.alloc_shared([block_tokens, num_tables, half], accum),
            "sin": machine.alloc_shared([block_tokens, num_tables, half], accum),
            "slot": machine.alloc_shared([block_tokens], T.int32),
            "pair": T.alloc_local([2], accum),
            "held": T.alloc_local([2 * pairs], dtype),
        }

    @T.macro
    def find_angles(positions, inv_freq, scaling, m, t0, tokens):
        for r in T.serial(rounds(angles)):
            e = r * threads + thread()
            if e < angles:
                i, g, p = e // (num_tables * half), e // half % num_tables, e % half
                m.pair[0] = T.cast(positions[T.min(t0 + i, tokens - 1)], accum) * inv_freq[g, p]
                m.cos[i, g, p] = T.cos(m.pair[0]) * T.if_then_else(inv_freq[g, p] == 0, 1.0, scaling)
                m.sin[i, g, p] = T.sin(m.pair[0]) * scaling

    @T.macro
    def find_slots(slots, m, t0, tokens, pages):
        for r in T.serial(rounds(block_tokens)):
            i = r * threads + thread()
            if i < block_tokens:
                # -1: nothing to write, also where a slot lies outside the cache
                m.slot[i] = T.if_then_else(
                    (t0 + i < tokens) & (slots[T.min(t0 + i, tokens - 1)] < pages * page_size),
                    slots[T.min(t0 + i, tokens - 1)],
                    -1,
                )

    @T.macro
    def write(rows, keys, query, row_cache, rope_cache, out, m, t0, tokens):
        for r in T.serial(rounds(numbers)):
            e = r * threads + thread()
            if (e < numbers) & (m.slot[T.min(e // row_vectors, block_tokens - 1)] >= 0):
                i, c = e // row_vectors, e % row_vectors * row_vector
                for v in T.vectorized(row_vector):
                    row_cache[m.slot[i] // page_size, m.slot[i] % page_size, c + v] = rows[t0 + i, c + v]
        for r in T.serial(rounds(key_vectors)):
            e = r * threads + thread()
            if (e < key_vectors) & (m.slot[T.min(e // (groups * half_vectors), block_tokens - 1)] >= 0):
                i, g, p = e // (groups * half_vectors), e // half_vectors % groups, e % half_vectors * pairs
                rotate(
                    m, i, g * num_tables // groups, p, keys, (t0 + i, g), rope_cache,
                    (m.slot[i] // page_size, m.slot[i] % page_size), g * qk_rope_head_dim,
                )  # fmt: skip
        for r in T.serial(rounds(query_vectors)):
            e = r * threads + thread()
            if (e < query_vectors) & (t0 + e // (queries * half_vectors) < tokens):
                i, h, p = e // (queries * half_vectors), e // half_vectors % queries, e % half_vectors * pairs
                rotate(m, i, h * num_tables // queries, p, query, (t0 + i, h), out, (t0 + i, h), 0)

    return SimpleNamespace(alloc=alloc, find_angles=find_angles, find_slots=find_slots, write=write)


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
    dependent: bool = False,
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
        dependent: launch it as a programmatic dependent of the kernel before (sm_90 and newer).
        on_cpu: compile for TileLang's C target.

    The function's arguments: rows [N,width], keys [N,G,d_r] and queries [N,H,d_r] (run-time strides: parts of one
    projection are read where they lie), positions [N] int32, slots [N] int32, inv_freq [num_tables,d_r/2] float32;
    row_cache [P,page,width] and rope_cache [P,page,G*d_r] (run-time strides), out [N,H,d_r]; scaling float32. What is
    left out is passed as any tensor with a size of at least one everywhere.
    """
    accum = T.float32
    machine = Machine(on_cpu)
    half = qk_rope_head_dim // 2
    tokens, pages = T.dynamic("tokens"), T.dynamic("pages")
    groups, width, queries = max(1, num_rope_heads), max(1, row_width), max(1, heads)
    threads = 1 if on_cpu else threads
    parts = append_parts(
        heads=heads, num_rope_heads=num_rope_heads, row_width=row_width, qk_rope_head_dim=qk_rope_head_dim,
        num_tables=num_tables, page_size=page_size, dtype=dtype, interleaved=interleaved, vector=vector,
        block_tokens=block_tokens, threads=threads, on_cpu=on_cpu,
    )  # fmt: skip

    def stride(i, *tensors):  # a loop over tensors or strides in the kernel would give them all one name
        return [stride for tensor in tensors for stride in list(tensor.strides)[:-1]][i]

    @T.prim_func
    def rope_append(
        rows: machine.strided("rows", [tokens, width], dtype),
        keys: machine.strided("keys", [tokens, groups, qk_rope_head_dim], dtype),
        query: machine.strided("query", [tokens, queries, qk_rope_head_dim], dtype),
        positions: T.Tensor([tokens], T.int32),
        slots: T.Tensor([tokens], T.int32),
        inv_freq: T.Tensor([num_tables, half], accum),
        row_cache: machine.strided("row", [pages, page_size, width], dtype),
        rope_cache: machine.strided("key", [pages, page_size, groups * qk_rope_head_dim], dtype),
        out: T.Tensor([tokens, queries, qk_rope_head_dim], dtype),
        scaling: T.float32,
    ):
        with T.Kernel(T.ceildiv(tokens, block_tokens), threads=threads) as x:
            if vector > 1 and not on_cpu:  # else stores are not known to be aligned, and stay scalar
                for i in list(range(9)):
                    T.assume(stride(i, rows, keys, query, row_cache, rope_cache) % vector == 0)
            m = Buffers(**parts.alloc())
            t0 = x * block_tokens
            if dependent:
                T.pdl_sync()
                T.pdl_trigger()
            parts.find_angles(positions, inv_freq, scaling, m, t0, tokens)
            parts.find_slots(slots, m, t0, tokens, pages)
            T.sync_threads()
            parts.write(rows, keys, query, row_cache, rope_cache, out, m, t0, tokens)

    return rope_append
