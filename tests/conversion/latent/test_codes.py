"""Statistics and losses of codes that need one layer's weights at a time are those of the whole model."""

import io
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.latent import codes
from mha2mla.conversion.latent.basis import latent_statistics
from mha2mla.terminal import Span, StagedBar
from tests.conversion import tiny
from tests.conversion.tiny import Recipe, walk_over
from tests.modeling import models

RECIPE = {"layout": "latent", "kv_lora_rank": 32, "qk_rope_head_dim": 8, "preset": "minimal"}


@pytest.fixture(scope="module", params=["llama", "qwen3", "two lengths of text"])
def converted(request, tmp_path_factory):
    """A walk, the tensors of its layers in 16 bits, and the whole model that they make."""
    folder, case = tmp_path_factory.mktemp("codes"), "qwen3" if request.param == "qwen3" else "llama"
    source = tiny.checkpoint(folder / "source", case, num_hidden_layers=3)
    lengths = ((6, 40),) if case == request.param else ((4, 40), (2, 80))
    windows = [tiny.some_tokens(count, length) for count, length in lengths]
    recipe = Recipe(**RECIPE)
    tiny.convert(source, folder / "mla", recipe, calibration=windows, evaluation=tiny.some_tokens(2, 40))
    walk = replace(walk_over(source, recipe, AutoConfig.from_pretrained(source)), windows=TokenBlocks.of(windows))
    walk = replace(walk, geometries=recipe.geometries(walk.spec))
    model = AutoModelForCausalLM.from_pretrained(folder / "mla", dtype=torch.float32).eval().requires_grad_(False)
    layers = [layer.self_attn.state_dict() for layer in model.model.layers]
    return walk, layers, model, windows


def test_statistics_are_those_of_the_whole_model(converted):
    walk, layers, model, windows = converted
    with StagedBar(total=100, file=io.StringIO()) as bar:
        found = codes.streamed_statistics(walk, layers.__getitem__, seed=3, progress=Span(bar, 10, 60))
        assert bar.n == 60 and "basis of the codes, layer 6 of 6" in str(bar)
    expected = latent_statistics(model, windows[-1], seed=3)
    assert len(found) == len(expected) == 3
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in vars(theirs).items():
            assert getattr(ours, name).shape == value.shape
            assert not len(value) or models.relative_error(getattr(ours, name), value) < 1e-4, name


def test_what_codes_lose_is_the_divergence_of_whole_models(converted):
    """Layers share what is measured; together it is that of the model whose layers all have codes."""
    walk, layers, model, windows = converted
    found = codes.losses_of_codes(walk, walk.geometries[0], layers)
    basis = walk.recipe.basis_rule
    statistics = latent_statistics(model, windows[-1])
    state = model.state_dict()
    for index, (layer, each) in enumerate(zip(layers, statistics, strict=True)):
        folded = basis.basis(each).fold(layer)
        state |= {f"model.layers.{index}.self_attn.{name}": tensor for name, tensor in folded.items()}
    model.config.latent_bits = 3
    coded = type(model).from_pretrained(None, config=model.config, state_dict=state, dtype=torch.float32).eval()
    model.config.latent_bits = 16
    with torch.no_grad():
        expected, rounded = (each(windows[-1], use_cache=False).logits.log_softmax(-1) for each in (model, coded))
    divergence = (expected.exp() * (expected - rounded)).sum(-1).mean().item()
    assert sum(layer[3] for layer in found) == pytest.approx(divergence, rel=0.02)
    assert all(layer[16] == 0 < layer[8] < layer[4] < layer[3] < layer[2] for layer in found)
