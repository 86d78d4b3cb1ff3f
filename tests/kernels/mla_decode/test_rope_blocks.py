"""The ways to cut rope scores into products: each gives every head the keys of its own rope head, once."""

from __future__ import annotations

import itertools

import pytest
import torch

from mha2mla.kernels.mla_decode.selection import DecodeShape, RopeBlocks, list_kernels, rope_blocks, rope_variants
from mha2mla.kernels.split_kv.tiling import RowTiling, tile_rows

GEOMETRIES = [
    (32, 32, 16), (32, 8, 16), (32, 8, 64), (32, 4, 32), (32, 1, 64), (9, 3, 16), (9, 9, 72), (64, 4, 64), (48, 3, 16),
    (40, 40, 8), (12, 3, 24), (126, 2, 128), (24, 8, 16), (14, 2, 40),
]  # fmt: skip


def scores(tiling: RowTiling, rope: RopeBlocks, d_r: int, queries, keys):
    """What ``swap_ab_ws`` computes for a tile of one token: [rows, tokens] from [heads_per_tile, d_r] and
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
            if rope.on_cuda_cores:
                column = i // group % groups * d_r - u * chunk
                if column >= 0 and column + d_r <= chunk:
                    result[row] += ring[:, column : column + d_r] @ queries[row]
                continue
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
            for name in rope_variants(tiling, d_r):
                yield pytest.param(tiling, d_r, name, id=f"H{heads}-G{groups}-r{d_r}-{tiling.rows}-{name}")


def test_every_head_meets_its_own_keys_once():
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for case in tilings():
        tiling, d_r, name = case.values
        rope = rope_blocks(tiling, d_r, name)
        queries = torch.randn(tiling.heads_per_tile, d_r, dtype=torch.float64, generator=generator)
        keys = torch.randn(5, tiling.groups_per_tile * d_r, dtype=torch.float64, generator=generator)
        owner = torch.arange(tiling.heads_per_tile) // tiling.heads_per_group % tiling.groups_per_tile
        expected = torch.einsum("hd,thd->ht", queries, keys.unflatten(1, (-1, d_r))[:, owner])
        found = scores(tiling, rope, d_r, queries, keys)
        torch.testing.assert_close(found[: len(expected)], expected, msg=lambda text, case=case: f"{case.id}: {text}")
        assert (found[len(expected) :] == 0).all(), case.id
        seen.add(name)
    assert seen == {"blocks", "octets", "gemv"}


def test_variants_of_the_shapes_that_are_measured():
    """Heads, rope heads, width of a rope head -> what there is; the first is the rule's."""
    names = {
        (32, 32, 16): ["octets", "blocks", "gemv"],
        (32, 8, 16): ["blocks", "octets", "gemv"],
        (32, 8, 64): ["octets", "blocks", "gemv"],
        (32, 4, 32): ["blocks", "octets", "gemv"],
        (32, 1, 64): ["blocks", "gemv"],
        (9, 3, 16): ["blocks", "gemv"],
    }
    for (heads, groups, d_r), expected in names.items():
        assert list(rope_variants(tile_rows(heads, groups, 1, 32, 128), d_r)) == expected


def test_the_rule_offers_every_variant_and_takes_its_own():
    for heads, groups, d_r in ((32, 32, 16), (32, 8, 64), (9, 3, 16)):
        choices = list_kernels(DecodeShape(heads, groups, 256, d_r, 64, 1, "bfloat16"), 90)
        mine = [choice for choice in choices if choice.kernel == "swap_ab_ws"]
        assert {choice.variant for choice in mine} >= {"blocks", "gemv"}
        assert choices[0].variant == next(iter(rope_variants(choices[0].tiling, d_r)))
        assert all(f"rope scores by {choice.variant}" in choice.reason for choice in mine)
