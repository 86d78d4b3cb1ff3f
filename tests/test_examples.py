"""Every page of examples/ runs, and checks its own numbers."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {"lm_eval_task": "lm_eval", "lora": "peft", "serve_vllm": "vllm"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, monkeypatch):
    assert len(path.read_text().splitlines()) <= 60
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    if path.stem == "serve_vllm" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
