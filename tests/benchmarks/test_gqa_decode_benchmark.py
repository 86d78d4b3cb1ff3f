"""The table of GQA decode on a CPU: its shapes, and a row of the reference backend."""

from __future__ import annotations

import dataclasses

from benchmarks.decode import measure_gqa
from benchmarks.runner import COLUMNS
from benchmarks.shapes import decode_case, gqa_cases
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
