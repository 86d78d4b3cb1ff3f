"""The code that lies in a converted folder: it runs without the package and gives the same numbers."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import mha2mla
from mha2mla.checkpoints import CheckpointError
from mha2mla.eval.inspection import verify_weights
from mha2mla.modeling import MHA2MLAForCausalLM, configuration_mha2mla
from mha2mla.modeling.config import AUTO_MAP, CODE_FILES
from mha2mla.serving.export import export
from tests.conversion import tiny
from tests.modeling.models import (
    TOLERANCE,
    as_file,
    full_rank,
    left_mask,
    mla_model,
    relative_error,
    source_model,
    tokens,
)

RUN = """
import importlib.abc, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mha2mla":
            raise ImportError("mha2mla is blocked")

sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModel, AutoModelForCausalLM
found = {}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    ids, mask = torch.load(folder + "/inputs.pt")
    with torch.no_grad():
        torch.save(model(ids).logits, folder + "/logits.pt")
    found[folder] = [
        model.generate(ids, attention_mask=mask, cache_implementation=kind, max_new_tokens=8, do_sample=False,
                       pad_token_id=0).tolist()
        for kind in ("dynamic", "static")
    ]
    low = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    assert low.model.layers[0].self_attn.inv_freq.dtype == torch.float32
model.save_pretrained(folder + "-again")
assert AutoModelForCausalLM.from_pretrained(folder + "-again", trust_remote_code=True).config.auto_map
print(json.dumps(found))
"""
SAVED = {
    "gemma3": {},
    "olmo2": {"rope_from_latent": True},
    "llama-yarn-tied": {},
    "qwen2-sliding": {"rope_from_latent": True},
}


def folders(root: Path) -> list[Path]:
    """Everything that writes a converted folder: convert, relayout, export, save_pretrained."""
    tiny.checkpoint(root / "source", "qwen3", head_dim=16)
    tiny.convert(root / "source", root / "converted", {"layout": "per-group", **tiny.SHORT})
    tiny.convert(root / "converted", root / "relayout", {"layout": "latent"})
    export(root / "converted", root / "exported", "remote-code")
    for case, keys in SAVED.items():
        full_rank(source_model(case), **keys).save_pretrained(root / case)
    mla_model("per layer", attention_window=5, num_sink_tokens=2).save_pretrained(root / "windowed")
    return [root / name for name in ("converted", "relayout", "exported", *SAVED, "windowed")]


@torch.no_grad()
def test_folders_run_without_the_package(tmp_path):
    torch.manual_seed(0)
    expected, mask = {}, left_mask(12, 3, 0)
    for folder in folders(tmp_path):
        assert {name for name in CODE_FILES if (folder / name).is_file()} == set(CODE_FILES)
        assert json.loads((folder / "config.json").read_text())["auto_map"] == AUTO_MAP
        for trust in (False, True):  # where the package is imported its own class wins
            model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust, dtype=torch.float32).eval()
            assert type(model) is MHA2MLAForCausalLM
        ids = tokens(2, 12)
        torch.save((ids, mask), folder / "inputs.pt")
        made = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        expected[str(folder)] = (model(ids).logits, made.tolist())
    done = subprocess.run(
        [sys.executable, "-c", RUN, *expected],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for folder, (logits, made) in expected.items():
        assert relative_error(torch.load(f"{folder}/logits.pt"), logits) < TOLERANCE, folder
        assert found[folder] == [made, made], folder


def test_code_files_import_torch_and_transformers():
    for name in CODE_FILES:
        text = Path(mha2mla.__file__).with_name("modeling").joinpath(name).read_text()
        names = set(re.findall(r"^(?:from|import) ([\w.]+)", text, re.MULTILINE))
        allowed = {"__future__", "math", "sys", "types", "typing", "collections", "torch", "transformers"}
        assert {each.split(".")[0] for each in names} <= allowed | {"", "huggingface_hub"}, name
    assert mha2mla.__version__ == configuration_mha2mla.CODE_VERSION


def test_changed_code_fails_verification(tiny_converted, tmp_path):
    copy = shutil.copytree(tiny_converted, tmp_path / "copy")
    assert {row["file"] for row in verify_weights(copy)} >= set(CODE_FILES)
    code = copy / "modeling_mha2mla.py"
    code.write_text(code.read_text() + "# changed\n")
    with pytest.raises(CheckpointError, match="modeling_mha2mla.py has SHA-256"):
        verify_weights(copy)
    code.unlink()
    with pytest.raises(CheckpointError, match="modeling_mha2mla.py is missing"):
        verify_weights(copy)


def test_a_newer_schema_is_refused_by_the_file_too():
    values = mla_model().config.to_dict()
    with pytest.raises(ValueError, match="schema_version is 9; expected at most 2"):
        configuration_mha2mla.MHA2MLAConfig(**{**values, "schema_version": 9})
    assert not as_file(mla_model()).tp_plan
