"""The table of GQA decode on a CPU: its shapes, and a row of the reference backend."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.gqa_decode import CASES, COLUMNS, case_name, list_compilations, measure_case
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


def test_what_is_compiled_is_what_each_case_launches_decode_kernels_first():
    pytest.importorskip("tilelang")
    jobs = [(case.shape(), select_kernel(case.shape(), 90), len(case.lengths)) for case in CASES]
    listed = list(list_compilations(jobs, 90, 132))
    assert all(sum(owner == job for owner, _ in listed) == 3 for job in set(jobs) if jobs.count(job) == 1)
    kernels = list(dict.fromkeys(kernel for _, kernel in listed))
    names = [name for name, _ in kernels]
    assert names == sorted(names, key=["compile_choice", "compile_planner", "compile_merge"].index)
    assert (
        names.count("compile_choice") == len({case.shape() for case in CASES}) and names.count("compile_planner") == 1
    )
    # one sequence, 99 partials of it; 64 sequences, one or two partials of each
    merges = [arguments for name, arguments in kernels if name == "compile_merge"]
    assert (28, 128, "bfloat16", 64, 90) in merges and (28, 128, "bfloat16", 4, 90) in merges
