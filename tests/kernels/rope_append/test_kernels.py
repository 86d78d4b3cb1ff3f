"""The append kernels: on the CPU target, compiled for Hopper, on a GPU, and with maps beside them."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from mha2mla.kernels import append_and_map, mla_append
from tests.few import few
from tests.kernels.rope_append.problems import PAGE, PAGES, SHAPES, WITHOUT_KEYS, assert_right, copied, tensors


@cache
def compiled_for_cpu(shape, interleaved, vector):
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.rope_append.kernel import make_rope_append

    function = make_rope_append(**static(shape), dtype="float32", interleaved=interleaved, vector=vector, on_cpu=True)
    configs = {"tirx.disable_vectorize": True}
    return tilelang.compile(function, target="c", target_host="c", execution_backend="cython", pass_configs=configs)


def static(shape):
    heads, groups, width, rope, tables = shape
    return {
        "heads": heads,
        "num_rope_heads": groups,
        "row_width": width,
        "qk_rope_head_dim": rope,
        "num_tables": tables,
        "page_size": PAGE,
    }


@few(
    "shape, interleaved, vector",
    [(SHAPES[0], True, 8), (SHAPES[2], False, 4), (WITHOUT_KEYS[0], False, 4), (SHAPES[1], True, 1)]
    + [(SHAPES[4], False, 8), *itertools.product(SHAPES[:3], (False, True), (1,))],
    count=4,
)
def test_kernel_on_the_cpu_target(shape, interleaved, vector):
    kernel = compiled_for_cpu(shape, interleaved, vector)
    for tokens in (1, 4, 11):
        given = tensors(shape, tokens)
        before, out = copied(given), torch.full_like(given["q_pe"], torch.nan)
        keys, rope_cache = given["k_pe"], given["rope_cache"].flatten(2)
        if not shape[1]:  # what is left out is passed as anything
            keys, rope_cache = given["q_pe"][:, :1].contiguous(), torch.zeros(PAGES, PAGE, shape[3])
        kernel(
            given["latent"], keys, *(given[name] for name in ("q_pe", "positions", "slots", "inv_freq")),
            given["latent_cache"], rope_cache, out, 1.3,
        )  # fmt: skip
        assert_right(before, given, out, 1.3, interleaved)


@few(
    "shape, interleaved",
    [((32, 32, 512, 16, 32), False), (SHAPES[0], True), ((0, 0, 80, 8, 1), False), ((128, 1, 512, 64, 1), False)]
    + [((9, 0, 0, 16, 3), True), ((4, 0, 48, 16, 1), False), *((shape, True) for shape in SHAPES[1:])],
    count=3,
)
def test_kernel_compiles_for_hopper(shape, interleaved):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.machine import EXACT_PASS_CONFIGS
    from mha2mla.kernels.rope_append.kernel import make_rope_append
    from mha2mla.testing.compile_gate import compile_only, find_tool

    if find_tool("nvcc") is None:
        pytest.skip("there is no nvcc")
    alone = shape[4] == 32  # as launched with a table a head
    function = make_rope_append(
        **static(shape),
        dtype="bfloat16",
        interleaved=interleaved,
        vector=8,
        block_tokens=1 if alone else 4,
        dependent=alone,
    )
    (report,) = compile_only(function, "sm_90a", EXACT_PASS_CONFIGS)
    assert not report.complaints(48 * 1024)


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


# A shape, columns of q_nope, maps.
MAPPED = [((32, 32, 512, 16, 32), 112, 32), ((32, 1, 448, 64, 1), 64, 8), ((9, 3, 80, 16, 1), 24, 3)]


def queries(shape, tokens, inner, maps, device):
    """q_nope, part of a wider projection, and W_UK."""
    make = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, shape[0], inner + 16, generator=make).to(device, torch.bfloat16)
    return wide[..., :inner], torch.randn(maps, inner, shape[2], generator=make).to(device, torch.bfloat16)


@torch.no_grad()
def test_no_kernel_maps_beside_the_append_where_there_is_none():
    given = tensors(SHAPES[1], dtype=torch.bfloat16)
    before = copied(given)
    assert append_and_map(**given, q_nope=torch.zeros(11, 9, 24).bfloat16(), k_up=None) is None
    query, maps = queries(SHAPES[1], 11, 24, 3, "cpu")
    assert append_and_map(**given, q_nope=query, k_up=maps) is None
    assert torch.equal(given["latent_cache"], before["latent_cache"])


@few("shape, inner, maps", MAPPED, count=1)
def test_append_and_map_compiles_for_hopper(shape, inner, maps):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.machine import EXACT_PASS_CONFIGS
    from mha2mla.kernels.rope_append.kernel import make_append_and_map
    from mha2mla.testing.compile_gate import compile_only, find_tool

    if find_tool("nvcc") is None:
        pytest.skip("there is no nvcc")
    function = make_append_and_map(**static(shape), maps=maps, inner=inner, dtype="bfloat16", vector=8)
    (report,) = compile_only(function, "sm_90a", EXACT_PASS_CONFIGS)
    assert report.complaints(232_448) == [] and report.spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "inner", "maps"), MAPPED)
@torch.no_grad()
def test_append_and_map_is_both_to_the_bit(shape, inner, maps):
    """Also with positions that the kernel before writes, without rotary keys, and twice."""
    from mha2mla.kernels.skinny_linear.api import skinny_maps

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("there is no dependent launch before sm_90")
    for tokens, keys in ((1, True), (8, True), (12, True), (3, False)):
        given = {name: each.cuda() for name, each in tensors(shape, tokens, torch.bfloat16).items()}
        if not keys:
            given |= {"k_pe": None, "rope_cache": None}
        query, up = queries(shape, tokens, inner, maps, "cuda")
        plain = {name: each if each is None else each.clone() for name, each in given.items()}
        expected = mla_append(**plain), skinny_maps(query, up, backend="tilelang")
        for _ in range(2):
            given["positions"] = plain["positions"] + torch.zeros_like(plain["positions"])
            out = append_and_map(**given, q_nope=query, k_up=up)
            assert all(torch.equal(*pair) for pair in zip(out, expected, strict=True))
            assert torch.equal(given["latent_cache"], plain["latent_cache"])
            assert not keys or torch.equal(given["rope_cache"], plain["rope_cache"])
