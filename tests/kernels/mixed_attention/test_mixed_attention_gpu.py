"""The mixed-batch ops on a GPU: as right as torch, with no wait of the host."""

from __future__ import annotations

import pytest
import torch

from mha2mla.kernels import gqa_attention, plan_gqa_attention
from tests.kernels.mixed_attention.problems import SCALE, Problem, error, gqa_exact, gqa_problem, widths_on_gpu


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("widths", "dtype"),
    # Not every pair: each op's own tests have both dtypes, and a pair takes up to ten compilations.
    list(zip(widths_on_gpu(), (torch.bfloat16, torch.float16, torch.bfloat16, torch.bfloat16), strict=True)),
    ids=("per head", "per group", "shared", "from the latent"),
)
def test_kernels_are_as_right_as_torch(widths, dtype):
    lengths = ([1, 1, 4, 40, 300, 0, 1, 129], [700, 0, 90, 500, 1000, 5, 64, 0])
    problem = Problem.make(widths, lengths, dtype, "cuda", tokens=4)
    for limits in ({}, {"window": 150, "sinks": 4}):
        exact = problem.exact(**limits)
        torch_error = error(problem.run(backend="reference", **limits), exact)
        for options in ({}, {"max_expanded_tokens": 512}):
            out = problem.run(**options, **limits)
            assert not out.isnan().any() and not out[476:].any()
            assert error(out, exact) < 2 * torch_error


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_gqa_kernels_are_as_right_as_torch():
    lengths = ([1, 1, 40, 300, 0, 1, 129], [700, 0, 500, 1000, 5, 64, 0])
    batch, *tensors = gqa_problem(torch.bfloat16, "cuda", 32, 8, 128, 128, 64, lengths)

    def run(backend=None, **options):
        plan = plan_gqa_attention(
            *tensors[1:], batch.block_table, batch.cache_seqlens, batch.lengths, num_attention_heads=32,
            backend=backend, **options,
        )  # fmt: skip
        return gqa_attention(*tensors, plan, softmax_scale=SCALE, backend=backend)

    for limits in ({}, {"window": 150, "sinks": 4}):
        exact = gqa_exact(batch, *tensors, **limits)
        torch_error = error(run("reference", **limits), exact)
        for options in ({}, {"max_expanded_tokens": 512}):
            out = run(**options, **limits)
            assert not out.isnan().any() and error(out, exact) < 2 * torch_error


@pytest.mark.gpu
def test_no_synchronisation():
    problem = Problem.make(widths_on_gpu()[1], ([1, 1, 40, 300], [700, 0, 500, 90]), torch.float16, "cuda")
    problem.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
