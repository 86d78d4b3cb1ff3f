"""Configuration of a converted model; needs torch and transformers alone.

``convert`` copies this file and ``modeling_mha2mla.py`` into every converted folder; the package subclasses both.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, PreTrainedConfig

CODE_VERSION = "0.1.0"  # the package's version
SCHEMA_VERSION = 2
ROTARY_KEY_CACHES = ("none", "bfloat16", "int8", "auto")
PER_LAYER = ("num_rope_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "latent_bits")


@strict
class MHA2MLAConfig(PreTrainedConfig):
    """Configuration of :class:`MHA2MLAForCausalLM`.

    Args:
        source_config: ``to_dict()`` of the config that the checkpoint was converted from; its ``model_type`` names the
            architecture around the attention.
        num_rope_heads: G, rotary keys cached per token; one number, or one per layer.
        kv_lora_rank: d_c, width of the cached latent; one number, or one per layer.
        qk_rope_head_dim: d_r, rotary width per rope head; one number, or one per layer.
        qk_nope_head_dim: d_n, un-rotated width of a query head; one number, or one per layer; 0 when all pairs rotate.
        v_head_dim: d_v, value width of a head in the expanded form; the source's head width.
        rope_from_latent: no layer caches anything rotary: the rotary key is computed from the latent when it is read.
            Since schema version 2.
        latent_bits: of a latent element in the caches of the package: 16 for the model's dtype; 8, 4, 3 or 2 for
            integer codes, whose basis the weights have; one number, or one per layer. May be changed to 16 at run time.
            This file, other packages' caches and exports hold the model's dtype whatever it says.
        qk_norm: the source normalises queries and keys before RoPE (Qwen3, Gemma 3, OLMo2).
        attention_q_bias, attention_kv_bias, attention_o_bias: the attention biases that exist.
        num_up_projection_heads: heads that W_UK and W_UV are given for; None: the source's kv heads.
        softmax_scale: the source's (``head_dim ** -0.5`` unless its config says otherwise).
        rope_attention_scaling: factor on cos and sin (YaRN, longrope) of every pair whose frequency is not zero; one
            number, or one per layer.
        calibrated_length: tokens of the longest sequence that the conversion was made for; the model warns of the first
            one beyond. None: nothing bounds it (an exact conversion), or it was not recorded.
        recipe: record of the conversion, never read here.
        schema_version: of the checkpoint's layout; a newer one than this file knows is refused. Version 1 has no
            ``rope_from_latent``, and else is version 2.
        attention_backend: name in :data:`mha2mla.modeling.backends.ATTENTION_BACKENDS` of what serves the caches of the
            package, in ``generate`` and in ragged batches; may be changed at run time. None: what serves a layer best,
            while prompts in ``generate`` are left to what transformers calls ``attn_implementation``; that computes the
            expanded form over other caches, while training, for masks that the backend cannot obey, and by the name
            "mla_expanded" always. A backend of one's own is registered before it is named here. Without the package
            the form is always expanded.
        rotary_key_cache: with ``rope_from_latent``, what caches of the package hold of rotary keys: "none": nothing,
            they are computed whenever they are read; "bfloat16": each is computed and rotated once, when its token is
            appended, and kept beside the latent in the model's dtype; "int8": the same in integers with a float32
            scale a token, their bias apart; "auto": one of these, by the rule of
            :func:`mha2mla.modeling.config.rotary_key_bits`. Logits are equal to rounding, but of int8. May be changed
            at run time; a cache keeps what the config said when it was made. Other caches, and models without the
            package, compute. "float8", which int8 replaced, is refused, also in a config.json.
        attention_window, num_sink_tokens: each token attends to the last ``attention_window`` tokens up to itself and
            to the first ``num_sink_tokens`` of its sequence that are not padding (StreamingLLM, arXiv 2309.17453; its
            recent and start sizes), at the positions that they have in the sequence. In layers without a window of
            their own, which may not be wider; those keep theirs. None: all. The source's ``sliding_window`` is another
            key. May be changed at run time; a cache of the package keeps what the config said when it was made.

    The other fields repeat the source's, for readers that expect them at the top level; where they differ from
    ``source_config`` they win.

    Raises:
        ValueError: naming the field, its value and what was expected.
    """

    model_type = "mha2mla"
    has_no_defaults_at_init: ClassVar[bool] = True
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    source_config: dict[str, Any]
    num_rope_heads: int | list[int]
    kv_lora_rank: int | list[int]
    qk_rope_head_dim: int | list[int]
    qk_nope_head_dim: int | list[int]
    v_head_dim: int
    softmax_scale: float
    num_up_projection_heads: int | None = None
    rope_from_latent: bool = False
    latent_bits: int | list[int] = 16
    qk_norm: bool = False
    attention_q_bias: bool = False
    attention_kv_bias: bool = False
    attention_o_bias: bool = False
    rope_attention_scaling: float | list[float] = 1.0
    calibrated_length: int | None = None
    recipe: dict[str, Any] | None = None
    schema_version: int = SCHEMA_VERSION
    attention_backend: str | None = None
    rotary_key_cache: str = "none"
    attention_window: int | None = None
    num_sink_tokens: int = 0

    # From here on, what transformers, generation and serving tools read from the top level of a config: taken from the
    # source unless given, and handed back to its base model. (Resized embeddings, fewer layers, …)
    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str | None = None
    max_position_embeddings: int | None = None
    initializer_range: float | None = None
    rms_norm_eps: float | None = None
    attention_dropout: int | float | None = None
    use_cache: bool | None = None
    tie_word_embeddings: bool | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.schema_version > SCHEMA_VERSION:
            raise ValueError(
                f"schema_version is {self.schema_version}; expected at most {SCHEMA_VERSION}: the checkpoint was "
                "written by a newer mha2mla, please upgrade"
            )
        if self.rope_from_latent and self.schema_version < 2:
            raise ValueError(f"schema_version is {self.schema_version}; expected at least 2 with rope_from_latent")
        source = self._source_from_dict()
        for name in _repeated_fields():
            if getattr(self, name) is None and hasattr(source, name):
                setattr(self, name, getattr(source, name))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        self._check()
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses windows and sinks that are no numbers of tokens, and rotary key caches that do not exist, at
        construction and whenever they change. Without a ``sliding_window`` no layer is one that slides."""
        if name == "sliding_window" and value is None and self.sliding_window is not None:
            # Also where the config is saved and loaded again: there None stands for the source's window.
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if name == "rotary_key_cache":
            allowed = ROTARY_KEY_CACHES if self.rope_from_latent else ("none", "auto")
            why = ": int8 replaced it, integers with a scale a token" if value == "float8" else ""
            why = why if self.rope_from_latent else ": the layout of this checkpoint caches its rotary keys"
            if value not in allowed:
                raise ValueError(f"{name} is {value!r:.80}; expected one of {allowed}{why}")
        for limited, least in (("attention_window", 1), ("num_sink_tokens", 0)):
            is_none = value is None and limited == "attention_window"
            if name == limited and not is_none and (type(value) is not int or value < least):
                raise ValueError(f"{name} is {value!r:.80}; expected at least {least}")
        super().__setattr__(name, value)

    def _source_from_dict(self) -> PreTrainedConfig:
        model_type = self.source_config.get("model_type")
        if model_type not in CONFIG_MAPPING:
            raise ValueError(f"source_config['model_type'] is {model_type!r}; expected one that transformers knows")
        # to_dict() writes model_type, which is a class attribute and no argument.
        values = {name: value for name, value in self.source_config.items() if name != "model_type"}
        return CONFIG_MAPPING[model_type](**values)

    def _check(self) -> None:
        layers = self.num_hidden_layers
        for name in (*PER_LAYER, "rope_attention_scaling"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != layers:
                raise ValueError(f"{name} has {len(value)} entries; expected {layers}, one per layer")
        for index in range(layers):
            try:
                self.layer_geometry(index)
            except ValueError as error:
                raise ValueError(f"layer {index}: {error}") from error
            self.layer_attention_window(index)
            scaling = self.layer_rope_scaling(index)
            if not (isinstance(scaling, int | float) and math.isfinite(scaling) and scaling > 0):
                raise ValueError(f"rope_attention_scaling is {scaling!r} in layer {index}; expected a positive number")
        if not (math.isfinite(self.softmax_scale) and self.softmax_scale > 0):
            raise ValueError(f"softmax_scale is {self.softmax_scale}; expected a positive finite number")
        if self.calibrated_length is not None and self.calibrated_length < 1:
            raise ValueError(f"calibrated_length is {self.calibrated_length}; expected None or a number of tokens >= 1")
        for index, kind in enumerate(self.layer_types or ()):
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(f"layer_types[{index}] is {kind!r}; expected 'full_attention' or 'sliding_attention'")

    def build_source_config(self) -> PreTrainedConfig:
        """A config of the source's own class for the modules around the attention."""
        source = self._source_from_dict()
        window = getattr(source, "sliding_window", None)
        for name in _repeated_fields():
            if hasattr(source, name):
                setattr(source, name, getattr(self, name))
        slides = any(self.layer_sliding_window(index) is not None for index in range(self.num_hidden_layers))
        if hasattr(source, "sliding_window") and not slides:
            # With layer types some families make the mask of their window though no layer reads it.
            source.sliding_window = None if getattr(source, "layer_types", None) is None else window
        return source

    @property
    def qk_head_dim(self) -> int | list[int]:
        """Query width of a head in the expanded form, d_n + d_r. By this name transformers recognises MLA models."""
        geometries = map(self.layer_geometry, range(self.num_hidden_layers))
        widths = [geometry.qk_nope_head_dim + geometry.qk_rope_head_dim for geometry in geometries]
        return widths[0] if len(set(widths)) == 1 else widths

    @property
    def has_rope_cache(self) -> bool:
        """Rotary keys are cached, beside the latent; False where they are computed from it."""
        return not self.rope_from_latent

    def layer_values(self, layer_idx: int) -> dict[str, Any]:
        """Widths and head counts of layer ``layer_idx``, by the names of the config."""
        values = {name: getattr(self, name) for name in PER_LAYER}
        up_heads = self.num_up_projection_heads
        return {
            **{name: value[layer_idx] if isinstance(value, list) else value for name, value in values.items()},
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "num_up_projection_heads": self.num_key_value_heads if up_heads is None else up_heads,
            "v_head_dim": self.v_head_dim,
            "rope_from_latent": self.rope_from_latent,
        }

    def layer_geometry(self, layer_idx: int) -> Any:
        """:meth:`layer_values` as attributes; the package's own has more, and checks them."""
        return SimpleNamespace(**self.layer_values(layer_idx), has_rope_cache=self.has_rope_cache)

    def layer_rope_scaling(self, layer_idx: int) -> float:
        """Factor on cos and sin of layer ``layer_idx``."""
        scaling = self.rope_attention_scaling
        return scaling[layer_idx] if isinstance(scaling, list) else scaling

    def layer_attention_window(self, layer_idx: int) -> tuple[int | None, int]:
        """Tokens up to itself that a query of layer ``layer_idx`` sees, None for all, and tokens at the beginning.

        Raises:
            ValueError: ``attention_window`` is narrower than the layer's own, or there are sinks without one.
        """
        own, window, sinks = self.layer_sliding_window(layer_idx), self.attention_window, self.num_sink_tokens
        if window is None and sinks:
            raise ValueError(f"num_sink_tokens is {sinks} with attention_window=None; expected 0, or a window")
        if own is None:
            return window, sinks
        if window is not None and window < own:
            raise ValueError(
                f"attention_window is {window}; expected at least {own}, the sliding_window of layer {layer_idx}, or a"
                " model loaded with sliding_window=None"
            )
        return own, 0

    def layer_sliding_window(self, layer_idx: int) -> int | None:
        """The source's window of layer ``layer_idx``: tokens that a query sees, itself included; None for all."""
        if self.sliding_window is None:
            return None  # before the index is looked at, so that torch.compile has one graph for all layers
        # Families without layer_types (Mistral) apply their window to every layer.
        if self.layer_types is not None and self.layer_types[layer_idx] != "sliding_attention":
            return None
        return self.sliding_window


def _repeated_fields() -> tuple[str, ...]:
    """Fields that repeat the source's."""
    names = tuple(MHA2MLAConfig.__annotations__)
    return names[names.index("vocab_size") :]
