"""The definition of the gradients of causal attention, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gradients_reference(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor, softmax_scale: float, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v: as ``launch.launch_gradients``; float32 inside, float64 of float64 tensors."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_w, k_w, v_w, d_out_w = (x.to(dtype).unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v, d_out))
    lse, delta = (x.to(dtype).unflatten(1, (-1, length)).transpose(0, 1)[..., None] for x in (lse, delta))
    weight = (q_w @ k_w.mT * softmax_scale - lse).exp().tril()  # [B, H, queries, keys]
    d_score = weight * (d_out_w @ v_w.mT - delta) * softmax_scale
    found = d_score @ k_w, d_score.mT @ q_w, weight.mT @ d_out_w
    return tuple(x.transpose(1, 2).flatten(0, 1).to(q.dtype) for x in found)
