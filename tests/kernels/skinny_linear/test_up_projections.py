"""W_UK and W_UV by head: torch's batched product as reference, kernels on the CPU target, compile gate, on a GPU."""

import pytest
import torch

pytest.importorskip("tilelang", reason="TileLang is not installed")

from mha2mla.kernels import is_skinny, skinny_linear
from mha2mla.kernels.machine import EXACT_PASS_CONFIGS, PASS_CONFIGS
from mha2mla.kernels.skinny_linear.api import project_w_uk, up_project
from mha2mla.kernels.skinny_linear.selection import serves_up_project, serves_w_uk
from mha2mla.kernels.skinny_linear.up_projections import make_up_projection, make_w_uk, make_w_uv
from tests.kernels.compiled import gate
from tests.kernels.problems import assert_as_near_as_torch, per_head


def test_w_uk_reference_is_torchs_product():
    x, every = per_head(6, 6, 6, 10, 7)
    for weight in (every, every[:3], every[:1]):
        out = project_w_uk(x.unflatten(0, (2, 3)), weight)
        assert out.shape == (2, 3, 6, 7)
        for head in range(6):
            torch.testing.assert_close(out.flatten(0, 1)[:, head], x[:, head] @ weight[head * len(weight) // 6])
    torch.library.opcheck(torch.ops.mha2mla.project_w_uk.default, (x, weight, False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_up": torch.zeros(2, 8, 8)}, r"k_up.shape is \(2, 8, 8\); expected \[a divisor of 3, 8, d_c\], by x"),
        ({"x": torch.zeros(3, 8)}, "k_up.shape is"),
        ({"k_up": torch.zeros(0, 8, 8)}, r"k_up.shape is \(0, 8, 8\)"),
        ({"k_up": torch.zeros(3, 8, 8).half()}, "k_up is torch.float16 on cpu; expected torch.float32"),
        ({"backend": "fast"}, "backend is 'fast'"),
        ({"backend": "tilelang"}, r"backend is 'tilelang' for torch.float32 \(2, 3, 8\)"),
    ],
)
def test_w_uk_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        project_w_uk(**{"x": torch.zeros(2, 3, 8), "k_up": torch.zeros(3, 8, 8)} | change)


def test_kernels_serve_on_gpus_only():
    x, weight = per_head(4, 8, 2, 32, 64)
    assert not serves_up_project(x, weight) and not serves_w_uk(x, weight)


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
        out = project_w_uk(x, weight, backend="tilelang")
        exact, plain = (
            project_w_uk(*each, backend="reference") for each in ((x.double(), weight.double()), (x, weight))
        )
        assert_as_near_as_torch(out, plain, exact)
        assert torch.equal(out, project_w_uk(x.contiguous(), weight))
    assert serves_w_uk(x, weight) and not serves_w_uk(x.repeat(2, 1, 1), weight) and not serves_w_uk(x[:0], weight)
    assert not serves_w_uk(x, weight[..., : outer - 8]) and not serves_w_uk(x.float(), weight.float())


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width", "columns"), [(32, 128, 512), (32, 128, 448), (3, 16, 96)])
def test_w_uv_on_the_gpu(heads, width, columns):
    for rows in (1, 8):
        x = torch.randn(rows, heads * columns).to("cuda", torch.bfloat16)
        weight = (torch.randn(heads * width, columns) * columns**-0.5).to("cuda", torch.bfloat16)
        out = skinny_linear(x, weight, groups=heads, backend="tilelang")
        exact = skinny_linear(x.double(), weight.double(), groups=heads, backend="reference")
        assert_as_near_as_torch(out, skinny_linear(x, weight, groups=heads, backend="reference"), exact)
    assert is_skinny(x, weight, heads) and not is_skinny(x.repeat(2, 1), weight, heads)


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
        assert serves_up_project(x, stored, transposed)
        out, wide = up_project(x, stored, transposed=transposed), weight.repeat_interleave(heads // groups, 0)
        exact = torch.einsum("thi,hio->tho", x.double(), wide.double())
        assert_as_near_as_torch(out, torch.einsum("thi,hio->tho", x, wide), exact)
        assert torch.equal(out, up_project(x, stored, transposed=transposed))
    assert not serves_up_project(x[..., 1:], stored, transposed) and not serves_up_project(x, stored.mT, transposed)
