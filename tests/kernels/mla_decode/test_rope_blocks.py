"""Products of rope scores: every head gets the keys of its own rope head, once."""

from __future__ import annotations

import itertools

import torch

from mha2mla.kernels.mla_decode.selection import RopeBlocks, rope_blocks
from mha2mla.kernels.split_kv.choice import RowTiling, tile_rows

GEOMETRIES = [
    (32, 32, 16), (32, 8, 16), (32, 8, 64), (32, 4, 32), (32, 1, 64), (9, 3, 16), (9, 9, 72), (64, 4, 64), (48, 3, 16),
    (40, 40, 8), (12, 3, 24), (126, 2, 128), (24, 8, 16), (14, 2, 40),
]  # fmt: skip


def scores(tiling: RowTiling, rope: RopeBlocks, d_r: int, queries, keys):
    """Scores of ``swap_ab_ws`` for a tile of one token: [rows, tokens] from [heads_per_tile, d_r] and
    [tokens, columns of the tile], in the kernel's own indices."""
    group, groups, part, chunk = tiling.heads_per_group, tiling.groups_per_tile, rope.block_rows, rope.chunk_columns
    by_block = part < tiling.rows
    width = rope.chunks_per_block * chunk
    padded = torch.nn.functional.pad(keys, (0, rope.num_blocks * width))  # TMA fills with what follows, or zeros
    padded[:, keys.shape[1] :] = 77.0 if by_block else 0.0
    result = torch.zeros(tiling.rows, keys.shape[0], dtype=keys.dtype)
    for q, u in itertools.product(range(rope.num_blocks), range(rope.chunks_per_block)):
        left = q * rope.block_columns + u * chunk
        ring = padded[:, left : left + chunk]
        for i in range(part):
            row = q * part + i if by_block else i
            if row >= tiling.heads_per_tile:
                continue
            owner = i // group if by_block else i // group % groups
            columns = torch.arange(u * chunk, (u + 1) * chunk)
            expanded = torch.where(columns // d_r == owner, queries[row, columns % d_r], 0.0)
            result[row] += ring @ expanded
    return result


def tilings():
    for heads, groups, d_r in GEOMETRIES:
        found = (
            tile_rows(heads, groups, 1, rows, most) for rows in (64, 32, 16) for most in (128, 64, 32, 16, 8, 4, 2, 1)
        )
        for tiling in dict.fromkeys(found):
            yield tiling, d_r, f"H{heads}-G{groups}-r{d_r}-{tiling.rows}"


def test_every_head_meets_its_own_keys_once():
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for tiling, d_r, name in tilings():
        rope = rope_blocks(tiling, d_r)
        queries = torch.randn(tiling.heads_per_tile, d_r, dtype=torch.float64, generator=generator)
        keys = torch.randn(5, tiling.groups_per_tile * d_r, dtype=torch.float64, generator=generator)
        owner = torch.arange(tiling.heads_per_tile) // tiling.heads_per_group % tiling.groups_per_tile
        expected = torch.einsum("hd,thd->ht", queries, keys.unflatten(1, (-1, d_r))[:, owner])
        found = scores(tiling, rope, d_r, queries, keys)
        torch.testing.assert_close(found[: len(expected)], expected, msg=lambda text, name=name: f"{name}: {text}")
        assert (found[len(expected) :] == 0).all(), name
        seen.add(rope.block_rows < tiling.rows)
    assert seen == {False, True}


def test_octets_serve_more_than_128_columns():
    """Heads, rope heads, width of a rope head -> products of a tile of 32 rows."""
    products = {(32, 32, 16): 4, (32, 8, 16): 1, (32, 8, 64): 4, (32, 4, 32): 1, (32, 1, 64): 1, (9, 3, 16): 1}
    for (heads, groups, d_r), expected in products.items():
        assert rope_blocks(tile_rows(heads, groups, 1, 32, 128), d_r).num_blocks == expected, (heads, groups, d_r)
