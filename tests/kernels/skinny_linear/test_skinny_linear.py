"""Products of few rows: torch's as reference, the kernel on the CPU target, what the compiler says, and on a GPU."""

from dataclasses import asdict

import pytest
import torch
from torch.nn import functional as F

from mha2mla.kernels import is_skinny, skinny_linear
from mha2mla.kernels.skinny_linear.selection import LinearTiling, is_faster, linear_tiling, occupancy
from tests.kernels.compiled import gate
from tests.kernels.problems import assert_as_near_as_torch


def given(rows, columns, outputs, dtype=torch.float32, device="cpu", seed=0):
    make = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, columns, generator=make), torch.randn(outputs, columns, generator=make)
    return x.to(device, dtype), weight.mul(columns**-0.5).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_reference_is_torchs_product(dtype):
    x, weight = given(6, 20, 14, dtype)
    assert torch.equal(skinny_linear(x.view(2, 3, 20), weight), F.linear(x, weight).view(2, 3, 14))
    assert torch.equal(skinny_linear(x, weight, x[0, :14]), F.linear(x, weight, x[0, :14]))
    gate, up = F.linear(x, weight).split(7, dim=-1)
    assert torch.equal(skinny_linear(x, weight, gated=True), F.silu(gate) * up)
    assert not is_skinny(x, weight)


def test_refusals():
    x, weight = given(3, 32, 16)
    for call, message in (
        (lambda: skinny_linear(x, weight[:, 1:]), r"weight.shape is \(16, 31\); expected \[N, 32\], by x"),
        (lambda: skinny_linear(x, weight[0]), r"weight.shape is \(32,\)"),
        (lambda: skinny_linear(x, weight.half()), "weight is torch.float16 on cpu; expected torch.float32"),
        (lambda: skinny_linear(x, weight[1:], gated=True), r"weight.shape\[0\] is 15; expected an even number"),
        (
            lambda: skinny_linear(x, weight, x[0]),
            r"bias is torch.float32 \(32,\) on cpu with gated=False; expected None, or",
        ),
        (lambda: skinny_linear(x, weight, x[0, :16], gated=True), "with gated=True; expected None"),
        (lambda: skinny_linear(x, weight, backend="fast"), "backend is 'fast'"),
        (lambda: skinny_linear(x, weight, backend="tilelang"), r"backend is 'tilelang' for torch.float32 \(3, 32\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(("rows", "stages"), [(8, 12), (16, 11), (64, 6), (128, 4)])
def test_one_wave_of_ctas(rows, stages):
    """One CTA a multiprocessor where they fill the machine, else two; shared memory is used and never exceeded."""
    assert linear_tiling(4096, 14336, rows, gated=False, sms=132) == LinearTiling(
        1, split=2, depth=128, stages=stages, resident=1
    )
    for outputs, columns, gated in (
        (5120, 4096, False), (22016, 4096, True), (576, 576, False), (32000, 2048, False), (2048, 8192, False),
        (128256, 4096, False), (57344, 8192, True), (16, 32, False),
    ):  # fmt: skip
        for sms in (78, 114, 132):
            it = linear_tiling(outputs, columns, rows, gated, sms)
            own = 64 if gated else 64 * it.blocks
            ctas = -(-outputs // (1 + gated) // own) * it.split
            # Clusters of four and more: 30 of one CTA a multiprocessor were resident on an H200, not 33.
            assert ctas <= it.resident * sms * (1 if it.split <= 2 else 120 / 132) or it.split == 1
            assert 0 < occupancy(outputs, columns, rows, gated, sms) <= 1
            used = it.stages * (64 * it.blocks + rows) * it.depth * 2 + (rows * own * 4 if it.split > 1 else 0)
            assert it.resident * (used + 1024) <= 227 * 1024 and it.stages >= 1


def test_is_faster_as_measured():
    few = {"rows": 8, "gated": False, "sms": 132}
    assert is_faster(4096, 4096, **few) and is_faster(2048, 2048, **few)
    assert not is_faster(576, 576, **few) and not is_faster(8192, 1024, **few)
    # More than 64 rows only where CTAs fill their waves: not 80 tiles, and not 1.1 waves of gate and up.
    many = {"rows": 128, "sms": 132}
    assert is_faster(4096, 14336, gated=False, **many) and is_faster(28672, 4096, gated=True, **many)
    assert not is_faster(5120, 5120, gated=False, **many) and not is_faster(37888, 3584, gated=True, **many)


@pytest.mark.parametrize(
    ("outputs", "columns", "rows", "gated"),
    [(4096, 11008, 16, False), (22016, 4096, 64, True), (6656, 4096, 8, False), (28672, 4096, 128, True)],
)
def test_streamed_linear_fits_a_hopper(outputs, columns, rows, gated):
    """The planned CTAs fit a multiprocessor, nothing spills, and products are the tensor cores'."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.machine import EXACT_PASS_CONFIGS
    from mha2mla.kernels.skinny_linear.streamed import make_streamed_linear

    how = linear_tiling(outputs, columns, rows, gated, sms=132)
    function = make_streamed_linear(
        outputs=outputs, columns=columns, rows=rows, gated=gated, biased=not gated, dtype="bfloat16", **asdict(how)
    )
    report = gate(function, EXACT_PASS_CONFIGS)
    assert report.spill_bytes == 0
    assert how.resident * report.registers * (128 + 32) <= 65_536
    assert how.resident * (report.shared_bytes + 1024) <= 232_448
    if report.instructions is not None:
        assert report.instructions["HGMMA"] % (how.blocks * how.depth // 16) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("columns", "outputs"), [(576, 96), (1536, 576), (4096, 4096), (11008, 64), (2112, 32), (2048, 5120), (96, 40000)]
)
def test_kernel_on_a_gpu(columns, outputs, dtype, gated):
    """Over NaN behind x; the same bits each time."""
    for rows in (1, 5, 8, 16, 27, 64, 65, 128):
        x, weight = given(rows, columns, outputs, dtype, "cuda", seed=rows)
        wide = torch.full((rows + 1, columns), torch.nan, dtype=dtype, device="cuda")
        wide[:rows] = x
        out = skinny_linear(wide[:rows], weight, gated=gated, backend="tilelang")
        exact = skinny_linear(x.double(), weight.double(), gated=gated, backend="reference")
        plain = skinny_linear(x, weight, gated=gated, backend="reference")
        assert_as_near_as_torch(out, plain, exact)
        assert torch.equal(out, skinny_linear(x, weight, gated=gated, backend="tilelang"))
        if not gated:
            bias = weight[:, 0] * columns**0.5
            out = skinny_linear(x, weight, bias, backend="tilelang")
            exact, plain = F.linear(x.double(), weight.double(), bias.double()), F.linear(x, weight, bias)
            assert_as_near_as_torch(out, plain, exact)


@pytest.mark.gpu
def test_calls_served_on_a_gpu():
    x, weight = given(1, 4096, 4096, torch.bfloat16, "cuda")
    assert is_skinny(x, weight) and is_skinny(x[0], weight) and not is_skinny(x, weight[:16])
    assert is_skinny(x.repeat(128, 1), weight) and not is_skinny(x.repeat(129, 1), weight)
    assert not is_skinny(x[:0], weight) and not is_skinny(x.float(), weight.float())
    assert skinny_linear(x[:0], weight).shape == (0, 4096)
    small, few = given(8, 48, 32, torch.bfloat16, "cuda")
    with pytest.raises(ValueError, match="K a multiple of 32"):
        skinny_linear(small, few, backend="tilelang")
