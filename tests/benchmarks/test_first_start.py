"""Rows of the benchmark of the first token, of processes that end well and of others."""

import json

from benchmarks import first_start


def test_every_process_gets_a_row(tmp_path, monkeypatch):
    well = {"tokens": [1, 2], "compiled_alone": 0}
    found = {
        "parallel": {"status": "failed: exit code 1"},
        "filled": well,
        "2 cores": {**well, "compiled_alone": 3},
        "serial": {**well, "tokens": [1, 3], "compiled_alone": 3},
    }
    monkeypatch.setattr(first_start, "begin", lambda name, *_: (None, 0.0))
    monkeypatch.setattr(first_start, "end", lambda name, *_: {"case": name, **found[name]})
    assert not first_start.measure(json=str(tmp_path / "rows.json"))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["case"]: row["status"] for row in rows} == {
        "parallel": "failed: exit code 1",
        "filled": "ok",
        "2 cores": "wrong: 3 kernels were not compiled ahead",
        "serial": "wrong: other tokens than the first row's",
    }
