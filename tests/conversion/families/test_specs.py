"""Biases, norms, head widths, rope scaling, windows: described as they are, or refused by name."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from mha2mla.conversion.families import ADAPTERS, UnsupportedSourceError, adapter_for
from tests.conversion import tiny


def describe(case):
    family, keys = tiny.CASES[case]
    config = tiny.config(family, **keys)
    return config, adapter_for(config.to_dict()).specify(config)


@pytest.mark.parametrize("case", tiny.CASES)
def test_a_spec_says_what_the_model_class_has(case):
    config, spec = describe(case)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = set(model.state_dict())
    adapter = ADAPTERS[spec.model_type]
    for layer in range(spec.num_layers):
        attention = set(adapter.attention_names(spec, layer).values())
        assert attention == {name for name in names if name.startswith(f"model.layers.{layer}.self_attn.")}
    attention = model.model.layers[0].self_attn
    assert attention.scaling == spec.softmax_scale
    heads, kv_heads = (count * spec.head_dim for count in (spec.num_attention_heads, spec.num_key_value_heads))
    projections = [getattr(attention, f"{part}_proj", None) for part in ("q", "k", "v", "qkv")]
    assert sum(each.out_features for each in projections if each is not None) == heads + 2 * kv_heads
    assert attention.o_proj.in_features == heads
    rotary = type(model.model.rotary_emb)(config)
    for layer in range(spec.num_layers):
        kind = "" if hasattr(rotary, "inv_freq") else f"{config.layer_types[layer]}_"
        turns = getattr(model.model.layers[layer].self_attn, "use_rope", 1)
        table = getattr(rotary, f"{kind}inv_freq") * turns
        assert torch.equal(table, spec.of_layer(layer).inv_freq[: table.numel()])
        assert (spec.of_layer(layer).inv_freq[table.numel() :] == 0).all()
        assert getattr(rotary, f"{kind}attention_scaling") == spec.of_layer(layer).attention_factor


def test_windows_belong_to_layers():
    assert describe("mistral-sliding")[1].sliding_windows == (9, 9)
    assert describe("qwen2-sliding")[1].sliding_windows == (None, 9)
    assert describe("qwen2")[1].sliding_windows == (None, None)
    assert describe("mixtral-sliding")[1].sliding_windows == (9, 9)
    assert describe("qwen3-moe-sliding")[1].sliding_windows == (9, 9)
    assert describe("phi3-mha-sliding")[1].sliding_windows == (9, 9)
    assert describe("smollm3-sliding")[1].sliding_windows == (9, None)
    assert describe("gemma3")[1].sliding_windows == (9, None, 9)


def test_a_window_that_the_architecture_does_not_look_at_is_no_window():
    config = tiny.config("llama", sliding_window=9)
    assert config.sliding_window == 9
    assert ADAPTERS["llama"].specify(config).sliding_windows == (None, None)


def test_tables_belong_to_layers():
    spec = describe("gemma3")[1]
    local, everywhere, again = (spec.of_layer(layer).inv_freq for layer in range(3))
    assert torch.equal(local, again) and torch.allclose(local[1:] / everywhere[1:], 100.0 ** (torch.arange(1, 12) / 12))


def test_longrope_takes_one_table_and_says_which():
    config = tiny.config("llama", rope_parameters=tiny.LONGROPE)
    short = ADAPTERS["llama"].specify(config, longrope_table="short")
    long = ADAPTERS["llama"].specify(config, longrope_table="long")
    assert "short table" in short.rope_note and "long table" in long.rope_note
    ratio = short.inv_freq / long.inv_freq
    wanted = torch.tensor(tiny.LONGROPE["long_factor"]) / torch.tensor(tiny.LONGROPE["short_factor"])
    assert torch.allclose(ratio, wanted)


def edited(**keys):
    return {**tiny.config("llama").to_dict(), **keys}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (edited(model_type="gpt2"), "'gpt2' cannot be converted: it has no rotary positions"),
        (edited(model_type="gemma2"), "'gemma2' cannot be converted: it soft-caps its attention logits"),
        (edited(model_type="gemma3"), "multimodal; .* 'gemma3_text'"),
        (edited(model_type="gpt_oss"), "attention sinks"),
        (edited(model_type="deepseek_v3"), "already is MLA"),
        (edited(model_type="mha2mla"), "already converted"),
        (edited(model_type="somebodys_own"), "'somebodys_own' cannot be converted: there is no adapter"),
        ({}, "model_type None"),
        (edited(quantization_config={"quant_method": "gptq"}), r"quantised \(gptq\)"),
        (edited(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0"),
        (edited(num_experts=8), "num_experts is 8"),
        (edited(is_causal=False), "is_causal is False; expected true"),
    ],
)
def test_a_family_that_cannot_be_converted_is_refused_by_name(values, named):
    with pytest.raises(UnsupportedSourceError, match=named):
        adapter_for(values)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "dynamic NTK"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_a_rotary_scheme_without_a_fixed_table_is_refused_by_name(rope, named):
    config = tiny.config("llama", rope_parameters=rope)
    with pytest.raises(UnsupportedSourceError, match=named):
        ADAPTERS["llama"].specify(config)
