"""Causal attention and its gradients on a CPU: the op, the kernels' bodies on TileLang's C target, the compile gate."""

from __future__ import annotations

import re

import pytest
import torch

from mha2mla.kernels import causal_attention, explain_causal_attention
from mha2mla.kernels.attention_varlen.causal import gradients_reference
from tests.few import few
from tests.kernels.compiled import for_cpu, gate


def problem(windows=2, length=40, heads=3, widths=(24, 16), dtype=torch.float64, device="cpu"):
    """q, k and v that want gradients, and the weights of a loss."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (
        torch.randn(windows, length, heads, width, generator=generator, dtype=torch.float64).to(device, dtype)
        for width in (widths[0], *widths, widths[1])
    )
    return (*(x.requires_grad_() for x in (q, k, v)), weight)


def gradients(attend, q, k, v, weight):
    out = attend(q, k, v)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), (q, k, v))


def mine(q, k, v):
    return causal_attention(q, k, v, softmax_scale=0.3)


def sdpa(q, k, v):
    operands = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*operands, is_causal=True, scale=0.3).transpose(1, 2)


@pytest.mark.parametrize("widths", [(24, 16), (64, 32), (16, 40)])
def test_op_has_sdpas_output_and_gradients(widths):
    operands = problem(widths=widths)
    for found, expected in zip(gradients(mine, *operands), gradients(sdpa, *operands), strict=True):
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_op_is_one_graph_of_torch_compile():
    operands = problem()
    compiled = torch.compile(mine, fullgraph=True, dynamic=False, backend="aot_eager")
    assert all(map(torch.equal, gradients(compiled, *operands), gradients(mine, *operands)))


def test_op_takes_any_strides():
    q, k, v, weight = problem()
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    for found, expected in zip(gradients(mine, *turned, weight), gradients(mine, q, k, v, weight), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "change"),
    [("k", lambda x: x[:, :-1]), ("k", lambda x: x[..., :-1]), ("v", lambda x: x.float()), ("q", lambda x: x[0])],
)
def test_op_names_a_wrong_argument(name, change):
    operands = dict(zip("qkv", problem(), strict=False))
    operands[name] = change(operands[name])
    with pytest.raises(ValueError, match=f"{name} is torch.float|k is torch.float"):
        causal_attention(**operands, softmax_scale=0.3)


@pytest.mark.parametrize(
    ("length", "widths", "dtype", "device", "why"),
    [
        (512, (128, 64), torch.bfloat16, "cpu", "runs on CUDA"),
        (512, (128, 64), torch.float32, "cuda", "not float32"),
        (500, (128, 64), torch.bfloat16, "cuda", "the length is 500; its gradients take multiples of 128"),
        (512, (256, 136), torch.bfloat16, "cuda", r"d_qk \+ d_v is 416; its gradients take up to 384"),
    ],
)
def test_explain_names_the_limit(length, widths, dtype, device, why):
    assert re.search(why, explain_causal_attention(length, 4, widths, dtype, torch.device(device)))


@pytest.mark.parametrize("widths", [(32, 16), (256, 128)], ids=str)
def test_kernels_on_the_cpu_target_are_the_reference(widths):
    """Tiles of 32 rows, and two windows so that one may not read the other."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.attention_varlen import gradients as kernels
    from mha2mla.kernels.machine import Machine

    windows, length, heads = 2, 96, 3
    q, k, v, d_out = (x.detach().flatten(0, 1) for x in problem(windows, length, heads, widths, dtype=torch.float32))
    lse, delta = (torch.randn(heads, windows * length) for _ in range(2))
    operands = (q, k, v, d_out, lse + 4, delta)  # weights need not add up to one
    scale = 1.7 * widths[0] ** -0.5
    expected = gradients_reference(*operands, scale, length)
    shape = kernels.GradientShape(heads, widths, "float32")
    found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    for make, outputs in ((kernels.make_key_gradients, found[1:]), (kernels.make_query_gradients, found[:1])):
        for_cpu(make(shape, rows=32, machine=Machine(on_cpu=True)))(*operands, *outputs, scale, length)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


@few(
    "widths",
    [(192, 64), (128, 64), (128, 128), (64, 64), (160, 64), (192, 128), (256, 96), (256, 128)],
    count=1,
    ids=str,
)
def test_kernels_fit_a_hopper(widths):
    """No spills, no serialised wgmma, loads by TMA."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.attention_varlen import gradients as kernels
    from mha2mla.kernels.machine import SPECIALISED_PASS_CONFIGS

    shape = kernels.GradientShape(14, widths, "bfloat16")
    for make in (kernels.make_key_gradients, kernels.make_query_gradients):
        report = gate(make(shape), SPECIALISED_PASS_CONFIGS)
        assert report.instructions is None or {"HGMMA", "UTMALDG"} <= set(report.instructions), report.instructions


def test_warpgroups_ask_for_the_registers_that_they_have():
    """More would wait for ever. Three warpgroups start with what a multiprocessor has for 384 threads, in eights."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.attention_varlen import gradients as kernels

    started = 65536 // (3 * 128) // 8 * 8
    for loads, computes in (kernels.REGISTERS, *kernels.FULL_REGISTERS.values()):
        assert loads + 2 * computes <= 3 * started


def test_second_derivatives_are_refused_and_nothing_is_something():
    q, k, v, _ = problem()
    (once,) = torch.autograd.grad(mine(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        once.sum().backward()
    for shape in ((2, 0, 3), (0, 128, 3), (2, 128, 0)):
        assert mine(*(q.new_zeros(*shape, 8) for _ in range(3))).shape == (*shape, 8)
