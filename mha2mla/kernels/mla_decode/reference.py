"""The number format of e4m3 latents, a scale a token, and the oracles of ``mla_decode``: plain torch, any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels.latent_rope import LatentRope, rotary_keys
from mha2mla.kernels.layouts import accumulator, argument_error
from mha2mla.kernels.split_kv.reference import attend, find_tokens

CODES = torch.float8_e4m3fn
LARGEST_CODE = 448.0
# Rows below are stored with this scale and keep fewer digits: `weight / scale` in the kernel must stay a float32.
SMALLEST_SCALE = 2.0**-32
# A factor and no divisor: torch divides by a Python number on CUDA as it multiplies by its float32 reciprocal.
SCALE_OF_LARGEST = 1 / LARGEST_CODE


def holds_codes(latent_cache: Tensor, latent_scale: Tensor | None) -> bool:
    """True where a cache holds codes; raises ValueError unless scales are given exactly where it does."""
    codes = latent_cache.dtype == CODES
    if codes != (latent_scale is not None):
        was = f"{'None' if latent_scale is None else 'given'} for a latent_cache of {latent_cache.dtype}"
        raise argument_error("latent_scale", was, f"one exactly where latent_cache is {CODES}")
    return codes


def quantize_latent(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``latent`` [..., d_c] as e4m3 codes and a scale each: ``latent ≈ codes * scale``.

    ``scale = max |row| * (1 / 448)`` in float32, the factor rounded too, so the largest number of a row becomes ±448
    and each code is rounded to nearest even: relative error 2^-4 at most above 2^-6 of the scale. At least 2^-32; 1 for
    a row of zeros. A row with a NaN or an infinity becomes NaN whole (codes and scale): it stays visible, and touches
    no other row.

    Returns:
        codes [..., d_c] float8_e4m3fn and scale [...] float32.
    """
    wide = latent.float()
    largest = wide.abs().amax(-1) if latent.shape[-1] else wide.new_zeros(wide.shape[:-1])
    scale = (largest * SCALE_OF_LARGEST).clamp_min(SMALLEST_SCALE)
    scale = torch.where(largest == 0, 1.0, scale)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    codes = (wide / scale[..., None]).clamp(-LARGEST_CODE, LARGEST_CODE).to(CODES)
    return codes, scale


def dequantize_latent(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``codes * scale`` [..., d_c] in ``dtype``; one rounding where that has at least float32's digits."""
    return codes.to(dtype) * scale[..., None].to(dtype)


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
