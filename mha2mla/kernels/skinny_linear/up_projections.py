"""W_UK and W_UV, a weight for each head or group of heads: both of few tokens, and either of any number."""

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from torch import Tensor

from mha2mla.kernels.machine import EXACT_PASS_CONFIGS, GPU, PASS_CONFIGS, Buffers, compiler
from mha2mla.kernels.ops import aligned, capability, dtype_name, on_device, with_dense_rows
from mha2mla.kernels.skinny_linear.selection import GROUP, HEAD_ROWS

ROWS = 8  # tokens of a block
COLUMNS = 128  # of a block
THREADS = 256
_SPLITS = 4  # of the warps by rows of the weight; two share a split, with half of the columns each
_STEP = 16  # rows of a weight that an m16n8k16 instruction takes
_WIDTH = COLUMNS + 1  # of a row of sums in shared memory: else threads that store at a time would take one bank
_PREFIX = {"bfloat16": "bf16", "float16": "fp16"}


def warp():
    return T.get_thread_binding() // 32


def lane():
    return T.get_thread_binding() % 32


@T.macro
def multiply_step(m, s, dtype):
    """Two m16n8k16 products of 16 columns each, into ``m.sums``: a thread's 8 numbers of two rows, step ``s`` of
    ``m.first`` and ``m.other``, by ``m.right``."""
    for half in list(range(2)):
        for u in list(range(4)):
            for v in T.vectorized(2):
                m.left[u * 2 + v] = [m.first, m.other][u % 2][s * 8 + half * 4 + u // 2 * 2 + v]
        T.ptx_mma(
            "float32", "m16n8k16", "row", "col", _PREFIX[dtype], _PREFIX[dtype], "fp32",
            m.left.data, 0, m.right.data, half * 4, m.sums.data, 0, T.bool(False),
        )  # fmt: skip


def w_uk_blocks(tokens, heads: int, outer: int):
    """Number of blocks."""
    return T.ceildiv(tokens, ROWS) * (heads * -(-outer // COLUMNS))


def w_uk_parts(*, heads: int, groups: int, inner: int, outer: int, dtype: str) -> SimpleNamespace:
    """Body of a block of 256 threads, for kernels that do more beside it; arguments as below.

    A thread's 16 bytes of a row of the weight are 8 columns, of which an instruction takes two; its four rows of 16 are
    those numbers of x that lie side by side. So nothing is transposed but in registers.

    Returns:
        ``alloc()``: buffers by name; ``ask(up, m, block)``: fetches the block's part of the weight; ``apply(x, out, m,
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

    def row(s, j):
        """Row of the weight: the j-th of the thread's four of the warp's s-th step."""
        return (s * _SPLITS + warp() // 2) * _STEP + lane() % 4 * 4 + j

    def column(v):
        """Column of the block: the v-th of the thread's eight."""
        return warp() % 2 * (COLUMNS // 2) + lane() // 4 * 8 + v

    @T.macro
    def ask(up, m, block):
        h, c0 = block // blocks % heads, block % blocks * COLUMNS
        for s in T.unroll(steps):
            for j in T.unroll(4):  # behind the last row, or column, another is read, and not looked at
                for v in T.vectorized(8):
                    m.read[s * 32 + j * 8 + v] = up[
                        h // (heads // groups), T.min(row(s, j), inner - 1), T.min(c0 + column(0), outer - 8) + v
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


def make_w_uk(*, heads: int, groups: int, inner: int, outer: int, dtype: str, dependent: bool = True):
    """A TileLang function ``w_uk``, a block for 128 columns of a head and 8 tokens; tokens are a run-time value.

    Args:
        heads, groups: H, and the number of weights, each for H / groups heads.
        inner, outer: rows and columns of a weight; ``outer`` is a multiple of 8.
        dtype: of all tensors.
        dependent: launch it as a programmatic dependent of the kernel before (sm_90 and newer): it waits for x after it
            asked for its weight, which no kernel writes.

    The function's arguments: x [tokens, heads, inner] (run-time strides), up [groups, inner, outer] and out
    [tokens, heads, outer] (contiguous).
    """
    body = w_uk_parts(heads=heads, groups=groups, inner=inner, outer=outer, dtype=dtype)
    tokens = T.dynamic("tokens")

    @T.prim_func
    def w_uk(
        x: GPU.strided("x", [tokens, heads, inner], dtype),
        up: T.Tensor([groups, inner, outer], dtype),
        out: T.Tensor([tokens, heads, outer], dtype),
    ):
        with T.Kernel(w_uk_blocks(tokens, heads, outer), threads=THREADS) as block:
            m = Buffers(**body.alloc())
            body.ask(up, m, block)
            if dependent:
                T.pdl_sync()
            body.apply(x, out, m, block, tokens)

    return w_uk


FEW_ROWS = 16  # of a block, and GROUP: heads of a group, for as many tokens as fit
GROUP_THREADS = 128
VECTOR = 8  # numbers that strides of x are a multiple of


def make_up_projection(
    *, heads: int, groups: int, inner: int, outer: int, dtype: str, transposed: bool, dependent: bool,
    rows: int = GROUP,
):  # fmt: skip
    """A TileLang function ``up_projection``; tokens are a run-time value.

    Args:
        heads, groups: H, and the number of weights, each for H / groups <= 64 heads.
        inner, outer: sizes of a weight; multiples of 16 and 8.
        dtype: of all tensors.
        transposed: weights are [groups, outer, inner], else [groups, inner, outer].
        dependent: launch it as a programmatic dependent of the kernel before (sm_90 and newer).
        rows: of a block, FEW_ROWS or GROUP; at least H / groups.

    The function's arguments: x [tokens, heads, inner] (run-time strides, multiples of 8), up (the weights) and out
    [tokens, heads, outer] (contiguous).
    """
    tokens = T.dynamic("tokens")
    group = heads // groups
    columns = 64 if inner <= 128 else 32  # of a block: long rows are shared among more
    some, blocks = rows // group, -(-outer // columns)  # tokens of a block
    panel = min(inner & -inner, 64)  # columns copied at a time: else 16 bytes cost divisions where inner is 7 * 64
    shape = [groups, outer, inner] if transposed else [groups, inner, outer]

    @T.prim_func
    def up_projection(
        x: T.StridedTensor([tokens, heads, inner], [T.dynamic("x_0"), T.dynamic("x_1"), 1], dtype),
        up: T.Tensor(shape, dtype),
        out: T.Tensor([tokens, heads, outer], dtype),
    ):
        with T.Kernel(groups * blocks, T.ceildiv(tokens, some), threads=GROUP_THREADS) as (at, y):
            T.assume(tokens >= 1)
            for stride in list(x.strides)[:-1]:  # else loads are not known to be aligned, and stay scalar
                T.assume(stride % VECTOR == 0)
            m = Buffers(
                given=T.alloc_shared([rows, inner], dtype),
                held=T.alloc_shared([columns, inner] if transposed else [inner, columns], dtype),
                sums=T.alloc_fragment([rows, columns], T.float32),
            )
            k, c0, t0 = at // blocks, at % blocks * columns, y * some
            if transposed:
                for p in T.unroll(inner // panel):
                    T.copy(
                        up[k, c0 : c0 + columns, p * panel : (p + 1) * panel], m.held[:, p * panel : (p + 1) * panel]
                    )
            else:
                T.copy(up[k, 0:inner, c0 : c0 + columns], m.held)
            if dependent:
                T.pdl_sync()
                T.pdl_trigger()
            for p in T.unroll(inner // panel):
                for i, c in T.Parallel(rows, panel):  # rows past the last token repeat it, unstored
                    m.given[i, p * panel + c] = x[
                        T.min(t0 + i // group, tokens - 1), k * group + i % group, p * panel + c
                    ]
            T.gemm(m.given, m.held, m.sums, transpose_B=transposed, clear_accum=True)
            for i, c in T.Parallel(rows, columns):
                if (i < some * group) & (t0 + i // group < tokens) & (c0 + c < outer):
                    out[t0 + i // group, k * group + i % group, c0 + c] = T.cast(m.sums[i, c], dtype)

    return up_projection


TILE = 16  # rows of the weight in a block
HEAD_WARPS = 8  # of a block
STEP = 32  # columns of a step: 16 bytes of a weight row for each of the four threads that share it


def make_w_uv(*, columns: int, outputs: int, dtype: str, groups: int, dependent: bool = True):
    """A TileLang function ``w_uv``, a block for 16 rows of a weight, whose warps share the columns; the number of
    rows of x is a run-time value, at most 8.

    A warp's two products of a step take 32 columns in any order, as long as it is the same for both operands: thread
    t of four takes columns 8 t … 8 t + 7 of each, so that nothing is exchanged.

    Args:
        columns: K, a multiple of 32 up to 2048.
        outputs: N of all weights, a multiple of 16 in each.
        dtype: of all tensors.
        groups: of the weight's rows, one a head, each for its own K columns of x.
        dependent: launch it as a programmatic dependent of the kernel before (sm_90 and newer): it waits for x after
            it asked for its first weights, which no kernel writes.

    The function's arguments: x [rows, groups K], weight [N, K] and out [rows, N], all contiguous.
    """
    accum = T.float32
    count, steps = HEAD_WARPS, columns // STEP
    ahead = 2 * -(-steps // (2 * count))  # steps of a warp, two at a time, whose weights it has under way
    threads = HEAD_WARPS * 32
    rows = T.dynamic("rows")

    def step_of(i):
        """A warp's i-th step: two in a row take whole lines of 128 bytes."""
        return (i // 2 * count + warp()) * 2 + i % 2

    def has(i):
        """True where a warp has an i-th step: a condition only where some have."""
        first, last = (i // 2 * count + warp for warp in (0, count - 1))
        return True if last * 2 + i % 2 < steps else step_of(i) < steps if first * 2 + i % 2 < steps else False

    @T.macro
    def fetch(weight, m, slot, step, n0):
        """A step's weights: 8 numbers of each of the thread's two rows."""
        for u in list(range(2)):
            for v in T.vectorized(8):
                [m.first, m.other][u][slot * 8 + v] = weight[
                    n0 + lane() // 4 + u * (TILE // 2), step * STEP + T.get_thread_binding() % 4 * 8 + v
                ]

    @T.macro
    def multiply(x, m, slot, step, x0):
        """Two products of 16 columns each."""
        for v in T.unroll(8):
            m.right[v] = T.cast(0.0, dtype)
        if lane() // 4 < rows:
            for v in T.vectorized(8):
                m.right[v] = x[lane() // 4, x0 + step * STEP + T.get_thread_binding() % 4 * 8 + v]
        multiply_step(m, slot, dtype)

    @T.prim_func
    def w_uv(
        x: T.Tensor([rows, groups * columns], dtype),
        weight: T.Tensor([outputs, columns], dtype),
        out: T.Tensor([rows, outputs], dtype),
    ):
        with T.Kernel(outputs // TILE, threads=threads) as block:
            T.annotate_min_blocks_per_sm(2)
            m = Buffers(
                first=T.alloc_local([ahead * 8], dtype),
                other=T.alloc_local([ahead * 8], dtype),
                left=T.alloc_local([8], dtype),
                right=T.alloc_local([8], dtype),
                sums=T.alloc_local([4], accum),
                total=T.alloc_local([1], accum),
                parts=T.alloc_shared([count * TILE * HEAD_ROWS], accum),
            )
            n0, x0 = block * TILE, block // (outputs // TILE // groups) * columns
            for s in list(range(ahead)):
                if has(s):
                    fetch(weight, m, s, step_of(s), n0)
            if dependent:
                T.pdl_sync()
                T.pdl_trigger()
            for i in T.unroll(4):
                m.sums[i] = 0.0
            for s in list(range(ahead)):
                if has(s):
                    multiply(x, m, s, step_of(s), x0)
            # A thread has rows g and g + 8 of the tile, and rows 2 t and 2 t + 1 of x.
            for i in T.unroll(4):
                m.parts[
                    warp() * (TILE * HEAD_ROWS)
                    + (lane() // 4 + i // 2 * 8) * HEAD_ROWS
                    + T.get_thread_binding() % 4 * 2
                    + i % 2
                ] = m.sums[i]
            T.sync_threads()
            for j in T.serial(T.ceildiv(TILE * HEAD_ROWS, threads)):
                at = j * threads + T.get_thread_binding()
                if (at < TILE * HEAD_ROWS) & (at // TILE < rows):
                    m.total[0] = 0.0
                    for w in T.unroll(count):
                        m.total[0] += m.parts[w * (TILE * HEAD_ROWS) + at % TILE * HEAD_ROWS + at // TILE]
                    out[at // TILE, n0 + at % TILE] = T.cast(m.total[0], dtype)

    return w_uv


compile_w_uk = compiler(make_w_uk, EXACT_PASS_CONFIGS)
compile_w_uv = compiler(make_w_uv, EXACT_PASS_CONFIGS)
compile_up_projection = compiler(make_up_projection, PASS_CONFIGS)


def _launch(compile_kernel, x: Tensor, *tensors: Tensor, **static: Any) -> None:
    with on_device(x.device):
        here = capability(x.device)
        compile_kernel(here, dtype=dtype_name(x.dtype), dependent=here >= 90, **static)(x, *tensors)


def launch_up_projection(x: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> None:
    """Run the kernel over tokens [..., N, H, inner]."""
    x, out = x.flatten(0, -3), out.view(-1, *out.shape[-2:])
    tokens, heads, inner = x.shape
    _launch(
        compile_up_projection, x, weight, out, heads=heads, groups=weight.shape[0], inner=inner, outer=out.shape[2],
        transposed=transposed, rows=FEW_ROWS if tokens * heads <= FEW_ROWS * weight.shape[0] else GROUP,
    )  # fmt: skip


def launch_w_uk(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Run the kernel over tokens [..., N, H, inner]."""
    x, out = with_dense_rows(x.flatten(0, -3)), out.view(-1, *out.shape[-2:])
    _, heads, inner = x.shape
    _launch(compile_w_uk, x, weight, out, heads=heads, groups=weight.shape[0], inner=inner, outer=out.shape[2])


def launch_w_uv(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Run the kernel over tokens [..., H, inner], of weights [H, outer, inner]."""
    (heads, outer, inner), tensors = weight.shape, (weight.flatten(0, 1), out.view(-1, out.shape[-2] * out.shape[-1]))
    x = aligned(x.reshape(-1, heads * inner))
    _launch(compile_w_uv, x, *tensors, outputs=heads * outer, columns=inner, groups=heads)
