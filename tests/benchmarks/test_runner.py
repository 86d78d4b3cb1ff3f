"""The loop of the speed benchmarks on a CPU: right, failing and uncompiled cases, their targets, table and file."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("rich")

from benchmarks import decode, runner
from benchmarks.shapes import SpeedCase, Target, decode_case
from mha2mla.testing.problems import Problem

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
