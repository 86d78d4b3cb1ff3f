"""The gradient kernels on a Hopper: as exact as FlashAttention's, and the same bits every time."""

from __future__ import annotations

import pytest
import torch

from mha2mla.kernels import explain_causal_attention
from mha2mla.testing.numeric_check import errors
from tests.gpu import graph_of
from tests.kernels.attention_varlen.test_causal_attention import gradients, mine, problem, sdpa

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("windows", "length", "heads", "widths"),
    [
        (1, 128, 1, (128, 64)),
        (3, 512, 14, (128, 64)),
        (1, 4096, 2, (128, 64)),
        (2, 1024, 9, (192, 64)),
        (2, 640, 9, (104, 64)),
        (1, 1024, 4, (64, 64)),
        (1, 1024, 4, (128, 128)),
        (1, 512, 2, (160, 64)),
        (1, 1024, 4, (192, 128)),
        (2, 384, 3, (256, 64)),
        (2, 384, 3, (256, 128)),
    ],
)
def test_gradients_are_as_exact_as_flash_attentions(windows, length, heads, widths):
    assert explain_causal_attention(length, heads, widths, torch.bfloat16, torch.device("cuda")) is None
    operands = problem(windows, length, heads, widths, torch.bfloat16, "cuda")
    exact = gradients(sdpa, *(x.detach().double().requires_grad_() for x in operands))
    first, theirs = gradients(mine, *operands), gradients(sdpa, *operands)
    for name, found, other, expected in zip(("out", "dq", "dk", "dv"), first, theirs, exact, strict=True):
        error, of_flash = (errors(x, expected)[0] for x in (found, other))
        assert error <= 1.5 * of_flash + 1e-4, (name, error, of_flash)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(mine, *operands), strict=True))


def test_gradients_come_from_a_captured_graph():
    q, k, v, weight = problem(2, 512, 14, (128, 64), torch.bfloat16, "cuda")
    expected = gradients(mine, q, k, v, weight)
    graph, found = graph_of(lambda: gradients(mine, q, k, v, weight))
    for x in found:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
