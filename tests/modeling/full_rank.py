"""The full-rank conversion of a model in memory, which is the model to rounding."""

from __future__ import annotations

import torch
from torch import nn

from mha2mla.conversion.families import adapter_for
from mha2mla.conversion.layer_walk import converted_config
from mha2mla.modeling import MHA2MLAForCausalLM
from tests.conversion import tiny


def full_rank(source: nn.Module, *, rope_from_latent: bool = False) -> MHA2MLAForCausalLM:
    """``source``'s weights as an MLA model that rotates every pair: of a latent of the values beside rotary keys, or
    with ``rope_from_latent`` of the keys before RoPE and the values."""
    adapter = adapter_for(source.config.to_dict())
    spec = adapter.specify(source.config)
    recipe = tiny.Recipe(layout="latent" if rope_from_latent else "per-group", cache_ratio=1.0)
    geometries = recipe.geometries(spec)
    model = MHA2MLAForCausalLM(converted_config(source.config, spec, geometries, recipe)).eval()
    own, cpu = tiny.State(source), torch.device("cpu")
    state = {name: tensor for name, tensor in source.state_dict().items() if ".self_attn." not in name}
    for index, geometry in enumerate(geometries):
        weights = adapter.attention_weights(own, spec, index, device=cpu, dtype=torch.float64)
        tensors = tiny.convert_layer(spec.of_layer(index), geometry, recipe, weights, None)
        state |= {f"model.layers.{index}.self_attn.{name}": tensor.float() for name, tensor in tensors.items()}
    model.load_state_dict(state, strict=True)
    return model
