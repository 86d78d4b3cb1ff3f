"""The study of healing on a tiny model, from conversion to table."""

from __future__ import annotations

import json

from benchmarks import healing


def study(tiny_source, tmp_path, **keys):
    settings = {
        "model": str(tiny_source),
        "work": str(tmp_path / "work"),
        "cache_ratio": 0.5,
        "preset": "minimal",
        "train": ["attention", "all"],
        "rates": [1e-4],
        "tokens": [512, 1024],
        "text_tokens": 512,
        "batch_tokens": 256,
        "length": 64,
        "long_length": 64,
        "texts": ["builtin:prose"],
        "lengths": [48, 96],
        "max_tokens": 96,
        "device": "cpu",
        "json": str(tmp_path / "rows.json"),
    }
    assert healing.study(**{**settings, **keys})
    return {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]}


def test_a_study_from_end_to_end(tiny_source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "cache"))
    rows = study(tiny_source, tmp_path)
    source = [f"source, KV {bits} bits, keys by channel" for bits in (4, 3, 2)]
    assert list(rows)[:6] == ["converted", *source, "full rank, healed", "attention 0.0001"]
    assert rows["full rank, healed"]["KL 96"] < 0.1 * rows["converted"]["KL 96"]
    assert rows["full rank, healed"]["healing"]["trained"]["kept_step"] == 2
    assert rows["all 0.0001"]["tokens"] == 512 and rows["converted"]["bytes"] == 0.5
    assert any(row.get("tokens") == 1024 for row in rows.values())
    assert len(list((tmp_path / "cache" / "texts").iterdir())) == 1, "every arm trains on the same text"
    capsys.readouterr()
    assert list(study(tiny_source, tmp_path, minutes=0)) == ["converted", *source]
    assert "left out: full rank, healed, attention 0.0001, all 0.0001" in capsys.readouterr().out
