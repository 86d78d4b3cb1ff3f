"""Latents and keys that are quantised as they are appended: codes and scales are the reference's, on every target."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tilelang", reason="TileLang is not installed")

from mha2mla.kernels import mla_append, quantize_latent
from mha2mla.kernels.machine import EXACT_PASS_CONFIGS
from mha2mla.kernels.mla_decode.quantization import quantize_keys
from mha2mla.kernels.rope_append.api import rotate_reference
from mha2mla.kernels.rope_append.kernel import AppendShape, make_append_w_uk, make_quantize_rows, make_rope_append
from tests.few import few
from tests.kernels.compiled import for_cpu, gate
from tests.kernels.rope_append.problems import PAGE, PAGES, WITHOUT_KEYS, tensors

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.timeout(300)])]


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("width", "dtype", "interleaved"),
    [(48, torch.bfloat16, True), (512, torch.bfloat16, False), (80, torch.float16, False), (33, torch.float32, False)],
)
def test_append_quantises(width, dtype, interleaved, device):
    """Also rows that are zero or not finite."""
    for tokens in (0, 1, 11):
        given = append_arguments(tokens, dtype, device, shape=(9, 3, width, 16, 3))
        if tokens > 4:
            given["latent"][1], given["latent"][2, 5], given["latent"][4, 0] = 0, torch.nan, torch.inf
        check_append(given, interleaved=interleaved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", WITHOUT_KEYS)
def test_append_quantises_without_rotary_keys(shape, device):
    check_append(append_arguments(device=device, shape=shape))


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


KEYS = [(9, 1, 48, 16, 1), (4, 1, 64, 128, 1), (0, 1, 0, 64, 1)]  # H, G, d_c, d_r, rows of inv_freq


def keys_to_append(shape, tokens=11, dtype=torch.float32, device="cpu"):
    """Arguments of ``mla_append`` with a cache of int8 keys and their scales; keys of zeros, a NaN, an infinity."""
    given = tensors(shape, tokens, dtype, device)
    if tokens > 4:
        given["k_pe"][1], given["k_pe"][2, 0, 5], given["k_pe"][4, 0, 0] = 0, torch.nan, torch.inf
    cache = torch.full((PAGES, PAGE, 1, shape[3]), 7, dtype=torch.int8, device=device)
    return given | {"rope_cache": cache, "rope_scale": torch.full((PAGES, PAGE), 3.0, device=device)}


def check_keys(shape, tokens=11, dtype=torch.float32, device="cpu", **options):
    """Codes and scales are those of the keys that the 16-bit op writes; what else is written is as it writes it."""
    given, plain = keys_to_append(shape, tokens, dtype, device), keys_to_append(shape, tokens, dtype, device)
    plain["rope_cache"] = torch.full((PAGES, PAGE, 1, shape[3]), 7.0, device=device, dtype=dtype)
    plain.pop("rope_scale")
    assert torch.equal(mla_append(**given, **options), mla_append(**plain, **options))
    assert torch.equal(given["latent_cache"], plain["latent_cache"])
    codes, scale = quantize_keys(plain["rope_cache"])
    was = torch.ones(PAGES * PAGE, dtype=torch.bool)
    was[[slot for slot in given["slots"].tolist() if 0 <= slot < PAGES * PAGE]] = False
    was = was.view(PAGES, PAGE).to(device)
    codes = torch.where(was[..., None, None], 7, codes)
    expected = torch.where(was, 3.0, scale[..., 0]).nan_to_num(-1)
    found = given["rope_scale"].nan_to_num(-1)
    assert torch.equal(found, expected)
    is_number = found > 0
    assert given["rope_cache"].dtype == torch.int8
    assert torch.equal(given["rope_cache"][is_number], codes[is_number])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", KEYS)
def test_append_quantises_keys(shape, dtype, device):
    for tokens in (0, 1, 11):
        check_keys(shape, tokens, dtype, device, attention_scaling=1.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scale": None}, "rope_cache.dtype is torch.int8; expected torch.float32, as q_pe"),
        ({"rope_cache": torch.zeros(5, 4, 1, 16)}, "rope_cache.dtype is torch.float32; expected torch.int8"),
        ({"rope_scale": torch.zeros(5, 3)}, r"rope_scale.shape is \(5, 3\); expected \[5, 4\]"),
    ],
)
def test_append_of_key_codes_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        mla_append(**keys_to_append(KEYS[0]) | change)


def test_append_quantises_one_key():
    given = tensors((9, 3, 48, 16, 1))
    given["rope_cache"] = given["rope_cache"].to(torch.int8)
    with pytest.raises(ValueError, match=r"k_pe.shape\[1\] is 3; expected 1 with rope_scale"):
        mla_append(**given, rope_scale=torch.zeros(PAGES, PAGE))


@few("shape, interleaved", [(KEYS[0], True), (KEYS[1], False), (KEYS[2], False)], count=3)
def test_kernel_of_key_codes_on_the_cpu_target(shape, interleaved):
    """Codes are the reference's but where its quotient lies at the border of two."""
    sizes = (*shape, PAGE, "float32", interleaved, 4, True)
    kernel = for_cpu(make_rope_append(AppendShape(*sizes), on_cpu=True))
    for tokens in (1, 11):
        given = keys_to_append(shape, tokens)
        nothing = torch.zeros(tokens, 1, shape[3])
        query, out = (given["q_pe"], torch.empty_like(given["q_pe"])) if shape[0] else (nothing, nothing.clone())
        rows, row_cache = given["latent"], given["latent_cache"].clone()
        rows, row_cache = (rows, row_cache) if shape[2] else (torch.zeros(tokens, 1), torch.zeros(PAGES, PAGE, 1))
        cache = torch.full((PAGES, PAGE, shape[3]), 7, dtype=torch.int8)
        kernel(
            rows, given["k_pe"], query, *(given[name] for name in ("positions", "slots", "inv_freq")),
            row_cache, cache, given["rope_scale"], out, 1.3,
        )  # fmt: skip
        options = {"attention_scaling": 1.3, "interleaved": interleaved}
        keys = rotate_reference(given["k_pe"], given["positions"], given["inv_freq"], **options)[:, 0]
        _, scale = quantize_keys(keys)
        expected = written(torch.full(cache.shape, 7.0), keys / scale[:, None], given["slots"])
        scales = written(torch.full((PAGES, PAGE), 3.0), scale, given["slots"])
        torch.testing.assert_close(given["rope_scale"], scales, rtol=1e-5, atol=0, equal_nan=True)
        is_number = ~scales.isnan()
        torch.testing.assert_close(cache[is_number].float(), expected[is_number], rtol=0, atol=0.51)


@few("shape", KEYS[1:], count=1)
def test_kernels_of_key_codes_compile_for_hopper(shape):
    shape = AppendShape(*shape, PAGE, "bfloat16", vector=8, has_key_codes=True)
    gate(make_rope_append(shape), EXACT_PASS_CONFIGS, limit=48 * 1024)
    if shape.heads:
        assert gate(make_append_w_uk(shape, kv_heads=2, inner=32), EXACT_PASS_CONFIGS).spill_bytes == 0


@few("row_width", [80, 512], count=1)
def test_quantising_kernel_compiles_for_hopper(row_width):
    function = make_quantize_rows(row_width=row_width, page_size=64, dtype="bfloat16")
    gate(function, EXACT_PASS_CONFIGS, limit=48 * 1024)
