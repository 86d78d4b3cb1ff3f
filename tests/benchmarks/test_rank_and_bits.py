"""Rank times bits on a tiny model, from conversion to table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import mha2mla
from benchmarks import rank_and_bits
from benchmarks.recording import Recording
from mha2mla.pipeline.run import convert

MEASURED = {"texts": ["builtin:prose"], "lengths": [48], "max_tokens": 96}
CPU = torch.device("cpu")


def test_a_study_from_end_to_end(tiny_source, tmp_path, capsys, monkeypatch):
    def convert_shortly(source, folder, recipe, **keys):
        fit = replace(recipe.fit, steps=min(recipe.fit.steps, 8))
        return convert(source, folder, replace(recipe, fit=fit), **keys)

    monkeypatch.setattr(mha2mla, "convert", convert_shortly)
    file, work = tmp_path / "rows.json", tmp_path / "work"
    settings = {
        "models": str(tiny_source),
        "work": str(work),
        "texts": ["builtin:prose"],
        "lengths": [48, 96],
        "max_tokens": 96,
        "calibration_tokens": 1024,
        "device": "cpu",
        "json": str(file),
        "picture": str(tmp_path / "rows.svg"),
    }
    fits = ("source", "rank", "fitted", "care", "auto:0.16", "auto:0.125", "auto:0.25")  # 0.0625 holds no block
    assert rank_and_bits.study(**settings, only=fits)
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    kinds = [row["cache"].split(",")[0] for row in rows]
    assert list(dict.fromkeys(kinds[:6])) == ["source", "quick"], "the most telling ones first"
    assert len(rows) == len({row["cache"] for row in rows}), "0.3125 and 0.1875 are 32 of 64, too"
    by_name = {row["cache"]: row for row in rows}
    full = by_name["latent of 64, 16 bits"]
    assert full["bytes"] == 1.0 and full["KL 48"] < 1e-6 and full["ratio 96"] == pytest.approx(1.0, abs=1e-4)
    coded = by_name["latent of 32, 4 bits, rotation"]
    assert coded["bytes"] == (32 * 4 / 8 + 4) / 128 and coded["KL 48"] > by_name["latent of 32, 16 bits"]["KL 48"]
    assert [row["seqlen"] for row in coded["texts"]] == [48, 96] and coded["± 48"] > 0 and coded["± 96"] is None
    for ratio in (0.25, 0.16, 0.125):
        quick, fitted = by_name[f"quick, auto {ratio}"], by_name[f"cpu, auto {ratio}"]
        assert 0 < quick["bytes"] <= ratio and (quick["ranks"], quick["by_layer"]) == (
            fitted["ranks"],
            fitted["by_layer"],
        )
        assert quick["bits"] < 16 and quick["seconds"] > 0
    assert by_name["care 0.5"]["bytes"] <= 0.5
    drawn = (tmp_path / "rows.svg").read_text(encoding="utf-8")
    curves = ("source, KV codes", "converted", "latent codes")
    assert all(f"windows of {length} tokens, {name}: " in drawn for length in (48, 96) for name in curves)
    monkeypatch.setattr(rank_and_bits.StudiedModel, "converted", None)  # a later run searches nothing anew
    later = rank_and_bits.StudiedModel(str(tiny_source), work, Recording("", None, measured=MEASURED), None, CPU)
    assert [list(each) for each in zip(*later.choice(0.16), strict=True)] == [
        by_name["cpu, auto 0.16"][key] for key in ("ranks", "by_layer")
    ]
    monkeypatch.undo()
    converted = work / "source-32" / "model.safetensors"
    before = converted.stat().st_mtime_ns
    assert rank_and_bits.study(**settings, only=["rank"], minutes=0.0), "nothing begins after the last minute"
    assert "no time for rank 0.584" in capsys.readouterr().err and converted.stat().st_mtime_ns == before


@pytest.mark.parametrize(("name", "why"), [("rows.gif", "rows.gif"), ("notes.svg", "there and no SVG picture")])
def test_a_picture_that_cannot_be_written_ends_it_at_once(name, why, tmp_path):
    (tmp_path / "notes.svg").write_text("of a user's own")
    with pytest.raises(ValueError, match=why):
        rank_and_bits.study("nowhere", str(tmp_path), picture=str(tmp_path / name))
    assert (tmp_path / "notes.svg").read_text() == "of a user's own"
