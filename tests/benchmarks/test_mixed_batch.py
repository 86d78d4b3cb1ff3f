"""The mixed-batch benchmark at a small size, on the reference: the same results in every way, and a row for each."""

import json

from benchmarks.mixed_batch import mixed_batch


def test_one_call_gives_what_several_give(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert mixed_batch(
        decodes=3,
        context=20,
        prefills=2,
        prompt=11,
        prompt_context=5,
        layer=["small", "small GQA"],
        dtype="float32",
        device="cpu",
        min_run_time=0.001,
        json=str(path),
    )
    rows = json.loads(path.read_text())["rows"]
    assert [(row["way"], row["calls"]) for row in rows[:3]] == [
        ("one call", 1),
        ("decodes, then each prompt", 3),
        ("one sequence at a time", 5),
    ]
    assert len(rows) == 6 and all(row["us"] > 0 and row["difference"] < 1e-6 for row in rows)
    assert rows[2]["difference"] == 0 < rows[0]["difference"] and all(row["same"] for row in rows)
    assert "layer small GQA (gqa_reference); way one call; calls 1;" in capsys.readouterr().out


def test_nothing_is_begun_behind_the_budget(capsys):
    assert mixed_batch(2, 20, 1, 11, layer=["small"], dtype="float32", device="cpu", budget=0)
    assert "small: no time left" in capsys.readouterr().out
