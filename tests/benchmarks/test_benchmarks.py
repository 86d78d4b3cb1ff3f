"""The benchmarks on a CPU: their shapes have kernels, and only a right result gets a time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("rich")

from benchmarks import codes_decode, conversion, decode, measuring, prefill, recording, runner, sanitize
from benchmarks.peers import checked
from benchmarks.shapes import (
    SpeedCase,
    Target,
    decode_case,
    decode_cases,
    fp8_cases,
    gqa_cases,
    key_cases,
    latent_cases,
    prefill_cases,
)
from mha2mla.kernels.attention_varlen.warp_specialised import hopper_tiling
from mha2mla.kernels.split_kv.op import compiled_shape
from mha2mla.testing.problems import LatentProblem, Problem, RowCodesProblem


def test_every_shape_has_a_name_and_a_kernel():
    decoded = (decode_cases(), gqa_cases(), fp8_cases(), latent_cases(), key_cases(), codes_decode.cases())
    for cases in (*decoded, prefill_cases()):
        assert len({case.name for case in cases}) == len(cases)
    beside = ((latent_cases(), decode.STORED), (key_cases(), decode.KEPT), (fp8_cases(), decode.IN_16_BITS))
    others = [decode_case(other(x.problem)) for cases, those in beside for x in cases for other in those.values()]
    for case in (*others, *(case for cases in decoded for case in cases)):
        op, shape = case.problem.op, case.problem.shape()
        assert op.refusal(shape) is None and op.select(compiled_shape(shape), 90)
    assert all(case.problem.op.select(compiled_shape(case.problem.shape()), 90).num_stages >= 2 for case in fp8_cases())
    for case in prefill_cases():
        hopper_tiling(case.problem.shape())


STORED, LATENT = Problem(4, 1, 48, 24, (130,) * 2, slack=0), LatentProblem(4, 1, 72, 32, (70,) * 2, slack=0)


@pytest.mark.parametrize(
    ("measure", "problem"),
    [
        *((decode.measure, STORED), (decode.measure_fp8, replace(STORED, codes=True)), (decode.measure_latent, LATENT)),
        (decode.measure_keys, LatentProblem(9, 1, 48, 16, (70,) * 2, slack=0)),
        (codes_decode.measure, RowCodesProblem(4, 1, 64, 16, (70,) * 2, slack=0)),
    ],
)
def test_measure_checks_and_times_one_shape(measure, problem, monkeypatch):
    monkeypatch.delenv("MHA2MLA_PEERS", raising=False)
    row = measure(decode_case(problem), True, 0.01, "cpu")
    assert row["status"] == "ok" and 0 < row["us_p20"] <= row["us"] <= row["us_p80"]
    assert row["error"] <= 2 * row["torch_error"] + torch.finfo(torch.bfloat16).eps / 2
    if "beside" in row:
        others = [row[key] for key in ("stored_us", "bf16_us", "kept_us", "kept8_us") if key in row]
        assert row["ratio"] == row["us"] / others[0] and min(others) > 0


def test_every_peer_has_a_column():
    benchmarks = decode.SPEED, decode.GQA, decode.LATENT, decode.KEYS, decode.FP8_SPEED, codes_decode.BENCHMARK
    for benchmark in (*benchmarks, prefill.BENCHMARK):
        assert set(benchmark.peers) <= set(runner.COLUMNS), benchmark.kind
    row = codes_decode.measure(decode_case(RowCodesProblem(4, 1, 64, 16, (70,), slack=0)), True, 0.01, "cpu")
    timed = {key for key in row if f"{key}_graph" in row}
    assert timed <= set(codes_decode.BENCHMARK.peers), "what is missing is said in words"


def test_a_wrong_call_beside_gets_no_time(monkeypatch):
    right = measuring.judge
    monkeypatch.setattr(measuring, "judge", lambda inputs, out, lse: right(inputs, out * 1.1, lse))
    row = decode.measure_latent(decode_case(LATENT), True, 0.01, "cpu")
    assert row["status"] == "ok" and row["stored_us"].startswith("missing: wrong result: ") and "ratio" not in row


def test_a_wrong_peer_is_no_baseline():
    expected = torch.ones(3, dtype=torch.float64)
    assert checked(lambda: lambda: expected * 1.1, lambda out: (out, expected)).startswith("missing: wrong result")
    assert checked(lambda: lambda: expected / 0, lambda out: (out, expected)).startswith("missing: wrong result")
    assert checked(lambda: 1 / 0, lambda out: (out, expected)) == "missing: ZeroDivisionError: division by zero"
    assert not isinstance(checked(lambda: lambda: expected, lambda out: (out, expected)), str)


def test_the_sanitizer_runs_every_kernel_family_of_hopper():
    shapes = [(problem.op, compiled_shape(problem.shape())) for problem in sanitize.PROBLEMS]
    kernels = {op.select(shape, 90).kernel for op, shape in shapes}
    assert kernels >= {"swap_ab_ws", "heads_on_m", "swap_ab_cluster"}
    assert kernels >= {"latent_ws", "latent_cluster", "latent_portable", "latent_fp8"}
    assert any(problem.window for problem in sanitize.PROBLEMS)
    assert {problem.seqlen_q for problem in sanitize.PROBLEMS} >= {1, 2, 3, 4}


RIGHT = Problem(4, 1, 32, 16, (70, 3))


def measure(case: SpeedCase, peers: bool, min_run_time: float) -> dict:
    if case.name == "raises":
        raise RuntimeError("no memory")
    return decode.measure(case, peers, min_run_time, "cpu") | {"FA3_MHA_us": "missing: not here"}


def compile_one(job: str) -> None:
    if job == "refused":
        raise ValueError("spills")


def jobs(case: SpeedCase) -> list[str]:
    if case.name == "unserved":
        raise ValueError("no kernel")
    return [case.name]


@pytest.fixture
def benchmark(forked, monkeypatch):
    monkeypatch.setattr(runner, "start_measuring", None)
    monkeypatch.setattr(runner, "read_rate", lambda: {"R": 4e12, "R_from": "a test"})
    return runner.Benchmark("a-kind", "a title", measure, compile_one, jobs, peers=("FA3_MHA_us",))


def test_every_case_gets_a_row_and_only_right_ones_a_speed(benchmark, tmp_path, capsys):
    names = ("raises", "refused", "unserved")
    cases = [decode_case(RIGHT, Target(us=1e9)), *(SpeedCase(name, RIGHT) for name in names)]
    path = tmp_path / "rows.json"
    assert not runner.run(benchmark, cases, min_run_time=0.01, json=str(path))
    content = json.loads(path.read_text())
    assert content["kind"] == "a-kind" and content["R"] == 4e12 and content["compile_seconds"] > 0
    assert {row["name"]: row["status"] for row in content["rows"]} == {
        "H4 G1 c32 r16 2xmixed": "ok",
        "raises": "RuntimeError: no memory",
        "refused": "not compiled: ValueError: spills",
        "unserved": "not compiled: no kernel",
    }
    right = content["rows"][0]
    assert right["met"] is True and right["target_us"] == 1e9
    assert right["share"] == pytest.approx(right["TB/s"] / 4)
    out = capsys.readouterr().out
    assert "R = 4.00 TB/s (a test)" in out and "targets met: 1 of 1" in out
    assert "FA3_MHA_us missing: not here (1 shapes)" in out
    assert runner.run(benchmark, cases[:1], min_run_time=0.01)


def test_a_budget_ends_the_run(benchmark, capsys):
    assert runner.run(benchmark, [SpeedCase("one", RIGHT), SpeedCase("two", RIGHT)], budget=1e-9)
    assert "not reached within the budget: 2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "given"),
    [
        ("--help", 0, []),
        ("first --numbers [1,2] --flag", 0, [([1, 2], True)]),
        ("first --numbers 3 4", 1, [([3, 4], False)]),
        ("second name --count 2", 0, [("name", 2)]),
    ],
)
def test_a_verb_that_is_false_is_exit_code_1(words, code, given, monkeypatch):
    calls = []

    def first(numbers: list[int], flag: bool = False) -> bool:
        calls.append((numbers, flag))
        return flag

    def second(name: str, count: int) -> bool:
        calls.append((name, count))
        return True

    monkeypatch.setattr("sys.argv", ["benchmark", *words.split()])
    assert recording.command(first, second, cpu=True) == code and calls == given


@pytest.mark.parametrize(("words", "asked"), [("--device cpu", True), ("--device=cpu", True), ("--device cuda", False)])
def test_a_device_is_given_in_either_way(words, asked, monkeypatch):
    monkeypatch.setattr("sys.argv", ["cliffs.py", *words.split()])
    assert recording.asks_for_cpu() is asked


def test_flags_of_conversions_have_types(monkeypatch):
    asked = []
    monkeypatch.setattr(conversion, "measure_cases", lambda *arguments: asked.append(arguments[-1]) or True)
    words = "ablation --model m --ratios [0.5] --texts a b --max-tokens 64 --only x"
    monkeypatch.setattr("sys.argv", ["conversion.py", *words.split()])
    assert recording.command(conversion.compare, conversion.ablation, cpu=True) == 0
    assert asked == [conversion.Evaluation(only="x", texts=["a", "b"], max_tokens=64)]
