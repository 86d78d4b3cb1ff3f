"""The number format of the fp8 latent cache: e4m3 codes and one scale a token. Plain torch, any device."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels.ops import argument_error

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
