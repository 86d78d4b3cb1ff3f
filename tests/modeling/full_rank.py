"""The exact full-rank MLA model of an MHA/GQA model, written out by hand: every pair is rotated, and c is the values,
or with ``rope_from_latent`` the values and the keys before RoPE."""

from __future__ import annotations

import torch
from torch import nn

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling import MHA2MLAConfig, MHA2MLAForCausalLM


def full_rank_geometry(
    num_attention_heads: int, num_key_value_heads: int, head_dim: int, *, rope_from_latent: bool = False
) -> MLAGeometry:
    """The geometry that reproduces an MHA/GQA layer to rounding: every pair rotated, the latent is the values, or with
    ``rope_from_latent`` the keys before RoPE and the values."""
    width = num_key_value_heads * head_dim
    return MLAGeometry(
        num_attention_heads=num_attention_heads,
        num_rope_heads=1 if rope_from_latent else num_key_value_heads,
        kv_lora_rank=2 * width if rope_from_latent else width,
        qk_rope_head_dim=width if rope_from_latent else head_dim,
        qk_nope_head_dim=0,
        v_head_dim=head_dim,
        num_key_value_heads=num_key_value_heads,
        rope_from_latent=rope_from_latent,
    )


def full_rank(source: nn.Module, *, rope_from_latent: bool = False, **config_keys) -> MHA2MLAForCausalLM:
    """``source``'s weights as an MLA model with G = h_kv, d_r = d_v = d_h, d_c = h_kv * d_h, d_n = 0; or with
    ``rope_from_latent`` G = 1, d_r = h_kv * d_h, d_c = 2 * h_kv * d_h."""
    attention = source.model.layers[0].self_attn
    kv_heads, head_dim = source.config.num_key_value_heads, attention.head_dim
    qk_norm = hasattr(attention, "k_norm")
    heads = source.config.num_attention_heads
    geometry = full_rank_geometry(heads, kv_heads, head_dim, rope_from_latent=rope_from_latent)
    config = MHA2MLAConfig(
        source_config=source.config.to_dict(),
        **{
            name: getattr(geometry, name)
            for name in (
                "num_rope_heads",
                "kv_lora_rank",
                "qk_rope_head_dim",
                "qk_nope_head_dim",
                "v_head_dim",
                "rope_from_latent",
            )
        },
        qk_norm=qk_norm,
        attention_q_bias=attention.q_proj.bias is not None,
        attention_kv_bias=attention.k_proj.bias is not None and (qk_norm or not rope_from_latent),
        attention_o_bias=attention.o_proj.bias is not None or attention.v_proj.bias is not None,
        softmax_scale=attention.scaling,
        rope_attention_scaling=getattr(source.model.rotary_emb, "attention_scaling", 1.0),
        **config_keys,
    )
    model = MHA2MLAForCausalLM(config).eval()
    state = {name: tensor for name, tensor in source.state_dict().items() if ".self_attn." not in name}
    for index, layer in enumerate(source.model.layers):
        tensors = attention_tensors(layer.self_attn, kv_heads, rotary_table(source, index))
        if rope_from_latent:
            tensors = with_rotary_keys_in_the_latent(tensors, geometry)
        state |= {f"model.layers.{index}.self_attn.{name}": tensor for name, tensor in tensors.items()}
    model.load_state_dict(state, strict=True)
    return model


def with_rotary_keys_in_the_latent(tensors: dict[str, torch.Tensor], geometry: MLAGeometry) -> dict[str, torch.Tensor]:
    """:func:`attention_tensors` with c = [values; keys], and one rope head of all heads' pairs: first halves, then
    second halves, of which a query reads its own kv head's."""
    kv_heads, head_dim, width = geometry.num_key_value_heads, geometry.v_head_dim, geometry.qk_rope_head_dim
    tensors = dict(tensors)
    order = torch.arange(width).view(kv_heads, 2, head_dim // 2).transpose(0, 1).flatten()
    spread = torch.eye(width)[order].view(width, kv_heads, head_dim).transpose(0, 1)  # [h_kv, d_r, d_h]
    spread = spread.repeat_interleave(geometry.num_attention_heads // kv_heads, 0)
    if "q_b_proj" in tensors:
        tensors["q_b_proj"] = spread
        tensors["v_a_proj.weight"] = torch.cat([tensors["v_a_proj.weight"], torch.zeros_like(tensors["k_proj.weight"])])
    else:
        for name in {"q_proj.weight", "q_proj.bias"} & tensors.keys():
            query = tensors[name].view(geometry.num_attention_heads, head_dim, -1)
            tensors[name] = (spread @ query).view(-1, *tensors[name].shape[1:])
    bias = tensors.pop("kv_a_proj.bias", torch.zeros(2 * width))[width:]
    tensors["k_rope_proj.weight"] = torch.eye(2 * width)[width:][order]
    tensors["k_rope_proj.bias"] = bias[order]
    tensors["v_b_proj"] = torch.eye(width, 2 * width).view(kv_heads, head_dim, -1)
    tensors["inv_freq"] = tensors["inv_freq"].reshape(1, -1)
    return tensors


def rotary_table(source: nn.Module, index: int) -> torch.Tensor:
    """[d_h / 2] of layer ``index``: the model's, or its layer type's (Gemma 3)."""
    rotary = source.model.rotary_emb
    if hasattr(rotary, "inv_freq"):
        return rotary.inv_freq
    return getattr(rotary, f"{source.config.layer_types[index]}_inv_freq")


def attention_tensors(attention: nn.Module, kv_heads: int, inv_freq: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of one layer, named as in the checkpoint."""
    head_dim, groups = attention.head_dim, attention.num_key_value_groups
    width = kv_heads * head_dim
    heads = kv_heads * groups
    identity = torch.eye(width)
    tensors = {
        "q_proj.weight": attention.q_proj.weight,
        "v_b_proj": identity.view(kv_heads, head_dim, width),
        "o_proj.weight": attention.o_proj.weight,
        "inv_freq": inv_freq.expand(kv_heads, -1),
    }
    if hasattr(attention, "k_norm"):
        tensors |= {
            "q_norm.weight": attention.q_norm.weight,
            "k_norm.weight": attention.k_norm.weight,
            "q_b_proj": torch.eye(head_dim).expand(heads, -1, -1),
            "k_proj.weight": attention.k_proj.weight,
            "k_a_proj.weight": torch.cat([torch.zeros(width, width), identity]),
            "v_a_proj.weight": attention.v_proj.weight,
        }
        if attention.k_proj.bias is not None:
            tensors["k_proj.bias"] = attention.k_proj.bias
    else:
        tensors["kv_a_proj.weight"] = torch.cat([attention.v_proj.weight, attention.k_proj.weight])
        if attention.k_proj.bias is not None:
            tensors["kv_a_proj.bias"] = torch.cat([torch.zeros(width), attention.k_proj.bias])
    if attention.q_proj.bias is not None:
        tensors["q_proj.bias"] = attention.q_proj.bias
    offset = torch.zeros(attention.o_proj.out_features)
    if attention.v_proj.bias is not None:
        values = attention.v_proj.bias.view(kv_heads, 1, head_dim).expand(-1, groups, -1).flatten()
        offset = offset + attention.o_proj.weight @ values
    if attention.o_proj.bias is not None:
        offset = offset + attention.o_proj.bias
    if attention.v_proj.bias is not None or attention.o_proj.bias is not None:
        tensors["o_proj.bias"] = offset
    return {name: tensor.detach() for name, tensor in tensors.items()}
