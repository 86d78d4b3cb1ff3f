"""Greedy tokens of a converted SmolLM2: captured = uncaptured = a forward pass without a cache."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mha2mla
from mha2mla.cache_folder import cache_folder
from mha2mla.modeling.captured import StepCapture
from tests.modeling import models
from tests.modeling.tape import Tape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FOLDER = cache_folder() / "SmolLM2-135M-Instruct"
PROMPT = "A pendulum is a weight hung from a pivot so that it can swing freely. When it is moved sideways, gravity"


@pytest.fixture(scope="module", params=["per-group", pytest.param("latent", marks=pytest.mark.exhaustive)])
def converted(request, tmp_path_factory) -> str:
    if not (FOLDER / "model.safetensors").is_file():
        pytest.skip(f"SmolLM2 is not in {FOLDER}; `mha2mla demo` fetches it")
    folder = tmp_path_factory.mktemp("exact") / request.param
    recipe = {"preset": "minimal", "layout": request.param, "calibration.tokens": 2048, "calibration.lengths": 512}
    mha2mla.convert(str(FOLDER), folder, recipe, progress=False)
    return str(folder)


def prompt() -> torch.Tensor:
    return AutoTokenizer.from_pretrained(FOLDER)(PROMPT, return_tensors="pt")["input_ids"]


def generate(model, ids, tokens, **options):
    keys = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **keys, **options)


@pytest.mark.parametrize("tokens", [48, pytest.param(256, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["mla_reference", "mla_expanded"])
def test_tokens_in_float32(converted, name, tokens):
    """Where the expanded form attends nothing is captured, and the tokens are the same again."""
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    model.config.attention_backend = name
    model.step_capture, ids = StepCapture(Tape), prompt()
    out = generate(model, ids, tokens)
    assert out.sequences.shape[1] == ids.shape[1] + tokens
    assert len(out.past_key_values.captured) == (name != "mla_expanded")
    assert torch.equal(generate(model, ids, tokens, capture=False).sequences, out.sequences)
    # Attention is causal: one pass over all of it says what a pass over every prefix would.
    with torch.no_grad():
        uncached = model(out.sequences[:, :-1], use_cache=False).logits[:, ids.shape[1] - 1 :]
    assert torch.equal(uncached.argmax(-1), out.sequences[:, ids.shape[1] :])


@pytest.mark.gpu
def test_logits_of_bfloat16_kernels(converted):
    """Captured, over 256 tokens: as near to the converted model in float32 as twice what bfloat16 costs the source."""
    ids = prompt().cuda()
    made = {dtype: AutoModelForCausalLM.from_pretrained(converted, dtype=dtype).cuda().eval() for dtype in DTYPES}
    source = {dtype: AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).cuda().eval() for dtype in DTYPES}
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
