"""The conversion benchmark on a tiny model: its rows, one of them from end to end, and what it does not repeat."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import conversion
from mha2mla.conversion.families import ADAPTERS
from mha2mla.conversion.recipe import Recipe
from tests.conversion import tiny

SMOLLM2 = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
SHORT = {"preset": "minimal", "calibration_tokens": 64, "calibration_lengths": 32, "calibration_text": "builtin:pydoc"}


def test_every_row_has_a_name_of_its_own_and_fits_its_ratio():
    spec = ADAPTERS["llama"].specify(tiny.config("llama", **SMOLLM2))
    cases = conversion.comparison()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        geometry = case.recipe.geometry(spec)
        ratio = geometry.cache_numel_per_token / geometry.source_cache_numel_per_token
        assert 0.97 * float(case.name.split()[0]) < ratio <= float(case.name.split()[0])
    peers = {
        case.name: (case.recipe.geometry(spec).qk_rope_head_dim, case.recipe.geometry(spec).kv_lora_rank)
        for case in cases
        if "transmla" in case.name
    }
    assert peers["0.5 published-transmla"] == (64, 128) and peers["0.3125 published-transmla"] == (32, 88)


@pytest.mark.parametrize(
    ("preset", "layout"), [("quick", None), ("quick", "shared"), ("shared", None), ("per-group", None)]
)
def test_an_ablation_changes_one_key_of_its_preset(preset, layout):
    cases = conversion.ablations(preset, (0.5,), layout=layout)
    assert {case.recipe.target.layout for case in cases} == {layout or Recipe.from_preset(preset).target.layout}
    # A rotary share is no key of the latent layout.
    assert any("rope.share" in case.name for case in cases) == (cases[0].recipe.target.layout != "latent")
    assert len({case.name for case in cases}) == len(cases) > 15
    base = cases[0].recipe.flat()
    for case in cases[1:]:
        changed = {key: value for key, value in case.recipe.flat().items() if value != base[key]}
        assert len(changed) == 1 and case.name.endswith("=".join(map(str, *changed.items())))


def test_rows_are_measured_written_and_not_measured_again(tmp_path, monkeypatch, capsys):
    source = str(tiny.checkpoint(tmp_path / "source"))
    cases = [
        conversion.Case("a", tiny.Recipe(layout="shared", qk_rope_head_dim=8, kv_lora_rank=24, **SHORT)),
        conversion.Case("too wide", tiny.Recipe(layout="shared", qk_rope_head_dim=8, kv_lora_rank=512, **SHORT)),
    ]
    monkeypatch.setattr(conversion, "comparison", lambda *args, **keys: cases)
    path = tmp_path / "rows.json"
    texts = {"texts": ["builtin:prose"], "max_tokens": 64}
    assert not conversion.compare(json=str(path), model=source, device="cpu", **texts)
    first, second = json.loads(path.read_text())["rows"]
    assert first["status"] == "ok" and first["geometry"] == "1 x 8 + 24" and first["cache_ratio"] == 0.5
    measured = first["quality"]["rows"]
    assert [row["seqlen"] for row in measured] == [256] and first["kl"] == max(row["kl"] for row in measured)
    assert first["builtin:prose"] == [row["perplexity_ratio"] for row in measured] and min(first["builtin:prose"]) > 0
    assert "kv_lora_rank is 512" in second["status"]

    monkeypatch.setattr(conversion, "measure_case", lambda *args, **keys: pytest.fail("measured again"))
    assert conversion.compare(only="a", json=str(path), model=source, device="cpu", **texts)
    assert "1 x 8 + 24" in capsys.readouterr().out
    with pytest.raises(ValueError, match="only is 'no such row'"):
        conversion.compare(only="no such row", model=source, device="cpu")


def test_an_ablation_always_has_the_row_that_it_is_compared_with(monkeypatch):
    recipe, measured = tiny.Recipe(layout="shared", qk_rope_head_dim=8, kv_lora_rank=24, **SHORT), []
    cases = [conversion.Case(name, recipe, is_base=name == "base") for name in ("base", "base a", "base b")]
    monkeypatch.setattr(conversion, "ablations", lambda *args, **keys: cases)
    monkeypatch.setattr(conversion, "load_model", lambda *args, **keys: SimpleNamespace(device="cpu"))
    monkeypatch.setattr(conversion, "load_tokenizer", lambda *args, **keys: None)
    monkeypatch.setattr(conversion, "Calibration", lambda *args: None)

    def row(case, *args, **keys):
        measured.append(case.name)
        return {"name": case.name, "status": "ok", "seconds": 0.0}

    monkeypatch.setattr(conversion, "measure_case", row)
    assert conversion.ablation(only=" a", model="source", device="cpu")
    assert measured == ["base", "base a"]
    with pytest.raises(ValueError, match="only is 'c'"):
        conversion.ablation(only="c", model="source", device="cpu")
