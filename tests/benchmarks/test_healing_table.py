"""The table of docs/healing.md from a study's rows."""

from __future__ import annotations

import json

from benchmarks import healing_table

OLD = {"bytes": 0.1875, "ratio 512": 1.45, "ratio 8,192": 1.5}
NEW = {"conversion": "0.1875", "rate": 1e-4, "tokens": 2e6, "seconds": 21.4, "kl_held_out_before": 0.4}


def test_a_conversion_has_the_arm_that_held_out_windows_choose(tmp_path, capsys):
    rows = [
        {"name": "text", "seconds": 3.0},
        {"name": "0.125x3 converted", **OLD, "bytes": 0.125},
        {"name": "0.1875 converted", **OLD},
        {"name": "a", "train": "all", "kl_held_out": 0.2, "ratio 512": 1.1, "ratio 8,192": 1.2, **NEW},
        {"name": "b", "train": "attention", "kl_held_out": 0.3, "ratio 512": 1.0, "ratio 8,192": 1.0, **NEW},
        {"name": "c", "status": "OutOfMemoryError: "},
    ]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": rows, "compared": {"lengths": [512, 8192]}}))
    assert healing_table.table([str(file)])
    assert capsys.readouterr().out.splitlines() == [
        "| bytes kept | before, 512 / 8,192 | after | held-out KL | trained | time |",
        "|---|---|---|---|---|---|",
        "| 0.1875, 16 bits | 1.450 / 1.500 | 1.100 / 1.200 | 0.400 → 0.200 | all weights, 1e-04, 2.0M tokens | 21 s |",
    ]
