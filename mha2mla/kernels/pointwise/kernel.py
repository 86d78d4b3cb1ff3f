"""The kernels between a layer's products: every number is read once, and rounded where plain torch rounds it."""

import math

import tilelang.language as T
from torch import Tensor

from mha2mla.kernels.machine import EXACT_PASS_CONFIGS, WARPGROUP, Buffers, Machine, compiler
from mha2mla.kernels.ops import capability, dtype_name, on_device, vector_of, with_dense_rows
from mha2mla.kernels.skinny_linear.selection import ROW_BUCKETS


def make_rms_norm(
    *, width: int, dtype: str, residual: bool, vector: int = 1, dependent: bool = False, on_cpu: bool = False
):
    """A TileLang function ``rms_norm``, a block a row; the number of rows is a run-time value.

    Args:
        width: elements of a row.
        dtype: of all tensors.
        residual: ``base`` is added before, and the sum written; else both are any [rows, width] tensors.
        vector: elements that a thread moves at a time; divides width, and pointers are aligned to so many.
        dependent: launch it as a programmatic dependent of the kernel before, for whose end its row waits and not its
            weight, which no kernel writes; its own dependents begin once it has its row, before which what they ask for
            would come (sm_90 and newer).
        on_cpu: compile for TileLang's C target.

    The function's arguments: x, base, weight [width], out and total [rows, width] (contiguous); eps float32.
    """
    accum = T.float32
    machine = Machine(on_cpu)
    lanes = 1 if on_cpu else 256
    warps = -(-lanes // 32)
    vectors = width // vector
    rounds = -(-vectors // lanes)
    rows = T.dynamic("rows")

    @T.prim_func
    def rms_norm(
        x: T.Tensor([rows, width], dtype),
        base: T.Tensor([rows, width], dtype),
        weight: T.Tensor([width], dtype),
        out: T.Tensor([rows, width], dtype),
        total: T.Tensor([rows, width], dtype),
        eps: T.float32,
    ):
        with T.Kernel(rows, threads=lanes) as row:
            m = Buffers(
                held=T.alloc_local([rounds * vector], dtype),
                scale=T.alloc_local([rounds * vector], dtype),
                other=T.alloc_local([vector], dtype),
                square=T.alloc_local([2], accum),
                parts=machine.alloc_shared([warps], accum),
            )
            m.square[0] = 0.0
            for r in T.unroll(rounds):
                if r * lanes + machine.thread < vectors:
                    for v in T.vectorized(vector):  # from memory, while the row is still made, or comes from the L2
                        m.scale[r * vector + v] = weight[(r * lanes + machine.thread) * vector + v]
            if dependent:
                T.pdl_sync()
            for r in T.unroll(rounds):
                if r * lanes + machine.thread < vectors:
                    for v in T.vectorized(vector):
                        m.held[r * vector + v] = x[row, (r * lanes + machine.thread) * vector + v]
                    if residual:
                        for v in T.vectorized(vector):
                            m.other[v] = base[row, (r * lanes + machine.thread) * vector + v]
                        for v in T.unroll(vector):
                            m.held[r * vector + v] = T.cast(
                                T.cast(m.held[r * vector + v], accum) + T.cast(m.other[v], accum), dtype
                            )
                        for v in T.vectorized(vector):
                            total[row, (r * lanes + machine.thread) * vector + v] = m.held[r * vector + v]
                    for v in T.unroll(vector):
                        m.square[0] += T.cast(m.held[r * vector + v], accum) * T.cast(m.held[r * vector + v], accum)
            if not on_cpu:
                for v in list(range(5)):
                    m.square[0] += T.shfl_xor(m.square[0], 1 << v)
                if machine.thread % 32 == 0:
                    m.parts[machine.thread // 32] = m.square[0]
                T.sync_threads()
                if dependent:
                    T.pdl_trigger()
                m.square[0] = 0.0
                for w in T.unroll(warps):
                    m.square[0] += m.parts[w]
            m.square[1] = 1.0 / T.sqrt(m.square[0] / T.float32(width) + eps)
            for r in T.unroll(rounds):
                if r * lanes + machine.thread < vectors:
                    for v in T.unroll(vector):
                        m.held[r * vector + v] = T.cast(T.cast(m.held[r * vector + v], accum) * m.square[1], dtype)
                        m.held[r * vector + v] = T.cast(
                            T.cast(m.scale[r * vector + v], accum) * T.cast(m.held[r * vector + v], accum), dtype
                        )
                    for v in T.vectorized(vector):
                        out[row, (r * lanes + machine.thread) * vector + v] = m.held[r * vector + v]

    return rms_norm


def make_silu_mul(*, width: int, dtype: str, vector: int = 1, on_cpu: bool = False):
    """A TileLang function ``silu_mul``; the number of rows is a run-time value.

    Args:
        width: elements of a row.
        dtype, vector, on_cpu: as of :func:`make_rms_norm`.

    The function's arguments: gate and up [rows, width] (run-time strides), out [rows, width] (contiguous).
    """
    accum = T.float32
    machine = Machine(on_cpu)
    lanes = 1 if on_cpu else WARPGROUP
    vectors = width // vector
    blocks = -(-vectors // lanes)
    rows = T.dynamic("rows")

    @T.prim_func
    def silu_mul(
        gate: machine.strided("gate", [rows, width], dtype),
        up: machine.strided("up", [rows, width], dtype),
        out: T.Tensor([rows, width], dtype),
    ):
        with T.Kernel(rows * blocks, threads=lanes) as x:
            if vector > 1 and not on_cpu:  # else loads are not known to be aligned, and stay scalar
                T.assume(gate.strides[0] % vector == 0)
                T.assume(up.strides[0] % vector == 0)
            m = Buffers(
                left=T.alloc_local([vector], dtype),
                right=T.alloc_local([vector], dtype),
                wide=T.alloc_local([1], accum),
            )
            at = x % blocks * lanes + machine.thread
            if at < vectors:
                for v in T.vectorized(vector):
                    m.left[v] = gate[x // blocks, at * vector + v]
                for v in T.vectorized(vector):
                    m.right[v] = up[x // blocks, at * vector + v]
                for v in T.unroll(vector):
                    m.wide[0] = T.cast(m.left[v], accum)
                    m.left[v] = T.cast(m.wide[0] / (1.0 + T.exp(-m.wide[0])), dtype)
                    m.left[v] = T.cast(T.cast(m.left[v], accum) * T.cast(m.right[v], accum), dtype)
                for v in T.vectorized(vector):
                    out[x // blocks, at * vector + v] = m.left[v]

    return silu_mul


compile_rms_norm = compiler(make_rms_norm, EXACT_PASS_CONFIGS)
compile_silu_mul = compiler(make_silu_mul, EXACT_PASS_CONFIGS)


def launch_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, total: Tensor) -> None:
    """Run the kernel over rows [..., width]; ``total`` is written where there is a residual."""
    if out.numel() == 0:
        return
    width, weight = x.shape[-1], weight.contiguous()
    x, out = x.reshape(-1, width).contiguous(), out.view(-1, width)
    base, total = (x, out) if residual is None else (residual.reshape(-1, width).contiguous(), total.view(-1, width))
    here = capability(x.device)
    static = {"width": width, "dtype": dtype_name(x.dtype), "residual": residual is not None}
    with on_device(x.device):
        kernel = compile_rms_norm(
            here, **static, vector=math.gcd(width, vector_of(x, base, weight, out, total)),
            dependent=len(x) <= ROW_BUCKETS[-1] and here >= 90,  # in a chain of few rows kernels wait for each other
        )  # fmt: skip
        kernel(x, base, weight, out, total, eps)


def launch_silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Run the kernel over rows [..., width]."""
    if out.numel() == 0:
        return
    width = gate.shape[-1]
    gate, up = with_dense_rows(gate.reshape(-1, width)), with_dense_rows(up.reshape(-1, width))
    static = {"width": width, "dtype": dtype_name(gate.dtype), "vector": math.gcd(width, vector_of(gate, up, out))}
    with on_device(gate.device):
        compile_silu_mul(capability(gate.device), **static)(gate, up, out.view(-1, width))
