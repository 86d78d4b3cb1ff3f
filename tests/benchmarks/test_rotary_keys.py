"""The benchmark of kept rotary keys on a CPU: shapes have kernels, and all ways are judged before they are timed."""

import pytest

from benchmarks import measuring, rotary_keys
from benchmarks.rotary_keys import HEADS, WIDTHS, op_problem, op_row
from mha2mla.kernels.split_kv.op import compiled_shape

RATE = 4e9


@pytest.mark.parametrize("widths", WIDTHS)
def test_every_call_has_a_kernel_and_its_bytes(widths):
    for heads in HEADS:
        problem = op_problem(heads, *widths)
        kept, kept8 = (rotary_keys.with_kept_keys(problem, way) for way in rotary_keys.KEPT)
        for each in (problem, kept, kept8):
            assert each.op.refusal(each.shape()) is None and each.op.select(compiled_shape(each.shape()), 90)
        assert 0.96 * rotary_keys.OP_BYTES < kept.cache_bytes() <= rotary_keys.OP_BYTES
        assert kept.cache_bytes() * widths[0] == problem.cache_bytes() * sum(widths)
        assert kept8.cache_bytes() * 2 * widths[0] == problem.cache_bytes() * (2 * widths[0] + widths[1] + 4)


def test_an_op_row_has_all_ways(monkeypatch):
    problem = op_problem(9, 48, 16, 2, 20_000)
    row = op_row(problem, RATE, 0.01, "cpu")
    assert row["status"] == "ok" and row["kept_MB"] == row["computed_MB"] * 64 / 48
    assert row["kept8_MB"] == row["computed_MB"] * (96 + 20) / 96
    for way in ("computed", "kept", "kept8"):
        assert row[f"{way}_limit_us"] == pytest.approx(row[f"{way}_MB"] * 1e12 / RATE)
        assert row[f"{way}_share"] == row[f"{way}_limit_us"] / row[f"{way}_us"]
    right = measuring.judge
    monkeypatch.setattr(measuring, "judge", lambda inputs, out, lse: right(inputs, out * 1.1, lse))
    row = op_row(problem, RATE, 0.01, "cpu")
    assert row["status"].startswith("kept: missing: wrong result: ") and "kept_us" not in row
