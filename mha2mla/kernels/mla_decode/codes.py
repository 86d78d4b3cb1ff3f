"""MLA decode over integer codes of latents: tiles are dequantised into the 16-bit tiles of ``swap_ab`` and its kin.

``codes_portable``: threads read rows from global memory. ``codes_ws``, for Hopper: bulk copies bring pieces of 16
coded rows, which are contiguous whatever their width; one or two warpgroups dequantise them, centers included, into
the ring of ``swap_ab_ws``, whose other parts are unchanged. ``codes_cluster`` does so for ``swap_ab_cluster``.
"""

import struct
from dataclasses import dataclass

import tilelang.language as T

from mha2mla.geometry import CODE_BLOCK
from mha2mla.kernels.machine import GPU, WARPGROUP, Machine
from mha2mla.kernels.mla_decode import latent_ws, swap_ab, swap_ab_cluster, swap_ab_ws
from mha2mla.kernels.mla_decode.codes_selection import PIECE, CodedShape
from mha2mla.kernels.mla_decode.latent_ws import OPAQUE
from mha2mla.kernels.mla_decode.static import MLATypes
from mha2mla.kernels.mla_decode.swap_ab_ws import BLOCK, consume, make_streaming
from mha2mla.kernels.row_codes.kernel import RUN, RUNS, CodedRow, Unit, dequantise
from mha2mla.kernels.split_kv import device
from mha2mla.kernels.split_kv.choice import KernelChoice

LEAST_AHEAD = 64  # registers of a thread that dequantises two units at a time

INLINE = """
static __device__ __forceinline__ void load_piece(void* place, const void* source, void* barrier, int bytes,
                                                  int* is_held, int held) {
  *is_held = held;
  const unsigned full = __cvta_generic_to_shared(barrier), to = __cvta_generic_to_shared(place);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(source), "r"(bytes), "r"(full) : "memory");
}
static __device__ __forceinline__ float widen_half(unsigned short bits) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
  return wide;
}
// of two bfloat16 each: a b + c, rounded once
static __device__ __forceinline__ unsigned fused(unsigned a, unsigned b, unsigned c) {
  unsigned two;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(two) : "r"(a), "r"(b), "r"(c));
  return two;
}
static __device__ __forceinline__ unsigned product(unsigned a, unsigned b) {
  unsigned two;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(two) : "r"(a), "r"(b));
  return two;
}
// where the bits of a mask are 1 those of a, else of b
static __device__ __forceinline__ unsigned merged(unsigned a, unsigned b, unsigned mask) {
  unsigned bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(bits) : "r"(mask), "r"(a), "r"(b));
  return bits;
}
// two numbers plus those of their center, rounded once
template <bool half>
static __device__ __forceinline__ unsigned add_center(float low, float high, unsigned center) {
  unsigned two;
  if constexpr (half) {
    low += widen_half(center), high += widen_half(center >> 16);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  } else {
    low += __uint_as_float(center << 16), high += __uint_as_float(center & 0xffff0000u);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  }
  return two;
}
// bend: of the trellis's levels; zero: -64 less the number that would be zero; both twice in bfloat16
template <int bits, unsigned bend, unsigned zero>
struct CodedUnit {  // elements 8 h to 8 h + 8 of block g, and those 16 further
  unsigned words[bits == 8 ? 4 : 2], scale;

  __device__ __forceinline__ void load(const int* row, int g, int h) {
    const int* own = row + 1 + g * bits;
    scale = row[0];
    if constexpr (bits < 4) {  // nibbles
      words[0] = static_cast<unsigned>(own[0]) >> 2 * h & 0x33333333;
      words[1] = static_cast<unsigned>(own[1]) >> 2 * h & 0x33333333;
      if constexpr (bits == 3) {
        const unsigned third = static_cast<unsigned>(own[2]) >> 2 * h;
        words[0] |= (third & 0x11111111) << 2;
        words[1] |= (third >> 1 & 0x11111111) << 2;
      }
    } else {
      constexpr int each = bits == 8 ? 4 : 2;
#pragma unroll
      for (int v = 0; v < each; ++v) words[v] = own[each * h + v];
    }
  }
  static constexpr unsigned one = 0x3f803f80;
  // Levels of run u, of elements 2 k and 2 k + 1. Nibble n of a word is that of element 2 (n % 4) + n / 4.
  __device__ __forceinline__ void levels(int u, unsigned (&pairs)[4]) const {
    const unsigned own = words[u], before = u ? words[0] : 0;
    const unsigned half = own ^ (__funnelshift_l(before, own, 8) & 0x11111111);  // 2 m + (u ^ u2)
    const unsigned last = __funnelshift_l(before, own, 5);                       // u1, a bit to the left
    constexpr unsigned mask = 0x3c3c3c3c;  // numbers of levels, of 5 bits, from the second bit of a byte on
    const unsigned even = merged(half << 2, last, mask), odd = merged(half >> 2, last >> 4, mask);
    const unsigned fields[4] = {even, odd, even >> 8, odd >> 8};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned x;  // 64 and the number
      asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(x) : "r"(fields[k]), "r"(0x003e003e), "r"(0x42804280));
      x = fused(x, one, zero);
      pairs[k] = product(x, fused(product(x, x), bend, one));
    }
  }
  template <bool half>
  __device__ __forceinline__ void widen(unsigned (&two)[8], const unsigned* centers) const {
    const unsigned length = scale & 0x7fffffff, second = -(scale >> 31);  // the sign is the center's
    const float factor = __uint_as_float(length);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      unsigned pairs[4];
      if constexpr (bits < 8) levels(u, pairs);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int e = 4 * u + k;
        const unsigned center = centers[e] ^ (centers[8 + e] & second);
        if constexpr (bits == 8) {
          constexpr float middle = 32768 + 127.5f;  // a byte becomes 32768 and itself
          const float least = -middle * factor;
          const float low = __uint_as_float(__byte_perm(words[2 * u], 0x47000000, 0x7604 | k << 4));
          const float high = __uint_as_float(__byte_perm(words[2 * u + 1], 0x47000000, 0x7604 | k << 4));
          two[e] = add_center<half>(low * factor + least, high * factor + least, center);
        } else if constexpr (half) {
          const float low = __uint_as_float(pairs[k] << 16), high = __uint_as_float(pairs[k] & 0xffff0000u);
          two[e] = add_center<half>(low * factor, high * factor, center);
        } else {
          two[e] = fused(pairs[k], __byte_perm(length, 0, 0x3232), center);
        }
      }
    }
  }
};
// of a thread's columns: the first center, and in which bits the second one differs
static __device__ __forceinline__ void load_centers(unsigned* centers, const void* first, const void* second) {
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const uint4 one = __ldg(static_cast<const uint4*>(first) + 2 * u);
    const uint4 two = __ldg(static_cast<const uint4*>(second) + 2 * u);
    unsigned* to = centers + 4 * u;
    to[0] = one.x, to[1] = one.y, to[2] = one.z, to[3] = one.w;
    to[8] = one.x ^ two.x, to[9] = one.y ^ two.y, to[10] = one.z ^ two.z, to[11] = one.w ^ two.w;
  }
}
// A thread's unit of the rows of a piece: 4 (pair / 2) + pair % 2 + 2 odd, and so on by ``pairs`` pairs; ``ahead`` are
// loaded before any is stored. ``all``: every thread has a row in every round.
template <bool half, int bits, unsigned bend, unsigned zero, int row_words, int pairs, bool all, int ahead>
static __device__ __forceinline__ void widen_piece(void* panel, const void* codes, const unsigned* centers, int pair,
                                                   int odd, int chunk, int g, int h, int held) {
  using Unit = CodedUnit<bits, bend, zero>;
  constexpr int rounds = (8 + pairs - 1) / pairs;
#pragma unroll(ahead > 1 ? rounds : 1)  // of fewer registers, where those are short
  for (int first = 0; first < rounds; first += ahead) {
    Unit units[ahead];
    uint4* places[ahead][2];
    bool mine[ahead];
#pragma unroll
    for (int r = 0; r < ahead; ++r) {
      const int p = pair + (first + r) * pairs;
      const int token = pairs % 2 ? p / 2 * 4 + p % 2 + 2 * odd
                                  : pair / 2 * 4 + pair % 2 + 2 * odd + (first + r) * pairs * 2;
      mine[r] = all || token < 16;
      const int row = all ? token : min(token, 15);
      units[r].load(static_cast<const int*>(codes) + row * row_words, g, h);
#pragma unroll
      for (int u = 0; u < 2; ++u)
        places[r][u] = static_cast<uint4*>(panel) + row * 8 + ((chunk + 2 * u) ^ row % 8);
    }
#pragma unroll
    for (int r = 0; r < ahead; ++r) {
      unsigned two[8];
      units[r].template widen<half>(two, centers);
      if (mine[r]) {
        *places[r][0] = make_uint4(two[0], two[1], two[2], two[3]);
        *places[r][1] = make_uint4(two[4], two[5], two[6], two[7]);
      }
    }
    if (!held) {  // tested last: a branch around the loads would wait for it
#pragma unroll
      for (int r = 0; r < ahead; ++r)
        if (mine[r]) *places[r][0] = *places[r][1] = make_uint4(0, 0, 0, 0);
    }
  }
}
"""


class CodedTypes(MLATypes):
    """:class:`MLATypes` whose latent_cache is [P,page*bytes of a row] (uint8), followed by centers [2,d_c]."""

    def __init__(self, shape: CodedShape, machine: Machine = GPU, *, has_rope_cache: bool = True):
        super().__init__(shape, machine, has_rope_cache=has_rope_cache)
        first = {name: self.data.pop(name) for name in ("q_latent", "q_pe", "latent_cache")}
        rows = machine.strided("lc", [self.num_pages, shape.page_size * shape.row_bytes], "uint8")
        centers = T.Tensor([2, shape.kv_lora_rank], shape.dtype)
        self.data = {**first, "latent_cache": rows, "centers": centers, **self.data}


def twice(value: float) -> int:
    """Two copies of a number of bfloat16 in 32 bits."""
    (bits,) = struct.unpack(">H", struct.pack(">f", value)[:2])
    return bits * 0x10001


def coded_row(shape: CodedShape, on_cpu: bool = False) -> CodedRow:
    return CodedRow(shape.kv_lora_rank, shape.bits, on_cpu, fused=True)


@dataclass(frozen=True)
class PortableStatic(swap_ab.Static):
    def latent_source(self, call, memory):
        return (read_tile, self, call, Unit(), memory.c_tile)


@T.macro
def read_tile(work, t0, k, call, x, tile):
    """The tokens from ``t0`` on, dequantised; zeros behind the latent's width."""
    row, thread = coded_row(k.shape, k.machine.on_cpu), k.machine.thread
    threads = 1 if k.machine.on_cpu else k.choice.threads
    tokens = int(tile.shape[0]) // len(work.pieces)
    first = t0 % work.page_size if len(work.pieces) == 1 else 0
    for u in work.pieces:
        for r in T.serial(-(-tokens * row.units // threads)):
            unit = r * threads + thread
            if unit < tokens * row.units:
                i, g, h = unit // row.units, unit % row.units // RUNS, unit % RUNS
                at = (work.pages[u], (first + i) * k.shape.row_bytes)
                dequantise(row, call.latent_cache, at, g, h, x)
                for e in T.unroll(2 * RUN):
                    column = g * CODE_BLOCK + (h + e // RUN * RUNS) * RUN + e % RUN
                    tile[u * tokens + i, column] = x.values[e] + T.cast(call.centers[x.second[0], column], T.float32)
    if int(tile.shape[1]) > k.d_c:
        for i, d in k.machine.parallel(int(tile.shape[0]), int(tile.shape[1]) - k.d_c):
            tile[i, k.d_c + d] = T.cast(0, tile.dtype)


def make_codes_portable(shape: CodedShape, choice: KernelChoice, machine: Machine = GPU):
    """A TileLang function ``mla_decode_codes_portable``; :class:`CodedTypes` has its arguments."""
    return swap_ab._make(PortableStatic(shape, choice, machine), CodedTypes(shape, machine), swap_ab.allocate)


class Codes:
    """Properties of a CTA whose warpgroups dequantise, beside those of ``swap_ab_ws`` and ``swap_ab_cluster``."""

    row = property(lambda k: coded_row(k.shape))
    wideners = property(lambda k: k.choice.threads - k.latent_readers - WARPGROUP)  # threads that dequantise
    latent_writers = property(lambda k: k.wideners)
    registers = property(lambda k: k.choice.registers[0])
    streaming_registers = property(lambda k: k.choice.registers[2])
    source = property(lambda k: super().source + INLINE)
    swizzled = property(lambda k: ("c_ring", "k_ring") if k.makes_keys else ("c_ring",))
    half = property(lambda k: "true" if k.dtype == "float16" else "false")
    pieces = property(lambda k: list(range(BLOCK // PIECE)))  # of a tile
    parts = property(lambda k: k.latent_cols // k.slot_cols)  # slots of the ring that a tile takes
    own_width = property(lambda k: min(k.d_c, k.latent_cols))  # columns of a CTA that a row has
    units = property(lambda k: k.own_width // (2 * RUN))
    quads = property(lambda k: 4 if k.units % 4 == 0 else 2)  # units of a row that neighbouring threads have
    # Groups of threads that dequantise rows r and r + 2: there the swizzle exchanges the halves of 64 bytes, so that
    # no two of eight threads write to the same banks.
    groups_of_row = property(lambda k: k.units // k.quads)
    at_once = property(lambda k: k.wideners // (2 * k.quads) // k.groups_of_row)  # pairs of rows

    @property
    def curve(self) -> str:
        """C++ arguments: the bend of a trellis's levels, and what makes 64 and a level's number that level's x."""
        trellis = self.row.trellis
        return "0, 0" if trellis is None else f"{twice(trellis.bend)}, {twice(-64 - trellis.middle)}"

    @property
    def rounds(self) -> str:
        """C++ arguments: pairs of rows at once; every thread has a row in every round; units loaded ahead."""
        all_busy = 2 * self.at_once * self.units == self.wideners and PIECE // 2 % self.at_once == 0
        ahead = 2 if self.at_once < PIECE // 2 and self.choice.registers[3] >= LEAST_AHEAD else 1
        return f"{self.at_once}, {str(all_busy).lower()}, {ahead}"

    def unit(self, thread):
        """Unit of a CTA's columns that a thread has in every row."""
        return thread // (2 * self.quads) % self.groups_of_row * self.quads + thread % self.quads

    def token(self, thread, r):
        """Row of a piece that a thread has in its r-th round, from 16 on none."""
        pair = thread // (2 * self.quads) // self.groups_of_row + r * self.at_once
        return pair // 2 * 4 + pair % 2 + thread // self.quads % 2 * 2

    def allocate(self) -> dict:
        stages = self.choice.code_stages
        return super().allocate() | {
            "codes": T.alloc_shared([stages, PIECE, self.row.words], T.int32),
            "held": T.alloc_shared([stages], T.int32),  # 0: the piece lies on no page
            "codes_full": T.alloc_barrier([1] * stages),
            "codes_free": T.alloc_barrier([self.wideners] * stages),
        }


class Static(Codes, swap_ab_ws.Static):
    pass


class ClusterStatic(Codes, swap_ab_cluster.Static):
    pass


class LatentStatic(Codes, latent_ws.Static):
    pass


class LatentClusterStatic(Codes, swap_ab_cluster.LatentStatic):
    pass


@T.macro
def stream_codes(k, work, call, memory, thread, leader):
    """One warp: the pieces of every tile of this CTA's fragments."""
    stages, num_pages = k.choice.code_stages, call.latent_cache.shape[0]
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for i in T.serial(work.tiles):
            t0 = work.first_token(i)
            for v in T.serial(len(k.pieces)):  # unrolled, it takes more registers than may be left
                n = (work.done + i) * len(k.pieces) + v
                slot = n % stages
                page = work.block_table[work.sequence, T.min((t0 + v * PIECE) // k.page_size, work.last_page())]
                in_page = (t0 + v * PIECE) % k.page_size
                T.barrier_wait(memory.codes_free[slot], ((n // stages) & 1) ^ 1)
                if thread == leader:
                    T.call_extern(
                        "handle",
                        "load_piece",
                        T.access_ptr(memory.codes[slot, 0, 0], OPAQUE, PIECE * k.row.words),
                        T.address_of(
                            call.latent_cache[T.max(0, T.min(page, num_pages - 1)), in_page * k.shape.row_bytes]
                        ),
                        T.address_of(memory.codes_full[slot]),
                        PIECE * k.shape.row_bytes,
                        T.access_ptr(memory.held[slot], OPAQUE, 1),
                        T.cast((page >= 0) & (page < num_pages), T.int32),
                    )
        device.end_fragment(work)


@T.macro
def widen(k, half, work, memory, call, thread):
    """Warpgroups that dequantise columns of CTA ``half`` of every tile of this CTA's fragments; a thread has the same
    columns of all rows."""
    T.set_max_nreg(k.choice.registers[3], int(k.choice.registers[3] * k.choice.threads * k.choice.ctas_per_sm >= 65536))
    row, stages, code_stages = k.row, k.choice.num_stages, k.choice.code_stages
    centers = T.alloc_local([4 * RUN], "uint32")
    own, h = k.unit(thread) // RUNS * CODE_BLOCK, k.unit(thread) % RUNS  # first column of its block
    left = half * k.own_width + own  # beyond the latent's width: zeros
    first, is_padding = T.min(left, k.d_c - CODE_BLOCK), T.cast(left >= k.d_c, T.int32)
    column = own % k.slot_cols + h * RUN
    pair = T.if_then_else(thread < 2 * k.at_once * k.units, k.token(thread, 0) // 4 * 2 + k.token(thread, 0) % 2, PIECE)
    T.call_extern(
        "handle",
        "load_centers",
        T.access_ptr(centers[0], "w", 4 * RUN),
        T.address_of(call.centers[0, first + h * RUN]),
        T.address_of(call.centers[1, first + h * RUN]),
    )
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for i in T.serial(work.tiles):
            n = work.done + i
            for u in list(range(k.parts)):
                part = n * k.parts + u
                T.barrier_wait(memory.c_free[part % stages], ((part // stages) & 1) ^ 1)
            slot = (n * k.parts + own // k.slot_cols) % stages
            for v in T.serial(len(k.pieces)):  # unrolled, it leaves the instruction cache
                m = n * len(k.pieces) + v
                at = m % code_stages
                T.barrier_wait(memory.codes_full[at], (m // code_stages) & 1)
                T.call_extern(
                    "handle",
                    f"widen_piece<{k.half}, {row.bits}, {k.curve}, {row.words}, {k.rounds}>",
                    T.access_ptr(memory.c_ring[slot, v * PIECE, column // 64 * 64], OPAQUE, 64 * PIECE),
                    T.access_ptr(memory.codes[at, 0, 0], "r", PIECE * row.words),
                    T.access_ptr(centers[0], "r", 4 * RUN),
                    pair,
                    thread // k.quads % 2,
                    column % 64 // RUN,
                    first // CODE_BLOCK,
                    h,
                    T.if_then_else(is_padding != 0, 0, memory.held[at]),
                )
                T.barrier_arrive(memory.codes_free[at])
            T.fence_proxy_async()
            for u in list(range(k.parts)):
                T.barrier_arrive(memory.c_full[(n * k.parts + u) % stages])
        device.end_fragment(work)


@T.macro
def clear_padding(k, memory, thread):
    """Columns behind the latent's width, of every slot, once: nothing else writes them."""
    padding = k.latent_cols - k.own_width
    if padding > 0:
        for r in T.serial(-(-k.choice.num_stages * BLOCK * padding // k.choice.threads)):
            e = r * k.choice.threads + thread
            if e < k.choice.num_stages * BLOCK * padding:
                memory.c_ring[e // padding // BLOCK, e // padding % BLOCK, k.own_width + e % padding] = T.cast(
                    0, k.dtype
                )
        T.fence_proxy_async()
        T.sync_threads()


def make_codes_ws(shape: CodedShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_codes_ws`` for sm_90; :class:`CodedTypes` has its arguments."""
    k = Static(shape, choice)
    return make_streaming(k, CodedTypes(shape), consume, None, stream_codes, widen, clear_padding)


def make_codes_latent_ws(shape: CodedShape, choice: KernelChoice):
    """:func:`make_codes_ws` without a rope_cache: warpgroups make keys of the dequantised tiles."""
    k, types = LatentStatic(shape, choice), CodedTypes(shape, has_rope_cache=False)
    return make_streaming(k, types, consume, latent_ws.make_keys, stream_codes, widen, clear_padding)


def make_codes_cluster(shape: CodedShape, choice: KernelChoice):
    """A TileLang function ``mla_decode_codes_cluster`` for sm_90; :class:`CodedTypes` has its arguments. Both CTAs of a
    cluster read whole coded rows, and each dequantises its own columns."""
    k = ClusterStatic(shape, choice)
    return make_streaming(k, CodedTypes(shape), swap_ab_cluster.consume, None, stream_codes, widen)


def make_codes_latent_cluster(shape: CodedShape, choice: KernelChoice):
    """:func:`make_codes_cluster` without a rope_cache."""
    k, types = LatentClusterStatic(shape, choice), CodedTypes(shape, has_rope_cache=False)
    cluster = swap_ab_cluster
    return make_streaming(k, types, cluster.consume, cluster.make_keys, stream_codes, widen)
