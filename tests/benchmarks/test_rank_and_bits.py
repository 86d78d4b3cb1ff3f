"""Rank times bits on a tiny model, from conversion to table."""

from __future__ import annotations

import json

import pytest

from benchmarks import rank_and_bits


def test_a_study_from_end_to_end(tiny_source, tmp_path, capsys):
    file, work = tmp_path / "rows.json", tmp_path / "work"
    settings = {
        "models": str(tiny_source),
        "work": str(work),
        "ranks": [0.5, 1.0, 0.55],
        "texts": ["builtin:prose"],
        "lengths": [48, 96],
        "max_tokens": 96,
        "calibration_tokens": 1024,
        "device": "cpu",
        "json": str(file),
    }
    assert rank_and_bits.study(**settings)
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert sorted(folder.name for folder in work.iterdir()) == ["source-32", "source-64"], "0.55 is 32 of 64, too"
    kv, latents, ablations = (
        len(part) for part in (rank_and_bits.KV_CACHES, rank_and_bits.LATENT_CACHES, rank_and_bits.ABLATIONS)
    )
    assert len(rows) == len({row["cache"] for row in rows}) == kv + 2 * (1 + latents) + ablations
    by_name = {row["cache"]: row for row in rows}
    full = by_name["latent of 64, 16 bits"]
    assert full["bytes"] == 1.0 and full["KL 48"] < 1e-6 and full["ratio 96"] == pytest.approx(1.0, abs=1e-4)
    coded = by_name["latent of 32, 4 bits, rotation"]
    assert coded["bytes"] == 0.5 * 5 / 16 and coded["KL 48"] > by_name["latent of 32, 16 bits"]["KL 48"]
    assert [row["seqlen"] for row in coded["texts"]] == [48, 96] and coded["± 48"] > 0 and coded["± 96"] is None
    before = (work / "source-32" / "model.safetensors").stat().st_mtime_ns
    settings["ranks"] = [0.5]
    assert rank_and_bits.study(**settings)
    assert (work / "source-32" / "model.safetensors").stat().st_mtime_ns == before
    assert "latent of 32, 4 bits, importance, group 64" in capsys.readouterr().out
