"""A map a head, of few tokens: every map is read once, into registers, before the block waits for what goes through."""

import tilelang.language as T

from mha2mla.kernels.machine import Buffers, Machine

COLUMNS = 128  # of a block
_WIDTH, _SLICES = 64, 4  # columns of a warp, and warps that share the rows of the map
_THREADS = COLUMNS // _WIDTH * _SLICES * 32
_DEPTH = 16  # rows of the map in a matrix instruction, m16n8k16, of which tokens are the sixteen rows
_PREFIX = {"bfloat16": "bf16", "float16": "fp16"}


def make_skinny_maps(
    *,
    heads: int,
    inner: int,
    outer: int,
    dtype: str,
    most_tokens: int = 8,
    dependent: bool = True,
    on_cpu: bool = False,
):
    """A TileLang function ``skinny_maps``, a block for 128 columns of a head; the number of tokens is a run-time value.

    A thread reads 8 columns of a row at a time. They are one of each of eight instructions: which column an instruction
    takes for which of its own is free, and rows of two neighbours are put together in registers.

    Args:
        heads, inner, outer: of the maps; ``outer`` is a multiple of 8, ``inner`` even.
        dtype: of all tensors.
        most_tokens: 8 or 16.
        dependent: launch it as a programmatic dependent of the kernel before (sm_90 and newer): it waits for x after it
            asked for its map, which nobody writes.
        on_cpu: compile for TileLang's C target.

    The function's arguments: x [tokens, heads, inner] (run-time strides, even), maps [heads, inner, outer] and out
    [tokens, heads, outer] (contiguous).
    """
    accum = T.float32
    machine = Machine(on_cpu)
    threads = 1 if on_cpu else _THREADS
    blocks, steps = -(-outer // COLUMNS), -(-inner // (_DEPTH * _SLICES))  # of a warp
    eights = most_tokens // 8
    tokens = T.dynamic("tokens")

    def thread():
        return 0 if on_cpu else T.get_thread_binding()

    def warp():
        return thread() // 32

    def row(s, i):
        """The i-th of a thread's four rows in a warp's s-th step."""
        return (s * _SLICES + warp() // 2) * _DEPTH + i // 2 * 8 + thread() % 4 * 2 + i % 2

    @T.macro
    def add_plainly(x, maps, out, total, h, c0):
        """On the C target: all that a block does."""
        for r, c in T.grid(tokens, T.min(COLUMNS, outer - c0)):
            total[0] = 0.0
            for k in T.serial(inner):
                total[0] += x[r, h, k] * maps[h, k, c0 + c]
            out[r, h, c0 + c] = total[0]

    @T.macro
    def fetch(maps, m, h, c0):
        """Behind the last row, or column, a thread reads another: x is zero there, and such sums are not looked at."""
        for s in list(range(steps)):
            for i in T.unroll(4):
                for v in T.vectorized(8):
                    m.held[(s * 4 + i) * 8 + v] = maps[
                        h,
                        T.min(row(s, i), inner - 1),
                        T.min(c0 + warp() % 2 * _WIDTH + thread() % 32 // 4 * 8, outer - 8) + v,
                    ]

    @T.macro
    def fetch_x(x, m, h, s):
        """A step's numbers of the thread's tokens, two at a time."""
        for v in T.unroll(8):
            m.left[s * 8 + v] = T.cast(0.0, dtype)
        for i in list(range(2)):
            if row(s, 2 * i) < inner:
                for e in list(range(eights)):
                    for v in T.vectorized(2):
                        m.left[s * 8 + i * 4 + e * 2 + v] = x[
                            T.min(e * 8 + thread() % 32 // 4, tokens - 1), h, T.min(row(s, 2 * i), inner - 2) + v
                        ]

    @T.macro
    def multiply(m, s):
        for j in T.unroll(8):
            for i in T.unroll(4):
                m.right[i] = m.held[(s * 4 + i) * 8 + j]
            T.ptx_mma(
                "float32", "m16n8k16", "row", "col", _PREFIX[dtype], _PREFIX[dtype], "fp32",
                m.left.data, s * 8, m.right.data, 0, m.sums.data, j * 4, T.bool(False),
            )  # fmt: skip

    @T.prim_func
    def skinny_maps(
        x: machine.strided("x", [tokens, heads, inner], dtype),
        maps: T.Tensor([heads, inner, outer], dtype),
        out: T.Tensor([tokens, heads, outer], dtype),
    ):
        with T.Kernel(heads * blocks, threads=threads) as block:
            if not on_cpu:
                for stride in list(x.strides)[:-1]:  # else loads are not known to be aligned, and stay scalar
                    T.assume(stride % 2 == 0)
            m = Buffers(
                held=T.alloc_local([steps * 32], dtype),
                left=T.alloc_local([steps * 8], dtype),
                right=T.alloc_local([4], dtype),
                sums=T.alloc_local([32], accum),
                parts=machine.alloc_shared([_SLICES, most_tokens, COLUMNS], accum),
            )
            h, c0 = block // blocks, block % blocks * COLUMNS
            if on_cpu:
                add_plainly(x, maps, out, m.sums, h, c0)
            else:
                fetch(maps, m, h, c0)
                if dependent:
                    T.pdl_sync()
                for s in list(range(steps)):
                    fetch_x(x, m, h, s)
                for j in T.unroll(32):
                    m.sums[j] = 0.0
                for s in list(range(steps)):
                    multiply(m, s)
                # A thread has tokens g and g + 8, and columns 16 t + j and 16 t + 8 + j of instruction j.
                for e in list(range(eights)):
                    for i in T.unroll(2):
                        for j in T.unroll(8):
                            m.parts[
                                warp() // 2,
                                e * 8 + thread() % 32 // 4,
                                warp() % 2 * _WIDTH + thread() % 4 * 16 + i * 8 + j,
                            ] = m.sums[j * 4 + e * 2 + i]
                T.sync_threads()
                for n in T.serial(T.ceildiv(tokens * COLUMNS, threads)):
                    at = n * threads + thread()
                    if (at < tokens * COLUMNS) & (c0 + at % COLUMNS < outer):
                        m.sums[0] = 0.0
                        for w in T.unroll(_SLICES):
                            m.sums[0] += m.parts[w, T.min(at // COLUMNS, most_tokens - 1), at % COLUMNS]
                        out[at // COLUMNS, h, c0 + at % COLUMNS] = T.cast(m.sums[0], dtype)

    return skinny_maps
