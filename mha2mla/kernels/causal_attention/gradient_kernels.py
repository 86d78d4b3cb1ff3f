"""Gradients of causal attention (FlashAttention-2, arXiv 2307.08691, algorithm 2) without atomic additions.

One kernel makes the gradients of keys and values: a CTA owns a tile of keys and walks the queries from there on.
Another makes those of queries: a CTA owns a tile of queries and walks the keys up to there. Scores are computed in
both, 7 products in place of 5, and each sum has one order. With P the weights, dP = dO V^T and D = rowsum(dO * O)::

    dV = P^T dO    dS = P * (dP - D)    dK = scale dS^T Q    dQ = scale dS K
"""

from dataclasses import dataclass

import tilelang.language as T

from mha2mla.kernels.machine import BY_ROW, GPU, WARPGROUP, Machine
from mha2mla.kernels.split_kv.call import LOG2E

ROWS = 128  # of a tile that a CTA owns: 64 for each of two warpgroups
STAGES = 2  # tiles of the others that are in flight


@dataclass(frozen=True)
class GradientShape:
    """What must be static of a call.

    Attributes:
        heads: of queries, keys and values alike.
        widths: d_qk and d_v, multiples of 16.
        dtype: "bfloat16" or "float16" ("float32" on the CPU).
    """

    heads: int
    widths: tuple[int, int]
    dtype: str

    def block(self) -> int:
        """Rows of a tile that is walked over: what the registers of a thread hold beside the accumulators."""
        return 64 if sum(self.widths) <= 192 else 32


class GradientTypes:
    """Types of the tensors: q, k, dq and dk [T,H,d_qk], v, d_out and dv [T,H,d_v], lse and delta [H,T] float32, where
    T is windows * length. An object each: it is what the compiled function knows an argument by."""

    def __init__(self, shape: GradientShape):
        self.tokens = T.dynamic("tokens")
        key, value = ([self.tokens, shape.heads, width] for width in shape.widths)
        self.q, self.k, self.dq, self.dk = (T.Tensor(key, shape.dtype) for _ in range(4))
        self.v, self.d_out, self.dv = (T.Tensor(value, shape.dtype) for _ in range(3))
        self.lse, self.delta = (T.Tensor([shape.heads, self.tokens], T.float32) for _ in range(2))


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
def load_rows(machine, source, first, head, tile):
    rows = int(tile.shape[0])
    if machine.on_cpu:
        for i in T.serial(rows):
            tile[i] = source[head, first + i]
    else:
        T.copy(source[head, first : first + rows], tile)


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
    (d, d_v), types, block = shape.widths, GradientTypes(shape), min(shape.block(), rows)

    @T.prim_func
    def key_gradients(
        q: types.q, k: types.k, v: types.v, d_out: types.d_out, lse: types.lse, delta: types.delta,
        dk: types.dk, dv: types.dv, softmax_scale: T.float32, length: T.int32,
    ):  # fmt: skip
        with T.Kernel(
            T.truncdiv(length, rows),
            shape.heads,
            T.truncdiv(types.tokens, length),
            threads=1 if machine.on_cpu else rows // 64 * WARPGROUP,
        ) as (x, h, window):
            if not machine.on_cpu:  # addresses of wide tiles need more than 24; 384 threads have 168 each together
                T.annotate_producer_reg_dealloc(40)
                T.annotate_consumer_reg_alloc(232)
            k_tile = machine.alloc_shared([rows, d], shape.dtype)
            v_tile = machine.alloc_shared([rows, d_v], shape.dtype)
            q_tile = machine.alloc_shared([block, d], shape.dtype)
            d_out_tile = machine.alloc_shared([block, d_v], shape.dtype)
            lse_tile = machine.alloc_shared([block], T.float32)
            delta_tile = machine.alloc_shared([block], T.float32)
            # Transposed, [keys, queries]: as they are they multiply dO and Q from registers.
            s = machine.alloc_fragment([rows, block], T.float32)
            ds = machine.alloc_fragment([rows, block], T.float32)
            p = machine.alloc_fragment([rows, block], shape.dtype)
            narrow = machine.alloc_fragment([rows, block], shape.dtype)
            dk_sum = machine.alloc_fragment([rows, d], T.float32)
            dv_sum = machine.alloc_fragment([rows, d_v], T.float32)
            # The first keys have the most queries: heads one after another, of each the longest walk first.
            key0, first = x * rows, window * length
            load(machine, k, first + key0, h, k_tile)
            load(machine, v, first + key0, h, v_tile)
            T.fill(dk_sum, 0)
            T.fill(dv_sum, 0)
            for m in walk(machine, key0 // block, length // block):
                load(machine, q, first + m * block, h, q_tile)
                load(machine, d_out, first + m * block, h, d_out_tile)
                load_rows(machine, lse, first + m * block, h, lse_tile)
                load_rows(machine, delta, first + m * block, h, delta_tile)
                T.gemm(k_tile, q_tile, s, transpose_B=True, clear_accum=True, policy=BY_ROW)
                T.gemm(v_tile, d_out_tile, ds, transpose_B=True, clear_accum=True, policy=BY_ROW)
                for i, j in machine.parallel(rows, block):
                    s[i, j] = T.if_then_else(
                        key0 + i <= m * block + j,
                        s[i, j] * (softmax_scale * LOG2E) - lse_tile[j] * LOG2E,
                        -T.infinity(T.float32),
                    )
                for i, j in machine.parallel(rows, block):
                    s[i, j] = T.exp2(s[i, j])  # by itself: exponentials behind a condition are branches
                T.copy(s, p)
                T.gemm(p, d_out_tile, dv_sum, policy=BY_ROW)
                for i, j in machine.parallel(rows, block):
                    ds[i, j] = s[i, j] * (ds[i, j] - delta_tile[j])
                T.copy(ds, narrow)
                T.gemm(narrow, q_tile, dk_sum, policy=BY_ROW)
            store(machine, dv_sum, dv, first + key0, h)
            for i, c in machine.parallel(rows, d):
                dk_sum[i, c] *= softmax_scale
            store(machine, dk_sum, dk, first + key0, h)

    return key_gradients


def make_query_gradients(shape: GradientShape, *, rows: int = ROWS, machine: Machine = GPU):
    """A TileLang function ``query_gradients``, likewise."""
    (d, d_v), types, block = shape.widths, GradientTypes(shape), min(shape.block(), rows)

    @T.prim_func
    def query_gradients(
        q: types.q, k: types.k, v: types.v, d_out: types.d_out, lse: types.lse, delta: types.delta,
        dq: types.dq, softmax_scale: T.float32, length: T.int32,
    ):  # fmt: skip
        with T.Kernel(
            T.truncdiv(length, rows),
            shape.heads,
            T.truncdiv(types.tokens, length),
            threads=1 if machine.on_cpu else rows // 64 * WARPGROUP,
        ) as (x, h, window):
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
            query0, first = (T.truncdiv(length, rows) - 1 - x) * rows, window * length
            load(machine, q, first + query0, h, q_tile)
            load(machine, d_out, first + query0, h, d_out_tile)
            load_rows(machine, lse, first + query0, h, lse_tile)
            load_rows(machine, delta, first + query0, h, delta_tile)
            T.fill(dq_sum, 0)
            for n in walk(machine, 0, (query0 + rows) // block):
                load(machine, k, first + n * block, h, k_tile)
                load(machine, v, first + n * block, h, v_tile)
                T.gemm(q_tile, k_tile, s, transpose_B=True, clear_accum=True, policy=BY_ROW)
                T.gemm(d_out_tile, v_tile, ds, transpose_B=True, clear_accum=True, policy=BY_ROW)
                for i, j in machine.parallel(rows, block):
                    s[i, j] = T.if_then_else(
                        n * block + j <= query0 + i,
                        s[i, j] * (softmax_scale * LOG2E) - lse_tile[i] * LOG2E,
                        -T.infinity(T.float32),
                    )
                for i, j in machine.parallel(rows, block):
                    s[i, j] = T.exp2(s[i, j])  # by itself: exponentials behind a condition are branches
                for i, j in machine.parallel(rows, block):
                    ds[i, j] = s[i, j] * (ds[i, j] - delta_tile[i])
                T.copy(ds, narrow)
                T.gemm(narrow, k_tile, dq_sum, policy=BY_ROW)
            for i, c in machine.parallel(rows, d):
                dq_sum[i, c] *= softmax_scale
            store(machine, dq_sum, dq, first + query0, h)

    return query_gradients
