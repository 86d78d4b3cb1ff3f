"""MLA decode over a cache of the latent alone, for Hopper: ``swap_ab_ws`` with warpgroups that make the rotary keys.

``latent_ws``: between the streaming warps and the computing warpgroups stand one or two more. Each holds 64 rows of
W_KR in registers for the kernel's whole life, as the first operand of ``K^T[64, tokens] = W_KR C^T``, which reads the
same tile of the latent as scores and output do; adds b_KR (that is where the sums begin), rotates the sums and hands
them over in shared memory, where ``swap_ab_ws`` has its cached rotary keys. Rows of W_KR are ordered so that a thread
holds both elements of a pair: rows r and r + 8 of a warp's 16; so one frequency is all that a thread deals with.

``latent_fp8``, over e4m3 latents: TMA brings codes by pieces of 128 columns, each with the scales of its tokens. One
more warpgroup widens codes, not multiplied, into the ring from which scores, keys and output are computed: both 16-bit
types hold every e4m3 number, so nothing is rounded. Scales leave the products, as in ``fp8``: scores by the latent and
the sums of the keys are multiplied by them afterwards; with log2(scale) added to a score its weight contains the scale,
so that weights are at most 1, whatever the scales; and the denominator sums ``weight / scale``.
"""

import tilelang.language as T

from mha2mla.kernels.machine import ROW_GROUP, SWIZZLE_128, WARPGROUP, Buffers
from mha2mla.kernels.mla_decode import swap_ab_ws
from mha2mla.kernels.mla_decode.fp8_products import CODES
from mha2mla.kernels.mla_decode.selection import CODE_PANEL, KEY_TILE, PANEL_BYTES, DecodeShape, key_blocks, key_steps
from mha2mla.kernels.mla_decode.static import GROUP, MLATypes, Turn, find_scaled_turn, find_turn, position_of
from mha2mla.kernels.mla_decode.swap_ab_ws import BLOCK, SCALE, consume, make_streaming
from mha2mla.kernels.split_kv import device
from mha2mla.kernels.split_kv.choice import KernelChoice

SUMS = BLOCK * KEY_TILE // WARPGROUP  # accumulators of a thread
# Access that an inline function declares for a tile that it writes. Where TileLang knows of writing, it puts a barrier
# before it, for all the warpgroups of a role together; mbarriers hold writers and readers apart.
OPAQUE = "r"

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


class Static(swap_ab_ws.Static):
    rope = property(lambda k: key_blocks(k.tiling, k.d_r))
    key_warpgroups = property(lambda k: k.chunks)
    registers = property(lambda k: k.choice.registers[0])
    launched = property(lambda k: 65536 // (k.choice.threads * k.choice.ctas_per_sm) // 8 * 8)  # registers at launch
    key_grows = property(
        lambda k: int(k.choice.registers[1] >= k.launched)
    )  # else it leaves some to those that compute
    steps = property(lambda k: key_steps(k.d_c))  # products of depth 16 that a tile of keys takes
    pairs = property(lambda k: k.d_r // 2)
    half = property(lambda k: "true" if k.dtype == "float16" else "false")  # a C++ bool: the cache is float16
    latent_readers = property(lambda k: k.consumers + k.key_warpgroups * WARPGROUP)
    makes_keys, rope_writers, source = True, WARPGROUP, INLINE
    streaming_registers = property(lambda k: k.choice.registers[2])

    def first_key_column(self, half):
        """First rotary column that CTA ``half`` of a cluster makes keys of."""
        return 0

    @staticmethod
    def pair(column):
        """Pair number of a rope column: 8 first elements, the same pairs' second ones, and so on."""
        return column // 16 * 8 + column % 8

    def rope_dim(self, column):
        return column % 16 // 8 * self.pairs + T.min(self.pair(column), self.pairs - 1)

    def meets(self, row, column):
        return self.pair(column) < self.pairs


class KeyMaker(Buffers):
    """A thread that makes keys: its place in the CTA, its registers.

    Attributes: ``v`` which 64 rows its warpgroup has; ``pair`` its own one of the rotary pairs, ``frequency`` that
    pair's; ``w`` its part of W_KR, ``sums`` of keys; ``bias`` of the pair; ``place_cos``, ``place_sin`` of its four
    places among 16 tokens; ``first_cos``, ``first_sin`` of the first tokens of each 16.
    """

    def __init__(self, k: Static, thread, half=0):
        four = [4]
        super().__init__(
            w=T.alloc_local([max(1, 4 * k.steps)], "uint32"),
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
        self.pair = k.first_key_column(half) // 2 + self.v * (KEY_TILE // 2) + self.warp * 8 + self.g


@T.macro
def load_weight(k, c, call, left=0):
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
                    T.address_of(call.rope_weight[e % 2 * k.pairs + own, T.min(column, k.d_c - 2)]),
                ),
                T.uint32(0),
            )
    load_bias(k, c, call, own)


@T.macro
def load_bias(k, c, call, own):
    """Bias and frequency of pair ``own``, zeros where the thread has none; cos and sin of places."""
    for e in list(range(2)):
        c.bias[e] = T.if_then_else(c.pair < k.pairs, T.cast(call.rope_bias[e * k.pairs + own], T.float32), 0.0)
    c.frequency[0] = call.inv_freq[own]
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
def find_first_turns(c, work, call, t0):
    """Each of the four lanes that share a pair finds those of 16 tokens."""
    find_scaled_turn(c.turn, position_of(call, work, t0 + c.q * GROUP), c.frequency[0], call.scaling)
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
def hand_over(k, c, memory, turn):
    """To shared memory as [tokens, columns], once the turn's slot is free; a lane has the place of one row of 8 in the
    first 16 by 16."""
    slot, lap = turn % k.choice.rope_stages, turn // k.choice.rope_stages
    T.barrier_wait(memory.k_free[slot], (lap & 1) ^ 1)
    T.call_extern(
        "handle",
        f"store_keys<{k.half}>",
        T.access_ptr(memory.k_ring[slot, c.lane // 16 * 8 + c.lane % 8, c.warp * 16 + c.lane // 8 % 2 * 8], OPAQUE, 8),
        T.access_ptr(c.sums[0], "r", SUMS),
    )
    T.fence_proxy_async()
    T.barrier_arrive(memory.k_full[turn % k.rope_phases])


@T.macro
def make_keys(k, half, work, memory, call, thread):
    """One warpgroup: its 64 columns of the keys of all tiles of this CTA."""
    T.set_max_nreg(k.choice.registers[1], k.key_grows)
    c = KeyMaker(k, thread)
    T.initialize_wgmma_descriptor(c.tile_desc, memory.c_ring.access_ptr("r"), SWIZZLE_128, 1, ROW_GROUP)
    load_weight(k, c, call)
    stages = k.choice.num_stages
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for i in T.serial(work.tiles):
            n = work.done + i
            u = n * k.chunks + c.v
            T.barrier_wait(memory.c_full[n % stages], (n // stages) & 1)
            multiply(k, c, n % stages)
            find_first_turns(c, work, call, work.first_token(i))
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(c.sums, num_regs=SUMS)
            if k.scaled:
                scale_sums(c, memory, n % stages)
            T.barrier_arrive(memory.c_free[n % stages])
            rotate(c)
            hand_over(k, c, memory, u)
        device.end_fragment(work)


def make_latent_ws(shape: DecodeShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_latent_ws`` for sm_90; :class:`MLATypes` has its arguments, without a
    rope_cache."""
    return make_streaming(Static(shape, choice), MLATypes(shape, has_rope_cache=False), consume, make_keys)


WIDENED = 8  # codes that a thread takes at a time: 16 bytes of the tile

# Where TileLang has no call, or one around which it would put a barrier.
INLINE_CODES = """
template <bool half>
static __device__ __forceinline__ void widen_codes(void* place, const void* codes) {
  const uint2 word = *static_cast<const uint2*>(codes);
  unsigned wide[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned short two = (i < 2 ? word.x : word.y) >> (16 * (i % 2));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide[i]) : "h"(two));
    if constexpr (!half)
      asm("{.reg .b16 a, b; .reg .f32 x, y; mov.b32 {a, b}, %0; cvt.f32.f16 x, a; cvt.f32.f16 y, b;"
          " cvt.rn.bf16x2.f32 %0, y, x;}" : "+r"(wide[i]));
  }
  *static_cast<uint4*>(place) = make_uint4(wide[0], wide[1], wide[2], wide[3]);
}
// What has no page has the scale 0, and what no row sees any.
static __device__ __forceinline__ void write_scales(float* scales, const float* given, int token, int hidden,
                                                    float unit) {
  if (token < 64) {
    float scale = *given;
    if (hidden || scale == 0) scale = 1;
    scales[token] = scale;
    scales[64 + token] = log2f(scale) * unit;
    scales[128 + token] = 1 / scale;
  }
}
"""


class CodeRing:
    """Properties of a CTA to which bulk copies bring 8-bit codes, in pieces of a tile."""

    code_dtype, coded = CODES, ("latent_cache", "latent_scale")  # arguments: codes, and the scales of their tokens

    def allocate(self) -> dict:
        """``codes`` and ``given`` (their scales) as they come, beside the memory of the class behind this one."""
        stages = self.choice.code_stages
        return super().allocate() | {
            "codes": T.alloc_shared([stages, BLOCK, CODE_PANEL], self.code_dtype),
            "given": T.alloc_shared([stages, BLOCK // self.page_rows, max(32, self.page_rows)], T.float32),
        }


class CodeStatic(CodeRing, Static):
    scaled, latent_writers, source = True, WARPGROUP, INLINE + INLINE_CODES
    swizzled = ("c_ring", "k_ring", "codes")
    pieces = property(lambda k: list(range(0, k.latent_cols, CODE_PANEL)))  # first columns of a tile's pieces

    def allocate(self) -> dict:
        """The ring's memory, and ``scales`` of the tiles."""
        stages = self.choice.code_stages
        return super().allocate() | {
            "scales": T.alloc_shared([self.choice.num_stages, 3, BLOCK], T.float32),
            "codes_full": T.alloc_barrier([1] * stages),
            "codes_free": T.alloc_barrier([WARPGROUP] * stages),
        }


@T.macro
def stream_codes(k, work, call, memory, thread, leader):
    """One warp: the pieces of every tile of this CTA's fragments."""
    stages = k.choice.code_stages
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for i in T.serial(work.tiles):
            t0 = work.first_token(i)
            in_page = t0 % k.page_size
            device.find_pages(work, t0)
            for u, left in list(enumerate(k.pieces)):
                n = (work.done + i) * len(k.pieces) + u
                slot = n % stages
                T.barrier_wait(memory.codes_free[slot], ((n // stages) & 1) ^ 1)
                for v in work.pieces:
                    first = v * k.page_rows
                    T.tma_copy(
                        getattr(call, k.coded[0])[
                            work.pages[v], in_page : in_page + k.page_rows, left : left + CODE_PANEL
                        ],
                        memory.codes[slot, first : first + k.page_rows, :],
                        barrier=memory.codes_full[slot],
                    )
                    T.tma_copy(
                        getattr(call, k.coded[1])[work.pages[v], in_page : in_page + k.page_rows],
                        memory.given[slot, v, 0 : k.page_rows],
                        barrier=memory.codes_full[slot],
                    )
                if thread == leader:
                    T.barrier_arrive(memory.codes_full[slot])
        device.end_fragment(work)


@T.macro
def widen_piece(k, memory, slot, at, left, thread):
    """A piece of a tile; neighbouring threads take neighbouring codes."""
    columns = min(CODE_PANEL, k.latent_cols - left) // WIDENED
    rows = WARPGROUP // columns
    for i in T.unroll(BLOCK // rows):
        row, column = i * rows + thread // columns, thread % columns * WIDENED
        T.call_extern(
            "handle",
            f"widen_codes<{k.half}>",
            T.access_ptr(memory.c_ring[slot, row, left + column], OPAQUE, WIDENED),
            T.access_ptr(memory.codes[at, row, column], "r", WIDENED),
        )


def widen(k, half, work, memory, call, thread):
    widen_tiles(k, work, memory, 1.0 / (call.softmax_scale * device.LOG2E), thread)


@T.macro
def widen_tiles(k, work, memory, unit, thread):
    """One warpgroup: codes of every tile of this CTA's fragments; ``unit``: of scores, in powers of two."""
    T.set_max_nreg(k.choice.registers[2], 0)
    stages, code_stages, token = k.choice.num_stages, k.choice.code_stages, thread % BLOCK
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for i in T.serial(work.tiles):
            n = work.done + i
            slot = n % stages
            T.barrier_wait(memory.c_free[slot], ((n // stages) & 1) ^ 1)
            for u, left in list(enumerate(k.pieces)):
                m = n * len(k.pieces) + u
                at = m % code_stages
                T.barrier_wait(memory.codes_full[at], (m // code_stages) & 1)
                if u == 0:
                    T.call_extern(
                        "handle",
                        "write_scales",
                        T.access_ptr(memory.scales[slot, 0, 0], OPAQUE, 3 * BLOCK),
                        T.access_ptr(memory.given[at, token // k.page_rows, token % k.page_rows], "r", 1),
                        thread,
                        T.cast(work.is_masked(work.first_token(i) + token), T.int32),
                        unit,
                    )
                widen_piece(k, memory, slot, at, left, thread)
                T.barrier_arrive(memory.codes_free[at])
            T.fence_proxy_async()
            T.barrier_arrive(memory.c_full[slot])
        device.end_fragment(work)


def make_latent_fp8(shape: DecodeShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_latent_fp8`` for sm_90; :class:`MLATypes` has its arguments, of codes without a
    rope_cache."""
    types = MLATypes(shape, has_rope_cache=False, codes=CODES)
    return make_streaming(CodeStatic(shape, choice), types, consume, make_keys, stream_codes, widen)
