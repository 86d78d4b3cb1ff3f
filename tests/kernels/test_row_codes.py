"""Codes of rows: bytes, errors, and independence of what else is coded."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mha2mla.kernels.row_codes.api import STEPS, RowQuantizer, append_codes, read_codes
from mha2mla.kernels.row_codes.trellis import CHAIN, CURVES, Trellis

QUANTIZERS = st.builds(RowQuantizer, st.integers(1, 8))
WIDTHS = st.sampled_from((8, 24, 64, 72, 168))


@pytest.mark.parametrize(
    ("bits", "width", "size"),
    [(4, 192, 96 + 4), (4, 168, 96 + 4), (3, 192, 72 + 4), (2, 256, 64 + 4), (8, 32, 32 + 4)],  # 168: padded to 192
)
def test_bytes_of_a_row(bits, width, size):
    quantizer = RowQuantizer(bits)
    assert quantizer.bytes_per_row(width) == size
    coded = quantizer.encode(torch.randn(3, 2, width))
    assert coded.shape == (3, 2, size) and coded.dtype == torch.uint8


@given(QUANTIZERS, WIDTHS, st.integers(0, 2**32 - 1), st.integers(-30, 30))
@settings(deadline=None)
def test_rows_are_coded_alone(quantizer, width, seed, exponent):
    """A row's bytes are the same in any batch, order and dtype that holds it; so is what they give back."""
    rows = torch.from_numpy(np.random.default_rng(seed).standard_normal((6, width), np.float32)) * 10.0**exponent
    coded = quantizer.encode(rows)
    assert torch.equal(torch.cat([quantizer.encode(row[None].double()) for row in rows]), coded)
    assert torch.equal(quantizer.encode(rows.view(2, 3, width).flip(1)).flip(1).view(6, -1), coded)
    decoded = quantizer.decode(coded, width)
    assert decoded.isfinite().all()
    assert torch.equal(torch.stack([quantizer.decode(row, width) for row in coded]), decoded)
    assert torch.equal(quantizer.decode(coded, width, torch.bfloat16), decoded.bfloat16())
    assert torch.equal(quantizer.round(rows.double()), decoded.double())


@given(st.integers(2, 8), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_a_row_is_coded_from_the_nearer_center(bits, seed):
    """As far as its center, and as finely as its difference from that; equally far: from the first."""
    rng, quantizer = np.random.default_rng(seed), RowQuantizer(bits)
    centers = torch.from_numpy(rng.standard_normal((2, 64), np.float32) * 8)
    second = torch.from_numpy(rng.integers(0, 2, 9, dtype=np.int64))
    difference = torch.from_numpy(rng.standard_normal((9, 64), np.float32)) * 0.01
    difference[4] = 0  # a row whose scale is zero still says which center
    rows = centers[second] + difference
    coded = quantizer.encode(rows, centers)
    assert coded.shape[-1] == quantizer.bytes_per_row(64)
    assert torch.equal(torch.cat([quantizer.encode(row[None], centers) for row in rows]), coded)
    found = quantizer.decode(coded, 64, centers=centers)
    assert torch.equal(found, centers[second] + quantizer.round(rows - centers[second]))
    assert torch.equal(quantizer.encode(rows, centers[:1].expand(2, -1)), quantizer.encode(rows - centers[0]))


def number_of(codes: list[int]) -> list[int]:
    """Numbers of the levels of a chain's codes."""
    last = [0, 0] + [code % 2 for code in codes]
    return [code // 2 * 4 + 2 * ((code % 2) ^ last[n]) + last[n + 1] for n, code in enumerate(codes)]


def level_of(number: int, bits: int) -> float:
    """Level of a trellis, each operation rounded to 8 significant bits."""
    x = number - 2**bits + 0.5

    def rounded(value: float) -> float:
        return torch.tensor(value).bfloat16().item()

    return rounded(x * rounded(rounded(x * x) * CURVES[bits][0] + 1))


LAST_BITS = np.array(list(product((0, 1), repeat=CHAIN)))  # of all paths through a trellis


def nearest(chain: list[float], bits: int) -> tuple[list[int], float]:
    """Codes of the levels nearest to a chain, of all paths, and their sum of squares."""
    levels = np.array([level_of(number, bits) for number in range(2 ** (bits + 1))]).reshape(-1, 4)
    away = (np.array(chain)[:, None, None] - levels) ** 2  # element, m, subset
    last = np.pad(LAST_BITS, ((0, 0), (2, 0)))
    subset = 2 * (last[:, 2:] ^ last[:, :-2]) + last[:, 1:-1]
    lost = away.min(1)[np.arange(CHAIN), subset].sum(1)
    best = lost.argmin()
    m = away.argmin(1)[np.arange(CHAIN), subset[best]]
    return (2 * m + LAST_BITS[best]).tolist(), lost[best]


@pytest.mark.parametrize("bits", CURVES)
def test_levels_rise_and_are_the_same_on_both_sides_of_zero(bits):
    levels = [level_of(number, bits) for number in range(2 ** (bits + 1))]
    assert Trellis(bits).levels == levels == sorted(set(levels)) == [-level for level in levels[::-1]]


@pytest.mark.parametrize("bits", CURVES)
def test_a_chain_has_the_nearest_of_all_paths(bits):
    chains = torch.randn(12, CHAIN, generator=torch.Generator().manual_seed(bits)) * 2 ** (bits - 1)
    chains[0] = 0
    trellis = Trellis(bits)
    codes = trellis.find_codes(chains)
    assert codes.max() < 2**bits
    for chain, found, decoded in zip(chains.tolist(), codes.tolist(), trellis.decode(codes).tolist(), strict=True):
        assert decoded == [level_of(number, bits) for number in number_of(found)]
        _, lost = nearest(chain, bits)
        assert math.fsum((x - y) ** 2 for x, y in zip(chain, decoded, strict=True)) <= lost * (1 + 1e-6)


def places(width: int) -> list[list[int]]:
    """Columns of each chain of a row, beyond its width those of its padding."""
    return [
        [block + 8 * (h + 2 * u) + 2 * (n % 4) + n // 4 for u in range(2) for n in range(8)]
        for block in range(0, width, 32)
        for h in range(2)
    ]


def by_definition(row: list[float], bits: int) -> list[float]:
    """What codes of a row give back, one element at a time."""
    middle = (2**bits - 1) / 2
    energy, largest = math.fsum(x * x for x in row), max(map(abs, row))
    spread = math.sqrt(energy / len(row))
    if bits in CURVES:
        step, levels = torch.tensor(spread * CURVES[bits][1]).item(), [0.0] * -(-len(row) // 32) * 32  # float32
        for chain in places(len(row)):
            given = [float(np.float32(row[place]) / np.float32(step)) if place < len(row) else 0.0 for place in chain]
            for place, number in zip(chain, number_of(nearest(given, bits)[0]), strict=True):
                levels[place] = level_of(number, bits)
    else:
        step = torch.tensor(min(STEPS[bits] * spread, largest / middle)).item()
        codes = [round(np.float32(x) / np.float32(step) + np.float32(middle)) for x in row]
        levels = [min(max(code, 0), 2**bits - 1) - middle for code in codes]
    scale = torch.tensor(energy / math.fsum(x * level for x, level in zip(row, levels, strict=False)))
    if bits in CURVES:
        scale = scale.bfloat16().float()
    return [float(np.float32(level) * np.float32(scale)) for level in levels[: len(row)]]


@pytest.mark.parametrize("bits", range(1, 9))
def test_decoded_rows_are_the_definition(bits):
    rows = torch.randn(5, 80) * 3 + 1
    expected = torch.tensor([by_definition(row, bits) for row in rows.tolist()])
    assert torch.equal(RowQuantizer(bits).round(rows), expected)


@pytest.mark.parametrize("bits", range(1, 9))
def test_what_rows_give_back_is_neither_longer_nor_shorter(bits):
    """Along the row itself, but for the rounding of scales: errors of many tokens in one direction would add up in
    attention."""
    rows = torch.randn(64, 192, dtype=torch.float64) * torch.logspace(-3, 2, 64)[:, None]
    along = (RowQuantizer(bits).round(rows) * rows).sum(-1) / rows.square().sum(-1)
    assert (along - 1).abs().max() < (2**-8 + 1e-6 if bits in CURVES else 1e-6)
    assert (along - 1).mean().abs() < 1e-3


# Mean squared errors of normally distributed elements, relative to their variance (Max 1960, table II), that a scale
# which leaves nothing of them along the row divides by 1 - themselves; and what a trellis leaves of that.
@pytest.mark.parametrize(
    ("bits", "error", "left"),
    [(1, 0.3634, 0.91), (2, 0.1188, 0.80), (3, 0.03744, 0.72), (4, 0.01154, 0.65), (5, 0.00349, 1)],
)
def test_normal_elements_lose_what_the_theory_says(bits, error, left):
    rows = torch.randn(400, 1024, generator=torch.Generator().manual_seed(0))
    found = (RowQuantizer(bits).round(rows) - rows).square().mean().item()
    assert found == pytest.approx(left * error / (1 - error), rel=0.03)


def test_a_row_of_one_size_is_exact():
    rows = torch.tensor([[0.5, -0.5] * 8, [0.0] * 16])
    assert torch.equal(RowQuantizer(5).round(rows), rows)
    assert not RowQuantizer(4).round(rows)[1].any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(wrong):
    rows = torch.randn(2, 64)
    expected = RowQuantizer(4).round(rows)
    rows[1, 40] = wrong
    found = RowQuantizer(4).round(rows)
    assert found[1].isnan().all() and torch.equal(found[0], expected[0])


@pytest.mark.parametrize("bits", [0, 9])
def test_bad_settings_are_refused_by_name(bits):
    with pytest.raises(ValueError, match=f"bits is {bits}; expected 1 to 8"):
        RowQuantizer(bits)


@pytest.mark.parametrize("made", ["encode", "round"])
def test_a_search_by_kernels_is_refused_on_a_cpu(made):
    with pytest.raises(ValueError, match="backend is 'tilelang' for tensors on cpu; expected .* on CUDA"):
        getattr(RowQuantizer(4), made)(torch.ones(2, 32), backend="tilelang")


def test_torch_compile_makes_no_kernel_of_the_search():
    """In one kernel its reductions read rows before other threads had written them."""
    graphs, quantizer = [], RowQuantizer(3)

    def keep(graph, _):
        graphs.append(graph)
        return graph

    rows, centers = torch.randn(2, 5, 64), torch.randn(2, 64)
    torch.compiler.reset()
    rounded = torch.compile(quantizer.round, backend=keep, fullgraph=True)(rows, centers)
    assert torch.equal(rounded, quantizer.round(rows, centers))
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert [name for name in names if "find_codes" in name] == ["mha2mla.find_codes"] and "sum" not in names


@pytest.mark.parametrize(
    ("latent", "slots", "named"),
    [
        (torch.zeros(2, 96), torch.zeros(2).int(), r"torch.uint8 \[P, page, 40\], of 96 codes of 3 bits"),
        (torch.zeros(2, 64), torch.zeros(1).int(), r"slots is torch.int32 \(1,\); expected torch.int32 \(2,\)"),
        (torch.zeros(2, 64), torch.zeros(2), r"slots is torch.float32 \(2,\)"),
        (torch.zeros(2, 1, 64), torch.zeros(2).int(), r"latent is torch.float32 \(2, 1, 64\); expected .* \[N, d_c\]"),
        (torch.zeros(2, 64).int(), torch.zeros(2).int(), r"latent is torch.int32 \(2, 64\)"),
    ],
)
def test_a_cache_of_other_rows_is_refused(latent, slots, named):
    quantizer, cache = RowQuantizer(3), torch.zeros(2, 16, 28, dtype=torch.uint8)
    with pytest.raises(ValueError, match=named):
        append_codes(latent, cache, slots, quantizer, None)
    with pytest.raises(ValueError, match=r"latent_cache is torch.uint8 \(2, 16, 28\)"):
        read_codes(cache, torch.zeros(1, 1).int(), 32, quantizer, None, torch.float32)


@pytest.mark.parametrize("pages", [0, 2])
def test_an_entry_that_is_no_page_hides_no_other(pages):
    """Whatever stands in a page table behind a sequence's last page; a cache may have no page at all."""
    quantizer, rows = RowQuantizer(3), torch.randn(pages * 16, 64)
    cache, slots = torch.zeros(pages, 16, quantizer.bytes_per_row(64), dtype=torch.uint8), torch.arange(len(rows))
    append_codes(rows, cache, slots.int(), quantizer, None)
    table = torch.tensor([[2147480000, *range(pages), -1]], dtype=torch.int32)
    read = read_codes(cache, table, 64, quantizer, None, torch.float32)
    assert read.shape == (pages + 2, 16, 64)
    assert torch.equal(read[1 : 1 + pages].flatten(0, 1), quantizer.round(rows))


@pytest.mark.parametrize("centers", [torch.zeros(1, 64), torch.zeros(2, 32), torch.zeros(2, 64).int()])
def test_other_centers_and_tables_are_refused_by_name(centers):
    quantizer, cache = RowQuantizer(3), torch.zeros(2, 16, 28, dtype=torch.uint8)
    refused = pytest.raises(ValueError, match=rf"centers is {centers.dtype} .*; expected None, or .* \(2, 64\)")
    with refused:
        append_codes(torch.zeros(2, 64), cache, torch.zeros(2).int(), quantizer, centers)
    with refused:
        read_codes(cache, torch.zeros(1, 1).int(), 64, quantizer, centers, torch.float32)
    with pytest.raises(ValueError, match=r"block_table is torch.int64 \(1, 1\); expected torch.int32 \[B, max_pages\]"):
        read_codes(cache, torch.zeros(1, 1).long(), 64, quantizer, None, torch.float32)
