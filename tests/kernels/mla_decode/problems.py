"""What several decode tests make of a problem: a call over fp8 latents."""

from __future__ import annotations

import torch

from mha2mla.kernel_testing.problems import Problem
from mha2mla.kernels import dequantize_latent, quantize_latent


def fp8_inputs(problem: Problem, dtype: torch.dtype, device="cpu") -> tuple[dict, dict]:
    """Arguments of ``mla_decode`` over fp8 latents, and over what the cache then holds: its latents are rounded to no
    16-bit type, so they are float64 here. What no query sees is NaN in codes and in scales."""
    inputs = problem.inputs(dtype, device)
    codes, scale = quantize_latent(inputs["latent_cache"])
    held = inputs | {"latent_cache": dequantize_latent(codes, scale, torch.float64)}
    del inputs["latent_cache"]
    return inputs | {"latent_cache": codes, "latent_scale": scale}, held
