import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from benchmarks.convert_scale import _recipe_and_tokens

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "convert_scale.py"


def measure(layers, tmp_path):
    out = tmp_path / f"{layers}.json"
    shape = ["--hidden=256", "--heads=4", "--kv_heads=4", "--intermediate=16384", "--vocabulary=500"]
    small = ["--windows=1", "--length=128", "--shard_mib=32"]
    command = [sys.executable, str(SCRIPT), f"--layers={layers}", *shape, *small]
    command += [f"--folder={tmp_path}", f"--json={out}"]
    subprocess.run(command, check=True, capture_output=True)
    return json.loads(out.read_text())["rows"][0]


@pytest.mark.parametrize("preset", [None, "cpu"])
def test_steps_are_those_asked_for(preset):
    usual, _ = _recipe_and_tokens(preset, {}, 1, 64, None, LlamaConfig())
    asked, _ = _recipe_and_tokens(preset, {}, 1, 64, 7, LlamaConfig())
    assert asked.fit.steps == 7 and (usual.fit.steps > 7) == (preset is not None)


@pytest.mark.slow
def test_memory_does_not_grow_with_layers(tmp_path):
    """25 MB a layer, 50 in float32: 6 layers more are 150 MB of checkpoint, and less than two layers of memory."""
    few, many = (measure(layers, tmp_path) for layers in (1, 7))
    assert many["source_gb"] - few["source_gb"] > 0.15
    assert many["peak_rss_gib"] - few["peak_rss_gib"] < 0.1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.json", "7.json"]
