"""Number formats of 8-bit caches: e4m3 latents, int8 rotary keys, one scale a token. Plain torch, any device."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels.ops import argument_error

CODES = torch.float8_e4m3fn
LARGEST_CODE = 448.0
KEY_CODES = torch.int8
LARGEST_KEY_CODE = 127
# Rows below are stored with this scale and keep fewer digits: `weight / scale` in the kernel must stay a float32.
SMALLEST_SCALE = 2.0**-32
# A factor and no divisor: torch divides by a Python number on CUDA as it multiplies by its float32 reciprocal.
SCALE_OF_LARGEST, KEY_SCALE_OF_LARGEST = 1 / LARGEST_CODE, 1 / LARGEST_KEY_CODE


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
    quotients, scale = _scaled(latent, SCALE_OF_LARGEST)
    return quotients.clamp(-LARGEST_CODE, LARGEST_CODE).to(CODES), scale


def quantize_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary keys [..., d_r] as integers from -127 to 127 and a scale each: ``keys ≈ codes * scale``.

    ``scale = max |row| * (1 / 127)``, else as of :func:`quantize_latent`; each code is rounded to nearest even, so that
    no element errs by more than half the scale. A row with a NaN or an infinity has the scale NaN.

    Returns:
        codes [..., d_r] int8 and scale [...] float32.
    """
    quotients, scale = _scaled(keys, KEY_SCALE_OF_LARGEST)
    return quotients.nan_to_num(0).round().to(KEY_CODES), scale


def _scaled(rows: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Rows over their scales, and the scales, ``factor`` times a row's largest."""
    wide = rows.float()
    largest = wide.abs().amax(-1) if rows.shape[-1] else wide.new_zeros(wide.shape[:-1])
    scale = (largest * factor).clamp_min(SMALLEST_SCALE)
    scale = torch.where(largest == 0, 1.0, scale)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return wide / scale[..., None], scale


def dequantize_latent(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``codes * scale`` [..., d_c] in ``dtype``; one rounding where that has at least float32's digits."""
    return codes.to(dtype) * scale[..., None].to(dtype)
