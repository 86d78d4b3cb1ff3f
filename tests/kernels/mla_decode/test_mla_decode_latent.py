"""The decode op over a cache of the latent alone, on any machine: definition, reference, validation, registration."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mha2mla.kernels import mla_decode, plan_mla_decode, quantize_latent, rotary_keys
from mha2mla.testing.problems import LatentProblem, judge, with_keys
from tests.kernels.problems import assert_right

BASE = LatentProblem(6, 1, 24, 8, (0, 1, 70), page_size=16, seqlen_q=2, scaling=1.3)


def test_a_key_is_the_formula_one_number_at_a_time():
    rope = BASE.inputs(torch.float64)["rope"]
    latent = torch.randn(3, 24, dtype=torch.float64)
    positions = torch.tensor([0, 5, 131072])
    keys = rotary_keys(latent, rope, positions)
    for t, position in enumerate(positions.tolist()):
        raw = [sum(rope.weight[r, d] * latent[t, d] for d in range(24)) + rope.bias[r] for r in range(8)]
        for j in range(4):
            frequency = float(rope.inv_freq[j])
            turn = torch.polar(
                torch.tensor(1.0 if frequency == 0 else 1.3, dtype=torch.float64),
                torch.tensor(position * frequency, dtype=torch.float64),
            )
            turned = torch.complex(raw[j], raw[j + 4]) * turn
            assert abs(keys[t, j] - turned.real) < 1e-12 and abs(keys[t, j + 4] - turned.imag) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_are_rounded_once(dtype):
    """Errors of 16-bit keys are those of their last rounding: angles at position 131,072 lose nothing."""
    inputs = dataclasses.replace(BASE, kv_lora_rank=512).inputs(dtype)
    latent, positions = torch.randn(40, 512).to(dtype), torch.arange(131050, 131090)
    keys = rotary_keys(latent, inputs["rope"], positions)
    exact = rotary_keys(latent.double(), inputs["rope"], positions)
    assert keys.dtype == dtype
    unit, sums = torch.finfo(dtype).eps / 2, 1e-6 * exact.abs().amax()
    assert ((keys.double() - exact).abs() <= unit * exact.abs() + sums).all()


def test_gradients_reach_what_keys_are_made_of():
    rope = BASE.inputs(torch.float64)["rope"]
    latent = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)

    def keys(latent, weight, bias):
        return rotary_keys(latent, dataclasses.replace(rope, weight=weight, bias=bias), torch.arange(5) * 999)

    assert torch.autograd.gradcheck(
        keys, (latent, rope.weight.clone().requires_grad_(), rope.bias.clone().requires_grad_())
    )


def test_a_page_is_attended_at_another_offset():
    """One page in two sequences, in one of them 1000 positions further on: as if its keys had been turned again."""
    inputs = dataclasses.replace(BASE, lengths=(16, 16), slack=0, seqlen_q=1).inputs(torch.float64)
    table = inputs["block_table"][:1].expand(2, 1).contiguous()
    query = {name: inputs[name][:1].expand(2, -1, -1, -1).contiguous() for name in ("q_latent", "q_pe")}
    offsets = torch.tensor([[0], [1000]], dtype=torch.int32)
    rope = dataclasses.replace(inputs["rope"], page_offsets=offsets)
    out, _ = mla_decode(**inputs | query | {"block_table": table, "rope": rope}, return_lse=True)
    for b, offset in enumerate((0, 1000)):
        keys = rotary_keys(inputs["latent_cache"], inputs["rope"], torch.arange(16) + offset)[:, :, None]
        alone = {name: value for name, value in (inputs | query | {"block_table": table}).items() if name != "rope"}
        torch.testing.assert_close(out[b], mla_decode(**alone | {"rope_cache": keys})[b], rtol=1e-12, atol=1e-13)
    assert not torch.allclose(out[0], out[1])


def test_e4m3_latents_are_their_dequantised_selves():
    inputs = BASE.inputs(torch.float32)
    codes, scale = quantize_latent(inputs["latent_cache"].nan_to_num(0))
    out = mla_decode(**inputs | {"latent_cache": codes, "latent_scale": scale})
    dense = codes.float() * scale[..., None]
    torch.testing.assert_close(out, mla_decode(**inputs | {"latent_cache": dense}), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="rows of e4m3 numbers"):
        mla_decode(**inputs | {"latent_cache": codes, "latent_scale": scale}, backend="tilelang")


BAD = {
    r"rope.bias.shape is \(4,\); expected \[8\]": lambda r: {"bias": r.bias[:4]},
    r"rope.inv_freq.shape is \(3,\); expected \[4\]": lambda r: {"inv_freq": r.inv_freq[:3]},
    r"rope.weight.shape is \(7, 24\); expected \[d_r, d_c\]": lambda r: {"weight": r.weight[:7]},
    "rope.scaling is 0": lambda r: {"scaling": 0},
    r"rope_weight.shape is \(8, 16\); expected \[8, 24\]": lambda r: {"weight": r.weight[:, :16].contiguous()},
    "rope_weight.dtype is torch.float64": lambda r: {"weight": r.weight.double()},
    "inv_freq.dtype is torch.float64": lambda r: {"inv_freq": r.inv_freq.double()},
    r"page_offsets.shape is \(3, 2\); expected \[3, 6\]": lambda r: {"page_offsets": torch.zeros(3, 2).int()},
    "page_offsets.dtype is torch.int64": lambda r: {"page_offsets": torch.zeros(3, 6).long()},
}


@pytest.mark.parametrize("named", BAD)
def test_bad_input_is_named(named):
    inputs = BASE.inputs(torch.float32)
    with pytest.raises(ValueError, match=named):
        mla_decode(**inputs | {"rope": dataclasses.replace(inputs["rope"], **BAD[named](inputs["rope"]))})


def test_keys_are_stored_or_computed():
    inputs = BASE.inputs(torch.float32)
    stored = with_keys(inputs)["rope_cache"].float()
    with pytest.raises(ValueError, match=r"rope_cache is \(\d+, 16, 1, 8\); expected None beside rope"):
        mla_decode(**inputs | {"rope_cache": stored})
    with pytest.raises(ValueError, match="rope_cache is None; expected a tensor, or rope"):
        mla_decode(**inputs | {"rope": None})
    with pytest.raises(ValueError, match="rope_cache is None; expected"):
        plan_mla_decode(inputs["q_latent"], None, inputs["block_table"], inputs["cache_seqlens"], qk_rope_head_dim=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_of_16_bits_are_judged_as_torchs_are(dtype):
    """A kernel that rounds keys as torch does is right; keys of the position before are not."""
    inputs = dataclasses.replace(BASE, kv_lora_rank=72, qk_rope_head_dim=96, lengths=(300,)).inputs(dtype)

    def with_keys_of(positions_off: int):
        offsets = torch.full(inputs["block_table"].shape, positions_off, dtype=torch.int32)
        made = with_keys(inputs | {"rope": dataclasses.replace(inputs["rope"], page_offsets=offsets)}, dtype)
        return mla_decode(**made, return_lse=True)

    assert judge(inputs, *with_keys_of(0)).ok
    assert "lse is off" in judge(inputs, *with_keys_of(1)).reason


def test_entries_behind_a_length_may_name_any_page():
    """Also one of a sequence's own, at another place: what judges an output makes keys of pages that are read."""
    inputs = dataclasses.replace(BASE, lengths=(70, 40), slack=4).inputs(torch.float64)
    inputs["block_table"][1, 3:] = inputs["block_table"][0, 1]
    inputs["block_table"][0, 5:] = inputs["block_table"][0, 0]
    out, lse = mla_decode(**inputs, return_lse=True)
    assert_right(inputs, out, lse)


def test_a_plan_needs_no_rotary_cache():
    inputs = BASE.inputs(torch.float32)
    plan = BASE.plan(inputs)
    assert (plan.shape, plan.capacity, plan.num_ctas) == ((3, 2, 6, 24), 96, 0)
    assert torch.equal(mla_decode(**inputs, plan=plan), mla_decode(**inputs))
