"""The oracle of the varlen attention ops: plain torch, any device, float64-capable."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels.ops import accumulator


def attention_varlen_reference(
    queries: list[Tensor],
    keys: list[Tensor],
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[Tensor, Tensor]:
    """``softmax(softmax_scale * sum_i queries[i] keys[i]^T) v`` of each sequence by itself.

    Args:
        queries: parts [T_q, H, d_i] of the queries; a score is the sum of their products with the keys' parts.
        keys: parts [T_k, G_i, d_i]; query head h meets head h // (H / G_i) of part i.
        v: [T_k, G_v, d_v].
        cu_seqlens_q, cu_seqlens_k, causal, window, sinks: as in :func:`mha2mla.kernels.attention_varlen`.

    The arithmetic is float64 for float64 inputs and float32 for all others; only ``out`` is rounded to the input's
    dtype. Keys and values of other sequences, behind the last one, and that a query does not see are never used: NaN
    stays in its request. Reads no tensor on the host (but of the CPU).

    Returns:
        ``out [T_q, H, d_v]`` and ``lse [H, T_q]`` (natural log) in the dtype of the arithmetic. A query that sees no
        key, or lies behind the last sequence, gives zeros and ``-inf``.
    """
    dtype = accumulator(v.dtype)
    tokens_q, heads, _ = queries[0].shape
    tokens_k = v.shape[0]
    device = v.device
    # Sequence (-1 behind the last one), position in it and length, of every query and key
    query_of, query_position, query_length = _positions(cu_seqlens_q, tokens_q, device)
    key_of, key_position, key_length = _positions(cu_seqlens_k, tokens_k, device)
    visible = (query_of[:, None] == key_of) & (query_of[:, None] >= 0)
    if causal:  # bottom-right aligned: the last query sees everything
        behind = (query_position - query_length)[:, None] - (key_position - key_length)  # distance to the key
        visible = visible & (behind >= 0)
        if window is not None:
            visible = visible & ((behind < window) | (key_position < sinks))
    used = visible.any(0)[:, None, None]

    def wide(x: Tensor) -> Tensor:  # of keys and values, for every query head
        x = torch.where(used, x.to(dtype), 0)
        return x.repeat_interleave(heads // x.shape[1], 1)

    score = sum(torch.einsum("qhd,khd->hqk", q.to(dtype), wide(k)) for q, k in zip(queries, keys, strict=True))
    score = torch.where(visible, score * softmax_scale, -torch.inf)
    lse = torch.logsumexp(score, -1) if tokens_k else score.new_full(score.shape[:2], -torch.inf)
    weight = torch.exp(score - torch.where(lse == -torch.inf, 0, lse)[..., None])
    return weighted_sum(weight, visible, wide(v)).to(v.dtype), lse


def _positions(bounds: Tensor, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    token = torch.arange(tokens, device=device, dtype=bounds.dtype)
    if bounds.shape[0] < 2:
        return torch.full_like(token, -1), token, token
    sequence = torch.searchsorted(bounds, token, right=True) - 1
    inside = token < bounds[-1]
    sequence = torch.where(inside, sequence, 0)
    first = bounds[sequence]
    return torch.where(inside, sequence, -1), token - first, bounds[sequence + 1] - first


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
