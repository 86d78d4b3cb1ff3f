"""MLA decode over a cache of the latent alone, pipelined by the compiler: the path that runs everywhere.

``swap_ab`` with rotary keys made of each tile of the latent: ``K = C W_KR^T + b_KR`` in two products, for the first and
the second numbers of all pairs, which lie alike in registers then and are turned there. W_KR stays in shared memory
where it fits, and is else fetched by 64 columns, every step again.
"""

from dataclasses import dataclass

import tilelang.language as T
from tilelang import tvm

from mha2mla.kernels.machine import GPU, Buffers, Machine
from mha2mla.kernels.mla_decode import swap_ab
from mha2mla.kernels.mla_decode.selection import DecodeShape, padded_latent_columns, padded_rope_columns
from mha2mla.kernels.mla_decode.static import (
    GROUP,
    Keys,
    LatentTypes,
    Turn,
    find_scaled_turn,
    find_turn,
    load_rope_queries,
)
from mha2mla.kernels.split_kv import softmax
from mha2mla.kernels.split_kv.call import (
    FRAGMENTS,
    LOG2E,
    MASKED,
    Call,
    first_token,
    has_masked,
    locate,
    read_fragment,
    store,
    take_work,
)
from mha2mla.kernels.split_kv.schedule import TILE_TOKENS, TILES
from mha2mla.kernels.split_kv.softmax import Softmax, write_columns, zero_masked
from mha2mla.kernels.split_kv.stream import clear_holes, copy_tile, find_present_pages, load_queries


@dataclass(frozen=True)
class Static(swap_ab.Static):
    half: int  # columns of the first numbers of all pairs, and of the second ones behind them
    weight_cols: int  # of W_KR in shared memory at a time

    @property
    def pairs(self) -> int:
        return self.d_r // 2

    def rope_dim(self, column):
        return column // self.half * self.pairs + T.min(column % self.half, self.pairs - 1)

    def meets(self, row, column):
        return column % self.half < self.pairs


def static_of(shape: DecodeShape, choice, machine: Machine) -> Static:
    latent_cols = padded_latent_columns(shape.kv_lora_rank, choice.threads)
    half = padded_rope_columns(shape.qk_rope_head_dim // 2)
    weight_cols = latent_cols if choice.variant == "resident" else 64
    return Static(shape, choice, machine, choice.block_tokens, choice.threads, latent_cols, 2 * half, half, weight_cols)


def allocate(k: Static) -> Buffers:
    """Same as ``swap_ab``, and the operands of keys: W_KR's rows, its bias, cos and sin of first tokens and places."""
    memory, shared = swap_ab.allocate(k), k.machine.alloc_shared
    return Buffers(
        **vars(memory),
        w_tile=[shared([k.half, k.weight_cols], k.dtype) for _ in range(2)],
        bias=shared([2, k.half], T.float32),
        first=shared([2, k.block // GROUP, k.half], T.float32),
        place=shared([2, GROUP, k.half], T.float32),
        raw=[k.machine.alloc_fragment([k.block, k.half], T.float32) for _ in range(2)],
    )


@T.macro
def load_weight(k, keys, memory, left):
    """``weight_cols`` columns of W_KR from ``left`` on, zeros behind its width and for pairs that there are not."""
    for u in list(range(2)):
        for j, d in k.machine.parallel(k.half, k.weight_cols):
            memory.w_tile[u][j, d] = T.if_then_else(
                tvm.tirx.And(j < k.pairs, left + d < k.d_c),
                keys.weight[u * k.pairs + T.min(j, k.pairs - 1), T.min(left + d, k.d_c - 1)],
                T.cast(0, k.dtype),
            )


@T.macro
def prepare(k, keys, memory, x):
    """Once for all tiles."""
    for u in list(range(2)):
        for j in k.machine.parallel(k.half):
            memory.bias[u, j] = T.if_then_else(
                j < k.pairs, T.cast(keys.bias[u * k.pairs + T.min(j, k.pairs - 1)], T.float32), 0.0
            )
    for i, j in k.machine.parallel(GROUP, k.half):
        find_turn(x, i, keys.inv_freq[T.min(j, k.pairs - 1)])
        memory.place[0, i, j] = x.cos[0]
        memory.place[1, i, j] = x.sin[0]
    if k.weight_cols == k.latent_cols:
        load_weight(k, keys, memory, 0)


@T.macro
def load_step(k, t0, work, latent_cache, num_pages, memory):
    T.sync_threads()
    find_present_pages(work, t0, num_pages, memory.holes)
    copy_tile(work, t0, latent_cache, (), 0, memory.c_tile)
    T.sync_threads()
    if has_masked(work.span, t0, k.block):
        zero_masked(k.machine, work.span, t0, k.block, range(0, k.latent_cols, 64), memory.c_tile)
        T.sync_threads()
    clear_holes(k.machine, work, memory.holes, [memory.c_tile])


@T.macro
def make_keys(k, t0, work, keys, memory, x):
    """The rotary keys of the tile, as ``k_tile``."""
    policy = swap_ab.BY_COLUMN if k.threads > 128 else swap_ab.BY_ROW
    for a, j in k.machine.parallel(k.block // GROUP, k.half):
        find_scaled_turn(x, keys.position(work, t0 + a * GROUP), keys.inv_freq[T.min(j, k.pairs - 1)], keys.scaling)
        memory.first[0, a, j] = x.cos[0]
        memory.first[1, a, j] = x.sin[0]
    for u in list(range(2)):
        T.fill(memory.raw[u], 0)
    if k.weight_cols == k.latent_cols:
        for u in list(range(2)):
            T.gemm(memory.c_tile, memory.w_tile[u], memory.raw[u], transpose_B=True, policy=policy)
    else:
        for c in list(range(0, k.latent_cols, k.weight_cols)):
            T.sync_threads()
            load_weight(k, keys, memory, c)
            T.sync_threads()
            for u in list(range(2)):
                T.gemm(
                    memory.c_tile[:, c : c + k.weight_cols], memory.w_tile[u], memory.raw[u], transpose_B=True,
                    policy=policy,
                )  # fmt: skip
    T.sync_threads()
    for i, j in k.machine.parallel(k.block, k.half):
        cos = memory.first[0, i // GROUP, j] * memory.place[0, i % GROUP, j] - (
            memory.first[1, i // GROUP, j] * memory.place[1, i % GROUP, j]
        )
        sin = memory.first[1, i // GROUP, j] * memory.place[0, i % GROUP, j] + (
            memory.first[0, i // GROUP, j] * memory.place[1, i % GROUP, j]
        )
        one = memory.raw[0][i, j] + memory.bias[0, j]
        two = memory.raw[1][i, j] + memory.bias[1, j]
        memory.k_tile[i, j] = one * cos - two * sin
        memory.k_tile[i, k.half + j] = two * cos + one * sin
    T.sync_threads()


def make_latent_portable(shape: DecodeShape, choice, machine: Machine = GPU):
    """A TileLang function ``mla_decode_latent_portable``; :class:`LatentTypes` has its arguments."""
    k, types = static_of(shape, choice, machine), LatentTypes(shape, machine)
    steps = TILE_TOKENS // k.block  # per tile of the schedule

    @T.prim_func
    def mla_decode_latent_portable(
        q_latent: types.q_latent, q_pe: types.q_pe, latent_cache: types.latent_cache, rope_weight: types.rope_weight,
        rope_bias: types.rope_bias, inv_freq: types.inv_freq, page_offsets: types.page_offsets,
        block_table: types.block_table, schedule: types.schedule, partial_out: types.partial_out,
        partial_lse: types.partial_lse, out: types.out, lse: types.lse, softmax_scale: T.float32, causal: T.int32,
        window: T.int32, sinks: T.int32, scaling: T.float32, has_offsets: T.int32,
    ):  # fmt: skip
        with T.Kernel(k.tiling.num_tiles, types.num_ctas, threads=k.threads) as (y, cta):
            call = Call(block_table, schedule, partial_out, partial_lse, out, lse, softmax_scale, causal, window, sinks)
            keys = Keys(rope_weight, rope_bias, inv_freq, page_offsets, scaling, has_offsets)
            memory = allocate(k)
            turn = Turn()
            tile = locate(types, k.tiling, y, k.d_r)
            work = take_work(call, cta, k.page_size, k.block)  # no pdl_trigger: there is none before sm_90
            scale = softmax_scale * LOG2E
            tail = (types.seqlen_q - 1) * causal
            x = Softmax(machine, call, tile, k.block, k.tiling.rows, memory.stage, (), T.sync_threads, scale, tail)
            prepare(k, keys, memory, turn)
            for f in T.serial(work.state[FRAGMENTS]):
                read_fragment(work, f)
                T.sync_threads()
                for c in list(range(0, k.latent_cols, 64)):
                    load_queries(machine, work, tile, q_latent, memory.q_tile, c, 64)
                load_rope_queries(k, machine, work, tile, q_pe, memory.qp_tile, 0, k.tiling.rows, 0, k.rope_cols)
                T.fill(memory.o, 0)
                T.fill(memory.o_top, MASKED)
                softmax.begin(x, work.span)
                for i in T.serial(work.span[TILES] * steps):
                    t0 = first_token(work.span, i // steps) + i % steps * k.block
                    load_step(k, t0, work, latent_cache, types.num_pages, memory)
                    make_keys(k, t0, work, keys, memory, turn)
                    swap_ab.attend(k, t0, work, memory, x)
                softmax.finish(x, memory.o_top)
                store(call, work.span, write_columns, x, memory.o, x.row_sum, memory.o_top)

    return mla_decode_latent_portable
