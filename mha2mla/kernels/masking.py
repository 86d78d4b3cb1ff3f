"""What references do where a weight of zero is not enough: 0 · NaN is NaN, and 0 · inf too. Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def weighted_sum(weight: Tensor, visible: Tensor, values: Tensor) -> Tensor:
    """``sum_k weight[h, q, k] values[k, h, d]`` over the keys that a query sees: [Q, H, d].

    NaN and infinities reach the queries that see them and no others, wherever they lie. Reads no device's memory on the
    host but the CPU's.

    Args:
        weight: [H, Q, K], zero where ``visible`` [Q, K] is not.
        values: [K, H, d].
    """
    finite = values.isfinite()
    out = torch.einsum("hqk,khd->qhd", weight, torch.where(finite, values, 0))
    if values.device.type == "cpu" and bool(finite.all()):
        return out
    kinds = torch.stack((values.isnan(), values == torch.inf, values == -torch.inf)).to(weight.dtype)
    seen = torch.einsum("qk,xkhd->xqhd", visible.to(weight.dtype), kinds) > 0
    for kind, found in zip((torch.nan, torch.inf, -torch.inf), seen, strict=True):
        out = out + torch.where(found, kind, 0.0)
    return out
