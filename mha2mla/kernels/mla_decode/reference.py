"""The oracle of ``mla_decode``: plain torch, any device, float64-capable. Speed may not live here."""

from __future__ import annotations

import torch
from torch import Tensor

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
    batch, seqlen_q, heads, _ = q_latent.shape
    num_pages, page_size, num_rope_heads, rope_dim = rope_cache.shape
    dtype = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    capacity = block_table.shape[1] * page_size if num_pages else 0
    visible = visible_tokens(cache_seqlens, cache_starts, capacity, seqlen_q, causal, window, sinks)
    used, page, row = rows_of(visible, block_table, page_size, num_pages)
    latent = torch.where(used[..., None], latent_cache[page, row].to(dtype), 0)  # [B, T, d_c]
    k_pe = torch.where(used[..., None, None], rope_cache[page, row].to(dtype), 0)  # [B, T, G, d_r]

    grouped = q_pe.to(dtype).view(batch, seqlen_q, num_rope_heads, heads // num_rope_heads, rope_dim)
    score = torch.einsum("bshd,btd->bhst", q_latent.to(dtype), latent)
    score = score + torch.einsum("bsgrd,btgd->bgrst", grouped, k_pe).reshape(score.shape)
    score = torch.where(visible, score * softmax_scale, -torch.inf)
    lse = torch.logsumexp(score, dim=-1)
    weight = weights(score, lse)
    out = torch.einsum("bhst,btd->bshd", weight, latent)
    return out.to(q_latent.dtype), lse


def mla_decode_fp8_reference(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    latent_scale: Tensor,
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
    """:func:`mla_decode_reference` on the dequantised cache, whose numbers are not rounded to the queries' dtype.

    Returns:
        ``out [B, S_q, H, d_c]`` in the dtype of ``q_latent``, ``lse [B, H, S_q]`` in float32 (float64 for float64).
    """
    arithmetic = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    return mla_decode_reference(
        q_latent, q_pe, dequantize_latent(latent_cache, latent_scale, arithmetic), rope_cache, block_table,
        cache_seqlens, softmax_scale=softmax_scale, causal=causal, cache_starts=cache_starts, window=window,
        sinks=sinks,
    )  # fmt: skip
