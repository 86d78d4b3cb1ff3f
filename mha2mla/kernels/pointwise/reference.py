"""The oracle of the ops between products: plain torch, any device, the roundings of transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Oracle of :func:`mha2mla.kernels.rms_norm`, on any rows."""
    total = x if residual is None else residual + x
    wide = total.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype), total


def silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Oracle of :func:`mha2mla.kernels.silu_mul`, on any rows."""
    return F.silu(gate) * up
