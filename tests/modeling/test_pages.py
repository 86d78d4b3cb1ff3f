"""The page allocator and cache layouts: copies of shared pages, and every refusal. test_paged_cache_machine.py has the
state machine against plain lists of tokens."""

from __future__ import annotations

import pytest
import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.cache_layout import CacheLayout, CacheTensor, fp8_layout, latent_layout
from mha2mla.modeling.pages import PageAllocator, PageCopy


def grow(allocator: PageAllocator, sequence: int, new_tokens: int) -> tuple[PageCopy, ...]:
    """Room for more tokens of one sequence; what to copy for it."""
    growth = allocator.plan_growth({sequence: new_tokens})
    allocator.commit(growth)
    return growth.copies


def allocated(allocator: PageAllocator, length: int) -> int:
    sequence = allocator.allocate()
    grow(allocator, sequence, length)
    return sequence


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
