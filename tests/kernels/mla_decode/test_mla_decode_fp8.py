"""The fp8 latent cache on any machine: its number format, the op over it and the kernel's operand maps."""

from __future__ import annotations

import pytest
import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import dequantize_latent, explain_mla_decode, mla_decode, quantize_latent
from mha2mla.kernels.mla_decode.quantization import CODES, SMALLEST_SCALE
from mha2mla.kernels.mla_decode.selection import column_of_code
from mha2mla.testing.numeric_check import errors
from mha2mla.testing.problems import Problem, exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantisation_error_is_half_a_unit_of_e4m3(dtype):
    make = torch.Generator().manual_seed(0)
    latent = torch.randn(50, 80, generator=make).mul(torch.logspace(-3, 3, 50)[:, None]).to(dtype)
    codes, scale = quantize_latent(latent)
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == (50,)
    assert torch.equal(codes.float().abs().amax(1), torch.full((50,), 448.0))
    wide = latent.double()
    error = (dequantize_latent(codes, scale, torch.float64) - wide).abs()
    # 3 stored digits: half a unit is 2^-4 of the number, but no less than half the smallest subnormal, 2^-10 scales
    assert (error <= torch.maximum(wide.abs() * 2**-4, scale[:, None] * 2**-10) * (1 + 2**-20)).all()


def test_rows_that_are_zero_tiny_or_not_finite():
    latent = torch.ones(5, 16)
    latent[0] = 0
    latent[1] = 1e-30
    latent[2, 3] = torch.nan
    latent[3, 4] = -torch.inf
    codes, scale = quantize_latent(latent)
    back = dequantize_latent(codes, scale)
    assert scale[0] == 1 and not back[0].any()
    assert scale[1] == SMALLEST_SCALE and (back[1] - latent[1]).abs().max() < SMALLEST_SCALE
    assert back[2:4].isnan().all() and scale[2:4].isnan().all()
    assert torch.equal(back[4], latent[4])
    assert quantize_latent(latent[:0])[0].shape == (0, 16)


def test_error_beside_the_original_cache():
    """Loss against the unquantised cache: about the relative error of e4m3 (2^-5 on average)."""
    size = (8, 1, 128, 16, (300, 200))
    original, inputs = (Problem(*size, codes=codes).inputs(torch.float64) for codes in (False, True))
    expected, _ = exact(original)
    assert 1e-3 < errors(mla_decode(**inputs), expected)[0] < 0.06


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "tilelang"}, "backend is 'tilelang', which refuses this call"),
        ({"latent_cache": torch.zeros(5, 64, 32)}, "latent_cache.dtype is torch.float32"),
        ({"latent_scale": torch.zeros(5, 64)}, r"latent_scale.shape is \(5, 64\)"),
        ({"rope_cache": torch.zeros(4, 64, 3, 8)}, r"rope_cache.shape is .*; expected .* a divisor of"),
    ],
)
def test_refusals_name_the_argument(change, message):
    inputs = Problem(4, 2, 32, 8, (5,), codes=True).inputs(torch.float32)
    with pytest.raises(ValueError, match=message):
        mla_decode(**inputs | change)


def test_explain():
    assert "multiples of 16 bytes" in explain_mla_decode(
        MLAGeometry(4, 2, 40, 8), 64, torch.bfloat16, "cpu", latent_dtype=CODES
    )
    assert "page_size" in explain_mla_decode(MLAGeometry(4, 2, 48, 8), 48, torch.bfloat16, "cpu", latent_dtype=CODES)


def test_columns_of_codes_are_a_permutation_of_each_sixteen():
    places = [column_of_code(d) for d in range(64)]
    for block in range(0, 64, 16):
        assert sorted(places[block : block + 16]) == list(range(block, block + 16))


def wgmma_places(lane: int) -> list[tuple[int, int]]:
    """(row, column) of the 8 numbers of a thread in a 16-bit register operand of 16 x 16 (PTX ISA, wgmma, matrix A)."""
    g, t = lane // 4, lane % 4
    return [(g + 8 * (r % 2), 2 * t + i + 8 * (r // 2)) for r in range(4) for i in range(2)]


def test_register_operand_of_the_scores_meets_the_permuted_queries():
    """ldmatrix and the order of conversions, acted out on a 16 x 16 block: C q^T comes out unpermuted."""
    make = torch.Generator().manual_seed(0)
    codes, query = torch.randn(16, 16, generator=make), torch.randn(16, generator=make)
    operand, permuted = torch.zeros(16, 16), torch.zeros(16)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        word = [codes[g, 4 * t : 4 * t + 4], codes[g + 8, 4 * t : 4 * t + 4]]  # ldmatrix: 4 bytes of rows g and g + 8
        a = [word[0][:2], word[1][:2], word[0][2:], word[1][2:]]
        for (row, column), value in zip(wgmma_places(lane), torch.cat(a), strict=True):
            operand[row, column] = value
    for d in range(16):
        permuted[column_of_code(d)] = query[d]
    assert torch.allclose(operand @ permuted, codes @ query)


def test_register_operand_of_the_output_is_the_transposed_block():
    """ldmatrix.trans and the byte permutation on 16 tokens x 16 columns: rows are columns 2g, then 2g + 1."""
    codes = torch.arange(256.0).view(16, 16)  # [token, column]
    operand = torch.zeros(16, 16)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        a = []
        for first in (0, 8):
            word = torch.cat([codes[first + 2 * t, 2 * g : 2 * g + 2], codes[first + 2 * t + 1, 2 * g : 2 * g + 2]])
            word = word[[0, 2, 1, 3]]
            a += [word[:2], word[2:]]
        for (row, column), value in zip(wgmma_places(lane), torch.cat(a), strict=True):
            operand[row, column] = value
    column_of_row = [2 * (r % 8) + r // 8 for r in range(16)]
    assert torch.equal(operand, codes.T[column_of_row])
