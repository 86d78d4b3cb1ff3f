"""A converted layer in DeepSeek-V3's classes: what they can hold, and the tensors that make them compute the same.

DeepSeek's latent goes through an RMSNorm, ours does not. One more channel of the latent, of weight zero and with a
large bias C, makes the norm an identity: with r channels, c / rms([c, C]) = c sqrt(r) / C · (1 - |c|² / 2C² + …), which
the norm's weight and kv_b_proj scale back. That bias exists in transformers' class; engines that skip it would compute
something else without a word, so a tensor that they do not know makes them refuse the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mha2mla.families import FAMILIES
from mha2mla.modeling.config import MHA2MLAConfig

CONSTANT = 4096.0  # C: exact in 16 bits, and |c|² / 2C² is far below their precision
LATENT_MULTIPLE = 8  # channels of the latent
# Their layers are DeepSeek's: RMSNorm, attention, RMSNorm, gated MLP.
_LIKE_DEEPSEEK = [name for name, family in FAMILIES.items() if family.llama_decoder and not family.qk_norm]
GUARD = "model.kv_a_proj_with_mqa_needs_its_bias"


@dataclass(frozen=True)
class Frequencies:
    """Where the pairs of every layer's table are in the one that DeepSeek's classes compute.

    Attributes:
        theta: its base.
        width: rotary dims there, d_R: frequency j is ``theta ** (-2 j / d_R)``.
        places: per layer, the j of each pair.
    """

    theta: float
    width: int
    places: tuple[tuple[int, ...], ...]


def refusals(config: MHA2MLAConfig) -> list[str]:
    """Reasons, by the config, for which DeepSeek's classes would be wrong or cannot hold it; empty without any."""
    geometries = {config.layer_geometry(index) for index in range(config.num_hidden_layers)}
    source = config.build_source_config()
    windows = {config.layer_sliding_window(index) for index in range(config.num_hidden_layers)}
    scalings = {config.layer_rope_scaling(index) for index in range(config.num_hidden_layers)}
    checks = {
        "the layout is 'latent': they rotate a key that is cached, and compute none from the latent": (
            not config.has_rope_cache
        ),
        f"num_rope_heads is {sorted({g.num_rope_heads for g in geometries})}: they have one rotary key for all heads": (
            any(g.num_rope_heads != 1 for g in geometries)
        ),
        "the ranks of the layers differ: they have one kv_lora_rank (recipe key latent.ranks: uniform)": (
            len(geometries) > 1
        ),
        "every pair rotates (qk_nope_head_dim is 0): their queries have an un-rotated part": (
            any(g.qk_nope_head_dim == 0 for g in geometries)
        ),
        "queries have a bias, which they drop": config.attention_q_bias,
        "keys and values have a bias, which engines drop": config.attention_kv_bias,
        "o_proj has a bias, which engines drop (recipe key latent.centered: false)": config.attention_o_bias,
        "queries and keys are normalised before RoPE, which they do not do": config.qk_norm,
        f"layers have a sliding window ({sorted(filter(None, windows))}), which they ignore": windows != {None},
        f"cos and sin are scaled by {sorted(scalings)} (YaRN, longrope), which they do in their own way": (
            scalings != {1.0}
        ),
        f"the source's model_type is {source.model_type!r}; layers like theirs have {', '.join(_LIKE_DEEPSEEK)}": (
            source.model_type not in _LIKE_DEEPSEEK
        ),
        f"attention_window is {config.attention_window}, which they do not have": config.attention_window is not None,
        "the MLP has biases, which they have not": bool(getattr(source, "mlp_bias", False)),
    }
    return [reason for reason, holds in checks.items() if holds]


def place_frequencies(tables: Sequence[Tensor], theta: float, head_dim: int) -> Frequencies:
    """The narrowest table of DeepSeek's in which all of the layers' frequencies are.

    Args:
        tables: per layer inv_freq [1, d_r / 2].
        theta, head_dim: of the source's RoPE, in whose table they were.

    Raises:
        ValueError: there is none: a frequency is there twice, or zero, or scaled.
    """
    for index, table in enumerate(tables):
        values = sorted(table.flatten().tolist())
        for value, following in zip(values, [*values[1:], math.inf], strict=True):
            if value == following or value == 0:
                what = "a pair that does not rotate" if value == 0 else f"frequency {value:.6g} more than once"
                raise ValueError(
                    f"layer {index} has {what}; DeepSeek's classes have every frequency of their table once, and"
                    " would rotate by others (recipe key rope.selection: uniform takes every frequency once)"
                )
    least = max(2 * table.numel() for table in tables)
    for width in range(least, head_dim + 1, 2):
        places = [_places(table, theta, width) for table in tables]
        if all(place is not None for place in places):
            return Frequencies(theta, width, tuple(places))
    raise ValueError(
        f"rotary frequencies such as {tables[0].flatten()[0]:.6g} are in no table of theta={theta:g} up to {head_dim}"
        " dims (llama3, linear or other RoPE scaling); DeepSeek's classes would rotate by others"
    )


def _places(table: Tensor, theta: float, width: int) -> tuple[int, ...] | None:
    """The j of each frequency theta^(-2j / width), or None."""
    exact = -torch.log(table.flatten().double()) / math.log(theta) * width / 2
    nearest = exact.round()
    # A float32 frequency is right to 1e-7 or so; a place is off by that over log(theta) times width / 2.
    close = (exact - nearest).abs() * 2 * math.log(theta) / width < 1e-5
    fits = bool(close.all()) and int(nearest.min()) >= 0 and int(nearest.max()) < width // 2
    return tuple(int(place) for place in nearest) if fits else None


def latent_width(kv_lora_rank: int) -> int:
    """Channels of the latent there: one more, and a multiple of 8."""
    return -(-(kv_lora_rank + 1) // LATENT_MULTIPLE) * LATENT_MULTIPLE


def deepseek_config(config: MHA2MLAConfig, frequencies: Frequencies) -> dict[str, Any]:
    geometry, source = config.layer_geometry(0), config.build_source_config()
    kept = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
        "max_position_embeddings", "initializer_range", "rms_norm_eps", "attention_dropout", "use_cache",
        "pad_token_id", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{name: getattr(source, name) for name in kept},
        "dtype": str(config.dtype).removeprefix("torch."),
        "num_key_value_heads": geometry.num_attention_heads,
        "kv_lora_rank": latent_width(geometry.kv_lora_rank),
        "q_lora_rank": None,
        "qk_nope_head_dim": geometry.qk_nope_head_dim,
        "qk_rope_head_dim": frequencies.width,
        "v_head_dim": geometry.v_head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": frequencies.theta},
        "rope_interleave": True,
        "attention_bias": True,  # for kv_a_proj_with_mqa, which needs one
        "first_k_dense_replace": config.num_hidden_layers,
        "moe_intermediate_size": source.intermediate_size,
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    }


def layer_tensors(
    config: MHA2MLAConfig, layer: int, frequencies: Frequencies, read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The attention of a layer there.

    Args:
        read: a tensor by its name below ``self_attn``, as it is stored.

    Yields:
        Names below ``self_attn``, and tensors in the stored dtype.
    """
    geometry = config.layer_geometry(layer)
    heads, latent, nope = geometry.num_attention_heads, geometry.kv_lora_rank, geometry.qk_nope_head_dim
    width, rope = latent_width(latent), frequencies.width
    places = frequencies.places[layer]
    query, encoder = read("q_proj.weight"), read("kv_a_proj.weight")
    dtype = query.dtype

    q_nope, q_pe = query.double().unflatten(0, (heads, -1)).split((nope, geometry.qk_rope_head_dim), dim=1)
    # Their scores are divided by the root of the query's width there.
    scale = config.softmax_scale * math.sqrt(nope + rope)
    q_pe = torch.stack([_interleaved(head, places, rope) for head in q_pe])
    yield "q_proj.weight", (scale * torch.cat((q_nope, q_pe), 1)).flatten(0, 1).to(dtype)

    c_rows, pe_rows = encoder.split((latent, geometry.qk_rope_head_dim))
    padding = encoder.new_zeros(width - latent, encoder.shape[1])
    yield "kv_a_proj_with_mqa.weight", torch.cat((c_rows, padding, _interleaved(pe_rows, places, rope)))
    bias = encoder.new_zeros(width + rope)
    bias[latent] = CONSTANT
    yield "kv_a_proj_with_mqa.bias", bias
    # A power of two is exact in every dtype; what it misses goes into the next product.
    weight = 2.0 ** round(math.log2(CONSTANT / math.sqrt(width)))
    yield "kv_a_layernorm.weight", torch.full((width,), weight, dtype=dtype)
    rest = CONSTANT / (weight * math.sqrt(width))
    maps = torch.cat((read("k_b_proj"), read("v_b_proj")), 1).double() * rest
    maps = maps.repeat_interleave(heads // maps.shape[0], 0).flatten(0, 1)
    yield "kv_b_proj.weight", torch.nn.functional.pad(maps, (0, width - latent)).to(dtype)
    yield "o_proj.weight", read("o_proj.weight")
    yield "o_proj.bias", query.new_zeros(config.hidden_size)


def _interleaved(rows: Tensor, places: Sequence[int], width: int) -> Tensor:
    """Rows [d_r, …], pairs (j, j + d_r / 2), as [width, …] with pair j at ``places[j]``: rows 2 p and 2 p + 1."""
    out = rows.new_zeros(width, *rows.shape[1:])
    where = torch.tensor(places)
    first, second = rows.chunk(2)
    out[2 * where], out[2 * where + 1] = first, second
    return out
