"""MLA decode, heads on the N side of the matrix instruction, pipelined by the compiler: the path that runs everywhere.

``S^T[tokens, rows] = C Q^T`` (+ rope scores) and ``O^T[d_c, rows] += C^T P^T`` take both operands from one tile of the
latent cache, so a handful of heads needs no padding to the 64 rows of a Hopper matrix instruction. The same body is
compiled for sm_90 (wgmma, TMA), for sm_80 and newer (mma, cp.async) and, unpipelined on one thread, for the CPU.
"""

from dataclasses import dataclass

import tilelang.language as T

from mha2mla.kernels.machine import GPU, Buffers, Machine
from mha2mla.kernels.mla_decode.selection import (
    DecodeShape,
    padded_latent_columns,
    padded_rope_columns,
)
from mha2mla.kernels.mla_decode.static import MLAStatic, MLATypes, load_rope_queries
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
from mha2mla.kernels.split_kv.choice import KernelChoice
from mha2mla.kernels.split_kv.schedule import TILE_TOKENS, TILES
from mha2mla.kernels.split_kv.softmax import Softmax, write_columns, zero_masked
from mha2mla.kernels.split_kv.stream import clear_holes, copy_tile, find_present_pages, load_queries

BY_ROW, BY_COLUMN = T.GemmWarpPolicy.FullRow, T.GemmWarpPolicy.FullCol


@dataclass(frozen=True)
class Static(MLAStatic):
    machine: Machine
    block: int  # cached tokens a step
    threads: int  # 256 split heads (scores) and d_c (output) over two warpgroups
    latent_cols: int
    rope_cols: int


def static_of(shape: DecodeShape, choice: KernelChoice, machine: Machine) -> Static:
    latent_cols = padded_latent_columns(shape.kv_lora_rank, choice.threads)
    rope_cols = padded_rope_columns(choice.tiling.groups_per_tile * shape.qk_rope_head_dim)
    return Static(shape, choice, machine, choice.block_tokens, choice.threads, latent_cols, rope_cols)


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
        o_top=fragment([rows], T.float32),
        o_new_top=fragment([rows], T.float32),
        o_shrink=fragment([rows], T.float32),
        holes=T.alloc_local([max(1, k.block // k.page_size) + 1], T.int32),
    )


@T.macro
def load_step(k, t0, work, tile, latent_cache, rope_cache, num_pages, memory):
    T.sync_threads()
    find_present_pages(work, t0, num_pages, memory.holes)
    copy_tile(work, t0, latent_cache, (), 0, memory.c_tile)
    copy_tile(work, t0, rope_cache, (), tile.column, memory.k_tile)
    T.sync_threads()
    if has_masked(work.span, t0, k.block):
        zero_masked(k.machine, work.span, t0, k.block, range(0, k.latent_cols, 64), memory.c_tile)
        T.sync_threads()
    clear_holes(k.machine, work, memory.holes, [memory.c_tile, memory.k_tile])


@T.macro
def attend(k, t0, work, memory, x):
    """Scores, softmax and output of one step."""
    policy = BY_COLUMN if k.threads > 128 else BY_ROW
    T.gemm(memory.c_tile, memory.q_tile, x.s, transpose_B=True, clear_accum=True, policy=policy)
    T.gemm(memory.k_tile, memory.qp_tile, x.s, transpose_B=True, policy=policy)
    softmax.apply_mask(x, work.span, t0)
    softmax.reduce_row_max(x, guarded=False)
    softmax.update_row_max(x, memory.o_top, memory.o_new_top)
    softmax.find_rescale(x)
    for j in x.parallel(k.tiling.rows):
        memory.o_shrink[j] = T.exp2((memory.o_top[j] - memory.o_new_top[j]) * x.scale)
        memory.o_top[j] = memory.o_new_top[j]
    softmax.find_weights(x)
    T.copy(x.s, memory.p_tile)
    softmax.add_weights(x)
    for d, j in x.parallel(k.latent_cols, k.tiling.rows):
        memory.o[d, j] *= memory.o_shrink[j]
    T.gemm(memory.c_tile, memory.p_tile, memory.o, transpose_A=True, policy=BY_ROW)


def make_swap_ab(shape: DecodeShape, choice: KernelChoice, machine: Machine = GPU):
    """A TileLang function ``mla_decode_swap_ab``; :class:`MLATypes` has its arguments."""
    k, types = static_of(shape, choice, machine), MLATypes(shape, machine)
    steps = TILE_TOKENS // k.block  # per tile of the schedule

    @T.prim_func
    def mla_decode_swap_ab(
        q_latent: types.q_latent, q_pe: types.q_pe, latent_cache: types.latent_cache, rope_cache: types.rope_cache,
        block_table: types.block_table, schedule: types.schedule, partial_out: types.partial_out,
        partial_lse: types.partial_lse, out: types.out, lse: types.lse, softmax_scale: T.float32, causal: T.int32,
        window: T.int32, sinks: T.int32,
    ):  # fmt: skip
        with T.Kernel(k.tiling.num_tiles, types.num_ctas, threads=k.threads) as (y, cta):
            call = Call(block_table, schedule, partial_out, partial_lse, out, lse, softmax_scale, causal, window, sinks)
            memory = allocate(k)
            tile = locate(types, k.tiling, y, k.d_r)
            work = take_work(call, cta, k.page_size, k.block)  # no pdl_trigger: there is none before sm_90
            scale = softmax_scale * LOG2E
            tail = (types.seqlen_q - 1) * causal
            x = Softmax(machine, call, tile, k.block, k.tiling.rows, memory.stage, (), T.sync_threads, scale, tail)
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
                    load_step(k, t0, work, tile, latent_cache, rope_cache, types.num_pages, memory)
                    attend(k, t0, work, memory, x)
                softmax.finish(x, memory.o_top)
                store(call, work.span, write_columns, x, memory.o, x.row_sum, memory.o_top)

    return mla_decode_swap_ab
