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


def attention_combine_packed_reference(
    partial_out: Tensor, partial_lse: Tensor, cu_splits: Tensor, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The same of parts that lie one behind the other: shapes as in :func:`mha2mla.kernels.attention_combine_packed`.

    Every sequence's parts are put side by side, with -inf behind them, which is what the other form takes. Reads no
    tensor on the host (but of the CPU).
    """
    parts = partial_lse.shape[0]
    first, stop = (bounds.long().clamp(0, parts)[:, None] for bounds in (cu_splits[:-1], cu_splits[1:]))
    place = first + torch.arange(parts, device=cu_splits.device)  # [B, N]: more than any sequence has
    there = (place < stop)[..., None, None]
    place = place.clamp(max=max(0, parts - 1))
    lse = torch.where(there, partial_lse[place], -torch.inf)
    return attention_combine_reference(partial_out[place].transpose(0, 1), lse.transpose(0, 1), dtype=dtype)
