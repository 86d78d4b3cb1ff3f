"""MLA decode over integer codes of latents: tiles are dequantised into the 16-bit tiles of ``swap_ab`` and its kin.

``codes_portable``: threads read rows from global memory. ``codes_ws``, for Hopper: bulk copies bring pieces of 16
coded rows, which are contiguous whatever their width; one or two warpgroups dequantise them, centers included, into
the ring of ``swap_ab_ws``, whose other parts are unchanged. ``codes_cluster`` does so for ``swap_ab_cluster``.
"""

from dataclasses import dataclass

import tilelang.language as T

from mha2mla.kernels.group_codes.kernel import RUN, CodedRow, Unit, dequantise, find_center
from mha2mla.kernels.machine import GPU, WARPGROUP, Machine
from mha2mla.kernels.mla_decode import latent_ws, swap_ab, swap_ab_cluster, swap_ab_ws
from mha2mla.kernels.mla_decode.codes_selection import PIECE, CodedShape
from mha2mla.kernels.mla_decode.static import MLATypes
from mha2mla.kernels.mla_decode.swap_ab_ws import BLOCK, consume, make_streaming
from mha2mla.kernels.split_kv import device
from mha2mla.kernels.split_kv.choice import KernelChoice

# Access that an inline function declares for memory that it writes: as in ``latent_ws``.
OPAQUE = "r"
LEAST_UNROLLED = 80  # registers above which a thread dequantises several units at a time

INLINE = """
static __device__ __forceinline__ void load_piece(void* place, const void* source, void* barrier, int bytes,
                                                  int* is_held, int held) {
  *is_held = held;
  const unsigned full = __cvta_generic_to_shared(barrier), to = __cvta_generic_to_shared(place);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(source), "r"(bytes), "r"(full) : "memory");
}
// values and their center's elements, in 16 bits; zeros where the row is not held
template <bool half>
static __device__ __forceinline__ void store_run(void* place, const float* values, const void* center, int held) {
  const uint4 near = __ldg(static_cast<const uint4*>(center));
  const unsigned two[4] = {near.x, near.y, near.z, near.w};
  unsigned pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low, high;
    if constexpr (half)
      asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
          : "=f"(low), "=f"(high) : "r"(two[i]));
    else low = __uint_as_float(two[i] << 16), high = __uint_as_float(two[i] & 0xffff0000u);
    low += values[2 * i], high += values[2 * i + 1];
    if constexpr (half) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair[i]) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair[i]) : "f"(high), "f"(low));
    pair[i] = held ? pair[i] : 0;
  }
  *static_cast<uint4*>(place) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
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


def coded_row(shape: CodedShape, on_cpu: bool = False) -> CodedRow:
    return CodedRow(shape.kv_lora_rank, *shape.code, on_cpu, fused=True)


@dataclass(frozen=True)
class PortableStatic(swap_ab.Static):
    def latent_source(self, call, memory):
        return (read_tile, self, call, Unit(coded_row(self.shape, self.machine.on_cpu)), memory.c_tile)


@T.macro
def read_tile(work, t0, k, call, x, tile):
    """The tokens from ``t0`` on, dequantised; zeros behind the latent's width."""
    row, on_cpu = coded_row(k.shape, k.machine.on_cpu), k.machine.on_cpu
    threads, thread = 1 if on_cpu else k.choice.threads, 0 if on_cpu else T.get_thread_binding()
    tokens = int(tile.shape[0]) // len(work.pieces)
    first = t0 % work.page_size if len(work.pieces) == 1 else 0
    for u in work.pieces:
        for r in T.serial(-(-tokens * row.units // threads)):
            unit = r * threads + thread
            if unit < tokens * row.units:
                i, g, h = unit // row.units, unit % row.units // row.runs, unit % row.runs
                at = (work.pages[u], (first + i) * k.shape.row_bytes)
                dequantise(row, call.latent_cache, at, g, h, x)
                find_center(row, call.latent_cache, at, x)
                for e in T.unroll(2 * RUN):
                    column = g * row.group + (h + e // RUN * row.runs) * RUN + e % RUN
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
    x, held = Unit(row), T.alloc_local([1], T.int32)
    rounds = T.unroll if k.choice.registers[3] > LEAST_UNROLLED else T.serial
    own, h = k.unit(thread) // row.runs * row.group, k.unit(thread) % row.runs  # first column of its group
    left = half * k.own_width + own  # beyond the latent's width: zeros
    first, is_padding = T.min(left, k.d_c - row.group), T.cast(left >= k.d_c, T.int32)
    for f in T.serial(work.fragments):
        device.read_fragment(work, f)
        for i in T.serial(work.tiles):
            n = work.done + i
            for u in list(range(k.parts)):
                part = n * k.parts + u
                T.barrier_wait(memory.c_free[part % stages], ((part // stages) & 1) ^ 1)
            slot = (n * k.parts + own // k.slot_cols) % stages
            for v in k.pieces:
                m = n * len(k.pieces) + v
                at = m % code_stages
                T.barrier_wait(memory.codes_full[at], (m // code_stages) & 1)
                held[0] = T.if_then_else(is_padding != 0, 0, memory.held[at])
                for r in rounds(-(-PIECE // 2 // k.at_once)):
                    token = k.token(thread, r)
                    if (token < PIECE) & (thread < 2 * k.at_once * k.units):
                        dequantise(row, memory.codes, (at, token), first // row.group, h, x)
                        find_center(row, memory.codes, (at, token), x)
                        for u in list(range(2)):
                            column = own % k.slot_cols + (h + u * row.runs) * RUN
                            T.call_extern(
                                "handle",
                                f"store_run<{k.half}>",
                                T.access_ptr(memory.c_ring[slot, v * PIECE + token, column], OPAQUE, RUN),
                                T.access_ptr(x.values[u * RUN], "r", RUN),
                                T.address_of(call.centers[x.second[0], first + (h + u * row.runs) * RUN]),
                                held[0],
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
