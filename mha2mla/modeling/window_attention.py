"""Attention of whole windows in transformers' layout, for what differentiates through converted layers."""

from __future__ import annotations

from torch import Tensor

from mha2mla.kernels import causal_attention, explain_causal_attention


def explain_window_attention(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why :func:`window_attention` has no kernels for these tensors, or None."""
    if not 1 < query.shape[2] == key.shape[2]:
        return f"there are {query.shape[2]} queries and {key.shape[2]} keys; it takes as many, and more than one"
    widths = (query.shape[-1], value.shape[-1])
    return explain_causal_attention(query.shape[2], query.shape[1], widths, query.dtype, query.device)


def window_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Causal attention of query and key [B, H, S, d_qk] and value [B, H, S, d_v]: [B, S, H, d_v], contiguous.

    Args:
        scaling: of the scores; None for d_qk ** -0.5.
    """
    operands = (x.transpose(1, 2) for x in (query, key, value))
    return causal_attention(*operands, softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling)
