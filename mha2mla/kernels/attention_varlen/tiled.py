"""Varlen attention on every GPU from sm_80 on, and on the CPU: plain tiles, guarded loads.

The shape, the arguments, a CTA's rows, masks and the online softmax are shared with ``warp_specialised.py``.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from mha2mla.kernels.machine import BY_ROW, GPU, Buffers, Machine, make_function
from mha2mla.kernels.split_kv.choice import SHARED_MEMORY
from mha2mla.kernels.split_kv.device import LN2, LOG2E


@dataclass(frozen=True)
class VarlenShape:
    """Static part of a call.

    Attributes:
        heads: query heads H.
        widths: columns of each part of a query and a key; the score is the sum of the parts' products.
        key_heads: heads of each part's keys; each divides H.
        value_heads: heads of the values; divides H.
        v_head_dim: d_v.
        causal: a query sees only keys up to its own position, counted from the end.
        dtype: "bfloat16" or "float16".
        windowed: a query sees a window of keys, and sinks, whose sizes are run-time values; causal only.
    """

    heads: int
    widths: tuple[int, ...]
    key_heads: tuple[int, ...]
    value_heads: int
    v_head_dim: int
    causal: bool
    dtype: str
    windowed: bool = False

    parts = property(lambda self: range(len(self.widths)))


def portable_tiling(shape: VarlenShape) -> tuple[int, int]:
    """Query rows and keys of a tile, for the least shared memory of a GPU from sm_80 on."""
    qk = sum(-(-width // 16) * 16 for width in shape.widths)
    for keys in (64, 32, 16):
        if 2 * (64 * qk + keys * (qk + -(-shape.v_head_dim // 16) * 16)) <= min(SHARED_MEMORY.values()):
            break
    return 64, keys


def varlen_arguments(shape: VarlenShape, machine: Machine = GPU) -> dict[str, Any]:
    """Types of the arguments by name: q [T_q,H,d_0], q_pe [T_q,H,d_1], k [T_k,G_0,d_0], k_pe [T_k,G_1,d_1], v
    [T_k,G_v,d_v] (token and head strides at run time, multiples of 8 elements; without a second part q_pe and k_pe are
    q and k again), cu_seqlens_q and cu_seqlens_k [B+1] int32, out [T_q,H,d_v], lse [H,T_q] float32.

    After them softmax_scale float32; row_tiles int32, tiles of rows of the longest query; section int32, heads (counted
    through all sequences) that run before the next ones; window and sinks int32, which only a windowed shape reads.
    Grid: row_tiles * H * B.
    """
    tokens_q, tokens_k, bounds = T.dynamic("tokens_q"), T.dynamic("tokens_k"), T.dynamic("bounds")
    widths, key_heads = (*shape.widths, shape.widths[0]), (*shape.key_heads, shape.key_heads[0])
    return {
        "q": machine.strided("q", [tokens_q, shape.heads, widths[0]], shape.dtype),
        "q_pe": machine.strided("r", [tokens_q, shape.heads, widths[1]], shape.dtype),
        "k": machine.strided("k", [tokens_k, key_heads[0], widths[0]], shape.dtype),
        "k_pe": machine.strided("p", [tokens_k, key_heads[1], widths[1]], shape.dtype),
        "v": machine.strided("v", [tokens_k, shape.value_heads, shape.v_head_dim], shape.dtype),
        "cu_seqlens_q": T.Tensor([bounds], T.int32),
        "cu_seqlens_k": T.Tensor([bounds], T.int32),
        "out": T.Tensor([tokens_q, shape.heads, shape.v_head_dim], shape.dtype),
        "lse": T.Tensor([shape.heads, tokens_q], T.float32),
        "softmax_scale": T.float32(),
        **{name: T.int32() for name in ("row_tiles", "section", "window", "sinks")},
    }


# Fields of ``Rows.span``: TILES that some row sees, FULL ones that every row sees. Under a window TILES are SINK_TILES
# and others, with GAP unread tiles between them, and every row's window begins at or before key IN_WINDOW.
FIRST_QUERY, QUERIES, FIRST_KEY, KEYS, TILES, FULL, SINK_TILES, GAP, IN_WINDOW = range(9)


@dataclass(frozen=True)
class Rows:
    """The query rows of a CTA: those of query head ``head`` from ``row0`` of the sequence on."""

    shape: VarlenShape
    head: Any
    row0: Any
    span: Any

    def key_head(self, part: int):
        return self.head // (self.shape.heads // self.shape.key_heads[part])

    def value_head(self):
        return self.head // (self.shape.heads // self.shape.value_heads)

    def tile(self, n: Any):
        """Index in the sequence of the ``n``-th tile that is read."""
        if not self.shape.windowed:
            return n
        return n + T.if_then_else(n >= self.span[SINK_TILES], self.span[GAP], 0)


@T.macro
def find_rows(shape, rows, block, x, call):
    """:class:`Rows` of CTA ``x``: section by section, whose keys stay in the L2 cache; within one, the last query rows
    of every head first."""
    place = T.alloc_local([4], T.int32)  # section's first head, its heads, tile of rows, head and sequence
    place[0] = T.truncdiv(x, call.section * call.row_tiles) * call.section
    place[1] = T.min(call.section, shape.heads * (call.cu_seqlens_q.shape[0] - 1) - place[0])
    place[2] = call.row_tiles - 1 - T.truncdiv(x - place[0] * call.row_tiles, place[1])
    place[3] = place[0] + T.truncmod(x - place[0] * call.row_tiles, place[1])
    head = place[3] % shape.heads
    span = T.alloc_local([9 if shape.windowed else 6], T.int32)
    span[FIRST_QUERY] = call.cu_seqlens_q[place[3] // shape.heads]
    span[QUERIES] = call.cu_seqlens_q[place[3] // shape.heads + 1] - span[FIRST_QUERY]
    span[FIRST_KEY] = call.cu_seqlens_k[place[3] // shape.heads]
    span[KEYS] = call.cu_seqlens_k[place[3] // shape.heads + 1] - span[FIRST_KEY]
    row0 = place[2] * rows
    if shape.causal:
        span[TILES] = T.max(0, span[KEYS] - span[QUERIES] + T.min(span[QUERIES], row0 + rows))
        span[TILES] = (T.min(span[TILES], span[KEYS]) + block - 1) // block
        span[FULL] = T.max(0, T.min(span[KEYS], span[KEYS] - span[QUERIES] + row0 + 1)) // block
    else:
        span[TILES] = (span[KEYS] + block - 1) // block
        span[FULL] = span[KEYS] // block
    if shape.windowed:
        low = T.max(0, span[KEYS] - span[QUERIES] + row0 + 1 - call.window)  # first key of the first row's window
        span[SINK_TILES] = T.min(span[TILES], (call.sinks + block - 1) // block)
        span[GAP] = T.max(0, low // block - span[SINK_TILES])
        span[TILES] -= span[GAP]
        span[IN_WINDOW] = span[KEYS] - span[QUERIES] + T.min(span[QUERIES], row0 + rows) - call.window
    if row0 >= span[QUERIES]:
        span[TILES] = 0
    return Rows(shape, head, row0, span)


def is_visible(shape: VarlenShape, key: Any, limit: Any, window: Any, sinks: Any):
    """Mask of a row whose first hidden key is ``limit``."""
    if not shape.windowed:
        return key < limit
    return (key < limit) & ((key >= limit - window) | (key < sinks))


def alloc_softmax(machine: Machine, rows: int, block: int, dtype: str) -> Buffers:
    """Registers: scores ``s`` and weights ``p`` of a tile; per row ``row_max``, ``scaled_max``, what is ``subtracted``
    from the scaled scores, the factor ``rescale`` for earlier sums, ``row_sum``, and a tile's ``total``."""
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
def init_softmax(y):
    T.fill(y.row_sum, 0)
    T.fill(y.row_max, -T.infinity(T.float32))
    T.fill(y.scaled_max, -T.infinity(T.float32))


@T.macro
def update_softmax(machine, y, scale):
    """Online softmax over one tile (arXiv 1805.02867): scores become weights. ``scaled_max`` is rounded once: weights,
    row_sum and rescale subtract the same number, so that its rounding cancels."""
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
def finish_softmax(machine, y):
    """``scaled_max`` becomes the log-sum-exp, -inf of no key; ``row_sum`` the factor for the output."""
    for i in machine.parallel(int(y.s.shape[0])):
        y.scaled_max[i] = T.if_then_else(
            y.row_sum[i] == 0, -T.infinity(T.float32), (T.log2(y.row_sum[i]) + y.scaled_max[i]) * LN2
        )
        y.row_sum[i] = 1.0 / T.max(y.row_sum[i], 1e-30)


@T.macro
def load(machine, source, first, last, head, tile):
    """Rows ``first ...`` below ``last``, zeros beyond: a neighbour's NaN stays outside."""
    width, rows, columns = int(source.shape[2]), int(tile.shape[0]), int(tile.shape[1])
    for c in T.serial(columns // 16):  # in pieces: loads of whole rows at once cost registers
        for i, d in machine.parallel(rows, 16):
            tile[i, c * 16 + d] = T.if_then_else(
                (first + i < last) & ((c * 16 + d < width) | (width == columns)),
                source[T.min(first + i, T.max(last - 1, 0)), head, T.min(c * 16 + d, width - 1)],
                T.cast(0, source.dtype),
            )


def make_tiled(shape: VarlenShape, *, block_rows: int = 64, block_keys: int = 64, on_cpu: bool = False):
    """A TileLang function ``attention_varlen_tiled`` for one static shape; batch, tokens and lengths are run-time.

    Args:
        shape: of the call; its dtype is that of the inputs and the output. :func:`varlen_arguments` has the arguments.
        block_rows, block_keys: of a tile; the former is 16 rows a warp.
        on_cpu: compile for TileLang's C target.
    """
    machine = Machine(on_cpu)
    rows, block, parallel = block_rows, block_keys, machine.parallel
    columns = [-(-width // 16) * 16 for width in shape.widths]
    v_columns = -(-shape.v_head_dim // 16) * 16

    arguments = varlen_arguments(shape, machine)
    batch = arguments["cu_seqlens_q"].shape[0] - 1

    @T.macro
    def body(call):
        with T.Kernel(call.row_tiles * shape.heads * batch, threads=1 if on_cpu else rows // 16 * 32) as x:
            q_tiles = [machine.alloc_shared([rows, columns[part]], shape.dtype) for part in shape.parts]
            k_tiles = [machine.alloc_shared([block, columns[part]], shape.dtype) for part in shape.parts]
            v_tile = machine.alloc_shared([block, v_columns], shape.dtype)
            y = alloc_softmax(machine, rows, block, shape.dtype)
            o = machine.alloc_fragment([rows, v_columns], T.float32)
            limit = machine.alloc_fragment([rows], T.int32)  # first key that a row does not see
            sources = [(call.q, call.k), (call.q_pe, call.k_pe)]
            scale = call.softmax_scale * LOG2E
            here = find_rows(shape, rows, block, x, call)
            span, row0, h = here.span, here.row0, here.head
            first = span[FIRST_QUERY] + row0
            last_key = span[FIRST_KEY] + span[KEYS]
            if row0 < span[QUERIES]:
                for part in list(shape.parts):
                    load(machine, sources[part][0], first, span[FIRST_QUERY] + span[QUERIES], h, q_tiles[part])
                T.fill(o, 0)
                init_softmax(y)
                for i in parallel(rows):
                    if shape.causal:
                        limit[i] = T.min(span[KEYS], span[KEYS] - span[QUERIES] + row0 + i + 1)
                    else:
                        limit[i] = span[KEYS]
                for n in T.serial(span[TILES]):
                    t0 = here.tile(n) * block
                    T.sync_threads()
                    for part in list(shape.parts):
                        load(
                            machine, sources[part][1], span[FIRST_KEY] + t0, last_key, here.key_head(part),
                            k_tiles[part],
                        )  # fmt: skip
                    load(machine, call.v, span[FIRST_KEY] + t0, last_key, here.value_head(), v_tile)
                    T.sync_threads()
                    for part in list(shape.parts):
                        T.gemm(
                            q_tiles[part], k_tiles[part], y.s, transpose_B=True, clear_accum=part == 0, policy=BY_ROW
                        )
                    for i, j in parallel(rows, block):
                        y.s[i, j] = T.if_then_else(
                            is_visible(shape, t0 + j, limit[i], call.window, call.sinks),
                            y.s[i, j],
                            -T.infinity(T.float32),
                        )
                    update_softmax(machine, y, scale)
                    for i, d in parallel(rows, v_columns):
                        o[i, d] *= y.rescale[i]
                    T.copy(y.s, y.p)
                    T.gemm(y.p, v_tile, o, policy=BY_ROW)
                finish_softmax(machine, y)
                for i in parallel(rows):
                    if row0 + i < span[QUERIES]:
                        call.lse[h, first + i] = y.scaled_max[i]
                for i, d in parallel(rows, v_columns):
                    if (row0 + i < span[QUERIES]) & (d < shape.v_head_dim):
                        call.out[first + i, h, d] = o[i, d] * y.row_sum[i]

    return make_function("attention_varlen_tiled", arguments, body)
