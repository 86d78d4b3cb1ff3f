"""The check of random geometries: what it draws, what it notices, and that nothing can hang it."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from mha2mla.eval.report import write_json
from mha2mla.kernel_testing import case_check, check, check_rows, compiling
from mha2mla.kernel_testing.case_check import check_case, plan_error, plan_for
from mha2mla.kernel_testing.cases import Case, draw_cases
from mha2mla.kernel_testing.check import check_kernels
from mha2mla.kernel_testing.check_rows import summarize
from mha2mla.kernel_testing.problems import Problem
from mha2mla.kernel_testing.workers import Stage, run_in_stages, run_in_workers
from mha2mla.kernels.mla_decode.selection import refusal, select_kernel
from mha2mla.kernels.split_kv.schedule import FIELDS, plan_fragments, write_schedule


def test_what_is_drawn_is_within_the_contract_and_repeats():
    cases = draw_cases(150, 0, calls=3)
    assert cases == draw_cases(150, 0, calls=3)
    assert cases[: 3 * 20] == draw_cases(20, 0, calls=3)
    assert cases[0] != draw_cases(1, 1)[0]
    for case in cases:
        problem = case.problem
        assert refusal(problem.shape(case.dtype)) is None
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
    right = case_check.mla_decode

    def slightly_off(**arguments):
        out, lse = right(**arguments)
        return out * 1.05, lse

    monkeypatch.setattr(case_check, "mla_decode", slightly_off)
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


def pretend_to_compile(job):
    """Stands in for compiling, in another process; one width is refused."""
    if job.shape.kv_lora_rank == 48:
        raise RuntimeError("no kernel")


@pytest.fixture
def forked(monkeypatch):
    """Workers that have imported everything already: a process that is spawned takes seconds to."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


@pytest.fixture
def like_a_gpu(forked, monkeypatch):
    """check_cases(..., in_processes=True) on the CPU: compile, then check in a worker, as on a GPU."""
    monkeypatch.setattr(check, "compile_launches", pretend_to_compile)
    for name, value in {"capability": 90, "device_name": "a GPU", "num_sms": 132}.items():
        for module in (compiling, check_rows):
            monkeypatch.setattr(module, name, lambda _, value=value: value, raising=False)
    return partial(check.check_cases, device=torch.device("cpu"), progress=False, in_processes=True)


def statuses(rows, group):
    return [row["status"] for row in rows if row["group"] == group]


def test_a_geometry_that_cannot_be_compiled_or_run_spoils_no_other(like_a_gpu):
    good, bad, broken = Problem(4, 2, 32, 8, (70, 3)), Problem(4, 2, 40, 8, (70,)), Problem(4, 2, 48, 8, (70,))
    bad = replace(bad, starts=(1, 2))  # one start too many: raises in the worker
    problems = [good, good, bad, bad, broken, good]
    numbers = zip((0, 0, 1, 1, 2, 3), (0, 1, 0, 1, 0, 0), problems, strict=True)
    cases = [Case(group, problem, "bfloat16", call=call) for group, call, problem in numbers]
    rows = like_a_gpu(cases)
    assert statuses(rows, 0) == ["ok", "ok"] and statuses(rows, 3) == ["ok"]
    assert len(statuses(rows, 1)) == 1 and statuses(rows, 1)[0].startswith("ValueError: zip() argument 2")
    assert statuses(rows, 2) == ["not compiled: RuntimeError: no kernel"]
    assert like_a_gpu(cases, known=rows, budget=1e-9) == rows, "what failed is known to have failed"


def test_a_budget_leaves_rows_that_say_so_and_a_later_run_goes_on_from_them(like_a_gpu):
    problem = Problem(4, 2, 32, 8, (70, 3))
    cases = [Case(group, problem, "bfloat16", call=call) for group in range(3) for call in range(2)]
    rows = like_a_gpu(cases, budget=1e-9)
    assert [row["status"] for row in rows] == ["not checked: budget of 1e-09 s"] * 6
    assert check_rows.whole_geometries(rows) == "no geometry was checked with all its calls"
    rows[1] |= {"status": "ok", "error": 7.0, "torch_error": 8.0}
    again = like_a_gpu(cases, known=rows)
    assert [row["status"] for row in again] == ["ok"] * 6
    assert again[1] == rows[1], "what has a verdict is not repeated"
    assert check_rows.whole_geometries(again) == "geometries 0-2 were checked"
    with pytest.raises(ValueError, match="geometry 0, call 1 is .*'d_c': 32.*other seed"):
        like_a_gpu([replace(cases[1], problem=replace(problem, kv_lora_rank=40))], known=again)
    with pytest.raises(ValueError, match="same group and call"):
        like_a_gpu([cases[0], cases[0]])


def test_a_budget_holds_where_a_job_hangs(like_a_gpu, monkeypatch):
    """Compiling for minutes must not keep a run from writing what it has."""
    monkeypatch.setattr(check, "compile_launches", sleep_for_long)
    rows = like_a_gpu([Case(0, Problem(4, 2, 32, 8, (70,)), "bfloat16")], budget=1.0)
    assert statuses(rows, 0) == ["not checked: budget of 1 s"]


def sleep_for_long(job):
    time.sleep(1000)


def test_rows_are_saved_while_they_come_in(monkeypatch):
    monkeypatch.setattr(check, "SAVE_INTERVAL", 0.0)
    saved = []
    rows = check_kernels(2, device="cpu", calls=2, progress=False, save=saved.append)
    assert [sum(row["status"] == "ok" for row in mine) for mine in saved] == [1, 2, 3, 4]
    assert saved[-1] == rows
    assert saved[0][3]["status"] == "not checked: the run has not ended"


def test_a_file_of_another_machine_or_seed_is_not_gone_on_from(tmp_path):
    settings = {"count": 2, "seed": 3, "calls": 1, "device": "cuda"}
    environment = {"gpu": "A", "torch": "2", "tilelang": "0.1", "commit": "c"}
    path = write_json(tmp_path / "rows.json", kind="kernel-check", rows=[{}], environment=environment, **settings)
    assert check_rows.read_known(path, settings, environment) == [{}]
    assert check_rows.read_known(path, settings | {"count": 9}, environment) == [{}], "a run may become longer"
    with pytest.raises(ValueError, match="is of seed 3; expected 4 and commit 'c'; expected 'd'"):
        check_rows.read_known(path, settings | {"seed": 4}, environment | {"commit": "d"})
    path = write_json(tmp_path / "other.json", kind="tuning", rows=[])
    with pytest.raises(ValueError, match="not what `mha2mla check kernels --json` writes"):
        check_rows.read_known(path, settings, environment)


def merges(job):
    from mha2mla.kernels.split_kv.launch import merge_splits

    return {merge_splits(num_ctas, batch) for _, num_ctas, batch in job.launches}


def test_only_the_combine_kernels_that_are_launched_are_compiled(like_a_gpu):
    problem = Problem(4, 1, 32, 8, (70,))
    many = replace(problem, lengths=(70,) * 64)
    cases = [Case(0, many, "bfloat16"), Case(0, problem, "bfloat16", share=0.001, call=1)]
    job = compiling.compile_job(cases[:1], torch.device("cpu"))
    assert merges(job) == {4}
    job = compiling.compile_job(cases, torch.device("cpu"))
    assert merges(job) == {4, 64}, "one CTA by its plan, all of them in the call without one"


def test_everything_a_call_launches_is_compiled_beforehand(monkeypatch):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.split_kv import launch

    compiled = []
    # Caches of its own: what another test compiled counts for nothing here, nor this test's stand-ins for others.
    monkeypatch.setattr(launch, "compile_for", lambda function, *_: compiled.append(function))
    for name in ("compile_choice", "compile_merge", "compile_planner"):
        monkeypatch.setattr(launch, name, cache(getattr(launch, name).__wrapped__))
    shape = Problem(7, 1, 72, 8, ()).shape()
    compiling.compile_launches(compiling.CompileJob("mla_decode", shape, 90, ((select_kernel(shape, 90), 132, 64),)))
    names = {function.attrs["global_symbol"] for function in compiled}
    assert names >= {"mla_decode_plan", "mla_decode_combine"}
    assert len(names) == 3


def test_a_job_that_hangs_is_killed_and_the_others_run():
    outcomes = list(run_in_workers(time.sleep, [0, 1000, 0.01], timeout=3))
    assert [outcome.job for outcome in outcomes] == [0, 1000, 0.01]
    assert [outcome.failure for outcome in outcomes] == [None, "hung: no answer within 3 s", None]


@pytest.mark.usefixtures("forked")
def test_a_process_that_dies_or_raises_is_replaced():
    assert [o.failure for o in run_in_workers(os._exit, [3])] == ["crashed: the process ended with exit code 3"]
    outcomes = {o.job: o for o in run_in_workers(int, ["1", "x", "2"], workers=2)}
    assert (outcomes["1"].value, outcomes["2"].value) == (1, 2)
    assert outcomes["x"].failure.startswith("ValueError: invalid literal")


@pytest.mark.usefixtures("forked")
def test_later_jobs_may_depend_on_earlier_outcomes():
    seen = []

    def jobs():
        yield "x"
        if not seen:
            yield "1"

    for outcome in run_in_workers(int, jobs()):
        seen.append(outcome.job)
    assert seen == ["x"]


def odd_ones_hang(job):
    time.sleep(1000 if job % 2 else 0)
    return job


def take_a_while():
    time.sleep(3.5)


@pytest.mark.usefixtures("forked")
def test_jobs_of_one_outcome_follow_one_another_and_starting_is_not_timed():
    hung = set()

    def then(outcome):
        for job in (outcome.job, outcome.job + 10):
            if outcome.job not in hung:
                yield job

    stages = (Stage(abs, then=then), Stage(odd_ones_hang, 2, 3.0, take_a_while))
    found = []
    for stage, outcome in run_in_stages(stages, [0, 1, 2]):
        if stage == 1:
            found.append((outcome.job, outcome.failure))
            if outcome.failure:
                hung.add(outcome.job)
    assert sorted(found) == [(0, None), (1, "hung: no answer within 3 s"), (2, None), (10, None), (12, None)]


@pytest.mark.usefixtures("forked")
def test_processes_start_while_the_first_job_is_made(tmp_path):
    def jobs():
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        yield -1

    (outcome,) = run_in_workers(abs, jobs(), prepare=partial(os.mkdir, tmp_path / "ready"))
    assert outcome.value == 1


def fail_to_start():
    raise OSError("no device")


@pytest.mark.usefixtures("forked")
def test_a_process_that_cannot_start_says_why():
    stages = (Stage(abs, then=lambda outcome: [outcome.job]), Stage(abs, 1, prepare=fail_to_start))
    assert [o.failure for stage, o in run_in_stages(stages, [1]) if stage == 1] == ["OSError: no device"]
