"""Norm with residual and gated activation: transformers' own modules, their roundings; the kernels on CPU target."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytest.importorskip("tilelang", reason="TileLang is not installed")

from mha2mla.kernels import rms_norm, silu_mul
from mha2mla.kernels.pointwise.kernel import make_rms_norm, make_silu_mul
from tests.kernels.compiled import for_cpu

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def given(width, dtype, rows=5, seed=0, device="cpu"):
    make = torch.Generator().manual_seed(seed)
    x, residual, other = (torch.randn(rows, width, generator=make).mul(3).to(device, dtype) for _ in range(3))
    return x, residual, other, torch.rand(width, generator=make).add(0.5).to(device, dtype)


def llama_norm(x, weight, eps):
    norm = LlamaRMSNorm(len(weight), eps).to(x.device, x.dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        return norm(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 1, 2), (0,)])
def test_the_reference_is_what_transformers_does(dtype, shape):
    count = torch.Size(shape).numel()
    x, residual, other, weight = (t if t.ndim == 1 else t[:count].view(*shape, 48) for t in given(48, dtype))
    normed, same = rms_norm(x, weight, 1e-5)
    assert same is x and torch.equal(normed, llama_norm(x, weight, 1e-5))
    normed, total = rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(total, residual + x) and torch.equal(normed, llama_norm(residual + x, weight, 1e-5))
    assert torch.equal(silu_mul(x, other), F.silu(x) * other)


@pytest.mark.parametrize("residual", [None, torch.ones(6, 4, 8).transpose(0, 1)])
def test_results_lie_as_promised(residual):
    """What torch.compile is told of their strides."""
    x, names = torch.randn(6, 4, 8).transpose(0, 1), ("test_schema", "test_faketensor")
    op = torch.ops.mha2mla.rms_norm.default
    torch.library.opcheck(op, (x, residual, torch.ones(8), 1e-5, False), test_utils=names)


def test_refusals():
    x, residual, _, weight = given(16, torch.float32)
    for call, message in (
        (lambda: rms_norm(x.int(), weight, 1e-5), "x.dtype is torch.int32"),
        (lambda: rms_norm(x, weight[1:], 1e-5), r"weight.shape is \(15,\); expected \(16,\)"),
        (lambda: rms_norm(x, weight.half(), 1e-5), "weight is torch.float16"),
        (lambda: rms_norm(x, weight, 1e-5, residual=residual[1:]), r"residual.shape is \(4, 16\); expected \(5, 16\)"),
        (lambda: silu_mul(x, x[:, 1:]), r"up.shape is \(5, 15\); expected \(5, 16\)"),
        (lambda: silu_mul(x, x.double()), "up is torch.float64"),
        (lambda: silu_mul(x.long(), x), "gate.dtype is torch.int64"),
        (lambda: silu_mul(x, x, backend="tilelang"), "backend is 'tilelang'"),
        (lambda: rms_norm(x, weight, 1e-5, backend="fast"), "backend is 'fast'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("width", "vector"), [(48, 8), (20, 4), (7, 1)])
def test_norm_on_cpu_target(width, vector, residual):
    x, base, _, weight = given(width, torch.float32)
    out, total = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    kernel = for_cpu(make_rms_norm(width=width, dtype="float32", residual=residual, vector=vector, on_cpu=True))
    kernel(x, base, weight, out, total, 1e-5)
    expected = rms_norm(x, weight, 1e-5, residual=base if residual else None)
    assert torch.equal(total, expected[1]) if residual else total.isnan().all()
    assert torch.allclose(out, expected[0], rtol=4 * torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.parametrize(("width", "vector"), [(48, 8), (20, 4), (7, 1)])
def test_activation_on_cpu_target(width, vector):
    gate, up, _, _ = given(width, torch.float32)
    gate[0, :4] = torch.tensor([100.0, -100.0, 0.0, -90.0])
    out = torch.full_like(gate, torch.nan)
    for_cpu(make_silu_mul(width=width, dtype="float32", vector=vector, on_cpu=True))(gate, up, out)
    assert torch.allclose(out, silu_mul(gate, up), rtol=8 * torch.finfo(torch.float32).eps, atol=1e-37)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "dtype"), [(4096, torch.bfloat16), (100, torch.float16), (7, torch.float32)])
@pytest.mark.parametrize("rows", [1, 3, 130])
def test_kernels_on_a_gpu(rows, width, dtype):
    """Roundings are torch's: 16-bit results differ where float32 does in its last bits, by one place of each of two
    roundings; in float32 roots, exponentials and sums do, each by two or three."""
    x, base, other, weight = given(width, dtype, rows, device="cuda")
    wide = torch.cat((x, other, base), dim=-1)  # parts of one projection
    normed, total = rms_norm(x, weight, 1e-5, residual=base)
    plain, kept = rms_norm(x, weight, 1e-5)
    acted = silu_mul(wide[:, :width], wide[:, width : 2 * width])
    torch.cuda.synchronize()
    assert torch.equal(total, base + x) and kept is x
    place = {"rtol": (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(normed, llama_norm(base + x, weight, 1e-5), **place)
    torch.testing.assert_close(plain, llama_norm(x, weight, 1e-5), **place)
    torch.testing.assert_close(acted, F.silu(x) * other, **place)
    if dtype != torch.float32:
        assert float((normed != llama_norm(base + x, weight, 1e-5)).float().mean()) < 0.01
