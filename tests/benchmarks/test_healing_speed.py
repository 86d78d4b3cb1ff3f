"""Healing's speed by part, on a tiny model."""

from __future__ import annotations

import json

from benchmarks import healing_speed


def test_steps_and_passes_have_their_parts(tiny_source, tiny_converted, tmp_path):
    file = tmp_path / "rows.json"
    assert healing_speed.text(str(tiny_source), batches=[2], long_batches=[3], device="cpu", json=str(file))
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [(row["way"], row["batch"]) for row in rows] == [
        *(("paged", 2), ("static", 2), ("paged", 3), ("static", 3), ("loop", 2), ("loop", 3))
    ]
    assert all(row["wall_ms"] > 0 and row["host_ms"] > 0 for row in rows)
    file = tmp_path / "passes.json"
    sizes = {
        "device": "cpu",
        "json": str(file),
        "tokens": 128,
        "lengths": [32],
        "train": ["attention"],
        "compiled": [False],
    }
    assert healing_speed.passes(str(tiny_source), str(tiny_converted), **sizes)
    loss, row = json.loads(file.read_text(encoding="utf-8"))["rows"]
    parts = row["source_ms"] + row["student_ms"] + row["loss_ms"] + row["backward_ms"]
    assert loss["loss_ms"] > 0 and 0 < row["backward_ms"] < parts and row["tokens_per_s"] > 0


def test_a_part_that_fails_leaves_the_others(tiny_source, tmp_path):
    rows = healing_speed.Rows("healing-passes", None, 60.0)
    rows.attempt({"way": "none"}, lambda: {}["missing"])
    rows.attempt({"way": "other"}, lambda: {"wall_ms": 1.0})
    first, second = rows.table.rows
    assert first["status"].startswith("KeyError") and "status" not in second
