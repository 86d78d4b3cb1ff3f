"""Tiles of a paged cache, and queries, into shared memory: by streaming warps (TMA, sm_90), and portably."""

import tilelang.language as T
from tilelang import tvm

from mha2mla.kernels.split_kv.call import DONE, FOLLOWING, FRAGMENTS, find_pages, first_token, read_fragment
from mha2mla.kernels.split_kv.schedule import SEQUENCE, TILE_TOKENS, TILES


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
    for f in T.serial(work.state[FRAGMENTS]):
        read_fragment(work, f)
        for k in T.serial(work.span[TILES]):
            t0 = first_token(work.span, k)
            find_pages(work, t0)
            for u in list(range(len(lefts))):
                n = (work.state[DONE] + k) * len(lefts) + u
                fill_slot(work, t0, source, (), lefts[u], rings, n, full, free, thread, leader)
        work.state[DONE] += work.span[TILES]


@T.macro
def stream_queries(work, tile, q_latent, q_tile, full, free, thread, leader, left=0):
    """One warp: the queries of every fragment of this CTA, one after another into ``q_tile``, as many columns of them
    from ``left`` on as it has."""
    columns = int(q_tile.shape[1])
    tokens, rows = tile.tiling.tokens_per_tile, tile.tiling.head_rows
    for f in T.serial(work.state[FRAGMENTS]):
        b = work.schedule[T.if_then_else(f == 0, work.cta, work.state[FOLLOWING] + f), SEQUENCE]
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
    """Number by number: ``columns`` of all rows of the tile from ``left`` on, zeros behind the queries' width."""
    width = int(q.shape[3])
    padded = width < int(q_tile.shape[1])
    for i, d in machine.parallel(int(q_tile.shape[0]), columns):
        q_tile[i, left + d] = T.if_then_else(
            tvm.tirx.And(tile.holds(i), left + d < width),
            q[(*tile.query(work.span, i), T.min(left + d, width - 1) if padded else left + d)],
            T.cast(0, q.dtype),
        )


@T.macro
def find_present_pages(work, t0, num_pages, holes):
    """Same as ``find_pages``, without the bounds that TMA checks. Entries of pages that no query sees may be anything:
    some page stands in for one that is none, and is marked in ``holes``, whose last number is for all together."""
    find_pages(work, t0)
    holes[len(work.pieces)] = 0
    for u in work.pieces:
        holes[u] = T.if_then_else((work.pages[u] < 0) | (work.pages[u] >= num_pages), 1, 0)
        holes[len(work.pieces)] += holes[u]
        work.pages[u] = T.max(0, T.min(work.pages[u], num_pages - 1))


@T.macro
def copy_tile(work, t0, source, row, left, tile):
    """The tokens from ``t0`` on, columns of ``source[page, token, *row]`` from ``left`` on, as many as ``tile`` has."""
    tokens = int(tile.shape[0]) // len(work.pieces)
    first = t0 % work.page_size if len(work.pieces) == 1 else 0
    for u in work.pieces:
        for c, width in panels(int(tile.shape[1])):
            T.copy(
                source[(work.pages[u], slice(first, first + tokens), *row, slice(left + c, left + c + width))],
                tile[u * tokens : (u + 1) * tokens, c : c + width],
            )


@T.macro
def clear_holes(machine, work, holes, tiles):
    """Zero tokens without a page: they must not show another sequence's."""
    if holes[len(work.pieces)] > 0:
        for u in work.pieces:
            if holes[u] > 0:
                for tile in tiles:
                    tokens = int(tile.shape[0]) // len(work.pieces)
                    for c, width in panels(int(tile.shape[1])):
                        for i, d in machine.parallel(tokens, width):
                            tile[u * tokens + i, c + d] = T.cast(0, tile.dtype)
        T.sync_threads()
