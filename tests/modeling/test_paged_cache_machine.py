"""PagedCache as a state machine over real attention: all or nothing wherever it raises, and no stale batch is run.

Queries are zero, so attention is the mean of the values that a token sees: of its own sequence's, and of nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling import CacheCapacityError, PagedCache, SequenceBatch, StaleBatchError
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.pages import PageAllocator
from mha2mla.modeling.registry import AttentionConstants, GQAGeometry
from mha2mla.modeling.step import AttentionStep
from tests.ops import OutOfMemory, RaisingAt

PAGES, PAGE = 12, 4
LAYERS = [(ATTENTION_BACKENDS.get("gqa_reference"), AttentionConstants(GQAGeometry(1, 1, 2, 1), 1.0))] * 2
# Latents of one number, which is the value; their rotary keys do not matter to queries of zero.
LATENT = MLAGeometry(1, 1, 1, 2, rope_from_latent=True)
ALONE = [(ATTENTION_BACKENDS.get("mla_reference"), AttentionConstants(LATENT, 1.0))] * 2


def slots_of(allocator: PageAllocator, sequence: int) -> list[int]:
    """Where the tokens of a sequence lie: page · page_size + offset, each."""
    pages, size = allocator.pages(sequence), allocator.page_size
    return [pages[token // size] * size + token % size for token in range(allocator.length(sequence))]


def state_of(cache: PagedCache) -> tuple:
    """Everything that must be as before after an error: the books, and what is in pages that somebody owns."""
    owned = [page for page in range(cache.allocator.num_pages) if cache.allocator.owners(page)]
    data = [tensor[owned].flatten().tolist() for tensors in cache.tensors for tensor in tensors.values()]
    return copy.deepcopy(vars(cache.allocator)), repr(data)  # as text, NaN equals NaN


def attend(step: AttentionStep, values: torch.Tensor) -> torch.Tensor:
    """Runs both layers; the new tokens' values are ``values`` [N] and keys and queries zero. [N]."""
    zero, one = torch.zeros(len(values), 1, 2), torch.ones(1, 1, 1)
    tensors = {"query": zero, "key": zero, "value": values[:, None, None], "inv_freq": torch.zeros(1, 1)}
    tensors |= {"q_nope": zero[..., :0], "q_pe": zero, "latent": values[:, None], "k_up": None, "v_up": one}
    tensors |= {"rope_weight": torch.ones(2, 1), "rope_bias": torch.ones(2)}
    outs = [step.run(layer, tensors)[1] for layer in range(len(LAYERS))]
    # What a batch that was never run has promised is NaN, in both.
    assert torch.equal(*[out.nan_to_num(-1.0) for out in outs])
    return outs[0][:, 0, 0]


@dataclass(eq=False)
class Pending:
    """A batch of ``extend``, the sequences in it with the values of their new tokens, and whether it is out of date."""

    batch: SequenceBatch
    values: dict[int, list[float]]
    begins: dict[int, int]
    why: set[str] = field(default_factory=set)


class PagedCacheMachine(RuleBasedStateMachine):
    layers, stored = LAYERS, "value_cache"

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache(self.layers, PAGES, PAGE, dtype=torch.float32)
        # Per sequence, the values of its tokens; None where a token was promised and never brought.
        self.values: dict[int, list[float | None]] = {}
        self.batches: list[Pending] = []
        self.next_value = 1.0

    @property
    def sequences(self) -> list[int]:
        return list(self.values)

    def outdate(self, sequence: int, why: str) -> None:
        for pending in self.batches:
            if sequence in pending.values:
                pending.why.add(why)

    @rule()
    def open(self):
        self.values[self.cache.open()] = []

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.sequences))
        self.values[self.cache.fork(parent)] = list(self.values[parent])
        self.outdate(parent, "was extended, cropped or forked")

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close(self, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        self.cache.close(sequence)
        del self.values[sequence]
        self.outdate(sequence, "was closed")

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def crop(self, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        length = len(self.values[sequence])
        wanted = data.draw(st.integers(-2, length + 2))
        if not 0 <= wanted <= length:
            before = state_of(self.cache)
            with pytest.raises(ValueError, match=f"length is {wanted}; expected 0 to {length}"):
                self.cache.crop(sequence, wanted)
            assert state_of(self.cache) == before
            return
        self.cache.crop(sequence, wanted)
        if wanted < length:
            del self.values[sequence][wanted:]
            self.outdate(sequence, "was extended, cropped or forked")

    @rule(unknown=st.sampled_from(["close", "crop", "fork", "extend"]))
    def unknown_sequence(self, unknown):
        before = state_of(self.cache)
        calls: dict[str, Callable] = {
            "close": lambda: self.cache.close(10**6),
            "crop": lambda: self.cache.crop(10**6, 0),
            "fork": lambda: self.cache.fork(10**6),
            "extend": lambda: self.cache.extend({**dict.fromkeys(self.sequences, 1), 10**6: 1}),
        }
        with pytest.raises(ValueError, match="sequence is 1000000"):
            calls[unknown]()
        assert state_of(self.cache) == before

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), keep=st.booleans())
    def extend(self, data, keep):
        """Any tokens for any sequences, sizes that may be too small, and a fault at any op; then mostly a step."""
        some = data.draw(st.lists(st.sampled_from(self.sequences), unique=True, min_size=1, max_size=4))
        new = {sequence: data.draw(st.integers(-1 if len(some) == 4 else 0, 10)) for sequence in some}
        options = data.draw(
            st.fixed_dictionaries({}, optional={"num_sequences": st.integers(0, 6), "max_pages": st.integers(0, 6)})
        )
        fault = data.draw(st.none() | st.integers(0, 60))
        before, allocator = state_of(self.cache), self.cache.allocator
        had = {sequence: (allocator.length(sequence), len(allocator.pages(sequence))) for sequence in some}
        free = allocator.num_free
        try:
            with RaisingAt(fault):
                batch = self.cache.extend(new, **options)
        except (ValueError, OutOfMemory) as error:
            assert state_of(self.cache) == before
            if isinstance(error, CacheCapacityError) and "are free" in str(error):  # one more where the last is shared
                pages = sum(-(-(length + new[each]) // PAGE) - own + 1 for each, (length, own) in had.items())
                assert pages > free
            return
        values, begins = {}, {}
        for sequence, count in new.items():
            self.outdate(sequence, "was extended, cropped or forked")
            begins[sequence] = len(self.values[sequence])
            values[sequence] = [self.next_value + i for i in range(count)]
            self.next_value += count
            self.values[sequence] += [None] * count
        self.batches.append(Pending(batch, values, begins))
        if not keep:
            self.run(self.batches[-1], fault)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), fault=st.none() | st.integers(0, 40))
    def step(self, data, fault):
        """Some batch, perhaps a stale one, perhaps once more."""
        self.run(self.batches[data.draw(st.integers(0, len(self.batches) - 1))], fault)

    def run(self, pending: Pending, fault: int | None) -> None:
        before = state_of(self.cache)
        if pending.why:
            with pytest.raises(StaleBatchError, match=f"batch has sequence .* which ({'|'.join(pending.why)}) since"):
                self.cache.step(pending.batch)
            assert state_of(self.cache) == before
            self.batches.remove(pending)
            return
        try:
            with RaisingAt(fault):
                step = self.cache.step(pending.batch)
        except OutOfMemory:
            assert state_of(self.cache) == before
            step = self.cache.step(pending.batch)
        parts = [torch.tensor(values) for values in pending.values.values()]
        if not sum(len(part) for part in parts):
            return
        for sequence, values in pending.values.items():
            first = pending.begins[sequence]
            self.values[sequence][first : first + len(values)] = values
        self.poison()
        try:
            with RaisingAt(fault):
                attend(step, pending.batch.flatten(parts))
        except OutOfMemory:
            pass  # some tokens are written, some not: they are when it is run again
        outs = pending.batch.unflatten(attend(step, pending.batch.flatten(parts)))
        for (sequence, values), mine in zip(pending.values.items(), outs, strict=True):
            known, first = self.values[sequence], pending.begins[sequence]
            if None not in known:
                expected = [sum(known[: first + i + 1]) / (first + i + 1) for i in range(len(values))]
                assert mine.tolist() == pytest.approx(expected, rel=1e-5)

    def poison(self) -> None:
        """Nobody may look at a page that is free, nor behind a sequence's end."""
        allocator = self.cache.allocator
        used = {slot for s in allocator.sequences for slot in slots_of(allocator, s)}
        others = [slot for slot in range(PAGES * PAGE) if slot not in used]
        for tensors in self.cache.tensors:
            for tensor in tensors.values():
                tensor.view(PAGES * PAGE, -1)[others] = torch.nan

    @invariant()
    def every_page_is_owned_or_free(self):
        allocator = self.cache.allocator
        owned = [page for sequence in allocator.sequences for page in allocator.pages(sequence)]
        assert [allocator.owners(page) for page in range(PAGES)] == [owned.count(page) for page in range(PAGES)]
        assert allocator.num_free == PAGES - len(set(owned))
        assert {s: allocator.length(s) for s in allocator.sequences} == {
            s: len(values) for s, values in self.values.items()
        }

    @invariant()
    def tokens_of_every_sequence_are_its_own(self):
        allocator = self.cache.allocator
        for sequence, values in self.values.items():
            slots = slots_of(allocator, sequence)
            assert len(allocator.pages(sequence)) == -(-len(slots) // PAGE)
            for tensors in self.cache.tensors:
                found = tensors[self.stored].flatten()[slots].tolist()
                assert [a for a, b in zip(found, values, strict=True) if b is not None] == [
                    b for b in values if b is not None
                ]


class MachineOfLatentsAlone(PagedCacheMachine):
    layers, stored = ALONE, "latent_cache"


TestPagedCacheMachine, TestMachineOfLatentsAlone = PagedCacheMachine.TestCase, MachineOfLatentsAlone.TestCase
TestPagedCacheMachine.settings = TestMachineOfLatentsAlone.settings = settings(
    max_examples=50,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def filled() -> tuple[PagedCache, int, int, int]:
    """A cache with a sequence, its fork that has grown, and another fork; pages shared and not."""
    cache = PagedCache(LAYERS, PAGES, PAGE, dtype=torch.float32)
    parent = cache.open()
    for count, value in ((6, 1.0), (3, 2.0)):
        batch = cache.extend({parent: count})
        attend(cache.step(batch), torch.full((count,), value))
    return cache, parent, cache.fork(parent), cache.fork(parent)


CHANGES: dict[str, Callable] = {
    "close": lambda cache, sequence: cache.close(sequence),
    "crop": lambda cache, sequence: cache.crop(sequence, 3),
    "extend": lambda cache, sequence: cache.extend({sequence: 1}),
    "fork": lambda cache, sequence: cache.fork(sequence),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_does_not_outlive_its_sequences(change):
    """Planned while the batch was fresh; its pages may be somebody else's when it is run."""
    cache, sequence, twin, _ = filled()
    batch = cache.extend({sequence: 2, twin: 1})
    step = cache.step(batch)
    CHANGES[change](cache, sequence)
    other = cache.open()
    attend(cache.step(cache.extend({other: 4})), torch.full((4,), 9.0))
    before = state_of(cache)
    with pytest.raises(StaleBatchError, match="batch has sequence 0"):
        attend(step, torch.ones(3))
    assert state_of(cache) == before


def test_a_batch_of_another_cache_is_not_stepped():
    one, sequence, *_ = filled()
    two, *_ = filled()
    with pytest.raises(StaleBatchError, match="sequence 0, which is of another cache"):
        two.step(one.extend({sequence: 1}))


def test_a_step_refuses_to_load_a_stale_batch():
    """What a CUDA graph is replayed over: no host code runs then, so what goes into its tensors is looked at before."""
    cache, sequence, twin, _ = filled()
    step = cache.step(SequenceBatch.build([], [], [], PAGE, max_pages=5, num_sequences=2))
    batch = cache.extend({sequence: 1, twin: 1}, max_pages=5)
    cache.close(twin)
    with pytest.raises(StaleBatchError, match=f"sequence {twin}, which was closed"):
        step.load(batch)
    assert not step.batch.cache_seqlens.any()
    step.load(cache.extend({sequence: 1}, max_pages=5, num_sequences=2))
    with pytest.raises(StaleBatchError, match="replaced after the plans were made; expected a call of refresh"):
        attend(step, torch.ones(2))
    step.refresh()
    assert float(attend(step, torch.ones(2))[0]) == pytest.approx(13 / 11)  # ones, twos, a token never brought
    cache.crop(sequence, 4)
    with pytest.raises(StaleBatchError):
        step.refresh()
