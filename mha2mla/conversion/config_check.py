"""Allowed values of a source's ``config.json``: one table, looked at before anything is made of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from transformers.activations import ACT2FN

from mha2mla.conversion.families import UnsupportedSourceError
from mha2mla.conversion.stages import BOOL, Check, each_is, int_from, is_int, is_number, one_of, positive

LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FLAG = Check("0 or 1", lambda value: isinstance(value, bool) or (is_int(value) and value in (0, 1)))
_WIDTH = int_from(1, 1 << 20)
_COUNT = int_from(1, 1 << 14)
_LENGTH = int_from(1, 1 << 31)
_SHARE = Check("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
_EPS = positive(1)
_TOKEN = Check("an int", lambda value: is_int(value) and abs(value) < 1 << 31)
_TOKENS = Check(
    "an int or a list of ints", lambda value: _TOKEN.allows(value) or each_is(_TOKEN).allows(value)
).or_none()
_HEAD_DIM = Check(
    "an even int from 2 to 16384", lambda value: is_int(value) and 2 <= value <= 1 << 14 and value % 2 == 0
)
_LAYERS_SHOWN = Check(
    "true, false or a list of ints",
    lambda value: value is None or BOOL.allows(value) or each_is(_TOKEN).allows(value),
)
_ACTIVATION = Check("an activation that transformers knows", lambda value: isinstance(value, str) and value in ACT2FN)
_OBJECT = Check("an object", lambda value: isinstance(value, Mapping)).or_none()
_TYPE = Check("a string", lambda value: isinstance(value, str)).or_none()
_DTYPE = one_of("float32", "bfloat16", "float16", "float64", "auto").or_none()


def _by_layer(rule: Check) -> Check:
    """One value, or one per layer."""
    return Check(f"{rule.expected}, or a list of them", lambda value: rule.allows(value) or each_is(rule).allows(value))


# Names by rule. A field that is absent has the architecture's default, which is looked at, too.
_FIELDS: tuple[tuple[Check, tuple[str, ...]], ...] = (
    (int_from(1, 4096), ("num_hidden_layers",)),
    (_WIDTH, ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")),
    (_COUNT, ("num_attention_heads", "no_rope_layer_interval", "decoder_sparse_step")),
    (_COUNT.or_none(), ("num_key_value_heads", "num_experts_per_tok")),
    (_HEAD_DIM.or_none(), ("head_dim",)),
    (int_from(1, 1 << 24), ("vocab_size",)),
    (_LENGTH, ("max_position_embeddings",)),
    (_LENGTH.or_none(), ("original_max_position_embeddings",)),
    (_EPS, ("rms_norm_eps",)),
    (_ACTIVATION, ("hidden_act", "hidden_activation")),
    (_SHARE, ("initializer_range", "attention_dropout")),
    (_SHARE.or_none(), ("partial_rotary_factor",)),
    (BOOL, ("attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings", "norm_topk_prob")),
    (BOOL.or_none(), ("use_cache", "output_attentions", "use_sliding_window")),
    (_LAYERS_SHOWN, ("output_hidden_states",)),
    (positive(1e15).or_none(), ("rope_theta", "rope_local_base_freq")),
    (_OBJECT, ("rope_scaling", "rope_parameters", "quantization_config")),
    (positive(1e6), ("query_pre_attn_scalar",)),
    (positive(1e6).or_none(), ("clip_qkv",)),
    (int_from(0, 1 << 31).or_none(), ("sliding_window",)),
    (int_from(0, 1 << 14), ("max_window_layers",)),
    (each_is(one_of("full_attention", "sliding_attention")).or_none(), ("layer_types",)),
    (each_is(_FLAG).or_none(), ("no_rope_layers",)),
    (each_is(int_from(0, 1 << 14)).or_none(), ("mlp_only_layers",)),
    (int_from(0, 1 << 14).or_none(), ("num_experts", "num_local_experts")),
    (_TOKEN.or_none(), ("pad_token_id",)),
    (_TOKENS, ("bos_token_id", "eos_token_id")),
    (_TYPE, ("model_type",)),
    (_DTYPE, ("dtype", "torch_dtype")),
    # A converted checkpoint's own:
    (_by_layer(_COUNT), ("num_rope_heads",)),
    (_by_layer(_WIDTH).or_none(), ("kv_lora_rank", "qk_rope_head_dim")),
    (_by_layer(int_from(0, 1 << 20)).or_none(), ("qk_nope_head_dim",)),
    (_WIDTH.or_none(), ("v_head_dim",)),
    (_COUNT.or_none(), ("num_up_projection_heads",)),
    (positive(1e6), ("softmax_scale",)),
    (_by_layer(positive(1e3)), ("rope_attention_scaling",)),
    (_LENGTH.or_none(), ("attention_window", "calibrated_length")),
    (int_from(0, 1 << 31), ("num_sink_tokens",)),
    (Check("null: model.safetensors or its index is read", lambda value: value is None), ("transformers_weights",)),
)
_ROPE_FIELDS: tuple[tuple[Check, tuple[str, ...]], ...] = (
    (_TYPE, ("rope_type", "type")),
    (positive(1e15), ("rope_theta",)),
    (positive(1e6), ("low_freq_factor", "high_freq_factor")),
    (positive(1e6).or_none(), ("factor", "beta_fast", "beta_slow")),
    (_LENGTH.or_none(), ("original_max_position_embeddings",)),
    (positive(1e3).or_none(), ("attention_factor", "mscale", "mscale_all_dim")),
    (BOOL, ("truncate",)),
    (each_is(positive(1e6)), ("short_factor", "long_factor")),
    (positive(1), ("partial_rotary_factor",)),
)
# Keys that a rope type needs beside its base; without them transformers raises a KeyError.
_ROPE_NEEDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor",),
        "longrope": ("short_factor", "long_factor"),
    }
)


def check_config(values: Mapping[str, Any], tensors: Collection[str] = ()) -> None:
    """Refuses values that no model has; fields that are absent are passed over.

    Args:
        values: of ``config.json``, or of the config that transformers made of it.
        tensors: names of the checkpoint's tensors; empty when they are not known.

    Raises:
        UnsupportedSourceError: naming the field, its value and what was expected.
    """
    _check_fields(values, _FIELDS, "")
    for name in ("rope_parameters", "rope_scaling"):
        if values.get(name):
            _check_rope(values[name], name)
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        _refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    hidden = values.get("hidden_size")
    if heads and hidden and values.get("head_dim") is None and (hidden % heads or hidden // heads % 2):
        _refuse("hidden_size", hidden, f"an even multiple of num_attention_heads={heads}, where head_dim is absent")
    vocabulary, padding = values.get("vocab_size"), values.get("pad_token_id")
    if vocabulary and padding is not None and not -vocabulary <= padding < vocabulary:
        _refuse("pad_token_id", padding, f"a token below vocab_size={vocabulary}")
    layers = values.get("num_hidden_layers")
    for name in ("layer_types", "no_rope_layers"):
        if layers and values.get(name) is not None and len(values[name]) != layers:
            _refuse(f"the length of {name}", len(values[name]), f"num_hidden_layers={layers}")
    if "sliding_attention" in (values.get("layer_types") or ()) and values.get("sliding_window", 0) is None:
        _refuse("sliding_window", None, "a number of tokens, for layer_types has 'sliding_attention'")
    # A layer's modules cost time and memory even where its weights turn out to be missing.
    stored = {int(match[1]) for match in map(LAYER.match, tensors) if match is not None}
    if layers and tensors and layers > 2 * len(stored) + 8:
        _refuse("num_hidden_layers", layers, f"{len(stored)}, the layers that there are tensors of")
    experts, chosen = values.get("num_experts", values.get("num_local_experts")), values.get("num_experts_per_tok")
    if experts and chosen and chosen > experts:
        _refuse("num_experts_per_tok", chosen, f"at most the {experts} experts")


def _check_rope(values: Mapping[str, Any], name: str) -> None:
    by_type = [key for key in ("full_attention", "sliding_attention") if key in values]
    for key in by_type:
        if not isinstance(values[key], Mapping):
            _refuse(f"{name}.{key}", values[key], "an object")
        _check_rope(values[key], f"{name}.{key}")
    if by_type:
        return
    _check_fields(values, _ROPE_FIELDS, f"{name}.")
    rope_type = values.get("rope_type", values.get("type"))
    for key in _ROPE_NEEDS.get(rope_type, ()):
        if values.get(key) is None and key != "original_max_position_embeddings":
            expected = next(rule.expected for rule, names in _ROPE_FIELDS if key in names)
            _refuse(f"{name}.{key}", None, f"what rope_type {rope_type!r} needs: {expected}")
    low, high = values.get("low_freq_factor"), values.get("high_freq_factor")
    if low and high and low >= high:
        _refuse(f"{name}.high_freq_factor", high, f"more than low_freq_factor={low}")
    fast, slow = values.get("beta_fast") or 32, values.get("beta_slow") or 1
    if rope_type == "yarn" and fast <= slow:
        _refuse(f"{name}.beta_slow", slow, f"less than beta_fast={fast}")


def _check_fields(values: Mapping[str, Any], rules: Iterable[tuple[Check, tuple[str, ...]]], prefix: str) -> None:
    for rule, names in rules:
        for name in names:
            if name in values and not rule.allows(values[name]):
                _refuse(prefix + name, values[name], rule.expected)


def _refuse(name: str, value: Any, expected: str) -> None:
    shown = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "an int of many digits"
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise UnsupportedSourceError(f"{name} is {shown} in config.json; expected {expected}")
