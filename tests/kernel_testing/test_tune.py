"""Tuning without a GPU: what is tried, in which order, what becomes of failures, and what is written."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from mha2mla.cli import main
from mha2mla.kernel_testing import compiling, trial_run, trials
from mha2mla.kernel_testing import tune as tuner
from mha2mla.kernel_testing.problems import Problem
from mha2mla.kernel_testing.timing import Timing
from mha2mla.kernel_testing.trial_run import launcher, measure
from mha2mla.kernel_testing.trials import (
    MARGIN,
    Candidate,
    Trial,
    choose_candidates,
    choose_winner,
    make_problem,
    parse_geometry,
)
from mha2mla.kernel_testing.tune import GEOMETRIES, summarize, tune
from mha2mla.kernel_testing.workers import Outcome
from mha2mla.kernels import mla_decode
from mha2mla.kernels.mla_decode.api import MLA
from mha2mla.kernels.mla_decode.selection import TUNING, DecodeShape, list_kernels
from mha2mla.kernels.split_kv import op, tuning
from mha2mla.kernels.split_kv.op import PagedOp
from mha2mla.kernels.split_kv.plan import DecodePlan

GPU = "NVIDIA H200"
LLAMA, DEEPSEEK = (32, 8, 512, 16), (128, 1, 512, 64)


class FakeGpu:
    """Takes the place of compiling and measuring. ``us`` says how long a candidate takes; what it raises is a failure
    of the process, and a text is a wrong result."""

    def __init__(self):
        self.compiled, self.measured = [], []
        self.compile_failures = set()

    def us(self, candidate: Candidate) -> float | str:
        return 100.0

    def final_us(self, candidate: Candidate) -> float:
        return self.us(candidate)

    def run_in_workers(self, function, jobs, *, workers=1, timeout=0.0, prepare=None):
        for job in jobs:
            if function is compiling.compile_launches:
                self.compiled.append(job)
                failure = "hung: no answer" if job.launches[0][0].kernel in self.compile_failures else None
                yield Outcome(job, None, failure)
                continue
            assert function.func is measure and function.keywords["device"] == "cuda:0"
            self.measured.append(job)
            try:
                times = [(self.final_us if job.final else self.us)(candidate) for candidate in job.candidates]
            except RuntimeError as error:
                yield Outcome(job, None, str(error))
                continue
            wrong = next((time for time in times if isinstance(time, str)), None)
            yield Outcome(job, {"status": "ok", "us": times} if wrong is None else {"status": f"wrong: {wrong}"})


@pytest.fixture
def gpu(monkeypatch, tmp_path) -> FakeGpu:
    fake = FakeGpu()
    for module in (compiling, tuner):
        monkeypatch.setattr(module, "run_in_workers", fake.run_in_workers)
    monkeypatch.setattr(tuner, "_cuda", lambda _: torch.device("cuda:0"))
    monkeypatch.setattr(tuner, "capability", lambda _: 90)
    monkeypatch.setattr(tuner, "device_name", lambda _: GPU)
    monkeypatch.setattr(tuner, "num_sms", lambda _: 132)
    monkeypatch.setattr(trials, "explain_mla_decode", lambda *_: None)
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "cache"))
    tuning.user_table.cache_clear()
    yield fake
    tuning.user_table.cache_clear()


def one_row(path) -> dict:
    (row,) = TUNING.read(path).values()
    return row


def test_the_fastest_right_candidate_becomes_a_row(gpu, tmp_path):
    gpu.us = lambda candidate: 80.0 if candidate.choice.kernel == "swap_ab" else 100.0 + candidate.choice.num_stages
    rows = tune([LLAMA], batches=[16], seqlen=1024, candidates=8, table=tmp_path / "table.json", progress=False)
    assert len(rows) == len(gpu.compiled) == 8
    assert [trial.final for trial in gpu.measured] == [False] * 8 + [True]
    row = one_row(tmp_path / "table.json")
    shape = DecodeShape(*LLAMA, 64, 1, "bfloat16")
    assert TUNING.match(row, list_kernels(shape, 90)).kernel == "swap_ab"
    rule = list_kernels(shape, 90)[0]
    assert (row["us"], row["rule_us"]) == (80.0, 100.0 + rule.num_stages)
    assert (row["gpu"], row["batch"], row["seqlen"], row["dtype"]) == (GPU, 16, 1024, "bfloat16")
    assert len(row["date"]) == 10 and row["tilelang"]
    (chosen,) = [row for row in rows if row["chosen"]]
    assert chosen["kernel"] == "swap_ab" and chosen["final_us"] == 80.0
    assert sum(row["rule"] for row in rows) == 1
    assert all(row["status"] == "ok" for row in rows)
    (summary,) = summarize(rows)
    assert summary["gain"] == f"{row['rule_us'] / 80 - 1:.1%}" and summary["status"] == "ok"


def test_the_rules_choice_is_kept_unless_something_is_clearly_faster(gpu, tmp_path):
    for factor, kept in ((1 - MARGIN / 2, True), (1 - 2 * MARGIN, False)):
        gpu.us = lambda candidate, factor=factor: 100.0 if candidate.rule else 100.0 * factor
        (summary,) = summarize(tune([LLAMA], table=tmp_path / f"{kept}.json", progress=False))
        row = one_row(tmp_path / f"{kept}.json")
        rule = list_kernels(DecodeShape(*LLAMA, 64, 1, "bfloat16"), 90)[0]
        assert (TUNING.match(row, [rule]) is rule) == kept
        assert row["us"] == (100.0 if kept else 98.0) and row["rule_us"] == 100.0
        assert summary["us"] == row["us"]


def test_the_final_decides_and_always_has_the_rules_choice(gpu, tmp_path):
    gpu.us = lambda candidate: 500.0 if candidate.rule else 100.0 + candidate.choice.tiling.rows
    gpu.final_us = lambda candidate: 50.0 if candidate.rule else 100.0
    tune([DEEPSEEK], table=tmp_path / "table.json", progress=False)
    final = gpu.measured[-1]
    assert [candidate.rule for candidate in final.candidates] == [False] * 3 + [True]
    row = one_row(tmp_path / "table.json")
    assert row["us"] == row["rule_us"] == 50.0
    assert choose_winner(final, [100.0, 99.0, 98.0, 500.0]) == 2


def test_what_fails_costs_nothing_else(gpu, tmp_path):
    """A candidate that does not compile, one that hangs, one that is wrong; then shapes where nothing is right."""
    gpu.compile_failures = {"swap_ab"}

    def us(candidate):
        if candidate.rule:
            raise RuntimeError("hung: no answer within 60 s")
        return "relative error 1" if candidate.choice.tiling.rows == 16 else 90.0

    gpu.us = us
    rows = tune([DEEPSEEK, LLAMA], table=tmp_path / "table.json", progress=False)
    statuses = {row["status"].partition(":")[0] for row in rows if row["H"] == 128}
    assert statuses == {"ok", "not compiled", "hung", "wrong"}
    assert all(row["us"] is None for row in rows if row["status"] != "ok")
    for row in TUNING.read(tmp_path / "table.json").values():
        assert row["rule_us"] is None and row["us"] == 90.0 and row["kernel"] == "swap_ab_ws"
    (deepseek, _) = summarize(rows)
    assert deepseek["status"].endswith("not right") and deepseek["rule_us"] is None and deepseek["gain"] is None

    gpu.us = lambda candidate: "all of it"
    (summary,) = summarize(tune([(9, 3, 64, 8)], table=tmp_path / "none.json", progress=False))
    assert summary["status"].startswith("no row: ") and TUNING.read(tmp_path / "none.json") == {}

    def crash(candidate):
        raise RuntimeError("crashed: the process ended with exit code 1")

    gpu.us, gpu.final_us = lambda candidate: 90.0, crash
    gpu.compile_failures = set()
    (summary,) = summarize(tune([(9, 3, 64, 8)], table=tmp_path / "none.json", progress=False))
    assert summary["status"].startswith("no row: in the final: crashed") and TUNING.read(tmp_path / "none.json") == {}


def test_an_interrupted_run_keeps_the_shapes_that_are_done(gpu, tmp_path):
    def us(candidate):
        if candidate.choice.tiling.heads_per_group == DEEPSEEK[0]:
            raise KeyboardInterrupt
        return 100.0

    gpu.us = us
    with pytest.raises(KeyboardInterrupt):
        tune([LLAMA, DEEPSEEK], table=tmp_path / "table.json", progress=False)
    assert one_row(tmp_path / "table.json")["heads"] == 32


def test_a_table_is_merged_and_defaults_to_the_users(gpu, tmp_path):
    tune([LLAMA, LLAMA], progress=False)
    assert len([trial for trial in gpu.measured if trial.final]) == 1, "a shape is measured once"
    tune([(*LLAMA, 3), (*LLAMA, 1)], dtype="float16", page_size=16, progress=False)
    table = TUNING.read(tmp_path / "cache" / "tuning.json")
    found = {(row["seqlen_q"], row["dtype"], row["page_size"]) for row in table.values()}
    assert found == {(1, "bfloat16", 64), (4, "float16", 16), (1, "float16", 16)}


def test_a_table_that_cannot_be_written_is_said_before_anything_runs(gpu, tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"version": 7, "rows": []}')
    with pytest.raises(ValueError, match="version 7"):
        tune([LLAMA], table=path, progress=False)
    assert not gpu.compiled


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_candidates_of_the_default_geometries(geometry):
    shape = DecodeShape(*geometry[:4], 64, (*geometry, 1)[4], "bfloat16")
    choices = list_kernels(shape, 90)
    families = {(c.kernel, c.warpgroups, c.tiling.rows, c.ctas_per_sm) for c in choices}
    least = len(choose_candidates(choices, 1))
    assert least <= len(families) + len({c.variant for c in choices})
    for count in (1, 6, 1000):
        candidates = choose_candidates(choices, count)
        assert candidates[0] is choices[0], "the rule's"
        assert {(c.kernel, c.warpgroups, c.tiling.rows, c.ctas_per_sm) for c in candidates} == families
        assert {(c.kernel, c.variant) for c in candidates} == {(c.kernel, c.variant) for c in choices}
        assert len(candidates) == len(set(candidates)) == min(len(choices), max(count, least))


def test_the_default_length_makes_a_cache_that_no_l2_holds(monkeypatch):
    monkeypatch.setattr(trials, "explain_mla_decode", lambda *_: None)
    for geometry, batch, size in (
        (LLAMA, 64, 280e6),
        (DEEPSEEK, 128, 280e6),
        (LLAMA, 8, 67e6),
        ((9, 3, 256, 16), 1, 67e6),
    ):
        problem = make_problem(geometry, batch, None, 64, "bfloat16", torch.device("cpu"))
        assert size <= problem.cache_bytes() < 1.6 * size and problem.lengths[0] % 1024 == 0
    assert make_problem(LLAMA, 3, 100, 64, "bfloat16", torch.device("cpu")).lengths == (100,) * 3


def test_a_geometry_that_no_kernel_serves_is_named():
    with pytest.raises(ValueError, match="geometry 256,1,512,64: num_attention_heads is 256"):
        make_problem((256, 1, 512, 64), 1, 1, 64, "bfloat16", torch.device("cpu"))
    with pytest.raises(ValueError, match="geometry is .*expected"):
        make_problem((256, 1), 1, 1, 64, "bfloat16", torch.device("cpu"))
    with pytest.raises(ValueError, match="num_rope_heads is 7; expected a divisor"):
        make_problem((32, 7, 512, 64), 1, 1, 64, "bfloat16", torch.device("cpu"))


def test_geometries_are_parsed():
    assert parse_geometry("32,8,512,16") == (32, 8, 512, 16) and parse_geometry("16, 1,512,64,4") == (16, 1, 512, 64, 4)
    for text in ("32,8,512", "a,b,c,d", "", "1,2,3,4,5,6", "32;8;512;16"):
        with pytest.raises(ValueError, match="expected H,G,d_c,d_r or H,G,d_c,d_r,S_q"):
            parse_geometry(text)


def test_as_many_ctas_as_dispatch_plans(monkeypatch):
    """The plan of a candidate is the one that a call would get if dispatch chose it."""
    monkeypatch.setattr(op, "num_sms", lambda _: 132)
    for geometry in GEOMETRIES:
        shape = DecodeShape(*geometry[:4], 64, (*geometry, 1)[4], "bfloat16")
        monkeypatch.setattr(op, "dispatch", lambda *_, shape=shape: shape)
        for choice in list_kernels(shape, 90):
            monkeypatch.setattr(PagedOp, "choose", lambda *_, choice=choice: choice)
            assert choice.num_ctas(132) == MLA.num_ctas(64, None, torch.device("cuda:0"))


def test_a_candidate_is_launched_as_dispatch_would_launch_it(monkeypatch):
    """Same compiled functions, same arguments: what is timed is what a call runs."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernel_testing.case_check import plan_for
    from mha2mla.kernels.split_kv import launch

    problem = Problem(4, 2, 32, 8, (70, 3), window=50, sinks=2)
    inputs, launched = problem.inputs(torch.bfloat16), []

    def compiled(*what):
        return lambda *arguments: launched.append((what, arguments))

    shape = problem.shape()
    choice = list_kernels(shape, 90)[0]
    monkeypatch.setattr(launch, "compile_choice", lambda *key: compiled("split", *key))
    monkeypatch.setattr(launch, "compile_merge", lambda *key: compiled("merge", *key))
    monkeypatch.setattr(launch, "compile_chosen", launch.compile_chosen.__wrapped__)
    monkeypatch.setattr(PagedOp, "choose", lambda *_: choice)
    monkeypatch.setattr(launch, "on_device", lambda _: nullcontext())
    mine = problem.plan(inputs, "reference")
    monkeypatch.setattr(op, "dispatch", lambda *_: shape)
    mine = plan_for(replace(mine, schedule=mine.schedule.new_empty(0, 16)), 5)
    out, lse = torch.empty_like(inputs["q_latent"]), torch.empty(2, 4, 1)
    launcher(MLA, shape, choice, 90, inputs, mine, out, lse)()
    ours, launched[:] = list(launched), []
    mla_decode(**inputs, plan=mine, out=out)
    assert len(ours) == len(launched) == 2
    for (what, arguments), (theirs, expected) in zip(ours, launched, strict=True):
        assert what == theirs and len(arguments) == len(expected)
        for a, b in zip(arguments, expected, strict=True):
            same = a.data_ptr() == b.data_ptr() and a.shape == b.shape if isinstance(a, torch.Tensor) else a == b
            same = same or (a is lse and b.shape == lse.shape)  # the op's own
            assert same


def test_everything_a_candidate_launches_is_compiled_beforehand(monkeypatch):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.split_kv import launch

    compiled = []
    monkeypatch.setattr(launch, "compile_for", lambda function, *_, **__: compiled.append(function))
    shape = DecodeShape(7, 1, 104, 8, 64, 1, "bfloat16")
    launches = ((list_kernels(shape, 90)[0], 132, 64),)
    compiling.compile_launches(compiling.CompileJob("mla_decode", shape, 90, launches))
    names = {function.attrs["global_symbol"] for function in compiled}
    assert "mla_decode_combine" in names and len(names) >= 2  # the planner may have been compiled by a test before


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_a_candidate_is_timed_only_if_it_is_right(monkeypatch, factor):
    """The way of a GPU, on the CPU: the reference stands in for the kernels."""
    problem = Problem(4, 2, 32, 8, (70, 3))
    inputs = problem.inputs(torch.bfloat16)
    empty = problem.plan(inputs, "reference")
    empty = replace(empty, schedule=empty.schedule.new_empty(0, 16))
    launched, timed, planned = [], [], []

    def fake_launcher(op, shape, choice, capability, inputs, plan, out, lse):
        assert (shape, capability) == (problem.shape(), 90)
        assert plan.partial_out.isnan().all() and plan.partial_out.shape == (plan.num_ctas, 2, 1, 4, 32)

        def call():
            launched.append((choice, plan.num_ctas))
            right, right_lse = mla_decode(**inputs, return_lse=True, backend="reference")
            out.copy_(right * factor)
            lse.copy_(right_lse)

        return call

    def fake_time(call, device, min_run_time, graph):
        call()
        timed.append(call)
        return Timing(1.0, float(len(timed)), 1.0)

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(DecodePlan, "refresh", lambda self, *_: planned.append(self.schedule.shape))
    monkeypatch.setattr(trial_run, "_prepared", lambda *_: (inputs, empty))
    monkeypatch.setattr(trial_run, "launcher", fake_launcher)
    monkeypatch.setattr(trial_run, "time_callable", fake_time)
    first, second = (Candidate(choice, 5, False) for choice in list_kernels(problem.shape(), 90)[:2])
    answer = measure(Trial(problem, "bfloat16", (first,)), "cpu", 90, 0.1)
    assert planned == [(5 + 2, 16)]
    if factor != 1.0:
        assert answer["status"].startswith("wrong: relative error") and not timed and "us" not in answer
        return
    assert answer == {"status": "ok", "us": [1.0]}
    assert launched == [(first.choice, 5)] * 2
    answer = measure(Trial(problem, "bfloat16", (first, second), final=True), "cpu", 90, 0.1)
    assert answer == {"status": "ok", "us": [4.0, 5.0]}, "in turn: 2, 4, 6 and 3, 5, 7"


def test_trials_travel_to_other_processes():
    import pickle

    problem = Problem(*LLAMA, (64,) * 2)
    choice = list_kernels(problem.shape(), 90)[0]
    trial = Trial(problem, "bfloat16", (Candidate(choice, 132, True),))
    assert pickle.loads(pickle.dumps(trial)) == trial and trial.shape == problem.shape()


def test_the_verb(gpu, tmp_path, capsys):
    table, report = tmp_path / "table.json", tmp_path / "report.json"
    argv = ["tune", "--geometry", "32,8,512,16", "--geometry", "128,1,512,64", "--batch", "[8,64]", "--seqlen", "2048"]
    argv += ["--candidates", "3", "--table", str(table), "--json", str(report)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "H32 G8 c512 r16 8x2048" in out and "H128 G1 c512 r64 64x2048" in out
    content = json.loads(report.read_text())
    assert content["kind"] == "tuning" and content["environment"]["torch"] and len(content["rows"]) >= 12
    assert len(TUNING.read(table)) == 4
    gpu.us = lambda candidate: "relative error 1"
    assert main(argv) == 1
    assert "no row" in capsys.readouterr().out
    assert len(TUNING.read(table)) == 4, "rows of an earlier run stay"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--geometry", "32,8"), "geometry is '32,8'; expected H,G,d_c,d_r"),
        (("--device", "cpu"), "device is cpu; expected a CUDA device"),
        ((), "no CUDA device is available here"),
    ],
)
def test_the_verb_says_in_one_line_what_is_wrong(argv, message, capsys):
    if not argv and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["tune", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_the_verbs_options_are_explained(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["tune", "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for name in ("geometry", "batch", "seqlen", "page-size", "dtype", "candidates", "table", "device", "json"):
        assert f"--{name}" in out.replace("_", "-")


@pytest.mark.gpu
def test_a_shape_is_tuned(tmp_path):
    path = tmp_path / "table.json"
    rows = tune([(9, 3, 64, 8)], batches=[4], seqlen=1000, candidates=2, table=path, progress=False)
    failed = [f"{row['status']} ({row['us']} µs): {row['reason']}" for row in rows if row["status"] != "ok"]
    assert not failed, "\n".join(failed)
    row = one_row(path)
    assert row["rule_us"] is not None, f"the rule's choice is not in the final: {rows}"
    assert row["gpu"] == torch.cuda.get_device_name() and 0 < row["us"] <= row["rule_us"]
