"""Stored rotary keys moved into the latent: the same model in every geometry, biases, norms and factors included."""

import pytest
import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling import MHA2MLAForCausalLM
from mha2mla.pipeline.relayout import latent_config, latent_geometry, latent_tensors
from tests.modeling import models

STORED = [case for case, (_, keys) in models.GEOMETRIES.items() if not keys.get("rope_from_latent")]


def moved(model: MHA2MLAForCausalLM) -> MHA2MLAForCausalLM:
    config, state = latent_config(model.config), dict(model.state_dict())
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}.self_attn."
        tensors = {name: state.pop(prefix + name) for name in layer.self_attn.state_dict()}
        found = latent_tensors(model.config.layer_geometry(index), tensors)
        state |= {prefix + name: tensor for name, tensor in found.items()}
    made = MHA2MLAForCausalLM(config).eval()
    made.load_state_dict(state, strict=True)
    return made


def test_as_many_numbers_are_cached():
    geometry = MLAGeometry(8, 2, 40, 12, 20, 32, 2, 8)
    found = latent_geometry(geometry)
    assert found == MLAGeometry(8, 1, 64, 24, 20, 32, 2, 8, rope_from_latent=True)
    assert found.cache_numel_per_token == geometry.cache_numel_per_token
    full = MLAGeometry(8, 2, 64, 32, 0, 32, 2)
    assert full.is_full_rank and latent_geometry(full) == MLAGeometry(8, 1, 128, 64, 0, 32, 2, rope_from_latent=True)


@pytest.mark.parametrize("case", STORED)
@torch.no_grad()
def test_the_logits_are_the_same(case):
    """Frequencies of zero have no factor, whichever head they are of."""
    model = models.mla_model(case, rope_attention_scaling=1.3, rotary_key_cache="auto")
    for layer in model.model.layers:
        layer.self_attn.inv_freq.mul_(torch.linspace(0.5, 2, layer.self_attn.inv_freq.shape[0])[:, None])
        layer.self_attn.inv_freq[-1, -1] = 0
    found, ids = moved(model), models.tokens(2, 30)
    expected = model(ids, use_cache=False).logits
    assert models.relative_error(found(ids, use_cache=False).logits, expected) < 1e-5
    cache = found(ids[:, :20]).past_key_values
    logits = [found(part, past_key_values=cache).logits for part in ids[:, 20:].split((1, 1, 8), 1)]
    assert models.relative_error(torch.cat(logits, 1), expected[:, 20:]) < models.TOLERANCE
    assert found.config.cache_bytes_per_token(2) == model.config.cache_bytes_per_token(2)
    assert all(layer.tensors.keys() == {"latent_cache"} for layer in cache.layers)
