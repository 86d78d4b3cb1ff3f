"""The oracle of ``mla_decode``: plain torch, any device, float64-capable. Speed may not live here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels.group_codes.api import GroupQuantizer
from mha2mla.kernels.latent_rope import LatentRope, rotary_keys
from mha2mla.kernels.layouts import accumulator
from mha2mla.kernels.mla_decode.codes_selection import code_of
from mha2mla.kernels.mla_decode.quantization import dequantize_latent
from mha2mla.kernels.split_kv.reference import attend, find_tokens


def mla_decode_reference(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    **visibility: Any,
) -> tuple[Tensor, Tensor]:
    """``softmax(softmax_scale * (q_latent c^T + q_pe k_pe^T)) c`` over each sequence's pages (DeepSeek-V2, 2.1).

    Shapes as in :func:`mha2mla.kernels.mla_decode`; ``visibility``: ``causal``, ``cache_starts``, and as in
    :func:`mha2mla.kernels.plan_mla_decode` ``window`` and ``sinks``. The arithmetic is float64 for float64 inputs and
    float32 for all others; only ``out`` is rounded to the input's dtype. Values of tokens that no query sees are never
    used, so NaN in unused pages does not matter. Reads no tensor on the host.

    Returns:
        ``out [B, S_q, H, d_c]`` in the dtype of ``q_latent`` and ``lse [B, H, S_q]`` (natural log) in the dtype of the
        arithmetic. A query that sees no token gives zeros and ``-inf``.
    """
    tokens = find_tokens(q_latent, rope_cache, block_table, cache_seqlens, **visibility)
    latent = tokens.read(latent_cache)[:, :, None]
    return attend((q_latent, q_pe), (latent, tokens.read(rope_cache)), latent, tokens, softmax_scale)


def mla_decode_fp8_reference(
    q_latent: Tensor, q_pe: Tensor, latent_cache: Tensor, latent_scale: Tensor, *call: Any, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """:func:`mla_decode_reference` on the dequantised cache, whose numbers are not rounded to the queries' dtype; the
    same arguments follow."""
    latent = dequantize_latent(latent_cache, latent_scale, accumulator(q_latent.dtype))
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
    **visibility: Any,
) -> tuple[Tensor, Tensor]:
    """:func:`mla_decode_reference` with one rope head whose keys :func:`rotary_keys` makes of the latents read.

    The keys are not rounded. Arguments as the fields of :class:`LatentRope`, the others as there, and what it returns.
    """
    tokens = find_tokens(q_latent, latent_cache, block_table, cache_seqlens, **visibility)
    latent = tokens.read(latent_cache)
    token = torch.arange(latent.shape[1], device=latent.device)
    positions = token.expand(latent.shape[:2])
    if page_offsets is not None:
        positions = positions + page_offsets.long()[:, token // latent_cache.shape[1]]
    k_pe = rotary_keys(latent, LatentRope(rope_weight, rope_bias, inv_freq, scaling), positions)[:, :, None]
    latent = latent[:, :, None]
    return attend((q_latent, q_pe), (latent, k_pe), latent, tokens, softmax_scale)


def mla_decode_latent_fp8_reference(
    q_latent: Tensor, q_pe: Tensor, latent_cache: Tensor, latent_scale: Tensor, *call: Any, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """:func:`mla_decode_latent_reference` on the dequantised cache, whose numbers are not rounded to the queries'
    dtype; the same arguments follow."""
    latent = dequantize_latent(latent_cache, latent_scale, accumulator(q_latent.dtype))
    return mla_decode_latent_reference(q_latent, q_pe, latent, *call, **keywords)


def mla_decode_codes_reference(
    q_latent: Tensor, q_pe: Tensor, latent_cache: Tensor, centers: Tensor, *call: Any, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """:func:`mla_decode_reference` on the dequantised cache, whose numbers are not rounded to the queries' dtype; the
    same arguments follow."""
    width = q_latent.shape[-1]
    quantizer = GroupQuantizer(*code_of(width, latent_cache.shape[-1]))
    latent = quantizer.decode(latent_cache, width, accumulator(q_latent.dtype), centers)
    return mla_decode_reference(q_latent, q_pe, latent, *call, **keywords)
