"""Kernels over paged caches of codes: rows coded as they are appended, and pages dequantised.

A coded row is read as 32-bit words. A thread takes a unit: of a group of codes the runs of 8 elements h and h + R, with
R = group / 16, whose codes share words where they have at most 4 bits.
"""

from dataclasses import dataclass

import tilelang.language as T
import torch
from torch import Tensor

from mha2mla.kernels.group_codes.api import LARGEST_HALF, PLANES
from mha2mla.kernels.machine import EXACT_PASS_CONFIGS, Buffers, compiler
from mha2mla.kernels.ops import aligned, capability, dtype_name, on_device

RUN = 8  # neighbouring elements: 16 bytes of a 16-bit row
LARGEST_FLOAT = 3.4028234663852886e38
NAN_HALF = 0x7E00


@dataclass(frozen=True)
class CodedRow:
    """Words of a coded row of ``width`` elements, a multiple of ``group``; scales and offsets have 16 bits."""

    width: int
    bits: int
    group: int
    on_cpu: bool = False
    fused: bool = False  # a product and a sum may be rounded once; else each as torch's

    groups = property(lambda k: k.width // k.group)
    runs = property(lambda k: k.group // RUN // 2)  # units of a group
    units = property(lambda k: k.groups * k.runs)
    group_words = property(lambda k: k.group * k.bits // 32)
    words = property(lambda k: k.groups * (1 + k.group_words))
    is_paired = property(lambda k: k.groups % 2 == 0 and k.group_words % 2 == 0)
    levels = property(lambda k: 2**k.bits - 1)

    @property
    def planes(self) -> list[tuple[int, int, int, int]]:
        """Planes of a group's codes: bits, shift in a code, first word and bytes of each."""
        found, shift, first = [], 0, 0
        for plane in PLANES:
            if self.bits & plane:
                found.append((plane, shift, first, self.group * plane // 8))
                shift, first = shift + plane, first + self.group * plane // 32
        return found

    def product(self, a, b):
        return a * b if self.on_cpu or self.fused else T.ieee_mul(a, b)


class Unit(Buffers):
    """A thread's unit of a row: ``values`` [16] of its two runs, ``words`` they come from; ``scale`` and ``offset`` of
    its group; ``second``: 1 where the row is coded from the second center."""

    def __init__(self, k: CodedRow):
        super().__init__(
            words=T.alloc_local([4], T.int32),
            values=T.alloc_local([2 * RUN], T.float32),
            scale=T.alloc_local([1], T.float32),
            offset=T.alloc_local([1], T.float32),
            second=T.alloc_local([1], T.int32),
        )


def word_at(source, at, index):
    """The 32-bit word ``index`` of a row: of ``source[*at]``, or where that is bytes of those from ``at[-1]`` on."""
    if source.dtype != "uint8":
        return source[(*at, index)]
    first = at[-1] + 4 * index
    parts = [T.shift_left(T.cast(source[(*at[:-1], first + b)], T.int32), 8 * b) for b in range(4)]
    return T.bitwise_or(T.bitwise_or(parts[0], parts[1]), T.bitwise_or(parts[2], parts[3]))


def half_at(source, at, index, mask=0xFFFF):
    """The float16 number ``index`` of a row, of whose bits ``mask`` stay, in float32."""
    bits = T.bitwise_and(T.shift_right(word_at(source, at, index // 2), index % 2 * 16), mask)
    return as_half(bits)


def as_half(bits):
    """The float16 number of 16 bits, in float32."""
    return T.cast(T.reinterpret(T.cast(bits, "uint16"), T.float16), T.float32)


@T.macro
def find_center(k, source, at, x):
    """``second``: 1 where the row is coded from the second center."""
    x.second[0] = T.bitwise_and(T.shift_right(word_at(source, at, k.groups // 2), k.groups % 2 * 16 + 15), 1)


@T.macro
def load_words(k, source, at, first, x, place):
    """Two of a row's words from ``first`` on, which is even where every group begins at an even word."""
    if k.is_paired and source.dtype != "uint8":
        for v in T.vectorized(2):
            x.words[place + v] = source[(*at, first + v)]
    else:
        for v in list(range(2)):
            x.words[place + v] = word_at(source, at, first + v)


@T.macro
def dequantise(k, source, at, g, h, x):
    """Unit ``h`` of group ``g`` of the row ``source[*at]``, less its center."""
    x.offset[0] = half_at(source, at, g)
    x.scale[0] = half_at(source, at, k.groups + g, 0x7FFF)  # the sign is the center's
    for e in T.unroll(2 * RUN):
        x.values[e] = 0.0
    for bits, shift, word, size in list(k.planes):
        first = k.groups + g * k.group_words + word
        if bits == 8:  # a byte is a code
            for u in list(range(2)):
                load_words(k, source, at, first + u * (k.group // 8) + 2 * h, x, 2 * u)
            for e in list(range(2 * RUN)):
                x.values[e] = T.cast(T.bitwise_and(T.shift_right(x.words[e // 4], e % 4 * 8), 255), T.float32)
        elif size >= RUN:
            load_words(k, source, at, first + h % (size // RUN) * 2, x, 0)
            for e in list(range(2 * RUN)):
                place = e % 4 * 8 + bits * (h // (size // RUN) + e // RUN * (k.group // 2 // size))
                x.values[e] += T.cast(
                    T.shift_left(
                        T.bitwise_and(T.shift_right(x.words[e % RUN // 4], place), 2**bits - 1), shift
                    ),
                    T.float32,
                )  # fmt: skip
        else:  # 4 bytes, of 32 elements a bit each
            x.words[0] = word_at(source, at, first)
            for e in list(range(2 * RUN)):
                place = e % 4 * 8 + 2 * h + e % RUN // 4 + e // RUN * (k.group // 8)
                x.values[e] += T.cast(
                    T.shift_left(T.bitwise_and(T.shift_right(x.words[0], place), 1), shift), T.float32
                )
    for e in T.unroll(2 * RUN):
        x.values[e] = k.product(x.values[e], x.scale[0]) + x.offset[0]


def pages_of(k: CodedRow, pages, page_size: int, page_words: int | None, dtype: str):
    """Type of a cache's coded rows [P,page,words] as numbers of ``dtype``: dense in a page, ``page_words`` words from a
    page to the next."""
    numbers = k.words * 4 // T.dtype(dtype).itemsize
    stride = page_size * k.words if page_words is None else page_words
    return T.StridedTensor([pages, page_size, numbers], [stride * numbers // k.words, numbers, 1], dtype)


def make_read_codes(
    *, width: int, bits: int, group: int, page_size: int, dtype: str, center_dtype: str | None,
    page_words: int | None = None, threads: int = 128, on_cpu: bool = False,
):  # fmt: skip
    """A TileLang function ``read_codes``, a block a page of the table.

    Args:
        width, bits, group: of a coded row; ``group`` divides ``width``.
        page_size: rows of a page.
        page_words: from a page to the next; None: those of its rows.
        dtype: of the dequantised rows.
        center_dtype: of the two centers from whose nearer one rows are coded; None: there are none.
        threads: of a block.
        on_cpu: compile for TileLang's C target.

    The function's arguments: latent_cache [P,page,words] int32, block_table [N] int32, centers [2,width], out
    [N,page,width] (contiguous). Pages that the table lacks are left as they were.
    """
    k = CodedRow(width, bits, group, on_cpu)
    threads = 1 if on_cpu else threads
    near, pages, entries = center_dtype or dtype, T.dynamic("pages"), T.dynamic("entries")

    @T.prim_func
    def read_codes(
        latent_cache: pages_of(k, pages, page_size, page_words, T.int32),
        block_table: T.Tensor([entries], T.int32),
        centers: T.Tensor([2, width], near),
        out: T.Tensor([entries, page_size, width], dtype),
    ):
        with T.Kernel(entries, threads=threads) as entry:
            x = Unit(k)
            page = T.alloc_local([1], T.int32)
            held = T.alloc_local([RUN], dtype)
            center = T.alloc_local([RUN], near)
            thread = 0 if on_cpu else T.get_thread_binding()
            page[0] = block_table[entry]
            if (page[0] >= 0) & (page[0] < pages):
                for r in T.serial(-(-page_size * k.units // threads)):
                    unit = r * threads + thread
                    if unit < page_size * k.units:
                        row, g, h = unit // k.units, unit % k.units // k.runs, unit % k.runs
                        dequantise(k, latent_cache, (page[0], row), g, h, x)
                        if center_dtype is not None:
                            find_center(k, latent_cache, (page[0], row), x)
                        for u in list(range(2)):
                            first = g * group + (h + u * k.runs) * RUN
                            if center_dtype is not None:
                                for v in T.vectorized(RUN):
                                    center[v] = centers[x.second[0], first + v]
                                for v in T.unroll(RUN):
                                    x.values[u * RUN + v] += T.cast(center[v], T.float32)
                            for v in T.unroll(RUN):
                                held[v] = T.cast(x.values[u * RUN + v], dtype)
                            for v in T.vectorized(RUN):
                                out[entry, row, first + v] = held[v]

    return read_codes


def make_append_codes(
    *, width: int, bits: int, group: int, page_size: int, dtype: str, center_dtype: str | None,
    page_words: int | None = None, on_cpu: bool = False,
):  # fmt: skip
    """A TileLang function ``append_codes``, a warp a row and a lane a group.

    Args:
        width, bits, group, page_size, center_dtype, page_words, on_cpu: as of :func:`make_read_codes`.
        dtype: of the rows.

    The function's arguments: rows [N,width] (contiguous), slots [N] int32, centers [2,width], latent_cache
    [P,page,words] int32. A slot outside the cache writes nothing.
    """
    k = CodedRow(width, bits, group, on_cpu)
    lanes = 1 if on_cpu else 32
    rounds = -(-k.groups // lanes)
    near, tokens, pages = center_dtype or dtype, T.dynamic("tokens"), T.dynamic("pages")

    @T.macro
    def load_group(rows, centers, token, g, x):
        """Elements of a group, less their center."""
        for r in T.serial(group // RUN):
            for v in T.vectorized(RUN):
                x.vector[v] = rows[token, g * group + r * RUN + v]
            for v in T.unroll(RUN):
                x.values[r * RUN + v] = T.cast(x.vector[v], T.float32)
                if center_dtype is not None:
                    x.values[r * RUN + v] -= T.cast(centers[x.second[0], g * group + r * RUN + v], T.float32)

    @T.macro
    def find_nearer(rows, centers, token, lane, x):
        """In float64, in which squares are exact: which center is nearer does not depend on the order of the sums."""
        for c in T.unroll(2):
            x.distance[c] = T.float64(0)
            x.second[0] = c
            for r in T.serial(rounds):
                if r * lanes + lane < k.groups:
                    load_group(rows, centers, token, r * lanes + lane, x)
                    for e in T.serial(group):
                        x.distance[c] += T.cast(x.values[e], "float64") * T.cast(x.values[e], "float64")
            if not on_cpu:
                for v in list(range(5)):
                    x.distance[c] += T.shfl_xor(x.distance[c], 1 << v)
        x.second[0] = T.if_then_else(x.distance[1] < x.distance[0], 1, 0)

    @T.macro
    def find_codes(x):
        """``codes`` of a group, its offset and its scale."""
        x.bounds[0] = x.values[0]
        x.bounds[1] = x.values[0]
        x.bad[0] = 0
        for e in T.serial(group):
            x.bounds[0] = T.min(x.bounds[0], x.values[e])
            x.bounds[1] = T.max(x.bounds[1], x.values[e])
            x.bad[0] = T.if_then_else(T.max(x.values[e], -x.values[e]) <= LARGEST_FLOAT, x.bad[0], 1)  # not for NaN
        x.stored[0] = T.cast(x.bounds[0], T.float16)
        x.offset[0] = T.cast(x.stored[0], T.float32)
        x.bounds[1] = (x.bounds[1] - x.offset[0]) / T.float32(k.levels)
        if x.bounds[1] <= LARGEST_FLOAT:
            x.bounds[1] = T.min(x.bounds[1], T.float32(LARGEST_HALF))
        x.stored[1] = T.cast(T.if_then_else(x.bounds[1] > 0, x.bounds[1], T.float32(0)), T.float16)
        if x.bad[0] != 0:
            x.stored[0] = T.reinterpret(T.cast(NAN_HALF, "uint16"), T.float16)
            x.stored[1] = T.cast(0, T.float16)
        x.bounds[1] = T.cast(x.stored[1], T.float32)
        for e in T.serial(group):
            x.codes[e] = 0
            if x.bounds[1] > 0:
                x.bounds[0] = T.call_extern("float32", "nearbyintf", (x.values[e] - x.offset[0]) / x.bounds[1])
                x.codes[e] = T.cast(T.max(0.0, T.min(x.bounds[0], T.float32(k.levels))), T.int32)

    @T.macro
    def store_group(latent_cache, halves, at, g, x):
        halves[(*at, g)] = x.stored[0]
        halves[(*at, k.groups + g)] = x.stored[1]
        if center_dtype is not None:
            if (g == 0) & (x.second[0] != 0):
                halves[(*at, k.groups)] = T.reinterpret(
                    T.bitwise_or(T.reinterpret(x.stored[1], "uint16"), T.cast(0x8000, "uint16")), T.float16
                )
        for plane, shift, first, size in list(k.planes):
            for w in list(range(size // 4)):
                x.word[0] = 0
                for b in list(range(4)):
                    for i in list(range(8 // plane)):
                        x.word[0] = T.bitwise_or(
                            x.word[0],
                            T.shift_left(
                                T.bitwise_and(T.shift_right(x.codes[4 * w + b + size * i], shift), 2**plane - 1),
                                8 * b + plane * i,
                            ),
                        )
                latent_cache[(*at, k.groups + g * k.group_words + first + w)] = x.word[0]

    @T.prim_func
    def append_codes(
        rows: T.Tensor([tokens, width], dtype),
        slots: T.Tensor([tokens], T.int32),
        centers: T.Tensor([2, width], near),
        latent_cache: pages_of(k, pages, page_size, page_words, T.int32),
        halves: pages_of(k, pages, page_size, page_words, T.float16),
    ):
        with T.Kernel(tokens, threads=lanes) as token:
            x = Buffers(
                vector=T.alloc_local([RUN], dtype),
                values=T.alloc_local([group], T.float32),
                codes=T.alloc_local([group], T.int32),
                bounds=T.alloc_local([2], T.float32),
                offset=T.alloc_local([1], T.float32),
                stored=T.alloc_local([2], T.float16),
                distance=T.alloc_local([2], "float64"),
                second=T.alloc_local([1], T.int32),
                bad=T.alloc_local([1], T.int32),
                word=T.alloc_local([1], T.int32),
            )
            lane = 0 if on_cpu else T.get_thread_binding()
            if (slots[token] >= 0) & (slots[token] < pages * page_size):
                at = (slots[token] // page_size, slots[token] % page_size)
                x.second[0] = 0
                if center_dtype is not None:
                    find_nearer(rows, centers, token, lane, x)
                for r in T.serial(rounds):
                    if r * lanes + lane < k.groups:
                        load_group(rows, centers, token, r * lanes + lane, x)
                        find_codes(x)
                        store_group(latent_cache, halves, at, r * lanes + lane, x)

    return append_codes


compile_read_codes = compiler(make_read_codes, EXACT_PASS_CONFIGS)
compile_append_codes = compiler(make_append_codes, EXACT_PASS_CONFIGS)


def launch_read_codes(
    latent_cache: Tensor, block_table: Tensor, centers: Tensor | None, width: int, bits: int, group: int,
    dtype: torch.dtype, out: Tensor,
) -> None:  # fmt: skip
    """Run the kernel; shapes as of :func:`mha2mla.kernels.read_codes`."""
    if out.numel() == 0:
        return
    with on_device(out.device):
        kernel = _compiled(compile_read_codes, out, latent_cache, bits, group, centers)
        kernel(latent_cache.view(torch.int32), block_table.flatten(), _given(centers, out), out)


def launch_append_codes(
    latent: Tensor, latent_cache: Tensor, slots: Tensor, centers: Tensor | None, bits: int, group: int
) -> None:
    """Run the kernel; shapes as of :func:`mha2mla.kernels.append_codes`."""
    if latent.numel() == 0 or latent_cache.numel() == 0:
        return
    with on_device(latent.device):
        kernel = _compiled(compile_append_codes, latent, latent_cache, bits, group, centers)
        words, halves = latent_cache.view(torch.int32), latent_cache.view(torch.float16)
        kernel(aligned(latent), slots.contiguous(), _given(centers, latent), words, halves)


def _compiled(compile_kernel, rows: Tensor, latent_cache: Tensor, bits: int, group: int, centers: Tensor | None):
    """The kernel for rows [..., width] and pages like ``latent_cache``'s."""
    return compile_kernel(
        capability(rows.device), width=rows.shape[-1], bits=bits, group=group, page_size=latent_cache.shape[1],
        page_words=latent_cache.stride(0) // 4, dtype=dtype_name(rows.dtype),
        center_dtype=None if centers is None else dtype_name(centers.dtype),
    )  # fmt: skip


def _given(centers: Tensor | None, like: Tensor) -> Tensor:
    """Without centers, what stands in for them."""
    return like.new_empty(2, like.shape[-1]) if centers is None else aligned(centers)
