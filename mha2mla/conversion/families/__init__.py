"""Source families: what their attention is made of, which tensors hold it, and which models are refused and why."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mha2mla.conversion.families.family import ADAPTERS, FamilyAdapter
from mha2mla.conversion.families.spec import AttentionWeights, SourceSpec, UnsupportedSourceError

__all__ = ["ADAPTERS", "AttentionWeights", "FamilyAdapter", "SourceSpec", "UnsupportedSourceError", "adapter_for"]

# Families that people will try, with the reason; any other unknown name is refused as unknown.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "mha2mla": "it is already converted; mha2mla.convert takes it to the layout 'latent' alone, exactly",
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
    return adapter
