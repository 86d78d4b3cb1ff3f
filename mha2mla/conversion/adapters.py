"""Source families: what their attention is made of, which tensors hold it, and which models are refused and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class UnsupportedSourceError(ValueError):
    """The source cannot be converted exactly or sensibly; the message names what stands in the way."""


class TensorSource(Protocol):
    """Where tensors come from by name (``source.CheckpointReader``)."""

    def names(self) -> frozenset[str]: ...

    def tensor(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class SourceSpec:
    """What conversion must know of a source model. All layers share everything but the sliding window.

    Attributes:
        inv_freq: [head_dim // 2] float32, rotary frequencies after any scaling (llama3, linear, yarn, longrope).
        attention_factor: what the source multiplies cos and sin by (yarn, longrope); 1.0 otherwise.
        rope_note: what was decided about the rotary table, for the model card.
        sliding_windows: per layer, the number of visible tokens, or None for all.
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
    rope_type: str
    rope_note: str
    sliding_windows: tuple[int | None, ...]

    @property
    def group_size(self) -> int:
        """Query heads that read one kv head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def feature_size(self) -> int:
        """Width of the encoder's input: the hidden state, with the normed keys in front under q/k-norm."""
        return self.hidden_size + (self.num_key_value_heads * self.head_dim if self.qk_norm else 0)


@dataclass(frozen=True)
class AttentionWeights:
    """One source layer's attention tensors, in the checkpoint's own shapes: weights are [out, in]."""

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


class FamilyAdapter:
    """A family whose decoder layers look like Llama's: RoPE on halves, separate q/k/v/o, one rotary table.

    A subclass states what differs. ``specify`` refuses what it cannot convert, before any weight is read.
    """

    model_type: ClassVar[str] = ""
    qk_norm: ClassVar[bool] = False

    def biases(self, config: PreTrainedConfig) -> dict[str, bool]:
        """Which of q, k, v, o have a bias."""
        bias = bool(getattr(config, "attention_bias", False))
        return {"q": bias, "k": bias, "v": bias, "o": bias}

    def sliding_windows(self, config: PreTrainedConfig) -> tuple[int | None, ...]:
        """Visible tokens per layer, None for all."""
        window = getattr(config, "sliding_window", None)
        layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        for layer_type in layer_types:
            if layer_type not in ("full_attention", "sliding_attention"):
                raise UnsupportedSourceError(
                    f"layer_types has {layer_type!r}; expected full_attention or sliding_attention"
                )
        return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)

    def softmax_scale(self, config: PreTrainedConfig, head_dim: int) -> float:
        """What the source multiplies q·k by."""
        return head_dim**-0.5

    def specify(self, config: PreTrainedConfig, *, longrope_table: str = "short") -> SourceSpec:
        """Everything conversion must know of this model.

        Raises:
            UnsupportedSourceError: naming what cannot be converted.
        """
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        inv_freq, factor, rope_type, note = rotary_table(config, longrope_table)
        if inv_freq.numel() != head_dim // 2:
            raise UnsupportedSourceError(
                f"the rotary table of {self.model_type} has {inv_freq.numel()} frequencies for head_dim={head_dim};"
                " a source that rotates only part of a head is not supported"
            )
        biases = self.biases(config)
        return SourceSpec(
            model_type=self.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            softmax_scale=self.softmax_scale(config, head_dim),
            qk_norm=self.qk_norm,
            norm_eps=config.rms_norm_eps,
            q_bias=biases["q"],
            k_bias=biases["k"],
            v_bias=biases["v"],
            o_bias=biases["o"],
            inv_freq=inv_freq,
            attention_factor=factor,
            rope_type=rope_type,
            rope_note=note,
            sliding_windows=self.sliding_windows(config),
        )

    def layer_prefix(self, layer: int) -> str:
        """Prefix of a layer's tensor names, with its dot."""
        return f"model.layers.{layer}."

    def attention_names(self, spec: SourceSpec, layer: int) -> dict[str, str]:
        """Field of ``AttentionWeights`` -> name of the tensor in the source."""
        prefix = f"{self.layer_prefix(layer)}self_attn."
        names = {f"{part}_weight": f"{prefix}{part}_proj.weight" for part in "qkvo"}
        names |= {f"{part}_bias": f"{prefix}{part}_proj.bias" for part in "qkvo" if getattr(spec, f"{part}_bias")}
        if spec.qk_norm:
            names |= {f"{part}_norm": f"{prefix}{part}_norm.weight" for part in "qk"}
        return names

    def attention_weights(
        self, source: TensorSource, spec: SourceSpec, layer: int, *, device: torch.device, dtype: torch.dtype
    ) -> AttentionWeights:
        """One layer's attention tensors on ``device`` in ``dtype``, shapes checked against ``spec``.

        Raises:
            ValueError: a tensor is absent or has another shape than the config says.
        """
        query, key = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        shapes = {
            "q_weight": (query, spec.hidden_size),
            "k_weight": (key, spec.hidden_size),
            "v_weight": (key, spec.hidden_size),
            "o_weight": (spec.hidden_size, query),
            "q_bias": (query,),
            "k_bias": (key,),
            "v_bias": (key,),
            "o_bias": (spec.hidden_size,),
            "q_norm": (spec.head_dim,),
            "k_norm": (spec.head_dim,),
        }
        tensors = {}
        for field, name in self.attention_names(spec, layer).items():
            tensor = source.tensor(name)
            if tuple(tensor.shape) != shapes[field]:
                raise ValueError(
                    f"tensor {name} has shape {tuple(tensor.shape)}; expected {shapes[field]} by the config"
                )
            tensors[field] = tensor.to(device=device, dtype=dtype)
        return AttentionWeights(**tensors)


class LlamaAdapter(FamilyAdapter):
    """Llama 2, 3 and 3.x, SmolLM2 and every checkpoint that calls itself llama."""

    model_type = "llama"


class MistralAdapter(FamilyAdapter):
    """Mistral: Llama with a sliding window in every layer where the config sets one."""

    model_type = "mistral"

    def biases(self, config: PreTrainedConfig) -> dict[str, bool]:
        return dict.fromkeys("qkvo", False)

    def sliding_windows(self, config: PreTrainedConfig) -> tuple[int | None, ...]:
        return (getattr(config, "sliding_window", None),) * config.num_hidden_layers


class Qwen2Adapter(FamilyAdapter):
    """Qwen2 and Qwen2.5 (dense): biases on q, k and v; a sliding window in the layers that the config lists."""

    model_type = "qwen2"

    def biases(self, config: PreTrainedConfig) -> dict[str, bool]:
        return {"q": True, "k": True, "v": True, "o": False}


class Qwen3Adapter(FamilyAdapter):
    """Qwen3 (dense): RMSNorm over each head of q and k before RoPE."""

    model_type = "qwen3"
    qk_norm = True


ADAPTERS: Mapping[str, FamilyAdapter] = MappingProxyType(
    {adapter.model_type: adapter for adapter in (LlamaAdapter(), MistralAdapter(), Qwen2Adapter(), Qwen3Adapter())}
)

# Families that people will try, with the reason; any other unknown name is refused as unknown.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "mha2mla": "it is already converted",
        "deepseek_v2": "its attention already is MLA",
        "deepseek_v3": "its attention already is MLA",
        "gemma2": "attention logit soft-capping makes dropped key biases visible",
        "gemma3_text": "no adapter for its norms and per-layer rotary tables",
        "gpt_oss": "attention sinks make dropped key biases visible",
        "mixtral": "mixture of experts",
        "qwen2_moe": "mixture of experts",
        "qwen3_moe": "mixture of experts",
        "phi": "it rotates only part of a head",
        "phi3": "fused qkv weights",
        "glm": "it rotates only part of a head",
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
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedSourceError(
            f"quantization_config says the weights are quantised ({method}); dequantise them before conversion"
        )
    for key in ("attn_logit_softcapping", "attention_sinks", "num_experts", "num_local_experts"):
        if config.get(key):
            raise UnsupportedSourceError(f"{key} is {config[key]!r}; a source that has it cannot be converted")
    return ADAPTERS[model_type]


def rotary_table(config: PreTrainedConfig, longrope_table: str) -> tuple[torch.Tensor, float, str, str]:
    """Frequencies [head_dim // 2] float32, attention factor, rope type and a note, by transformers' own functions.

    Raises:
        UnsupportedSourceError: dynamic NTK (the table depends on the length), partial rotary or an unknown rope type.
    """
    parameters = dict(config.rope_parameters or {})
    rope_type = parameters.get("rope_type", "default")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedSourceError("rope_parameters differ by layer type; expected one rotary table for all layers")
    partial = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if partial is not None and partial != 1.0:
        raise UnsupportedSourceError(f"partial_rotary_factor is {partial}; a partly rotated head is not supported")
    if rope_type == "dynamic":
        raise UnsupportedSourceError(
            "rope_type is 'dynamic': dynamic NTK has another table for every length, so no fixed rotary part exists"
        )
    if rope_type == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return 1.0 / parameters["rope_theta"] ** exponent, 1.0, rope_type, ""
    if rope_type not in ("linear", "llama3", "yarn", "longrope"):
        raise UnsupportedSourceError(f"rope_type is {rope_type!r}; expected default, linear, llama3, yarn or longrope")
    note, length = "", None
    if rope_type == "longrope":
        original = parameters["original_max_position_embeddings"]
        length = original + 1 if longrope_table == "long" else None
        reach = f"beyond {original} tokens" if longrope_table == "long" else f"for lengths up to {original}"
        note = f"longrope: the {longrope_table} table, which the source uses {reach}, serves every length"
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length)
    return inv_freq.float(), float(factor), rope_type, note
