"""Rotary position embedding from a layer's own table of frequencies, one row per rope head."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_cos_sin(position_ids: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of ``position * inv_freq``, times ``scaling``.

    Args:
        position_ids: [B or 1, S] integers.
        inv_freq: [G, d_r / 2] float32, radians per token.
        scaling: attention factor of YaRN and longrope, else 1. A frequency of zero stands for dims that the source does
            not rotate (part of a head, or a layer without RoPE), and it leaves those alone.
        dtype: of the result. Angles are float32 whatever it is: bfloat16 cannot count positions beyond 256.

    Returns:
        Two tensors [B or 1, S, G, d_r / 2].
    """
    angle = position_ids[..., None, None].to(torch.float32) * inv_freq.to(torch.float32)
    cos, sin = angle.cos(), angle.sin()
    if scaling != 1.0:
        factor = torch.where(inv_freq == 0, torch.ones_like(inv_freq), scaling)
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs (j, j + d_r / 2) of the last dimension: the halves layout of Llama.

    Args:
        x: [B, S, G, …, d_r].
        cos, sin: [B or 1, S, G, d_r / 2]; dimensions between G and d_r share them.
    """
    missing = x.dim() - cos.dim()
    cos, sin = (t.reshape(*t.shape[:3], *[1] * missing, t.shape[-1]) for t in (cos, sin))
    return turn(x, cos, sin)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (j, j + d_r / 2) of x [..., d_r] as complex numbers, times cos + i sin, [..., d_r / 2] each."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
