"""Shared by both varlen kernels: their arguments, the query rows of a CTA, and the softmax of a tile."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from mha2mla.kernels.attention_varlen.tiling import VarlenShape
from mha2mla.kernels.machine import GPU, Buffers, Machine
from mha2mla.kernels.split_kv.call import LN2


class VarlenTypes:
    """Types of the tensors: q [T_q,H,d_0], q_pe [T_q,H,d_1], k [T_k,G_0,d_0], k_pe [T_k,G_1,d_1], v [T_k,G_v,d_v]
    (token and head strides at run time, multiples of 8 elements; without a second part q_pe and k_pe are q and k
    again), cu_seqlens_q and cu_seqlens_k [B+1] int32, out [T_q,H,d_v], lse [H,T_q] float32.

    After them a kernel takes softmax_scale float32; row_tiles int32, tiles of rows that the longest query has; section
    int32, how many heads (of all sequences, counted through) are worked on before the next ones; window and sinks
    int32, which only a windowed shape reads. Grid: row_tiles * H * B.
    """

    def __init__(self, shape: VarlenShape, machine: Machine = GPU):
        tokens_q, tokens_k, self.bounds = T.dynamic("tokens_q"), T.dynamic("tokens_k"), T.dynamic("bounds")
        widths, key_heads = (*shape.widths, shape.widths[0]), (*shape.key_heads, shape.key_heads[0])
        self.q = machine.strided("q", [tokens_q, shape.heads, widths[0]], shape.dtype)
        self.q_pe = machine.strided("r", [tokens_q, shape.heads, widths[1]], shape.dtype)
        self.k = machine.strided("k", [tokens_k, key_heads[0], widths[0]], shape.dtype)
        self.k_pe = machine.strided("p", [tokens_k, key_heads[1], widths[1]], shape.dtype)
        self.v = machine.strided("v", [tokens_k, shape.value_heads, shape.v_head_dim], shape.dtype)
        self.cu_seqlens_q = T.Tensor([self.bounds], T.int32)
        self.cu_seqlens_k = T.Tensor([self.bounds], T.int32)
        self.out = T.Tensor([tokens_q, shape.heads, shape.v_head_dim], shape.dtype)
        self.lse = T.Tensor([shape.heads, tokens_q], T.float32)


# Fields of a span; TILES that some row sees, FULL that every row sees. Under a window the former are SINK_TILES and
# others, with GAP tiles between them that are not read, and every row's window begins at or before key IN_WINDOW.
FIRST_QUERY, QUERIES, FIRST_KEY, KEYS, TILES, FULL, SINK_TILES, GAP, IN_WINDOW = range(9)


@dataclass(frozen=True)
class Place:
    """The rows of a CTA: those of query head ``head`` from ``row0`` of the sequence on; ``span`` as above."""

    shape: VarlenShape
    head: Any
    row0: Any
    span: Any

    def key_head(self, part: int):
        return self.head // (self.shape.heads // self.shape.key_heads[part])

    def value_head(self):
        return self.head // (self.shape.heads // self.shape.value_heads)

    def tile(self, attended: Any):
        """Tile of the keys that is the ``attended``-th of those read, from the first."""
        if not self.shape.windowed:
            return attended
        return attended + T.if_then_else(attended >= self.span[SINK_TILES], self.span[GAP], 0)


@T.macro
def find_place(shape, rows, block, x, bounds, cu_seqlens_q, cu_seqlens_k, row_tiles, section, window, sinks):
    """The :class:`Place` of CTA ``x``: sections of heads whose keys stay in the L2 cache; within one, the last query
    rows of every head first."""
    place = T.alloc_local([4], T.int32)  # section's first head, its heads, tile of rows, head and sequence
    place[0] = T.truncdiv(x, section * row_tiles) * section
    place[1] = T.min(section, shape.heads * (bounds - 1) - place[0])
    place[2] = row_tiles - 1 - T.truncdiv(x - place[0] * row_tiles, place[1])
    place[3] = place[0] + T.truncmod(x - place[0] * row_tiles, place[1])
    head = place[3] % shape.heads
    span = T.alloc_local([9 if shape.windowed else 6], T.int32)
    span[FIRST_QUERY] = cu_seqlens_q[place[3] // shape.heads]
    span[QUERIES] = cu_seqlens_q[place[3] // shape.heads + 1] - span[FIRST_QUERY]
    span[FIRST_KEY] = cu_seqlens_k[place[3] // shape.heads]
    span[KEYS] = cu_seqlens_k[place[3] // shape.heads + 1] - span[FIRST_KEY]
    row0 = place[2] * rows
    if shape.causal:
        span[TILES] = T.max(0, span[KEYS] - span[QUERIES] + T.min(span[QUERIES], row0 + rows))
        span[TILES] = (T.min(span[TILES], span[KEYS]) + block - 1) // block
        span[FULL] = T.max(0, T.min(span[KEYS], span[KEYS] - span[QUERIES] + row0 + 1)) // block
    else:
        span[TILES] = (span[KEYS] + block - 1) // block
        span[FULL] = span[KEYS] // block
    if shape.windowed:
        low = T.max(0, span[KEYS] - span[QUERIES] + row0 + 1 - window)  # first key of the first row's window
        span[SINK_TILES] = T.min(span[TILES], (sinks + block - 1) // block)
        span[GAP] = T.max(0, low // block - span[SINK_TILES])
        span[TILES] -= span[GAP]
        span[IN_WINDOW] = span[KEYS] - span[QUERIES] + T.min(span[QUERIES], row0 + rows) - window
    if row0 >= span[QUERIES]:
        span[TILES] = 0
    return Place(shape, head, row0, span)


def is_visible(shape: VarlenShape, key: Any, limit: Any, window: Any, sinks: Any):
    """True where a row that sees no key from ``limit`` on sees ``key``."""
    if not shape.windowed:
        return key < limit
    return (key < limit) & ((key >= limit - window) | (key < sinks))


def new_rows(machine: Machine, rows: int, block: int, dtype: str) -> Buffers:
    """Registers: scores ``s`` and weights ``p`` of a tile; of each row ``row_max``, ``scaled_max``,
    ``subtracted`` from the scaled scores, the factor ``rescale`` for earlier sums, and ``row_sum``.
    """
    return Buffers(
        s=machine.alloc_fragment([rows, block], T.float32),
        p=machine.alloc_fragment([rows, block], dtype),
        row_max=machine.alloc_fragment([rows], T.float32),
        scaled_max=machine.alloc_fragment([rows], T.float32),
        subtracted=machine.alloc_fragment([rows], T.float32),
        rescale=machine.alloc_fragment([rows], T.float32),
        row_sum=machine.alloc_fragment([rows], T.float32),
        total=machine.alloc_fragment([rows], T.float32),
    )


@T.macro
def begin(y):
    T.fill(y.row_sum, 0)
    T.fill(y.row_max, -T.infinity(T.float32))
    T.fill(y.scaled_max, -T.infinity(T.float32))


@T.macro
def find_weights(machine, y, scale):
    """Online softmax over one tile (arXiv 1805.02867). ``scaled_max`` is rounded once: weights, denominator
    and rescaling subtract the same number, so that its rounding cancels."""
    rows, block = int(y.s.shape[0]), int(y.s.shape[1])
    T.reduce_max(y.s, y.row_max, dim=1, clear=False)
    for i in machine.parallel(rows):
        y.rescale[i] = y.scaled_max[i]
        y.scaled_max[i] = y.row_max[i] * scale
        y.subtracted[i] = T.if_then_else(y.row_max[i] == -T.infinity(T.float32), 0.0, y.scaled_max[i])
        y.rescale[i] = T.exp2(y.rescale[i] - y.subtracted[i])
    for i, j in machine.parallel(rows, block):
        y.s[i, j] = T.exp2(y.s[i, j] * scale - y.subtracted[i])
    T.reduce_sum(y.s, y.total, dim=1)
    for i in machine.parallel(rows):
        y.row_sum[i] = y.row_sum[i] * y.rescale[i] + y.total[i]


@T.macro
def finish(machine, y):
    """``scaled_max`` becomes the log-sum-exp, -inf of nothing, ``row_sum`` the factor for the output."""
    for i in machine.parallel(int(y.s.shape[0])):
        y.scaled_max[i] = T.if_then_else(
            y.row_sum[i] == 0, -T.infinity(T.float32), (T.log2(y.row_sum[i]) + y.scaled_max[i]) * LN2
        )
        y.row_sum[i] = 1.0 / T.max(y.row_sum[i], 1e-30)
