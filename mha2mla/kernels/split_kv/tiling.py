"""How one decode problem is cut into tiles of query rows: arithmetic shared by kernels, dispatch and tests."""

from __future__ import annotations

from dataclasses import dataclass

SEQLENS_Q = (1, 2, 4, 8)  # numbers of new tokens that kernels are compiled for; others are padded up


@dataclass(frozen=True)
class RowTiling:
    """A CTA serves ``heads_per_tile`` heads of ``tokens_per_tile`` new tokens; row ``s * head_rows + i`` is (s, i).

    A tile never mixes parts of rope groups: it holds ``groups_per_tile`` whole groups, or a part of one group, so its
    ``k_pe`` columns are one contiguous window. Rows that belong to no head (the head count is rarely a power of two)
    are computed and dropped.

    Attributes:
        tokens_per_tile: new tokens that a tile has rows for (static; the call may bring fewer).
        token_tiles: tiles that cover all new tokens.
        heads_per_group: query heads that share a rope head, H // G.
        groups_per_tile: whole rope groups in a tile; 1 if a tile holds part of a group.
        tiles_per_group: tiles that share one group; 1 if a tile holds whole groups.
        heads_per_tile: heads in a tile.
        head_rows: rows of a token. heads_per_tile padded to a multiple of 8 when there are several tokens (each token's
            rows are one copy into swizzled shared memory), else heads_per_tile; packed: padded to a power of two.
        rows: rows of the tile, padded to 16 (packed: 8), 32 or 64 (48 falls into three 16-wide pieces, tilelang#2593).
        head_tiles: tiles that cover all heads of one token.
    """

    tokens_per_tile: int
    token_tiles: int
    heads_per_group: int
    groups_per_tile: int
    tiles_per_group: int
    heads_per_tile: int
    head_rows: int
    rows: int
    head_tiles: int

    def token(self, row):
        """Which of the tile's new tokens a row belongs to; ``row`` may be an expression."""
        return row // self.head_rows if self.tokens_per_tile > 1 else 0

    def head(self, row):
        """Which of the tile's heads a row belongs to; ``row`` may be an expression."""
        return row % self.head_rows if self.tokens_per_tile > 1 else row

    @property
    def num_tiles(self) -> int:
        """Tiles of one sequence; tile ``y`` has head tile ``y % head_tiles`` and token tile ``y // head_tiles``."""
        return self.token_tiles * self.head_tiles


def tile_rows(
    heads: int, num_rope_heads: int, seqlen_q: int, max_rows: int, max_groups: int, packed: bool = False
) -> RowTiling:
    """Tiles of at most ``max_rows`` padded rows and ``max_groups`` rope groups, as even as they go.

    Args:
        heads: H.
        num_rope_heads: G, a divisor of H.
        seqlen_q: one of :data:`SEQLENS_Q`.
        max_rows: 16, 32 or 64; packed also 8.
        max_groups: what the shared memory for ``k_pe`` allows, >= 1.
        packed: a token's rows are padded to a power of two only, and tiles have 8 rows or more, for kernels that gather
            their queries.
    """
    group = heads // num_rope_heads
    align = 8 if seqlen_q > 1 and not packed else 1
    tokens_per_tile = min(seqlen_q, max_rows // align)
    fit = max_rows // tokens_per_tile // align * align
    if group > fit:
        tiles_per_group = -(-group // fit)
        heads_per_tile, groups_per_tile = -(-group // tiles_per_group), 1
        head_tiles = num_rope_heads * tiles_per_group
    else:
        tiles_per_group = 1
        groups_per_tile = min(fit // group, max_groups, num_rope_heads)
        head_tiles = -(-num_rope_heads // groups_per_tile)
        groups_per_tile = -(-num_rope_heads // head_tiles)
        heads_per_tile = groups_per_tile * group
    head_rows = 1 << (heads_per_tile - 1).bit_length() if packed else -(-heads_per_tile // align) * align
    rows = 8 if packed else 16
    while rows < head_rows * tokens_per_tile:
        rows *= 2
    return RowTiling(
        tokens_per_tile=tokens_per_tile,
        token_tiles=-(-seqlen_q // tokens_per_tile),
        heads_per_group=group,
        groups_per_tile=groups_per_tile,
        tiles_per_group=tiles_per_group,
        heads_per_tile=heads_per_tile,
        head_rows=head_rows,
        rows=rows,
        head_tiles=head_tiles,
    )
