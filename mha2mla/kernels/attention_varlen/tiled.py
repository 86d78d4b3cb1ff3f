"""Varlen attention anywhere from sm_80 on: plain tiles, loads that guard themselves; also runs on the CPU."""

import tilelang.language as T

from mha2mla.kernels.attention_varlen.rows import (
    FIRST_KEY,
    FIRST_QUERY,
    KEYS,
    QUERIES,
    TILES,
    VarlenTypes,
    begin,
    find_place,
    find_weights,
    finish,
    is_visible,
    new_rows,
)
from mha2mla.kernels.attention_varlen.tiling import VarlenShape
from mha2mla.kernels.machine import BY_ROW, Machine
from mha2mla.kernels.split_kv.call import LOG2E


@T.macro
def load(machine, source, first, last, head, tile):
    """Rows ``first ...`` below ``last``; zeros beyond them, so that nobody else's NaN comes in."""
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
        shape: of the call; its dtype is that of the inputs and the output. :class:`VarlenTypes` has the arguments.
        block_rows, block_keys: of a tile; the former is 16 rows a warp.
        on_cpu: compile for TileLang's C target.
    """
    machine = Machine(on_cpu)
    types = VarlenTypes(shape, machine)
    rows, block, parallel = block_rows, block_keys, machine.parallel
    columns = [-(-width // 16) * 16 for width in shape.widths]
    v_columns = -(-shape.v_head_dim // 16) * 16

    @T.prim_func
    def attention_varlen_tiled(
        q: types.q, q_pe: types.q_pe, k: types.k, k_pe: types.k_pe, v: types.v, cu_seqlens_q: types.cu_seqlens_q,
        cu_seqlens_k: types.cu_seqlens_k, out: types.out, lse: types.lse, softmax_scale: T.float32,
        row_tiles: T.int32, section: T.int32, window: T.int32, sinks: T.int32,
    ):  # fmt: skip
        with T.Kernel(row_tiles * shape.heads * (types.bounds - 1), threads=1 if on_cpu else rows // 16 * 32) as x:
            q_tiles = [machine.alloc_shared([rows, columns[part]], shape.dtype) for part in shape.parts]
            k_tiles = [machine.alloc_shared([block, columns[part]], shape.dtype) for part in shape.parts]
            v_tile = machine.alloc_shared([block, v_columns], shape.dtype)
            y = new_rows(machine, rows, block, shape.dtype)
            o = machine.alloc_fragment([rows, v_columns], T.float32)
            limit = machine.alloc_fragment([rows], T.int32)  # first key that a row does not see
            sources = [(q, k), (q_pe, k_pe)]
            scale = softmax_scale * LOG2E
            place = find_place(
                shape, rows, block, x, types.bounds, cu_seqlens_q, cu_seqlens_k, row_tiles, section, window, sinks
            )  # fmt: skip
            span, row0, h = place.span, place.row0, place.head
            first = span[FIRST_QUERY] + row0
            last_key = span[FIRST_KEY] + span[KEYS]
            if row0 < span[QUERIES]:
                for part in list(shape.parts):
                    load(machine, sources[part][0], first, span[FIRST_QUERY] + span[QUERIES], h, q_tiles[part])
                T.fill(o, 0)
                begin(y)
                for i in parallel(rows):
                    if shape.causal:
                        limit[i] = T.min(span[KEYS], span[KEYS] - span[QUERIES] + row0 + i + 1)
                    else:
                        limit[i] = span[KEYS]
                for n in T.serial(span[TILES]):
                    t0 = place.tile(n) * block
                    T.sync_threads()
                    for part in list(shape.parts):
                        load(
                            machine, sources[part][1], span[FIRST_KEY] + t0, last_key, place.key_head(part),
                            k_tiles[part],
                        )  # fmt: skip
                    load(machine, v, span[FIRST_KEY] + t0, last_key, place.value_head(), v_tile)
                    T.sync_threads()
                    for part in list(shape.parts):
                        T.gemm(
                            q_tiles[part], k_tiles[part], y.s, transpose_B=True, clear_accum=part == 0, policy=BY_ROW
                        )
                    for i, j in parallel(rows, block):
                        y.s[i, j] = T.if_then_else(
                            is_visible(shape, t0 + j, limit[i], window, sinks), y.s[i, j], -T.infinity(T.float32)
                        )
                    find_weights(machine, y, scale)
                    for i, d in parallel(rows, v_columns):
                        o[i, d] *= y.rescale[i]
                    T.copy(y.s, y.p)
                    T.gemm(y.p, v_tile, o, policy=BY_ROW)
                finish(machine, y)
                for i in parallel(rows):
                    if row0 + i < span[QUERIES]:
                        lse[h, first + i] = y.scaled_max[i]
                for i, d in parallel(rows, v_columns):
                    if (row0 + i < span[QUERIES]) & (d < shape.v_head_dim):
                        out[first + i, h, d] = o[i, d] * y.row_sum[i]

    return attention_varlen_tiled
