"""Configs as published are understood, or refused by the name of what does not fit."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from mha2mla.conversion.families import ADAPTERS, adapter_for
from mha2mla.modeling.stored_tensors import StoredParameters
from tests.conversion import tiny
from tests.conversion.tiny import FAMILIES

# config.json as published (transformers 4), with fewer layers; and a few tensors that those checkpoints hold.
HUB = {
    "Meta-Llama-3.1-8B": (
        {
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "max_position_embeddings": 131072, "tie_word_embeddings": False, "attention_bias": False,
            "rope_scaling": {
                "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
        {"model.layers.1.self_attn.k_proj.weight": (1024, 4096), "lm_head.weight": (128256, 4096)},
        {"head_dim": 128},
    ),
    "Seed-OSS-36B-Instruct": (
        {
            "model_type": "seed_oss", "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 80,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136, "rms_norm_eps": 1e-6,
            "rope_theta": 10000000.0, "rope_scaling": {"rope_type": "default"}, "max_position_embeddings": 524288,
            "attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "attention_dropout": 0.1,
            "residual_dropout": 0.1, "tie_word_embeddings": False,
        },
        {"model.layers.1.self_attn.q_proj.bias": (10240,), "model.layers.1.self_attn.o_proj.weight": (5120, 10240)},
        {"head_dim": 128, "v_bias": True, "o_bias": False},
    ),
    "ERNIE-4.5-0.3B-PT": (
        {
            "model_type": "ernie4_5", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 103424, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "max_position_embeddings": 131072, "use_bias": False, "tie_word_embeddings": True,
        },
        {"model.layers.1.self_attn.k_proj.weight": (256, 1024)},
        {"head_dim": 128, "rotary_dim": None, "k_bias": False},
    ),
    "Apertus-8B-Instruct-2509": (
        {
            "model_type": "apertus", "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 131072, "rms_norm_eps": 1e-5, "rope_theta": 12000000,
            "max_position_embeddings": 65536, "hidden_act": "xielu", "attention_bias": False,
            "rope_scaling": {
                "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "tie_word_embeddings": False,
        },
        {"model.layers.1.attention_layernorm.weight": (4096,), "model.layers.1.mlp.act_fn.alpha_p": (1,)},
        {"head_dim": 128, "qk_norm": True},
    ),
    "SmolLM3-3B": (
        {
            "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
            "num_key_value_heads": 4, "vocab_size": 128256, "rms_norm_eps": 1e-6, "rope_theta": 5000000.0,
            "rope_scaling": None, "max_position_embeddings": 65536, "no_rope_layer_interval": 2,
            "sliding_window": None, "use_sliding_window": False, "attention_bias": False, "mlp_bias": False,
        },
        {"model.layers.1.self_attn.k_proj.weight": (512, 2048)},
        {"head_dim": 128, "sliding_windows": (None, None)},
    ),
    "Mistral-7B-v0.1": (
        {
            "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "max_position_embeddings": 32768, "sliding_window": 4096, "tie_word_embeddings": False,
        },
        {"model.layers.1.self_attn.o_proj.weight": (4096, 4096)},
        {"sliding_windows": (4096, 4096)},
    ),
    "Ministral-8B-Instruct-2410": (
        {
            "model_type": "ministral", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 100000000.0, "max_position_embeddings": 32768, "sliding_window": 32768,
            "layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": False,
        },
        {"model.layers.1.self_attn.k_proj.weight": (1024, 4096)},
        {"head_dim": 128, "sliding_windows": (None, 32768)},
    ),
    "Qwen2.5-0.5B": (
        {
            "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
            "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
            "max_position_embeddings": 32768, "max_window_layers": 24, "sliding_window": 32768,
            "use_sliding_window": False, "use_mrope": False, "tie_word_embeddings": True,
        },
        {"model.layers.1.self_attn.v_proj.bias": (128,)},
        {"head_dim": 64, "sliding_windows": (None, None), "v_bias": True, "o_bias": False},
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
            "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 40960, "max_window_layers": 28,
            "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True, "attention_bias": False,
        },
        {"model.layers.1.self_attn.k_norm.weight": (128,), "model.layers.1.self_attn.q_proj.weight": (2048, 1024)},
        {"head_dim": 128, "qk_norm": True},
    ),
    "Mixtral-8x7B-v0.1": (
        {
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
            "max_position_embeddings": 32768, "sliding_window": None, "num_experts_per_tok": 2, "num_local_experts": 8,
            "output_router_logits": False, "router_aux_loss_coef": 0.02, "tie_word_embeddings": False,
        },
        {
            "model.layers.1.block_sparse_moe.gate.weight": (8, 4096),
            "model.layers.1.block_sparse_moe.experts.7.w1.weight": (14336, 4096),
            "model.layers.1.block_sparse_moe.experts.7.w2.weight": (4096, 14336),
            "model.layers.1.block_sparse_moe.experts.7.w3.weight": (14336, 4096),
        },
        {"sliding_windows": (None, None)},
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
            "num_key_value_heads": 16, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
            "max_position_embeddings": 8192, "max_window_layers": 21, "sliding_window": 32768,
            "use_sliding_window": False, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
            "norm_topk_prob": False, "num_experts": 60, "num_experts_per_tok": 4, "output_router_logits": False,
            "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "tie_word_embeddings": False,
        },
        {
            "model.layers.1.mlp.experts.59.up_proj.weight": (1408, 2048),
            "model.layers.1.mlp.shared_expert.up_proj.weight": (5632, 2048),
            "model.layers.1.mlp.shared_expert_gate.weight": (1, 2048),
            "model.layers.1.self_attn.k_proj.bias": (2048,),
        },
        {"head_dim": 128, "sliding_windows": (None, None), "v_bias": True, "o_bias": False},
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0, "rope_scaling": None, "max_position_embeddings": 40960, "max_window_layers": 48,
            "sliding_window": None, "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
            "output_router_logits": False, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
        },
        {
            "model.layers.1.mlp.gate.weight": (128, 2048),
            "model.layers.1.mlp.experts.127.gate_proj.weight": (768, 2048),
            "model.layers.1.mlp.experts.127.up_proj.weight": (768, 2048),
            "model.layers.1.mlp.experts.127.down_proj.weight": (2048, 768),
            "model.layers.1.self_attn.q_norm.weight": (128,),
        },
        {"head_dim": 128, "qk_norm": True},
    ),
    "Phi-3-mini-4k-instruct": (
        {
            "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
            "num_key_value_heads": 32, "vocab_size": 32064, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "rope_scaling": None, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
            "sliding_window": 2047, "attention_bias": False, "tie_word_embeddings": False,
        },
        {
            "model.layers.1.self_attn.qkv_proj.weight": (9216, 3072),
            "model.layers.1.mlp.gate_up_proj.weight": (16384, 3072),
        },
        {"head_dim": 96, "sliding_windows": (2047, 2047)},
    ),
    "Phi-3-mini-128k-instruct": (
        {
            "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
            "num_key_value_heads": 32, "vocab_size": 32064, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "longrope", "short_factor": [1.0 + i / 30 for i in range(48)],
                "long_factor": [1.0 + i for i in range(48)],
            },
            "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144,
        },
        {"model.layers.1.self_attn.o_proj.weight": (3072, 3072)},
        {"attention_factor": (1 + 5 / 12) ** 0.5},  # 131072 / 4096 = 2^5, 4096 = 2^12
    ),
    "Phi-4-mini-instruct": (
        {
            "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
            "num_key_value_heads": 8, "vocab_size": 200064, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75, "full_attn_mod": 1, "interpolate_factor": 1,
            "rope_scaling": {
                "type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + i for i in range(48)],
            },
            "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144,
            "attention_bias": False, "tie_word_embeddings": True,
        },
        {"model.layers.1.self_attn.qkv_proj.weight": (5120, 3072)},
        {"head_dim": 128, "rotary_dim": 96, "attention_factor": (1 + 5 / 12) ** 0.5},
    ),
    "glm-4-9b-chat-hf": (
        {
            "model_type": "glm", "hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32,
            "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552, "rms_norm_eps": 1.5625e-07,
            "rope_theta": 10000.0, "max_position_embeddings": 131072, "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {"model.layers.1.self_attn.k_proj.bias": (256,), "model.layers.1.mlp.gate_up_proj.weight": (27392, 4096)},
        {"head_dim": 128, "rotary_dim": 64, "v_bias": True, "o_bias": False},
    ),
    "GLM-4-9B-0414": (
        {
            "model_type": "glm4", "hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32,
            "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552, "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "max_position_embeddings": 32768,
            "attention_bias": False, "tie_word_embeddings": False,
        },
        {"model.layers.1.post_self_attn_layernorm.weight": (4096,)},
        {"head_dim": 128, "rotary_dim": 64, "v_bias": False},
    ),
    "OLMo-2-1124-7B": (
        {
            "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "num_key_value_heads": 32, "vocab_size": 100352, "rms_norm_eps": 1e-6, "rope_theta": 500000,
            "rope_scaling": None, "max_position_embeddings": 4096, "attention_bias": False,
            "tie_word_embeddings": False,
        },
        {"model.layers.1.self_attn.q_norm.weight": (4096,), "model.layers.1.post_attention_layernorm.weight": (4096,)},
        {"qk_norm": True, "norm_per_head": False},
    ),
    "Olmo-3-1025-7B": (
        {
            "model_type": "olmo3", "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "num_key_value_heads": 32, "vocab_size": 100278, "rms_norm_eps": 1e-6, "rope_theta": 500000,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                "original_max_position_embeddings": 8192, "rope_type": "yarn",
            },
            "max_position_embeddings": 65536, "attention_bias": False, "sliding_window": 4096,
            "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False,
        },
        {"model.layers.1.self_attn.q_norm.weight": (4096,)},
        {"sliding_windows": (4096, None), "attention_factor": 1.2079441541679836},
    ),
    "OLMoE-1B-7B-0924": (
        {
            "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
            "num_key_value_heads": 16, "vocab_size": 50304, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "rope_scaling": None, "max_position_embeddings": 4096, "attention_bias": False, "clip_qkv": None,
            "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8, "output_router_logits": False,
            "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
        },
        {
            "model.layers.1.mlp.experts.63.down_proj.weight": (2048, 1024),
            "model.layers.1.self_attn.k_norm.weight": (2048,),
        },
        {"qk_norm": True, "norm_per_head": False},
    ),
    "gemma-3-1b-it": (
        {
            "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "rms_norm_eps": 1e-6,
            "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None,
            "max_position_embeddings": 32768, "sliding_window": 512, "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 256, "attn_logit_softcapping": None, "final_logit_softcapping": None,
            "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
        },
        {"model.layers.1.self_attn.q_norm.weight": (256,), "model.layers.1.pre_feedforward_layernorm.weight": (1152,)},
        {"head_dim": 256, "softmax_scale": 1 / 16, "norm_offset": 1.0, "sliding_windows": (512, None)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_published_configs_are_understood(name):
    values, tensors, wanted = HUB[name]
    config = CONFIG_MAPPING[values["model_type"]](
        **{key: value for key, value in values.items() if key != "model_type"}, num_hidden_layers=2
    )
    adapter = adapter_for(values)
    spec = adapter.specify(config)
    for key, value in wanted.items():
        assert getattr(spec, key) == (pytest.approx(value) if isinstance(value, float) else value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = StoredParameters(model, frozenset()).shapes
    assert tensors.items() <= shapes.items()
    assert "lm_head.weight" not in shapes or not config.tie_word_embeddings
    names = adapter.attention_names(spec, 1).values()
    assert set(names) == {each for each in shapes if each.startswith("model.layers.1.self_attn.")}


def test_every_adapter_has_a_case_and_a_published_config():
    assert {family for family, _ in tiny.CASES.values()} == set(ADAPTERS)
    assert {tiny.CASES[case][0] for case in FAMILIES} == set(ADAPTERS)
    assert {values["model_type"] for values, *_ in HUB.values()} == set(ADAPTERS)
    assert all(AutoConfig.for_model(family) for family in ADAPTERS)
