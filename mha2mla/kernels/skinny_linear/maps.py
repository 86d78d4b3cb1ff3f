"""A map a head, of up to eight tokens: every map is read once, before the block waits for what goes through it."""

import tilelang.language as T

from mha2mla.kernels.machine import Buffers, Machine

ROWS = 8  # at most
_LANES, _VECTOR = 16, 8  # threads side by side, and the columns of each
COLUMNS = _LANES * _VECTOR  # of a block


def make_skinny_maps(
    *, heads: int, inner: int, outer: int, dtype: str, dependent: bool = True, on_cpu: bool = False, groups: int = 16
):
    """A TileLang function ``skinny_maps``, a block for 128 columns of a head; tokens are a run-time value, at most 8.

    Args:
        heads, inner, outer: of the maps; ``outer`` is a multiple of 8.
        dtype: of all tensors.
        dependent: launch it as a programmatic dependent of the kernel before (sm_90 and newer): it waits for x after it
            asked for its map, which nobody writes.
        on_cpu: compile for TileLang's C target.
        groups: of threads, which share the rows of the map.

    The function's arguments: x [tokens, heads, inner] (run-time strides), maps [heads, inner, outer] and out [tokens,
    heads, outer] (contiguous).
    """
    accum = T.float32
    machine = Machine(on_cpu)
    threads = 1 if on_cpu else groups * _LANES
    blocks, each, loads = -(-outer // COLUMNS), -(-inner // groups), -(-inner // threads)
    tokens = T.dynamic("tokens")

    def thread():
        return 0 if on_cpu else T.get_thread_binding()

    @T.macro
    def add_plainly(x, maps, out, total, h, c0):
        """On the C target: all that a block does."""
        for r, c in T.grid(tokens, T.min(COLUMNS, outer - c0)):
            total[0] = 0.0
            for k in T.serial(inner):
                total[0] += x[r, h, k] * maps[h, k, c0 + c]
            out[r, h, c0 + c] = total[0]

    @T.prim_func
    def skinny_maps(
        x: machine.strided("x", [tokens, heads, inner], dtype),
        maps: T.Tensor([heads, inner, outer], dtype),
        out: T.Tensor([tokens, heads, outer], dtype),
    ):
        with T.Kernel(heads * blocks, threads=threads) as block:
            m = Buffers(
                held=T.alloc_local([each * _VECTOR], dtype),
                own=T.alloc_local([ROWS * loads], dtype),
                sums=T.alloc_local([_VECTOR], accum),
                given=machine.alloc_shared([ROWS, inner], accum),
                parts=machine.alloc_shared([ROWS, groups, COLUMNS], accum),
            )
            h, c0 = block // blocks, block % blocks * COLUMNS
            if on_cpu:
                add_plainly(x, maps, out, m.sums, h, c0)
            else:
                group, c = thread() // _LANES, thread() % _LANES * _VECTOR
                for i in T.unroll(each):
                    # Behind the last row, or column, a thread reads another, and its sums are not looked at.
                    for v in T.vectorized(_VECTOR):
                        m.held[i * _VECTOR + v] = maps[
                            h, T.min(i * groups + group, inner - 1), T.min(c0 + c, outer - _VECTOR) + v
                        ]
                if dependent:
                    T.pdl_sync()
                for e in T.unroll(ROWS * loads):  # all on their way before the first is there
                    m.own[e] = x[T.min(e % ROWS, tokens - 1), h, T.min(e // ROWS * threads + thread(), inner - 1)]
                for e in T.unroll(ROWS * loads):
                    if e // ROWS * threads + thread() < inner:
                        m.given[e % ROWS, e // ROWS * threads + thread()] = T.cast(m.own[e], accum)
                T.sync_threads()
                for r in T.serial(tokens):
                    for v in T.unroll(_VECTOR):
                        m.sums[v] = 0.0
                    for i in T.unroll(each):
                        if i * groups + group < inner:
                            for v in T.unroll(_VECTOR):
                                m.sums[v] += m.given[r, i * groups + group] * T.cast(m.held[i * _VECTOR + v], accum)
                    for v in T.vectorized(_VECTOR):
                        m.parts[r, group, c + v] = m.sums[v]
                T.sync_threads()
                for j in T.serial(T.ceildiv(tokens * COLUMNS, threads)):
                    e = j * threads + thread()
                    if (e < tokens * COLUMNS) & (c0 + e % COLUMNS < outer):
                        m.sums[0] = 0.0
                        for g in T.unroll(groups):
                            m.sums[0] += m.parts[e // COLUMNS, g, e % COLUMNS]
                        out[e // COLUMNS, h, c0 + e % COLUMNS] = T.cast(m.sums[0], dtype)

    return skinny_maps
