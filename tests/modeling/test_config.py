"""The config: what it mirrors, what it counts, what it refuses."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling import ATTENTION_BACKENDS, LatentCache, MHA2MLAConfig
from mha2mla.modeling.config import cache_bytes, cache_bytes_per_token, cached_tokens, layer_token_bytes, visible_tokens
from mha2mla.modeling.configuration_mha2mla import SCHEMA_VERSION
from tests.conversion import tiny
from tests.folders import edit_config, read_json
from tests.modeling import models


@pytest.mark.parametrize("case", models.GEOMETRIES)
def test_round_trip(case, tmp_path):
    config = models.mla_config(case, recipe={"layout": "shared", "seed": 3})
    config.save_pretrained(tmp_path)
    stored = read_json(tmp_path / "config.json")
    assert stored["model_type"] == "mha2mla" and stored["schema_version"] == SCHEMA_VERSION
    assert stored["source_config"]["model_type"] == config.source_config["model_type"]
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is MHA2MLAConfig
    assert [again.layer_geometry(i) for i in range(2)] == [config.layer_geometry(i) for i in range(2)]
    # Through JSON, which knows no integer keys.
    ours, theirs = (json.loads(json.dumps(c.to_dict(), default=str)) for c in (again, config))
    for record in ("_name_or_path", "transformers_version", "architectures"):
        ours.pop(record, None), theirs.pop(record, None)
    assert ours == theirs


def test_a_source_config_is_kept_whole_and_given_back():
    source = models.source_config("llama-yarn-tied")
    config = models.mla_config(source_config=source.to_dict())
    assert config.source_config == source.to_dict()
    again = config.build_source_config()
    assert type(again) is type(source)
    assert again.to_dict() == source.to_dict()
    assert config.tie_word_embeddings and config.vocab_size == 96 and config.bos_token_id == 1


def test_the_top_level_wins_over_the_source():
    """As after resize_token_embeddings, which knows nothing of source_config."""
    config = models.mla_config(vocab_size=100)
    assert config.source_config["vocab_size"] == 96
    assert config.build_source_config().vocab_size == config.vocab_size == 100


WINDOWED = {
    "gemma3": lambda: tiny.model("gemma3_text", **tiny.GEMMA3),
    "mistral": lambda: models.source_model("mistral-sliding"),
    "mistral window 1": lambda: models.source_model("mistral-sliding", sliding_window=1),
    "qwen2": lambda: models.source_model("qwen2-sliding"),
    "llama": lambda: models.source_model("llama"),
}


@pytest.mark.parametrize("source", WINDOWED)
def test_cached_tokens_are_those_of_the_sources_caches(source):
    """Bytes too, of transformers' own caches after a prompt and after a step."""
    model = WINDOWED[source]()
    config = model.config
    for length in (2, 8, 9, 10, 30):
        for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=length)):
            with torch.inference_mode():
                model(models.tokens(1, length - 1), past_key_values=cache)
                model(models.tokens(1, 1), past_key_values=cache)
            static = isinstance(cache, StaticCache)
            assert cached_tokens(config, length, static=static) == [layer.keys.shape[2] for layer in cache.layers]
            if not static:
                held = [layer.keys.numel() + layer.values.numel() for layer in cache.layers]
                assert cache_bytes(config, length, 4) == 4 * sum(held)
    full = cache_bytes(config, 1000, 4)
    assert (full < 1000 * cache_bytes_per_token(config, 4)) == (source in ("gemma3", "mistral", "qwen2"))


@pytest.mark.parametrize("case", ["sliding", "some sliding", "latent per layer"])
def test_a_latent_cache_holds_every_token(case):
    """Of a layer with a window, too; a step reads the window, and attention sinks."""
    model = models.mla_model(case)
    cache, config = LatentCache(model.config, max_cache_len=64), model.config
    with torch.inference_mode():
        model(models.tokens(1, 64), past_key_values=cache)
    assert cached_tokens(config, 64) == [layer.get_seq_length() for layer in cache.layers] == [64, 64]
    assert cache_bytes(config, 64, 4) == cache.nbytes
    assert layer_token_bytes(config, 4) == [layer.nbytes // 64 for layer in cache.layers]
    windows = [config.layer_sliding_window(layer) or 64 for layer in range(2)]
    assert visible_tokens(config, 64) == windows and visible_tokens(config, 3) == [3, 3]
    config.attention_window, config.num_sink_tokens = 20, 4
    assert visible_tokens(config, 64) == [24 if window == 64 else window for window in windows]


def test_geometry_per_layer():
    config = models.mla_config("per layer")
    assert config.layer_geometry(1) == MLAGeometry(
        num_attention_heads=6,
        num_rope_heads=2,
        kv_lora_rank=8,
        qk_rope_head_dim=6,
        qk_nope_head_dim=0,
        v_head_dim=8,
        num_key_value_heads=2,
    )
    assert config.cache_bytes_per_token(2) == 2 * ((16 + 2 * 4) + (8 + 2 * 6))
    assert config.source_cache_bytes_per_token(2) == 2 * 2 * (2 * 2 * 8)
    # By this name transformers recognises MLA when it sizes caches.
    assert config.qk_head_dim == [8, 6]
    assert models.mla_config("shared").qk_head_dim == 14


def test_windows_are_the_sources():
    for case, windows in (("per-group", [None] * 2), ("sliding", [9, 9]), ("some sliding", [None, 9])):
        config = models.mla_config(case)
        assert [config.layer_sliding_window(index) for index in range(2)] == windows


def test_a_newer_schema_is_refused(tmp_path):
    config = models.mla_config()
    config.schema_version = SCHEMA_VERSION + 1
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"schema_version is {SCHEMA_VERSION + 1}; expected at most {SCHEMA_VERSION}"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source_config": {"model_type": "nonesuch"}}, r"source_config\['model_type'\] is 'nonesuch'"),
        ({"source_config": {"hidden_size": 8}}, r"source_config\['model_type'\] is None"),
        ({"kv_lora_rank": [16]}, "kv_lora_rank has 1 entries; expected 2"),
        ({"qk_rope_head_dim": [4, 5]}, "layer 1: qk_rope_head_dim is 5; expected an even number"),
        ({"num_rope_heads": 4}, "layer 0: num_rope_heads is 4; expected a divisor"),
        ({"num_up_projection_heads": 4}, "layer 0: num_up_projection_heads is 4; expected a divisor"),
        ({"num_up_projection_heads": 3}, "layer 0: num_up_projection_heads is 3; expected a multiple"),
        ({"kv_lora_rank": 0}, "layer 0: kv_lora_rank is 0"),
        ({"softmax_scale": 0.0}, "softmax_scale is 0.0; expected a positive"),
        ({"softmax_scale": float("nan")}, "softmax_scale is nan"),
        ({"rope_attention_scaling": None}, "rope_attention_scaling is None in layer 0; expected a positive number"),
        ({"rope_attention_scaling": [1.0, "2"]}, "rope_attention_scaling is '2' in layer 1"),
        ({"rope_attention_scaling": float("inf")}, "rope_attention_scaling is inf in layer 0"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types\[1\] is 'chunked_attention'"),
    ],
)
def test_bad_values_are_named(keys, message):
    with pytest.raises(ValueError, match=message):
        models.mla_config(**keys)


def test_wrong_types_are_refused():
    with pytest.raises(Exception, match="kv_lora_rank"):
        models.mla_config(kv_lora_rank="16")
    with pytest.raises(TypeError, match="source_config"):
        MHA2MLAConfig(
            num_rope_heads=1, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, softmax_scale=1.0
        )


def test_unknown_backend_names_are_refused(tmp_path):
    given, model = {"attention_backend": "nope"}, models.mla_model()
    model.save_pretrained(tmp_path)
    for call in (
        lambda: setattr(model.config, "attention_backend", "nope"),
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, **given),
        lambda: AutoConfig.from_pretrained(tmp_path, **given),
        lambda: edit_config(tmp_path, **given) or AutoConfig.from_pretrained(tmp_path),
    ):
        with pytest.raises(ValueError, match="attention_backend is 'nope'; expected one of"):
            call()


def test_registered_backend_may_be_named(monkeypatch):
    registry = ATTENTION_BACKENDS
    monkeypatch.setattr(registry, "_backends", dict(registry.backends))
    registry.register(replace(registry.get("mla_reference"), name="mine"))
    config = models.mla_config(attention_backend="mine")
    config.attention_backend = None
