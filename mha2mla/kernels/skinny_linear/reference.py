"""The oracle of products of few rows: plain torch, any device."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def skinny_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, gated: bool) -> Tensor:
    """Oracle of :func:`mha2mla.kernels.skinny_linear`, for any number of rows."""
    if groups > 1:
        out = (x.unflatten(-1, (groups, 1, -1)) @ weight.unflatten(0, (groups, -1)).mT).flatten(-3)
        return out if bias is None else out + bias
    out = F.linear(x, weight, bias)
    if not gated:
        return out
    gate, up = out.chunk(2, dim=-1)
    return F.silu(gate) * up


def skinny_maps_reference(x: Tensor, maps: Tensor) -> Tensor:
    """Oracle of :func:`mha2mla.kernels.skinny_linear.api.skinny_maps`, for any number of tokens."""
    return (x.unflatten(-2, (len(maps), -1)) @ maps).flatten(-3, -2)
