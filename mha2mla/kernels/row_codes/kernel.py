"""Kernels over paged caches of codes: rows coded as they are appended, and pages dequantised.

A coded row is read as 32-bit words. A thread takes a unit, which is a chain: of a block of 32 codes the runs of 8
elements h and h + 2, as nibbles of two words (and of two more where codes have more than 4 bits).
"""

import math
from dataclasses import dataclass
from itertools import product

import tilelang.language as T
import torch
from torch import Tensor

from mha2mla.geometry import CODE_BLOCK
from mha2mla.kernels.machine import EXACT_PASS_CONFIGS, WARPGROUP, Buffers, compiler
from mha2mla.kernels.ops import aligned, capability, dtype_name, on_device
from mha2mla.kernels.row_codes.api import RowQuantizer
from mha2mla.kernels.row_codes.trellis import CHAIN

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
    unit = property(lambda k: RowQuantizer(k.bits).unit)
    trellis = property(lambda k: RowQuantizer(k.bits).trellis)
    planes = property(lambda k: RowQuantizer(k.bits).planes)  # a plane's shift is its first word in a block, too

    def product(self, a, b):
        return a * b if self.fused else self.exact_product(a, b)

    def exact_product(self, a, b):
        return a * b if self.on_cpu else T.ieee_mul(a, b)


def element_of(n):
    """Element of a run that is the ``n``-th of a chain; an int or an expression."""
    return 2 * (n % 4) + n // 4


class Unit(Buffers):
    """A thread's unit of a row: ``values`` [16] of its two runs; ``low`` and ``high``: the first and the other four
    bits of its codes, a word a run; ``scale`` of its row; ``second``: 1 where the row is coded from the second
    center; and what :func:`find_level` needs."""

    def __init__(self):
        super().__init__(
            word=T.alloc_local([1], T.int32),
            low=T.alloc_local([2], T.int32),
            high=T.alloc_local([2], T.int32),
            values=T.alloc_local([2 * RUN], T.float32),
            scale=T.alloc_local([1], T.float32),
            second=T.alloc_local([1], T.int32),
            **level_buffers(),
        )


def level_buffers() -> dict:
    """Registers of a thread that looks for a ``level``; without them expressions would be expanded 27-fold."""
    return {name: T.alloc_local([1], T.float32) for name in ("level", "bent", "large")}


@T.macro
def find_level(k, number, x):
    """``level`` of number ``number``, an int32 expression; see :mod:`mha2mla.kernels.row_codes.trellis`."""
    x.level[0] = T.cast(number, T.float32) - T.float32(k.middle)
    if k.trellis is not None:
        x.bent[0] = k.exact_product(x.level[0], x.level[0])
        round_to_8(k, x.bent, x)
        x.bent[0] = k.exact_product(x.bent[0], T.float32(k.trellis.bend)) + 1.0
        round_to_8(k, x.bent, x)
        x.level[0] = k.exact_product(x.level[0], x.bent[0])
        round_to_8(k, x.level, x)


@T.macro
def round_to_8(k, value, x):
    """To 8 significant bits (Veltkamp's splitting), of what is far from the ends of float32."""
    x.large[0] = k.exact_product(value[0], T.float32(2**16 + 1))
    value[0] = x.large[0] - (x.large[0] - value[0])


def word_at(source, at, index):
    """The 32-bit word ``index`` of a row: of ``source[*at]``, or where that is bytes of those from ``at[-1]`` on."""
    if source.dtype != "uint8":
        return source[(*at, index)]
    first = at[-1] + 4 * index
    parts = [T.shift_left(T.cast(source[(*at[:-1], first + b)], T.int32), 8 * b) for b in range(4)]
    return T.bitwise_or(T.bitwise_or(parts[0], parts[1]), T.bitwise_or(parts[2], parts[3]))


def bits_at(word, place, count: int):
    """``count`` bits of a word from ``place`` on."""
    return T.bitwise_and(T.shift_right(word, place), 2**count - 1)


def mask_of(plane: int) -> int:
    """The first ``plane`` bits of every nibble, as an int32."""
    return (2**plane - 1) * 0x11111111 - (2**32 if plane == 4 else 0)


@T.macro
def load_codes(k, source, at, g, h, x):
    """Codes of unit ``h`` of block ``g`` of the row ``source[*at]``."""
    for u in list(range(2)):
        x.low[u] = 0
        x.high[u] = 0
    for plane, shift in k.planes:
        for u in list(range(2)):
            if plane == 8:  # a byte is a code
                for v in list(range(2)):
                    x.word[0] = word_at(source, at, HEADER + g * k.bits + 4 * h + 2 * u + v)
                    for b in list(range(4)):
                        n = 4 * v + b
                        x.low[u] = T.bitwise_or(x.low[u], T.shift_left(bits_at(x.word[0], 8 * b, 4), 4 * n))
                        x.high[u] = T.bitwise_or(x.high[u], T.shift_left(bits_at(x.word[0], 8 * b + 4, 4), 4 * n))
            else:
                run = 2 * h + u
                x.word[0] = word_at(source, at, HEADER + g * k.bits + shift + run % plane)
                x.word[0] = T.bitwise_and(T.shift_right(x.word[0], plane * (run // plane)), T.int32(mask_of(plane)))
                if shift < 4:
                    x.low[u] = T.bitwise_or(x.low[u], T.shift_left(x.word[0], shift))
                else:
                    x.high[u] = T.bitwise_or(x.high[u], T.shift_left(x.word[0], shift - 4))


def number_of(k, x, u: int, n: int):
    """Number of the level of the ``n``-th element of run ``u``."""
    code = bits_at(x.low[u], 4 * n, 4)
    if k.trellis is None:
        return T.bitwise_or(code, T.shift_left(bits_at(x.high[u], 4 * n, 4), 4))
    one, two = (
        bits_at(x.low[u if n >= back else u - 1], 4 * ((n - back) % RUN), 1) if 8 * u + n >= back else 0
        for back in (1, 2)
    )
    return 4 * T.shift_right(code, 1) + 2 * T.bitwise_xor(T.bitwise_and(code, 1), two) + one


@T.macro
def dequantise(k, source, at, g, h, x):
    """Unit ``h`` of block ``g`` of the row ``source[*at]``, less its center."""
    load_codes(k, source, at, g, h, x)
    x.word[0] = word_at(source, at, 0)
    x.second[0] = bits_at(x.word[0], 31, 1)
    x.word[0] = T.bitwise_and(x.word[0], 0x7FFFFFFF)  # the C target reinterprets variables alone
    x.scale[0] = T.reinterpret(x.word[0], T.float32)
    for u, n in list(product(range(2), range(RUN))):
        find_level(k, number_of(k, x, u, n), x)
        x.values[u * RUN + element_of(n)] = k.product(x.level[0], x.scale[0])


def path_buffers() -> dict:
    """Registers of a thread that searches a chain: an element, its ``code``, subset ``number`` and, in ``word``, its
    place there; the rest is :func:`search`'s."""
    return {
        "value": T.alloc_local([1], T.float32),
        "code": T.alloc_local([1], T.int32),
        "number": T.alloc_local([1], T.int32),
        "word": T.alloc_local([2], T.int32),
        "cost": T.alloc_local([4], T.float32),
        "near": T.alloc_local([4], T.float32),
        "next": T.alloc_local([4], T.float32),
        "path": T.alloc_local([2], T.float32),
        "turns": T.alloc_local([4], T.int32),
        "numbers": T.alloc_local([8], T.int32),
        "state": T.alloc_local([1], T.int32),
    }


@T.macro
def search(k, load, take, x):
    """Codes of a chain by :meth:`Trellis.find_codes`. ``load``, a macro: element ``n`` of run ``u`` into ``value``, in
    units of levels. ``take``, of the same: what becomes of its ``code``, the last element first."""
    for s in list(range(4)):
        x.cost[s] = T.float32(math.inf if s else 0)
        x.turns[s] = 0
    for u in list(range(2)):
        for j in list(range(4)):
            x.numbers[4 * u + j] = 0
        for n in T.serial(RUN):
            load(u, n)
            for j in list(range(4)):
                levels, between = k.trellis.subset(j)
                x.near[j] = T.float32(levels[0])
                x.word[0] = 0
                for m in list(range(len(between))):
                    if x.value[0] > T.float32(between[m]):
                        x.near[j] = T.float32(levels[m + 1])
                        x.word[0] = m + 1
                x.near[j] = x.value[0] - x.near[j]
                x.near[j] = k.exact_product(x.near[j], x.near[j])
                x.numbers[4 * u + j] = T.bitwise_or(x.numbers[4 * u + j], T.shift_left(x.word[0], 4 * n))
            for s in list(range(4)):  # 2 u + u1 of this element
                x.path[0] = x.cost[2 * (s % 2)] + x.near[s]
                x.path[1] = x.cost[2 * (s % 2) + 1] + x.near[s ^ 2]
                x.next[s] = x.path[0]
                if x.path[1] < x.path[0]:
                    x.next[s] = x.path[1]
                    x.turns[s] = T.bitwise_or(x.turns[s], T.shift_left(1, RUN * u + n))
            for s in list(range(4)):
                x.cost[s] = x.next[s]
    x.state[0] = 0
    for s in list(range(1, 4)):
        if x.cost[s] < x.cost[0]:
            x.cost[0] = x.cost[s]
            x.state[0] = s
    for u in (1, 0):
        for v in T.serial(RUN):
            n = RUN - 1 - v
            x.word[1] = x.turns[0]
            for s in list(range(1, 4)):
                if x.state[0] == s:
                    x.word[1] = x.turns[s]
            x.word[1] = bits_at(x.word[1], RUN * u + n, 1)  # u2
            x.number[0] = T.bitwise_xor(x.state[0], 2 * x.word[1])
            x.word[0] = x.numbers[4 * u]
            for j in list(range(1, 4)):
                if x.number[0] == j:
                    x.word[0] = x.numbers[4 * u + j]
            x.word[0] = bits_at(x.word[0], 4 * n, 3)
            x.code[0] = 2 * x.word[0] + T.shift_right(x.state[0], 1)
            take(u, n)
            x.state[0] = 2 * T.bitwise_and(x.state[0], 1) + x.word[1]


def pages_of(k: CodedRow, pages, page_size: int, page_words: int):
    """Type of a cache's coded rows [P,page,words] as int32: dense in a page, ``page_words`` words from a page to the
    next."""
    return T.StridedTensor([pages, page_size, k.words], [page_words, k.words, 1], T.int32)


def make_read_codes(
    *, width: int, bits: int, page_size: int, page_words: int, dtype: str, center_dtype: str | None,
    on_cpu: bool = False,
):  # fmt: skip
    """A TileLang function ``read_codes``, a block a page of the table.

    Args:
        width, bits: of a coded row; ``width`` is a multiple of 32.
        page_size: rows of a page.
        page_words: from a page to the next.
        dtype: of the dequantised rows.
        center_dtype: of the two centers from whose nearer one rows are coded; None: there are none.
        on_cpu: compile for TileLang's C target.

    The function's arguments: latent_cache [P,page,words] int32, block_table [N] int32, centers [2,width], out
    [N,page,width] (contiguous). Pages that the table lacks are left as they were.
    """
    k = CodedRow(width, bits, on_cpu)
    threads = 1 if on_cpu else WARPGROUP
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
    *, width: int, bits: int, page_size: int, page_words: int, dtype: str, center_dtype: str | None,
    on_cpu: bool = False,
):  # fmt: skip
    """A TileLang function ``append_codes``, a warp a row and a lane a unit.

    Args:
        width, bits, page_size, center_dtype, page_words, on_cpu: as of :func:`make_read_codes`.
        dtype: of the rows.

    The function's arguments: rows [N,width] (contiguous), slots [N] int32, centers [2,width], latent_cache
    [P,page,words] int32. A slot outside the cache writes nothing.
    """
    k = CodedRow(width, bits, on_cpu)
    lanes = 1 if on_cpu else 32
    rounds = -(-k.units // lanes)
    near, tokens, pages = center_dtype or dtype, T.dynamic("tokens"), T.dynamic("pages")

    @T.macro
    def load_element(rows, centers, token, column, x):
        """An element, less its center."""
        x.value[0] = T.cast(rows[token, column], T.float32)
        if center_dtype is not None:
            x.value[0] -= T.cast(centers[x.second[0], column], T.float32)

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
        float64: their sums, rounded to float32, hardly depend on the order."""
        for c in T.unroll(1 if center_dtype is None else 2):
            x.sums[c] = T.float64(0)
            x.largest[c] = 0.0
            x.second[0] = c
            for e in T.serial(-(-width // lanes)):
                if e * lanes + lane < width:
                    load_element(rows, centers, token, e * lanes + lane, x)
                    x.sums[c] += T.cast(x.value[0], "float64") * T.cast(x.value[0], "float64")
                    x.largest[c] = T.max(x.largest[c], T.max(x.value[0], -x.value[0]))
            add_up(x, c)
        x.second[0] = 0
        if center_dtype is not None:
            if x.sums[1] < x.sums[0]:
                x.second[0] = 1
                x.sums[0] = x.sums[1]
                x.largest[0] = x.largest[1]
        x.bounds[0] = T.sqrt(x.sums[0] / T.float64(width)) * T.float64(k.unit)
        if k.trellis is None:
            x.bounds[0] = T.min(x.bounds[0], T.cast(x.largest[0], "float64") / T.float64(k.middle))
        x.word[0] = T.int32(NAN)
        x.step[0] = T.reinterpret(x.word[0], T.float32)
        if x.sums[0] < T.float64(math.inf):  # not for NaN
            x.step[0] = T.cast(x.bounds[0], T.float32)

    @T.macro
    def add_along(x, level):
        x.sums[1] += T.cast(x.value[0], "float64") * T.cast(level, "float64")

    @T.macro
    def find_codes(rows, centers, token, first, x):
        """Codes from 5 bits on of the unit whose first column is ``first``: ``low`` and ``high``."""
        for u in list(range(2)):
            for n in T.serial(RUN):
                load_element(rows, centers, token, first + RUNS * RUN * u + element_of(n), x)
                x.level[0] = T.call_extern("float32", "nearbyintf", x.value[0] / x.step[0] + T.float32(k.middle))
                x.level[0] = T.max(0.0, T.min(x.level[0], T.float32(2**bits - 1)))
                x.word[0] = T.cast(x.level[0], T.int32)
                x.low[u] = T.bitwise_or(x.low[u], T.shift_left(bits_at(x.word[0], 0, 4), 4 * n))
                x.high[u] = T.bitwise_or(x.high[u], T.shift_left(bits_at(x.word[0], 4, 4), 4 * n))
                add_along(x, x.level[0] - T.float32(k.middle))

    def find_path(rows, centers, token, first, x):
        """Codes up to 4 bits: ``low``."""

        def column(u, n):
            return first + RUNS * RUN * u + element_of(n)

        @T.macro
        def load(u, n):
            load_element(rows, centers, token, column(u, n), x)
            x.value[0] = x.value[0] / x.step[0]

        @T.macro
        def take(u, n):
            load_element(rows, centers, token, column(u, n), x)
            find_level(k, 4 * x.word[0] + x.number[0], x)
            add_along(x, x.level[0])
            x.low[u] = T.bitwise_or(x.low[u], T.shift_left(x.code[0], 4 * n))

        search(k, load, take, x)

    @T.macro
    def store_scale(latent_cache, at, x):
        x.level[0] = x.step[0]  # zero, or NaN
        if x.step[0] > 0:
            x.level[0] = T.cast(x.sums[0] / x.sums[1], T.float32)
        x.word[0] = T.bitwise_and(T.reinterpret(x.level[0], T.int32), 0x7FFFFFFF)  # zero may be negative
        if k.trellis is not None:  # to 8 significant bits, to nearest even
            x.word[0] += 0x7FFF + bits_at(x.word[0], 16, 1)
            x.word[0] = T.bitwise_and(x.word[0], T.int32(-(2**16)))
        if x.second[0] != 0:
            x.word[0] = T.bitwise_or(x.word[0], T.int32(-(2**31)))
        latent_cache[(*at, 0)] = x.word[0]

    @T.macro
    def pack(h, x):
        """Packs the codes of unit ``h`` into its part of the block's words."""
        for plane, shift in k.planes:
            for u in list(range(2)):
                if plane == 8:
                    for v in list(range(2)):
                        x.word[0] = 0
                        for b in list(range(4)):
                            x.word[1] = bits_at(x.high[u], 4 * (4 * v + b), 4) * 16 + bits_at(
                                x.low[u], 4 * (4 * v + b), 4
                            )
                            x.word[0] = T.bitwise_or(x.word[0], T.shift_left(x.word[1], 8 * b))
                        for of in list(range(RUNS)):
                            if h == of:
                                x.block[4 * of + 2 * u + v] = x.word[0]
                else:
                    x.word[0] = T.shift_right(x.low[u] if shift < 4 else x.high[u], shift % 4)
                    x.word[0] = T.bitwise_and(x.word[0], T.int32(mask_of(plane)))
                    for of in list(range(RUNS)):
                        run = 2 * of + u
                        if h == of:
                            x.block[shift + run % plane] = T.bitwise_or(
                                x.block[shift + run % plane], T.shift_left(x.word[0], plane * (run // plane))
                            )

    @T.prim_func
    def append_codes(
        rows: T.Tensor([tokens, width], dtype),
        slots: T.Tensor([tokens], T.int32),
        centers: T.Tensor([2, width], near),
        latent_cache: pages_of(k, pages, page_size, page_words),
    ):
        with T.Kernel(tokens, threads=lanes) as token:
            x = Buffers(
                step=T.alloc_local([1], T.float32),
                sums=T.alloc_local([2], "float64"),
                bounds=T.alloc_local([1], "float64"),
                largest=T.alloc_local([2], T.float32),
                second=T.alloc_local([1], T.int32),
                low=T.alloc_local([2], T.int32),
                high=T.alloc_local([2], T.int32),
                block=T.alloc_local([bits], T.int32),
                **path_buffers(),
                **level_buffers(),
            )
            lane = 0 if on_cpu else T.get_thread_binding()
            if (slots[token] >= 0) & (slots[token] < pages * page_size):
                at = (slots[token] // page_size, slots[token] % page_size)
                find_step(rows, centers, token, lane, x)
                x.sums[1] = T.float64(0)
                for r in T.serial(rounds):
                    unit = r * lanes + lane
                    g, h = unit // RUNS, unit % RUNS
                    for u in list(range(2)):
                        x.low[u] = 0
                        x.high[u] = 0
                    if (unit < k.units) & (x.step[0] > 0):
                        if k.trellis is None:
                            find_codes(rows, centers, token, g * CODE_BLOCK + h * RUN, x)
                        else:
                            find_path(rows, centers, token, g * CODE_BLOCK + h * RUN, x)
                    if not on_cpu or h == 0:
                        for w in list(range(bits)):
                            x.block[w] = 0
                    pack(h, x)
                    if not on_cpu:
                        for w in list(range(bits)):
                            x.block[w] = T.bitwise_or(x.block[w], T.shfl_xor(x.block[w], 1))
                    if (unit < k.units) & (h == RUNS - 1):
                        for w in list(range(bits)):
                            latent_cache[(*at, HEADER + g * bits + w)] = x.block[w]
                add_up(x, 1)
                if lane == 0:
                    store_scale(latent_cache, at, x)

    return append_codes


def make_find_codes(*, bits: int, on_cpu: bool = False):
    """A TileLang function ``find_codes``, a thread a chain, of codes of ``bits`` bits, 1 to 4.

    The function's arguments: chains [n,16] float32 in units of levels, codes [n,16] uint8.
    """
    k, count = CodedRow(CODE_BLOCK, bits, on_cpu), T.dynamic("n")
    threads = 1 if on_cpu else WARPGROUP

    def find_path(chains, codes, chain, x):
        @T.macro
        def load(u, n):
            x.value[0] = chains[chain, RUN * u + n]

        @T.macro
        def take(u, n):
            codes[chain, RUN * u + n] = T.cast(x.code[0], T.uint8)

        search(k, load, take, x)

    @T.prim_func
    def find_codes(chains: T.Tensor([count, CHAIN], T.float32), codes: T.Tensor([count, CHAIN], T.uint8)):
        with T.Kernel(T.ceildiv(count, threads), threads=threads) as block:
            x = Buffers(**path_buffers())
            chain = block * threads + (0 if on_cpu else T.get_thread_binding())
            if chain < count:
                find_path(chains, codes, chain, x)

    return find_codes


compile_read_codes = compiler(make_read_codes, EXACT_PASS_CONFIGS)
compile_append_codes = compiler(make_append_codes, EXACT_PASS_CONFIGS)
compile_find_codes = compiler(make_find_codes, EXACT_PASS_CONFIGS)


def launch_read_codes(
    latent_cache: Tensor, block_table: Tensor, centers: Tensor | None, width: int, bits: int,
    dtype: torch.dtype, out: Tensor,
) -> None:  # fmt: skip
    """Run the kernel; shapes as of :func:`mha2mla.kernels.read_codes`."""
    if out.numel() == 0 or latent_cache.numel() == 0:
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


def launch_find_codes(chains: Tensor, bits: int, codes: Tensor) -> None:
    """Run the kernel: ``codes`` [n,16] uint8 of ``chains`` [n,16] float32."""
    if chains.numel() > 0:
        with on_device(chains.device):
            compile_find_codes(capability(chains.device), bits=bits)(aligned(chains), codes)


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
