"""Models of well-known shapes: as large as they say, and what converting them gives."""

import pytest
import torch

from mha2mla.trial_models import SHAPES, converted_config, random_model, random_pair, source_config


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74), ("llama-2-13b", 13.02), ("llama-3-8b", 8.03), ("llama-3.2-1b", 1.24),
        ("mistral-7b", 7.25), ("qwen2.5-0.5b", 0.494), ("qwen2.5-7b", 7.62), ("qwen3-8b", 8.19),
        ("smollm2-135m", 0.1345), ("smollm2-1.7b", 1.71),
    ],
)  # fmt: skip
def test_shapes_have_published_parameter_counts(name, billions):
    model = random_model(source_config(name), "meta", torch.bfloat16)
    assert sum(each.numel() for each in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)


def test_all_shapes_convert():
    for name in SHAPES:
        source = source_config(name)
        for layout in ("latent", "shared", "per-group"):
            config = converted_config(source, layout=layout, cache_ratio=0.5)
            width = source.num_key_value_heads * config.v_head_dim
            assert config.cache_bytes_per_token(2) <= 0.5 * 4 * source.num_hidden_layers * width


def test_a_pair_is_made_when_it_is_called():
    target = {"layout": "per-group", "cache_ratio": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    pair = random_pair("tiny", target, 3, torch.device("cpu"), torch.float32)
    assert (pair.layers, pair.geometry.kv_lora_rank, pair.geometry.num_rope_heads) == (3, 16, 2)
    source, converted = pair.source(), pair.converted()
    assert (source.config.model_type, converted.config.model_type) == ("llama", "mha2mla")
    assert len(converted.model.layers) == 3 and converted.dtype == torch.float32
    with pytest.raises(ValueError, match="random_weights is 'llama-9'"):
        source_config("llama-9")
