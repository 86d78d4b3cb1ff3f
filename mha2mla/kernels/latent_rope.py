"""Rotary keys of a cache of the latent alone: nothing rotary is cached, they are computed from the latent when read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mha2mla.kernels.layouts import argument_error


@dataclass(frozen=True, eq=False)
class LatentRope:
    """Parameters that turn a cached latent ``c[t]`` into its rotary key, ``k_pe[t] = m R(t) (W_KR c[t] + b_KR)``.

    One rope head serves all query heads. R(t) turns the pairs (j, j + d_r / 2) by ``t * inv_freq[j]``; m is
    ``scaling``, and 1 for pairs whose frequency is zero (dims that the source does not rotate).

    Attributes:
        weight: W_KR [d_r, d_c], in the dtype of the cache (of the queries, where latents are e4m3).
        bias: b_KR [d_r], in the dtype of ``weight``.
        inv_freq: [d_r / 2] float32, radians per token.
        scaling: m, the attention factor of YaRN and longrope; else 1.
        page_offsets: [B, max_pages] int32, added to a token's place in its sequence for its rotary position, page by
            page of the block table; None: 0.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """

    weight: Tensor
    bias: Tensor
    inv_freq: Tensor
    scaling: float = 1.0
    page_offsets: Tensor | None = None

    def __post_init__(self) -> None:
        if self.weight.dim() != 2 or self.weight.shape[0] % 2:
            raise argument_error("rope.weight.shape", tuple(self.weight.shape), "[d_r, d_c] with an even d_r")
        width = self.weight.shape[0]
        for name, tensor, size in (("bias", self.bias, width), ("inv_freq", self.inv_freq, width // 2)):
            if tensor.dim() != 1 or tensor.shape[0] != size:
                raise argument_error(f"rope.{name}.shape", tuple(tensor.shape), f"[{size}] for {width} rotary dims")
        if not isinstance(self.scaling, (int, float)) or not 0 < self.scaling < math.inf:
            raise argument_error("rope.scaling", repr(self.scaling), "a positive finite number")


def rotary_keys(latent: Tensor, rope: LatentRope, positions: Tensor) -> Tensor:
    """The rotary keys of latents at their positions: the definition, in plain torch, differentiable.

    Args:
        latent: [..., d_c], any floating dtype.
        rope: its ``page_offsets`` are not looked at.
        positions: [...] integers, broadcast against the latents': rotary positions, offsets included.

    Returns:
        k_pe [..., d_r] in the dtype of ``latent``. Angles, cos and sin are float64 (a float32 angle at position 131,072
        is off by up to 4e-3); products and rotation float64 for float64 latents, float32 for all others.
    """
    dtype = torch.float64 if latent.dtype == torch.float64 else torch.float32
    raw = torch.nn.functional.linear(latent.to(dtype), rope.weight.to(dtype), rope.bias.to(dtype))
    return rotate_keys(raw, rope.inv_freq, rope.scaling, positions).to(latent.dtype)


def rotate_keys(raw: Tensor, inv_freq: Tensor, scaling: float, positions: Tensor) -> Tensor:
    """Rotates W_KR c + b_KR, ``raw`` [..., d_r], at its ``positions``: the second half of :func:`rotary_keys`.

    Args:
        inv_freq, scaling: as in :class:`LatentRope`.
        positions: [...] integers, broadcast against those of ``raw``.

    Returns:
        [..., d_r] in the dtype of ``raw``; products float64 for float64, float32 for all others.
    """
    dtype = torch.float64 if raw.dtype == torch.float64 else torch.float32
    frequency = inv_freq.to(torch.float64)
    angle = positions[..., None].to(torch.float64) * frequency
    factor = torch.ones_like(frequency).masked_fill(frequency != 0, scaling)
    cos, sin = (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)
    first, second = raw.to(dtype).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(raw.dtype)
