"""The append kernels: on the CPU target, compiled for Hopper, on a GPU, and with W_UK."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

pytest.importorskip("tilelang", reason="TileLang is not installed")

from mha2mla.kernels import append_w_uk, mla_append, rotate_keys
from mha2mla.kernels.machine import EXACT_PASS_CONFIGS, Machine
from mha2mla.kernels.rope_append import kernel
from mha2mla.kernels.rope_append.api import LatentRope, rotary_keys, serves_widths
from mha2mla.kernels.rope_append.kernel import AppendShape, make_append_w_uk, make_rope_append
from mha2mla.kernels.rope_append.rotary_keys import KEY_PASS_CONFIGS, make_rotary_keys, stages_of
from mha2mla.kernels.skinny_linear.api import project_heads
from mha2mla.kernels.split_kv.choice import SHARED_MEMORY
from tests.few import few
from tests.kernels.compiled import for_cpu, gate
from tests.kernels.rope_append.problems import PAGE, PAGES, SHAPES, WITHOUT_KEYS, assert_right, copied, tensors


@cache
def compiled_for_cpu(shape, interleaved, vector):
    return for_cpu(make_rope_append(AppendShape(*shape, PAGE, "float32", interleaved, vector), on_cpu=True))


@few(
    "shape, interleaved, vector",
    [(SHAPES[0], True, 8), (SHAPES[2], False, 4), (WITHOUT_KEYS[0], False, 4), (SHAPES[1], True, 1)]
    + [(SHAPES[4], False, 8), *itertools.product(SHAPES[:3], (False, True), (1,))],
    count=4,
)
def test_kernel_on_the_cpu_target(shape, interleaved, vector):
    run = compiled_for_cpu(shape, interleaved, vector)
    for tokens in (1, 4, 11):
        given = tensors(shape, tokens)
        before, out = copied(given), torch.full_like(given["q_pe"], torch.nan)
        keys, rope_cache = given["k_pe"], given["rope_cache"].flatten(2)
        if not shape[1]:  # what is left out is passed as anything
            keys, rope_cache = given["q_pe"][:, :1].contiguous(), torch.zeros(PAGES, PAGE, shape[3])
        run(
            given["latent"], keys, *(given[name] for name in ("q_pe", "positions", "slots", "inv_freq")),
            given["latent_cache"], rope_cache, out, 1.3,
        )  # fmt: skip
        assert_right(before, given, out, 1.3, interleaved)


def test_rotation_alone_on_the_cpu_target(monkeypatch):
    """With the operands that it is launched with, of which the kernel reads few."""
    launched = []
    monkeypatch.setattr(kernel, "_launch", lambda shape, operands, device: launched.append((shape, operands)))
    x, inv_freq, positions = torch.randn(11, 16), torch.rand(8), torch.arange(11, dtype=torch.int32) * 100
    out = torch.full_like(x, torch.nan)
    kernel.launch_rotation(x, positions, inv_freq, 1.3, out)
    ((shape, operands),) = launched
    for_cpu(make_rope_append(shape, on_cpu=True))(*(x.contiguous() if torch.is_tensor(x) else x for x in operands))
    torch.testing.assert_close(out, rotate_keys(x, inv_freq, 1.3, positions), rtol=1e-4, atol=1e-4)


@few(
    "shape, interleaved",
    [((32, 32, 512, 16, 32), False), (SHAPES[0], True), ((0, 0, 80, 8, 1), False), ((128, 1, 512, 64, 1), False)]
    + [((9, 0, 0, 16, 3), True), ((4, 0, 48, 16, 1), False), *((shape, True) for shape in SHAPES[1:])],
    count=3,
)
def test_kernel_compiles_for_hopper(shape, interleaved):
    alone = shape[4] == 32  # as launched with a table a head
    shape = AppendShape(*shape, PAGE, "bfloat16", interleaved, vector=8)
    function = make_rope_append(shape, block_tokens=1 if alone else 4, dependent=alone)
    gate(function, EXACT_PASS_CONFIGS, limit=48 * 1024)


@pytest.mark.gpu
@pytest.mark.parametrize(("combined", "interleaved", "scaling"), [(False, False, 1.0), (True, True, 1.3)])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    # Not every pair: the CPU target runs them all, and each takes two compilations a layout.
    list(zip(SHAPES, (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16, torch.bfloat16), strict=True)),
)
def test_kernel_on_the_gpu(shape, dtype, combined, interleaved, scaling):
    for tokens in (0, 1, 11):
        given = tensors(shape, tokens, dtype, combined=combined)
        before = copied(given)
        moved = {name: tensor.cuda() for name, tensor in given.items()}
        if combined:
            moved |= {
                name: tensors(shape, tokens, dtype, "cuda", True)[name] for name in ("latent_cache", "rope_cache")
            }
        out = mla_append(**moved, attention_scaling=scaling, interleaved=interleaved)
        after = {name: tensor.cpu() for name, tensor in moved.items()}
        assert_right(before, after, out.cpu(), scaling, interleaved)


# A shape, columns of q_nope, kv heads
WITH_W_UK = [((32, 32, 512, 16, 32), 112, 32), ((32, 1, 448, 64, 1), 64, 8), ((9, 3, 80, 16, 1), 24, 3)]


def queries(shape, tokens, inner, kv_heads, device):
    """q_nope, part of a wider projection, and W_UK."""
    make = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, shape[0], inner + 16, generator=make).to(device, torch.bfloat16)
    return wide[..., :inner], torch.randn(kv_heads, inner, shape[2], generator=make).to(device, torch.bfloat16)


@torch.no_grad()
def test_append_w_uk_writes_nothing_without_a_kernel():
    given = tensors(SHAPES[1], dtype=torch.bfloat16)
    before = copied(given)
    assert append_w_uk(**given, q_nope=torch.zeros(11, 9, 24).bfloat16(), k_up=None) is None
    query, k_up = queries(SHAPES[1], 11, 24, 3, "cpu")
    assert append_w_uk(**given, q_nope=query, k_up=k_up) is None
    assert torch.equal(given["latent_cache"], before["latent_cache"])


@few("shape, inner, kv_heads", WITH_W_UK, count=1)
def test_append_w_uk_compiles_for_hopper(shape, inner, kv_heads):
    shape = AppendShape(*shape, PAGE, "bfloat16", vector=8)
    function = make_append_w_uk(shape, kv_heads=kv_heads, inner=inner)
    assert gate(function, EXACT_PASS_CONFIGS).spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "inner", "kv_heads"), WITH_W_UK)
@torch.no_grad()
def test_append_w_uk_equals_both_ops_to_the_bit(shape, inner, kv_heads):
    """Also with positions that the kernel before writes, without rotary keys, and twice."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("there is no dependent launch before sm_90")
    for tokens, keys in ((1, True), (8, True), (12, True), (3, False)):
        given = {name: each.cuda() for name, each in tensors(shape, tokens, torch.bfloat16).items()}
        if not keys:
            given |= {"k_pe": None, "rope_cache": None}
        query, up = queries(shape, tokens, inner, kv_heads, "cuda")
        plain = {name: each if each is None else each.clone() for name, each in given.items()}
        expected = mla_append(**plain), project_heads(query, up)
        for _ in range(2):
            given["positions"] = plain["positions"] + torch.zeros_like(plain["positions"])
            out = append_w_uk(**given, q_nope=query, k_up=up)
            assert all(torch.equal(*pair) for pair in zip(out, expected, strict=True))
            assert torch.equal(given["latent_cache"], plain["latent_cache"])
            assert not keys or torch.equal(given["rope_cache"], plain["rope_cache"])


@pytest.mark.parametrize(("columns", "rope"), [(80, 16), (192, 32)])
def test_rotary_keys_on_the_cpu_target(columns, rope):
    """Columns that fill no step, tokens that fill no block, a pair that stands still."""
    run = for_cpu(make_rotary_keys(columns=columns, rope=rope, dtype="float32", rows=4, machine=Machine(on_cpu=True)))
    weight, bias, inv_freq = torch.randn(rope, columns) / columns**0.5, torch.randn(rope), torch.rand(rope // 2)
    inv_freq[-1] = 0
    for tokens in (1, 4, 11):
        latent, positions = torch.randn(tokens, columns), torch.randint(0, 1000, (tokens,), dtype=torch.int32)
        out = torch.full((tokens, rope), torch.nan)
        run(latent, weight, bias, positions, inv_freq, out, 1.3)
        exact = rotary_keys(latent, LatentRope(weight, bias, inv_freq, 1.3), positions)
        torch.testing.assert_close(out, exact, rtol=1e-3, atol=1e-3)  # float32 angles of up to 1,000 radians


@pytest.mark.parametrize(
    ("columns", "rope", "capability", "stages"), [(192, 128, 90, 3), (72, 16, 90, 3), (192, 128, 89, 2)]
)
def test_rotary_keys_compile(columns, rope, capability, stages):
    """A GPU of 99 KiB of shared memory has room for fewer steps of the widest keys."""
    assert stages_of(rope, capability) == stages and serves_widths(columns, rope)
    function = make_rotary_keys(columns=columns, rope=rope, dtype="bfloat16", stages=stages)
    assert gate(function, KEY_PASS_CONFIGS, capability).spill_bytes == 0


def test_every_width_that_is_served_has_room():
    widths = [width for width in range(2, 300, 2) if serves_widths(512, width)]
    assert widths == list(range(16, 129, 16))
    assert all(stages_of(width, capability) >= 2 for width in widths for capability in SHARED_MEMORY)
