"""A step's metadata: places of tokens, order, padding, and no write outside one's own pages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mha2mla.modeling.batch import CacheCapacityError, SequenceBatch

PAGE = 4


def own_pages(lengths, cached):
    """Pages in reverse order, so that nothing is right by being an arange."""
    counts = [-(-(new + old) // PAGE) for new, old in zip(lengths, cached, strict=True)]
    ids = iter(range(sum(counts) - 1, -1, -1))
    return [[next(ids) for _ in range(count)] for count in counts], sum(counts)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 13), st.integers(0, 17)), max_size=6), st.integers(0, 3))
def test_places_of_tokens(lengths_and_cached, padding_rows):
    lengths, cached = zip(*lengths_and_cached, strict=True) if lengths_and_cached else ((), ())
    pages, num_pages = own_pages(lengths, cached)
    shortest = min(lengths, default=1)
    rows = len(lengths) + padding_rows
    batch = SequenceBatch.build(lengths, cached, pages, PAGE, num_pages=num_pages, num_sequences=rows)
    assert (batch.num_sequences, batch.num_tokens) == (rows, sum(lengths) + padding_rows * shortest)
    assert batch.lengths[0].tolist() == sorted([*lengths, *[shortest] * padding_rows])
    written = []
    for row, index in enumerate(batch.order.tolist()):
        first, stop = batch.cu_seqlens_q[row : row + 2].tolist()
        if index < 0:
            assert batch.slots[first:stop].tolist() == [-1] * shortest and batch.cache_seqlens[row] == 0
            continue
        positions = list(range(cached[index], cached[index] + lengths[index]))
        assert batch.positions[first:stop].tolist() == positions
        expected = [pages[index][p // PAGE] * PAGE + p % PAGE for p in positions]
        assert batch.slots[first:stop].tolist() == expected
        assert batch.cache_seqlens[row] == cached[index] + lengths[index]
        written += expected
    assert len(set(written)) == len(written)


def test_flatten_keeps_the_callers_order():
    lengths, cached = [5, 1, 3], [2, 9, 0]
    pages, _ = own_pages(lengths, cached)
    batch = SequenceBatch.build(lengths, cached, pages, PAGE, num_sequences=5)
    parts = [torch.randn(length, 2) for length in lengths]
    flat = batch.flatten(parts)
    assert flat.shape == (11, 2)
    assert all(torch.equal(*pair) for pair in zip(batch.unflatten(flat), parts, strict=True))
    assert torch.equal(flat[batch.last_tokens[batch.order == 0]], parts[0][-1:])
    with pytest.raises(ValueError, match=r"parts\[1\] has 2 tokens; expected 1"):
        batch.flatten([parts[0], parts[2][:2], parts[2]])
    with pytest.raises(ValueError, match="parts has 1 entries"):
        batch.flatten(parts[:1])


def test_an_empty_batch():
    batch = SequenceBatch.build([], [], [], PAGE)
    assert batch.num_sequences == batch.num_tokens == batch.max_seqlen_q == 0
    assert batch.block_table.shape == (0, 1) and batch.unflatten(torch.zeros(0, 3)) == []
    for none in (batch, SequenceBatch.build([], [], [], PAGE, num_sequences=2)):  # rows of padding alone
        with pytest.raises(ValueError, match="parts is empty; expected at least one sequence"):
            none.flatten([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_lengths": [1, 6]}, r"sequence 1 will have 3 \+ 6 tokens; expected at most 8"),
        ({"pages": [[0, 1], [2, 9]]}, r"pages\[1\] has page 9; expected 0 to 3"),
        ({"pages": [[0, 1], [2, -1]]}, r"pages\[1\] has page -1"),
        ({"pages": [[0, 1], [2, 1]]}, r"sequence 0 would write to page 1, which is in the tables of \[0, 1\]"),
        ({"max_pages": 1}, "max_pages is 1; expected at least 2"),
    ],
)
def test_overflow_is_an_error_where_the_batch_is_built(change, message):
    given = {"query_lengths": [1, 2], "cached_lengths": [4, 3], "pages": [[0, 1], [2, 3]], "num_pages": 4}
    with pytest.raises(CacheCapacityError, match=message):
        SequenceBatch.build(page_size=PAGE, **given | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cached_lengths": [4]}, "cached_lengths has 1 entries; expected 2"),
        ({"query_lengths": [1, -2]}, "no negative number"),
        ({"num_sequences": 1}, "num_sequences is 1; expected at least 2"),
        ({"page_size": 0}, "page_size is 0"),
    ],
)
def test_other_refusals(change, message):
    given = {"query_lengths": [1, 2], "cached_lengths": [4, 3], "pages": [[0, 1], [2, 3]], "page_size": PAGE}
    with pytest.raises(ValueError, match=message):
        SequenceBatch.build(**given | change)


def test_shared_pages_may_be_read_by_all():
    batch = SequenceBatch.build([1, 1], [4, 4], [[0, 1], [0, 2]], PAGE)
    assert batch.slots.tolist() == [4, 8]


def test_a_real_batch_takes_the_place_of_the_maximum():
    """What a CUDA graph was captured over gets other contents, and keeps its addresses."""
    largest = SequenceBatch.build([], [], [], PAGE, max_pages=3, num_sequences=4)
    assert largest.slots.tolist() == [-1] * 4 and not largest.cache_seqlens.any()
    addresses = [t.data_ptr() for t in (largest.slots, largest.block_table, largest.cache_seqlens)]
    batch = SequenceBatch.build([1, 1], [4, 9], [[0, 1], [5, 6, 7]], PAGE, num_sequences=4, max_pages=3)
    largest.copy_(batch)
    assert largest.slots.tolist() == [4, 29, -1, -1] and largest.cache_seqlens.tolist() == [5, 10, 0, 0]
    assert addresses == [t.data_ptr() for t in (largest.slots, largest.block_table, largest.cache_seqlens)]
    with pytest.raises(ValueError, match="other has 2 sequences of 3 pages"):
        largest.copy_(SequenceBatch.build([1, 1], [4, 9], [[0, 1], [5, 6, 7]], PAGE))
    long = SequenceBatch.build([20], [0], [range(5)], PAGE)
    with pytest.raises(ValueError, match="max_seqlen_q is 20; expected at most 8"):
        long.copy_(long)
