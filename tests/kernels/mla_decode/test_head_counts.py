"""32 heads are the main case, and elsewhere a cliff (2.75 ms against 0.3 ms at 16 or 64 heads)."""

from __future__ import annotations

import pytest

from mha2mla.kernels.mla_decode.selection import DecodeShape, halve, list_kernels, select_kernel

HEADS = (8, 16, 24, 32, 40, 48, 64)
# num_rope_heads for a number of heads
LAYOUTS = {"shared": lambda heads: 1, "8 groups": lambda heads: 8, "per head": lambda heads: heads}
MULTIPROCESSORS = 132


@pytest.mark.parametrize(("kv_lora_rank", "rope"), [(128, 16), (256, 32), (256, 64), (512, 16), (512, 64), (960, 64)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_32_heads_are_served_as_their_neighbours(layout, kv_lora_rank, rope):
    """A decode step reads the cache once for each tile of heads: more heads never take fewer tiles, 32 take no
    more than 64 do, by kernels that stream, on every multiprocessor."""
    choices = {
        heads: select_kernel(DecodeShape(heads, LAYOUTS[layout](heads), kv_lora_rank, rope, 64, 1, "bfloat16"), 90)
        for heads in HEADS
    }
    tiles = {heads: choice.tiling.num_tiles for heads, choice in choices.items()}
    assert tiles[16] <= tiles[32] <= tiles[64], tiles
    for heads in (16, 32, 64):
        choice = choices[heads]
        streaming = ("swap_ab_ws", "heads_on_m", "swap_ab_cluster")
        assert choice.kernel in streaming and choice.num_stages >= 2, (heads, choice.reason)
        apiece = choice.tiling.num_tiles * choice.cluster_size
        assert choice.num_ctas(MULTIPROCESSORS) * apiece >= MULTIPROCESSORS - apiece, (heads, choice.reason)
    # No more padded rows than a power of two brings: a tile of 32 rows for 32 heads, not one of 64.
    rows = choices[32].tiling.rows * tiles[32]
    assert rows < 2 * 32 or LAYOUTS[layout](32) > 1, choices[32].reason


@pytest.mark.parametrize(
    ("heads", "groups", "kv_lora_rank", "rope", "tokens"),
    [(5, 5, 512, 64, 8), (8, 8, 256, 64, 8), (35, 7, 256, 32, 4), (32, 32, 512, 32, 8), (128, 1, 512, 64, 1)],
)
def test_several_tokens_of_many_groups_take_few_tiles(heads, groups, kv_lora_rank, rope, tokens):
    """``heads_on_m`` multiplies rope heads of 64 columns together: of more it read the cache once for each."""
    shape = DecodeShape(heads, groups, kv_lora_rank, rope, 64, tokens, "bfloat16")
    streaming = [choice for choice in list_kernels(shape, 90) if choice.kernel in ("swap_ab_ws", "heads_on_m")]
    assert select_kernel(shape, 90).tiling.num_tiles == min(choice.tiling.num_tiles for choice in streaming)
    assert any(choice.kernel == "heads_on_m" for choice in streaming)


@pytest.mark.parametrize(
    ("heads", "groups", "kv_lora_rank", "rope", "chunks"),
    [(7, 7, 960, 72, 2), (60, 5, 640, 56, 2), (40, 40, 640, 8, 2), (32, 8, 960, 8, 1), (32, 32, 1024, 24, 3)],
)
def test_many_rope_columns_of_a_cluster_are_one_tile(heads, groups, kv_lora_rank, rope, chunks):
    """A CTA loads 128 of its rotary columns at a time: more tiles would each read the latent again."""
    choice = select_kernel(DecodeShape(heads, groups, kv_lora_rank, rope, 64, 1, "bfloat16"), 90)
    assert (choice.kernel, choice.tiling.num_tiles) == ("swap_ab_cluster", 1), choice.reason
    cut = halve(choice.tiling, kv_lora_rank, rope)
    assert cut.rope_columns // cut.rope_chunk == chunks and cut.rope_columns >= cut.rope_own
