"""The study of healing on a tiny model, from conversion to table."""

from __future__ import annotations

import json

import pytest
import torch

import mha2mla
from benchmarks import healing
from mha2mla.pipeline.run import convert
from tests.conversion import tiny
from tests.ops import FunctionCalls


def study(tiny_source, tmp_path, *arms, right=True, **keys):
    settings = {
        "model": str(tiny_source),
        "work": str(tmp_path / "work"),
        "arms": list(arms),
        "preset": "minimal",
        "text_tokens": 512,
        "batch_tokens": 256,
        "tokens_at_once": 128,
        "length": 64,
        "long_length": 64,
        "evaluations": 2,
        "texts": ["builtin:prose"],
        "lengths": [48, 96],
        "max_tokens": 96,
        "prompts": 2,
        "device": "cpu",
        "json": str(tmp_path / "rows.json"),
    }
    assert healing.study(**{**settings, **keys}) is right
    return {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]}


@pytest.fixture(autouse=True)
def short(tmp_path, monkeypatch):
    """Texts of this test's own, and conversions that are calibrated on few tokens."""

    def convert_shortly(source, folder, recipe, **keys):
        return convert(source, folder, {**tiny.SHORT, **recipe}, **keys)

    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(mha2mla, "convert", convert_shortly)


def test_a_study_from_end_to_end(tiny_source, tmp_path, capsys):
    arms = ("0.5:attention:1e-4:512", "0.5:all:1e-4:512", "1.0:attention:1e-4:512", "0.25x4:best:best:1024:own:full")
    rows = study(tiny_source, tmp_path, *arms, text="generated-diverse")
    source = [f"source, KV {bits} bits, keys by channel" for bits in (4, 3, 2)]
    assert list(rows)[:6] == ["text", "0.5 converted", *source, "0.5:attention:1e-4:512"]
    full, last = rows["1.0:attention:1e-4:512"], rows[list(rows)[-1]]
    assert 0 < sum(part["seconds"] for part in rows["text"]["parts"]) <= rows["text"]["seconds"]
    assert full["KL 96"] < 0.1 * rows["0.5 converted"]["KL 96"]
    assert full["healing"]["trained"]["kept_step"] == 2
    assert rows["0.5:all:1e-4:512"]["tokens"] == 512 and rows["0.5 converted"]["bytes"] == 0.5
    assert (last["tokens"], last["bytes"]) == (1024, rows["0.25x4 converted"]["bytes"])
    assert last["name"].startswith("0.25x4:best:best:1024:own:full (a")
    assert len(list((tmp_path / "cache" / "texts").iterdir())) == 2, "one text for all arms, and a conversion's own"
    assert last["healing"]["settings"]["own_share"] == healing.OWN_SHARE
    assert last["healing"]["text"]["name"] == "generated-diverse"
    for row in (last, rows["0.25x4 converted"]):
        assert row["perplexity_of_sources_text"] > 1 and row["perplexity_of_converteds_text"] > 1
        assert row["generation"][0]["num_prompts"] == 2 and row["probes"]
    curve = json.loads((tmp_path / "work" / "curve.json").read_text(encoding="utf-8"))
    assert curve == last["healing"]["trained"]["curve"]
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").glob("*-minimal-*/model.safetensors")}
    capsys.readouterr()
    assert list(study(tiny_source, tmp_path, *arms, minutes=0)) == ["text"]
    assert "left out: 0.5:attention:1e-4:512, 0.5:all:1e-4:512" in capsys.readouterr().out
    measured = [rows[name] for name in source]
    with FunctionCalls(torch.Tensor.aminmax) as calls:
        rows = study(tiny_source, tmp_path, "0.5:mlp:1e-4:512", arms[0], right=False)
    assert [rows[name] for name in source] == measured and not calls.made, "no KV cache is quantised again"
    failed = rows["0.5:mlp:1e-4:512"]
    assert failed["status"].startswith("ValueError: train is 'mlp'") and "Traceback" in failed["traceback"]
    assert rows[arms[0]]["tokens"] == 512, "the others go on"
    assert len(made) == 3 and all(path.stat().st_mtime_ns == time for path, time in made.items())


@pytest.mark.parametrize(
    "text", ["0.5", "half:all:1e-4:512", "0.5:all:fast:512", "0.5x:all:best:much", "0.5:all:1e-4:512:half"]
)
def test_an_arm_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match=f"arms has '{text}'; expected RATIO"):
        healing.Arm.of(text)


def test_an_arm_may_choose_bits_by_layer(tiny_source, tmp_path):
    rows = study(tiny_source, tmp_path, "0.25xauto:attention:1e-4:256")
    assert rows["0.25xauto:attention:1e-4:256"]["bytes"] == rows["0.25xauto converted"]["bytes"] <= 0.25


def test_speed_trains_a_random_pair(tmp_path):
    file = tmp_path / "speed.json"
    assert healing.speed("tiny", bits="4", steps=3, batch_tokens=64, tokens_at_once=32, device="cpu", json=str(file))
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert row["tokens"] == 3 * 64 and row["tokens_per_second"] > 0
    assert 0 < row["trained_parameters"] < row["shared_parameters"] < row["parameters"]


@pytest.mark.parametrize("train", ["attention", "all"])
def test_a_first_step_is_measured_by_its_size(train, tiny_source, tiny_converted, tmp_path):
    file = tmp_path / "step.json"
    sizes = {"tokens": 512, "text_tokens": 4096, "length": 32, "long_length": 64}
    models = (str(tiny_source), str(tiny_converted))
    assert healing.first_step(*models, "builtin:prose", train, **sizes, steps=[1e-4, 1.0], device="cpu", json=str(file))
    none, large, small = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert none["change"] == 0 > small["change"] and large["change"] > 0.5
    assert small["held_out_kl"] == pytest.approx(none["held_out_kl"] + small["change"]) and small["rate"] == 1e-4
