"""MLA decode kernels that run everywhere, pipelined by the compiler: heads on the N side of the matrix instruction.

``S^T[tokens, rows] = C Q^T`` (+ rope scores) and ``O^T[d_c, rows] += C^T P^T`` take both operands from one tile of the
latent cache, so a handful of heads needs no padding to the 64 rows of a Hopper matrix instruction. The same body is
compiled for sm_90 (wgmma, TMA), for sm_80 and newer (mma, cp.async) and, unpipelined on one thread, for the CPU.

``latent_portable`` makes rotary keys of each tile of a cache of the latent alone: ``K = C W_KR^T + b_KR`` in two
products, for the first and the second elements of all pairs, which lie alike in registers and are rotated there. W_KR
stays in shared memory where it fits ("resident"), and is else fetched by 64 columns, every step again ("streamed").
``int8_keys_portable`` adds the rotated bias to int8 keys in the same layout.
"""

from dataclasses import dataclass

import tilelang.language as T
from tilelang import tvm

from mha2mla.kernels.machine import BY_ROW, GPU, Buffers, Machine
from mha2mla.kernels.mla_decode.selection import DecodeShape, padded_latent_columns, padded_rope_columns
from mha2mla.kernels.mla_decode.static import (
    GROUP,
    MLAStatic,
    MLATypes,
    Turn,
    find_scaled_turn,
    find_turn,
    load_rope_queries,
    position_of,
)
from mha2mla.kernels.split_kv import device, softmax
from mha2mla.kernels.split_kv.choice import TILE_TOKENS, KernelChoice

BY_COLUMN = T.GemmWarpPolicy.FullCol
PIECE = 64  # columns of W_KR that are loaded at a time


@dataclass(frozen=True)
class Static(MLAStatic):
    machine: Machine = GPU

    makes_keys, adds_codes = False, False  # rotary keys are made: of latents, or of int8 codes

    block = property(lambda k: k.choice.block_tokens)  # cached tokens a step
    latent_cols = property(lambda k: padded_latent_columns(k.d_c, k.choice.threads))
    rope_cols = property(lambda k: padded_rope_columns(k.tiling.groups_per_tile * k.d_r))
    # In score products 256 threads split heads over two warpgroups, in output products d_c.
    policy = property(lambda k: BY_COLUMN if k.choice.threads > 128 else BY_ROW)

    def latent_source(self, call, memory):
        """Arguments of ``load_tiles``."""
        return (device.copy_tile, call.latent_cache, (), 0, memory.c_tile)


def allocate(k: Static) -> Buffers:
    """Shared memory of a CTA, and the output with its rows' maxima in a layout of its own."""
    rows, shared, fragment = k.tiling.rows, k.machine.alloc_shared, k.machine.alloc_fragment
    return Buffers(
        q_tile=shared([rows, k.latent_cols], k.dtype),
        qp_tile=shared([rows, k.rope_cols], k.dtype),
        c_tile=shared([k.block, k.latent_cols], k.dtype),
        k_tile=shared([k.block, k.rope_cols], k.dtype),
        p_tile=shared([k.block, rows], k.dtype),
        stage=shared([k.block // 16, rows], T.float32),
        o=fragment([k.latent_cols, rows], T.float32),
        o_row_max=fragment([rows], T.float32),
        o_new_max=fragment([rows], T.float32),
        o_rescale=fragment([rows], T.float32),
        holes=T.alloc_local([max(1, k.block // k.page_size) + 1], T.int32),
    )


@T.macro
def attend(k, t0, work, memory, x):
    """Scores, softmax and output of one step."""
    T.gemm(memory.c_tile, memory.q_tile, x.s, transpose_B=True, clear_accum=True, policy=k.policy)
    T.gemm(memory.k_tile, memory.qp_tile, x.s, transpose_B=True, policy=k.policy)
    softmax.apply_mask(x, work, t0)
    softmax.reduce_row_max(x, guarded=False)
    softmax.update_row_max(x, memory.o_row_max, memory.o_new_max)
    softmax.find_rescale(x)
    for j in x.parallel(k.tiling.rows):
        memory.o_rescale[j] = T.exp2((memory.o_row_max[j] - memory.o_new_max[j]) * x.scale)
        memory.o_row_max[j] = memory.o_new_max[j]
    softmax.find_weights(x)
    T.copy(x.s, memory.p_tile)
    softmax.add_weights(x)
    for d, j in x.parallel(k.latent_cols, k.tiling.rows):
        memory.o[d, j] *= memory.o_rescale[j]
    T.gemm(memory.c_tile, memory.p_tile, memory.o, transpose_A=True, policy=BY_ROW)


@T.macro
def decode(k, types, call, memory, y, cta):
    """All fragments of a CTA."""
    tile = device.locate(types, k.tiling, y, k.d_r)
    work = device.take_work(call, cta, k.page_size, k.block)  # no pdl_trigger: there is none before sm_90
    x = softmax.make_softmax(k.machine, call, tile, k.block, k.tiling.rows, memory.stage, (), T.sync_threads)
    sources = [k.latent_source(call, memory)]
    if k.makes_keys:
        prepare_keys(k, call, memory)
    else:
        sources.append((device.copy_tile, call.rope_cache, (), tile.column, memory.k_tile))
    steps = TILE_TOKENS // k.block  # per tile of the schedule
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        T.sync_threads()
        for c in list(range(0, k.latent_cols, 64)):
            device.load_queries(k.machine, work, tile, call.q_latent, memory.q_tile, c, 64)
        load_rope_queries(k, k.machine, work, tile, call.q_pe, memory.qp_tile, 0, k.tiling.rows, 0, k.rope_cols)
        T.fill(memory.o, 0)
        T.fill(memory.o_row_max, device.MASKED)
        softmax.begin(x, work)
        for i in T.serial(work.tiles * steps):
            t0 = work.first_token(i // steps) + i % steps * k.block
            device.load_tiles(k.machine, work, t0, sources, memory.c_tile, memory.holes, types.num_pages)
            if k.makes_keys:
                make_keys(k, t0, work, call, memory)
            attend(k, t0, work, memory, x)
        softmax.finish(x, memory.o_row_max)
        device.store(call, work, softmax.write_columns, x, memory.o, x.row_sum, memory.o_row_max)


def make_swap_ab(shape: DecodeShape, choice: KernelChoice, machine: Machine = GPU):
    """A TileLang function ``mla_decode_swap_ab``; :class:`MLATypes` has its arguments."""
    return _make(Static(shape, choice, machine), MLATypes(shape, machine), allocate)


def _make(k: Static, types: MLATypes, allocate):
    @T.macro
    def body(call):
        with T.Kernel(k.tiling.num_tiles, types.num_ctas, threads=k.choice.threads) as (y, cta):
            memory = allocate(k)
            decode(k, types, call, memory, y, cta)

    return types.make(k.choice.kernel, body)


class LatentStatic(Static):
    makes_keys = True
    pairs = property(lambda k: k.d_r // 2)
    half = property(lambda k: padded_rope_columns(k.pairs))  # columns of all pairs' first elements; the second follow
    rope_cols = property(lambda k: 2 * k.half)
    # Columns of W_KR in shared memory at a time.
    weight_cols = property(lambda k: k.latent_cols if k.choice.variant == "resident" else PIECE)

    def rope_dim(self, column):
        return column // self.half * self.pairs + T.min(column % self.half, self.pairs - 1)

    def meets(self, row, column):
        return column % self.half < self.pairs


def allocate_latent(k: LatentStatic) -> Buffers:
    """:func:`allocate`, and operands of keys: W_KR's rows, its bias, cos and sin of first tokens and places."""
    memory, shared = allocate(k), k.machine.alloc_shared
    memory = Buffers(
        **vars(memory),
        w_tile=[shared([k.half, k.weight_cols], k.dtype) for _ in range(0 if k.adds_codes else 2)],
        bias=shared([2, k.half], T.float32),
        first=shared([2, k.block // GROUP, k.half], T.float32),
        place=shared([2, GROUP, k.half], T.float32),
        raw=[k.machine.alloc_fragment([k.block, k.half], T.float32) for _ in range(2)],
    )
    memory.turn = Turn()
    return memory


@T.macro
def load_weight(k, call, memory, left, at):
    """64 columns of W_KR from ``left`` on, zeros behind its width and for pairs that there are not; ``at``: where they
    stand. More at once would spill registers."""
    for u in list(range(2)):
        for j, d in k.machine.parallel(k.half, PIECE):
            memory.w_tile[u][j, at + d] = T.if_then_else(
                tvm.tirx.And(j < k.pairs, left + d < k.d_c),
                call.rope_weight[u * k.pairs + T.min(j, k.pairs - 1), T.min(left + d, k.d_c - 1)],
                T.cast(0, k.dtype),
            )


@T.macro
def prepare_keys(k, call, memory):
    """Once for all tiles: the bias, cos and sin of places, W_KR where it is resident."""
    turn = memory.turn
    for u in list(range(2)):
        for j in k.machine.parallel(k.half):
            memory.bias[u, j] = T.if_then_else(
                j < k.pairs, T.cast(call.rope_bias[u * k.pairs + T.min(j, k.pairs - 1)], T.float32), 0.0
            )
    for i, j in k.machine.parallel(GROUP, k.half):
        find_turn(turn, i, call.inv_freq[T.min(j, k.pairs - 1)])
        memory.place[0, i, j] = turn.cos[0]
        memory.place[1, i, j] = turn.sin[0]
    if not k.adds_codes and k.weight_cols == k.latent_cols:
        for c in list(range(0, k.latent_cols, PIECE)):
            load_weight(k, call, memory, c, c)


@T.macro
def read_codes(k, t0, work, call, memory):
    """Kept keys of the tile, dequantised, as ``raw``; zeros of tokens without a page."""
    tokens = k.block // len(work.pieces)
    first = t0 % k.page_size if len(work.pieces) == 1 else 0
    for u in work.pieces:
        for e in list(range(2)):
            for i, j in k.machine.parallel(tokens, k.half):
                memory.raw[e][u * tokens + i, j] = T.if_then_else(
                    memory.holes[u] > 0,
                    0.0,
                    T.cast(call.rope_cache[work.pages[u], first + i, e * k.pairs + T.min(j, k.pairs - 1)], T.float32)
                    * call.rope_scale[work.pages[u], first + i],
                )


@T.macro
def multiply_weight(k, call, memory):
    for u in list(range(2)):
        T.fill(memory.raw[u], 0)
    if k.weight_cols == k.latent_cols:
        for u in list(range(2)):
            T.gemm(memory.c_tile, memory.w_tile[u], memory.raw[u], transpose_B=True, policy=k.policy)
    else:
        for c in list(range(0, k.latent_cols, k.weight_cols)):
            T.sync_threads()
            load_weight(k, call, memory, c, 0)
            T.sync_threads()
            for u in list(range(2)):
                T.gemm(
                    memory.c_tile[:, c : c + k.weight_cols], memory.w_tile[u], memory.raw[u], transpose_B=True,
                    policy=k.policy,
                )  # fmt: skip


@T.macro
def make_keys(k, t0, work, call, memory):
    """The rotary keys of the tile, as ``k_tile``."""
    turn = memory.turn
    for a, j in k.machine.parallel(k.block // GROUP, k.half):
        find_scaled_turn(
            turn, position_of(call, work, t0 + a * GROUP), call.inv_freq[T.min(j, k.pairs - 1)], call.scaling
        )
        memory.first[0, a, j] = turn.cos[0]
        memory.first[1, a, j] = turn.sin[0]
    if k.adds_codes:
        read_codes(k, t0, work, call, memory)
    else:
        multiply_weight(k, call, memory)
    T.sync_threads()
    for i, j in k.machine.parallel(k.block, k.half):
        cos = memory.first[0, i // GROUP, j] * memory.place[0, i % GROUP, j] - (
            memory.first[1, i // GROUP, j] * memory.place[1, i % GROUP, j]
        )
        sin = memory.first[1, i // GROUP, j] * memory.place[0, i % GROUP, j] + (
            memory.first[0, i // GROUP, j] * memory.place[1, i % GROUP, j]
        )
        if k.adds_codes:
            memory.k_tile[i, j] = memory.raw[0][i, j] + memory.bias[0, j] * cos - memory.bias[1, j] * sin
            memory.k_tile[i, k.half + j] = memory.raw[1][i, j] + memory.bias[1, j] * cos + memory.bias[0, j] * sin
        else:
            one = memory.raw[0][i, j] + memory.bias[0, j]
            two = memory.raw[1][i, j] + memory.bias[1, j]
            memory.k_tile[i, j] = one * cos - two * sin
            memory.k_tile[i, k.half + j] = two * cos + one * sin
    T.sync_threads()


def make_latent_portable(shape: DecodeShape, choice: KernelChoice, machine: Machine = GPU):
    """A TileLang function ``mla_decode_latent_portable``; :class:`MLATypes` has its arguments, without a rope_cache."""
    return _make(LatentStatic(shape, choice, machine), MLATypes(shape, machine, has_rope_cache=False), allocate_latent)


class CodesStatic(LatentStatic):
    adds_codes = True


def make_int8_keys_portable(shape: DecodeShape, choice: KernelChoice, machine: Machine = GPU):
    """A TileLang function ``mla_decode_int8_keys_portable``; :class:`MLATypes` has its arguments."""
    return _make(CodesStatic(shape, choice, machine), MLATypes(shape, machine, key_codes=True), allocate_latent)
