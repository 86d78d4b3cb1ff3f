"""Weights, and results as near to float64 as torch's."""

from __future__ import annotations

import torch


def per_head(tokens, heads, weights, inner, outer, dtype=torch.float32, device="cpu"):
    """x [tokens, heads, inner], part of a wider projection, and weights [weights, inner, outer]."""
    make = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, heads, inner + 16, generator=make).to(device, dtype)[..., 16:]
    return x, torch.randn(weights, inner, outer, generator=make).mul(inner**-0.5).to(device, dtype)


def assert_as_near_as_torch(out, plain, exact):
    """At most twice the error of ``plain``, torch's at the same dtype, against float64."""
    error, torchs = (float((each.double() - exact).norm() / exact.norm()) for each in (out, plain))
    assert error <= 2 * torchs
