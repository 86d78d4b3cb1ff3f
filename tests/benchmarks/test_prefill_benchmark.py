"""The prefill benchmark without a GPU: its cases, and two small ones measured from end to end."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import prefill
from benchmarks.shapes import SpeedCase, choose, prefill_cases
from mha2mla.kernels.attention_varlen.tiling import hopper_tiling
from mha2mla.testing.prefill_problems import PrefillProblem, judge, sample


def test_every_case_has_a_name_of_its_own_and_is_one_that_kernels_take():
    cases = prefill_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert cases == prefill_cases(), "lengths are drawn from a seed"
    for case in cases:
        hopper_tiling(case.problem.shape())
    targets = {(case.problem.widths, case.problem.causal): case.target for case in cases if case.target.peers}
    assert {(widths, causal) for widths in ((128,), (192,), (128, 64)) for causal in (True, False)} == set(targets)
    with pytest.raises(ValueError, match="only is 'H7'"):
        choose(prefill_cases(), "H7")


def test_pairs_are_counted():
    assert PrefillProblem(1, (8,), (1,), 8, ((3, 5), (4, 2), (0, 9))).pairs() == 3 + 4 + 5 + 1 + 2
    assert PrefillProblem(1, (8,), (1,), 8, ((3, 5), (4, 2)), causal=False).pairs() == 23


@pytest.mark.parametrize("causal", [True, False])
def test_a_sample_judges_the_whole(causal):
    """The sample of a right result is right; a wrong row of a sampled head is seen."""
    problem = PrefillProblem(6, (8, 8), (3, 1), 8, ((70, 90), (3, 3), (40, 20), (20, 60)), causal=causal)
    inputs = problem.inputs(torch.float32)
    expected = prefill.mla_prefill_varlen(
        *inputs["queries"], *inputs["keys"], inputs["v"], inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], 70,
        softmax_scale=problem.softmax_scale, causal=causal, return_lse=True,
    )  # fmt: skip
    assert judge(*sample(problem, inputs, *expected, rows=16)).ok
    wrong = expected[0].clone()
    wrong[69, 3] *= 1.1
    assert not judge(*sample(problem, inputs, wrong, expected[1], rows=16)).ok


@pytest.mark.parametrize("widths", [(16,), (8, 8)])
def test_one_case_from_end_to_end(widths, monkeypatch):
    monkeypatch.delenv("MHA2MLA_PEERS", raising=False)
    problem = PrefillProblem(4, widths, (2, 1)[: len(widths)], 8, ((40, 40),) * 2, behind=0)
    row = prefill.measure(SpeedCase("small", problem), True, 0.01, "cpu")
    assert row["status"] == "ok"
    assert row["us"] > 0
    assert row["torch_us"] > 0, row["torch_us"]
    assert row["FA3_varlen_us"].startswith("missing: MHA2MLA_PEERS names no folder")
    assert "of_FA3" not in row
    short = dataclasses.replace(problem, lengths=((3, 40),))
    row = prefill.measure(SpeedCase("short", short), True, 0.01, "cpu")
    assert row["torch_us"] == "missing: its causal mask is aligned at the beginning"
