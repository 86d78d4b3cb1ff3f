"""Greedy tokens of a converted SmolLM2: captured = uncaptured = a forward pass without a cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import mha2mla
from mha2mla.environment import cache_folder
from mha2mla.modeling.captured import GraphStore
from tests.modeling import models
from tests.modeling.tape import Tape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FOLDER = cache_folder() / "SmolLM2-135M-Instruct"
PROMPT = "A pendulum is a weight hung from a pivot so that it can swing freely. When it is moved sideways, gravity"


def first_layers(folder: Path, layers: int) -> Path:
    """SmolLM2's embeddings and first layers, as they were trained."""
    folder.mkdir()
    for path in FOLDER.glob("*.json"):
        shutil.copy(path, folder)
    config = json.loads((FOLDER / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(FOLDER / "model.safetensors")
    names = [n for n in tensors if not n.startswith("model.layers.") or int(n.split(".")[2]) < layers]
    save_file({name: tensors[name] for name in names}, folder / "model.safetensors", {"format": "pt"})
    return folder


WHOLE = [("per-group", 30), ("latent", 30)]
PARAMS = [("per-group", 6), *(pytest.param(each, marks=[pytest.mark.exhaustive]) for each in WHOLE)]


@pytest.fixture(scope="module", params=PARAMS, ids=lambda param: f"{param[0]}-{param[1]}-layers")
def folders(request, tmp_path_factory) -> tuple[Path, Path]:
    """A source and what it was converted to."""
    if not (FOLDER / "model.safetensors").is_file():
        pytest.skip(f"SmolLM2 is not in {FOLDER}; `mha2mla demo` fetches it")
    layout, layers = request.param
    folder = tmp_path_factory.mktemp("exact")
    source = FOLDER if layers == 30 else first_layers(folder / "source", layers)
    recipe = {"preset": "minimal", "layout": layout, "calibration.tokens": 512, "calibration.lengths": 512}
    mha2mla.convert(source, folder / "converted", recipe, evaluation_tokens=256, progress=False)
    return source, folder / "converted"


def prompt() -> torch.Tensor:
    return AutoTokenizer.from_pretrained(FOLDER)(PROMPT, return_tensors="pt")["input_ids"]


def generate(model, ids, tokens, **options):
    keys = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **keys, **options)


@pytest.mark.parametrize("tokens", [24, pytest.param(256, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["mla_reference", "mla_expanded"])
def test_tokens_in_float32(folders, name, tokens):
    """Where the expanded form attends nothing is captured, and the tokens are the same again."""
    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).eval()
    model.config.attention_backend = name
    model.graph_store, ids = GraphStore(Tape), prompt()
    out = generate(model, ids, tokens, output_logits=True)
    assert out.sequences.shape[1] == ids.shape[1] + tokens
    assert len(out.past_key_values.captured) == (name != "mla_expanded")
    assert torch.equal(generate(model, ids, tokens, capture=False).sequences, out.sequences)
    # Attention is causal: one pass over all of it says what a pass over every prefix would.
    with torch.no_grad():
        uncached = model(out.sequences[:, :-1], use_cache=False).logits[:, ids.shape[1] - 1 :]
    assert torch.equal(uncached.argmax(-1), out.sequences[:, ids.shape[1] :])
    # Few layers say one token again and again, whatever its position.
    assert models.relative_error(torch.stack(out.logits, 1), uncached) < 1e-4


@pytest.mark.gpu
def test_logits_of_bfloat16_kernels(folders):
    """Captured, over 256 tokens: as near to the converted model in float32 as twice what bfloat16 costs the source."""
    ids = prompt().cuda()
    source, made = (
        {dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval() for dtype in DTYPES}
        for folder in folders
    )
    out = generate(made[torch.bfloat16], ids, 256, output_logits=True)
    assert {line.backend for line in made[torch.bfloat16].attention_report()} == {"mla_paged"}
    assert len(out.past_key_values.captured) == 1
    places = slice(ids.shape[1] - 1, -1)
    with torch.no_grad():
        exact, of_source, of_source_exact = (
            model(out.sequences, use_cache=False).logits[:, places]
            for model in (made[torch.float32], source[torch.bfloat16], source[torch.float32])
        )
    error = models.relative_error(torch.stack(out.logits, 1), exact)
    assert error <= 2 * models.relative_error(of_source, of_source_exact)


DTYPES = (torch.bfloat16, torch.float32)
