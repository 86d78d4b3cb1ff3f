"""Kernels that append and read codes: on the C target bit for bit what plain torch makes; compiled for a Hopper."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("tilelang", reason="TileLang is not installed")

from mha2mla.kernels import RowQuantizer, append_codes, read_codes
from mha2mla.kernels.machine import EXACT_PASS_CONFIGS
from mha2mla.kernels.row_codes.kernel import make_append_codes, make_find_codes, make_read_codes
from mha2mla.kernels.row_codes.trellis import Trellis
from tests.few import each, few
from tests.kernels.compiled import for_cpu, gate

PAGE, PAGES = 16, 5


def given(bits: int, width: int, has_centers: bool, rows: int = 20):
    """Quantizer, centers or None, rows near them of sizes from 1e-3 to 1e3, and slots, two outside the cache."""
    make = torch.Generator().manual_seed(width + bits)
    latent = torch.randn(rows, width, generator=make) * torch.logspace(-3, 3, rows)[:, None]
    centers = torch.randn(2, width, generator=make) * 5 if has_centers else None
    if has_centers:
        latent += centers[torch.arange(rows) % 2]
    latent[1] = 0 if centers is None else centers[1]  # a row without a step
    slots = torch.randperm(PAGE * PAGES, generator=make)[:rows].int()
    slots[3:5] = torch.tensor([-1, PAGE * PAGES])
    return RowQuantizer(bits), centers, latent, slots


def empty_cache(quantizer: RowQuantizer, width: int, behind: int = 0) -> torch.Tensor:
    """Pages of rows, with room for something else behind those of each page: ``behind`` bytes a row."""
    row = quantizer.bytes_per_row(width)
    pages = torch.full((PAGES, PAGE * (row + behind)), 171, dtype=torch.uint8)
    return pages[:, : PAGE * row].unflatten(1, (PAGE, row))


@cache
def on_cpu(make, **static):
    return for_cpu(make(**static, page_size=PAGE, dtype="float32", on_cpu=True))


def operands(make, quantizer, centers, stored, width):
    """The kernel for a cache, the cache as it takes it, and centers, or what stands in for them."""
    near, kind = (torch.full((2, width), torch.nan), None) if centers is None else (centers, "float32")
    words = stored.stride(0) // 4
    kernel = on_cpu(make, width=width, bits=quantizer.bits, page_words=words, center_dtype=kind)
    return kernel, stored.view(torch.int32), near


def append_on_cpu(quantizer, centers, latent, slots, behind=0):
    width, stored = latent.shape[1], empty_cache(quantizer, latent.shape[1], behind)
    kernel, pages, near = operands(make_append_codes, quantizer, centers, stored, width)
    kernel(latent, slots, near, pages)
    return stored


def read_on_cpu(quantizer, centers, stored, table, width):
    out = torch.full((table.numel(), PAGE, width), 7.0)
    kernel, pages, near = operands(make_read_codes, quantizer, centers, stored, width)
    kernel(pages, table.flatten(), near, out)
    return out


@each("bits, has_centers, width", (4, 8, 3, 2, 1, 7), (True, False), (192, 64, 1024, 1056))
def test_appended_bytes_are_the_references(bits, has_centers, width):
    quantizer, centers, latent, slots = given(bits, width, has_centers)
    expected = empty_cache(quantizer, width)
    append_codes(latent, expected, slots, quantizer, centers)
    assert torch.equal(append_on_cpu(quantizer, centers, latent, slots), expected)


@pytest.mark.parametrize("bits", [3, 4])
def test_pages_may_have_something_behind_their_rows(bits):
    quantizer, centers, latent, slots = given(bits, 64, True)
    expected = empty_cache(quantizer, 64)
    append_codes(latent, expected, slots, quantizer, centers)
    stored = append_on_cpu(quantizer, centers, latent, slots, behind=24)
    assert torch.equal(stored, expected) and not stored.is_contiguous()
    assert (stored._base[:, PAGE * stored.shape[2] :] == 171).all()
    table = torch.tensor([[3, 0, 4]], dtype=torch.int32)
    out = read_on_cpu(quantizer, centers, stored, table, 64)
    assert torch.equal(out, read_codes(expected, table, 64, quantizer, centers, out.dtype))


@pytest.mark.parametrize("has_centers", [True, False])
def test_append_keeps_what_is_not_finite_in_its_row(has_centers):
    quantizer, centers, latent, slots = given(4, 128, has_centers)
    wrong = latent.clone()
    for row, value in ((6, torch.nan), (7, torch.inf), (8, -torch.inf)):
        wrong[row, 40] = value
    expected = empty_cache(quantizer, 128)
    append_codes(wrong, expected, slots, quantizer, centers)
    stored = append_on_cpu(quantizer, centers, wrong, slots)
    assert torch.equal(stored, expected)
    found = quantizer.decode(stored.flatten(0, 1)[slots[[5, 6, 7, 8, 9]].long()], 128, centers=centers)
    assert found.isfinite().all(-1).tolist() == [True, False, False, False, True] and found[1:4].isnan().all()


def test_append_takes_the_first_of_equally_far_centers():
    quantizer, centers, latent, slots = given(4, 64, True)
    same = centers[:1].expand(2, -1).contiguous()
    stored = append_on_cpu(quantizer, same, latent, slots)
    expected = empty_cache(quantizer, 64)
    append_codes(latent - centers[0], expected, slots, quantizer, None)
    assert torch.equal(stored, expected)


@each("bits, has_centers, width", (4, 8, 3, 2, 1, 7), (True, False), (192, 64, 1024, 1056))
def test_read_rows_are_the_references(bits, has_centers, width):
    quantizer, centers, _, _ = given(bits, width, has_centers)
    latent = torch.randn(PAGES * PAGE, width) + (0 if centers is None else centers[torch.arange(PAGES * PAGE) % 2])
    stored = quantizer.encode(latent, centers).view(PAGES, PAGE, -1)
    table = torch.tensor([[3, -1, 0], [4, PAGES, 3]], dtype=torch.int32)
    out = read_on_cpu(quantizer, centers, stored, table, width)
    expected = read_codes(stored, torch.tensor([[3, 0, 4, 3]], dtype=torch.int32), width, quantizer, centers, out.dtype)
    assert torch.equal(out[[0, 2, 3, 5]], expected)
    assert (out[[1, 4]] == 7).all()  # pages that the table lacks


@pytest.mark.parametrize("bits", [3, 4])
def test_codes_of_chains_are_the_references(bits):
    chains = torch.randn(50, 16, generator=torch.Generator().manual_seed(bits)) * 2 ** (bits - 1)
    found = torch.empty(50, 16, dtype=torch.uint8)
    for_cpu(make_find_codes(bits=bits, on_cpu=True))(chains, found)
    assert torch.equal(found, Trellis(bits).find_codes(chains))


def test_a_search_of_chains_fits():
    gate(make_find_codes(bits=4), EXACT_PASS_CONFIGS)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rows_are_rounded_alike_on_a_gpu(bits):
    """Bit for bit: training, conversion and caches see the same codes."""
    rows, centers = torch.randn(300, 160) * 3, torch.randn(2, 160)
    quantizer = RowQuantizer(bits)
    assert torch.equal(quantizer.round(rows.cuda(), centers.cuda()).cpu(), quantizer.round(rows, centers))


@few("bits, width", [(4, 512), (3, 192), (8, 1024)], count=1)
@pytest.mark.parametrize("make", [make_read_codes, make_append_codes])
def test_kernels_fit(make, bits, width):
    pages = {"page_size": 64, "page_words": 16 * RowQuantizer(bits).bytes_per_row(width)}
    gate(make(width=width, bits=bits, **pages, dtype="bfloat16", center_dtype="bfloat16"), EXACT_PASS_CONFIGS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@each("bits, has_centers, width", (4, 8, 3, 2), (True, False), (192, 512, 1024))
def test_kernels_on_a_gpu_are_the_references(bits, has_centers, width, dtype):
    """Bit for bit."""
    quantizer, centers, latent, slots = given(bits, width, has_centers, rows=60)
    latent = latent.clamp(-3e4, 3e4).to(dtype)
    expected = empty_cache(quantizer, width)
    append_codes(latent, expected, slots, quantizer, centers)
    near = None if centers is None else centers.cuda()
    for behind in (0, 128):
        pages = empty_cache(quantizer, width, behind)._base.cuda()
        stored = pages[:, : PAGE * expected.shape[2]].unflatten(1, expected.shape[1:])
        append_codes(latent.cuda(), stored, slots.cuda(), quantizer, near, backend="tilelang")
        assert torch.equal(stored.cpu(), expected)
    whole = quantizer.encode(torch.randn(PAGES * PAGE, width), centers).view(PAGES, PAGE, -1)
    table = torch.tensor([[3, 0, -1], [4, 3, 1]], dtype=torch.int32)
    stored.copy_(whole)
    found = read_codes(stored, table.cuda(), width, quantizer, near, dtype, backend="tilelang").cpu()
    assert torch.equal(
        found[[0, 1, 3, 4, 5]], read_codes(whole, table, width, quantizer, centers, dtype)[[0, 1, 3, 4, 5]]
    )
