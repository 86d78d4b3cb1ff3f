"""W_UK and W_UV by head: the compile gate, and on a GPU beside torch's batched product."""

import pytest
import torch

pytest.importorskip("tilelang", reason="TileLang is not installed")

from mha2mla.kernels.machine import EXACT_PASS_CONFIGS, PASS_CONFIGS
from mha2mla.kernels.skinny_linear.api import project_heads
from mha2mla.kernels.skinny_linear.selection import serves_few_tokens, serves_heads
from mha2mla.kernels.skinny_linear.up_projections import (
    launch_up_projection,
    make_up_projection,
    make_w_uk,
    make_w_uv,
)
from tests.kernels.compiled import gate
from tests.kernels.problems import assert_as_near_as_torch, per_head


def product(x, weight):
    """x [tokens, H, i] by weight [k, i, o], in torch."""
    return torch.einsum("thi,hio->tho", x, weight.repeat_interleave(x.shape[1] // len(weight), 0))


def test_kernels_serve_on_gpus_only():
    x, weight = per_head(4, 8, 2, 32, 64)
    assert not serves_heads(x, weight) and not serves_few_tokens(x, weight)


def test_w_uk_fits_a_hopper():
    function = make_w_uk(heads=32, groups=32, inner=112, outer=512, dtype="bfloat16")
    assert gate(function, EXACT_PASS_CONFIGS).spill_bytes == 0


def test_w_uv_fits_a_hopper():
    report = gate(make_w_uv(columns=512, outputs=4096, groups=32, dtype="bfloat16"), EXACT_PASS_CONFIGS)
    assert report.spill_bytes == 0 and report.registers <= 128
    assert report.instructions is None or report.instructions["HMMA"] == 2 * 2


@pytest.mark.parametrize(
    ("capability", "groups", "rows", "transposed"), [(90, 8, 64, True), (90, 32, 16, True), (80, 8, 64, False)]
)
def test_up_projection_fits(capability, groups, rows, transposed):
    """At a width that is no power of two, whose indices may cost divisions for every 16 bytes."""
    function = make_up_projection(
        heads=32, groups=groups, inner=448, outer=128, dtype="bfloat16", transposed=transposed,
        dependent=capability != 80, rows=rows,
    )  # fmt: skip
    report = gate(function, PASS_CONFIGS, capability)
    assert report.spill_bytes == 0
    assert report.instructions is None or sum(report.instructions.values()) < 1000


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "groups", "inner", "outer"), [(32, 32, 112, 512), (32, 8, 64, 448), (3, 3, 20, 136), (6, 2, 200, 512)]
)
def test_w_uk_on_the_gpu(heads, groups, inner, outer):
    """The same bits each time."""
    for tokens in (1, 3, 8, 11, 16):
        x, weight = per_head(tokens, heads, groups, inner, outer, torch.bfloat16, "cuda")
        assert serves_few_tokens(x, weight)
        out = project_heads(x, weight)
        assert_as_near_as_torch(out, product(x, weight), product(x.double(), weight.double()))
        assert torch.equal(out, project_heads(x.contiguous(), weight))
    assert not serves_few_tokens(x.repeat(2, 1, 1), weight) and not serves_few_tokens(x[:0], weight)
    assert not serves_few_tokens(x, weight[..., : outer - 8]) and not serves_few_tokens(x.float(), weight.float())


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width", "columns"), [(32, 128, 512), (32, 128, 448), (3, 16, 96)])
def test_w_uv_on_the_gpu(heads, width, columns):
    for rows in (1, 8):
        x, weight = per_head(rows, heads, heads, columns, width, torch.bfloat16, "cuda")
        stored = weight.mT.contiguous()
        assert serves_few_tokens(x, stored, transposed=True)
        out = project_heads(x, stored, transposed=True)
        assert_as_near_as_torch(out, product(x, weight), product(x.double(), weight.double()))
    assert not serves_few_tokens(x.repeat(2, 1, 1), stored, transposed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "inner", "outer"),
    [(32, 8, 64, 448), (32, 8, 448, 128), (6, 2, 192, 512), (9, 3, 48, 152), (32, 32, 512, 128), (9, 9, 48, 136)],
)
def test_up_projection_on_the_gpu(heads, groups, inner, outer, transposed):
    """The same bits each time."""
    for tokens in (2, 16, 21, 64 if heads == groups else 65):
        x, weight = per_head(tokens, heads, groups, inner, outer, torch.bfloat16, "cuda")
        stored = weight.mT.contiguous() if transposed else weight
        assert serves_heads(x, stored, transposed)
        out, again = (x.new_empty(tokens, heads, outer) for _ in range(2))
        for each in (out, again):
            launch_up_projection(x, stored, each, transposed)
        assert_as_near_as_torch(out, product(x, weight), product(x.double(), weight.double()))
        assert torch.equal(out, again)
    assert not serves_heads(x[..., 1:], stored, transposed) and not serves_heads(x, stored.mT, transposed)
