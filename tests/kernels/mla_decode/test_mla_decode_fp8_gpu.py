"""Decode over fp8 latents on a GPU: against float64, poisoned codes and scales, strides, graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mha2mla.kernels import dequantize_latent, mla_decode, plan_mla_decode, quantize_latent
from mha2mla.kernels.mla_decode.quantization import CODES
from mha2mla.testing.problems import Problem, judge
from tests.kernels.mla_decode.problems import fp8_inputs


def check(problem: Problem, dtype=torch.bfloat16, planned: bool = False) -> torch.Tensor:
    """The kernel on a problem, with NaN in all workspace and wherever nobody may look; torch's error at ``dtype`` is
    taken over the cache that holds the dequantised latents rounded to ``dtype``, float64's over those not rounded."""
    inputs, held = fp8_inputs(problem, dtype, "cuda")
    plan = None
    if planned or problem.window is not None:
        plan = plan_mla_decode(
            inputs["q_latent"], inputs["rope_cache"], inputs["block_table"], inputs["cache_seqlens"],
            qk_rope_head_dim=problem.qk_rope_head_dim, cache_starts=inputs["cache_starts"], causal=problem.causal,
            backend="tilelang", latent_dtype=CODES, **problem.visibility,
        )  # fmt: skip
        plan.partial_out.fill_(torch.nan)
        plan.partial_lse.fill_(torch.nan)
    out, lse = mla_decode(**inputs, plan=plan, return_lse=True, backend="tilelang")
    judgement = judge(held, out, lse, **problem.visibility)
    assert judgement.ok, judgement.reason
    return out


GPU = [
    Problem(32, 1, 512, 64, (0, 1, 63, 64, 65, 127, 128, 129, 700, 2000)),
    Problem(32, 1, 512, 64, (0, 1, 15, 16, 17, 700), page_size=16),
    Problem(16, 1, 512, 64, (5, 300, 1000)),
    Problem(32, 8, 512, 16, (1, 4000)),
    Problem(9, 3, 80, 24, (5, 300), page_size=128),
    Problem(40, 40, 192, 8, (65, 300)),
    Problem(128, 1, 512, 64, (65, 300)),
    Problem(1, 1, 16, 8, (1, 300)),
    Problem(24, 24, 320, 16, (3, 190)),
]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "problem", GPU, ids=lambda p: f"H{p.heads}-G{p.num_rope_heads}-c{p.kv_lora_rank}-p{p.page_size}"
)
def test_no_shape_reads_poison_or_drops_heads_on_the_gpu(problem):
    out = check(problem)
    for _ in range(3):
        assert torch.equal(out, check(problem, planned=True))


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_float16_windows_starts_and_large_scores_on_the_gpu():
    problem = GPU[0]
    check(problem, torch.float16)
    for scale in (1e-4, 100.0, 4e5):  # float16 queries would overflow if they were only cast
        check(dataclasses.replace(problem, scale=scale))
    check(dataclasses.replace(problem, starts=(0, 1, 60, 64, 2, 100, 63, 64, 650, 1999)))
    for window, sinks in ((1, 0), (20, 4), (64, 64), (200, 70)):
        check(dataclasses.replace(problem, window=window, sinks=sinks))


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "problem",
    [
        Problem(16, 1, 512, 64, (0, 1, 2, 66, 200, 65, 130, 195), seqlen_q=2),
        Problem(6, 2, 64, 16, (0, 1, 3, 67, 200, 65, 130, 195), seqlen_q=3, starts=(0, 1, 0, 60, 190, 64, 7, 195)),
    ],
    ids=["H16", "H6"],
)
def test_several_new_tokens_are_aligned_bottom_right_on_the_gpu(problem):
    for causal in (True, False):
        check(dataclasses.replace(problem, causal=causal))


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_scales_far_apart_and_strided_caches_on_the_gpu():
    """Scales from 2^-30 to 2^20 in one sequence; codes and k_pe as views of larger pages."""
    problem = Problem(32, 1, 512, 64, (300, 70))
    inputs = problem.inputs(torch.bfloat16, "cuda")
    exponent = torch.randint(-30, 20, inputs["latent_cache"].shape[:2], device="cuda")
    exponent[:, ::2] = -3
    codes, scale = quantize_latent(inputs["latent_cache"].float() * torch.exp2(exponent.float())[..., None])
    held = inputs | {"latent_cache": dequantize_latent(codes, scale, torch.float64)}
    wide = torch.zeros(*codes.shape[:2], 640, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)[..., 64:576]
    wide.view(torch.uint8).copy_(codes.view(torch.uint8))
    scales = torch.full((len(scale), 128), torch.nan, device="cuda")[:, 64:]
    scales.copy_(scale)
    arguments = inputs | {"latent_cache": wide, "latent_scale": scales}
    out, lse = mla_decode(**arguments, return_lse=True, backend="tilelang")
    judgement = judge(held, out, lse)
    assert judgement.ok, judgement.reason
