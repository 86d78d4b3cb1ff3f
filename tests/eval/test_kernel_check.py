"""The check of random geometries: what it draws, what it notices, and that nothing can hang it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import cache

import pytest
import torch

from mha2mla.eval import kernel_check
from mha2mla.eval.kernel_check import Case, check_case, check_kernels, draw_cases, plan_error, plan_for, summarize
from mha2mla.eval.problems import Problem
from mha2mla.eval.workers import run_in_workers
from mha2mla.kernels.mla_decode.schedule import FIELDS, plan_fragments, write_schedule
from mha2mla.kernels.mla_decode.selection import refusal


def test_what_is_drawn_is_within_the_contract_and_repeats():
    cases = draw_cases(150, 0, calls=3)
    assert cases == draw_cases(150, 0, calls=3)
    assert cases[: 3 * 20] == draw_cases(20, 0, calls=3)
    assert cases[0] != draw_cases(1, 1)[0]
    for case in cases:
        problem = case.problem
        assert refusal(problem.geometry, problem.page_size, case.dtype, problem.seqlen_q) is None
        assert case.shape() == next(c for c in cases if c.group == case.group).shape(), "one compilation a geometry"
    problems = [case.problem for case in cases]
    for name, least in {"heads": 40, "num_rope_heads": 15, "kv_lora_rank": 25, "qk_rope_head_dim": 10}.items():
        assert len({getattr(problem, name) for problem in problems}) > least
    assert {problem.seqlen_q for problem in problems} == set(range(1, 9))
    assert {problem.page_size for problem in problems} == {16, 32, 64, 128}
    assert any(problem.heads % 2 for problem in problems)
    assert any(0 in problem.lengths for problem in problems)
    assert {problem.window is None for problem in problems} == {True, False}


def test_the_reference_passes():
    rows = check_kernels(12, seed=3, device="cpu", calls=2, progress=False)
    assert [row["status"] for row in rows] == ["ok"] * 24
    table = summarize(rows)
    assert sum(row["calls"] for row in table) == 24
    assert all(row["status"] == "ok" and not row["wrong"] and row["ratio"] <= 2 for row in table)


def test_wrong_numbers_are_reported(monkeypatch):
    right = kernel_check.mla_decode

    def slightly_off(**arguments):
        out, lse = right(**arguments)
        return out * 1.05, lse

    monkeypatch.setattr(kernel_check, "mla_decode", slightly_off)
    case = Case(0, Problem(4, 2, 32, 8, (70, 3)), "bfloat16")
    assert check_case(case, torch.device("cpu"))["status"].startswith("wrong: relative error")


def test_no_gpu_is_said_by_name():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="device is cuda; no CUDA device is available here"):
        check_kernels(1)
    with pytest.raises(ValueError, match="count is 0"):
        check_kernels(0, device="cpu")


def test_a_plan_is_compared_with_the_oracle():
    problem = Problem(4, 1, 32, 8, (700, 0, 64, 1300), window=500, sinks=4)
    inputs = problem.inputs(torch.float32)
    empty = problem.plan(inputs, "reference")
    empty = replace(empty, schedule=torch.empty(0, FIELDS, dtype=torch.int32))
    plan = plan_for(empty, 5)
    spans = problem.spans()
    write_schedule(spans, plan_fragments([span.tiles for span in spans], 5), plan.schedule, plan.splits)
    assert plan.num_ctas == 5
    assert plan_error(problem, plan) == ""
    plan.schedule[1, 2] += 1
    assert "row 1, field 2" in plan_error(problem, plan)
    plan.schedule[1, 2] -= 1
    plan.splits[0, 0] += 1
    assert "splits differ" in plan_error(problem, plan)


def test_a_geometry_that_cannot_be_compiled_or_run_spoils_no_other(monkeypatch):
    """The way of a GPU, on the CPU: compile, then check in a worker; what fails is named, its other calls skipped."""
    good, bad, broken = Problem(4, 2, 32, 8, (70, 3)), Problem(4, 2, 40, 8, (70,)), Problem(4, 2, 48, 8, (70,))
    bad = replace(bad, starts=(1, 2))  # one start too many: raises in the worker
    problems = [good, good, bad, bad, broken, good]
    cases = [Case(group, problem, "bfloat16") for group, problem in zip((0, 0, 1, 1, 2, 3), problems, strict=True)]
    monkeypatch.setattr(kernel_check, "compile_shapes", lambda *_, **__: {broken.shape(): "not compiled: hung"})
    monkeypatch.setattr(kernel_check, "capability", lambda _: 90)
    monkeypatch.setattr(kernel_check, "device_name", lambda _: None)
    rows = kernel_check.check_cases(cases, torch.device("cpu"), progress=False)
    found = {group: [row["status"] for row in rows if row["group"] == group] for group in range(4)}
    assert found[0] == ["ok", "ok"] and found[3] == ["ok"]
    assert len(found[1]) == 1 and found[1][0].startswith("ValueError: zip() argument 2")
    assert found[2] == ["not compiled: hung"]


def test_everything_a_call_launches_is_compiled_beforehand(monkeypatch):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.mla_decode import launch

    compiled = []
    monkeypatch.setattr(launch, "compile_for", lambda function, *_: compiled.append(function))
    # Caches of its own: what another test compiled counts for nothing here, nor this test's stand-ins for others.
    for name in ("compile_choice", "compile_merge", "compile_planner", "compile_mla_decode"):
        monkeypatch.setattr(launch, name, cache(getattr(launch, name).__wrapped__))
    kernel_check.compile_shape((Problem(7, 1, 72, 8, ()).shape(), 90, "a GPU"))
    names = {function.attrs["global_symbol"] for function in compiled}
    assert names >= {"mla_decode_plan", "mla_decode_combine"}
    assert len(names) == 3


def test_a_job_that_hangs_is_killed_and_the_others_run():
    outcomes = list(run_in_workers(time.sleep, [0, 1000, 0.01], timeout=0.5))
    assert [outcome.job for outcome in outcomes] == [0, 1000, 0.01]
    assert [outcome.failure for outcome in outcomes] == [None, "hung: no answer within 0.5 s", None]


def test_a_process_that_dies_or_raises_is_replaced():
    assert [o.failure for o in run_in_workers(os._exit, [3])] == ["crashed: the process ended with exit code 3"]
    outcomes = {o.job: o for o in run_in_workers(int, ["1", "x", "2"], workers=2)}
    assert (outcomes["1"].value, outcomes["2"].value) == (1, 2)
    assert outcomes["x"].failure.startswith("ValueError: invalid literal")


def test_later_jobs_may_depend_on_earlier_outcomes():
    seen = []

    def jobs():
        yield "x"
        if not seen:
            yield "1"

    for outcome in run_in_workers(int, jobs()):
        seen.append(outcome.job)
    assert seen == ["x"]
