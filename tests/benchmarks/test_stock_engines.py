"""Exports answer prompts in other programs' classes, in a process without this package, and every token is judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import stock_engines
from benchmarks.stock_engines import TransformersSettings, transformers
from mha2mla.modeling import MHA2MLAConfig
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


@torch.no_grad()
def test_a_random_mistral_is_converted(tmp_path, monkeypatch):
    """In float32, with frequencies and widths that the export takes; other names are folders or refused."""
    monkeypatch.setattr(stock_engines, "SIZES", stock_engines.SIZES | {"num_attention_heads": 4, "hidden_size": 256})
    monkeypatch.setattr(stock_engines, "RECIPE", stock_engines.RECIPE | {"calibration.lengths": 512})
    config = MHA2MLAConfig.from_pretrained(stock_engines.converted("random:mistral", str(tmp_path)))
    assert config.source_config["model_type"] == "mistral" and config.dtype == torch.float32
    assert stock_engines.export(tmp_path / "mistral", tmp_path / "vllm", "deepseek-v3", "vllm").is_dir()
    assert stock_engines.converted("a/folder", str(tmp_path)) == "a/folder"
    with pytest.raises(ValueError, match=r"checkpoint is 'random:gpt2'; expected a folder or random: and one of \['ll"):
        stock_engines.converted("random:gpt2", str(tmp_path))


@torch.no_grad()
@pytest.mark.parametrize("spoilt", [False, True])
def test_a_wrong_export_does_not_widen_the_bound(spoilt, tmp_path):
    torch.manual_seed(0)
    model = model_like("smollm2")
    model.save_pretrained(tmp_path / "mla")
    folder = stock_engines.export(tmp_path / "mla", tmp_path / "vllm", "deepseek-v3", "vllm")
    if spoilt:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    load = stock_engines.AutoModelForCausalLM.from_pretrained
    models = [load(tmp_path / "mla", dtype=dtype).eval() for dtype in (torch.bfloat16, torch.float32)]
    forms = stock_engines._engine_forms(folder, models, list(range(5, 45)), "cpu")
    assert len(forms) == (0 if spoilt else 2)


ENGINE = """
import types

__version__ = "0"


class Engine:
    def __init__(self, **options):
        self.server_args = types.SimpleNamespace(attention_backend=options["attention_backend"])
        assert options["skip_tokenizer_init"]

    def generate(self, input_ids, sampling_params):
        assert sampling_params == {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        return [{"output_ids": [*ids, 7, 8]} for ids in input_ids]

    def shutdown(self):
        pass
"""


def test_sglang_answers_in_another_process(tmp_path):
    """By a stand-in for SGLang, whose answers may begin with the prompt."""
    (tmp_path / "sglang.py").write_text(ENGINE)
    settings = json.dumps({"new_tokens": 2, "engine": {"attention_backend": "fa3"}})
    script = Path(stock_engines.__file__).with_name("stock_sglang.py")
    subprocess.run(
        [sys.executable, str(script), settings, str(tmp_path / "answers")],
        input="[[1, 2, 3], [4]]", text=True, check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    found = json.loads((tmp_path / "answers").read_text())
    assert found == {"sglang": "0", "backend": "fa3", "answers": [[7, 8], [7, 8]]}
