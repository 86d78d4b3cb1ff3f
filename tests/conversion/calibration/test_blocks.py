"""Windows of several lengths in blocks of equally many tokens: what is walked, chosen, sampled and weighed."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mha2mla.conversion.calibration import statistics
from mha2mla.conversion.calibration.blocks import LENGTHS, ActivationStore, TokenBlocks, default_lengths
from mha2mla.conversion.calibration.statistics import StatisticsCollector
from mha2mla.conversion.latent.ranks import choose_layer_ranks
from tests.conversion import tiny

CPU = torch.device("cpu")


def numbered(counts):
    """Length -> number of windows, as blocks whose tokens are all different."""
    total, parts = 0, []
    for length, count in counts.items():
        parts.append(torch.arange(total, total + length * count).view(count, length))
        total += length * count
    return TokenBlocks.of(parts), parts


def test_blocks_are_whole_windows_of_one_length():
    blocks, parts = numbered({4: 8, 16: 2, 8: 4})
    assert blocks.size == 16 and len(blocks) == 6 and blocks.lengths == (4, 4, 8, 8, 16, 16)
    assert blocks.window_lengths == (4, 8, 16)
    for part in parts:
        mine = blocks.of_length(part.shape[1])
        assert torch.equal(blocks.tokens[mine.start : mine.stop].view(part.shape), part)
    assert TokenBlocks.of(torch.arange(12).view(3, 4)).lengths == (4, 4, 4)


@pytest.mark.parametrize("counts", [{4: 3, 16: 1}, {6: 2, 16: 1}])
def test_windows_that_do_not_fill_blocks_are_refused(counts):
    with pytest.raises(ValueError, match="expected whole blocks of 16 tokens"):
        numbered(counts)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 200))
def test_every_block_is_in_one_batch_of_its_own_length(short, long, tokens):
    blocks, _ = numbered({4: 4 * short, 16: long})
    seen = []
    for part in blocks.batches(tokens):
        inside = list(range(len(blocks)))[part]
        assert len({blocks.lengths[block] for block in inside}) == 1
        assert len(inside) * blocks.size <= max(tokens, blocks.size)
        seen += inside
    assert seen == list(range(len(blocks)))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 300), st.integers(1, 100))
def test_lengths_have_the_same_share_of_what_is_chosen(short, long, fitted, judged):
    blocks, _ = numbered({4: 4 * short, 16: long})
    spread = blocks.spread(fitted)
    assert set(spread) == {4, 16}
    for length, chosen in spread.items():
        assert len(chosen) * blocks.size >= min(fitted / 2, len(blocks.of_length(length)) * blocks.size)
    fit, judge = blocks.divided(fitted, judged)
    assert fit.window_lengths == judge.window_lengths == (4, 16)
    for length, count in ((4, short), (16, long)):
        mine, theirs = (
            {row.tolist()[0] for row, of in zip(part.tokens, part.lengths, strict=True) if of == length}
            for part in (fit, judge)
        )
        assert mine and theirs and (count == 1 or not mine & theirs)


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [
        (200, (4,) * 16 + (8,) * 8 + (32,) * 2),
        (96, (4,) * 8 + (8,) * 4 + (32,)),
        (95, (4,) * 10 + (8,) * 5),
        (20, (4, 4, 8)),
        (12, (4, 4, 4)),
        (1, (4,)),
    ],
)
def test_fewer_tokens_are_windows_of_the_lengths_that_fit(tokens, lengths):
    blocks = TokenBlocks.of([torch.arange(64).view(-1, length) for length in (4, 8, 32)])
    found = blocks.shortened(tokens)
    windows = [row for block, length in zip(found.tokens, found.lengths, strict=True) for row in block.split(length)]
    assert tuple(map(len, windows)) == lengths
    for length in set(lengths):
        whole = torch.cat([row for row in windows if len(row) == length])
        assert torch.equal(whole, torch.arange(len(whole)))


@pytest.mark.parametrize(("tokens", "lengths"), [(6, {4}), (24, {6}), (36, {4, 6, 12})])
def test_fewer_tokens_have_lengths_that_divide_the_longest(tokens, lengths):
    """Of lengths that divide 12, and not one another."""
    blocks = TokenBlocks.of([torch.arange(96).view(-1, length) for length in (4, 6, 12)])
    found = blocks.shortened(tokens)
    assert set(found.window_lengths) == lengths and found.tokens.numel() <= tokens


@given(st.integers(2, 300_000))
def test_default_lengths_reach_the_context_and_divide_the_longest(context):
    lengths = default_lengths(context)
    assert lengths[-1] <= min(context, LENGTHS[-1]) and list(lengths) == sorted(set(lengths))
    assert all(lengths[-1] % length == 0 for length in lengths)
    assert lengths[-1] > 0.6 * min(context, LENGTHS[-1])


def test_default_lengths():
    assert default_lengths(None) == default_lengths(32768) == (512, 2048, 8192)
    assert default_lengths(4096) == (512, 2048, 4096) and default_lengths(300) == (300,)


def test_a_store_gives_windows_of_the_length_of_its_blocks(tmp_path):
    blocks, _ = numbered({4: 4, 16: 2})
    store = ActivationStore(blocks, 3, dtype=torch.float32, folder=tmp_path)
    values = torch.randn(3, 16, 3)
    for part in blocks.batches(16):
        store.write(part, values[part].view(-1, blocks.lengths[part.start], 3))
    assert torch.equal(store.read(slice(0, 1), CPU), values[:1].view(4, 4, 3))
    assert torch.equal(store.read(slice(1, 3), CPU), values[1:])
    assert torch.equal(store.gather(torch.tensor([2, 1]), CPU, 16), values[[2, 1]])
    assert torch.equal(store.tokens(2, slice(5, 7), CPU), values[2, 5:7])


def test_what_is_spilled_has_no_name_that_a_killed_run_could_leave(tmp_path):
    blocks = TokenBlocks.of(torch.zeros(3, 4, dtype=torch.int64))
    stores = [
        ActivationStore(blocks, 8, dtype=dtype, folder=tmp_path, spill_bytes=0)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for store in stores:
        store.write(slice(1, 2), torch.ones(1, 4, 8))
        assert float(store.read(slice(1, 2), CPU).sum()) == 32
    assert list(tmp_path.iterdir()) == []
    assert tiny.spilt_files(tmp_path) == 2
    for store in stores:
        store.close()
    assert tiny.spilt_files(tmp_path) == 0


def test_a_search_obeys_the_limit_of_memory(tmp_path):
    source = tiny.checkpoint(tmp_path / "source", head_dim=32, num_hidden_layers=3)
    recipe = tiny.Recipe(latent_ranks="measured")
    walk = replace(tiny.walk_over(source, recipe), folder=tmp_path / "absent")
    walk = replace(walk, geometries=(recipe.geometry(walk.spec),) * walk.spec.num_layers)
    kept = choose_layer_ranks(walk)
    assert choose_layer_ranks(replace(walk, folder=tmp_path, spill_bytes=0)) == kept
    with pytest.raises(FileNotFoundError, match="absent"):
        choose_layer_ranks(replace(walk, spill_bytes=0))


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """A collector of the first layer of a tiny model, and inputs by length."""
    folder = tiny.checkpoint(tmp_path_factory.mktemp("source"), head_dim=32)
    walk = tiny.walk_over(folder, tiny.Recipe())
    spec = walk.spec
    weights = walk.adapter.attention_weights(walk.model.source, spec, 0, device=CPU, dtype=torch.float64)

    def collect(*inputs):
        collector = StatisticsCollector(
            spec.of_layer(0), weights, window=None, phases=True, attended=True, sample_tokens=64
        )
        for hidden in inputs:
            collector.add(hidden)
        return collector.finish()

    generator = torch.Generator().manual_seed(0)
    short, long = (torch.randn(*shape, spec.hidden_size, generator=generator) for shape in ((16, 16), (2, 128)))
    return collect, short.double(), long.double()


def test_a_query_of_a_long_window_counts_for_its_neighbours(collected, monkeypatch):
    """256 tokens of each length weigh the same, though of the long windows every fourth query is looked at."""
    collect, short, long = collected
    monkeypatch.setattr(statistics, "_QUERIES", 32)
    monkeypatch.setattr(statistics, "GOLDEN", 0.0)  # windows begin alike, wherever they come
    apart, together = [collect(short), collect(long)], collect(short, long)
    for name in ("attended_mean", "attention_covariance", "covariance"):
        mean = sum(getattr(each, name) for each in apart) / 2
        found = getattr(together, name)
        if name == "covariance":  # about the common mean
            shift = (apart[0].mean - apart[1].mean) / 2
            mean = mean + torch.outer(shift, shift)
        assert torch.allclose(found, mean, rtol=1e-6, atol=1e-9), name


def test_a_sample_has_several_windows_of_every_length_in_turns(collected):
    collect, short, long = collected
    sample = collect(*short.split(4), *long.split(1), *long.split(1), *long.split(1)).sample.hidden
    lengths = [len(window) for window in sample]
    assert lengths.count(128) == 3 and lengths.count(16) == 4
    assert lengths != sorted(lengths) and lengths != sorted(lengths, reverse=True)
