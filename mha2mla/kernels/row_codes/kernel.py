"""Kernels over paged caches of codes: rows coded as they are appended, and pages dequantised.

A coded row is read as 32-bit words. A thread takes a unit: of a block of 32 codes the runs of 8 elements h and h + 2,
whose codes share words where they have at most 4 bits.
"""

import math
from dataclasses import dataclass

import tilelang.language as T
import torch
from torch import Tensor

from mha2mla.geometry import CODE_BLOCK
from mha2mla.kernels.machine import EXACT_PASS_CONFIGS, Buffers, compiler
from mha2mla.kernels.ops import aligned, capability, dtype_name, on_device
from mha2mla.kernels.row_codes.api import PLANES, STEPS, RowQuantizer

RUN = 8  # neighbouring elements: 16 bytes of a 16-bit row
RUNS = CODE_BLOCK // RUN // 2  # units of a block
HEADER = 1  # words before a row's codes: its scale
NAN = 0x7FC00000


@dataclass(frozen=True)
class CodedRow:
    """Words of a coded row of ``width`` elements, a multiple of 32."""

    width: int
    bits: int
    on_cpu: bool = False
    fused: bool = False  # a product and a sum may be rounded once; else each as torch's

    blocks = property(lambda k: k.width // CODE_BLOCK)
    units = property(lambda k: k.blocks * RUNS)
    words = property(lambda k: HEADER + k.blocks * k.bits)  # as many words of a block as bits of a code
    middle = property(lambda k: RowQuantizer(k.bits).middle)

    @property
    def planes(self) -> list[tuple[int, int, int, int]]:
        """Planes of a block's codes: bits, shift in a code, first word and bytes of each."""
        found, shift = [], 0
        for plane in PLANES:
            if self.bits & plane:
                found.append((plane, shift, shift, CODE_BLOCK * plane // 8))
                shift += plane
        return found

    def product(self, a, b):
        return a * b if self.on_cpu or self.fused else T.ieee_mul(a, b)


class Unit(Buffers):
    """A thread's unit of a row: ``values`` [16] of its two runs, ``words`` they come from; ``scale`` of its row;
    ``second``: 1 where the row is coded from the second center."""

    def __init__(self):
        super().__init__(
            words=T.alloc_local([4], T.int32),
            values=T.alloc_local([2 * RUN], T.float32),
            scale=T.alloc_local([1], T.float32),
            second=T.alloc_local([1], T.int32),
        )


def word_at(source, at, index):
    """The 32-bit word ``index`` of a row: of ``source[*at]``, or where that is bytes of those from ``at[-1]`` on."""
    if source.dtype != "uint8":
        return source[(*at, index)]
    first = at[-1] + 4 * index
    parts = [T.shift_left(T.cast(source[(*at[:-1], first + b)], T.int32), 8 * b) for b in range(4)]
    return T.bitwise_or(T.bitwise_or(parts[0], parts[1]), T.bitwise_or(parts[2], parts[3]))


@T.macro
def dequantise(k, source, at, g, h, x):
    """Unit ``h`` of block ``g`` of the row ``source[*at]``, less its center."""
    x.words[0] = word_at(source, at, 0)
    x.second[0] = T.bitwise_and(T.shift_right(x.words[0], 31), 1)
    x.words[0] = T.bitwise_and(x.words[0], 0x7FFFFFFF)  # the C target reinterprets variables alone
    x.scale[0] = T.reinterpret(x.words[0], T.float32)
    for e in T.unroll(2 * RUN):
        x.values[e] = 0.0
    for bits, shift, word, size in list(k.planes):
        first = HEADER + g * k.bits + word
        if bits == 8:  # a byte is a code
            for v in list(range(4)):
                x.words[v] = word_at(source, at, first + v // 2 * (CODE_BLOCK // 8) + 2 * h + v % 2)
            for e in list(range(2 * RUN)):
                x.values[e] = T.cast(T.bitwise_and(T.shift_right(x.words[e // 4], e % 4 * 8), 255), T.float32)
        elif size >= RUN:
            for v in list(range(2)):
                x.words[v] = word_at(source, at, first + h % (size // RUN) * 2 + v)
            for e in list(range(2 * RUN)):
                place = e % 4 * 8 + bits * (h // (size // RUN) + e // RUN * (CODE_BLOCK // 2 // size))
                x.values[e] += T.cast(
                    T.shift_left(
                        T.bitwise_and(T.shift_right(x.words[e % RUN // 4], place), 2**bits - 1), shift
                    ),
                    T.float32,
                )  # fmt: skip
        else:  # 4 bytes, of 32 elements a bit each
            x.words[0] = word_at(source, at, first)
            for e in list(range(2 * RUN)):
                place = e % 4 * 8 + 2 * h + e % RUN // 4 + e // RUN * (CODE_BLOCK // 8)
                x.values[e] += T.cast(
                    T.shift_left(T.bitwise_and(T.shift_right(x.words[0], place), 1), shift), T.float32
                )
    for e in T.unroll(2 * RUN):
        x.values[e] = k.product(x.values[e] - T.float32(k.middle), x.scale[0])


def pages_of(k: CodedRow, pages, page_size: int, page_words: int | None):
    """Type of a cache's coded rows [P,page,words] as int32: dense in a page, ``page_words`` words from a page to the
    next."""
    stride = page_size * k.words if page_words is None else page_words
    return T.StridedTensor([pages, page_size, k.words], [stride, k.words, 1], T.int32)


def make_read_codes(
    *, width: int, bits: int, page_size: int, dtype: str, center_dtype: str | None,
    page_words: int | None = None, threads: int = 128, on_cpu: bool = False,
):  # fmt: skip
    """A TileLang function ``read_codes``, a block a page of the table.

    Args:
        width, bits: of a coded row; ``width`` is a multiple of 32.
        page_size: rows of a page.
        page_words: from a page to the next; None: those of its rows.
        dtype: of the dequantised rows.
        center_dtype: of the two centers from whose nearer one rows are coded; None: there are none.
        threads: of a block.
        on_cpu: compile for TileLang's C target.

    The function's arguments: latent_cache [P,page,words] int32, block_table [N] int32, centers [2,width], out
    [N,page,width] (contiguous). Pages that the table lacks are left as they were.
    """
    k = CodedRow(width, bits, on_cpu)
    threads = 1 if on_cpu else threads
    near, pages, entries = center_dtype or dtype, T.dynamic("pages"), T.dynamic("entries")

    @T.prim_func
    def read_codes(
        latent_cache: pages_of(k, pages, page_size, page_words),
        block_table: T.Tensor([entries], T.int32),
        centers: T.Tensor([2, width], near),
        out: T.Tensor([entries, page_size, width], dtype),
    ):
        with T.Kernel(entries, threads=threads) as entry:
            x = Unit()
            page = T.alloc_local([1], T.int32)
            held = T.alloc_local([RUN], dtype)
            center = T.alloc_local([RUN], near)
            thread = 0 if on_cpu else T.get_thread_binding()
            page[0] = block_table[entry]
            if (page[0] >= 0) & (page[0] < pages):
                for r in T.serial(-(-page_size * k.units // threads)):
                    unit = r * threads + thread
                    if unit < page_size * k.units:
                        row, g, h = unit // k.units, unit % k.units // RUNS, unit % RUNS
                        dequantise(k, latent_cache, (page[0], row), g, h, x)
                        for u in list(range(2)):
                            first = g * CODE_BLOCK + (h + u * RUNS) * RUN
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
    *, width: int, bits: int, page_size: int, dtype: str, center_dtype: str | None,
    page_words: int | None = None, on_cpu: bool = False,
):  # fmt: skip
    """A TileLang function ``append_codes``, a warp a row and a lane a block.

    Args:
        width, bits, page_size, center_dtype, page_words, on_cpu: as of :func:`make_read_codes`.
        dtype: of the rows.

    The function's arguments: rows [N,width] (contiguous), slots [N] int32, centers [2,width], latent_cache
    [P,page,words] int32. A slot outside the cache writes nothing.
    """
    k = CodedRow(width, bits, on_cpu)
    lanes = 1 if on_cpu else 32
    rounds = -(-k.blocks // lanes)
    near, tokens, pages = center_dtype or dtype, T.dynamic("tokens"), T.dynamic("pages")

    @T.macro
    def load_block(rows, centers, token, g, x):
        """Elements of a block, less their center."""
        for r in T.serial(CODE_BLOCK // RUN):
            for v in T.vectorized(RUN):
                x.vector[v] = rows[token, g * CODE_BLOCK + r * RUN + v]
            for v in T.unroll(RUN):
                x.values[r * RUN + v] = T.cast(x.vector[v], T.float32)
                if center_dtype is not None:
                    x.values[r * RUN + v] -= T.cast(centers[x.second[0], g * CODE_BLOCK + r * RUN + v], T.float32)

    @T.macro
    def add_up(x, c):
        """Sums and the largest element of a row, of those of its lanes."""
        if not on_cpu:
            for v in list(range(5)):
                x.sums[c] += T.shfl_xor(x.sums[c], 1 << v)
                x.largest[c] = T.max(x.largest[c], T.shfl_xor(x.largest[c], 1 << v))

    @T.macro
    def find_step(rows, centers, token, lane, x):
        """``second`` and ``step``, and the energy of the row's difference in ``sums[0]``. Products are exact in
        float64, so that their sums do not depend on the order."""
        for c in T.unroll(1 if center_dtype is None else 2):
            x.sums[c] = T.float64(0)
            x.largest[c] = 0.0
            x.second[0] = c
            for r in T.serial(rounds):
                if r * lanes + lane < k.blocks:
                    load_block(rows, centers, token, r * lanes + lane, x)
                    for e in T.serial(CODE_BLOCK):
                        x.sums[c] += T.cast(x.values[e], "float64") * T.cast(x.values[e], "float64")
                        x.largest[c] = T.max(x.largest[c], T.max(x.values[e], -x.values[e]))
            add_up(x, c)
        x.second[0] = 0
        if center_dtype is not None:
            if x.sums[1] < x.sums[0]:
                x.second[0] = 1
                x.sums[0] = x.sums[1]
                x.largest[0] = x.largest[1]
        x.bounds[0] = T.float64(STEPS[bits]) * T.sqrt(x.sums[0] / T.float64(width))
        x.bounds[1] = T.cast(x.largest[0], "float64") / T.float64(k.middle)
        x.word[0] = T.int32(NAN)
        x.step[0] = T.reinterpret(x.word[0], T.float32)
        if x.sums[0] < T.float64(math.inf):  # not for NaN
            x.step[0] = T.cast(T.min(x.bounds[0], x.bounds[1]), T.float32)

    @T.macro
    def find_codes(x):
        for e in T.serial(CODE_BLOCK):
            x.codes[e] = 0
            if x.step[0] > 0:
                x.code[0] = T.call_extern("float32", "nearbyintf", x.values[e] / x.step[0] + T.float32(k.middle))
                x.code[0] = T.max(0.0, T.min(x.code[0], T.float32(2**bits - 1)))
                x.codes[e] = T.cast(x.code[0], T.int32)
                x.sums[1] += T.cast(x.values[e], "float64") * T.cast(x.code[0] - T.float32(k.middle), "float64")

    @T.macro
    def store_scale(latent_cache, at, x):
        x.code[0] = x.step[0]  # zero, or NaN
        if x.step[0] > 0:
            x.code[0] = T.cast(x.sums[0] / x.sums[1], T.float32)
        x.word[0] = T.bitwise_and(T.reinterpret(x.code[0], T.int32), 0x7FFFFFFF)  # zero may be negative
        if x.second[0] != 0:
            x.word[0] = T.bitwise_or(x.word[0], T.int32(-(2**31)))
        latent_cache[(*at, 0)] = x.word[0]

    @T.macro
    def store_block(latent_cache, at, g, x):
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
                latent_cache[(*at, HEADER + g * bits + first + w)] = x.word[0]

    @T.prim_func
    def append_codes(
        rows: T.Tensor([tokens, width], dtype),
        slots: T.Tensor([tokens], T.int32),
        centers: T.Tensor([2, width], near),
        latent_cache: pages_of(k, pages, page_size, page_words),
    ):
        with T.Kernel(tokens, threads=lanes) as token:
            x = Buffers(
                vector=T.alloc_local([RUN], dtype),
                values=T.alloc_local([CODE_BLOCK], T.float32),
                codes=T.alloc_local([CODE_BLOCK], T.int32),
                code=T.alloc_local([1], T.float32),
                step=T.alloc_local([1], T.float32),
                sums=T.alloc_local([2], "float64"),
                bounds=T.alloc_local([2], "float64"),
                largest=T.alloc_local([2], T.float32),
                second=T.alloc_local([1], T.int32),
                word=T.alloc_local([1], T.int32),
            )
            lane = 0 if on_cpu else T.get_thread_binding()
            if (slots[token] >= 0) & (slots[token] < pages * page_size):
                at = (slots[token] // page_size, slots[token] % page_size)
                find_step(rows, centers, token, lane, x)
                x.sums[1] = T.float64(0)
                for r in T.serial(rounds):
                    if r * lanes + lane < k.blocks:
                        load_block(rows, centers, token, r * lanes + lane, x)
                        find_codes(x)
                        store_block(latent_cache, at, r * lanes + lane, x)
                add_up(x, 1)
                if lane == 0:
                    store_scale(latent_cache, at, x)

    return append_codes


compile_read_codes = compiler(make_read_codes, EXACT_PASS_CONFIGS)
compile_append_codes = compiler(make_append_codes, EXACT_PASS_CONFIGS)


def launch_read_codes(
    latent_cache: Tensor, block_table: Tensor, centers: Tensor | None, width: int, bits: int,
    dtype: torch.dtype, out: Tensor,
) -> None:  # fmt: skip
    """Run the kernel; shapes as of :func:`mha2mla.kernels.read_codes`."""
    if out.numel() == 0:
        return
    with on_device(out.device):
        kernel = _compiled(compile_read_codes, out, latent_cache, bits, centers)
        kernel(latent_cache.view(torch.int32), block_table.flatten(), _given(centers, out), out)


def launch_append_codes(latent: Tensor, latent_cache: Tensor, slots: Tensor, centers: Tensor | None, bits: int) -> None:
    """Run the kernel; shapes as of :func:`mha2mla.kernels.append_codes`."""
    if latent.numel() == 0 or latent_cache.numel() == 0:
        return
    with on_device(latent.device):
        kernel = _compiled(compile_append_codes, latent, latent_cache, bits, centers)
        kernel(aligned(latent), slots.contiguous(), _given(centers, latent), latent_cache.view(torch.int32))


def _compiled(compile_kernel, rows: Tensor, latent_cache: Tensor, bits: int, centers: Tensor | None):
    """The kernel for rows [..., width] and pages like ``latent_cache``'s."""
    return compile_kernel(
        capability(rows.device), width=rows.shape[-1], bits=bits, page_size=latent_cache.shape[1],
        page_words=latent_cache.stride(0) // 4, dtype=dtype_name(rows.dtype),
        center_dtype=None if centers is None else dtype_name(centers.dtype),
    )  # fmt: skip


def _given(centers: Tensor | None, like: Tensor) -> Tensor:
    """Without centers, what stands in for them."""
    return like.new_empty(2, like.shape[-1]) if centers is None else aligned(centers)
