"""A source family as conversion reads it: spec of a model, weights of a layer, and which models are refused and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mha2mla.checkpoints import NamedError
from mha2mla.conversion.source.files import CheckpointReader
from mha2mla.modeling.families import FAMILIES, Family


class UnsupportedSourceError(NamedError):
    """The source cannot be converted exactly or sensibly; the message names what stands in the way."""


def pair_factors(inv_freq: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor`` of every pair that rotates, float64; 1 for those of frequency zero, which stand for none."""
    return torch.where(inv_freq == 0, 1.0, torch.tensor(factor, dtype=torch.float64))


def visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """[queries, keys] bool: which positions each position attends to, in a sliding ``window`` or all before it."""
    distance = queries[:, None] - keys[None]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@dataclass(frozen=True)
class RotaryTable:
    """RoPE of one kind of layer.

    Attributes:
        inv_freq: [rotated dims of a head // 2] float32, after any scaling.
        attention_factor: what cos and sin are multiplied by.
        note: what was decided, for the model card.
        lengths: shortest and longest window at which the source uses this table; None: any length from there.
    """

    inv_freq: torch.Tensor
    attention_factor: float
    note: str = ""
    lengths: tuple[int, int | None] = (1, None)


@dataclass(frozen=True)
class SourceSpec:
    """Description of a source model. Layers share everything but the sliding window and, in some
    families, the rotary table and its factor (``of_layer``).

    Attributes:
        norm_eps: of the norms on q and k.
        inv_freq: [head_dim // 2] float32, rotary frequencies after any scaling (llama3, linear, yarn, longrope); zero
            for dims that the source does not rotate.
        attention_factor: what the source multiplies cos and sin by (yarn, longrope) where it rotates; 1.0 otherwise.
        rope_note: what was decided about the rotary table, for the model card.
        sliding_windows: per layer, the number of visible tokens, or None for all.
        norm_per_head: whether q's and k's norms act on every head by itself (Qwen3) or on all heads together (OLMo2).
        norm_offset: what the norms add to their stored weight (Gemma: 1).
        rotary_dim: dims of a head that the source rotates; None for all.
        tables: of each layer, for whole heads.
        table_lengths: shortest and longest window at which the source uses these tables; None: any length from there.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    softmax_scale: float
    qk_norm: bool
    norm_eps: float
    q_bias: bool
    k_bias: bool
    v_bias: bool
    o_bias: bool
    inv_freq: torch.Tensor
    attention_factor: float
    rope_note: str
    sliding_windows: tuple[int | None, ...]
    tables: tuple[RotaryTable, ...]
    norm_per_head: bool = True
    norm_offset: float = 0.0
    rotary_dim: int | None = None
    table_lengths: tuple[int, int | None] = (1, None)

    @property
    def group_size(self) -> int:
        """Query heads that read one kv head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def pair_factors(self) -> torch.Tensor:
        """[head_dim // 2] float64: what cos and sin of every pair are multiplied by; 1 where nothing rotates."""
        return pair_factors(self.inv_freq, self.attention_factor)

    def of_layer(self, layer: int) -> SourceSpec:
        """The same with ``inv_freq`` and ``attention_factor`` of this layer."""
        table = self.tables[layer]
        return replace(self, inv_freq=table.inv_freq, attention_factor=table.attention_factor)

    def heads(self, hidden: torch.Tensor, weights: AttentionWeights, which: Literal["q", "k"]) -> torch.Tensor:
        """q or k of every head after bias and norm, before RoPE: [..., heads, head_dim] of inputs [..., hidden], in
        their dtype."""
        parts = (getattr(weights, f"{which}_{part}") for part in ("weight", "bias", "norm"))
        weight, bias, norm = (None if part is None else part.to(hidden.dtype) for part in parts)
        return self.split_heads(torch.nn.functional.linear(hidden, weight, bias), norm)

    def split_heads(self, projected: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """q or k of every head before RoPE, [..., heads, head_dim].

        Args:
            projected: [..., heads * head_dim].
            norm: stored weight of the RMSNorm on q or k, [head_dim] or [heads * head_dim]; None without one.
        """
        if norm is not None and not self.norm_per_head:
            projected = self._rms_norm(projected, norm)
        heads = projected.unflatten(-1, (-1, self.head_dim))
        return self._rms_norm(heads, norm) if norm is not None and self.norm_per_head else heads

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight + self.norm_offset, self.norm_eps)


@dataclass(frozen=True)
class AttentionWeights:
    """One source layer's attention tensors; weights are [out, in], norms as they are stored.

    Rotary pairs are (j, j + head_dim / 2), as in Llama: where a family pairs otherwise or rotates only part of a head,
    q and k have their rows in this order (scores do not change when both do).

    Attributes:
        output_gain: [hidden], how much of a channel of the attention's output the MLP is given, by the gains of the
            norms between them; it changes nothing, it says what an error of that channel costs.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    v_weight: torch.Tensor
    o_weight: torch.Tensor
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    output_gain: torch.Tensor | None = None


class FamilyAdapter(Family):
    """A family as conversion reads it.

    ``specify`` refuses what cannot be converted, before any weight is read. Only the attention is described: MLPs,
    experts and norms around it are copied, and run by the source's own classes.
    """

    def sliding_windows(self, config: PreTrainedConfig) -> tuple[int | None, ...]:
        """Visible tokens per layer, None for all."""
        window = getattr(config, "sliding_window", None)
        if self.window_in_every_layer:
            return (window,) * config.num_hidden_layers
        # A family without layer_types does not look at a window that its config happens to name.
        layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)

    def rotary_tables(self, config: PreTrainedConfig, head_dim: int, longrope_table: str) -> tuple[RotaryTable, ...]:
        if not self.table_by_layer_type:
            table = rotary_table(config, head_dim, longrope_table=longrope_table, partial=self.partial_rotary)
            if self.rotating_layers is None:
                return (table,) * config.num_hidden_layers
            still = replace(table, inv_freq=torch.zeros_like(table.inv_freq))
            return tuple(table if rotates else still for rotates in getattr(config, self.rotating_layers))
        of_type = {
            layer_type: rotary_table(config, head_dim, longrope_table=longrope_table, layer_type=layer_type)
            for layer_type in dict.fromkeys(config.layer_types)
        }
        return tuple(of_type[layer_type] for layer_type in config.layer_types)

    def specify(self, config: PreTrainedConfig, *, longrope_table: str = "short") -> SourceSpec:
        """Everything conversion must know of this model.

        Raises:
            UnsupportedSourceError: naming what cannot be converted.
        """
        for key, why in self.refused:
            if getattr(config, key, None):
                raise UnsupportedSourceError(f"{key} is {getattr(config, key)!r}; {why}")
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        tables = self.rotary_tables(config, head_dim, longrope_table)
        # The model card of a model with several tables names that of its globally attending layers.
        windows = self.sliding_windows(config)
        table = tables[max((layer for layer, window in enumerate(windows) if window is None), default=-1)]
        rotary_dim = 2 * table.inv_freq.numel()
        note = "" if rotary_dim == head_dim else f"{rotary_dim} of {head_dim} dims of a head rotate"
        biased = [getattr(config, says, False) if isinstance(says, str) else says for says in self.biased]
        return SourceSpec(
            model_type=self.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            softmax_scale=(getattr(config, self.softmax_width) if self.softmax_width else head_dim) ** -0.5,
            qk_norm=self.qk_norm,
            norm_eps=config.rms_norm_eps,
            **{f"{part}_bias": bool(has) for part, has in zip("qkvo", biased, strict=True)},
            inv_freq=_padded(table.inv_freq, head_dim),
            attention_factor=table.attention_factor,
            rope_note="; ".join(filter(None, (table.note, note))),
            sliding_windows=windows,
            norm_per_head=self.norm_per_head,
            norm_offset=self.norm_offset,
            rotary_dim=None if rotary_dim == head_dim else rotary_dim,
            tables=tuple(replace(each, inv_freq=_padded(each.inv_freq, head_dim)) for each in tables),
            table_lengths=(
                max(table.lengths[0] for table in tables),
                min((table.lengths[1] for table in tables if table.lengths[1] is not None), default=None),
            ),
        )

    def attention_names(self, spec: SourceSpec, layer: int) -> dict[str, str]:
        """Field of ``AttentionWeights`` -> name of the tensor in the source; fused projections share a name."""
        prefix = f"model.layers.{layer}.self_attn."
        names = {f"{part}_weight": f"{prefix}{part}_proj.weight" for part in "qkvo"}
        if self.fused_qkv:
            names |= dict.fromkeys(("q_weight", "k_weight", "v_weight"), f"{prefix}qkv_proj.weight")
        names |= {f"{part}_bias": f"{prefix}{part}_proj.bias" for part in "qkvo" if getattr(spec, f"{part}_bias")}
        if spec.qk_norm:
            names |= {f"{part}_norm": f"{prefix}{part}_norm.weight" for part in "qk"}
        return names

    def attention_weights(
        self, source: CheckpointReader, spec: SourceSpec, layer: int, *, device: torch.device, dtype: torch.dtype
    ) -> AttentionWeights:
        """One layer's attention tensors on ``device`` in ``dtype``."""
        names = self.attention_names(spec, layer)
        stored = {name: source.tensor(name).to(device=device, dtype=dtype) for name in dict.fromkeys(names.values())}
        tensors = {field: stored[name] for field, name in names.items()}
        if self.fused_qkv:
            query, key = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
            parts = tensors["q_weight"].split((query, key, key))
            tensors |= zip(("q_weight", "k_weight", "v_weight"), parts, strict=True)
        for field in ("q_weight", "k_weight", "q_bias", "k_bias"):
            if field in tensors:
                tensors[field] = self._pair_halves(tensors[field], spec)
        norms = (f"model.layers.{layer}.{name}.weight" for name in self.norms_to_mlp)
        gains = [source.tensor(name).to(device=device, dtype=dtype) + spec.norm_offset for name in norms]
        return AttentionWeights(**tensors, output_gain=math.prod(gains))

    def _pair_halves(self, rows: torch.Tensor, spec: SourceSpec) -> torch.Tensor:
        """Rows of q or k, [heads * head_dim, ...], with each head's rotary pairs first and second half of it."""
        d, rotary = spec.head_dim, spec.rotary_dim or spec.head_dim
        if rotary == d and not self.neighbours_pair:
            return rows
        turned = torch.arange(rotary).view(-1, 2).T if self.neighbours_pair else torch.arange(rotary).view(2, -1)
        order = torch.cat([turned, torch.arange(rotary, d).view(2, -1)], 1).flatten()
        return rows.unflatten(0, (-1, d))[:, order.to(rows.device)].flatten(0, 1)


def rotary_table(
    config: PreTrainedConfig,
    head_dim: int,
    *,
    longrope_table: str = "short",
    layer_type: str | None = None,
    partial: bool = False,
) -> RotaryTable:
    """The table that the source rotates by.

    Args:
        longrope_table: "short" or "long", which of longrope's two tables serves every length.
        layer_type: where ``rope_parameters`` holds parameters per layer type, which to take.
        partial: whether the family's code looks at ``partial_rotary_factor``.

    Raises:
        UnsupportedSourceError: dynamic NTK (the table depends on the length), a partly rotated head, tables by layer
            type where one is expected, or an unknown rope type.
    """
    parameters = config.rope_parameters or {}
    if layer_type is not None:
        parameters = parameters[layer_type]
    elif any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedSourceError("rope_parameters differ by layer type; expected one rotary table for all layers")
    rope_type = parameters.get("rope_type", "default")
    share = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    share = 1.0 if share is None else share
    if share != 1.0 and not partial:
        raise UnsupportedSourceError(
            f"partial_rotary_factor is {share}; expected 1.0 of a {config.model_type}, which rotates whole heads"
        )
    rotary_dim = int(head_dim * share)
    if rope_type == "dynamic":
        raise UnsupportedSourceError(
            "rope_type is 'dynamic': dynamic NTK has another table for every length, so no fixed rotary part exists"
        )
    if rope_type == "default":
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
        return RotaryTable(1.0 / parameters["rope_theta"] ** exponent, 1.0)
    if rope_type not in ("linear", "llama3", "yarn", "longrope"):
        raise UnsupportedSourceError(f"rope_type is {rope_type!r}; expected default, linear, llama3, yarn or longrope")
    note, length, lengths = "", None, (1, None)
    if rope_type == "longrope":
        for key in ("short_factor", "long_factor"):
            if len(parameters[key]) != rotary_dim // 2:
                raise UnsupportedSourceError(
                    f"{key} has {len(parameters[key])} factors; expected {rotary_dim // 2}, one per rotated pair"
                )
        original = parameters["original_max_position_embeddings"]
        length = original + 1 if longrope_table == "long" else None
        lengths = (1, original) if length is None else (length, None)
        reach = f"beyond {original} tokens" if longrope_table == "long" else f"for lengths up to {original}"
        note = f"longrope: the {longrope_table} table, which the source uses {reach}, serves every length"
    by_type = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length, **by_type)
    if inv_freq.numel() != rotary_dim // 2:
        raise UnsupportedSourceError(
            f"the rotary table has {inv_freq.numel()} frequencies for {rotary_dim} rotated dims; expected one per pair"
        )
    return RotaryTable(inv_freq.float(), float(factor), note, lengths)


def _padded(inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A table for whole heads: dims that do not rotate have a frequency of zero."""
    return torch.nn.functional.pad(inv_freq, (0, head_dim // 2 - inv_freq.numel()))


ADAPTERS: Mapping[str, FamilyAdapter] = MappingProxyType(
    {name: FamilyAdapter(**vars(family)) for name, family in FAMILIES.items()}
)
# Families that people will try, with the reason; any other unknown name is refused as unknown.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "mha2mla": "it is already converted; convert takes it only to the layout 'latent', without loss",
        "deepseek_v2": "its attention already is MLA",
        "deepseek_v3": "its attention already is MLA",
        "gemma2": "it soft-caps its attention logits, which no decode kernel here does",
        "gemma3": "it is multimodal; its language model alone is a 'gemma3_text' checkpoint",
        "gpt_oss": "attention sinks make dropped key biases visible, and no decode kernel here has them",
        "phi": "no adapter for its layers, in which attention and MLP stand side by side",
        "gpt2": "it has no rotary positions",
    }
)


def adapter_for(config: Mapping[str, Any]) -> FamilyAdapter:
    """The adapter of a source, from the values of its ``config.json``; refuses what no adapter can convert.

    Raises:
        UnsupportedSourceError: naming the model type or the config key that stands in the way.
    """
    model_type = config.get("model_type")
    if model_type not in ADAPTERS:
        reason = _REFUSED.get(model_type, "there is no adapter for it")
        raise UnsupportedSourceError(
            f"model_type {model_type!r} cannot be converted: {reason}; expected one of {', '.join(ADAPTERS)}"
        )
    if config.get("quantization_config"):
        quantised = config["quantization_config"]
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
        raise UnsupportedSourceError(
            f"quantization_config says the weights are quantised ({method!s:.40}); dequantise them before conversion"
        )
    adapter = ADAPTERS[model_type]
    experts = () if adapter.mixture_of_experts else ("num_experts", "num_local_experts")
    for key in ("attn_logit_softcapping", "attention_sinks", *experts):
        if config.get(key):
            raise UnsupportedSourceError(f"{key} is {config[key]!r}; a {model_type} that has it cannot be converted")
    if not config.get("is_causal", True):  # as transformers' masks read it
        raise UnsupportedSourceError(f"is_causal is {config['is_causal']!r}; expected true of a causal language model")
    return adapter
