"""GQA decode for every GPU from sm_80 on, and for TileLang's CPU target: the algebra of ``streamed`` without its roles.

Sᵀ[tokens, rows] = K Qᵀ and Oᵀ[d_v, rows] += Vᵀ Pᵀ for the query rows of one kv head, tile after tile.
"""

from dataclasses import dataclass

import tilelang.language as T

from mha2mla.kernels.gqa_decode.selection import GQAShape, padded_columns
from mha2mla.kernels.machine import BY_ROW, GPU, Buffers, Machine
from mha2mla.kernels.split_kv import softmax
from mha2mla.kernels.split_kv.call import (
    FRAGMENTS,
    LOG2E,
    Call,
    Types,
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


@dataclass(frozen=True)
class GQAStatic:
    """Parameters of a kernel body, ``shape`` and ``choice``, and what follows from them."""

    shape: GQAShape
    choice: KernelChoice
    machine: Machine = GPU

    @property
    def rows(self) -> int:
        return self.choice.tiling.rows

    @property
    def qk_cols(self) -> int:
        return padded_columns(self.shape.qk_head_dim)

    @property
    def v_cols(self) -> int:
        return padded_columns(self.shape.v_head_dim)


class GQATypes(Types):
    """:class:`Types` and q [B,S_q,H,d_qk], k_cache [P,page,G,d_qk] and v_cache [P,page,G,d_v], all with run-time
    strides; they come first, in this order."""

    def __init__(self, k: GQAStatic):
        s = k.shape
        super().__init__(s.heads, s.v_head_dim, s.page_size, s.dtype, k.machine)
        self.q = self.rows("q", s.qk_head_dim)
        self.k_cache = self.cache("k", s.num_kv_heads, s.qk_head_dim)
        self.v_cache = self.cache("v", s.num_kv_heads, s.v_head_dim)


def allocate(k: GQAStatic) -> Buffers:
    """Shared memory of a CTA, and the output."""
    block, dtype, shared = k.choice.block_tokens, k.shape.dtype, k.machine.alloc_shared
    return Buffers(
        q_tile=shared([k.rows, k.qk_cols], dtype),
        k_tile=shared([block, k.qk_cols], dtype),
        v_tile=shared([block, k.v_cols], dtype),
        p_tile=shared([block, k.rows], dtype),
        stage=shared([block // 16, k.rows], T.float32),
        factor=shared([k.rows], T.float32),  # for the output, whose rows other threads hold than the scores' rows
        o=k.machine.alloc_fragment([k.v_cols, k.rows], T.float32),
        holes=T.alloc_local([max(1, block // k.shape.page_size) + 1], T.int32),
    )


@T.macro
def load_step(k, t0, work, kv_head, k_cache, v_cache, num_pages, memory):
    T.sync_threads()
    find_present_pages(work, t0, num_pages, memory.holes)
    copy_tile(work, t0, k_cache, (kv_head,), 0, memory.k_tile)
    copy_tile(work, t0, v_cache, (kv_head,), 0, memory.v_tile)
    T.sync_threads()
    if has_masked(work.span, t0, k.choice.block_tokens):
        zero_masked(k.machine, work.span, t0, k.choice.block_tokens, range(0, k.v_cols, 64), memory.v_tile)
        T.sync_threads()
    clear_holes(k.machine, work, memory.holes, [memory.k_tile, memory.v_tile])


@T.macro
def attend(k, t0, work, memory, x):
    """Scores, softmax and output of one step."""
    T.gemm(memory.k_tile, memory.q_tile, x.s, transpose_B=True, clear_accum=True, policy=BY_ROW)
    softmax.apply_mask(x, work.span, t0)
    softmax.reduce_row_max(x, guarded=False)
    softmax.find_rescale(x)
    T.copy(x.rescale, memory.factor)
    softmax.find_weights(x)
    T.copy(x.s, memory.p_tile)
    softmax.add_weights(x)
    T.sync_threads()
    for d, j in x.parallel(k.v_cols, k.rows):
        memory.o[d, j] *= memory.factor[j]
    T.gemm(memory.v_tile, memory.p_tile, memory.o, transpose_A=True, policy=BY_ROW)


def make_portable(shape: GQAShape, choice: KernelChoice, machine: Machine = GPU):
    """A TileLang function ``gqa_decode_portable``; :class:`GQATypes` has its arguments."""
    k = GQAStatic(shape, choice, machine)
    types, tiling, block = GQATypes(k), choice.tiling, choice.block_tokens
    steps = TILE_TOKENS // block  # per tile of the schedule

    @T.prim_func
    def gqa_decode_portable(
        q: types.q, k_cache: types.k_cache, v_cache: types.v_cache, block_table: types.block_table,
        schedule: types.schedule, partial_out: types.partial_out, partial_lse: types.partial_lse, out: types.out,
        lse: types.lse, softmax_scale: T.float32, causal: T.int32, window: T.int32, sinks: T.int32,
    ):  # fmt: skip
        with T.Kernel(tiling.num_tiles, types.num_ctas, threads=1 if machine.on_cpu else choice.threads) as (y, cta):
            call = Call(block_table, schedule, partial_out, partial_lse, out, lse, softmax_scale, causal, window, sinks)
            memory = allocate(k)
            tile = locate(types, tiling, y, 1)
            work = take_work(call, cta, shape.page_size, block)  # no pdl_trigger: there is none before sm_90
            scale = softmax_scale * LOG2E
            tail = (types.seqlen_q - 1) * causal
            x = Softmax(machine, call, tile, block, k.rows, memory.stage, (), T.sync_threads, scale, tail)
            for f in T.serial(work.state[FRAGMENTS]):
                read_fragment(work, f)
                T.sync_threads()
                for c in list(range(0, k.qk_cols, 64)):
                    load_queries(machine, work, tile, q, memory.q_tile, c, 64)
                T.fill(memory.o, 0)
                softmax.begin(x, work.span)
                for i in T.serial(work.span[TILES] * steps):
                    t0 = first_token(work.span, i // steps) + i % steps * block
                    load_step(k, t0, work, tile.column, k_cache, v_cache, types.num_pages, memory)
                    attend(k, t0, work, memory, x)
                softmax.finish(x, x.row_max)
                T.copy(x.row_sum, memory.factor)
                T.sync_threads()
                store(call, work.span, write_columns, x, memory.o, memory.factor, x.row_max)

    return gqa_decode_portable
