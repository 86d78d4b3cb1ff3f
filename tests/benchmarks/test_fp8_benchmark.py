"""The fp8 benchmark without a GPU: one small shape from end to end, and the append table."""

from __future__ import annotations

import pytest

pytest.importorskip("rich")

from benchmarks import fp8_decode
from mha2mla.kernel_testing.problems import Problem
from mha2mla.kernels.mla_decode.fp8_selection import refusal_fp8, select_fp8


def test_every_shape_is_one_that_the_kernel_takes():
    for heads, groups, d_c, d_r, *_ in fp8_decode.SHAPES:
        shape = Problem(heads, groups, d_c, d_r, (1,)).shape()
        assert refusal_fp8(shape) is None
        assert select_fp8(shape).num_stages >= 2
    assert fp8_decode.TARGET[0] in [fp8_decode.name_of(*shape) for shape in fp8_decode.SHAPES]


def test_one_shape_from_end_to_end():
    row = fp8_decode.measure((4, 1, 32, 16, 2, 130, 0.01), device="cpu")
    assert row["status"] == "ok" and row["us"] > 0 and row["us_bf16"] > 0
    assert row["bf16_error"] < row["original_error"] < 0.06
    assert row["MB"] == 260 * (32 + 4 + 32) / 1e6


def test_append_table():
    assert fp8_decode.append(tokens=130, device="cpu", min_run_time=0.01)
