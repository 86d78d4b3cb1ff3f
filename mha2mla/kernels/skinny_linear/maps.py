"""A map for each head or each group of heads, of few tokens: read before the block waits for what goes through it."""

from types import SimpleNamespace

import tilelang.language as T

from mha2mla.kernels.machine import Buffers, Machine

ROWS = 8  # tokens of a block
COLUMNS = 128  # of a block
THREADS = 256
_SPLITS = 4  # of the warps by rows of the map; two share a split, with half of the columns each
_STEP = 16  # rows of a map that an m16n8k16 instruction takes
_WIDTH = COLUMNS + 1  # of a row of sums in shared memory: else threads that store at a time would take one bank
_PREFIX = {"bfloat16": "bf16", "float16": "fp16"}


def map_blocks(tokens, heads: int, outer: int):
    """How many blocks take part."""
    return T.ceildiv(tokens, ROWS) * (heads * -(-outer // COLUMNS))


def map_parts(*, heads: int, maps: int, inner: int, outer: int, dtype: str) -> SimpleNamespace:
    """What a block of 256 threads does, for kernels that do it beside something else; arguments as below.

    A thread's 16 bytes of a row of the map are 8 columns, of which an instruction takes two; its four rows of 16 are
    those numbers of x that lie side by side. So nothing is transposed but in registers.

    Returns:
        ``alloc()``: buffers by name; ``ask(up, m, block)``: fetches the block's part of the map; ``apply(x, out, m,
        block, tokens)``: multiplies, and writes the result.
    """
    accum = T.float32
    blocks, steps = -(-outer // COLUMNS), -(-inner // (_STEP * _SPLITS))  # steps of a warp

    def alloc():
        return {
            "read": T.alloc_local([steps * 32], dtype),
            "left": T.alloc_local([8], dtype),
            "right": T.alloc_local([steps * 4], dtype),
            "sums": T.alloc_local([16], accum),
            "parts": T.alloc_shared([_SPLITS, ROWS, _WIDTH], accum),
        }

    def lane():
        return T.get_thread_binding() % 32

    def warp():
        return T.get_thread_binding() // 32

    def row(s, j):
        """Of the map: the j-th of the thread's four of the warp's s-th step."""
        return (s * _SPLITS + warp() // 2) * _STEP + lane() % 4 * 4 + j

    def column(v):
        """Of the block: the v-th of the thread's eight."""
        return warp() % 2 * (COLUMNS // 2) + lane() // 4 * 8 + v

    @T.macro
    def ask(up, m, block):
        h, c0 = block // blocks % heads, block % blocks * COLUMNS
        for s in T.unroll(steps):
            for j in T.unroll(4):  # behind the last row, or column, another is read, and not looked at
                for v in T.vectorized(8):
                    m.read[s * 32 + j * 8 + v] = up[
                        h // (heads // maps), T.min(row(s, j), inner - 1), T.min(c0 + column(0), outer - 8) + v
                    ]

    @T.macro
    def apply(x, out, m, block, tokens):
        h, c0, t0 = block // blocks % heads, block % blocks * COLUMNS, block // (blocks * heads) * ROWS
        for i in T.unroll(16):
            m.sums[i] = 0.0
        for s in T.unroll(steps):  # all on their way before the first is there
            for j in T.unroll(4):
                m.right[s * 4 + j] = x[T.min(t0 + lane() // 4, tokens - 1), h, T.min(row(s, j), inner - 1)]
        for s in T.unroll(steps):
            for j in T.unroll(4):
                m.right[s * 4 + j] = T.if_then_else(row(s, j) < inner, m.right[s * 4 + j], T.cast(0.0, dtype))
        for s in list(range(steps)):
            for p in list(range(4)):  # two columns a time
                for j in T.unroll(2):
                    m.left[j] = m.read[s * 32 + j * 8 + p * 2]
                    m.left[2 + j] = m.read[s * 32 + j * 8 + p * 2 + 1]
                    m.left[4 + j] = m.read[s * 32 + (2 + j) * 8 + p * 2]
                    m.left[6 + j] = m.read[s * 32 + (2 + j) * 8 + p * 2 + 1]
                T.ptx_mma(
                    "float32", "m16n8k16", "row", "col", _PREFIX[dtype], _PREFIX[dtype], "fp32",
                    m.left.data, 0, m.right.data, s * 4, m.sums.data, p * 4, T.bool(False),
                )  # fmt: skip
        for i in T.unroll(16):  # a thread has its eight columns of tokens 2 t and 2 t + 1
            m.parts[warp() // 2, lane() % 4 * 2 + i % 2, column(i // 4 * 2 + i // 2 % 2)] = m.sums[i]
        T.sync_threads()
        for j in T.serial(ROWS * COLUMNS // THREADS):
            e = j * THREADS + T.get_thread_binding()
            if (t0 + e // COLUMNS < tokens) & (c0 + e % COLUMNS < outer):
                m.sums[0] = 0.0
                for q in T.unroll(_SPLITS):
                    m.sums[0] += m.parts[q, e // COLUMNS, e % COLUMNS]
                out[t0 + e // COLUMNS, h, c0 + e % COLUMNS] = T.cast(m.sums[0], dtype)

    return SimpleNamespace(alloc=alloc, ask=ask, apply=apply)


def make_skinny_maps(
    *, heads: int, maps: int, inner: int, outer: int, dtype: str, dependent: bool = True, on_cpu: bool = False
):
    """A TileLang function ``skinny_maps``, a block for 128 columns of a head and 8 tokens; tokens are a run-time value.

    Args:
        heads, maps: H, and how many maps there are, each for H / maps heads.
        inner, outer: of the maps; ``outer`` is a multiple of 8.
        dtype: of all tensors.
        dependent: launch it as a programmatic dependent of the kernel before (sm_90 and newer): it waits for x after it
            asked for its map, which nobody writes.
        on_cpu: compile for TileLang's C target.

    The function's arguments: x [tokens, heads, inner] (run-time strides), up (the maps) [maps, inner, outer] and out
    [tokens, heads, outer] (contiguous).
    """
    machine = Machine(on_cpu)
    body = None if on_cpu else map_parts(heads=heads, maps=maps, inner=inner, outer=outer, dtype=dtype)
    tokens = T.dynamic("tokens")

    @T.macro
    def add_plainly(x, up, out, total):
        """On the C target: all that there is to do."""
        for r, h, c in T.grid(tokens, heads, outer):
            total[0] = 0.0
            for k in T.serial(inner):
                total[0] += x[r, h, k] * up[h // (heads // maps), k, c]
            out[r, h, c] = total[0]

    @T.prim_func
    def skinny_maps(
        x: machine.strided("x", [tokens, heads, inner], dtype),
        up: T.Tensor([maps, inner, outer], dtype),
        out: T.Tensor([tokens, heads, outer], dtype),
    ):
        with T.Kernel(1 if on_cpu else map_blocks(tokens, heads, outer), threads=1 if on_cpu else THREADS) as block:
            if on_cpu:
                add_plainly(x, up, out, T.alloc_local([1], T.float32))
            else:
                m = Buffers(**body.alloc())
                body.ask(up, m, block)
                if dependent:
                    T.pdl_sync()
                body.apply(x, out, m, block, tokens)

    return skinny_maps
