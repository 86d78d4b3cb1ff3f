"""The table of whole models on a CPU: every way is judged before it is timed, and its bytes are its own."""

import json

import pytest
import torch

from benchmarks import whole_models
from benchmarks.whole_models import MODELS, cases, check, compare, made, op_row, step_rows

WAYS = ["source", *whole_models.WAYS, "shared"]
KEPT8 = WAYS[3]


@pytest.fixture
def tiny(monkeypatch):
    """All ways of a model of two layers, by way."""
    for name, value in {"MODELS": {"tiny": (32, 16)}, "SHARED_ROPE": 16, "LONGEST": 64, "MOST": 5}.items():
        monkeypatch.setattr(whole_models, name, value)
    return {case.way: case for case in cases("tiny")}


@pytest.mark.parametrize("name", MODELS)
def test_ways_have_the_bytes_that_are_compared(name):
    found = {case.way: whole_models.cache_bytes_per_token(case.config, 2) for case in cases(name)}
    assert list(found) == WAYS
    latent, rope = MODELS[name]
    layers = cases(name)[0].config.num_hidden_layers
    assert found["computed"] == found["shared"] == 2 * latent * layers
    assert found["kept"] == 2 * (latent + rope) * layers and found["computed"] < found[KEPT8] < found["kept"]
    share = found["computed"] / found["source"]
    assert share == pytest.approx({"llama-2-7b": 0.125, "smollm2-135m": 0.5}.get(name, 0.5))


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_every_way_is_checked_and_timed(way, tiny, monkeypatch):
    case = tiny[way]
    checked = check(case, "cpu", (2, 40))
    assert checked["status"] == "ok" and checked["error"] < 1e-5
    row = op_row(case, 0.01, "cpu", (2, 64))
    assert row["op_us"] > 0 and row["op_error"] < 1e-2
    for found in step_rows(made(case, "cpu"), case, [(2, 64), (64, 64)], 0.01, "cpu"):
        row |= found
    assert row["2x64_ms"] > 0 and row["64x64_ms"] == "does not fit" and row["fit"] == 5
    assert row["tok/s"] == pytest.approx(5e3 / row["fit_ms"])

    def spoilt(case, device):
        model = right(case, device)
        output = next(module for name, module in model.model.named_modules() if name.endswith("0.self_attn.o_proj"))
        output.register_forward_hook(lambda module, given, out: out * (1.01 if out.dtype == torch.float32 else 1))
        return model

    right = whole_models.made
    monkeypatch.setattr(whole_models, "made", spoilt)  # of the model that is judged, not of float64
    wrong = whole_models.distances
    monkeypatch.setattr(whole_models, "distances", lambda exact, new, plain, *rest: wrong(exact, new, exact, *rest))
    assert check(case, "cpu", (2, 40))["status"].startswith("wrong")


def test_the_table_is_written_number_by_number(tiny, monkeypatch, tmp_path):
    compiled, file = [], tmp_path / "rows.json"
    for name, value in {"OP": (2, 64), "SHAPES": ((2, 64), (8, 64)), "CHECKED": (2, 40), "MOST": 600}.items():
        monkeypatch.setattr(whole_models, name, value)
    monkeypatch.setattr(whole_models, "compile_ahead", lambda device, call, run: compiled.append(run()))
    monkeypatch.setattr(whole_models, "read_rate", lambda: {"R": 1e9, "R_from": "nothing"})
    monkeypatch.setattr(whole_models, "room", lambda device: 2e6)
    assert whole_models.whole_models(only="tiny source,tiny kept", min_run_time=0.01, device="cpu", json=str(file))
    rows = json.loads(file.read_text())["rows"]
    assert compiled == [None] and [row["way"] for row in rows] == ["source", "kept", KEPT8]
    assert all(row["status"] == "ok" and row["2x64_ms"] > 0 < row["op_us"] and row["fit"] > 8 for row in rows)
    assert rows[1]["of_source"] == 0.75 and rows[1]["tok/s_of_source"] == rows[1]["tok/s"] / rows[0]["tok/s"]
    assert whole_models.whole_models(budget=0.0, device="cpu", json=str(tmp_path / "none.json"))
    assert not (tmp_path / "none.json").exists()


def test_rows_are_compared_with_their_source():
    source = {"bytes_a_token": 8, "op_us": 10.0, "64x8192_ms": "does not fit", "tok/s": 100.0}
    row = {"bytes_a_token": 4, "op_us": 5.0, "64x8192_ms": 3.0, "tok/s": 150.0, "weights_GB": 1e-3}
    compare(row, source, 1e9)
    assert row["64x8192_over"] == pytest.approx(3.0 / (1.0 + 4 * 64 * 8.192e-3)) and "1x2048_over" not in row
    assert (row["of_source"], row["op_of_source"], row["tok/s_of_source"]) == (0.5, 0.5, 1.5)
    assert "64x8192_of_source" not in row
