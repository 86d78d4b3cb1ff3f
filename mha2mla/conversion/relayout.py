"""A converted checkpoint in the layout that caches the latent alone: the same model, numbers moved and none changed.

c' = [c; k_pe before RoPE] is d_c + G d_r wide, as many numbers as were cached; W_KR = [0 I] and b_KR = 0 read its
rotary part, of one rope head that is all heads' side by side (first halves, then second halves), and each query is zero
but for its own head's pairs. Biases of keys are in c', with the encoder's. Under q/k-norm the rotary rows of what
encodes values are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mha2mla.geometry import MLAGeometry

if TYPE_CHECKING:
    from mha2mla.modeling.config import MHA2MLAConfig

SCHEMA_VERSION = 2  # the first that knows the layout
_PER_LAYER = ("num_rope_heads", "kv_lora_rank", "qk_rope_head_dim")


def latent_geometry(geometry: MLAGeometry) -> MLAGeometry:
    """Result for a layer that caches rotary keys."""
    width = geometry.rope_width
    return replace(
        geometry,
        num_rope_heads=1,
        kv_lora_rank=geometry.kv_lora_rank + width,
        qk_rope_head_dim=width,
        rope_from_latent=True,
    )


def latent_config(config: MHA2MLAConfig) -> MHA2MLAConfig:
    geometries = [latent_geometry(config.layer_geometry(index)) for index in range(config.num_hidden_layers)]
    values = {name: [getattr(each, name) for each in geometries] for name in _PER_LAYER}
    values = {name: each[0] if len(set(each)) == 1 else each for name, each in values.items()}
    kept = {name: value for name, value in config.to_dict().items() if name != "model_type"}
    run_time = {"attention_backend": None, "rotary_key_cache": "none"}
    return type(config)(**{**kept, **values, **run_time, "rope_from_latent": True, "schema_version": SCHEMA_VERSION})


def latent_tensors(geometry: MLAGeometry, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of one layer, by their names below ``self_attn.``, in their own dtypes.

    Args:
        geometry: of the layer as it is.
        tensors: all of it (``modeling.MLAAttention``).
    """
    heads, groups = geometry.num_attention_heads, geometry.num_rope_heads
    rank, nope, rope, width = (
        geometry.kv_lora_rank,
        geometry.qk_nope_head_dim,
        geometry.qk_rope_head_dim,
        geometry.rope_width,
    )
    order = torch.arange(width).view(groups, 2, rope // 2).transpose(0, 1).flatten()
    rows = torch.cat([torch.arange(rank), rank + order])  # row order of an encoder
    place = order.argsort().view(groups, rope).repeat_interleave(heads // groups, 0)  # [H, d_r], of a query's dims

    def spread(query: torch.Tensor) -> torch.Tensor:
        """[H, d_n + d_r, ...] -> [H, d_n + G d_r, ...]"""
        wide = query.new_zeros(heads, nope + width, *query.shape[2:])
        wide[:, :nope] = query[:, :nope]
        wide[torch.arange(heads)[:, None], nope + place] = query[:, nope:]
        return wide

    made = dict(tensors)
    for name in {"kv_a_proj.weight", "kv_a_proj.bias", "k_a_proj.weight"} & tensors.keys():
        made[name] = tensors[name][rows]
    for name in {"k_b_proj", "v_b_proj"} & tensors.keys():
        made[name] = torch.nn.functional.pad(tensors[name], (0, width))
    if "q_b_proj" in tensors:
        made["q_b_proj"] = spread(tensors["q_b_proj"])
        made["v_a_proj.weight"] = torch.nn.functional.pad(tensors["v_a_proj.weight"], (0, 0, 0, width))
    else:
        for name in {"q_proj.weight", "q_proj.bias"} & tensors.keys():
            made[name] = spread(tensors[name].unflatten(0, (heads, nope + rope))).flatten(0, 1)
    like = tensors["v_b_proj"]
    made["k_rope_proj.weight"] = torch.eye(rank + width, dtype=like.dtype, device=like.device)[rank:]
    made["k_rope_proj.bias"] = like.new_zeros(width)
    made["inv_freq"] = tensors["inv_freq"].reshape(1, -1)
    return made
