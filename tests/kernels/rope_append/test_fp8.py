"""Latents that are quantised as they are appended: codes and scales are the reference's, on every target."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tilelang", reason="TileLang is not installed")

from mha2mla.kernels import mla_append, quantize_latent
from mha2mla.kernels.machine import EXACT_PASS_CONFIGS
from mha2mla.kernels.rope_append.kernel import make_quantize_rows
from tests.few import few
from tests.kernels.compiled import for_cpu, gate
from tests.kernels.rope_append.problems import PAGE, PAGES, WITHOUT_KEYS, tensors


def append_arguments(tokens=11, dtype=torch.float32, device="cpu", shape=(9, 3, 48, 16, 3)):
    """Those of ``mla_append``, with a cache of e4m3 latents and their scales."""
    return tensors(shape, tokens, dtype, device) | {
        "latent_cache": torch.full((PAGES, PAGE, shape[2]), 7.0).to(torch.float8_e4m3fn).to(device),
        "latent_scale": torch.full((PAGES, PAGE), 3.0, device=device),
    }


def written(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A copy of the cache [P, page, ...] with the rows that have a slot."""
    cache = cache.clone()
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if 0 <= slot < cache.shape[0] * cache.shape[1]:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = row
    return cache


def check_append(given: dict, **options) -> None:
    """Codes and scales are the reference's bit for bit; rope_cache and q_pe those of the unquantised op."""
    codes, scale = quantize_latent(given["latent"])
    expected_codes = written(given["latent_cache"].view(torch.uint8), codes.view(torch.uint8), given["slots"])
    expected_scale = written(given["latent_scale"], scale, given["slots"])
    plain = {name: tensor.clone() for name, tensor in given.items() if name != "latent_scale"}
    plain["latent_cache"] = torch.zeros(plain["latent_cache"].shape, dtype=given["latent"].dtype).to(scale.device)
    expected = mla_append(**plain, **options)
    out = mla_append(**given, **options)
    assert torch.equal(out, expected)
    assert torch.equal(given["rope_cache"], plain["rope_cache"])
    assert torch.equal(given["latent_cache"].view(torch.uint8), expected_codes)
    assert torch.equal(given["latent_scale"].nan_to_num(-1), expected_scale.nan_to_num(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 11])
def test_append_quantises(tokens, dtype):
    check_append(append_arguments(tokens, dtype=dtype))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", WITHOUT_KEYS)
def test_append_quantises_without_rotary_keys(shape, device):
    check_append(append_arguments(device=device, shape=shape))


def test_append_of_rows_that_are_zero_or_not_finite():
    given = append_arguments()
    given["latent"][1] = 0
    given["latent"][2, 5] = torch.nan
    given["latent"][4, 0] = torch.inf
    check_append(given, interleaved=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_scale": None}, "latent_scale is None for a latent_cache of torch.float8_e4m3fn"),
        ({"latent_cache": torch.zeros(5, 4, 48)}, "latent_scale is given for a latent_cache of torch.float32"),
        ({"latent_scale": torch.zeros(5, 3)}, r"latent_scale.shape is \(5, 3\); expected \[5, 4\]"),
        ({"latent_scale": torch.zeros(5, 4).half()}, "latent_scale.dtype is torch.float16"),
        ({"latent_scale": torch.zeros(4, 5).mT}, r"latent_scale.stride\(-1\) is 5"),
    ],
)
def test_append_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        mla_append(**append_arguments() | change)


def test_append_opcheck():
    given = append_arguments()
    cache = given["latent_cache"].view(torch.uint8)  # torch compares no e4m3 numbers on a CPU
    arguments = (given["latent"], cache, given["latent_scale"], given["slots"], False)
    torch.library.opcheck(torch.ops.mha2mla.quantize_append.default, arguments)


@pytest.mark.parametrize("width", [48, 33, 1])
def test_quantising_kernel_on_the_cpu_target(width):
    """Quotients before they are rounded to e4m3, which the C target does not know."""
    kernel = for_cpu(
        make_quantize_rows(row_width=width, page_size=4, dtype="float32", code_dtype="float32", on_cpu=True)
    )
    for tokens in (1, 11):
        make = torch.Generator().manual_seed(tokens)
        rows = torch.randn(tokens, width, generator=make)
        rows[0] = 0
        if tokens > 2:
            rows[1, 0], rows[2, -1] = torch.inf, torch.nan
        slots = torch.randperm(20, generator=make)[:tokens].int()
        slots[3::4] = torch.tensor([-1, 20])[: len(slots[3::4])]
        cache, scales = torch.full((5, 4, width), 7.0), torch.full((5, 4), 3.0)
        _, scale = quantize_latent(rows)
        expected, expected_scales = written(cache, rows / scale[:, None], slots), written(scales, scale, slots)
        kernel(rows, slots, cache, scales)
        assert torch.equal(scales.nan_to_num(-1), expected_scales.nan_to_num(-1))
        assert torch.allclose(cache, expected, rtol=2**-23, atol=0, equal_nan=True)


@few("row_width", [80, 512], count=1)
def test_quantising_kernel_compiles_for_hopper(row_width):
    function = make_quantize_rows(row_width=row_width, page_size=64, dtype="bfloat16")
    gate(function, EXACT_PASS_CONFIGS, limit=48 * 1024)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("width", "dtype"), [(512, torch.bfloat16), (80, torch.float16), (33, torch.float32)])
def test_append_on_the_gpu(width, dtype):
    for tokens in (0, 1, 11):
        given = append_arguments(tokens, dtype, "cuda", shape=(9, 3, width, 16, 3))
        if tokens > 4:
            given["latent"][1] = 0
            given["latent"][2, 5] = torch.nan
            given["latent"][4, 0] = torch.inf
        check_append(given)
