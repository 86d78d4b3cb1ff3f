"""Exports answer prompts in transformers' own classes, in a process without this package, and every token is judged."""

import json

import pytest
import torch

from benchmarks import stock_engines
from benchmarks.stock_engines import TransformersSettings, transformers
from tests.serving.test_deepseek import model_like


@pytest.mark.parametrize("spoilt", [False, True])
def test_every_token_of_exports_is_judged(spoilt, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model_like("smollm2").bfloat16().save_pretrained(tmp_path / "mla")
    right = stock_engines.export

    def export(folder, destination, format, engine):
        """With ``spoilt`` an eps in the config for engines that the weights were not made for."""
        config = right(folder, destination, format, engine) / "config.json"
        if spoilt and engine == "vllm":
            config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-6}))
        return config.parent

    monkeypatch.setattr(stock_engines, "export", export)
    monkeypatch.setattr(stock_engines, "PROMPTS", 16)
    file = tmp_path / "rows.json"
    assert (
        transformers(str(tmp_path / "mla"), arguments=TransformersSettings(tokens=6, longest=40, json=str(file)))
        != spoilt
    )
    own, engines = json.loads(file.read_text())["rows"]
    assert (own["engine"], own["status"]) == ("transformers", "ok")
    assert (engines["engine"], engines["status"]) == ("vllm", "wrong" if spoilt else "ok")
    assert own["sequences"] == engines["sequences"] == 16 and own["tokens"] == engines["tokens"] == 96
