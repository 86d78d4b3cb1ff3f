"""The table of GQA decode on a CPU: its shapes, and a row of the reference backend."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from benchmarks.decode import measure_gqa
from benchmarks.runner import COLUMNS
from benchmarks.shapes import decode_case, gqa_cases
from mha2mla.kernel_testing import compiling
from mha2mla.kernel_testing.cases import Case
from mha2mla.kernels.gqa_decode.selection import select_kernel


def test_names_are_unique_and_every_shape_has_a_kernel():
    assert len({case.name for case in gqa_cases()}) == len(gqa_cases())
    for case in gqa_cases():
        assert select_kernel(case.problem.shape(), 90).kernel == "streamed"


def test_a_row_on_a_cpu():
    case = decode_case(dataclasses.replace(gqa_cases()[-1].problem, lengths=(40, 3)))
    assert case.name == "H16 G16 d192/128 2xmixed"
    row = measure_gqa(case, True, 0.002, device="cpu")
    assert row["status"] == "ok" and row["us"] > 0
    assert row["MB"] == 43 * 16 * (192 + 128) * 2 / 1e6
    assert row["FA3_us"].startswith("missing: ")
    assert {"name", "MB", "kernel", "error", "us", "FA3_us", "status"} <= set(row) & set(COLUMNS)


def test_what_is_compiled_is_what_each_case_launches(monkeypatch):
    pytest.importorskip("tilelang")
    from mha2mla.kernels.split_kv import launch

    compiled = []
    monkeypatch.setattr(launch, "compile_for", lambda function, *_: compiled.append(function.attrs["global_symbol"]))
    for name in ("compile_choice", "compile_merge", "compile_planner"):
        monkeypatch.setattr(launch, name, cache(getattr(launch, name).__wrapped__))
    monkeypatch.setattr(compiling, "num_sms", lambda _: 132)
    case = Case(0, gqa_cases()[5].problem, "bfloat16")
    compiling.compile_launches(compiling.compile_job([case], torch.device("cpu")))
    assert sorted(compiled)[1:] == ["mla_decode_combine", "mla_decode_plan"] and len(compiled) == 3
