"""The page allocator and cache layouts: a state machine against plain lists of tokens, and every refusal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.cache_layout import CacheLayout, CacheTensor, fp8_layout, latent_layout
from mha2mla.modeling.pages import OutOfPagesError, PageAllocator, PageCopy

PAGES, PAGE = 12, 4


def slots_of(allocator: PageAllocator, sequence: int, start: int = 0) -> list[int]:
    """Where the tokens of a sequence from ``start`` on lie: page · page_size + offset, each."""
    pages, size = allocator.pages(sequence), allocator.page_size
    return [pages[token // size] * size + token % size for token in range(start, allocator.length(sequence))]


def grow(allocator: PageAllocator, sequence: int, new_tokens: int) -> tuple[PageCopy, ...]:
    """Room for more tokens of one sequence; what to copy for it."""
    growth = allocator.plan_growth({sequence: new_tokens})
    allocator.commit(growth)
    return growth.copies


def allocated(allocator: PageAllocator, length: int) -> int:
    sequence = allocator.allocate()
    grow(allocator, sequence, length)
    return sequence


class CacheMachine(RuleBasedStateMachine):
    """Sequences of numbered tokens in a real (tiny) paged tensor; free pages hold NaN, so that reading one shows."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES, PAGE)
        self.layout = CacheLayout("test", (CacheTensor("tokens", (), torch.float32),), PAGE)
        self.cache = self.layout.make(PAGES, fill=float("nan"))
        self.expected: dict[int, list[float]] = {}
        self.token = 0.0

    def write(self, sequence: int, start: int) -> None:
        """New tokens from ``start`` on, into a page table row as a kernel would see it."""
        allocator = self.allocator
        slots = slots_of(allocator, sequence, start)
        fresh = [self.token + i for i in range(len(slots))]
        self.token += len(slots)
        self.cache["tokens"].view(-1)[slots] = torch.tensor(fresh)
        self.expected[sequence] = self.expected[sequence][:start] + fresh

    def refused(self) -> tuple:
        allocator = self.allocator
        return allocator.num_free, {s: (allocator.pages(s), allocator.length(s)) for s in allocator.sequences}

    @rule(target=handles)
    def allocate(self):
        sequence = self.allocator.allocate()
        self.expected[sequence] = []
        return sequence

    @rule(sequence=handles, new_tokens=st.integers(0, 3 * PAGE))
    def grow(self, sequence, new_tokens):
        before, start = self.refused(), self.allocator.length(sequence)
        try:
            growth = self.allocator.plan_growth({sequence: new_tokens})
        except OutOfPagesError:
            pages = -(-(start + new_tokens) // PAGE) - len(self.allocator.pages(sequence))
            assert pages + 1 > self.allocator.num_free  # one more where the last is shared
            assert self.refused() == before
            return
        assert self.refused() == before
        self.layout.copy_pages(self.cache, growth.copies)
        self.allocator.commit(growth)
        assert before[0] - self.allocator.num_free == len(growth.taken)
        self.write(sequence, start)

    @rule(sequence=handles, share=st.floats(0, 1))
    def truncate(self, sequence, share):
        length = int(share * self.allocator.length(sequence))
        self.allocator.truncate(sequence, length)
        del self.expected[sequence][length:]

    @rule(target=handles, sequence=handles)
    def fork(self, sequence):
        free = self.allocator.num_free
        twin = self.allocator.fork(sequence)
        assert self.allocator.num_free == free
        self.expected[twin] = list(self.expected[sequence])
        return twin

    @rule(sequence=consumes(handles))
    def free(self, sequence):
        self.allocator.free(sequence)
        del self.expected[sequence]

    @invariant()
    def every_page_is_owned_or_free(self):
        allocator = self.allocator
        owned = [page for sequence in allocator.sequences for page in set(allocator.pages(sequence))]
        assert all(allocator.owners(page) == owned.count(page) for page in range(PAGES))
        assert allocator.num_free == PAGES - len(set(owned))

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        free = [page for page in range(PAGES) if not self.allocator.owners(page)]
        self.cache["tokens"][free] = float("nan")
        for sequence in self.allocator.sequences:
            slots = slots_of(self.allocator, sequence)
            assert len(self.allocator.pages(sequence)) == -(-len(slots) // PAGE)
            assert self.cache["tokens"].flatten()[slots].tolist() == self.expected[sequence]


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCacheMachine = CacheMachine.TestCase


def test_shared_page_is_copied_once_when_written():
    allocator = PageAllocator(4, 4)
    first = allocated(allocator, 6)
    second = allocator.fork(first)
    shared = allocator.pages(first)
    assert grow(allocator, second, 0) == ()
    (copy,) = grow(allocator, second, 1)
    assert copy == PageCopy(shared[1], allocator.pages(second)[1]) and copy.target not in shared
    assert allocator.pages(second)[0] == shared[0]
    assert grow(allocator, first, 1) == ()  # nobody else owns its last page any more


def test_growth_from_a_full_shared_page_copies_nothing():
    allocator = PageAllocator(3, 4)
    first = allocated(allocator, 4)
    second = allocator.fork(first)
    assert grow(allocator, second, 1) == ()
    assert allocator.pages(first) == allocator.pages(second)[:1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: PageAllocator(0, 4), "num_pages is 0"),
        (lambda a: PageAllocator(4, 0), "page_size is 0"),
        (lambda a: a.plan_growth({7: 1}), "sequence is 7"),
        (lambda a: a.plan_growth({0: -1}), r"new_tokens\[0\] is -1"),
        (lambda a: a.free(7), "sequence is 7"),
        (lambda a: a.fork(7), "sequence is 7"),
        (lambda a: a.truncate(0, 9), "length is 9; expected 0 to 5"),
    ],
)
def test_refusals_name_the_argument(call, message):
    allocator = PageAllocator(4, 4)
    allocated(allocator, 5)
    with pytest.raises(ValueError, match=message):
        call(allocator)


@pytest.mark.parametrize("layout", [latent_layout, fp8_layout])
def test_copying_a_page_copies_every_tensor(layout):
    layout = layout(MLAGeometry(8, 2, 48, 16), 4, torch.float32)
    cache = layout.make(3)
    for value in cache.values():
        value[0] = torch.randn(value.shape[1:])
    layout.copy_pages(cache, [PageCopy(0, 2)])
    for value in (value.float() for value in cache.values()):
        assert torch.equal(value[2], value[0]) and value[0].any() and not value[1].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensors": ()}, "tensors are called nothing"),
        ({"tensors": (CacheTensor("a", (), torch.half),) * 2}, "a, a; expected"),
        ({"tensors": (CacheTensor("a", (), torch.half),), "page_size": 0}, "page_size is 0"),
    ],
)
def test_layouts_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        CacheLayout(**{"name": "x", "page_size": 4} | arguments)
