"""x W^T of up to eight rows: every weight is read once, straight into the registers that a matrix instruction takes."""

import tilelang.language as T

from mha2mla.kernels.machine import Buffers, Machine

ROWS = 8  # of x: what an m16n8k16 instruction has of its second operand
TILE = 16  # rows of the weight in a block
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
    dependent: bool = True,
    on_cpu: bool = False,
):
    """A TileLang function ``skinny_linear``, a block for 16 rows of the weight, whose warps share the columns; the
    number of rows of x is a run-time value, at most 8.

    A warp's two products of a step take 32 columns in any order, as long as it is the same for both operands: thread
    t of four takes columns 8 t … 8 t + 7 of each, so that nothing is exchanged.

    Args:
        columns: K, a multiple of 32.
        outputs: N, a multiple of 16 in each group.
        groups: of rows of the weight, each for its own K columns of x.
        dtype: of all tensors.
        gated: the weight's halves are gate and up, and the result is silu(gate) * up, half as wide.
        biased: ``bias`` is added before the one rounding; not with ``gated``.
        warps: of a block.
        stages: steps whose weights a thread has under way, an even number; 8 registers each.
        resident: blocks that a multiprocessor has room for, which limits a thread's registers.
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
    own = TILE // 2 if gated else TILE  # columns of the result in a block
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

    def has(i):
        """Whether a warp has an i-th step: a condition only where some have. A guard around a product keeps the
        compiler from asking for x ahead of it."""
        first, last = (i // 2 * count + warp for warp in (0, count - 1))
        return True if last * 2 + i % 2 < steps else step_of(i) < steps if first * 2 + i % 2 < steps else False

    @T.macro
    def fetch(weight, m, slot, step, n0):
        """A step's weights: 8 numbers of each of the thread's two rows."""
        for v in T.vectorized(8):
            m.first[slot * 8 + v] = weight[n0 + thread() % 32 // 4, step * DEPTH + thread() % 4 * 8 + v]
        for v in T.vectorized(8):
            m.other[slot * 8 + v] = weight[n0 + thread() % 32 // 4 + second, step * DEPTH + thread() % 4 * 8 + v]

    @T.macro
    def multiply(x, m, slot, step, x0):
        """Two products of 16 columns each."""
        for v in T.unroll(8):
            m.right[v] = T.cast(0.0, dtype)
        if thread() % 32 // 4 < rows:
            for v in T.vectorized(8):
                m.right[v] = x[thread() % 32 // 4, x0 + step * DEPTH + thread() % 4 * 8 + v]
        for half in list(range(2)):
            for v in T.vectorized(2):
                m.left[v] = m.first[slot * 8 + half * 4 + v]
            for v in T.vectorized(2):
                m.left[2 + v] = m.other[slot * 8 + half * 4 + v]
            for v in T.vectorized(2):
                m.left[4 + v] = m.first[slot * 8 + half * 4 + 2 + v]
            for v in T.vectorized(2):
                m.left[6 + v] = m.other[slot * 8 + half * 4 + 2 + v]
            T.ptx_mma(
                "float32", "m16n8k16", "row", "col", _PREFIX[dtype], _PREFIX[dtype], "fp32",
                m.left.data, 0, m.right.data, half * 4, m.sums.data, 0, T.bool(False),
            )  # fmt: skip

    @T.macro
    def add_plainly(x, weight, m, step, n0, x0):
        """A step on the C target: all that a block has of it."""
        for i, r, k in T.grid(TILE, rows, DEPTH):
            m.parts[i * ROWS + r] += (
                weight[n0 + i % 8 + i // 8 * second, step * DEPTH + k] * x[r, x0 + step * DEPTH + k]
            )

    @T.prim_func
    def skinny_linear(
        x: T.Tensor([rows, groups * columns], dtype),
        weight: T.Tensor([outputs, columns], dtype),
        bias: T.Tensor([outputs if biased else T.dynamic("biases")], dtype),
        out: T.Tensor([rows, width], dtype),
    ):
        with T.Kernel(outputs // TILE, threads=threads) as block:
            if not on_cpu:
                T.annotate_min_blocks_per_sm(resident)
            m = Buffers(
                first=T.alloc_local([ahead * 8], dtype),
                other=T.alloc_local([ahead * 8], dtype),
                left=T.alloc_local([8], dtype),
                right=T.alloc_local([8], dtype),
                sums=T.alloc_local([4], accum),
                total=T.alloc_local([2], accum),
                parts=machine.alloc_shared([count * TILE * ROWS], accum),
            )
            n0, x0 = block * own, block // (outputs // TILE // groups) * columns
            if on_cpu:
                for i in T.serial(TILE * ROWS):
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
                for i in T.unroll(4):
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
                # A thread has rows g and g + 8 of the tile, and rows 2 t and 2 t + 1 of x.
                for i in T.unroll(4):
                    m.parts[
                        thread() // 32 * (TILE * ROWS)
                        + (thread() % 32 // 4 + i // 2 * 8) * ROWS
                        + thread() % 4 * 2
                        + i % 2
                    ] = m.sums[i]
                T.sync_threads()
            for j in T.serial(T.ceildiv(own * ROWS, threads)):
                at = j * threads + thread()
                if (at < own * ROWS) & (at // own < rows):
                    for h in T.unroll(2):
                        m.total[h] = 0.0
                    for w in T.unroll(count):
                        m.total[0] += m.parts[w * (TILE * ROWS) + at % own * ROWS + at // own]
                        if gated:
                            m.total[1] += m.parts[w * (TILE * ROWS) + (at % own + 8) * ROWS + at // own]
                    if gated:  # every step is rounded as by the op that it stands for
                        m.total[0] = T.cast(T.cast(m.total[0], dtype), accum)
                        m.total[0] = T.cast(T.cast(m.total[0] / (1.0 + T.exp(-m.total[0])), dtype), accum)
                        m.total[0] *= T.cast(T.cast(m.total[1], dtype), accum)
                    if biased:
                        m.total[0] += T.cast(bias[n0 + at % own], accum)
                    out[at // own, n0 + at % own] = T.cast(m.total[0], dtype)

    return skinny_linear
