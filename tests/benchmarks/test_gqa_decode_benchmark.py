"""The table of GQA decode on a CPU: its shapes, and a row of the reference backend."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from benchmarks.gqa_decode import CASES, COLUMNS, case_name, compile_job, compile_one, measure_case
from mha2mla.kernels.gqa_decode.selection import select_kernel


def test_names_are_unique_and_every_shape_has_a_kernel():
    assert len({case_name(case) for case in CASES}) == len(CASES)
    for case in CASES:
        assert select_kernel(case.shape(), 90).kernel == "streamed"


def test_a_row_on_a_cpu():
    problem = dataclasses.replace(CASES[-1], lengths=(40, 3))
    assert case_name(problem) == "H16 G16 d192/128 2x40"
    row = measure_case(problem, None, True, 0.002, device="cpu")
    assert row["status"] == "ok" and row["us"] > 0
    assert row["MB"] == 43 * 16 * (192 + 128) * 2 / 1e6
    assert row["FA3_us"].startswith("missing: ")
    assert set(row) & set(COLUMNS)


def test_what_is_compiled_is_what_each_case_launches(monkeypatch):
    pytest.importorskip("tilelang")
    from mha2mla.kernels.split_kv import launch

    compiled = []
    monkeypatch.setattr(launch, "compile_for", lambda function, *_: compiled.append(function.attrs["global_symbol"]))
    for name in ("compile_choice", "compile_merge", "compile_planner"):
        monkeypatch.setattr(launch, name, cache(getattr(launch, name).__wrapped__))
    compile_one(compile_job(CASES[5], None, 90, 132))
    assert sorted(compiled)[1:] == ["mla_decode_combine", "mla_decode_plan"] and len(compiled) == 3
