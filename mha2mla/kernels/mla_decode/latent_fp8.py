"""MLA decode over e4m3 latents alone, for Hopper: ``latent_ws`` with a warpgroup that makes 16-bit tiles of codes.

The tensor-memory unit brings codes by pieces of 128 columns, each with the scales of its tokens. A warpgroup widens
codes, not multiplied, into the ring from which scores, keys and output are computed in ``latent_ws``: both 16-bit
types hold every e4m3 number, so nothing is rounded. Scales leave the products, as in ``fp8``: scores by the latent and
the sums of the keys are multiplied by them afterwards; with log2(scale) added to a score its weight contains the scale,
so that weights are at most 1, whatever the scales; and the denominator sums ``weight / scale``.
"""

from dataclasses import dataclass

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from mha2mla.kernels.machine import WARPGROUP, Buffers
from mha2mla.kernels.mla_decode import latent_ws, swap_ab_ws
from mha2mla.kernels.mla_decode.fp8_products import CODES
from mha2mla.kernels.mla_decode.latent_selection import CODE_PANEL, LatentChoice
from mha2mla.kernels.mla_decode.latent_ws import UNTOLD, make_keys, static_of
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.mla_decode.static import Keys, LatentTypes
from mha2mla.kernels.mla_decode.swap_ab_ws import BLOCK, consume
from mha2mla.kernels.split_kv.call import (
    DONE,
    FRAGMENTS,
    LOG2E,
    Call,
    find_pages,
    first_token,
    is_masked,
    locate,
    read_fragment,
    take_work,
)
from mha2mla.kernels.split_kv.schedule import TILES
from mha2mla.kernels.split_kv.stream import stream_queries

WIDENED = 8  # codes that a thread takes at a time: 16 bytes of the tile

# Where TileLang has no call, or one around which it would put a barrier.
INLINE = """
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


@dataclass(frozen=True)
class Static(latent_ws.Static):
    @property
    def scaled(self) -> bool:
        return True

    @property
    def latent_writers(self) -> int:
        return WARPGROUP

    @property
    def pieces(self) -> list[int]:
        """First columns of the pieces that a tile comes in."""
        return list(range(0, self.latent_cols, CODE_PANEL))

    @property
    def page_rows(self) -> int:
        """Rows of a tile that lie in one page."""
        return min(BLOCK, self.page_size)


def allocate(k: Static) -> Buffers:
    """Same as ``swap_ab_ws``; ``codes`` and ``given`` (their scales) as they come, ``scales`` of the tiles."""
    stages = k.choice.code_stages
    return Buffers(
        **vars(swap_ab_ws.allocate(k)),
        codes=T.alloc_shared([stages, BLOCK, CODE_PANEL], CODES),
        given=T.alloc_shared([stages, BLOCK // k.page_rows, max(32, k.page_rows)], T.float32),
        scales=T.alloc_shared([k.choice.num_stages, 3, BLOCK], T.float32),
        codes_full=T.alloc_barrier([1] * stages),
        codes_free=T.alloc_barrier([WARPGROUP] * stages),
    )


@T.macro
def stream_codes(k, work, latent_cache, latent_scale, memory, thread, leader):
    """One warp: the pieces of every tile of this CTA's fragments."""
    stages = k.choice.code_stages
    for f in T.serial(work.state[FRAGMENTS]):
        read_fragment(work, f)
        for i in T.serial(work.span[TILES]):
            t0 = first_token(work.span, i)
            in_page = t0 % k.page_size
            find_pages(work, t0)
            for u, left in list(enumerate(k.pieces)):
                n = (work.state[DONE] + i) * len(k.pieces) + u
                slot = n % stages
                T.barrier_wait(memory.codes_free[slot], ((n // stages) & 1) ^ 1)
                for v in work.pieces:
                    first = v * k.page_rows
                    T.tma_copy(
                        latent_cache[work.pages[v], in_page : in_page + k.page_rows, left : left + CODE_PANEL],
                        memory.codes[slot, first : first + k.page_rows, :],
                        barrier=memory.codes_full[slot],
                    )
                    T.tma_copy(
                        latent_scale[work.pages[v], in_page : in_page + k.page_rows],
                        memory.given[slot, v, 0 : k.page_rows],
                        barrier=memory.codes_full[slot],
                    )
                if thread == leader:
                    T.barrier_arrive(memory.codes_full[slot])
        work.state[DONE] += work.span[TILES]


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
            T.access_ptr(memory.c_ring[slot, row, left + column], UNTOLD, WIDENED),
            T.access_ptr(memory.codes[at, row, column], "r", WIDENED),
        )


@T.macro
def widen(k, work, memory, unit, thread):
    """One warpgroup: codes of every tile of this CTA's fragments; ``unit``: of scores, in powers of two."""
    T.set_max_nreg(k.choice.registers[2], 0)
    stages, code_stages, token = k.choice.num_stages, k.choice.code_stages, thread % BLOCK
    for f in T.serial(work.state[FRAGMENTS]):
        read_fragment(work, f)
        for i in T.serial(work.span[TILES]):
            n = work.state[DONE] + i
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
                        T.access_ptr(memory.scales[slot, 0, 0], UNTOLD, 3 * BLOCK),
                        T.access_ptr(memory.given[at, token // k.page_rows, token % k.page_rows], "r", 1),
                        thread,
                        T.cast(is_masked(work.span, first_token(work.span, i) + token), T.int32),
                        unit,
                    )
                widen_piece(k, memory, slot, at, left, thread)
                T.barrier_arrive(memory.codes_free[at])
            T.fence_proxy_async()
            T.barrier_arrive(memory.c_full[slot])
        work.state[DONE] += work.span[TILES]


def make_latent_fp8(shape: DecodeShape, choice: LatentChoice):
    """A TileLang function ``mla_decode_latent_fp8`` for sm_90; :class:`LatentTypes` has its arguments."""
    k, types = static_of(shape, choice, Static), LatentTypes(shape, latent_dtype=CODES)
    first_widening = k.latent_readers
    first_streaming = first_widening + WARPGROUP

    @T.prim_func
    def mla_decode_latent_fp8(
        q_latent: types.q_latent, q_pe: types.q_pe, latent_cache: types.latent_cache, latent_scale: types.latent_scale,
        rope_weight: types.rope_weight, rope_bias: types.rope_bias, inv_freq: types.inv_freq,
        page_offsets: types.page_offsets, block_table: types.block_table, schedule: types.schedule,
        partial_out: types.partial_out, partial_lse: types.partial_lse, out: types.out, lse: types.lse,
        softmax_scale: T.float32, causal: T.int32, window: T.int32, sinks: T.int32, scaling: T.float32,
        has_offsets: T.int32,
    ):  # fmt: skip
        with T.Kernel(k.tiling.num_tiles, types.num_ctas, threads=choice.threads) as (y, cta):
            T.import_source(latent_ws.INLINE + INLINE)
            if k.choice.ctas_per_sm > 1:
                T.annotate_min_blocks_per_sm(k.choice.ctas_per_sm)
            call = Call(block_table, schedule, partial_out, partial_lse, out, lse, softmax_scale, causal, window, sinks)
            keys = Keys(rope_weight, rope_bias, inv_freq, page_offsets, scaling, has_offsets)
            memory = allocate(k)
            swizzled = (memory.c_ring, memory.k_ring, memory.codes)
            T.annotate_layout({x: make_full_bank_swizzled_layout(x) for x in swizzled})
            thread = T.get_thread_binding()
            tile = locate(types, k.tiling, y, k.d_r)
            work = take_work(call, cta, k.page_size, BLOCK)
            T.pdl_trigger()

            if thread < WARPGROUP:
                consume(k, 0, work, tile, memory, call, q_pe)
            elif k.choice.warpgroups == 2 and thread < 2 * WARPGROUP:
                consume(k, k.choice.warpgroups - 1, work, tile, memory, call, q_pe)
            elif thread < first_widening:
                make_keys(k, work, memory, keys, thread)
            elif thread < first_streaming:
                widen(k, work, memory, 1.0 / (softmax_scale * LOG2E), thread - first_widening)
            else:
                T.set_max_nreg(k.choice.registers[2], 0)
                if thread < first_streaming + 32:
                    stream_codes(k, work, latent_cache, latent_scale, memory, thread, first_streaming)
                elif thread < first_streaming + 64:
                    stream_queries(
                        work, tile, q_latent, memory.q_tile, memory.q_full, memory.q_free, thread, first_streaming + 32
                    )

    return mla_decode_latent_fp8
