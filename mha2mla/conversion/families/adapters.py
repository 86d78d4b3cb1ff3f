"""The families that can be converted, each by what sets it apart from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mha2mla.conversion.families.family import FamilyAdapter

_UNBIASED = (False,) * 4

_FAMILIES = (
    # Llama 2, 3 and 3.x, SmolLM2 and every checkpoint that calls itself llama.
    FamilyAdapter("llama"),
    # Llama in which some layers do not rotate at all, as by frequencies of zero.
    FamilyAdapter("smollm3", rotating_layers="no_rope_layers"),
    # Llama without biases, with a sliding window in every layer where the config sets one.
    FamilyAdapter("mistral", window_in_every_layer=True, biased=_UNBIASED),
    FamilyAdapter("mixtral", window_in_every_layer=True, biased=_UNBIASED, mixture_of_experts=True),
    # Qwen2 and Qwen2.5 (dense): a sliding window in the layers that the config lists.
    FamilyAdapter("qwen2", biased=(True, True, True, False)),
    # Qwen1.5-MoE and Qwen2-MoE: experts, and one that all tokens share.
    FamilyAdapter("qwen2_moe", biased=("qkv_bias",) * 3 + (False,), mixture_of_experts=True),
    # RMSNorm over each head of q and k before RoPE.
    FamilyAdapter("qwen3", qk_norm=True),
    # The same beside experts, or a dense MLP in the layers that the config lists.
    FamilyAdapter("qwen3_moe", qk_norm=True, window_in_every_layer=True, mixture_of_experts=True),
    # Phi-3, Phi-4 and Phi-4-mini: some rotate only part of a head.
    FamilyAdapter("phi3", fused_qkv=True, partial_rotary=True, window_in_every_layer=True, biased=_UNBIASED),
    # GLM-4-9B: half of every head rotates, in pairs of neighbours; no bias on o.
    FamilyAdapter("glm", partial_rotary=True, neighbours_pair=True, biased=("attention_bias",) * 3 + (False,)),
    # GLM-4-0414: norms after the attention and after the MLP, too.
    FamilyAdapter(
        "glm4",
        partial_rotary=True,
        neighbours_pair=True,
        biased=("attention_bias",) * 3 + (False,),
        norms_to_mlp=("post_self_attn_layernorm", "post_attention_layernorm"),
    ),
    # RMSNorm over all heads of q and k together; the attention reads the residual stream itself.
    FamilyAdapter("olmo2", qk_norm=True, norm_per_head=False),
    # The same with sliding windows, and long-context scaling of RoPE in the other layers only.
    FamilyAdapter("olmo3", qk_norm=True, norm_per_head=False, table_by_layer_type=True),
    FamilyAdapter(
        "olmoe",
        qk_norm=True,
        norm_per_head=False,
        mixture_of_experts=True,
        refused=(("clip_qkv", "clipped keys and values are not linear"),),
    ),
    # Text only: norms on q and k with weight 1 + w, a softmax scale of its own, and two rotary tables, one for layers
    # with a sliding window and one for the others.
    FamilyAdapter(
        "gemma3_text",
        norms_to_mlp=("post_attention_layernorm", "pre_feedforward_layernorm"),
        table_by_layer_type=True,
        qk_norm=True,
        norm_offset=1.0,
        softmax_width="query_pre_attn_scalar",
        refused=tuple(
            (key, "a source that has it is not supported")
            for key in ("use_bidirectional_attention", "final_logit_softcapping")
        ),
    ),
)
ADAPTERS: Mapping[str, FamilyAdapter] = MappingProxyType({family.model_type: family for family in _FAMILIES})
