"""A converted layer in DeepSeek-V3's classes: what they can hold, and the tensors that make them compute the same.

DeepSeek's latent goes through an RMSNorm, ours does not. Two ways make the norm a product with a constant, which the
norm's weight and kv_b_proj undo:

* transformers, by a bias: one more channel of the latent has weight zero and a large bias C. With r channels
  c / rms([c, C]) = c sqrt(r) / C · (1 - |c|² / 2C² + …).
* vLLM and SGLang, which drop that bias, by the norm's eps: rows of kv_a_proj are scaled by a power of two s, so that
  the mean square of s c is below 1e-6 eps. Then s c / sqrt(mean(s² c²) + eps) = c s / sqrt(eps) · (1 - at most 5e-7).
  eps is the config's there; transformers' class has 1e-6 whatever the config says.

Loaded by the other programs a folder would compute something else without an error. Guards make them refuse it:
:data:`GUARD` and ``index_topk`` in a folder for transformers, a bias of the wrong shape in one for vLLM or SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.families import FAMILIES

CONSTANT = 4096.0  # C: exact in 16 bits, and |c|² / 2C² is far below their precision
LATENT_MULTIPLE = 8  # channels of the latent
Engine = Literal["transformers", "vllm", "sglang"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
ENGINE_LATENTS = (256, 512)  # kv_lora_rank that MLA backends of vLLM take beside 64 rotary dims
ENGINE_ROTARY = 64
# Un-rotated dims of a key, and dims of a value, that vLLM's prefill takes beside 64 rotary dims.
ENGINE_HEAD = 128
NEGLIGIBLE = 1e-6  # largest mean square of the scaled latent, in units of eps
# Their layers are DeepSeek's: RMSNorm, attention, RMSNorm, gated MLP.
_LIKE_DEEPSEEK = [name for name, family in FAMILIES.items() if family.llama_decoder and not family.qk_norm]
# Engines know no such tensor: vLLM refuses the folder. SGLang has stopped at index_topk before.
GUARD = "model.kv_a_proj_with_mqa_needs_its_bias"


@dataclass(frozen=True)
class Frequencies:
    """Positions of every layer's rotary pairs in the table that DeepSeek's classes compute.

    Attributes:
        theta: its base.
        width: rotary dims there, d_R: frequency j is ``theta ** (-2 j / d_R)``.
        places: per layer, the j of each pair.
    """

    theta: float
    width: int
    places: tuple[tuple[int, ...], ...]


def refusals(config: MHA2MLAConfig, engine: Engine, dtype: torch.dtype) -> list[str]:
    """Reasons, by the config and the weights' dtype, for which DeepSeek's classes would be wrong or cannot hold it;
    empty without any."""
    geometries = {config.layer_geometry(index) for index in range(config.num_hidden_layers)}
    has_bias = engine == "transformers"
    source = config.build_source_config()
    windows = {config.layer_sliding_window(index) for index in range(config.num_hidden_layers)}
    scalings = {config.layer_rope_scaling(index) for index in range(config.num_hidden_layers)}
    checks = {
        "the layout is 'latent': their rotary key is cached, not computed (recipe key layout: shared)": (
            not config.has_rope_cache
        ),
        f"num_rope_heads is {sorted({g.num_rope_heads for g in geometries})}: they have one rotary key for all heads": (
            any(g.num_rope_heads != 1 for g in geometries)
        ),
        "layers differ in more than their rank: they have one qk_rope_head_dim and one qk_nope_head_dim": (
            len({replace(g, kv_lora_rank=1) for g in geometries}) > 1
        ),
        f"the largest rank is {_largest_rank(config)}: MLA kernels of {engine} take at most {ENGINE_LATENTS[-1]}": (
            not has_bias and _largest_rank(config) > ENGINE_LATENTS[-1]
        ),
        f"heads have up to {_widest_head(geometries)} dims: prefill kernels of {engine} take at most {ENGINE_HEAD}": (
            not has_bias and _widest_head(geometries) > ENGINE_HEAD
        ),
        f"dtype is {dtype}: {engine} needs bfloat16 or float32, whose exponents hold the scaled latent": (
            not has_bias and dtype not in (torch.bfloat16, torch.float32)
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


def place_frequencies(tables: Sequence[Tensor], theta: float, head_dim: int, engine: Engine) -> Frequencies:
    """A table of DeepSeek's in which all of the layers' frequencies are.

    For transformers the narrowest with the source's theta; else one of :data:`ENGINE_ROTARY` dims, whose theta may be
    a power of the source's: it has every k-th frequency of the source's table.

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
                    " would rotate by others (recipe key rope.selection: rorope takes every frequency once where"
                    " qk_rope_head_dim is head_dim, rorope-2 every second where it is half of that)"
                )
    least = max(2 * table.numel() for table in tables)
    if engine == "transformers":
        candidates = [(theta, width) for width in range(least, head_dim + 1, 2)]
        limit = f"theta={theta:g} up to {head_dim} dims"
    else:
        strides = range(1, head_dim // 2 + 1)
        candidates = [(theta ** (ENGINE_ROTARY * stride / head_dim), ENGINE_ROTARY) for stride in strides]
        limit = f"{ENGINE_ROTARY} dims with every k-th frequency of theta={theta:g}"
    for base, width in candidates:
        places = [_places(table, base, width) for table in tables]
        if all(place is not None for place in places):
            return Frequencies(base, width, tuple(places))
    raise ValueError(
        f"rotary frequencies such as {tables[0].flatten()[0]:.6g} are in no table of {limit} (more pairs than the"
        " table, or llama3, linear or other RoPE scaling); DeepSeek's classes would rotate by others"
    )


def _places(table: Tensor, theta: float, width: int) -> tuple[int, ...] | None:
    """The j of each frequency theta^(-2j / width), all different, or None."""
    exact = -torch.log(table.flatten().double()) / math.log(theta) * width / 2
    nearest = exact.round()
    # A float32 frequency is right to 1e-7 or so; a place is off by that over log(theta) times width / 2.
    close = (exact - nearest).abs() * 2 * math.log(theta) / width < 1e-5
    fits = bool(close.all()) and int(nearest.min()) >= 0 and int(nearest.max()) < width // 2
    fits = fits and len(nearest.unique()) == len(nearest)
    return tuple(int(place) for place in nearest) if fits else None


def latent_width(config: MHA2MLAConfig, engine: Engine) -> int:
    """Channels of the latent there, the same in all layers: for transformers one more and a multiple of 8."""
    rank = _largest_rank(config)
    if engine == "transformers":
        return -(-(rank + 1) // LATENT_MULTIPLE) * LATENT_MULTIPLE
    return next(width for width in ENGINE_LATENTS if rank <= width)


def _widest_head(geometries: Iterable[MLAGeometry]) -> int:
    return max(width for g in geometries for width in (g.qk_nope_head_dim, g.v_head_dim))


def head_widths(geometry: MLAGeometry, engine: Engine) -> tuple[int, int]:
    """Un-rotated dims of a key and dims of a value there; engines' are padded with zeros."""
    if engine == "transformers":
        return geometry.qk_nope_head_dim, geometry.v_head_dim
    return ENGINE_HEAD, ENGINE_HEAD


def _largest_rank(config: MHA2MLAConfig) -> int:
    return max(config.layer_geometry(index).kv_lora_rank for index in range(config.num_hidden_layers))


def deepseek_config(
    config: MHA2MLAConfig, frequencies: Frequencies, engine: Engine, dtype: torch.dtype
) -> dict[str, Any]:
    geometry, source = config.layer_geometry(0), config.build_source_config()
    nope, values = head_widths(geometry, engine)
    kept = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
        "max_position_embeddings", "initializer_range", "rms_norm_eps", "attention_dropout", "use_cache",
        "pad_token_id", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{name: getattr(source, name) for name in kept},
        "dtype": str(dtype).removeprefix("torch."),
        "num_key_value_heads": geometry.num_attention_heads,
        "kv_lora_rank": latent_width(config, engine),
        "q_lora_rank": None,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": frequencies.width,
        "v_head_dim": values,
        "rope_theta": frequencies.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": frequencies.theta},
        "rope_interleave": True,
        # For kv_a_proj_with_mqa. In a folder for vLLM or SGLang, which do not read it, transformers meets a bias of the
        # wrong shape.
        "attention_bias": True,
        "first_k_dense_replace": config.num_hidden_layers,
        "moe_layer_freq": 1,  # SGLang has no default for it
        "moe_intermediate_size": source.intermediate_size,
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        # The sparse attention of V3.2: vLLM then asserts a q_lora_rank, SGLang reads an index_head_dim; both stop.
        **({"index_topk": 1} if engine == "transformers" else {}),
    }


def layer_tensors(
    config: MHA2MLAConfig, layer: int, frequencies: Frequencies, engine: Engine, read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The attention of a layer there.

    Args:
        read: a tensor by its name below the layer, as it is stored.

    Yields:
        Names below the layer, and tensors in the stored dtype.
    """
    geometry = config.layer_geometry(layer)
    heads, latent, nope = geometry.num_attention_heads, geometry.kv_lora_rank, geometry.qk_nope_head_dim
    width, rope = latent_width(config, engine), frequencies.width
    (nope_width, value_width), places = head_widths(geometry, engine), frequencies.places[layer]
    nope_zeros, value_zeros = nope_width - nope, value_width - geometry.v_head_dim  # behind each head's
    query, encoder = read("self_attn.q_proj.weight"), read("self_attn.kv_a_proj.weight")
    dtype = query.dtype

    q_nope, q_pe = query.double().unflatten(0, (heads, -1)).split((nope, geometry.qk_rope_head_dim), dim=1)
    # Their scores are divided by the root of the query's width there.
    scale = config.softmax_scale * math.sqrt(nope_width + rope)
    q_nope, q_pe = pad(q_nope, (0, 0, 0, nope_zeros)), torch.stack([_interleaved(head, places, rope) for head in q_pe])
    yield "self_attn.q_proj.weight", (scale * torch.cat((q_nope, q_pe), 1)).flatten(0, 1).to(dtype)

    c_rows, pe_rows = encoder.split((latent, geometry.qk_rope_head_dim))
    padding = encoder.new_zeros(width - latent, encoder.shape[1])
    if engine == "transformers":
        bias = encoder.new_zeros(width + rope)
        bias[latent] = CONSTANT
        gain = math.sqrt(width) / CONSTANT
        yield "self_attn.o_proj.bias", query.new_zeros(config.hidden_size)
    else:
        bias = encoder.new_zeros(1)  # a guard: transformers refuses the shape, vLLM and SGLang skip the tensor
        eps = config.build_source_config().rms_norm_eps
        shrink = _negligible_scale(c_rows, read("input_layernorm.weight"), width, eps)
        c_rows = c_rows * shrink
        gain = shrink / math.sqrt(eps)
    yield "self_attn.kv_a_proj_with_mqa.bias", bias
    rows = torch.cat((c_rows, padding, _interleaved(pe_rows, places, rope)))
    yield "self_attn.kv_a_proj_with_mqa.weight", rows
    # A power of two is exact in every dtype; what it misses of 1 / gain goes into the next product.
    weight = 2.0 ** round(-math.log2(gain))
    yield "self_attn.kv_a_layernorm.weight", torch.full((width,), weight, dtype=dtype)
    k_up = pad(read("self_attn.k_b_proj"), (0, 0, 0, nope_zeros))  # [heads, dims, latent]
    v_up = pad(read("self_attn.v_b_proj"), (0, 0, 0, value_zeros))
    maps = torch.cat((k_up, v_up), 1).double() / (weight * gain)
    maps = maps.repeat_interleave(heads // maps.shape[0], 0).flatten(0, 1)
    yield "self_attn.kv_b_proj.weight", pad(maps, (0, width - latent)).to(dtype)
    out = read("self_attn.o_proj.weight").unflatten(1, (heads, -1))
    yield "self_attn.o_proj.weight", pad(out, (0, value_zeros)).flatten(1)


def _negligible_scale(rows: Tensor, norm: Tensor, width: int, eps: float) -> float:
    """Power of two s for which no token has a mean square of s c over ``width`` channels above NEGLIGIBLE * eps.

    A normed row u has |u|² <= hidden_size, so that |c|² = |W diag(g) u|² <= hidden_size * |W diag(g)|²_F.

    Args:
        rows: W of c, [d_c, hidden_size].
        norm: g, weight of the RMSNorm before it [hidden_size].
    """
    bound = norm.numel() * float((rows.double() * norm.double()).square().sum()) / width
    return 2.0 ** math.floor(math.log2(NEGLIGIBLE * eps / max(bound, eps)) / 2)


def _interleaved(rows: Tensor, places: Sequence[int], width: int) -> Tensor:
    """Rows [d_r, …], pairs (j, j + d_r / 2), as [width, …] with pair j at ``places[j]``: rows 2 p and 2 p + 1."""
    out = rows.new_zeros(width, *rows.shape[1:])
    where = torch.tensor(places)
    first, second = rows.chunk(2)
    out[2 * where], out[2 * where + 1] = first, second
    return out
