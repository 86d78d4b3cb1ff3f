"""MLA decode for Hopper over a cache of the latent alone that one CTA has no room for: ``swap_ab_cluster`` with
warpgroups that make rotary keys, as in ``latent_ws``.

Each CTA makes keys of its own columns: K = R(t)(W_KR c + b_KR) is a sum over columns, and so is the score. What its
part of the keys adds to the scores goes to the other CTA with what its part of the latent adds; b_KR is in the first
one's. So W_KR too is cut in halves, which fit into registers.
"""

from dataclasses import dataclass

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from mha2mla.kernels.machine import ROW_GROUP, SWIZZLE_128, WARPGROUP, Buffers
from mha2mla.kernels.mla_decode import latent_ws, swap_ab_cluster, swap_ab_ws
from mha2mla.kernels.mla_decode.latent_selection import KEY_TILE, LatentChoice, key_blocks, key_steps
from mha2mla.kernels.mla_decode.latent_ws import (
    PANEL_BYTES,
    SUMS,
    KeyMaker,
    begin_sums,
    find_first_turns,
    hand_over,
    load_weight,
    rotate,
)
from mha2mla.kernels.mla_decode.selection import CLUSTER, DecodeShape, Halves, halve
from mha2mla.kernels.mla_decode.static import Keys, LatentTypes
from mha2mla.kernels.mla_decode.swap_ab_cluster import BLOCK, consume
from mha2mla.kernels.split_kv.call import DONE, FRAGMENTS, Call, first_token, locate, read_fragment, take_work
from mha2mla.kernels.split_kv.schedule import TILES
from mha2mla.kernels.split_kv.stream import stream, stream_queries


@dataclass(frozen=True)
class Static(latent_ws.Static):
    cut: Halves
    held: int  # scores of a tile that a thread holds


def static_of(shape: DecodeShape, choice: LatentChoice) -> Static:
    blocks, cut = key_blocks(choice.tiling, shape.qk_rope_head_dim), halve(choice.tiling, shape.kv_lora_rank, 8)
    chunks, rows = blocks.chunks_per_block, choice.tiling.rows // choice.warpgroups
    return Static(
        shape,
        choice,
        blocks,
        by_block=False,
        rows=rows,
        latent_cols=cut.columns,
        rope_cols=chunks * KEY_TILE,
        consumers=choice.warpgroups * WARPGROUP,
        registers=choice.registers[0],
        turns=False,
        chunks=chunks,
        rope_phases=chunks * -(-choice.rope_stages // chunks),
        key_warpgroups=chunks,
        key_registers=choice.registers[1],
        steps=key_steps(cut.columns),
        cut=cut,
        held=BLOCK * rows // WARPGROUP,
    )


def allocate(k: Static) -> Buffers:
    """Same as ``swap_ab_cluster``; rotary keys as in ``latent_ws``."""
    stages, rope_stages, warpgroups = k.choice.num_stages, k.choice.rope_stages, k.choice.warpgroups
    return Buffers(
        q_tile=T.alloc_shared([k.tiling.rows, k.cut.columns], k.dtype),
        qp_tile=T.alloc_shared([k.tiling.rows, k.rope_cols], k.dtype),
        c_ring=T.alloc_shared([stages, BLOCK, k.cut.unit], k.dtype),
        k_ring=T.alloc_shared([rope_stages, BLOCK, KEY_TILE], k.dtype),
        p_tile=T.alloc_shared([warpgroups, BLOCK, k.rows], k.dtype),
        stage=T.alloc_shared([warpgroups, BLOCK // 16, k.rows], T.float32),
        scores=T.alloc_shared([warpgroups, 2, k.held // 4, WARPGROUP, 4], T.float32),
        q_full=T.alloc_barrier(1),
        q_free=T.alloc_barrier(k.consumers),
        c_full=T.alloc_barrier([1] * stages),
        c_free=T.alloc_barrier([k.latent_readers] * stages),
        k_full=T.alloc_barrier([k.rope_writers] * k.rope_phases),
        k_free=T.alloc_barrier([k.consumers] * rope_stages),
        s_full=T.alloc_cluster_barrier([1] * (2 * warpgroups)),
    )


@T.macro
def load_queries(k, w, work, tile, half, q_pe, qp_tile):
    swap_ab_ws.load_own_rope_queries(k, w, work, tile, q_pe, qp_tile)


@T.macro
def multiply_rope(k, w, n, memory, s):
    swap_ab_ws.multiply_rope(k, w, n, memory, s, [])


@T.macro
def multiply(k, c, n, slots, memory):
    """The sums of the n-th tile's columns: under way, not awaited."""
    units, stages = k.cut.units, k.choice.num_stages
    begin_sums(k, c)
    for u in list(range(units)):
        slots[u] = T.truncmod(n * units + u, stages)
        T.barrier_wait(memory.c_full[slots[u]], T.truncdiv(n * units + u, stages) & 1)
        if u == 0:
            T.warpgroup_fence_operand(c.sums, num_regs=SUMS)
            T.warpgroup_arrive()
        for s in T.unroll(k.cut.unit // 16):
            T.call_extern(
                "handle",
                f"multiply_weight<{k.half}>",
                T.access_ptr(c.w[4 * (u * (k.cut.unit // 16) + s)], "r", 4),
                c.tile_desc.data,
                (slots[u] * (BLOCK * k.cut.unit * 2) + s // 4 * PANEL_BYTES + s % 4 * 32) >> 4,
                T.access_ptr(c.sums[0], "rw", SUMS),
            )
    T.warpgroup_commit_batch()


@T.macro
def make_keys(k, half, work, memory, keys, thread):
    """One warpgroup: what this CTA's columns contribute to its 64 columns of the keys of all tiles."""
    T.set_max_nreg(k.key_registers, 1)
    c, slots = KeyMaker(k, thread), T.alloc_local([k.cut.units], T.int32)
    T.initialize_wgmma_descriptor(c.tile_desc, memory.c_ring.access_ptr("r"), SWIZZLE_128, 1, ROW_GROUP)
    load_weight(k, c, keys, half * k.cut.columns)
    for e in list(range(2)):
        c.bias[e] = T.if_then_else(half == 0, c.bias[e], 0.0)
    rope_stages = k.choice.rope_stages
    for f in T.serial(work.state[FRAGMENTS]):
        read_fragment(work, f)
        for i in T.serial(work.span[TILES]):
            n = work.state[DONE] + i
            at = n * k.chunks + c.v
            multiply(k, c, n, slots, memory)
            find_first_turns(c, work, keys, first_token(work.span, i))
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(c.sums, num_regs=SUMS)
            for u in list(range(k.cut.units)):
                T.barrier_arrive(memory.c_free[slots[u]])
            rotate(c)
            T.barrier_wait(memory.k_free[at % rope_stages], ((at // rope_stages) & 1) ^ 1)
            hand_over(k, c, memory, at % rope_stages)
            T.barrier_arrive(memory.k_full[at % k.rope_phases])
        work.state[DONE] += work.span[TILES]


def make_latent_cluster(shape: DecodeShape, choice: LatentChoice):
    """A TileLang function ``mla_decode_latent_cluster`` for sm_90; :class:`LatentTypes` has its arguments."""
    k, types = static_of(shape, choice), LatentTypes(shape)
    first_streaming = k.latent_readers

    @T.prim_func
    def mla_decode_latent_cluster(
        q_latent: types.q_latent, q_pe: types.q_pe, latent_cache: types.latent_cache, rope_weight: types.rope_weight,
        rope_bias: types.rope_bias, inv_freq: types.inv_freq, page_offsets: types.page_offsets,
        block_table: types.block_table, schedule: types.schedule, partial_out: types.partial_out,
        partial_lse: types.partial_lse, out: types.out, lse: types.lse, softmax_scale: T.float32, causal: T.int32,
        window: T.int32, sinks: T.int32, scaling: T.float32, has_offsets: T.int32,
    ):  # fmt: skip
        with T.Kernel(
            k.tiling.num_tiles * CLUSTER, types.num_ctas, threads=first_streaming + WARPGROUP, cluster_dims=CLUSTER
        ) as (y, cta):
            T.import_source(latent_ws.INLINE + swap_ab_cluster.INLINE)
            call = Call(block_table, schedule, partial_out, partial_lse, out, lse, softmax_scale, causal, window, sinks)
            keys = Keys(rope_weight, rope_bias, inv_freq, page_offsets, scaling, has_offsets)
            memory = allocate(k)
            T.annotate_layout({x: make_full_bank_swizzled_layout(x) for x in (memory.c_ring, memory.k_ring)})
            thread = T.get_thread_binding()
            half = y % CLUSTER
            tile = locate(types, k.tiling, y // CLUSTER, k.d_r)
            T.pdl_sync()  # TileLang launches clusters as programmatic dependents
            work = take_work(call, cta, k.page_size, BLOCK)
            T.pdl_trigger()

            if thread < WARPGROUP:
                consume(k, 0, work, tile, half, memory, call, q_pe, thread, load_queries, multiply_rope)
            elif k.choice.warpgroups == 2 and thread < 2 * WARPGROUP:
                consume(
                    k, k.choice.warpgroups - 1, work, tile, half, memory, call, q_pe, thread, load_queries,
                    multiply_rope,
                )  # fmt: skip
            elif thread < first_streaming:
                make_keys(k, half, work, memory, keys, thread)
            else:
                T.set_max_nreg(k.choice.registers[2], 0)
                if thread < first_streaming + 32:
                    lefts = [half * k.cut.columns + u * k.cut.unit for u in range(k.cut.units)]
                    stream(
                        work, latent_cache, lefts, [memory.c_ring], memory.c_full, memory.c_free, thread,
                        first_streaming,
                    )  # fmt: skip
                elif thread < first_streaming + 64:
                    stream_queries(
                        work, tile, q_latent, memory.q_tile, memory.q_full, memory.q_free, thread,
                        first_streaming + 32, half * k.cut.columns,
                    )  # fmt: skip
            T.cluster_sync()  # what this CTA sent may still be on its way

    return mla_decode_latent_cluster
