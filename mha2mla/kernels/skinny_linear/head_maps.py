"""A map a head of up to eight rows: every weight is read once, straight into the registers that a matrix instruction
takes."""

import tilelang.language as T

from mha2mla.kernels.machine import Buffers, Machine

ROWS = 8  # of x: what an m16n8k16 instruction has of its second operand
TILE = 16  # rows of the weight in a block
WARPS = 8  # of a block
DEPTH = 32  # columns of a step: 16 bytes of a weight row for each of the four threads that share it
_PREFIX = {"bfloat16": "bf16", "float16": "fp16"}


def make_head_maps(
    *, columns: int, outputs: int, dtype: str, groups: int, dependent: bool = True, on_cpu: bool = False
):
    """A TileLang function ``head_maps``, a block for 16 rows of a map, whose warps share the columns; the number of
    rows of x is a run-time value, at most 8.

    A warp's two products of a step take 32 columns in any order, as long as it is the same for both operands: thread
    t of four takes columns 8 t … 8 t + 7 of each, so that nothing is exchanged.

    Args:
        columns: K, a multiple of 32 up to 2048.
        outputs: N of all maps, a multiple of 16 in each.
        dtype: of all tensors.
        groups: of rows of the weight, a map each, for its own K columns of x.
        dependent: launch it as a programmatic dependent of the kernel before (sm_90 and newer): it waits for x after
            it asked for its first weights, which nobody writes.
        on_cpu: compile for TileLang's C target.

    The function's arguments: x [rows, groups K], weight [N, K] and out [rows, N], all contiguous.
    """
    accum = T.float32
    machine = Machine(on_cpu)
    count = 1 if on_cpu else WARPS
    steps = columns // DEPTH
    ahead = 2 * -(-steps // (2 * count))  # steps of a warp, two at a time, whose weights it has under way
    threads = 1 if on_cpu else WARPS * 32
    rows = T.dynamic("rows")

    def thread():
        return 0 if on_cpu else T.get_thread_binding()

    def step_of(i):
        """A warp's i-th step: two in a row take whole lines of 128 bytes."""
        return (i // 2 * count + thread() // 32) * 2 + i % 2

    def has(i):
        """Whether a warp has an i-th step: a condition only where some have."""
        first, last = (i // 2 * count + warp for warp in (0, count - 1))
        return True if last * 2 + i % 2 < steps else step_of(i) < steps if first * 2 + i % 2 < steps else False

    @T.macro
    def fetch(weight, m, slot, step, n0):
        """A step's weights: 8 numbers of each of the thread's two rows."""
        for v in T.vectorized(8):
            m.first[slot * 8 + v] = weight[n0 + thread() % 32 // 4, step * DEPTH + thread() % 4 * 8 + v]
        for v in T.vectorized(8):
            m.other[slot * 8 + v] = weight[n0 + thread() % 32 // 4 + TILE // 2, step * DEPTH + thread() % 4 * 8 + v]

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
            m.parts[i * ROWS + r] += weight[n0 + i, step * DEPTH + k] * x[r, x0 + step * DEPTH + k]

    @T.prim_func
    def head_maps(
        x: T.Tensor([rows, groups * columns], dtype),
        weight: T.Tensor([outputs, columns], dtype),
        out: T.Tensor([rows, outputs], dtype),
    ):
        with T.Kernel(outputs // TILE, threads=threads) as block:
            if not on_cpu:
                T.annotate_min_blocks_per_sm(2)
            m = Buffers(
                first=T.alloc_local([ahead * 8], dtype),
                other=T.alloc_local([ahead * 8], dtype),
                left=T.alloc_local([8], dtype),
                right=T.alloc_local([8], dtype),
                sums=T.alloc_local([4], accum),
                total=T.alloc_local([1], accum),
                parts=machine.alloc_shared([count * TILE * ROWS], accum),
            )
            n0, x0 = block * TILE, block // (outputs // TILE // groups) * columns
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
                for s in list(range(ahead)):
                    if has(s):
                        multiply(x, m, s, step_of(s), x0)
                # A thread has rows g and g + 8 of the tile, and rows 2 t and 2 t + 1 of x.
                for i in T.unroll(4):
                    m.parts[
                        thread() // 32 * (TILE * ROWS)
                        + (thread() % 32 // 4 + i // 2 * 8) * ROWS
                        + thread() % 4 * 2
                        + i % 2
                    ] = m.sums[i]
                T.sync_threads()
            for j in T.serial(T.ceildiv(TILE * ROWS, threads)):
                at = j * threads + thread()
                if (at < TILE * ROWS) & (at // TILE < rows):
                    m.total[0] = 0.0
                    for w in T.unroll(count):
                        m.total[0] += m.parts[w * (TILE * ROWS) + at % TILE * ROWS + at // TILE]
                    out[at // TILE, n0 + at % TILE] = T.cast(m.total[0], dtype)

    return head_maps
