"""What the streaming warps of the sm_90 kernels do: tiles of the cache, and the queries, into shared memory by TMA."""

import tilelang.language as T

from mha2mla.kernels.split_kv.fragment import first_token, last_page, read_fragment
from mha2mla.kernels.split_kv.schedule import SEQUENCE, TILE_TOKENS, TILES
from mha2mla.kernels.split_kv.tiling import RowTiling


def make_streams(tiling: RowTiling, latent_cols: int, page_size: int, num_stages: int, cluster_mask: int | None = None):
    """The macros ``stream`` (a ring of cache tiles) and ``stream_queries``, each the whole work of one warp.

    Args:
        tiling: which query rows one CTA serves.
        latent_cols: columns of the latent in shared memory.
        page_size: tokens per page, a power of two >= 16.
        num_stages: of the ring.
        cluster_mask: CTAs of the cluster that a cache tile is sent to; the first of them reads it from L2. All of them
            run ``stream`` over the same tiles, and ``free`` has to count the readers of all.
    """
    pieces = max(1, TILE_TOKENS // page_size)
    piece_list = list(range(pieces))

    @T.macro
    def stream(
        source, columns, offset, pair, full, free, thread, leader, block_table, schedule, cta, work, span, pages
    ):
        """One warp: every tile of this CTA's fragments, ``columns`` of ``source`` from ``offset`` on for each ring of
        ``pair``, whose slots share their barriers."""
        for f in T.serial(work[0]):
            read_fragment(span, schedule, cta, work, f)
            for k in T.serial(span[TILES]):
                t0 = first_token(span, k)
                slot = (work[2] + k) % num_stages
                for v in piece_list:
                    pages[v] = block_table[span[SEQUENCE], T.min(t0 // page_size + v, last_page(span, page_size))]
                T.barrier_wait(free[slot], (((work[2] + k) // num_stages) & 1) ^ 1)
                for u in list(range(len(pair))):
                    for v in piece_list:
                        left = offset + u * columns
                        if pieces == 1:
                            T.tma_copy(
                                source[pages[0], t0 % page_size : t0 % page_size + TILE_TOKENS, left : left + columns],
                                pair[u][slot, :, :],
                                barrier=full[slot],
                                cluster_mask=cluster_mask,
                            )
                        else:
                            for c in list(range(0, columns, 64)):  # panels of the swizzled tile are contiguous per page
                                T.tma_copy(
                                    source[pages[v], 0:page_size, left + c : left + c + min(64, columns)],
                                    pair[u][slot, v * page_size : (v + 1) * page_size, c : c + min(64, columns)],
                                    barrier=full[slot],
                                    cluster_mask=cluster_mask,
                                )
                if thread == leader:
                    T.barrier_arrive(full[slot])
            work[2] += span[TILES]

    @T.macro
    def stream_queries(q_latent, token0, head0, q_tile, full, free, thread, leader, schedule, cta, work):
        """The queries of every fragment of this CTA, one after another into ``q_tile``."""
        for f in T.serial(work[0]):
            b = schedule[T.if_then_else(f == 0, cta, work[1] + f), SEQUENCE]
            T.barrier_wait(free, (f & 1) ^ 1)
            if tiling.tokens_per_tile == 1:
                T.tma_copy(q_latent[b, token0, head0 : head0 + tiling.rows, 0:latent_cols], q_tile, barrier=full)
            else:
                for v in list(range(tiling.tokens_per_tile)):
                    for c in list(range(0, latent_cols, 64)):
                        T.tma_copy(
                            q_latent[b, token0 + v, head0 : head0 + tiling.head_rows, c : c + 64],
                            q_tile[v * tiling.head_rows : (v + 1) * tiling.head_rows, c : c + 64],
                            barrier=full,
                        )
            if thread == leader:
                T.barrier_arrive(full)

    return stream, stream_queries
