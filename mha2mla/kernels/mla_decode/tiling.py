"""How one decode problem is cut into tiles of query rows: pure arithmetic shared by the kernels, the dispatch and the tests."""

from __future__ import annotations

from dataclasses import dataclass

SEQLENS_Q = (1, 2, 4, 8)  # numbers of new tokens that kernels are compiled for; others are padded up


@dataclass(frozen=True)
class RowTiling:
    """One CTA serves ``heads_per_tile`` heads of ``seqlen_q`` new tokens; row ``s * head_rows + i`` is token s, head i.

    A tile never mixes parts of rope groups: it holds ``groups_per_tile`` whole groups, or a part of one group, so its
    ``k_pe`` columns are one contiguous window. Rows that belong to no head (the head count is rarely a power of two)
    are computed and dropped.

    Attributes:
        seqlen_q: new tokens the tile has rows for (static; the call may bring fewer).
        heads_per_group: query heads that share a rope head, H // G.
        num_groups: rope heads G.
        groups_per_tile: whole rope groups in a tile; 1 if a tile holds part of a group.
        tiles_per_group: tiles that share one group; 1 if a tile holds whole groups.
        heads_per_tile: heads in a tile.
        head_rows: heads_per_tile padded to a multiple of 8 when there are several tokens (each token's rows are one
            copy into swizzled shared memory), else heads_per_tile.
        rows: rows of the tile, padded to 16, 32 or 64 (48 falls into three 16-wide pieces, tilelang#2593).
        num_tiles: tiles that cover all heads.
    """

    seqlen_q: int
    heads_per_group: int
    num_groups: int
    groups_per_tile: int
    tiles_per_group: int
    heads_per_tile: int
    head_rows: int
    rows: int
    num_tiles: int


def tile_rows(heads: int, num_rope_heads: int, seqlen_q: int, max_rows: int, max_groups: int) -> RowTiling:
    """Tiles of at most ``max_rows`` padded rows and ``max_groups`` rope groups, as even as they go.

    Args:
        heads: H.
        num_rope_heads: G, a divisor of H.
        seqlen_q: one of :data:`SEQLENS_Q`.
        max_rows: 16, 32 or 64; at least ``8 * seqlen_q``, or ``seqlen_q`` rows of 8 heads do not fit.
        max_groups: what the shared memory for ``k_pe`` allows, >= 1.

    Raises:
        ValueError: if ``seqlen_q`` tokens of one head do not fit into ``max_rows``.
    """
    group = heads // num_rope_heads
    align = 8 if seqlen_q > 1 else 1
    fit = max_rows // seqlen_q // align * align
    if fit < 1:
        raise ValueError(f"max_rows is {max_rows}; expected at least {align * seqlen_q} for seqlen_q={seqlen_q}")
    if group > fit:
        tiles_per_group = -(-group // fit)
        heads_per_tile, groups_per_tile = -(-group // tiles_per_group), 1
        num_tiles = num_rope_heads * tiles_per_group
    else:
        tiles_per_group = 1
        groups_per_tile = min(fit // group, max_groups, num_rope_heads)
        num_tiles = -(-num_rope_heads // groups_per_tile)
        groups_per_tile = -(-num_rope_heads // num_tiles)
        heads_per_tile = groups_per_tile * group
    head_rows = -(-heads_per_tile // align) * align
    rows = 16
    while rows < head_rows * seqlen_q:
        rows *= 2
    return RowTiling(
        seqlen_q=seqlen_q,
        heads_per_group=group,
        num_groups=num_rope_heads,
        groups_per_tile=groups_per_tile,
        tiles_per_group=tiles_per_group,
        heads_per_tile=heads_per_tile,
        head_rows=head_rows,
        rows=rows,
        num_tiles=num_tiles,
    )
