"""The decode op over 16-bit latents and int8 rotary keys, on any machine: reference, biases, refusals, registration."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mha2mla.kernels import kept_keys, mla_append, mla_decode, plan_mla_decode, rotary_keys
from mha2mla.kernels.split_kv.op import PagedOp
from mha2mla.testing.problems import KeyCodesProblem

BASE = KeyCodesProblem(6, 1, 24, 16, (0, 1, 70), page_size=16, seqlen_q=2, scaling=1.3)


@pytest.mark.parametrize("bias", [0.0, 1.0, 600.0])
def test_a_bias_costs_codes_no_digits(bias):
    """Appended W_KR c, read with any b_KR, errs by what 8 bits of W_KR c err; and of 16 bits by one rounding more."""
    rope = dataclasses.replace(BASE, kv_lora_rank=64, qk_rope_head_dim=32, bias=bias).inputs(torch.float64)["rope"]
    latent, positions = torch.randn(64, 64, dtype=torch.float64), torch.arange(131000, 131064).int()
    cache = torch.zeros(4, 16, 1, 32, dtype=torch.int8)
    scale, slots = torch.zeros(4, 16), torch.arange(64).int()
    mla_append(
        latent, (latent @ rope.weight.T)[:, None], latent.new_zeros(64, 0, 32), latent.new_zeros(4, 16, 64), cache,
        positions, slots, rope.inv_freq[None], rope_scale=scale, attention_scaling=rope.scaling,
    )  # fmt: skip
    expected, codes = rotary_keys(latent, rope, positions), (cache.view(64, 32), scale.view(64))
    varying = rotary_keys(latent, dataclasses.replace(rope, bias=0 * rope.bias), positions)
    found = kept_keys(*codes, rope, positions, torch.float64)
    assert (found - expected).norm() < 0.008 * varying.norm()
    rounded = kept_keys(*codes, rope, positions, torch.bfloat16).double()
    kept = cache.view(64, 32).double() * scale.view(64, 1)
    summed = kept.abs() + (found - kept).abs()  # in float32, where they may cancel
    assert ((rounded - found).abs() <= 2**-8 * found.abs() + 2**-22 * summed).all()


BAD = {
    "rope_cache is None; expected both rope_cache and rope beside rope_scale": {"rope_cache": None},
    "rope is None; expected both rope_cache and rope beside rope_scale": {"rope": None},
    "rope_scale is given for latents that are codes": {"latent_scale": torch.zeros(1)},
    "rope_cache.dtype is torch.float32; expected torch.int8": {"rope_cache": torch.zeros(9, 16, 1, 16)},
    r"rope_cache.shape is \(9, 16, 2, 16\); expected \[P, page, 1, d_r\]": {"rope_cache": torch.zeros(9, 16, 2, 16)},
    "rope_scale.dtype is torch.float16; expected torch.float32": {"rope_scale": torch.zeros(9, 16).half()},
}


@pytest.mark.parametrize("named", BAD)
def test_bad_input_is_named(named):
    inputs = BASE.inputs(torch.float32)
    with pytest.raises(ValueError, match=named):
        mla_decode(**inputs | BAD[named])


def test_key_codes_come_with_their_scales():
    inputs = BASE.inputs(torch.float32) | {"rope_scale": None, "rope": None}
    with pytest.raises(ValueError, match="rope_cache.dtype is torch.int8; expected torch.float32, as q_latent"):
        mla_decode(**inputs)
    narrow = dataclasses.replace(BASE, qk_rope_head_dim=8).inputs(torch.float32)
    with pytest.raises(ValueError, match="qk_rope_head_dim is 8; rows of int8 keys must be multiples of 16 bytes"):
        mla_decode(**narrow, backend="tilelang")


def test_a_plan_is_that_of_the_op_that_runs(monkeypatch):
    """Its blocks are as many as are resident at once, which differs."""
    planned = []
    monkeypatch.setattr(PagedOp, "plan", lambda self, *_: planned.append(self.name))
    queries, rows = torch.zeros(1, 1, 6, 24), torch.zeros(1, dtype=torch.int32)
    for dtype in (torch.int8, torch.float32):
        cache = torch.zeros(2, 16, 1, 16, dtype=dtype)
        plan_mla_decode(queries, cache, rows[None], rows, qk_rope_head_dim=16)
    assert planned == ["mla_decode_int8_keys", "mla_decode"]


def test_a_cache_of_two_kinds_of_codes_is_refused_unwritten():
    latent, slots, scale = torch.randn(3, 24), torch.arange(3).int(), torch.zeros(2, 16)
    cache, keys = torch.zeros(2, 16, 24).to(torch.float8_e4m3fn), torch.zeros(2, 16, 1, 16, dtype=torch.int8)
    with pytest.raises(ValueError, match="rope_scale is given for latents that are codes"):
        mla_append(
            latent, torch.randn(3, 1, 16), torch.randn(3, 6, 16), cache, keys, slots, slots, torch.ones(1, 8),
            latent_scale=scale, rope_scale=scale.clone(),
        )  # fmt: skip
    assert not scale.any()
