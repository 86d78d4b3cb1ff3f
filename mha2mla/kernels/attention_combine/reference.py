"""The oracle of ``attention_combine``: plain torch, any device, float64-capable. Speed may not live here."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_combine_reference(
    partial_out: Tensor, partial_lse: Tensor, num_splits: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """``sum_n exp(lse_n) out_n / sum_n exp(lse_n)`` and the log of the denominator (flash-decoding's merge).

    Shapes as in :func:`mha2mla.kernels.attention_combine`. float64 arithmetic for float64 outputs, else float32.
    """
    arithmetic = torch.float64 if partial_out.dtype == torch.float64 else torch.float32
    lse = partial_lse.to(arithmetic)
    if num_splits is not None:
        place = torch.arange(lse.shape[0], device=lse.device)[:, None]
        lse = torch.where((place < num_splits)[..., None, None], lse, -torch.inf)
    total = torch.logsumexp(lse, dim=0) if lse.shape[0] else lse.new_full(lse.shape[1:], -torch.inf)
    weight = torch.exp(lse - torch.where(total == -torch.inf, 0, total))  # [N, B, H, S_q]
    weight = weight.transpose(2, 3)[..., None]
    part = torch.where(weight > 0, partial_out.to(arithmetic), 0)  # a part without weight may hold anything
    return (weight * part).sum(0).to(dtype or partial_out.dtype), total
