"""x W^T of few rows: every weight is read once, straight into the registers that a matrix instruction takes."""

import tilelang.language as T

from mha2mla.kernels.machine import Buffers, Machine

ROWS = 8  # of x that an m16n8k16 instruction has, as its second operand
TILE = 16  # rows of the weight that it has
DEPTH = 32  # columns of a step: 16 bytes of a weight row for each of the four threads that share it
_PREFIX = {"bfloat16": "bf16", "float16": "fp16"}


def make_skinny_linear(
    *,
    columns: int,
    outputs: int,
    dtype: str,
    groups: int = 1,
    gated: bool = False,
    biased: bool = False,
    warps: int = 8,
    stages: int = 8,
    resident: int = 2,
    tiles: int = 1,
    most_rows: int = ROWS,
    dependent: bool = True,
    on_cpu: bool = False,
):
    """A TileLang function ``skinny_linear``, a block for 16 or 32 rows of the weight, whose warps share the columns;
    the number of rows of x is a run-time value.

    A warp's two products of a step take 32 columns in any order, as long as it is the same for both operands: thread
    t of four takes columns 8 t … 8 t + 7 of each, so that nothing is exchanged.

    Args:
        columns: K, a multiple of 32.
        outputs: N, a multiple of 16 ``tiles`` in each group.
        groups: of rows of the weight, each for its own K columns of x.
        dtype: of all tensors.
        gated: the weight's halves are gate and up, and the result is silu(gate) * up, half as wide.
        biased: ``bias`` is added before the one rounding; not with ``gated``.
        warps: of a block.
        stages: steps whose weights a thread has under way, an even number; 8 registers each, of each tile.
        resident: blocks that a multiprocessor has room for, which limits a thread's registers.
        tiles: of 16 rows of the weight in a block, 1 or 2, which share what they read of x.
        most_rows: of x, 8 or 16.
        dependent: launch it as a programmatic dependent of the kernel before (sm_90 and newer): it waits for x after
            it asked for its first weights, which nobody writes.
        on_cpu: compile for TileLang's C target.

    The function's arguments: x [rows, groups K], weight [N, K], bias [any number, or N], out [rows, N or N / 2], all
    contiguous.
    """
    accum = T.float32
    machine = Machine(on_cpu)
    count = 1 if on_cpu else warps
    ahead = 1 if on_cpu else stages
    width = outputs // 2 if gated else outputs
    half = TILE // 2 if gated else TILE  # columns of the result that a tile makes
    own = half * tiles  # a block
    block_rows = TILE * tiles  # of the weight
    eights = most_rows // ROWS
    second = width if gated else TILE // 2  # rows of the weight between a thread's two
    steps = columns // DEPTH
    rounds = steps // (count * ahead)  # in which every warp has all its steps; what is left over follows them
    threads = 1 if on_cpu else warps * 32
    rows = T.dynamic("rows")

    def thread():
        return 0 if on_cpu else T.get_thread_binding()

    def step_of(i):
        """A warp's i-th step: two in a row take whole lines of 128 bytes."""
        return (i // 2 * count + thread() // 32) * 2 + i % 2

    def row_of(i):
        """Of the weight, behind its first one: the block's i-th."""
        return i // TILE * half + i % 8 + i // 8 % 2 * second

    def place(column):
        """Of a column of the result among the block's rows; of a gated one its gate's."""
        return column // half * TILE + column % half

    def has(i):
        """Whether a warp has an i-th step: a condition only where some have. A guard around a product keeps the
        compiler from asking for x ahead of it."""
        first, last = (i // 2 * count + warp for warp in (0, count - 1))
        return True if last * 2 + i % 2 < steps else step_of(i) < steps if first * 2 + i % 2 < steps else False

    @T.macro
    def fetch(weight, m, slot, step, n0):
        """A step's weights: 8 numbers of each of the thread's two rows of a tile."""
        for u in list(range(tiles)):
            for v in T.vectorized(8):
                m.first[(slot * tiles + u) * 8 + v] = weight[
                    n0 + u * half + thread() % 32 // 4, step * DEPTH + thread() % 4 * 8 + v
                ]
            for v in T.vectorized(8):
                m.other[(slot * tiles + u) * 8 + v] = weight[
                    n0 + u * half + thread() % 32 // 4 + second, step * DEPTH + thread() % 4 * 8 + v
                ]

    @T.macro
    def multiply(x, m, slot, step, x0):
        """Two products of 16 columns each, of every tile and eight rows."""
        for e in list(range(eights)):
            for v in T.unroll(8):
                m.right[e * 8 + v] = T.cast(0.0, dtype)
            if e * ROWS + thread() % 32 // 4 < rows:
                for v in T.vectorized(8):
                    m.right[e * 8 + v] = x[e * ROWS + thread() % 32 // 4, x0 + step * DEPTH + thread() % 4 * 8 + v]
        for u in list(range(tiles)):
            for part in list(range(2)):
                for v in T.vectorized(2):
                    m.left[v] = m.first[(slot * tiles + u) * 8 + part * 4 + v]
                for v in T.vectorized(2):
                    m.left[2 + v] = m.other[(slot * tiles + u) * 8 + part * 4 + v]
                for v in T.vectorized(2):
                    m.left[4 + v] = m.first[(slot * tiles + u) * 8 + part * 4 + 2 + v]
                for v in T.vectorized(2):
                    m.left[6 + v] = m.other[(slot * tiles + u) * 8 + part * 4 + 2 + v]
                for e in list(range(eights)):
                    T.ptx_mma(
                        "float32", "m16n8k16", "row", "col", _PREFIX[dtype], _PREFIX[dtype], "fp32",
                        m.left.data, 0, m.right.data, e * 8 + part * 4, m.sums.data, (u * eights + e) * 4,
                        T.bool(False),
                    )  # fmt: skip

    @T.macro
    def add_plainly(x, weight, m, step, n0, x0):
        """A step on the C target: all that a block has of it."""
        for i, r, k in T.grid(block_rows, rows, DEPTH):
            m.parts[i * most_rows + r] += weight[n0 + row_of(i), step * DEPTH + k] * x[r, x0 + step * DEPTH + k]

    @T.prim_func
    def skinny_linear(
        x: T.Tensor([rows, groups * columns], dtype),
        weight: T.Tensor([outputs, columns], dtype),
        bias: T.Tensor([outputs if biased else T.dynamic("biases")], dtype),
        out: T.Tensor([rows, width], dtype),
    ):
        with T.Kernel(outputs // block_rows, threads=threads) as block:
            if not on_cpu:
                T.annotate_min_blocks_per_sm(resident)
            m = Buffers(
                first=T.alloc_local([ahead * tiles * 8], dtype),
                other=T.alloc_local([ahead * tiles * 8], dtype),
                left=T.alloc_local([8], dtype),
                right=T.alloc_local([eights * 8], dtype),
                sums=T.alloc_local([tiles * eights * 4], accum),
                total=T.alloc_local([2], accum),
                parts=machine.alloc_shared([count * block_rows * most_rows], accum),
            )
            n0, x0 = block * own, block // (outputs // block_rows // groups) * columns
            if on_cpu:
                for i in T.serial(block_rows * most_rows):
                    m.parts[i] = 0.0
                for step in T.serial(steps):
                    add_plainly(x, weight, m, step, n0, x0)
            else:
                for s in list(range(ahead)):
                    if has(s):
                        fetch(weight, m, s, step_of(s), n0)
                if dependent:
                    T.pdl_sync()
                    T.pdl_trigger()
                for i in T.unroll(tiles * eights * 4):
                    m.sums[i] = 0.0
                for r in T.serial(rounds - 1):
                    for s in T.unroll(ahead):
                        multiply(x, m, s, step_of(r * ahead + s), x0)
                        fetch(weight, m, s, step_of((r + 1) * ahead + s), n0)
                for i in list(range(max(0, rounds - 1) * ahead, (rounds + 1) * ahead)):
                    if has(i):
                        multiply(x, m, i % ahead, step_of(i), x0)
                    if i < rounds * ahead:
                        if has(i + ahead):
                            fetch(weight, m, i % ahead, step_of(i + ahead), n0)
                # A thread has rows g and g + 8 of a tile, and rows 2 t and 2 t + 1 of eight of x.
                for u, e in [(u, e) for u in range(tiles) for e in range(eights)]:
                    for i in T.unroll(4):
                        m.parts[
                            thread() // 32 * (block_rows * most_rows)
                            + (u * TILE + thread() % 32 // 4 + i // 2 * 8) * most_rows
                            + e * ROWS
                            + thread() % 4 * 2
                            + i % 2
                        ] = m.sums[(u * eights + e) * 4 + i]
                T.sync_threads()
            for j in T.serial(T.ceildiv(own * most_rows, threads)):
                at = j * threads + thread()
                if (at < own * most_rows) & (at // own < rows):
                    for h in T.unroll(2):
                        m.total[h] = 0.0
                    for w in T.unroll(count):
                        m.total[0] += m.parts[(w * block_rows + place(at % own)) * most_rows + at // own]
                        if gated:
                            m.total[1] += m.parts[(w * block_rows + place(at % own) + 8) * most_rows + at // own]
                    if gated:  # every step is rounded as by the op that it stands for
                        m.total[0] = T.cast(T.cast(m.total[0], dtype), accum)
                        m.total[0] = T.cast(T.cast(m.total[0] / (1.0 + T.exp(-m.total[0])), dtype), accum)
                        m.total[0] *= T.cast(T.cast(m.total[1], dtype), accum)
                    if biased:
                        m.total[0] += T.cast(bias[n0 + at % own], accum)
                    out[at // own, n0 + at % own] = T.cast(m.total[0], dtype)

    return skinny_linear
