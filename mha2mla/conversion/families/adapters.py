"""The families that can be converted, each by what sets it apart from Llama."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from mha2mla.conversion.families.family import FamilyAdapter
from mha2mla.conversion.families.rotary import RotaryTable, rotary_table
from mha2mla.conversion.families.spec import SourceSpec, UnsupportedSourceError


class LlamaAdapter(FamilyAdapter):
    """Llama 2, 3 and 3.x, SmolLM2 and every checkpoint that calls itself llama."""

    model_type = "llama"


class SmolLM3Adapter(FamilyAdapter):
    """SmolLM3: Llama in which some layers do not rotate at all, as by frequencies of zero."""

    model_type = "smollm3"

    def rotary_tables(self, config: PreTrainedConfig, head_dim: int, longrope_table: str) -> tuple[RotaryTable, ...]:
        table = rotary_table(config, head_dim, longrope_table=longrope_table)
        still = replace(table, inv_freq=torch.zeros_like(table.inv_freq))
        return tuple(table if config.no_rope_layers[layer] else still for layer in range(config.num_hidden_layers))


class MistralAdapter(FamilyAdapter):
    """Mistral: Llama without biases, with a sliding window in every layer where the config sets one."""

    model_type = "mistral"
    window_in_every_layer = True
    biased = (False,) * 4


class MixtralAdapter(MistralAdapter):
    """Mixtral: Mistral's attention beside a mixture of experts."""

    model_type = "mixtral"
    mixture_of_experts = True


class Qwen2Adapter(FamilyAdapter):
    """Qwen2 and Qwen2.5 (dense): biases on q, k and v; a sliding window in the layers that the config lists."""

    model_type = "qwen2"
    biased = (True, True, True, False)


class Qwen2MoeAdapter(FamilyAdapter):
    """Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention beside a mixture of experts and one expert that all tokens share."""

    model_type = "qwen2_moe"
    mixture_of_experts = True
    biased = ("qkv_bias",) * 3 + (False,)


class Qwen3Adapter(FamilyAdapter):
    """Qwen3 (dense): RMSNorm over each head of q and k before RoPE."""

    model_type = "qwen3"
    qk_norm = True


class Qwen3MoeAdapter(Qwen3Adapter):
    """Qwen3-MoE: Qwen3's attention beside a mixture of experts (or a dense MLP in the layers that the config lists)."""

    model_type = "qwen3_moe"
    window_in_every_layer = True
    mixture_of_experts = True


class Phi3Adapter(FamilyAdapter):
    """Phi-3, Phi-4 and Phi-4-mini: q, k and v are the rows of one fused projection; some rotate only part of a head."""

    model_type = "phi3"
    partial_rotary = True
    window_in_every_layer = True
    biased = (False,) * 4

    def attention_names(self, spec: SourceSpec, layer: int) -> dict[str, str]:
        prefix = f"{self.layer_prefix(layer)}self_attn."
        fused = dict.fromkeys(("q_weight", "k_weight", "v_weight"), f"{prefix}qkv_proj.weight")
        return {**fused, "o_weight": f"{prefix}o_proj.weight"}


class GlmAdapter(FamilyAdapter):
    """GLM-4-9B: half of every head rotates, in pairs of neighbours; no bias on o."""

    model_type = "glm"
    partial_rotary = True
    neighbours_pair = True
    biased = ("attention_bias",) * 3 + (False,)


class Glm4Adapter(GlmAdapter):
    """GLM-4-0414: GLM's attention, with norms after it and after the MLP, too."""

    model_type = "glm4"
    norms_to_mlp = ("post_self_attn_layernorm", "post_attention_layernorm")


class Olmo2Adapter(FamilyAdapter):
    """OLMo2: RMSNorm over all heads of q and k together; the attention reads the residual stream itself."""

    model_type = "olmo2"
    qk_norm = True
    norm_per_head = False


class Olmo3Adapter(Olmo2Adapter):
    """OLMo3: OLMo2 with sliding windows, and long-context scaling of RoPE in the other layers only."""

    model_type = "olmo3"
    table_by_layer_type = True


class OlmoeAdapter(FamilyAdapter):
    """OLMoE: RMSNorm over all heads of q and k together, beside a mixture of experts."""

    model_type = "olmoe"
    qk_norm = True
    norm_per_head = False
    mixture_of_experts = True

    def specify(self, config: PreTrainedConfig, *, longrope_table: str = "short") -> SourceSpec:
        if config.clip_qkv is not None:
            raise UnsupportedSourceError(f"clip_qkv is {config.clip_qkv}; clipped keys and values are not linear")
        return super().specify(config, longrope_table=longrope_table)


class Gemma3TextAdapter(FamilyAdapter):
    """Gemma 3, text only: norms on q and k with weight 1 + w, a softmax scale of its own, and two rotary tables,
    one for layers with a sliding window and one for the others."""

    model_type = "gemma3_text"
    norms_to_mlp = ("post_attention_layernorm", "pre_feedforward_layernorm")
    table_by_layer_type = True
    qk_norm = True
    norm_offset = 1.0

    def softmax_scale(self, config: PreTrainedConfig, head_dim: int) -> float:
        return config.query_pre_attn_scalar**-0.5

    def specify(self, config: PreTrainedConfig, *, longrope_table: str = "short") -> SourceSpec:
        for key in ("use_bidirectional_attention", "final_logit_softcapping"):
            if getattr(config, key, None):
                raise UnsupportedSourceError(
                    f"{key} is {getattr(config, key)!r}; a source that has it is not supported"
                )
        return super().specify(config, longrope_table=longrope_table)
