"""The generator of decode problems and its verdict: poison where nobody looks, right called right, wrong wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mha2mla.kernels import mla_decode, mla_prefill_varlen
from mha2mla.testing.numeric_check import errors
from mha2mla.testing.prefill_problems import PrefillProblem, sample
from mha2mla.testing.prefill_problems import judge as judge_prefill
from mha2mla.testing.problems import UNUSED_PAGE, Problem, exact, judge

STREAMING = Problem(
    6, 3, 24, 8, (0, 1, 70, 700, 401), page_size=16, seqlen_q=2, window=50, sinks=5, starts=(0, 0, 3, 65, 401)
)


@pytest.mark.parametrize("combined", [False, True])
def test_what_no_query_sees_is_poison(combined):
    problem = Problem(4, 1, 16, 8, (70, 300), window=65, sinks=2, combined=combined, slack=2)
    inputs = problem.inputs(torch.float32)
    seen = (~inputs["latent_cache"].isnan().any(-1)).sum()
    assert seen == (2 + 65) * 2 == problem.tokens_seen()
    used = inputs["block_table"] != UNUSED_PAGE
    assert used.tolist() == [[True, True] + [False] * 5, [True, False, False, True, True, False, False]]
    assert not inputs["block_table"][used].unique(return_counts=True)[1].gt(1).any()
    assert problem.cache_bytes() == problem.tokens_seen() * (16 + 8) * 2


def test_the_same_seed_gives_the_same_numbers():
    first, again = (STREAMING.inputs(torch.bfloat16) for _ in range(2))
    assert torch.equal(first["latent_cache"].isnan(), again["latent_cache"].isnan())
    assert torch.equal(first["q_latent"], again["q_latent"])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window, sinks", [(None, 0), (1, 0), (50, 5), (1000, 1000)])
def test_reference_and_judge_agree(window, sinks, causal):
    """Two independent ways to write the formula, both in float64."""
    problem = replace(STREAMING, window=window, sinks=sinks, causal=causal)
    inputs = problem.inputs(torch.float64)
    found = mla_decode(**inputs, plan=problem.plan(inputs), return_lse=True)
    for each, wanted in zip(found, exact(inputs, **problem.visibility), strict=True):
        seen = wanted.isfinite()
        assert torch.equal(each[~seen], wanted[~seen]) and errors(each[seen], wanted[seen])[0] < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_right_and_the_op_takes_the_plan(dtype):
    inputs = STREAMING.inputs(dtype)
    out, lse = mla_decode(**inputs, plan=STREAMING.plan(inputs), return_lse=True)
    judgement = judge(inputs, out, lse, **STREAMING.visibility)
    assert judgement.ok, judgement.reason
    assert judgement.error <= 2 * judgement.torch_error
    wider = {"window": STREAMING.window, "sinks": STREAMING.sinks - 1}
    assert not judge(inputs, out, lse, **wider).ok, "with one sink less the output is another one"


def test_what_is_wrong_is_said():
    inputs = STREAMING.inputs(torch.float32)
    out, lse = mla_decode(**inputs, plan=STREAMING.plan(inputs), return_lse=True)

    def reason(out, lse=lse):
        return judge(inputs, out, lse, **STREAMING.visibility).reason

    assert reason(out) == ""
    assert "NaN" in reason(out.clone().index_fill_(0, torch.tensor([3]), torch.nan))
    assert "not zero" in reason(out + 1e-9)
    assert "relative error" in reason(out * 1.001)
    assert "wrong rows" in reason(out, lse.nan_to_num(neginf=0.0))
    assert "lse is off" in reason(out, lse * 1.01)


def test_pairs_are_counted():
    assert PrefillProblem(1, (8,), (1,), 8, ((3, 5), (4, 2), (0, 9))).pairs() == 3 + 4 + 5 + 1 + 2
    assert PrefillProblem(1, (8,), (1,), 8, ((3, 5), (4, 2)), causal=False).pairs() == 23


@pytest.mark.parametrize("causal", [True, False])
def test_a_sample_judges_the_whole(causal):
    """The sample of a right result is right; a wrong row of a sampled head is seen."""
    problem = PrefillProblem(6, (8, 8), (3, 1), 8, ((70, 90), (3, 3), (40, 20), (20, 60)), causal=causal)
    inputs = problem.inputs(torch.float32)
    expected = mla_prefill_varlen(
        *inputs["queries"], *inputs["keys"], inputs["v"], inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], 70,
        softmax_scale=problem.softmax_scale, causal=causal, return_lse=True,
    )  # fmt: skip
    assert judge_prefill(*sample(problem, inputs, *expected, rows=16)).ok
    wrong = expected[0].clone()
    wrong[69, 3] *= 1.1
    assert not judge_prefill(*sample(problem, inputs, wrong, expected[1], rows=16)).ok
