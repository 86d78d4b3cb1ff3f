"""The check of random geometries: its draws, its verdicts, and workers that fail or hang."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mha2mla.kernels import parallel_compilation
from mha2mla.kernels.split_kv.choice import FIELDS
from mha2mla.kernels.split_kv.reference import plan_fragments, write_schedule
from mha2mla.testing import kernel_check
from mha2mla.testing.kernel_check import (
    Case,
    check_case,
    check_in_processes,
    check_kernels,
    draw_cases,
    plan_error,
    plan_for,
    summarize,
)
from mha2mla.testing.problems import Problem


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_random_calls_are_served_and_right(seed):
    """By the reference; the calls of a geometry share a compilation."""
    cases = draw_cases(4, seed, calls=2, longest=200, most_sequences=4)
    assert len({(case.group, case.shape()) for case in cases}) == 4
    assert [check_case(case, torch.device("cpu"))["status"] for case in cases] == ["ok"] * 8


def test_draws_repeat_and_vary():
    cases = draw_cases(150, 0, calls=3)
    assert cases == draw_cases(150, 0, calls=3)
    assert cases[: 3 * 20] == draw_cases(20, 0, calls=3)
    assert cases[0] != draw_cases(1, 1)[0]
    problems = [case.problem for case in cases]
    for name, least in {"heads": 40, "num_rope_heads": 15, "kv_lora_rank": 25, "qk_rope_head_dim": 10}.items():
        assert len({getattr(problem, name) for problem in problems}) > least
    assert {problem.seqlen_q for problem in problems} == set(range(1, 9))
    assert {problem.page_size for problem in problems} == {16, 32, 64, 128}
    assert {problem.window is None for problem in problems} == {True, False}


def test_check_kernels_summarizes_by_kernel():
    rows = check_kernels(4, seed=3, device="cpu", calls=2, progress=False)
    assert [row["status"] for row in rows] == ["ok"] * 8
    (row,) = summarize(rows)
    assert row["calls"] == 8 and row["status"] == "ok" and not row["wrong"] and row["ratio"] <= 2


def test_check_kernels_budget_leaves_rows():
    rows = check_kernels(2, device="cpu", calls=2, progress=False, budget=1e-9)
    assert len(rows) == 4 and all(row["status"].startswith("not checked: budget of 1e-09 s") for row in rows)
    assert summarize(rows)[0]["unchecked"] == 4


def test_wrong_numbers_are_reported(monkeypatch):
    right = kernel_check.mla_decode

    def slightly_off(**arguments):
        out, lse = right(**arguments)
        return out * 1.05, lse

    monkeypatch.setattr(kernel_check, "mla_decode", slightly_off)
    case = Case(0, Problem(4, 2, 32, 8, (70, 3)), "bfloat16")
    assert check_case(case, torch.device("cpu"))["status"].startswith("wrong: relative error")


def test_no_gpu_is_refused_by_name():
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
    schedule, splits = write_schedule(spans, plan_fragments([span.tiles for span in spans], 5))
    plan.schedule.copy_(schedule)
    plan.splits.copy_(splits)
    assert plan.num_ctas == 5
    assert plan_error(problem, plan) == ""
    plan.schedule[1, 2] += 1
    assert "row 1, field 2" in plan_error(problem, plan)
    plan.schedule[1, 2] -= 1
    plan.splits[0, 0] += 1
    assert "splits differ" in plan_error(problem, plan)


def compile_but_one(job):
    """Stands in for compiling, in another process; one width is refused, one hangs."""
    if job.shape.kv_lora_rank == 48:
        raise RuntimeError("no kernel")
    if job.shape.kv_lora_rank == 56:
        time.sleep(1000)


@pytest.fixture
def like_a_gpu(forked, monkeypatch):
    """check_in_processes on the CPU: compile, then check in a worker, as on a GPU."""
    monkeypatch.setattr(kernel_check, "compile_launches", compile_but_one)
    monkeypatch.setattr(parallel_compilation, "num_sms", lambda _: 132)

    def check(problems, until=None):
        cases = [Case(group, problem, "bfloat16", call=call) for call, (group, problem) in enumerate(problems)]
        found = dict(check_in_processes(cases, torch.device("cpu"), 60.0, until))
        return [found.get(case, {"status": None})["status"] for case in cases]

    return check


def test_a_failing_geometry_spoils_no_other(like_a_gpu):
    good, bad, broken = Problem(4, 2, 32, 8, (70, 3)), Problem(4, 2, 40, 8, (70,)), Problem(4, 2, 48, 8, (70,))
    bad = replace(bad, starts=(1, 2))  # one start too many: raises in the worker
    first, second, failed, skipped, refused, last = like_a_gpu(
        [(0, good), (0, good), (1, bad), (1, bad), (2, broken), (3, good)]
    )
    assert (first, second, last) == ("ok", "ok", "ok")
    assert failed.startswith("ValueError: zip() argument 2") and skipped is None
    assert refused == "not compiled: RuntimeError: no kernel"


def test_a_budget_holds_where_compiling_hangs(like_a_gpu):
    assert like_a_gpu([(0, Problem(4, 2, 56, 8, (70,)))], until=time.monotonic() + 1.0) == [None]
