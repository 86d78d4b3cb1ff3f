"""The append ops: rotation, slots, untouched pages, what is not cached, and refusals by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mha2mla.kernels import (
    LatentRope,
    compute_rotary_keys,
    gqa_append,
    mla_append,
    quantize_latent,
    rotary_keys,
    slots_of,
)
from mha2mla.kernels.rope_append import api
from mha2mla.kernels.rope_append.api import MAX_SLOTS, rotate_reference
from tests.kernels.rope_append.problems import PAGE, PAGES, SHAPES, WITHOUT_KEYS, assert_right, copied, tensors


@pytest.mark.parametrize(("combined", "interleaved", "scaling"), [(False, False, 1.0), (True, True, 1.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_mla_append(shape, dtype, combined, interleaved, scaling):
    given = tensors(shape, dtype=dtype, combined=combined)
    before = copied(given)
    out = mla_append(**given, attention_scaling=scaling, interleaved=interleaved)
    assert_right(before, given, out, scaling, interleaved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_without_rope_cache_latents_are_written(device, dtype):
    """Queries turn all the same; e4m3 latents too."""
    given = tensors(SHAPES[3], dtype=dtype, device=device)
    both = copied(given)
    expected = mla_append(**both)
    alone = {**copied(given), "k_pe": None, "rope_cache": None}
    assert torch.equal(mla_append(**alone), expected)
    assert torch.equal(alone["latent_cache"], both["latent_cache"])
    codes, scale = quantize_latent(given["latent_cache"])
    eight = {**alone, "latent_cache": codes, "latent_scale": scale}
    assert torch.equal(mla_append(**eight), expected)
    wanted, wanted_scale = quantize_latent(both["latent_cache"])
    written = given["slots"][(given["slots"] >= 0) & (given["slots"] < PAGES * PAGE)].long()
    assert torch.equal(codes.float().flatten(0, 1)[written], wanted.float().flatten(0, 1)[written])
    assert torch.equal(scale.flatten()[written], wanted_scale.flatten()[written])
    for missing in ("k_pe", "rope_cache"):
        with pytest.raises(ValueError, match=f"{missing} is None; expected both k_pe and rope_cache, or neither"):
            mla_append(**{**given, missing: None})


def test_tokens_without_slots_write_nothing():
    given = tensors(SHAPES[0])
    given["slots"].fill_(-1)
    before = copied(given)
    mla_append(**given)
    assert torch.equal(given["latent_cache"], before["latent_cache"])
    assert torch.equal(given["rope_cache"], before["rope_cache"])


def test_no_tokens_and_no_pages():
    given = tensors(SHAPES[0], tokens=0)
    before = copied(given)
    assert_right(before, given, mla_append(**given))
    given = tensors(SHAPES[0])
    given |= {"latent_cache": torch.empty(0, PAGE, 48), "rope_cache": torch.empty(0, PAGE, 3, 16)}
    assert mla_append(**given).shape == (11, 9, 16)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("shape", WITHOUT_KEYS)
def test_latents_without_rotary_keys_are_written(shape, combined, device):
    for tokens in (1, 11):
        given = tensors(shape, tokens, combined=combined)
        before = copied(given)
        given = {name: tensor.to(device) for name, tensor in given.items()}
        out = mla_append(**given)
        assert_right(before, {name: tensor.cpu() for name, tensor in given.items()}, out.cpu())
        assert tokens == 1 or not torch.equal(given["latent_cache"].cpu(), before["latent_cache"])


def test_gqa_append_writes_keys_and_values():
    make = torch.Generator().manual_seed(1)
    query, key = torch.randn(6, 4, 16, generator=make), torch.randn(6, 2, 16, generator=make)
    value = torch.randn(6, 2, 24, generator=make)
    key_cache, value_cache = torch.zeros(PAGES, PAGE, 2, 16), torch.zeros(PAGES, PAGE, 2, 24)
    positions, slots = torch.arange(6).int(), torch.tensor([0, 5, 19, -1, 7, 8]).int()
    inv_freq = 10000.0 ** -torch.rand(1, 8, generator=make)
    out = gqa_append(query, key, value, key_cache, value_cache, positions, slots, inv_freq)
    turned = rotate_reference(key, positions, inv_freq)
    assert torch.equal(out, rotate_reference(query, positions, inv_freq))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(key_cache.view(-1, 2, 16)[slot], turned[token])
            assert torch.equal(value_cache.view(-1, 2, 24)[slot], value[token])
    assert (value_cache.abs().sum((2, 3)) > 0).sum() == 5


def test_slots_of_a_block_table():
    table = torch.tensor([[3, 1, -1], [0, -1, -1]], dtype=torch.int32)
    sequences = torch.tensor([0, 0, 0, 1, 1, -1, 0], dtype=torch.int32)
    positions = torch.tensor([0, 5, 9, 3, 4, 0, 12], dtype=torch.int32)
    assert slots_of(table, sequences, positions, 4).tolist() == [12, 5, -1, 3, -1, -1, -1]
    assert slots_of(table[:, :0], sequences, positions, 4).tolist() == [-1] * 7


def test_slots_do_not_wrap():
    """A slot that int32 does not hold is none; computed in 32 bits it would be one of the first pages."""
    table = torch.tensor([[2**25 - 1, 2**25, 2**26, 2**26 + 3, 2**31 - 1]], dtype=torch.int32)
    positions = torch.tensor([62, 64, 128, 192, 256], dtype=torch.int32)
    found = slots_of(table, torch.zeros(5, dtype=torch.int32), positions, 64)
    assert found.dtype == torch.int32 and found.tolist() == [MAX_SLOTS - 1, -1, -1, -1, -1]


def test_a_cache_beyond_int32_slots_is_refused():
    given = tensors((1, 1, 8, 8, 1))
    huge = torch.zeros(8).as_strided((2**25, 64, 8), (0, 0, 1))
    with pytest.raises(
        ValueError, match=r"latent_cache.shape is \(33554432, 64, 8\); expected at most 2147483647 tokens"
    ):
        mla_append(**given | {"latent_cache": huge, "rope_cache": huge[:, :, None]})


ODD = (("q_pe", (11, 9)), ("k_pe", (11, 3)), ("rope_cache", (5, 4, 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "triton"}, "backend is 'triton'"),
        ({"backend": "tilelang"}, "backend is 'tilelang' for torch.float32 on cpu"),
        ({"q_pe": torch.zeros(11, 9, 18)}, r"k_pe.shape is \(11, 3, 16\); expected \[11, 3, 18\]"),
        ({name: torch.zeros(*shape, 15) for name, shape in ODD}, r"q_pe.shape is \(11, 9, 15\); expected .* even d_r"),
        ({"q_pe": torch.zeros(11, 8, 16)}, r"q_pe.shape is \(11, 8, 16\)|inv_freq.shape"),
        ({"q_pe": torch.zeros(11, 9, 16, dtype=torch.int32)}, "q_pe.dtype is torch.int32"),
        ({"k_pe": torch.zeros(11, 3, 16, dtype=torch.half)}, "k_pe.dtype is torch.float16"),
        ({"latent": torch.zeros(10, 48)}, r"latent.shape is \(10, 48\)"),
        ({"latent": torch.zeros(11, 40)}, r"latent_cache.shape is \(5, 4, 48\); expected \[5, 4, 40\]"),
        ({"rope_cache": torch.zeros(5, 4, 3, 8)}, r"rope_cache.shape is \(5, 4, 3, 8\)"),
        ({"rope_cache": torch.zeros(5, 4, 16, 3).mT}, "rope_cache.stride"),
        ({"latent_cache": torch.zeros(5, 4, 48, dtype=torch.half)}, "latent_cache.dtype is torch.float16"),
        ({"positions": torch.zeros(11, dtype=torch.int64)}, "positions.dtype is torch.int64"),
        ({"slots": torch.zeros(10, dtype=torch.int32)}, r"slots.shape is \(10,\); expected \[11\]"),
        ({"inv_freq": torch.zeros(2, 8)}, r"inv_freq.shape is \(2, 8\)"),
        ({"inv_freq": torch.zeros(0, 8)}, r"inv_freq.shape is \(0, 8\); expected \[a divisor of 9"),
        ({"inv_freq": torch.zeros(3, 8, dtype=torch.half)}, "inv_freq.dtype is torch.float16"),
    ],
)
def test_refusals_name_the_argument(change, message):
    with pytest.raises(ValueError, match=message):
        mla_append(**tensors(SHAPES[0]) | change)


@pytest.mark.parametrize(
    ("shape", "device"),
    [(shape, "cpu") for shape in SHAPES] + [pytest.param(SHAPES[i], "cuda", marks=pytest.mark.gpu) for i in (0, 3, 4)],
)
def test_parts_of_one_projection_are_read_in_place(shape, device):
    """latent and k_pe beside each other in a row, and q_pe behind the un-rotated part of each head."""
    _, groups, width, rope, _ = shape
    given = {name: tensor.to(device) for name, tensor in tensors(shape, 11, torch.bfloat16).items()}
    before = copied({name: tensor.cpu() for name, tensor in given.items()})
    encoded = torch.cat((given["latent"], given["k_pe"].flatten(1)), dim=1)
    query = torch.cat((torch.full_like(given["q_pe"], torch.nan), given["q_pe"]), dim=2)
    given["latent"], k_pe = encoded.split((width, groups * rope), dim=1)
    given |= {"k_pe": k_pe.unflatten(1, (groups, rope)), "q_pe": query[..., rope:]}
    assert not given["q_pe"].is_contiguous()
    out = mla_append(**given)
    assert_right(before, {name: tensor.cpu() for name, tensor in given.items()}, out.cpu())


def latent_rope(device="cpu", dtype=torch.bfloat16, tokens=70, columns=48, width=16):
    """Latents, parameters of keys whose last pair stands still, a bias as large as 145, positions."""
    sizes = (tokens, columns), (width, columns), (width,)
    latent, weight, bias = (torch.randn(*size).to(device, dtype) for size in sizes)
    bias[3] = 145
    inv_freq = (10000.0 ** -torch.rand(width // 2)).to(device)
    inv_freq[-1] = 0
    return latent, LatentRope(weight, bias, inv_freq, 1.3), torch.randint(0, 8192, (tokens,), device=device).int()


def test_rotary_keys_of_many_tokens_are_those_of_each(monkeypatch):
    """By one kernel, or by a product and a rotation; plain torch stands in for both."""
    latent, rope, positions = latent_rope()
    exact = rotary_keys(latent.double(), replace(rope, weight=rope.weight.double(), bias=rope.bias.double()), positions)
    assert torch.equal(compute_rotary_keys(latent, rope, positions), rotary_keys(latent, rope, positions))
    monkeypatch.setattr(api, "runs_compiled", lambda *_: True)
    asked = []
    for name in ("_keys_op", "_rotation_op"):
        op = getattr(api, name)
        monkeypatch.setattr(
            api, name, lambda *given, op=op, name=name: asked.append((name, given)) or op(*given[:-1], False)
        )
    found = compute_rotary_keys(latent, rope, positions)
    ((name, (*_, compiled)),) = asked
    assert name == "_keys_op" and compiled
    assert found.dtype == latent.dtype and (found.double() - exact).abs().max() <= exact.abs().max() * 2**-8
    for odd in (latent[:, :44], latent.float()):  # widths that no tensor core takes, and numbers
        asked.clear()
        narrow = replace(rope, weight=rope.weight[:, : odd.shape[1]])
        found, wanted = compute_rotary_keys(odd, narrow, positions), rotary_keys(odd, narrow, positions)
        ((name, (raw, *_, compiled)),) = asked
        assert name == "_rotation_op" and compiled and raw.is_contiguous() and raw.dtype == torch.float32
        torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "columns", "width"), [(70, 48, 16), (1, 192, 128), (16384, 512, 64), (300, 44, 16)])
def test_rotary_keys_of_many_tokens_on_the_gpu(dtype, tokens, columns, width):
    latent, rope, positions = latent_rope("cuda", dtype, tokens, columns, width)
    exact = rotary_keys(latent.double(), replace(rope, weight=rope.weight.double(), bias=rope.bias.double()), positions)
    found, plain = (
        compute_rotary_keys(latent, rope, positions, backend=backend) for backend in ("tilelang", "reference")
    )
    assert (found.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max()
