"""The oracle of ``mla_decode``: plain torch, any device, float64-capable. Speed may not live here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels.latent_rope import LatentRope, rotary_keys
from mha2mla.kernels.mla_decode.quantization import dequantize_latent
from mha2mla.kernels.split_kv.reference import rows_of, visible_tokens, weights


def mla_decode_reference(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    cache_starts: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[Tensor, Tensor]:
    """``softmax(softmax_scale * (q_latent c^T + q_pe k_pe^T)) c`` over each sequence's pages (DeepSeek-V2, 2.1).

    Shapes as in :func:`mha2mla.kernels.mla_decode`; ``window`` and ``sinks`` as in
    :func:`mha2mla.kernels.plan_mla_decode`. The arithmetic is float64 for float64 inputs and float32 for all
    others; only ``out`` is rounded to the input's dtype. Values of tokens that no query sees are never used, so NaN in
    unused pages does not matter. Reads no tensor on the host.

    Returns:
        ``out [B, S_q, H, d_c]`` in the dtype of ``q_latent`` and ``lse [B, H, S_q]`` (natural log) in the dtype of the
        arithmetic. A query that sees no token gives zeros and ``-inf``.
    """
    dtype = _arithmetic(q_latent)
    visible, used, page, row = _tokens(
        q_latent, *rope_cache.shape[:2], block_table, cache_seqlens, cache_starts, causal, window, sinks
    )
    latent = torch.where(used[..., None], latent_cache[page, row].to(dtype), 0)
    k_pe = torch.where(used[..., None, None], rope_cache[page, row].to(dtype), 0)
    return _attend(q_latent, q_pe, latent, k_pe, visible, softmax_scale)


def _arithmetic(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _tokens(
    query: Tensor, num_pages: int, page_size: int, block_table: Tensor, cache_seqlens: Tensor,
    cache_starts: Tensor | None, causal: bool, window: int | None, sinks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Which token each query sees [B, 1, S_q, T], and what ``rows_of`` says of the tokens."""
    capacity = block_table.shape[1] * page_size if num_pages else 0
    visible = visible_tokens(cache_seqlens, cache_starts, capacity, query.shape[1], causal, window, sinks)
    return (visible, *rows_of(visible, block_table, page_size, num_pages))


def _attend(
    q_latent: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, visible: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over tokens in a row: latent [B, T, d_c] and k_pe [B, T, G, d_r] in the dtype of the arithmetic."""
    dtype, num_rope_heads = latent.dtype, k_pe.shape[2]
    grouped = q_pe.to(dtype).unflatten(2, (num_rope_heads, q_pe.shape[2] // num_rope_heads))
    score = torch.einsum("bshd,btd->bhst", q_latent.to(dtype), latent)
    score = score + torch.einsum("bsgrd,btgd->bgrst", grouped, k_pe).reshape(score.shape)
    score = torch.where(visible, score * softmax_scale, -torch.inf)
    lse = torch.logsumexp(score, dim=-1)
    weight = weights(score, lse)
    out = torch.einsum("bhst,btd->bshd", weight, latent)
    return out.to(q_latent.dtype), lse


def mla_decode_fp8_reference(
    q_latent: Tensor, q_pe: Tensor, latent_cache: Tensor, latent_scale: Tensor, *call: Any, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """:func:`mla_decode_reference` on the dequantised cache, whose numbers are not rounded to the queries' dtype; the
    same arguments follow."""
    latent = dequantize_latent(latent_cache, latent_scale, _arithmetic(q_latent))
    return mla_decode_reference(q_latent, q_pe, latent, *call, **keywords)


def mla_decode_latent_reference(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_weight: Tensor,
    rope_bias: Tensor,
    inv_freq: Tensor,
    page_offsets: Tensor | None,
    scaling: float,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    cache_starts: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[Tensor, Tensor]:
    """:func:`mla_decode_reference` with one rope head whose keys :func:`rotary_keys` makes of the latents read.

    The keys are not rounded. Arguments as the fields of :class:`LatentRope`, the others as there, and what it returns.
    """
    dtype = _arithmetic(q_latent)
    visible, used, page, row = _tokens(
        q_latent, *latent_cache.shape[:2], block_table, cache_seqlens, cache_starts, causal, window, sinks
    )
    latent = torch.where(used[..., None], latent_cache[page, row].to(dtype), 0)
    token = torch.arange(latent.shape[1], device=latent.device)
    positions = token.expand(latent.shape[:2])
    if page_offsets is not None:
        positions = positions + page_offsets.long()[:, token // latent_cache.shape[1]]
    k_pe = rotary_keys(latent, LatentRope(rope_weight, rope_bias, inv_freq, scaling), positions)
    return _attend(q_latent, q_pe, latent, k_pe[:, :, None], visible, softmax_scale)


def mla_decode_latent_fp8_reference(
    q_latent: Tensor, q_pe: Tensor, latent_cache: Tensor, latent_scale: Tensor, *call: Any, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """:func:`mla_decode_latent_reference` on the dequantised cache, whose numbers are not rounded to the queries'
    dtype; the same arguments follow."""
    latent = dequantize_latent(latent_cache, latent_scale, _arithmetic(q_latent))
    return mla_decode_latent_reference(q_latent, q_pe, latent, *call, **keywords)
