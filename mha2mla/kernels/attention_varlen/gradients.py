"""Gradients of causal attention (FlashAttention-2, arXiv 2307.08691, algorithm 2) without atomic additions.

One kernel makes the gradients of keys and values: a CTA owns a tile of keys and walks the queries from there on.
Another makes those of queries: a CTA owns a tile of queries and walks the keys up to there. Scores are computed in
both, 7 products in place of 5, and each sum has one order. With P the weights, dP = dO V^T and D = rowsum(dO * O)::

    dV = P^T dO    dS = P * (dP - D)    dK = scale dS^T Q    dQ = scale dS K
"""

from dataclasses import dataclass

import tilelang.language as T
import torch
from torch import Tensor

from mha2mla.kernels.machine import (
    BY_ROW,
    GPU,
    SPECIALISED_PASS_CONFIGS,
    WARPGROUP,
    Machine,
    compile_for,
    compiled_once,
    make_function,
)
from mha2mla.kernels.ops import dtype_name, on_device
from mha2mla.kernels.split_kv.choice import HOPPER
from mha2mla.kernels.split_kv.device import LOG2E

ROWS = 128  # of a tile that a CTA owns: 64 for each of two warpgroups
KEYS_AT_ONCE = 64  # of a tile that a CTA of queries walks over: shared memory holds no more at d_qk + d_v = 384
# Registers of a thread that loads and of one that computes in a CTA of keys, with which ptxas spills at most 16 bytes:
# addresses of tiles cut in three need 56, and where sums and scores fill a warpgroup, by d_qk + d_v, it needs more than
# 224. A CTA of 384 threads starts with 168 each, and one that asks for more than that leaves waits for ever.
REGISTERS = (56, 224)
FULL_REGISTERS = {320: (40, 232), 384: (24, 240)}
STAGES = 2  # tiles of the others that are in flight
APART = 32  # float32 rows, 128 bytes: a load by TMA starts at a multiple, so each stage of fewer rows has as many


@dataclass(frozen=True)
class GradientShape:
    """Static part of a call.

    Attributes:
        heads: of queries, keys and values alike.
        widths: d_qk and d_v, multiples of 16.
        dtype: "bfloat16" or "float16" ("float32" on the CPU).
    """

    heads: int
    widths: tuple[int, int]
    dtype: str

    def queries_at_once(self) -> int:
        """Queries of a tile that a CTA of keys walks over: what registers hold beside the sums of dK and dV."""
        return next(block for most, block in ((224, 64), (320, 32), (384, 16)) if sum(self.widths) <= most)


def make_gradients(name: str, shape: GradientShape, outputs: dict[str, int], body):
    """The TileLang function of a body: q, k [T,H,d_qk], v, d_out [T,H,d_v], lse and delta [H,T] float32, where T is
    windows * length; ``outputs`` by name, each with its width; softmax_scale and length."""
    tokens, (d, d_v) = T.dynamic("tokens"), shape.widths
    tensors = {"q": d, "k": d, "v": d_v, "d_out": d_v, "lse": None, "delta": None} | outputs
    arguments = {
        # An object each: it is what the compiled function knows an argument by.
        each: T.Tensor([tokens, shape.heads, width], shape.dtype)
        if width
        else T.Tensor([shape.heads, tokens], "float32")
        for each, width in tensors.items()
    }
    return make_function(name, arguments | {"softmax_scale": T.float32(), "length": T.int32()}, body)


def launch_grid(machine: Machine, shape: GradientShape, rows: int, call):
    """A CTA for each tile of rows, head and window."""
    windows, threads = T.truncdiv(call.q.shape[0], call.length), 1 if machine.on_cpu else rows // 64 * WARPGROUP
    return T.Kernel(T.truncdiv(call.length, rows), shape.heads, windows, threads=threads)


def walk(machine: Machine, start, stop):
    return T.serial(start, stop) if machine.on_cpu else T.Pipelined(start, stop, num_stages=STAGES)


@T.macro
def load(machine, source, first, head, tile):
    """Rows ``first ...`` of a head."""
    rows, width = int(tile.shape[0]), int(tile.shape[1])
    if machine.on_cpu:
        for i, c in T.grid(rows, width):
            tile[i, c] = source[first + i, head, c]
    else:
        T.copy(source[first : first + rows, head, 0:width], tile)


@T.macro
def load_rows(machine, source, first, head, tile, rows):
    if machine.on_cpu:
        for i in T.serial(rows):
            tile[i] = source[head, first + i]
    else:
        T.copy(source[head, first : first + rows], tile[0:rows])


@T.macro
def find_weights(machine, s, ds, own, others, is_visible, lse_of, softmax_scale):
    """``s`` becomes weights P and ``ds`` dP, of products of ``own`` operands by ``others``."""
    T.gemm(own[0], others[0], s, transpose_B=True, clear_accum=True, policy=BY_ROW)
    T.gemm(own[1], others[1], ds, transpose_B=True, clear_accum=True, policy=BY_ROW)
    for i, j in machine.parallel(int(s.shape[0]), int(s.shape[1])):
        s[i, j] = T.if_then_else(
            is_visible(i, j), s[i, j] * (softmax_scale * LOG2E) - lse_of(i, j) * LOG2E, -T.infinity(T.float32)
        )
    for i, j in machine.parallel(int(s.shape[0]), int(s.shape[1])):
        s[i, j] = T.exp2(s[i, j])  # by itself: exponentials behind a condition are branches


@T.macro
def find_score_gradient(machine, s, ds, delta_of):
    """``ds`` = P * (dP - D)."""
    for i, j in machine.parallel(int(s.shape[0]), int(s.shape[1])):
        ds[i, j] = s[i, j] * (ds[i, j] - delta_of(i, j))


@T.macro
def store(machine, tile, target, first, head):
    """A sum to rows ``first ...`` of a head."""
    rows, width = int(tile.shape[0]), int(tile.shape[1])
    if machine.on_cpu:
        for i, c in T.grid(rows, width):
            target[first + i, head, c] = tile[i, c]
    else:
        T.copy(tile, target[first : first + rows, head, 0:width])


def make_key_gradients(shape: GradientShape, *, rows: int = ROWS, machine: Machine = GPU):
    """A TileLang function ``key_gradients`` for one static shape; ``length`` is a multiple of ``rows``."""
    (d, d_v), block = shape.widths, min(shape.queries_at_once(), rows)
    loads, computes = FULL_REGISTERS.get(d + d_v, REGISTERS)

    @T.macro
    def body(call):
        with launch_grid(machine, shape, rows, call) as (x, h, window):
            if not machine.on_cpu:
                T.annotate_producer_reg_dealloc(loads)
                T.annotate_consumer_reg_alloc(computes)
            k_tile = machine.alloc_shared([rows, d], shape.dtype)
            v_tile = machine.alloc_shared([rows, d_v], shape.dtype)
            q_tile = machine.alloc_shared([block, d], shape.dtype)
            d_out_tile = machine.alloc_shared([block, d_v], shape.dtype)
            lse_tile = machine.alloc_shared([max(block, APART)], T.float32)
            delta_tile = machine.alloc_shared([max(block, APART)], T.float32)
            # Transposed, [keys, queries]: as they are they multiply dO and Q from registers.
            s = machine.alloc_fragment([rows, block], T.float32)
            ds = machine.alloc_fragment([rows, block], T.float32)
            p = machine.alloc_fragment([rows, block], shape.dtype)
            narrow = machine.alloc_fragment([rows, block], shape.dtype)
            dk_sum = machine.alloc_fragment([rows, d], T.float32)
            dv_sum = machine.alloc_fragment([rows, d_v], T.float32)
            # The first keys have the most queries: heads one after another, of each the longest walk first.
            key0, first = x * rows, window * call.length
            load(machine, call.k, first + key0, h, k_tile)
            load(machine, call.v, first + key0, h, v_tile)
            T.fill(dk_sum, 0)
            T.fill(dv_sum, 0)
            for m in walk(machine, key0 // block, call.length // block):
                load(machine, call.q, first + m * block, h, q_tile)
                load(machine, call.d_out, first + m * block, h, d_out_tile)
                load_rows(machine, call.lse, first + m * block, h, lse_tile, block)
                load_rows(machine, call.delta, first + m * block, h, delta_tile, block)
                find_weights(
                    machine, s, ds, (k_tile, v_tile), (q_tile, d_out_tile),
                    lambda i, j, m=m: key0 + i <= m * block + j, lambda i, j: lse_tile[j], call.softmax_scale,
                )  # fmt: skip
                T.copy(s, p)
                T.gemm(p, d_out_tile, dv_sum, policy=BY_ROW)
                find_score_gradient(machine, s, ds, lambda i, j: delta_tile[j])
                T.copy(ds, narrow)
                T.gemm(narrow, q_tile, dk_sum, policy=BY_ROW)
            store(machine, dv_sum, call.dv, first + key0, h)
            for i, c in machine.parallel(rows, d):
                dk_sum[i, c] *= call.softmax_scale
            store(machine, dk_sum, call.dk, first + key0, h)

    return make_gradients("key_gradients", shape, {"dk": d, "dv": d_v}, body)


def make_query_gradients(shape: GradientShape, *, rows: int = ROWS, machine: Machine = GPU):
    """A TileLang function ``query_gradients``, likewise."""
    (d, d_v), block = shape.widths, min(KEYS_AT_ONCE, rows)

    @T.macro
    def body(call):
        with launch_grid(machine, shape, rows, call) as (x, h, window):
            q_tile = machine.alloc_shared([rows, d], shape.dtype)
            d_out_tile = machine.alloc_shared([rows, d_v], shape.dtype)
            k_tile = machine.alloc_shared([block, d], shape.dtype)
            v_tile = machine.alloc_shared([block, d_v], shape.dtype)
            lse_tile = machine.alloc_shared([rows], T.float32)
            delta_tile = machine.alloc_shared([rows], T.float32)
            s = machine.alloc_fragment([rows, block], T.float32)
            ds = machine.alloc_fragment([rows, block], T.float32)
            narrow = machine.alloc_fragment([rows, block], shape.dtype)
            dq_sum = machine.alloc_fragment([rows, d], T.float32)
            # The last queries have the most keys.
            query0, first = (T.truncdiv(call.length, rows) - 1 - x) * rows, window * call.length
            load(machine, call.q, first + query0, h, q_tile)
            load(machine, call.d_out, first + query0, h, d_out_tile)
            load_rows(machine, call.lse, first + query0, h, lse_tile, rows)
            load_rows(machine, call.delta, first + query0, h, delta_tile, rows)
            T.fill(dq_sum, 0)
            for n in walk(machine, 0, (query0 + rows) // block):
                load(machine, call.k, first + n * block, h, k_tile)
                load(machine, call.v, first + n * block, h, v_tile)
                find_weights(
                    machine, s, ds, (q_tile, d_out_tile), (k_tile, v_tile),
                    lambda i, j, n=n: n * block + j <= query0 + i, lambda i, j: lse_tile[i], call.softmax_scale,
                )  # fmt: skip
                find_score_gradient(machine, s, ds, lambda i, j: delta_tile[i])
                T.copy(ds, narrow)
                T.gemm(narrow, k_tile, dq_sum, policy=BY_ROW)
            for i, c in machine.parallel(rows, d):
                dq_sum[i, c] *= call.softmax_scale
            store(machine, dq_sum, call.dq, first + query0, h)

    return make_gradients("query_gradients", shape, {"dq": d}, body)


@compiled_once
def compile_gradients(heads: int, widths: tuple[int, int], dtype: torch.dtype):
    """Both compiled kernels; they serve all batches and lengths."""
    shape = GradientShape(heads, widths, dtype_name(dtype))
    return tuple(
        compile_for(make(shape), HOPPER, SPECIALISED_PASS_CONFIGS)
        for make in (make_key_gradients, make_query_gradients)
    )


def launch_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor, softmax_scale: float, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    Args:
        q, k: [T, H, d_qk] of windows of ``length`` tokens one behind the other; v, d_out: [T, H, d_v]. Contiguous.
        lse: [H, T] float32, log-sum-exps of the scores.
        delta: [H, T] float32, of each query and head the sum over d_v of d_out times the output.
    """
    of_keys, of_queries = compile_gradients(q.shape[1], (q.shape[2], v.shape[2]), q.dtype)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with on_device(q.device):
        of_keys(q, k, v, d_out, lse, delta, dk, dv, softmax_scale, length)
        of_queries(q, k, v, d_out, lse, delta, dq, softmax_scale, length)
    return dq, dk, dv
