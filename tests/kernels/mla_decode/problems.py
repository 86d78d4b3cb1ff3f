"""Helpers of decode tests: a problem's name, a judged run on a GPU, a call over fp8 latents."""

from __future__ import annotations

import torch

from mha2mla.kernels import dequantize_latent, mla_decode, quantize_latent
from tests.kernels.problems import Problem, assert_right, poison_unseen_pages


def name(problem: Problem) -> str:
    return (
        f"H{problem.heads}-G{problem.num_rope_heads}-c{problem.kv_lora_rank}-r{problem.qk_rope_head_dim}"
        f"-p{problem.page_size}-q{problem.seqlen_q}"
    )


def check(problem: Problem, dtype=torch.bfloat16, planned: bool | None = None) -> torch.Tensor:
    """Runs the op on a problem, by a plan or (without a window) by one made for the call, and judges the output."""
    inputs = poison_unseen_pages(problem, problem.inputs(dtype, "cuda"))
    plan = problem.plan(inputs, "tilelang") if planned or problem.window is not None else None
    if plan is not None:
        plan.partial_out.fill_(torch.nan)
        plan.partial_lse.fill_(torch.nan)
    out, lse = mla_decode(**inputs, plan=plan, return_lse=True, backend="tilelang")
    assert_right(inputs, out, lse, dtype, **problem.visibility)
    return out


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def fp8_inputs(problem: Problem, dtype: torch.dtype, device="cpu") -> tuple[dict, dict]:
    """Arguments of ``mla_decode`` over fp8 latents, and over what the cache then holds: its latents are rounded to no
    16-bit type, so they are float64 here. What no query sees is NaN in codes and in scales."""
    inputs = problem.inputs(dtype, device)
    codes, scale = quantize_latent(inputs["latent_cache"])
    held = inputs | {"latent_cache": dequantize_latent(codes, scale, torch.float64)}
    del inputs["latent_cache"]
    return inputs | {"latent_cache": codes, "latent_scale": scale}, held
