"""The planner: what a schedule must hold whatever the lengths, and the device planner's body against the oracle."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mha2mla.kernels.split_kv.choice import FRAGMENT_TILES, TILE_TOKENS, Column
from mha2mla.kernels.split_kv.reference import attended_span, plan_fragments, splits_of, write_schedule
from tests.kernels.compiled import for_cpu
from tests.kernels.problems import planner_error, random_schedule_call

CALLS = {
    "seqlen": st.integers(-1, 700),
    "start": st.integers(-3, 800),
    "capacity": st.sampled_from((0, 64, 128, 512, 4096)),
    "seqlen_q": st.integers(1, 8),
    "causal": st.booleans(),
    "window": st.none() | st.integers(1, 400),
    "sinks": st.integers(0, 200),
}


def visible(seqlen, start, capacity, seqlen_q, causal, window, sinks) -> set[int]:
    """Tokens that some query sees, by the definition."""
    stop = max(0, min(seqlen, capacity))
    start = max(0, min(start, stop))
    seen = set()
    for s in range(seqlen_q):
        position = stop - 1 - (seqlen_q - 1 - s) * causal
        seen |= {t for t in range(start, position + 1) if window is None or t > position - window or t < start + sinks}
    return seen


@settings(max_examples=400, deadline=None)
@given(**CALLS)
def test_a_span_is_what_some_query_sees(**call):
    span, seen = attended_span(**call), visible(**call)
    said = set(range(span.low, span.stop)) | set(range(span.start, span.sink_stop))
    assert said >= seen
    tiles = [span.tile(i) for i in range(span.tiles)]
    assert tiles == sorted(set(tiles)), "each tile once, in order"
    assert {t // TILE_TOKENS for t in said if t < span.stop} == set(tiles), "the tiles with a token in them, no other"
    if call["seqlen_q"] == 1 or not call["causal"]:
        assert said == seen
    if span.stop <= span.start:
        assert span.tiles == 0


TILE_COUNTS = st.lists(st.sampled_from((0, 1, 2, 3)) | st.integers(0, 400), max_size=60)
NUM_CTAS = st.sampled_from((1, 2, 3, 7, 16, 33, 132, 264))


@settings(max_examples=400, deadline=None)
@given(tiles=TILE_COUNTS, num_ctas=NUM_CTAS)
def test_every_tile_belongs_to_one_fragment(tiles, num_ctas):
    """And no CTA has more than one tile above its share."""
    work = plan_fragments(tiles, num_ctas)
    assert len(work) == num_ctas
    given_out = [[] for _ in tiles]
    for mine in work:
        for fragment in mine:
            assert fragment.tiles > 0
            given_out[fragment.sequence] += range(fragment.first, fragment.first + fragment.tiles)
    assert given_out == [list(range(n)) for n in tiles]
    cost = sum(n + FRAGMENT_TILES for n in tiles if n)
    assert max(sum(fragment.tiles for fragment in mine) for mine in work) <= -(-cost // num_ctas) + 1


@settings(max_examples=400, deadline=None)
@given(tiles=TILE_COUNTS, num_ctas=NUM_CTAS, num_splits=st.sampled_from((0, 0, 1, 3, 50)))
def test_slots_and_splits(tiles, num_ctas, num_splits):
    """A slot has one writer; the k-th partial of a sequence is where the combine looks for it."""
    num_ctas = len(tiles) * num_splits or num_ctas
    work = plan_fragments(tiles, num_ctas, num_splits)
    slots = [fragment.slot for mine in work for fragment in mine if fragment.slot >= 0]
    assert len(slots) == len(set(slots))
    assert all(slot < 2 * num_ctas for slot in slots)
    for b, (count, first) in enumerate(splits_of(work, len(tiles))):
        found = [fragment.slot for mine in work for fragment in mine if fragment.sequence == b]
        assert count == len(found)
        if count == 0:
            assert (tiles[b], first) == (0, -1)
        elif count == 1:
            assert found == [first] == [-1]
        else:
            assert found == [first] + [2 * (first // 2 + k) for k in range(1, count)]


@settings(max_examples=200, deadline=None)
@given(tiles=TILE_COUNTS, num_splits=st.integers(1, 40))
def test_splits_that_were_asked_for(tiles, num_splits):
    """Every sequence in so many even pieces, wherever it comes in the batch."""
    work = plan_fragments(tiles, len(tiles) * num_splits, num_splits)
    for b, n in enumerate(tiles):
        pieces = [(f.first, f.tiles) for mine in work for f in mine if f.sequence == b]
        assert len(pieces) == min(n, num_splits) and sum(size for _, size in pieces) == n
        assert not n or max(size for _, size in pieces) - min(size for _, size in pieces) <= 1
        alone = plan_fragments([n], num_splits, num_splits)
        assert pieces == [(f.first, f.tiles) for mine in alone for f in mine]
    assert all(len(mine) <= 1 for mine in work)


@settings(max_examples=200, deadline=None)
@given(tiles=TILE_COUNTS, num_ctas=NUM_CTAS, num_splits=st.sampled_from((0, 0, 1, 3, 50)))
def test_rows_hold_the_fragments(tiles, num_ctas, num_splits):
    """Read as a kernel reads it: row of the CTA, then NEXT + 1, NEXT + 2, ...; no row has two fragments."""
    spans = [attended_span(n * TILE_TOKENS, 0, 2**30, 1, True, None, 0) for n in tiles]
    num_ctas = len(tiles) * num_splits or num_ctas
    work = plan_fragments(tiles, num_ctas, num_splits)
    schedule, splits = write_schedule(spans, work)
    assert splits.tolist() == [list(pair) for pair in splits_of(work, len(tiles))]
    used = []
    for cta, mine in enumerate(work):
        assert schedule[cta, Column.COUNT] == len(mine)
        rows = [cta] + [int(schedule[cta, Column.NEXT]) + f for f in range(1, len(mine))]
        used += rows[: len(mine)]
        for row, fragment in zip(rows, mine, strict=False):
            said = schedule[row]
            assert [int(said[i]) for i in (Column.SEQUENCE, Column.FIRST, Column.TILES, Column.SLOT)] == [
                fragment.sequence, fragment.first, fragment.tiles, fragment.slot,
            ]  # fmt: skip
            assert (int(said[Column.START]), int(said[Column.STOP])) == (0, tiles[fragment.sequence] * TILE_TOKENS)
    assert len(used) == len(set(used))


@pytest.fixture(scope="module")
def planner():
    pytest.importorskip("tilelang", reason="TileLang is not installed")

    from mha2mla.kernels.split_kv.plan_kernel import make_plan

    return for_cpu(make_plan(threads=1, on_cpu=True))


def test_the_device_planner_does_what_the_oracle_says(planner):
    """Its body on the CPU, one thread: the same numbers in every row that something points at."""
    for seed in range(600):
        assert planner_error(planner, random_schedule_call(random.Random(seed))) == "", f"seed {seed}"
