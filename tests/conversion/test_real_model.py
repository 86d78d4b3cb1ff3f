"""Properties that only a trained model shows: SmolLM2-135M-Instruct from the cache, or skipped by name."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from transformers import AutoConfig, AutoTokenizer

from mha2mla.conversion import recipe as recipes
from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.calibration.texts import load_text, token_windows
from mha2mla.conversion.families import ADAPTERS
from mha2mla.conversion.layer_walk import LayerWalk, computed
from mha2mla.conversion.source.files import CheckpointReader
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.environment import cache_folder
from tests.conversion.tiny import Recipe

pytestmark = pytest.mark.slow
FOLDER = cache_folder() / "SmolLM2-135M-Instruct"
CHOSEN = (2, 27)  # layers


class Layers:
    """Inputs of a few layers, calibration and held-out, and what a recipe loses on them."""

    def __init__(self, folder: Path):
        config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        self.spec = ADAPTERS["llama"].specify(config)
        reader = CheckpointReader(folder)
        model = StreamedModel(
            config, reader, self.spec.sliding_windows, device=torch.device("cpu"), dtype=torch.float32
        )
        fitted = token_windows(tokenizer, load_text("builtin:pydoc"), 256, 8, seed=0)
        held = token_windows(tokenizer, load_text("builtin:prose"), 256, 2)
        windows = TokenBlocks.of(fitted)
        self.walk = LayerWalk(model, ADAPTERS["llama"], self.spec, (), Recipe(), windows, folder)
        self.inputs = list(self._inputs(windows, TokenBlocks.of(held)))

    def _inputs(self, *parts: TokenBlocks):
        """Layer, and batches of what its attention is given in each of two ``parts`` of the text."""
        model = self.walk.model
        with ExitStack() as stack:
            stores = [stack.enter_context(replace(self.walk, windows=part).stores(1))[0] for part in parts]
            for store in stores:
                model.embed(store)
            for layer in range(CHOSEN[-1] + 1):
                module, seen = model.layer(layer), ([], [])
                for store, batches in zip(stores, seen, strict=True):
                    observe = batches.append if layer in CHOSEN else None
                    model.run_layer(module, layer, store, tokens=2048, observe=observe)
                if layer in CHOSEN:
                    yield layer, *seen
                model.source.release()

    def losses(self, recipe: Recipe) -> list[float]:
        """Relative squared error of the attention's output on held-out text, by layer."""
        geometries = (recipe.geometry(self.spec),) * self.spec.num_layers
        walk = replace(self.walk, geometries=geometries, recipe=recipe)
        found = []
        for layer, inputs, held in self.inputs:
            collector = walk.collector(layer)
            for batch in inputs:
                collector.add(batch)
            found.append(_loss(walk, layer, walk.convert(layer, collector.finish())[0], held))
        return found


@torch.inference_mode()
def _loss(walk: LayerWalk, layer: int, tensors: dict[str, torch.Tensor], held: list[torch.Tensor]) -> float:
    source, converted = walk.model.layer(layer).self_attn, walk.empty_attention(layer)
    named = computed(tensors, walk.model)
    error = energy = 0.0
    for window in (window[None] for batch in held for window in batch):
        arguments = walk.model.layer_arguments(layer, window)
        expected = source(window, **arguments)[0]
        found = functional_call(converted, named, (window,), arguments)[0]
        error += float((found - expected).double().square().sum())
        energy += float(expected.double().square().sum())
    return error / energy


@pytest.fixture(scope="module")
def layers():
    if not (FOLDER / "model.safetensors").is_file():
        pytest.skip(f"SmolLM2 is not in {FOLDER}; `mha2mla demo` fetches it")
    return Layers(FOLDER)


def test_the_loss_of_every_layer_falls_with_the_rank(layers):
    keys = {"layout": "shared", "qk_rope_head_dim": 48, "fit_queries": False}
    by_rank = [layers.losses(Recipe(kv_lora_rank=rank, **keys)) for rank in (48, 112, 336)]
    for fewer, more in itertools.pairwise(by_rank):
        assert all(b < a for a, b in zip(fewer, more, strict=True))


def test_the_loss_falls_with_the_rotary_width(layers):
    by_width = [
        sum(layers.losses(Recipe(layout="shared", qk_rope_head_dim=rope, kv_lora_rank=384 - rope)))
        for rope in (16, 48, 160)
    ]
    assert all(more < fewer for fewer, more in itertools.pairwise(by_width))


@pytest.mark.exhaustive
def test_refits_help_on_text_of_another_kind(layers):
    plain = layers.losses(Recipe(layout="shared", fit_queries=False))
    queries = layers.losses(Recipe(layout="shared", fit_queries=True))
    both = layers.losses(Recipe(layout="shared", fit_queries=True, fit_output=True))
    assert sum(queries) < sum(plain) and sum(both) < sum(queries)


def test_our_rules_beat_the_peers_at_equal_bytes(layers):
    """Not a measure of quality, an alarm: the order of methods that the comparison table shows."""
    ours = sum(layers.losses(recipes.Recipe.from_preset("quick")))
    transmla = sum(
        layers.losses(recipes.Recipe.from_preset("published-transmla", qk_rope_head_dim=64, kv_lora_rank=128))
    )
    mha2mla = sum(layers.losses(recipes.Recipe.from_preset("published-mha2mla")))
    assert ours < transmla < mha2mla


def test_rotary_keys_from_the_latent_lose_less_than_stored_ones_at_equal_bytes(layers):
    stored, computed = (
        layers.losses(recipes.Recipe.from_preset("minimal", layout=layout, cache_ratio=0.1875))
        for layout in ("shared", "latent")
    )
    assert all(less < more for less, more in zip(computed, stored, strict=True))
