"""Codes of rows: bytes, errors, and independence of what else is coded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mha2mla.kernels.group_codes.api import GroupQuantizer

QUANTIZERS = st.builds(
    GroupQuantizer, st.integers(1, 8), st.sampled_from((8, 32, 64, None)), scale_bits=st.sampled_from((8, 16))
)
WIDTHS = st.sampled_from((8, 24, 64, 72, 168))


@pytest.mark.parametrize(
    ("quantizer", "width", "size"),
    [
        (GroupQuantizer(4), 192, 6 * (16 + 4)),
        (GroupQuantizer(4), 168, 6 * (16 + 4)),  # padded to 192
        (GroupQuantizer(3), 192, 6 * (12 + 4)),
        (GroupQuantizer(3, 64), 192, 3 * (24 + 4)),
        (GroupQuantizer(8, None), 168, 168 + 4),
        (GroupQuantizer(4, 32, 8), 192, 6 * (16 + 2) + 4),
    ],
)
def test_bytes_of_a_row(quantizer, width, size):
    assert quantizer.bytes_per_row(width) == size
    coded = quantizer.encode(torch.randn(3, 2, width))
    assert coded.shape == (3, 2, size) and coded.dtype == torch.uint8


@given(QUANTIZERS, WIDTHS, st.integers(0, 2**32 - 1), st.integers(-6, 4))
@example(GroupQuantizer(1), 24, 2902902, 4)  # a step beyond float16
@settings(deadline=None)
def test_rows_are_coded_alone(quantizer, width, seed, exponent):
    """A row's bytes are the same in any batch, order and dtype that holds it; so is what they give back."""
    rows = torch.from_numpy(np.random.default_rng(seed).standard_normal((6, width), np.float32)) * 10.0**exponent
    coded = quantizer.encode(rows)
    assert torch.equal(torch.cat([quantizer.encode(row[None].double()) for row in rows]), coded)
    assert torch.equal(quantizer.encode(rows.view(2, 3, width).flip(1)).flip(1).view(6, -1), coded)
    decoded = quantizer.decode(coded, width)
    assert torch.equal(torch.stack([quantizer.decode(row, width) for row in coded]), decoded)
    assert torch.equal(quantizer.decode(coded, width, torch.bfloat16), decoded.bfloat16())
    assert torch.equal(quantizer.round(rows.double()), decoded.double())


@given(st.integers(3, 8), st.sampled_from((8, 16)), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_a_row_is_coded_from_the_nearer_center(bits, scale_bits, seed):
    """As far as its center, and as finely as its difference from that; equally far: from the first."""
    rng, quantizer = np.random.default_rng(seed), GroupQuantizer(bits, 32, scale_bits)
    centers = torch.from_numpy(rng.standard_normal((2, 64), np.float32) * 8)
    second = torch.from_numpy(rng.integers(0, 2, 9, dtype=np.int64))
    difference = torch.from_numpy(rng.standard_normal((9, 64), np.float32)) * 0.01
    difference[4] = 0  # a row whose scales are zero still says which center
    rows = centers[second] + difference
    coded = quantizer.encode(rows, centers)
    assert coded.shape[-1] == quantizer.bytes_per_row(64)
    assert torch.equal(torch.cat([quantizer.encode(row[None], centers) for row in rows]), coded)
    found = quantizer.decode(coded, 64, centers=centers)
    assert torch.equal(found, centers[second] + quantizer.round(rows - centers[second]))
    assert torch.equal(quantizer.encode(rows, centers[:1].expand(2, -1)), quantizer.encode(rows - centers[0]))


def by_definition(row: torch.Tensor, bits: int, group: int) -> list[float]:
    """What codes of a row [width] give back, one element at a time."""
    found = []
    for start in range(0, len(row), group):
        part = row[start : start + group]
        offset = part.min().half().float()
        scale = ((part.max() - offset) / (2**bits - 1)).half().float()
        for element in part:
            code = min(max(round(((element - offset) / scale).item()), 0), 2**bits - 1)
            found.append((code * scale + offset).item())
    return found


@pytest.mark.parametrize("bits", range(1, 9))
def test_decoded_rows_are_the_definition(bits):
    rows = torch.randn(5, 80) * 3 + 1
    expected = torch.tensor([by_definition(row, bits, 32) for row in rows])
    assert torch.equal(GroupQuantizer(bits).round(rows), expected)


@pytest.mark.parametrize("scale_bits", [8, 16])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_rounding_errs_by_half_a_step(bits, scale_bits):
    rows = torch.randn(64, 72) * torch.logspace(-3, 2, 64)[:, None] + 0.3
    rounded = GroupQuantizer(bits, 32, scale_bits).round(rows)
    groups = torch.cat((rows, rows[:, -1:].expand(-1, 24)), 1).unflatten(1, (-1, 32))
    span = groups.amax(-1) - groups.amin(-1)
    error = torch.cat((rounded - rows, rows.new_zeros(64, 24)), 1).unflatten(1, (-1, 32)).abs().amax(-1)
    # A stored offset is off by 2⁻¹¹ of itself, or by 1/127 of the row's largest.
    slack = rows.abs().amax(1, keepdim=True) * (2**-10 if scale_bits == 16 else 2 / 127 / (2**bits - 1))
    largest_span = span.amax(1, keepdim=True) / 255 / (2**bits - 1) if scale_bits == 8 else 0
    assert (error <= 0.51 * span / (2**bits - 1) + slack + largest_span).all()


def test_a_constant_group_is_its_offset():
    assert torch.equal(GroupQuantizer(4, 4).round(torch.full((2, 8), 0.5)), torch.full((2, 8), 0.5))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_group(wrong):
    rows = torch.randn(2, 64)
    expected = GroupQuantizer(4).round(rows)
    rows[1, 40] = wrong
    found = GroupQuantizer(4).round(rows)
    assert found[1, 32:].isnan().all()
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1, :32], expected[1, :32])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bits": 0}, "bits is 0; expected 1 to 8"),
        ({"bits": 4, "group": 1}, "group is 1; expected at least 2"),
        ({"bits": 4, "scale_bits": 12}, "scale_bits is 12; expected one of"),
    ],
)
def test_bad_settings_are_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        GroupQuantizer(**wrong)
