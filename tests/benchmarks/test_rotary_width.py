"""Rotary widths by layer: a mixture is never worse than one width, gains where layers differ, and the probe ends."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("jsonargparse")

from benchmarks import rotary_width
from tests.conversion import tiny


def test_a_mixture_gains_where_layers_differ_and_nowhere_else():
    falls, flat = {32: 0.4, 64: 0.1, 128: 0.05}, {32: 0.011, 64: 0.0105, 128: 0.01}
    (row,) = rotary_width.mixtures([falls, flat], [64])
    assert row["widths"] == [96, 32] and row["loss, alike"] == pytest.approx(0.1105)
    assert row["loss, mixed"] == pytest.approx((0.1 * 0.05) ** 0.5 + 0.011) and 0 < row["gain"] < 1
    assert row["mean width at equal loss"] == 64  # 32 less costs either of them more than the other has to give
    (alike,) = rotary_width.mixtures([falls, falls], [64])
    assert alike["gain"] == pytest.approx(0, abs=1e-12) and alike["mean width at equal loss"] == 64


def test_the_probe_from_end_to_end(tmp_path):
    source, file = tiny.checkpoint(tmp_path / "source", head_dim=32, num_hidden_layers=2), tmp_path / "widths.json"
    assert rotary_width.probe(
        "minimal", widths=[32, 64], means=[32], tokens=512, model=str(source), device="cpu", json=str(file)
    )
    written = json.loads(file.read_text(encoding="utf-8"))
    assert [row["layer"] for row in written["layers"]] == [0, 1, "all"]
    assert all(row["d_r = 32"] > row["d_r = 64"] > 0 for row in written["layers"])
    assert written["rows"][0]["loss, mixed"] == pytest.approx(written["layers"][-1]["d_r = 32"])
