"""How two CTAs share a latent too wide for one: each owns half of its columns. Arithmetic only, no TileLang."""

from __future__ import annotations

from dataclasses import dataclass

from mha2mla.kernels.split_kv.tiling import RowTiling

CLUSTER = 2  # CTAs that share a tile
MAX_ROPE_HALF = 128  # rotary columns that a CTA keeps of a tile


@dataclass(frozen=True)
class Halves:
    """CTA ``h`` of a cluster owns latent columns from ``h * columns`` on and rotary columns from ``h * rope_own`` on.

    Attributes:
        units: pieces that a tile's columns are streamed in.
        unit: columns of a piece.
        rope_own: rotary columns of a CTA, a multiple of 8.
        rope_columns: as many in shared memory.
    """

    units: int
    unit: int
    rope_own: int
    rope_columns: int

    @property
    def columns(self) -> int:
        """Latent columns of a CTA, a multiple of 64; what lies behind d_c is zero."""
        return self.units * self.unit


def halve(tiling: RowTiling, kv_lora_rank: int, qk_rope_head_dim: int) -> Halves:
    """The halves of a tile. Pieces are as wide as lets both CTAs read the same, within 64 columns."""
    panels = -(-kv_lora_rank // (64 * CLUSTER))
    unit = 128 if panels % 2 == 0 else 64
    own = -(-(tiling.groups_per_tile * qk_rope_head_dim) // (8 * CLUSTER)) * 8
    padded = 16
    while padded < own:
        padded *= 2
    return Halves(panels * 64 // unit, unit, own, padded)


def cluster_shared_memory(
    tiling: RowTiling, cut: Halves, num_stages: int, rope_stages: int, rope: tuple[int, int] | None = None
) -> int:
    """Bytes of shared memory that a CTA allocates (16-bit elements), with 1 KiB for alignment and barriers; ``rope``:
    rotary columns of the queries, and of keys in a slot of their ring, where they are not ``cut``'s."""
    of_queries, of_keys = rope or (cut.rope_columns, cut.rope_columns)
    queries = tiling.rows * (cut.columns + of_queries)
    rings = 64 * (num_stages * cut.unit + rope_stages * of_keys)
    scores = 2 * 64 * tiling.rows * 4  # of the other CTA, for this tile and the next
    return 2 * (queries + rings + 64 * tiling.rows) + scores + 16 * tiling.rows + 1024
