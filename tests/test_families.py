"""Every family through the whole pipeline: exact at full rank, as measured below it, experts untouched, or refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, DynamicCache

import mha2mla
from mha2mla.conversion.families import ADAPTERS, UnsupportedSourceError, adapter_for
from mha2mla.conversion.source.checkpoint import CheckpointError
from mha2mla.conversion.source.parameters import StoredParameters
from mha2mla.conversion.target import LAYOUTS
from tests.conversion import tiny
from tests.conversion.tiny import SHORT
from tests.few import each

FULL = {"cache_ratio": 1.0, **SHORT}
# The traits that the statistics see differently: norms over all heads, norms of weight 1 + w, tables by layer.
FAMILIES = ("llama", "smollm3", "mistral", "qwen2", "qwen3", "phi3", "olmo2-mha-biases", "olmo3-yarn", "gemma3")
FAMILIES += ("phi3-partial-longrope", "glm", "glm4-no-biases")
FAMILIES += ("mixtral", "qwen2-moe-sliding", "qwen3-moe", "olmoe")


def convert(source, destination, recipe, **keys):
    keys = {"evaluation_tokens": 256, "device": "cpu", "progress": False, **keys}
    return mha2mla.convert(source, destination, recipe, **keys)


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def made(case, folder, **more):
    family, keys = tiny.CASES[case]
    return tiny.checkpoint(folder, family, **keys, **more)


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@each("case, layout", tiny.CASES, LAYOUTS)
def test_full_rank_reproduces_the_source(case, layout, tmp_path):
    """Pairing, biases, norms, head width, rope scaling, tied embeddings, sliding windows."""
    folder = made(case, tmp_path / "source")
    report = convert(folder, tmp_path / "out", tiny.Recipe(layout=layout, **FULL))
    assert report.parity.logits_relative_error <= 1e-4
    assert report.cache_ratio == 1.0 and report.calibration_tokens == 0
    source, converted = loaded(folder), loaded(tmp_path / "out")
    tokens = tiny.some_tokens()
    with torch.inference_mode():
        assert relative(converted(tokens).logits, source(tokens).logits) <= 1e-4
    prompt = {"input_ids": tokens[:, :14], "attention_mask": torch.ones(3, 14, dtype=torch.int64)}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = source.generate(**prompt, **options)
    assert torch.equal(converted.generate(**prompt, **options), expected)
    assert torch.equal(converted.generate(**prompt, past_key_values=DynamicCache(), **options), expected)


def soften(folder):
    """Random models are so sure of their predictions that at half rank some are further from them than a guess, which
    convert refuses to publish."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if "lm_head.weight" in tensors:
        save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] / 10}, path, metadata={"format": "pt"})


@each("case, layout", FAMILIES, LAYOUTS)
def test_half_rank_reloads_as_measured(case, layout, tmp_path):
    folder = made(case, tmp_path / "source")
    held_out = tiny.some_tokens(2, 32)
    soften(folder)
    report = convert(folder, tmp_path / "out", tiny.Recipe(layout=layout, **SHORT), evaluation=held_out)
    expected, actual = (tiny.logits(path, held_out)[:, :-1] for path in (folder, tmp_path / "out"))
    # half the cache of a tiny model with one kv head may lose nothing: then both are float32's rounding
    assert relative(actual, expected) == pytest.approx(report.parity.logits_relative_error, rel=1e-3, abs=1e-6)
    assert report.cache_ratio <= 0.5


@pytest.mark.parametrize("case", ["phi3-partial-longrope", "qwen3-moe", "olmo2", "gemma3"])
def test_full_rank_reproduces_a_bfloat16_source(case, tmp_path):
    """No map at full rank may round what the source stores: norms of weight 1 + w, dims that do not rotate, experts."""
    family, keys = tiny.CASES[case]
    tiny.model(family, **keys).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    tiny.tokenizer().save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out", tiny.Recipe(**FULL))
    assert report.weights_dtype == "bfloat16" and report.parity.logits_relative_error <= 1e-4
    tokens = tiny.some_tokens()
    assert relative(tiny.logits(tmp_path / "out", tokens), tiny.logits(tmp_path / "source", tokens)) <= 1e-4


def test_a_window_that_a_config_names_in_vain_hides_nothing(tmp_path):
    folder = tiny.checkpoint(tmp_path / "source", "llama", sliding_window=9)
    convert(folder, tmp_path / "out", tiny.Recipe(**FULL))
    tokens = tiny.some_tokens()
    assert relative(tiny.logits(tmp_path / "out", tokens), tiny.logits(folder, tokens)) <= 1e-4


def test_fused_projections_convert_as_separate_ones_do(tmp_path):
    """A Phi-3 is a Llama with q, k, v and gate, up side by side: calibrated at half rank, the very same tensors."""
    llama, phi3 = tmp_path / "llama", tmp_path / "phi3"
    tiny.checkpoint(llama, "llama", hidden_size=64)
    tiny.checkpoint(phi3, "phi3", hidden_size=64, rms_norm_eps=1e-6)
    tensors = load_file(llama / "model.safetensors")
    for prefix in ("model.layers.0.", "model.layers.1."):
        qkv = [tensors.pop(f"{prefix}self_attn.{part}_proj.weight") for part in "qkv"]
        gate_up = [tensors.pop(f"{prefix}mlp.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{prefix}self_attn.qkv_proj.weight"] = torch.cat(qkv)
        tensors[f"{prefix}mlp.gate_up_proj.weight"] = torch.cat(gate_up)
    save_file(tensors, phi3 / "model.safetensors", metadata={"format": "pt"})
    convert(llama, tmp_path / "one", tiny.Recipe(**SHORT))
    convert(phi3, tmp_path / "two", tiny.Recipe(**SHORT))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    # The second layer's inputs went through one product instead of two, which rounds otherwise.
    attention = [name for name in one if name.startswith("model.layers.0.self_attn.")]
    assert attention and all(torch.equal(one[name], two[name]) for name in attention)


def test_configs_written_by_older_libraries_convert(tmp_path):
    """RoPE at the top level and names of remote code, as Phi-3 was published."""
    folder = made("phi3-longrope", tmp_path / "source")
    values = json.loads((folder / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope["rope_theta"], "transformers_version": "4.40.2"}
    values["rope_scaling"] = {"type": "longrope", **{key: rope[key] for key in ("short_factor", "long_factor")}}
    values["auto_map"] = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(values))
    convert(folder, tmp_path / "out", tiny.Recipe(**FULL))
    tokens = tiny.some_tokens()
    assert relative(tiny.logits(tmp_path / "out", tokens), tiny.logits(folder, tokens)) <= 1e-4


EXPERT = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.2.w3.weight",
    "qwen2-moe": "model.layers.1.mlp.experts.2.up_proj.weight",
    "qwen3-moe": "model.layers.1.mlp.experts.2.up_proj.weight",
    "olmoe": "model.layers.1.mlp.experts.2.up_proj.weight",
}


@pytest.mark.parametrize("case", EXPERT)
def test_experts_keep_their_names_and_bits(case, tmp_path):
    folder = made(case, tmp_path / "source")
    convert(folder, tmp_path / "out", tiny.Recipe(**SHORT))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert EXPERT[case] in before
    kept = {name for name in before if ".self_attn." not in name}
    assert kept == {name for name in after if ".self_attn." not in name}
    assert all(torch.equal(before[name], after[name]) for name in kept)
    # What transformers writes of the converted model has the same names.
    loaded(tmp_path / "out").save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == after.keys() and all(torch.equal(again[name], after[name]) for name in after)


@pytest.mark.parametrize("case", EXPERT)
def test_stacked_experts_are_read_too(case, tmp_path):
    """As a state dict holds them: all experts of a layer in one tensor."""
    family, keys = tiny.CASES[case]
    folder = made(case, tmp_path / "source")
    stacked = tiny.model(family, **keys).state_dict()
    assert "model.layers.1.mlp.experts.gate_up_proj" in stacked
    save_file(stacked, folder / "model.safetensors", metadata={"format": "pt"})
    convert(folder, tmp_path / "out", tiny.Recipe(**FULL))
    tokens = tiny.some_tokens()
    assert relative(tiny.logits(tmp_path / "out", tokens), tiny.logits(folder, tokens)) <= 1e-4


@pytest.mark.parametrize("case", EXPERT)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors, name: tensors.pop(name), "tensor {} is absent from .* \\(1 absent in all\\)"),
        (lambda tensors, name: tensors.update({name: torch.ones(3, 48)}), "tensor {} has shape \\(3, 48\\)"),
        (lambda tensors, name: tensors[name].fill_(float("nan")), "tensor {} in model.safetensors has .* NaN"),
    ],
)
def test_a_damaged_expert_is_named_and_leaves_nothing(case, change, named, tmp_path):
    folder = made(case, tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    change(tensors, EXPERT[case])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=named.format(EXPERT[case])):
        convert(folder, tmp_path / "out", tiny.Recipe(**FULL))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


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
    "Mistral-Nemo-Base-2407": (
        {
            "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0, "max_position_embeddings": 128000, "sliding_window": None,
        },
        {"model.layers.1.self_attn.q_proj.weight": (4096, 5120)},
        {"head_dim": 128, "sliding_windows": (None, None)},
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


REFUSED = {
    "a Llama that rotates in part": (
        {**HUB["Qwen3-0.6B"][0], "model_type": "llama", "partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5",
    ),
    "an OLMoE with clipping": ({**HUB["OLMoE-1B-7B-0924"][0], "clip_qkv": 8.0}, "clip_qkv is 8.0"),
    "gemma-2-2b": (
        {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "'gemma2' cannot be converted: it soft-caps its attention logits",
    ),
    "gemma-3-4b-it": ({"model_type": "gemma3"}, "'gemma3' cannot be converted: it is multimodal"),
    "embeddinggemma-300m": (
        {**HUB["gemma-3-1b-it"][0], "use_bidirectional_attention": True},
        "use_bidirectional_attention is True",
    ),
    "a Gemma 3 with capped logits": (
        {**HUB["gemma-3-1b-it"][0], "final_logit_softcapping": 30.0},
        "final_logit_softcapping is 30.0",
    ),
    "a Gemma 3 with capped attention": (
        {**HUB["gemma-3-1b-it"][0], "attn_logit_softcapping": 50.0},
        "attn_logit_softcapping is 50.0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name, tmp_path):
    values, named = REFUSED[name]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 2}))
    with pytest.raises(UnsupportedSourceError, match=named):
        convert(tmp_path / "source", tmp_path / "out", tiny.Recipe(**FULL))


def test_every_adapter_has_a_case_and_a_published_config():
    assert {family for family, _ in tiny.CASES.values()} == set(ADAPTERS)
    assert {tiny.CASES[case][0] for case in FAMILIES} == set(ADAPTERS)
    assert {values["model_type"] for values, *_ in HUB.values()} == set(ADAPTERS)
    assert all(AutoConfig.for_model(family) for family in ADAPTERS)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FAMILIES)
def test_full_rank_reproduces_the_source_on_a_gpu(case, tmp_path):
    folder = made(case, tmp_path / "source")
    report = convert(folder, tmp_path / "out", tiny.Recipe(**FULL), device="cuda")
    assert report.device == "cuda" and report.parity.logits_relative_error <= 1e-4
    tokens = tiny.some_tokens()
    models = [loaded(path).cuda() for path in (tmp_path / "out", folder)]
    with torch.inference_mode():
        converted, source = (model(tokens.cuda()).logits for model in models)
    assert relative(converted, source) <= 1e-4
