"""Device functions of decode kernels: a CTA's work, masks, tiles of the cache and queries, and where results go.

Objects hold TileLang buffers and expressions, and macros make and use them: a device function takes two or three of
them in place of thirty arguments.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from tilelang import tvm

from mha2mla.kernels.machine import GPU, WARPGROUP, Machine, make_function
from mha2mla.kernels.split_kv.choice import FIELDS, TILE_TOKENS, Column, RowTiling

# Far below any real score in float32, and finite: differences of it are not NaN. Subtract before scaling: contracted
# to a fused multiply-add, ``m * scale - m * scale`` is the rounding error of 1e30, and its exponential infinite.
MASKED = -1e30
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


class Types:
    """Types of a decode kernel's arguments, over run-time sizes and strides of its own.

    Args:
        op: name of the op.
        heads, width: H and the elements of an output row.
        page_size: tokens per page.
        dtype: of queries, caches and output.
        machine: target of the kernel.

    Attributes: ``data`` types of the op's own tensors by name, ``numbers`` of its own numbers.
    """

    def __init__(self, op: str, heads: int, width: int, page_size: int, dtype: str, machine: Machine = GPU):
        self.op, self.heads, self.width = op, heads, width
        self.page_size, self.dtype, self.machine = page_size, dtype, machine
        self.batch, self.seqlen_q = T.dynamic("batch"), T.dynamic("seqlen_q")
        self.num_pages, self.num_ctas = T.dynamic("num_pages"), T.dynamic("num_ctas")
        self.data: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}

    def rows(self, name: str, width: int):
        """[B,S_q,H,width] with run-time strides."""
        return self.machine.strided(name, [self.batch, self.seqlen_q, self.heads, width], self.dtype)

    def cache(self, name: str, *row: int, dtype: str | None = None):
        """[P,page,*row] with run-time strides."""
        return self.machine.strided(name, [self.num_pages, self.page_size, *row], dtype or self.dtype)

    def make(self, name: str, body):
        """The TileLang function ``op_name`` of a body.

        Between ``data`` and ``numbers`` lie block_table [B,max_pages], schedule [num_ctas+B,FIELDS] (int32, of
        ``Column``), the outputs partial_out [num_ctas,2,S_q,H,width] and partial_lse [num_ctas,2,S_q,H] (float32) for
        sequences in several fragments, out [B,S_q,H,width] and lse [B,H,S_q] (float32) for those in one; softmax_scale,
        causal (0 or 1), window (2**30: none) and sinks. All lse are natural logs, -inf where a row sees none of the
        tokens; rows that nothing points at are left as they were.
        """
        partial = [self.num_ctas, 2, self.seqlen_q, self.heads]
        arguments = self.data | {
            "block_table": T.Tensor([self.batch, T.dynamic("max_pages")], T.int32),
            "schedule": T.Tensor([T.dynamic("fragments"), FIELDS], T.int32),
            "partial_out": T.Tensor([*partial, self.width], T.float32),
            "partial_lse": T.Tensor(partial, T.float32),
            "out": self.rows("o", self.width),
            "lse": T.Tensor([self.batch, self.heads, self.seqlen_q], T.float32),
            "softmax_scale": T.float32(),
            **{name: T.int32() for name in ("causal", "window", "sinks")},
        }
        return make_function(f"{self.op}_{name}", arguments | self.numbers, body)


@T.macro
def run_roles(thread, roles):
    """``roles``: each a thread number, a macro and its arguments, for threads below that number that no role before it
    has; None: for all others."""
    last, role = roles[0][:2]
    if last is None:
        role(*roles[0][2:])
    elif len(roles) == 1:
        if thread < last:
            role(*roles[0][2:])
    elif thread < last:
        role(*roles[0][2:])
    else:
        run_roles(thread, roles[1:])


def consumers(warpgroups: int, consume, k, *given) -> list[tuple]:
    """The roles of warpgroups that compute: ``consume(k, number, *given)``."""
    return [((w + 1) * WARPGROUP, consume, k, w, *given) for w in range(warpgroups)]


@T.macro
def run_loaders(registers, thread, first, loaders):
    """A warp for each of ``loaders`` from thread ``first`` on: a macro and its arguments, then thread and its first."""
    T.set_max_nreg(registers, 0)
    last = [first + 32, first + 64, first + 96, None]  # a warpgroup has four
    run_roles(thread, [(last[u], *loaders[u], thread, first + 32 * u) for u in range(len(loaders))])


@dataclass(frozen=True)
class Tile:
    """Query rows of a CTA: ``valid`` heads from ``head0``, new tokens from ``token0``, rope columns from ``column``."""

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

    def query(self, work, row):
        """Index of a row's query, clamped: beside a guard alone TileLang's bounds check fails to lower some widths."""
        return (work.sequence, T.min(self.token(row), self.seqlen_q - 1), T.min(self.head(row), self.heads - 1))


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


@T.macro
def locate(types, tiling, y, rope_width):
    """The :class:`Tile` number ``y``; ``rope_width``: columns of a rope head."""
    token0, head0, column, valid = tile_origin(tiling, y, types.heads, rope_width)
    return Tile(tiling, types.heads, types.seqlen_q, token0, head0, column, valid)


SPAN_FIELDS = 13  # columns of a schedule row that kernels read


@dataclass(frozen=True)
class Work:
    """Work of a CTA, in registers of a thread.

    Attributes: ``span`` the current fragment's row of the schedule; ``state`` number of fragments, row of the second
    one less 1, tiles before the current fragment; ``pages`` of the current tile.
    """

    schedule: Any
    block_table: Any
    cta: Any
    page_size: int
    span: Any
    state: Any
    pages: Any

    fragments = property(lambda self: self.state[0])
    done = property(lambda self: self.state[2])
    sequence = property(lambda self: self.span[Column.SEQUENCE])
    tiles = property(lambda self: self.span[Column.TILES])
    slot = property(lambda self: self.span[Column.SLOT])
    start = property(lambda self: self.span[Column.START])
    stop = property(lambda self: self.span[Column.STOP])
    low = property(lambda self: self.span[Column.LOW])
    sink_stop = property(lambda self: self.span[Column.SINK_STOP])

    @property
    def pieces(self) -> list[int]:
        """Numbers of the pages that a tile lies in."""
        return list(range(int(self.pages.shape[0])))

    def row(self, f):
        """Row of the schedule of the f-th fragment."""
        return T.if_then_else(f == 0, self.cta, self.state[1] + f)

    def first_token(self, k):
        """First token of the k-th tile of the fragment."""
        attended, sinks = self.span[Column.FIRST] + k, self.span[Column.SINK_TILES]
        tile = T.if_then_else(
            attended < sinks, self.span[Column.TILE0] + attended, self.span[Column.WINDOW_TILE] + attended - sinks
        )
        return tile * TILE_TOKENS

    def is_visible(self, t, limit, window, sinks):
        """True where the row whose first invisible token is ``limit`` sees token ``t`` of a tile that is read."""
        return (t < limit) & (t >= self.start) & ((t >= limit - window) | (t < self.start + sinks))

    def needs_mask(self, t0, tokens, tail):
        """True where a tile from ``t0`` holds a token that some row does not see; ``tail`` is (S_q - 1) * causal."""
        return (t0 + tokens > self.stop - tail) | (t0 < self.low + tail)

    def is_masked(self, t):
        """True where no row sees token ``t``: its cache entry may hold anything, NaN included."""
        return (t >= self.stop) | ((t < self.low) & ((t >= self.sink_stop) | (t < self.start)))

    def first_masked(self, t0):
        """The first token of a tile from ``t0``, counted from there, that :meth:`is_masked` may be true of."""
        return T.if_then_else(t0 < self.low, 0, T.max(0, self.stop - t0))

    def has_masked(self, t0, tokens):
        """True where a tile from ``t0`` holds a token that no row sees."""
        return (t0 + tokens > self.stop) | ((t0 < self.low) & ((t0 + tokens > self.sink_stop) | (t0 < self.start)))

    def last_page(self):
        """Index, in the sequence's page table, of the last page in use; entries behind it are never looked up."""
        return T.max(0, (self.stop - 1) // self.page_size)


@T.macro
def take_work(call, cta, page_size, tokens):
    """The :class:`Work` of a CTA that reads ``tokens`` at a time."""
    span = T.alloc_local([SPAN_FIELDS], T.int32)
    state = T.alloc_local([3], T.int32)
    pages = T.alloc_local([max(1, tokens // page_size)], T.int32)
    state[0] = call.schedule[cta, Column.COUNT]
    state[1] = call.schedule[cta, Column.NEXT]
    state[2] = 0
    return Work(call.schedule, call.block_table, cta, page_size, span, state, pages)


@T.macro
def restart(work):
    work.state[2] = 0


@T.macro
def read_fragment(work, f):
    """Fills ``work.span`` with the f-th fragment."""
    for i in T.unroll(SPAN_FIELDS):
        work.span[i] = work.schedule[work.row(f), i]


@T.macro
def end_fragment(work):
    work.state[2] += work.tiles


@T.macro
def find_pages(work, t0):
    """Fills ``work.pages`` with those of the tokens from ``t0`` on."""
    for u in work.pieces:
        work.pages[u] = work.block_table[work.sequence, T.min(t0 // work.page_size + u, work.last_page())]


@dataclass(frozen=True)
class Target:
    """Destination of a fragment's rows: the output (``whole``), or the fragment's partial."""

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
def store(call, work, write, *arguments):
    """The end of a fragment: ``write(target, *arguments)``, a macro."""
    if work.slot < 0:
        write(Target(call.out, call.lse, (work.sequence,), True), *arguments)
    else:
        write(Target(call.partial_out, call.partial_lse, (work.slot // 2, work.slot % 2), False), *arguments)


@T.macro
def write_lse(target, tile, row, lse, i):
    """Entry ``i`` of ``lse`` as that of a row, to be called by :func:`store`."""
    target.lse[target.place(tile, row)] = lse[i]


def panels(columns: int) -> list[tuple[int, int]]:
    """First column and width of the panels of a swizzled tile: a panel of one page is contiguous."""
    return [(c, min(64, columns)) for c in range(0, columns, 64)]


@T.macro
def fill_slot(work, t0, source, row, left, rings, n, full, free, thread, leader):
    """By TMA: the tile from token ``t0`` on into the slot of load ``n``, of each ring as many columns of
    ``source[page, token, *row]`` as it has, one ring's beside the other's from ``left`` on. The slots of all rings
    share their barriers; of ``full`` there may be more than slots."""
    stages, columns = int(rings[0].shape[0]), int(rings[0].shape[2])
    slot, phase = n % stages, n % int(full.shape[0])
    T.barrier_wait(free[slot], ((n // stages) & 1) ^ 1)
    for u in list(range(len(rings))):
        for v in work.pieces:
            if len(work.pieces) == 1:
                first, at = t0 % work.page_size, left + u * columns
                T.tma_copy(
                    source[(work.pages[0], slice(first, first + TILE_TOKENS), *row, slice(at, at + columns))],
                    rings[u][slot, :, :],
                    barrier=full[phase],
                )
            else:
                for c, width in panels(columns):
                    at = left + u * columns + c
                    T.tma_copy(
                        source[(work.pages[v], slice(0, work.page_size), *row, slice(at, at + width))],
                        rings[u][slot, v * work.page_size : (v + 1) * work.page_size, c : c + width],
                        barrier=full[phase],
                    )
    if thread == leader:
        T.barrier_arrive(full[phase])


@T.macro
def stream(work, source, lefts, rings, full, free, thread, leader):
    """One warp: every tile of this CTA's fragments, a slot for each of its parts, which begin at columns ``lefts``."""
    for f in T.serial(work.fragments):
        read_fragment(work, f)
        for k in T.serial(work.tiles):
            t0 = work.first_token(k)
            find_pages(work, t0)
            for u in list(range(len(lefts))):
                n = (work.done + k) * len(lefts) + u
                fill_slot(work, t0, source, (), lefts[u], rings, n, full, free, thread, leader)
        end_fragment(work)


@T.macro
def stream_queries(work, tile, q_latent, q_tile, full, free, left, thread, leader):
    """One warp: the queries of every fragment of this CTA, one after another into ``q_tile``, as many columns of them
    from ``left`` on as it has."""
    columns = int(q_tile.shape[1])
    tokens, rows = tile.tiling.tokens_per_tile, tile.tiling.head_rows
    for f in T.serial(work.fragments):
        b = work.schedule[work.row(f), Column.SEQUENCE]
        T.barrier_wait(free, (f & 1) ^ 1)
        if tokens == 1:
            T.tma_copy(
                q_latent[b, tile.token0, tile.head0 : tile.head0 + tile.tiling.rows, left : left + columns],
                q_tile,
                barrier=full,
            )
        else:
            for v in list(range(tokens)):
                for c, width in panels(columns):
                    T.tma_copy(
                        q_latent[b, tile.token0 + v, tile.head0 : tile.head0 + rows, left + c : left + c + width],
                        q_tile[v * rows : (v + 1) * rows, c : c + width],
                        barrier=full,
                    )
        if thread == leader:
            T.barrier_arrive(full)


@T.macro
def load_queries(machine, work, tile, q, q_tile, left, columns):
    """Element by element: ``columns`` of all rows of the tile from ``left`` on, zeros behind the queries' width."""
    width = int(q.shape[3])
    padded = width < int(q_tile.shape[1])
    for i, d in machine.parallel(int(q_tile.shape[0]), columns):
        q_tile[i, left + d] = T.if_then_else(
            tvm.tirx.And(tile.holds(i), left + d < width),
            q[(*tile.query(work, i), T.min(left + d, width - 1) if padded else left + d)],
            T.cast(0, q.dtype),
        )


@T.macro
def load_tiles(machine, work, t0, sources, values, holes, num_pages):
    """Without TMA, and so without the bounds that it checks: the tokens from ``t0`` on of each of ``sources``, a macro
    such as :func:`copy_tile` and what it takes, the tile last. Tiles ``values`` multiply weights: what no row sees is
    zeroed there.

    Table entries of pages that no query sees may be anything: some page stands in for one that is none, and is marked
    in ``holes``, whose last number counts them. Tokens without a page are zeroed: they must not show another
    sequence's."""
    T.sync_threads()
    find_pages(work, t0)
    holes[len(work.pieces)] = 0
    for u in work.pieces:
        holes[u] = T.if_then_else((work.pages[u] < 0) | (work.pages[u] >= num_pages), 1, 0)
        holes[len(work.pieces)] += holes[u]
        work.pages[u] = T.max(0, T.min(work.pages[u], num_pages - 1))
    for i in list(range(len(sources))):
        read, arguments = sources[i][0], sources[i][1:]
        read(work, t0, *arguments)
    T.sync_threads()
    tokens = int(values.shape[0])
    if work.has_masked(t0, tokens):
        zero_masked(machine, work, t0, tokens, range(0, int(values.shape[1]), 64), values)
        T.sync_threads()
    if holes[len(work.pieces)] > 0:
        for u in work.pieces:
            if holes[u] > 0:
                for tile in [source[-1] for source in sources]:
                    rows = int(tile.shape[0]) // len(work.pieces)
                    for c, width in panels(int(tile.shape[1])):
                        for i, d in machine.parallel(rows, width):
                            tile[u * rows + i, c + d] = T.cast(0, tile.dtype)
        T.sync_threads()


@T.macro
def copy_tile(work, t0, source, row, left, tile):
    """Columns of ``source[page, token, *row]`` from ``left`` on, as many as ``tile`` has."""
    tokens = int(tile.shape[0]) // len(work.pieces)
    first = t0 % work.page_size if len(work.pieces) == 1 else 0
    for u in work.pieces:
        for c, width in panels(int(tile.shape[1])):
            T.copy(
                source[(work.pages[u], slice(first, first + tokens), *row, slice(left + c, left + c + width))],
                tile[u * tokens : (u + 1) * tokens, c : c + width],
            )


@T.macro
def zero_masked(machine, work, t0, tokens, panels, tile, *slot):
    """Zeroes in ``tile[*slot]`` what no row sees: 0 times NaN is NaN. ``panels``: where 64 columns each
    begin, a Python range; other widths cost registers for divisions by 3, 5 or 7. One token after another, since
    TileLang asks an SMT solver about every condition inside a parallel loop: 25 of a kernel's 30 seconds."""
    for i in T.serial(work.first_masked(t0), tokens):
        if work.is_masked(t0 + i):
            for c, d in machine.parallel(len(panels), 64):
                tile[(*slot, i, panels.start + c * panels.step + d)] = T.cast(0, tile.dtype)
