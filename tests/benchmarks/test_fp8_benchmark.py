"""The fp8 benchmark without a GPU: one small shape from end to end."""

from __future__ import annotations

import pytest

pytest.importorskip("rich")

from benchmarks import decode
from benchmarks.shapes import decode_case, fp8_cases
from mha2mla.kernels.mla_decode.fp8_selection import refusal_fp8, select_fp8
from mha2mla.testing.problems import Problem


def test_every_shape_is_one_that_the_kernel_takes():
    for case in fp8_cases():
        shape = case.problem.shape()
        assert refusal_fp8(shape) is None
        assert select_fp8(shape).num_stages >= 2
    (asked,) = (case for case in fp8_cases() if case.target.peers)
    assert asked.name == "H32 G1 c512 r64 64x16384"


def test_one_shape_from_end_to_end():
    row = decode.measure_fp8(decode_case(Problem(4, 1, 32, 16, (130,) * 2)), True, 0.01, device="cpu")
    assert row["status"] == "ok" and row["us"] > 0 and row["bf16_us"] > 0 and row["gain"] == row["bf16_us"] / row["us"]
    assert row["bf16_error"] < row["original_error"] < 0.06
    assert row["MB"] == 260 * (32 + 4 + 32) / 1e6
