"""Attention for gradients: transformers' on a CPU; on a GPU the same numbers, and the same bits every time."""

import pytest
import torch
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mha2mla.conversion.fit.repeatable import _Attention, repeatable_attention
from tests.ops import Calls


class Module(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 3


def tensors(device="cpu", dtype=torch.float32, length=160, widths=(48, 32)):
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, widths[0]), (2, widths[0]), (2, widths[1]))
    return [
        torch.randn(2, heads, length, width, generator=generator).to(device, dtype).requires_grad_()
        for heads, width in shapes
    ]


def gradients(attend, inputs, mask=None):
    out, _ = attend(Module(), *inputs, mask, scaling=0.2)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out, torch.autograd.grad((out * weights).sum(), inputs)


def banded(length, device="cpu"):
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None]
    return ((distance >= 0) & (distance < 40))[None, None]


@pytest.mark.parametrize("window", [False, True])
def test_on_a_cpu_it_is_transformers(window):
    mask = banded(160) if window else None
    inputs = tensors()
    mine, by_me = gradients(repeatable_attention, inputs, mask)
    theirs, by_them = gradients(sdpa_attention_forward, inputs, mask)
    assert torch.equal(mine, theirs)
    assert all(torch.equal(one, other) for one, other in zip(by_me, by_them, strict=True))


def test_the_backward_pass_is_sdpas_and_leaves_the_settings():
    query, key, value = (
        tensor.detach().repeat_interleave(6 // tensor.shape[1], 1).requires_grad_() for tensor in tensors()
    )
    options = {"attn_mask": None, "is_causal": True, "scale": 0.2}
    outs = [_Attention.apply(query, key, value, options), F.scaled_dot_product_attention(query, key, value, **options)]
    weights = torch.randn_like(outs[0])
    mine, theirs = (torch.autograd.grad((out * weights).sum(), (query, key, value)) for out in outs)
    assert torch.equal(outs[0], outs[1])
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_step_runs_each_pass_once():
    query, key, value = (tensor.detach()[:, :2].requires_grad_() for tensor in tensors(widths=(32, 32)))
    options = {"attn_mask": None, "is_causal": True, "scale": 0.2}
    with Calls() as calls:
        made = _Attention.apply(query, key.detach(), value, options)
        found = torch.autograd.grad(made.sum(), (query, value))
    assert ["backward" in name for name in calls.names if "scaled_dot_product" in name] == [False, True]
    assert len(found) == 2
    with torch.no_grad():
        assert not _Attention.apply(query, key, value, options).requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_repeats(dtype, window):
    mask = banded(512, "cuda") if window else None
    inputs = tensors("cuda", dtype, 512, (96, 64))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wanted, by_them = gradients(sdpa_attention_forward, exact, mask)
    first, by_first = gradients(repeatable_attention, inputs, mask)
    bound = 4 * torch.finfo(torch.bfloat16 if dtype is torch.bfloat16 else torch.float16).eps  # TF32 has float16's bits
    for found, expected in zip((first, *by_first), (wanted, *by_them), strict=True):
        assert (found.double() - expected).norm() <= bound * expected.norm()
    for _ in range(5):
        again, by_again = gradients(repeatable_attention, inputs, mask)
        assert torch.equal(first, again)
        assert all(torch.equal(one, other) for one, other in zip(by_first, by_again, strict=True))


@pytest.mark.gpu
def test_what_no_kernel_takes_is_said_once():
    inputs = tensors("cuda", torch.bfloat16, 200, (96, 64))
    with pytest.warns(UserWarning, match="the length is 200; its gradients take multiples of 128") as said:
        first, second = (gradients(repeatable_attention, inputs)[1] for _ in range(2))
    assert len(said) == 1 and all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
