"""Attention of whole windows: transformers' layout in, its results and gradients out."""

import pytest
import torch

from mha2mla.modeling.window_attention import explain_window_attention, window_attention


@pytest.mark.parametrize("scaling", [None, 0.2])
def test_window_attention_is_causal_sdpa(scaling):
    query, key = (torch.randn(2, 3, 20, 16, dtype=torch.float64).requires_grad_() for _ in range(2))
    value = torch.randn(2, 3, 20, 8, dtype=torch.float64).requires_grad_()
    mine = window_attention(query, key, value, scaling)
    sdpa = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    assert torch.allclose(mine, sdpa.transpose(1, 2))
    weight = torch.randn_like(mine)
    for one, other in zip(
        torch.autograd.grad((mine * weight).sum(), (query, key, value)),
        torch.autograd.grad((sdpa.transpose(1, 2) * weight).sum(), (query, key, value)),
        strict=True,
    ):
        assert torch.allclose(one, other)


def test_explain_names_lengths_that_differ():
    query, key = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 5, 8)
    assert "3 queries and 5 keys" in explain_window_attention(query, key, key)
