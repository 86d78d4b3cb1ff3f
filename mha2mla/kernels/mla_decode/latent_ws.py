"""MLA decode over a cache of the latent alone, for Hopper: ``swap_ab_ws`` with warpgroups that make the rotary keys.

Between the streaming warps and the computing warpgroups stand one or two more. Each holds 64 rows of W_KR in registers
for the kernel's whole life, as the first operand of ``K^T[64, tokens] = W_KR C^T``, which reads the same tile of the
latent as scores and output do; adds b_KR (that is where the sums begin), rotates the sums and hands them over in
shared memory, where ``swap_ab_ws`` has its cached rotary keys. Rows of W_KR are ordered so that a thread holds both
numbers of a pair: rows r and r + 8 of a warp's 16; so one frequency is all that a thread deals with.
"""

from dataclasses import dataclass

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from mha2mla.kernels.machine import ROW_GROUP, SWIZZLE_128, WARPGROUP, Buffers
from mha2mla.kernels.mla_decode import swap_ab_ws
from mha2mla.kernels.mla_decode.latent_selection import KEY_TILE, LatentChoice, key_blocks, key_steps
from mha2mla.kernels.mla_decode.selection import DecodeShape, padded_latent_columns
from mha2mla.kernels.mla_decode.static import GROUP, Keys, LatentTypes, Turn, find_scaled_turn, find_turn
from mha2mla.kernels.mla_decode.swap_ab_ws import BLOCK, SCALE, allocate, consume
from mha2mla.kernels.split_kv.call import DONE, FRAGMENTS, Call, first_token, locate, read_fragment, take_work
from mha2mla.kernels.split_kv.schedule import TILES
from mha2mla.kernels.split_kv.stream import stream, stream_queries

SUMS = BLOCK * KEY_TILE // WARPGROUP  # accumulators of a thread
PANEL_BYTES = BLOCK * 128  # 64 columns of a tile
# Access that an inline function declares for a tile that it writes. Where TileLang knows of writing, it puts a barrier
# before it, for all the warpgroups of a role together; mbarriers hold writers and readers apart.
UNTOLD = "r"

# Where TileLang has no call, or one before each of which it would put a barrier or a proxy fence.
INLINE = """
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/ldsm.h>
static __device__ __forceinline__ unsigned two_numbers_at(const void* place) {
  return __ldg(reinterpret_cast<const unsigned*>(place));
}
template <bool half>
static __device__ __forceinline__ void multiply_weight(const unsigned* a, tl::GmmaDescriptor b, int offset, float* c) {
  constexpr auto kind = half ? tl::DataType::kFloat16 : tl::DataType::kBFloat16;
  tl::wgmma_rs<kind, kind, tl::DataType::kFloat32, 64, 64, 16, false, false, 1, 1>(
      a, uint64_t(b + offset), reinterpret_cast<uint32_t*>(c), true);
}
template <bool half>
static __device__ __forceinline__ void store_keys(void* place, const float* sums) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 16 tokens, rows of 128 bytes
    int pair[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float low = sums[8 * i + 2 * j], high = sums[8 * i + 2 * j + 1];
      if constexpr (half) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair[j]) : "f"(high), "f"(low));
      else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair[j]) : "f"(high), "f"(low));
    }
    tl::ptx_stmatrix_m8n8_x4_trans(static_cast<char*>(place) + i * 2048, pair[0], pair[1], pair[2], pair[3]);
  }
}
"""


@dataclass(frozen=True)
class Static(swap_ab_ws.Static):
    key_warpgroups: int
    key_registers: int  # of a thread that makes keys
    steps: int  # products of depth 16 that a tile of keys takes

    @property
    def pairs(self) -> int:
        return self.d_r // 2

    @property
    def half(self) -> str:
        """A C++ bool: the cache is float16."""
        return "true" if self.dtype == "float16" else "false"

    @property
    def latent_readers(self) -> int:
        return self.consumers + self.key_warpgroups * WARPGROUP

    @property
    def rope_writers(self) -> int:
        return WARPGROUP

    @staticmethod
    def pair(column):
        """Pair number of a rope column: 8 first numbers, the same pairs' second ones, and so on."""
        return column // 16 * 8 + column % 8

    def rope_dim(self, column):
        return column % 16 // 8 * self.pairs + T.min(self.pair(column), self.pairs - 1)

    def meets(self, row, column):
        return self.pair(column) < self.pairs


def static_of(shape: DecodeShape, choice: LatentChoice, kind: type[Static] = Static) -> Static:
    blocks = key_blocks(choice.tiling, shape.qk_rope_head_dim)
    chunks = blocks.chunks_per_block
    return kind(
        shape,
        choice,
        blocks,
        by_block=False,
        rows=choice.tiling.rows // choice.warpgroups,
        latent_cols=padded_latent_columns(shape.kv_lora_rank, WARPGROUP),
        rope_cols=chunks * KEY_TILE,
        consumers=choice.warpgroups * WARPGROUP,
        registers=choice.registers[0],
        turns=choice.warpgroups > 1 and chunks <= choice.rope_stages,
        chunks=chunks,
        rope_phases=chunks * -(-choice.rope_stages // chunks),
        key_warpgroups=chunks,
        key_registers=choice.registers[1],
        steps=key_steps(shape.kv_lora_rank),
    )


class KeyMaker(Buffers):
    """A thread that makes keys: its place in the CTA, its registers.

    Attributes: ``v`` which 64 rows its warpgroup has; ``pair`` its own one of the rotary pairs, ``frequency`` that
    pair's; ``w`` its part of W_KR, ``sums`` of keys; ``bias`` of the pair; ``place_cos``, ``place_sin`` of its four
    places among 16 tokens; ``first_cos``, ``first_sin`` of the first tokens of each 16.
    """

    def __init__(self, k: Static, thread):
        four = [4]
        super().__init__(
            w=T.alloc_local([4 * k.steps], "uint32"),
            sums=T.alloc_local([SUMS], T.float32),
            bias=T.alloc_local([2], T.float32),
            frequency=T.alloc_local([1], T.float32),
            place_cos=T.alloc_local(four, T.float32),
            place_sin=T.alloc_local(four, T.float32),
            first_cos=T.alloc_local(four, T.float32),
            first_sin=T.alloc_local(four, T.float32),
            tile_desc=T.alloc_wgmma_desc(),
        )
        self.turn = Turn()
        self.v = (thread - k.consumers) // WARPGROUP if k.key_warpgroups > 1 else 0
        self.lane, self.warp = thread % 32, thread // 32 % 4
        self.g, self.q = self.lane // 4, self.lane % 4
        self.pair = self.v * (KEY_TILE // 2) + self.warp * 8 + self.g


@T.macro
def load_weight(k, c, keys, left=0):
    """Operands kept in registers: rows ``pair`` and ``pairs + pair`` of W_KR (of A, rows g and g + 8), zeros beyond;
    columns from ``left`` on."""
    own = T.min(c.pair, k.pairs - 1)
    for s in T.unroll(k.steps):
        for e in list(range(4)):
            column = left + 16 * s + 2 * c.q + e // 2 * 8
            c.w[4 * s + e] = T.if_then_else(
                (c.pair < k.pairs) & (column < k.d_c),
                T.call_extern(
                    "uint32",
                    "two_numbers_at",
                    T.address_of(keys.weight[e % 2 * k.pairs + own, T.min(column, k.d_c - 2)]),
                ),
                T.uint32(0),
            )
    for e in list(range(2)):
        c.bias[e] = T.if_then_else(c.pair < k.pairs, T.cast(keys.bias[e * k.pairs + own], T.float32), 0.0)
    c.frequency[0] = keys.inv_freq[own]
    for e in list(range(4)):
        find_turn(c.turn, e // 2 * 8 + 2 * c.q + e % 2, c.frequency[0])
        c.place_cos[e] = c.turn.cos[0]
        c.place_sin[e] = c.turn.sin[0]


@T.macro
def begin_sums(k, c):
    for e in T.unroll(SUMS):
        c.sums[e] = 0.0 if k.scaled else c.bias[e // 2 % 2]


@T.macro
def scale_sums(c, memory, slot):
    """Scales of the tokens of codes, and the bias."""
    for e in T.unroll(SUMS):
        c.sums[e] = c.sums[e] * memory.scales[slot, SCALE, e // 4 * 8 + 2 * c.q + e % 2] + c.bias[e // 2 % 2]


@T.macro
def multiply(k, c, slot):
    """The sums of a tile: under way, not awaited."""
    begin_sums(k, c)
    T.warpgroup_fence_operand(c.sums, num_regs=SUMS)
    T.warpgroup_arrive()
    for s in T.unroll(k.steps):
        T.call_extern(
            "handle",
            f"multiply_weight<{k.half}>",
            T.access_ptr(c.w[4 * s], "r", 4),
            c.tile_desc.data,
            (slot * (BLOCK * k.latent_cols * 2) + s // 4 * PANEL_BYTES + s % 4 * 32) >> 4,
            T.access_ptr(c.sums[0], "rw", SUMS),
        )
    T.warpgroup_commit_batch()


@T.macro
def find_first_turns(c, work, keys, t0):
    """Each of the four lanes that share a pair finds those of 16 tokens."""
    find_scaled_turn(c.turn, keys.position(work, t0 + c.q * GROUP), c.frequency[0], keys.scaling)
    for a in list(range(4)):
        c.first_cos[a] = T.shfl_sync(c.turn.cos[0], a, 4)
        c.first_sin[a] = T.shfl_sync(c.turn.sin[0], a, 4)


@T.macro
def rotate(c):
    for e in T.unroll(SUMS // 2):  # tokens of this thread
        one = e // 2 * 4 + e % 2
        cos = c.first_cos[e // 4] * c.place_cos[e % 4] - c.first_sin[e // 4] * c.place_sin[e % 4]
        sin = c.first_sin[e // 4] * c.place_cos[e % 4] + c.first_cos[e // 4] * c.place_sin[e % 4]
        c.turn.rest[0] = c.sums[one] * cos - c.sums[one + 2] * sin
        c.sums[one + 2] = c.sums[one + 2] * cos + c.sums[one] * sin
        c.sums[one] = c.turn.rest[0]


@T.macro
def hand_over(k, c, memory, slot):
    """To shared memory as [tokens, columns]; a lane has the place of one row of 8 in the first 16 by 16."""
    T.call_extern(
        "handle",
        f"store_keys<{k.half}>",
        T.access_ptr(memory.k_ring[slot, c.lane // 16 * 8 + c.lane % 8, c.warp * 16 + c.lane // 8 % 2 * 8], UNTOLD, 8),
        T.access_ptr(c.sums[0], "r", SUMS),
    )
    T.fence_proxy_async()


@T.macro
def make_keys(k, work, memory, keys, thread):
    """One warpgroup: its 64 columns of the keys of all tiles of this CTA."""
    T.set_max_nreg(k.key_registers, 1)
    c = KeyMaker(k, thread)
    T.initialize_wgmma_descriptor(c.tile_desc, memory.c_ring.access_ptr("r"), SWIZZLE_128, 1, ROW_GROUP)
    load_weight(k, c, keys)
    stages, rope_stages = k.choice.num_stages, k.choice.rope_stages
    for f in T.serial(work.state[FRAGMENTS]):
        read_fragment(work, f)
        for i in T.serial(work.span[TILES]):
            n = work.state[DONE] + i
            u = n * k.chunks + c.v
            T.barrier_wait(memory.c_full[n % stages], (n // stages) & 1)
            multiply(k, c, n % stages)
            find_first_turns(c, work, keys, first_token(work.span, i))
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(c.sums, num_regs=SUMS)
            if k.scaled:
                scale_sums(c, memory, n % stages)
            T.barrier_arrive(memory.c_free[n % stages])
            rotate(c)
            T.barrier_wait(memory.k_free[u % rope_stages], ((u // rope_stages) & 1) ^ 1)
            hand_over(k, c, memory, u % rope_stages)
            T.barrier_arrive(memory.k_full[u % k.rope_phases])
        work.state[DONE] += work.span[TILES]


def make_latent_ws(shape: DecodeShape, choice: LatentChoice):
    """A TileLang function ``mla_decode_latent_ws`` for sm_90; :class:`LatentTypes` has its arguments."""
    k, types = static_of(shape, choice), LatentTypes(shape)
    makers = k.key_warpgroups * WARPGROUP
    first_streaming = k.consumers + makers

    @T.prim_func
    def mla_decode_latent_ws(
        q_latent: types.q_latent, q_pe: types.q_pe, latent_cache: types.latent_cache, rope_weight: types.rope_weight,
        rope_bias: types.rope_bias, inv_freq: types.inv_freq, page_offsets: types.page_offsets,
        block_table: types.block_table, schedule: types.schedule, partial_out: types.partial_out,
        partial_lse: types.partial_lse, out: types.out, lse: types.lse, softmax_scale: T.float32, causal: T.int32,
        window: T.int32, sinks: T.int32, scaling: T.float32, has_offsets: T.int32,
    ):  # fmt: skip
        with T.Kernel(k.tiling.num_tiles, types.num_ctas, threads=first_streaming + WARPGROUP) as (y, cta):
            T.import_source(INLINE)
            if k.choice.ctas_per_sm > 1:
                T.annotate_min_blocks_per_sm(k.choice.ctas_per_sm)
            call = Call(block_table, schedule, partial_out, partial_lse, out, lse, softmax_scale, causal, window, sinks)
            keys = Keys(rope_weight, rope_bias, inv_freq, page_offsets, scaling, has_offsets)
            memory = allocate(k)
            T.annotate_layout({x: make_full_bank_swizzled_layout(x) for x in (memory.c_ring, memory.k_ring)})
            thread = T.get_thread_binding()
            tile = locate(types, k.tiling, y, k.d_r)
            work = take_work(call, cta, k.page_size, BLOCK)
            T.pdl_trigger()

            if thread < WARPGROUP:
                consume(k, 0, work, tile, memory, call, q_pe)
            elif k.choice.warpgroups == 2 and thread < 2 * WARPGROUP:
                consume(k, k.choice.warpgroups - 1, work, tile, memory, call, q_pe)
            elif thread < first_streaming:
                make_keys(k, work, memory, keys, thread)
            else:
                T.set_max_nreg(k.choice.registers[2], 0)
                if thread < first_streaming + 32:
                    stream(
                        work, latent_cache, [0], [memory.c_ring], memory.c_full, memory.c_free, thread, first_streaming
                    )
                elif thread < first_streaming + 64:
                    stream_queries(
                        work, tile, q_latent, memory.q_tile, memory.q_full, memory.q_free, thread, first_streaming + 32
                    )

    return mla_decode_latent_ws
