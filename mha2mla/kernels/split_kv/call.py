"""Arguments of every decode kernel, the work of a CTA, its masks, and where its results go.

Objects that hold TileLang buffers and expressions, and macros that make and use them: a device function takes two or
three of them in place of thirty arguments.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from tilelang import tvm

from mha2mla.kernels.machine import GPU, Machine
from mha2mla.kernels.split_kv.choice import RowTiling
from mha2mla.kernels.split_kv.schedule import (
    COUNT,
    FIELDS,
    FIRST,
    LOW,
    NEXT,
    SEQUENCE,
    SINK_STOP,
    SINK_TILES,
    SLOT,
    START,
    STOP,
    TILE0,
    TILE_TOKENS,
    WINDOW_TILE,
)

# Far below any real score in float32, and finite: differences of it are not NaN. Subtract before scaling: contracted
# to a fused multiply-add, ``m * scale - m * scale`` is the rounding error of 1e30, and its exponential infinite.
MASKED = -1e30
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
SPAN_FIELDS = 13  # columns of a schedule row that kernels read


def tile_origin(tiling: RowTiling, tile, heads: int, qk_rope_head_dim: int):
    """First new token, first head, first rope column and number of heads of a tile of query rows."""
    several, group, share = tiling.token_tiles > 1, tiling.heads_per_group, tiling.tiles_per_group
    y = tile % tiling.head_tiles if several else tile
    token0 = tile // tiling.head_tiles * tiling.tokens_per_tile if several else 0
    head0 = y // share * (tiling.groups_per_tile * group) + y % share * tiling.heads_per_tile
    column = y // share * (tiling.groups_per_tile * qk_rope_head_dim)
    if tiling.heads_per_tile * tiling.head_tiles == heads:
        return token0, head0, column, tiling.heads_per_tile
    # the last tile of a group, or of all groups, may have fewer
    first = (y % share if share > 1 else y) * tiling.heads_per_tile
    return token0, head0, column, T.min(tiling.heads_per_tile, (group if share > 1 else heads) - first)


def first_token(span, k):
    """First token of the k-th tile of the fragment."""
    attended = span[FIRST] + k
    tile = T.if_then_else(
        attended < span[SINK_TILES], span[TILE0] + attended, span[WINDOW_TILE] + attended - span[SINK_TILES]
    )
    return tile * TILE_TOKENS


def is_visible(span, t, limit, window, sinks):
    """True where the row whose first invisible token is ``limit`` sees token ``t`` of a tile that is read."""
    return (t < limit) & (t >= span[START]) & ((t >= limit - window) | (t < span[START] + sinks))


def needs_mask(span, t0, tokens, tail):
    """True where a tile from ``t0`` holds a token that some row does not see; ``tail`` is (S_q - 1) * causal."""
    return (t0 + tokens > span[STOP] - tail) | (t0 < span[LOW] + tail)


def is_masked(span, t):
    """True where no row sees token ``t``: its cache entry may hold anything, NaN included."""
    return (t >= span[STOP]) | ((t < span[LOW]) & ((t >= span[SINK_STOP]) | (t < span[START])))


def first_masked(span, t0):
    """The first token of a tile from ``t0``, counted from there, that :func:`is_masked` may be true of."""
    return T.if_then_else(t0 < span[LOW], 0, T.max(0, span[STOP] - t0))


def has_masked(span, t0, tokens):
    """True where a tile from ``t0`` holds a token that no row sees."""
    return (t0 + tokens > span[STOP]) | ((t0 < span[LOW]) & ((t0 + tokens > span[SINK_STOP]) | (t0 < span[START])))


def last_page(span, page_size):
    """Index, in a sequence's page table, of the last page in use: what lies behind it is never looked up."""
    return T.max(0, (span[STOP] - 1) // page_size)


class Types:
    """Types of a decode kernel's tensors, over run-time sizes and strides of its own.

    Args:
        heads, width: H and the numbers of an output row.
        page_size: tokens per page.
        dtype: of queries, caches and output.
        machine: what the kernel is for.

    Attributes: ``block_table`` [B,max_pages], ``schedule`` [num_ctas+B,FIELDS] (int32; ``schedule.py``), the outputs
    ``partial_out`` [num_ctas,2,S_q,H,width] and ``partial_lse`` [num_ctas,2,S_q,H] (float32) for sequences in several
    fragments, ``out`` [B,S_q,H,width] and ``lse`` [B,H,S_q] (float32) for those in one. All lse are natural logs, -inf
    where a row sees none of the tokens; rows that nothing points at are left as they were. After the tensors a kernel
    takes softmax_scale, causal (0 or 1), window (2**30: none) and sinks.
    """

    def __init__(self, heads: int, width: int, page_size: int, dtype: str, machine: Machine = GPU):
        self.heads, self.page_size, self.dtype, self.machine = heads, page_size, dtype, machine
        self.batch, self.seqlen_q = T.dynamic("batch"), T.dynamic("seqlen_q")
        self.num_pages, self.num_ctas = T.dynamic("num_pages"), T.dynamic("num_ctas")
        self.block_table = T.Tensor([self.batch, T.dynamic("max_pages")], T.int32)
        self.schedule = T.Tensor([T.dynamic("fragments"), FIELDS], T.int32)
        self.partial_out = T.Tensor([self.num_ctas, 2, self.seqlen_q, heads, width], T.float32)
        self.partial_lse = T.Tensor([self.num_ctas, 2, self.seqlen_q, heads], T.float32)
        self.out = self.rows("o", width)
        self.lse = T.Tensor([self.batch, heads, self.seqlen_q], T.float32)

    def rows(self, name: str, width: int):
        """[B,S_q,H,width] with run-time strides."""
        return self.machine.strided(name, [self.batch, self.seqlen_q, self.heads, width], self.dtype)

    def cache(self, name: str, *row: int, dtype: str | None = None):
        """[P,page,*row] with run-time strides."""
        return self.machine.strided(name, [self.num_pages, self.page_size, *row], dtype or self.dtype)


@dataclass(frozen=True)
class Call:
    """Run-time arguments that all decode kernels have, as :class:`Types` describes them."""

    block_table: Any
    schedule: Any
    partial_out: Any
    partial_lse: Any
    out: Any
    lse: Any
    softmax_scale: Any
    causal: Any
    window: Any
    sinks: Any


@dataclass(frozen=True)
class Tile:
    """The query rows of a CTA: ``valid`` heads from ``head0``, new tokens from ``token0``, and the rope ``column``."""

    tiling: RowTiling
    heads: int
    seqlen_q: Any
    token0: Any
    head0: Any
    column: Any
    valid: Any

    def token(self, row):
        return self.token0 + self.tiling.token(row)

    def head(self, row):
        return self.head0 + self.tiling.head(row)

    def holds(self, row):
        """True where a row belongs to a head and to a new token of the call."""
        held = self.tiling.head(row) < self.valid
        if self.tiling.tokens_per_tile * self.tiling.token_tiles == 1:
            return held
        return tvm.tirx.And(self.token(row) < self.seqlen_q, held)

    def query(self, span, row):
        """Index of a row's query, clamped: beside a guard alone TileLang's bounds check fails to lower some widths."""
        return (
            span[SEQUENCE],
            T.min(self.token(row), self.seqlen_q - 1),
            T.min(self.head(row), self.heads - 1),
        )


@T.macro
def locate(types, tiling, y, rope_width):
    """The :class:`Tile` number ``y``; ``rope_width``: columns of a rope head."""
    token0, head0, column, valid = tile_origin(tiling, y, types.heads, rope_width)
    return Tile(tiling, types.heads, types.seqlen_q, token0, head0, column, valid)


FRAGMENTS, FOLLOWING, DONE = 0, 1, 2  # of a CTA: how many, row of the second one less 1, tiles before the one at hand


@dataclass(frozen=True)
class Work:
    """A thread's view of what its CTA has to do: ``state`` [FRAGMENTS, FOLLOWING, DONE], the fragment at hand in
    ``span`` (``fragment.py``), the pages of the tile at hand in ``pages``."""

    schedule: Any
    block_table: Any
    cta: Any
    page_size: int
    span: Any
    state: Any
    pages: Any

    @property
    def pieces(self) -> list[int]:
        """Numbers of the pages that a tile lies in."""
        return list(range(int(self.pages.shape[0])))


@T.macro
def take_work(call, cta, page_size, tokens):
    """The :class:`Work` of a CTA that reads ``tokens`` at a time."""
    span = T.alloc_local([SPAN_FIELDS], T.int32)
    state = T.alloc_local([3], T.int32)
    pages = T.alloc_local([max(1, tokens // page_size)], T.int32)
    state[FRAGMENTS] = call.schedule[cta, COUNT]
    state[FOLLOWING] = call.schedule[cta, NEXT]
    state[DONE] = 0
    return Work(call.schedule, call.block_table, cta, page_size, span, state, pages)


@T.macro
def read_fragment(work, f):
    """Fills ``work.span`` with the f-th fragment."""
    for i in T.unroll(SPAN_FIELDS):
        work.span[i] = work.schedule[T.if_then_else(f == 0, work.cta, work.state[FOLLOWING] + f), i]


@T.macro
def find_pages(work, t0):
    """Fills ``work.pages`` with those of the tokens from ``t0`` on."""
    for u in work.pieces:
        work.pages[u] = work.block_table[
            work.span[SEQUENCE], T.min(t0 // work.page_size + u, last_page(work.span, work.page_size))
        ]


@dataclass(frozen=True)
class Target:
    """Where rows of a fragment go: the output, or the fragment's partial."""

    out: Any
    lse: Any
    first: tuple[Any, ...]  # index of the sequence, or of the partial
    whole: bool

    def row(self, tile: Tile, row, column):
        return (*self.first, tile.token(row), tile.head(row), column)

    def place(self, tile: Tile, row):
        """Index of a row's lse."""
        s, h = tile.token(row), tile.head(row)
        return (*self.first, h, s) if self.whole else (*self.first, s, h)


@T.macro
def store(call, span, write, *arguments):
    """The end of a fragment: ``write(target, *arguments)``, a macro."""
    if span[SLOT] < 0:
        write(Target(call.out, call.lse, (span[SEQUENCE],), True), *arguments)
    else:
        write(Target(call.partial_out, call.partial_lse, (span[SLOT] // 2, span[SLOT] % 2), False), *arguments)
