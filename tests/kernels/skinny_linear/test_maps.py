"""A map a head of few tokens: torch's batched product as reference, the kernel on the CPU target, and on a GPU."""

from functools import cache

import pytest
import torch

from mha2mla.kernels.skinny_linear.api import grouped_maps, serves_groups, serves_maps, skinny_maps
from mha2mla.testing import compile_gate


def given(tokens, heads, inner, outer, dtype=torch.float32, device="cpu"):
    """x is part of a wider projection."""
    make = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, heads, inner + 16, generator=make).to(device, dtype)[..., 16:]
    return x, torch.randn(heads, inner, outer, generator=make).mul(inner**-0.5).to(device, dtype)


def test_the_reference_is_torchs_product():
    x, every = given(6, 6, 10, 7)
    for maps in (every, every[:3], every[:1]):
        out = skinny_maps(x.unflatten(0, (2, 3)), maps)
        assert out.shape == (2, 3, 6, 7)
        for head in range(6):
            each = maps[head * len(maps) // 6]
            torch.testing.assert_close(out.flatten(0, 1)[:, head], x[:, head] @ each)
    torch.library.opcheck(torch.ops.mha2mla.skinny_maps.default, (x, maps, False))


def test_refusals():
    x, maps = given(2, 3, 8, 8)
    for call, message in (
        (lambda: skinny_maps(x, maps[:2]), r"maps.shape is \(2, 8, 8\); expected \[a divisor of 3, 8, o\], by x"),
        (lambda: skinny_maps(x[0], maps), "maps.shape is"),
        (lambda: skinny_maps(x, maps[:0]), r"maps.shape is \(0, 8, 8\)"),
        (lambda: skinny_maps(x, maps.half()), "maps is torch.float16 on cpu; expected torch.float32"),
        (lambda: skinny_maps(x, maps, backend="fast"), "backend is 'fast'"),
        (lambda: skinny_maps(x, maps, backend="tilelang"), r"backend is 'tilelang' for torch.float32 \(2, 3, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@cache
def compiled_for_cpu(heads, maps, inner, outer):
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.skinny_linear.maps import make_skinny_maps

    function = make_skinny_maps(heads=heads, maps=maps, inner=inner, outer=outer, dtype="float32", on_cpu=True)
    configs = {"tirx.disable_vectorize": True}
    return tilelang.compile(function, target="c", target_host="c", execution_backend="cython", pass_configs=configs)


@pytest.mark.parametrize("tokens", [1, 8])
def test_kernel_on_cpu_target(tokens):
    x, _ = given(tokens, 6, 20, 136)
    _, maps = given(1, 3, 20, 136)
    out = torch.full((tokens, 6, 136), torch.nan)
    compiled_for_cpu(6, 3, 20, 136)(x.contiguous(), maps, out)
    exact, size = skinny_maps(x.double(), maps.double()), skinny_maps(x.abs(), maps.abs()).max()
    assert float((out - exact).abs().max()) <= 20 * torch.finfo(torch.float32).eps * float(size)


@pytest.mark.skipif(compile_gate.find_tool("nvcc") is None, reason="there is no nvcc")
def test_compile_gate():
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.machine import EXACT_PASS_CONFIGS
    from mha2mla.kernels.skinny_linear.maps import make_skinny_maps

    function = make_skinny_maps(heads=32, maps=32, inner=112, outer=512, dtype="bfloat16")
    (report,) = compile_gate.compile_only(function, "sm_90a", EXACT_PASS_CONFIGS)
    assert report.complaints(232_448) == [] and report.spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "count", "inner", "outer"), [(32, 32, 112, 512), (32, 8, 64, 448), (3, 3, 20, 136), (6, 2, 200, 512)]
)
def test_kernel_on_a_gpu(heads, count, inner, outer):
    """As near to float64 as twice torch's batched product, and the same each time."""
    for tokens in (1, 3, 8, 11, 16):
        x, _ = given(tokens, heads, inner, outer, torch.bfloat16, "cuda")
        _, maps = given(1, count, inner, outer, torch.bfloat16, "cuda")
        out = skinny_maps(x, maps, backend="tilelang")
        exact = skinny_maps(x.double(), maps.double(), backend="reference")
        plain = skinny_maps(x, maps, backend="reference")
        error, torchs = (float((each.double() - exact).norm() / exact.norm()) for each in (out, plain))
        assert error <= 2 * torchs
        assert torch.equal(out, skinny_maps(x.contiguous(), maps))
    assert serves_maps(x, maps) and not serves_maps(x.repeat(2, 1, 1), maps) and not serves_maps(x[:0], maps)
    assert not serves_maps(x, maps[..., : outer - 8]) and not serves_maps(x.float(), maps.float())


@pytest.mark.skipif(compile_gate.find_tool("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize(
    ("arch", "maps", "rows", "transposed"), [("sm_90a", 8, 64, True), ("sm_90a", 32, 16, True), ("sm_80", 8, 64, False)]
)
def test_grouped_compile_gate(arch, maps, rows, transposed):
    """Of a width that is no power of two, whose indices may cost divisions for every 16 bytes."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.machine import PASS_CONFIGS
    from mha2mla.kernels.skinny_linear.maps import make_grouped_maps

    function = make_grouped_maps(
        heads=32, maps=maps, inner=448, outer=128, dtype="bfloat16", transposed=transposed, dependent=arch != "sm_80",
        rows=rows,
    )  # fmt: skip
    (report,) = compile_gate.compile_only(function, arch, PASS_CONFIGS)
    assert report.complaints(232_448) == [] and report.spill_bytes == 0
    assert report.instructions is None or sum(report.instructions.values()) < 1000


def test_groups_are_served_on_gpus_only():
    x, maps = given(4, 8, 32, 64)
    assert not serves_groups(x, maps[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("heads", "maps", "inner", "outer"),
    [(32, 8, 64, 448), (32, 8, 448, 128), (6, 2, 192, 512), (9, 3, 48, 152), (32, 32, 512, 128), (9, 9, 48, 136)],
)
def test_grouped_kernel_on_a_gpu(heads, maps, inner, outer, transposed):
    """As near to float64 as twice torch's product over repeated maps, the same each time; x is part of a projection."""
    for tokens in (2, 16, 21, 64 if heads == maps else 65):
        x, _ = given(tokens, heads, inner, 8, torch.bfloat16, "cuda")
        _, each = given(1, maps, inner, outer, torch.bfloat16, "cuda")
        stored = each.mT.contiguous() if transposed else each
        assert serves_groups(x, stored, transposed)
        out = grouped_maps(x, stored, transposed=transposed)
        wide = each.repeat_interleave(heads // maps, 0)
        exact, plain = torch.einsum("thi,hio->tho", x.double(), wide.double()), torch.einsum("thi,hio->tho", x, wide)
        error, torchs = (float((y.double() - exact).norm() / exact.norm()) for y in (out, plain))
        assert error <= 2 * torchs
        assert torch.equal(out, grouped_maps(x, stored, transposed=transposed))
    assert not serves_groups(x[..., 1:], stored, transposed) and not serves_groups(x, stored.mT, transposed)
