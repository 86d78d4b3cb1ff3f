"""The decode benchmark without a GPU: its shapes and targets, and one small shape measured from end to end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import decode
from benchmarks.peers import checked
from benchmarks.shapes import MLA_PEERS, SpeedCase, Target, choose, decode_case, decode_cases, target_us
from mha2mla.kernels.mla_decode.selection import refusal
from mha2mla.kernels.split_kv.op import compiled_shape
from mha2mla.testing.problems import Problem


def test_every_shape_has_a_name_of_its_own_and_is_one_that_kernels_take():
    cases = decode_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert cases == decode_cases(), "lengths are drawn from a seed"
    for case in cases:
        problem = case.problem
        assert refusal(problem.shape()) is None
        assert case.target.than is None or case.target.than[0] in {other.name for other in cases}
    names = {case.name for case in cases}
    assert {"H32 G32 c512 r16 16x16384", "H128 G1 c512 r64 128x8192", "H32 G32 c512 r16 64x16384 w1024+4"} <= names
    for case in cases:
        share = case.target.share or 0
        assert case.problem.cache_bytes() >= (2**28 if share > 0.7 else 130e6 if share else 0), case.name


def test_choosing_brings_what_targets_refer_to():
    assert [case.name for case in choose(decode_cases(), "p16")] == [
        "H32 G32 c512 r16 64x2048",
        "H32 G1 c512 r64 64x4096",
        "H32 G32 c512 r16 64x2048 p16",
        "H32 G1 c512 r64 64x4096 p16",
    ]
    with pytest.raises(ValueError, match="only is 'H7'"):
        choose(decode_cases(), "H7")


def test_targets_in_microseconds():
    problem = Problem(32, 32, 512, 16, (1000,) * 10)  # 20.48 MB

    def limit(target: Target, row=None, rows=None, rate=4e12):
        return target_us(SpeedCase("a case", problem, target), row or {}, rows or {}, rate)

    assert limit(Target()) is None
    assert limit(Target(us=7)) == 7
    assert limit(Target(us=7, share=0.8)) == pytest.approx(20.48e6 / 3.2e12 * 1e6)
    assert limit(Target(share=0.8), rate=None) is None
    assert limit(Target(tflops=100)) == pytest.approx(problem.flops() / 1e14 * 1e6)
    assert limit(Target(than=("a", 1.1)), rows={"a": {"us": 10.0, "MB": 10.24}}) == pytest.approx(22)
    assert limit(Target(than=("a", 1.1)), rows={"a": {"status": "hung"}}) is None
    row = {"FlashMLA_us": 9.0, "FA3_MLA_us": "missing: none", "FA3_MHA_us": 1.0}
    assert limit(Target(peers=(MLA_PEERS, 1.1)), row) == pytest.approx(9.9)


def test_one_shape_from_end_to_end(monkeypatch):
    monkeypatch.delenv("MHA2MLA_PEERS", raising=False)
    case = decode_case(Problem(4, 1, 512, 64, (130,) * 2, combined=True, slack=0))
    row = decode.measure(case, True, 0.03, "cpu")
    assert row["status"] == "ok"
    assert row["us_p20"] <= row["us"] <= row["us_p80"]
    assert row["FlashMLA_us"] == "missing: MHA2MLA_PEERS names no folder"
    assert row["Triton_us"].startswith("missing: ") and row["FA3_MLA_us"].startswith("missing: ")
    assert isinstance(row["torch_us"], float)
    assert row["MB"] == pytest.approx(2 * 130 * 576 * 2 / 1e6)
    windowed = decode_case(replace(case.problem, window=64, sinks=4))
    row = decode.measure(windowed, True, 0.03, "cpu")
    assert row["status"] == "ok"
    assert row["FlashMLA_us"].startswith("missing: no sinks")


def test_a_wrong_peer_is_no_baseline():
    expected = torch.ones(3, dtype=torch.float64)
    assert checked(lambda: lambda: expected * 1.1, lambda out: (out, expected)).startswith("missing: wrong result")
    assert checked(lambda: lambda: expected / 0, lambda out: (out, expected)).startswith("missing: wrong result")
    assert checked(lambda: 1 / 0, lambda out: (out, expected)) == "missing: ZeroDivisionError: division by zero"
    assert not isinstance(checked(lambda: lambda: expected, lambda out: (out, expected)), str)


def test_the_sanitizer_runs_every_kernel_family_of_hopper():
    from benchmarks import sanitize

    shapes = [(problem.op, compiled_shape(problem.shape())) for problem in sanitize.PROBLEMS]
    kernels = {op.select(shape, 90).kernel for op, shape in shapes}
    assert kernels >= {"swap_ab_ws", "heads_on_m", "swap_ab_cluster"}
    assert kernels >= {"latent_ws", "latent_cluster", "latent_portable", "latent_fp8"}
    assert any(problem.window for problem in sanitize.PROBLEMS)
    assert {problem.seqlen_q for problem in sanitize.PROBLEMS} >= {1, 2, 3, 4}
