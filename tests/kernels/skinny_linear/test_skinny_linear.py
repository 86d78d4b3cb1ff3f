"""Products of few rows: torch's as reference, the kernel on the CPU target, what the compiler says, and on a GPU."""

from functools import cache

import pytest
import torch
from torch.nn import functional as F

from mha2mla.kernel_testing import compile_gate
from mha2mla.kernels import is_skinny, skinny_linear
from mha2mla.kernels.skinny_linear.api import is_faster, resident_blocks


def given(rows, columns, outputs, dtype=torch.float32, device="cpu", seed=0):
    make = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, columns, generator=make), torch.randn(outputs, columns, generator=make)
    return x.to(device, dtype), weight.mul(columns**-0.5).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_reference_is_torchs_product(dtype):
    x, weight = given(6, 20, 14, dtype)
    assert torch.equal(skinny_linear(x.view(2, 3, 20), weight), F.linear(x, weight).view(2, 3, 14))
    assert torch.equal(skinny_linear(x, weight, x[0, :14]), F.linear(x, weight, x[0, :14]))
    halves = torch.cat([F.linear(x[:, :10], weight[:7, :10]), F.linear(x[:, 10:], weight[7:, :10])], dim=-1)
    bound = 12 * torch.finfo(dtype).eps * float((x.abs() @ weight.abs().T).max())  # of sums of ten, and of a bias
    for bias in (None, x[0, :14]):
        out = skinny_linear(x, weight[:, :10], bias, groups=2)
        assert float((out - (halves if bias is None else halves + bias)).abs().max()) <= bound
    gate, up = F.linear(x, weight).split(7, dim=-1)
    assert torch.equal(skinny_linear(x, weight, gated=True), F.silu(gate) * up)
    assert not is_skinny(x, weight)


def test_refusals():
    x, weight = given(3, 32, 16)
    for call, message in (
        (lambda: skinny_linear(x, weight[:, 1:]), r"weight.shape is \(16, 31\); expected \[a multiple of 1, 32\]"),
        (lambda: skinny_linear(x, weight[:, :8], groups=3), r"expected \[a multiple of 3, 10.6667\]"),
        (lambda: skinny_linear(x, weight, groups=0), "groups is 0; expected at least 1"),
        (
            lambda: skinny_linear(x, weight[:, :16], groups=2, gated=True),
            "groups is 2; expected at least 1, and no more",
        ),
        (lambda: skinny_linear(x, weight[0]), r"weight.shape is \(32,\)"),
        (lambda: skinny_linear(x, weight.half()), "weight is torch.float16 on cpu; expected torch.float32"),
        (lambda: skinny_linear(x, weight[1:], gated=True), r"weight.shape\[0\] is 15; expected an even number"),
        (
            lambda: skinny_linear(x, weight, x[0]),
            r"bias is torch.float32 \(32,\) on cpu with gated=False; expected None, or",
        ),
        (lambda: skinny_linear(x, weight, x[0, :16], gated=True), r"on cpu with gated=True; expected None"),
        (lambda: skinny_linear(x, weight, backend="fast"), "backend is 'fast'"),
        (lambda: skinny_linear(x, weight, backend="tilelang"), r"backend is 'tilelang' for torch.float32 \(3, 32\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("outputs", "columns", "blocks", "faster"),
    # Those of h200-products.json and h200-step-few-rows.json (benchmarks/results), by what was measured; a small one.
    [(4096, 4096, 2, True), (28672, 4096, 2, True), (4096, 14336, 2, True), (4096, 11008, 2, True)]
    + [(5120, 4096, 3, True), (22016, 4096, 3, True), (6656, 4096, 0, False), (576, 576, 0, False)]
    + [(4608, 4096, 3, True)],
)
def test_where_it_serves_unasked(outputs, columns, blocks, faster):
    assert resident_blocks(outputs, sms=132) == blocks
    assert is_faster(outputs, columns, sms=132) == faster


@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(gated):
    x, weight = given(3, 32, 16)
    torch.library.opcheck(torch.ops.mha2mla.skinny_linear.default, (x.view(3, 1, 32), weight, None, 1, gated, False))
    torch.library.opcheck(torch.ops.mha2mla.skinny_linear.default, (x, weight[:, :8], weight[:, 0], 4, False, False))


@cache
def compiled_for_cpu(columns, outputs, **static):
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.skinny_linear.kernel import make_skinny_linear

    function = make_skinny_linear(columns=columns, outputs=outputs, dtype="float32", **static, on_cpu=True)
    configs = {"tirx.disable_vectorize": True}
    return tilelang.compile(function, target="c", target_host="c", execution_backend="cython", pass_configs=configs)


@pytest.mark.parametrize(("groups", "gated", "biased"), [(1, False, True), (1, True, False), (3, False, False)])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_kernel_on_cpu_target(rows, groups, gated, biased):
    x, weight = given(rows, 96, 48)
    weight = weight[:, : 96 // groups].contiguous()
    out, bias = torch.full((rows, 48 // (1 + gated)), torch.nan), torch.linspace(-3, 3, 48) if biased else None
    kernel = compiled_for_cpu(96 // groups, 48, groups=groups, gated=gated, biased=biased)
    kernel(x, weight, weight[0] if bias is None else bias, out)
    wide = None if bias is None else bias.double()
    exact = skinny_linear(x.double(), weight.double(), wide, groups=groups, gated=gated)
    # Each of two sums and five roundings, in units of float32's last place at the largest number.
    bound = (
        96
        * torch.finfo(torch.float32).eps
        * float((x.double().abs() @ weight.double().abs().repeat(1, groups).T).max())
    )
    assert float((out - exact).abs().max()) <= bound


@pytest.mark.skipif(compile_gate.find_tool("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize(
    # Steps of loop, last whole round, and what is left over: as many as are under way, but for the last.
    ("columns", "gated", "chosen", "steps", "registers"),
    [(11008, False, {}, 8 + 8 + 4, 128), (4096, True, {"stages": 4, "resident": 3}, 4 + 4, 80)],
)
def test_compile_gate(columns, gated, chosen, steps, registers):
    """As many blocks as are to fit a multiprocessor do, nothing spills, and products are the tensor cores'."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.pointwise.launch import PASS_CONFIGS
    from mha2mla.kernels.skinny_linear.kernel import make_skinny_linear

    static = {"columns": columns, "outputs": 4096, "dtype": "bfloat16", "gated": gated, "biased": not gated}
    (report,) = compile_gate.compile_only(make_skinny_linear(**static, **chosen), "sm_90a", PASS_CONFIGS)
    assert report.complaints(232_448) == [] and report.spill_bytes == 0 and report.registers <= registers
    if report.instructions is not None:
        assert report.instructions["HMMA"] == 2 * steps


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("columns", "outputs"), [(576, 96), (1536, 576), (4096, 4096), (11008, 64), (2112, 32), (2048, 5120)]
)
def test_kernel_on_a_gpu(columns, outputs, dtype, gated):
    """As near to float64 as twice torch's own at the dtype, whatever lies behind x, and the same each time."""
    for rows in (1, 2, 5, 8):
        x, weight = given(rows, columns, outputs, dtype, "cuda", seed=rows)
        wide = torch.full((rows + 1, columns), torch.nan, dtype=dtype, device="cuda")
        wide[:rows] = x
        out = skinny_linear(wide[:rows], weight, gated=gated, backend="tilelang")
        exact = skinny_linear(x.double(), weight.double(), gated=gated, backend="reference")
        plain = skinny_linear(x, weight, gated=gated, backend="reference")
        error, torchs = (float((each.double() - exact).norm() / exact.norm()) for each in (out, plain))
        assert error <= 2 * torchs
        assert torch.equal(out, skinny_linear(x, weight, gated=gated, backend="tilelang"))
        if not gated:
            bias = weight[:, 0] * columns**0.5
            out = skinny_linear(x, weight, bias, backend="tilelang")
            exact, plain = F.linear(x.double(), weight.double(), bias.double()), F.linear(x, weight, bias)
            error, torchs = (float((each.double() - exact).norm() / exact.norm()) for each in (out, plain))
            assert error <= 2 * torchs


@pytest.mark.gpu
def test_what_is_served_on_a_gpu():
    outputs = 32 * torch.cuda.get_device_properties(0).multi_processor_count
    x, weight = given(1, 2048, outputs, torch.bfloat16, "cuda")
    assert is_skinny(x, weight) and is_skinny(x[0], weight) and not is_skinny(x, weight[:16])
    assert is_skinny(x.repeat(8, 1), weight) and not is_skinny(x.repeat(9, 1), weight) and not is_skinny(x[:0], weight)
    assert not is_skinny(x.float(), weight.float())
    assert skinny_linear(x[:0], weight).shape == (0, outputs)
    small, few = given(8, 48, 32, torch.bfloat16, "cuda")
    with pytest.raises(ValueError, match="K a multiple of 32"):
        skinny_linear(small, few, backend="tilelang")


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width", "columns"), [(32, 128, 512), (32, 128, 448), (3, 16, 96)])
def test_a_map_a_head_on_a_gpu(heads, width, columns):
    """As near to float64 as twice torch's batched product."""
    for rows in (1, 8):
        x, weight = given(rows, heads * columns, 1, torch.bfloat16, "cuda")[0], given(1, columns, heads * width)[1]
        weight = weight.to("cuda", torch.bfloat16)
        out = skinny_linear(x, weight, groups=heads, backend="tilelang")
        exact = skinny_linear(x.double(), weight.double(), groups=heads, backend="reference")
        plain = skinny_linear(x, weight, groups=heads, backend="reference")
        error, torchs = (float((each.double() - exact).norm() / exact.norm()) for each in (out, plain))
        assert error <= 2 * torchs
    assert is_skinny(x, weight, heads) and not is_skinny(x.repeat(2, 1), weight, heads)
