"""What every decode kernel computes about the fragment at hand: its tiles, and which tokens which row sees.

Functions of TileLang expressions that return TileLang expressions. ``span`` is a thread's copy of one row of the
schedule (``schedule.py``); it is kept in memory on purpose, since nested minima substituted into every index keep
TileLang's simplifier busy for minutes.
"""

import tilelang.language as T

from mha2mla.kernels.split_kv.schedule import (
    FIRST,
    LOW,
    SINK_STOP,
    SINK_TILES,
    START,
    STOP,
    TILE0,
    TILE_TOKENS,
    WINDOW_TILE,
)
from mha2mla.kernels.split_kv.tiling import RowTiling

# Far below any real score in float32, and finite: differences of it are not NaN. Subtract before scaling: contracted
# to a fused multiply-add, ``m * scale - m * scale`` is the rounding error of 1e30, and its exponential infinite.
MASKED = -1e30
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
SPAN_FIELDS = 13  # columns of a schedule row that kernels read


def tile_origin(tiling: RowTiling, tile, heads: int, qk_rope_head_dim: int):
    """Of a tile of query rows: its first new token, first head and first rope column, and how many heads it has."""
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


def sees(span, t, limit, window, sinks):
    """Whether the row whose first invisible token is ``limit`` sees token ``t`` of a tile that is read."""
    return (t < limit) & (t >= span[START]) & ((t >= limit - window) | (t < span[START] + sinks))


def needs_mask(span, t0, tokens, tail):
    """Whether a tile from ``t0`` holds a token that some row does not see; ``tail`` is (S_q - 1) * causal."""
    return (t0 + tokens > span[STOP] - tail) | (t0 < span[LOW] + tail)


def unseen(span, t):
    """Whether no row sees token ``t``: its cache entry may hold anything, NaN included."""
    return (t >= span[STOP]) | ((t < span[LOW]) & ((t >= span[SINK_STOP]) | (t < span[START])))


def first_unseen(span, t0):
    """The first token of a tile from ``t0``, counted from there, that :func:`unseen` may be true of."""
    return T.if_then_else(t0 < span[LOW], 0, T.max(0, span[STOP] - t0))


def holds_unseen(span, t0, tokens):
    """Whether a tile from ``t0`` holds a token that no row sees."""
    return (t0 + tokens > span[STOP]) | ((t0 < span[LOW]) & ((t0 + tokens > span[SINK_STOP]) | (t0 < span[START])))


def last_page(span, page_size):
    """Index, in a sequence's page table, of the last page in use: what lies behind it is never looked up."""
    return T.max(0, (span[STOP] - 1) // page_size)
