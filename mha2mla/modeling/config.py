"""The package's config of a converted model, with checked geometries, and bytes of caches by config."""

from __future__ import annotations

import copy
import os
import shutil
from operator import mul
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import DynamicCache, PreTrainedConfig

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import kept_key_bits
from mha2mla.modeling import configuration_mha2mla
from mha2mla.modeling.backends import ATTENTION_BACKENDS
from mha2mla.modeling.cache_layout import latent_layout
from mha2mla.modeling.configuration_mha2mla import PER_LAYER
from mha2mla.modeling.registry import AttentionConstants
from mha2mla.modeling.tensor_parallel import HeadShard, ranks_of

CODE_FILES = ("configuration_mha2mla.py", "modeling_mha2mla.py")
# transformers finds the classes of a converted folder's own code by these names.
AUTO_MAP = {
    "AutoConfig": "configuration_mha2mla.MHA2MLAConfig",
    "AutoModel": "modeling_mha2mla.MHA2MLAModel",
    "AutoModelForCausalLM": "modeling_mha2mla.MHA2MLAForCausalLM",
    "AutoModelForSequenceClassification": "modeling_mha2mla.MHA2MLAForSequenceClassification",
}


@strict
class MHA2MLAConfig(configuration_mha2mla.MHA2MLAConfig):
    """:class:`~mha2mla.modeling.configuration_mha2mla.MHA2MLAConfig`, whose arguments it has, with checked geometries
    and backends.

    Raises:
        ValueError: naming the field, its value and what was expected; of ``attention_backend`` also when it is
            assigned.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses names of backends that there are not, at construction and whenever they change."""
        if name == "attention_backend" and value not in (names := (None, *ATTENTION_BACKENDS.backends)):
            raise ValueError(f"{name} is {value!r}; expected one of {names}")
        super().__setattr__(name, value)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Writes config.json, and beside it the code that loads the checkpoint where this package is not installed."""
        self.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, **options)
        copy_code(save_directory)

    def layer_geometry(self, layer_idx: int) -> MLAGeometry:
        """Shape of layer ``layer_idx``.

        Raises:
            ValueError: no layer has such a shape.
        """
        return MLAGeometry(**self.layer_values(layer_idx))

    def cached_geometry(self, layer_idx: int) -> MLAGeometry:
        """Shape of layer ``layer_idx`` as the package's caches hold it: one stored rotary key where these are kept."""
        geometry, bits = self.layer_geometry(layer_idx), rotary_key_bits(self)
        if not bits:
            return geometry
        return geometry.with_key_codes if bits == 8 else geometry.with_stored_keys

    def with_options(self, **options: Any) -> MHA2MLAConfig:
        """A copy with the ``options`` that are not None; itself where all are None."""
        given = {name: value for name, value in options.items() if value is not None}
        config = copy.copy(self) if given else self
        for name, value in given.items():
            setattr(config, name, value)
        return config

    def attention_constants(self) -> tuple[AttentionConstants, ...]:
        """Per layer, what a backend is told of it beside tensors; under tensor parallelism of a rank's heads."""
        # Every cache asks, and a read of a config's field takes microseconds: layers of the same values are asked once.
        fields = [getattr(self, name) for name in (*PER_LAYER, "rope_attention_scaling", "layer_types")]
        made: dict[tuple, AttentionConstants] = {}
        layers = []
        for index in range(self.num_hidden_layers):
            values = tuple([field[index] if isinstance(field, list) else field for field in fields])
            if values not in made:
                made[values] = self._layer_constants(index)
            layers.append(made[values])
        return tuple(layers)

    def _layer_constants(self, index: int) -> AttentionConstants:
        geometry, ranks = self.cached_geometry(index), ranks_of(self)
        return AttentionConstants(
            geometry if ranks == 1 else HeadShard.of(geometry, 0, ranks).geometry,
            self.softmax_scale,
            self.layer_rope_scaling(index),
            *self.layer_attention_window(index),
        )

    def cache_bytes_per_token(self, itemsize: int) -> int:
        """Bytes cached per token, all layers, for elements of ``itemsize`` bytes (2 for bfloat16)."""
        return cache_bytes_per_token(self, itemsize)

    def source_cache_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that the source model caches per token, all layers, for elements of ``itemsize`` bytes."""
        numbers = (self.layer_geometry(i).source_cache_numel_per_token for i in range(self.num_hidden_layers))
        return itemsize * sum(numbers)


def copy_code(folder: str | os.PathLike[str]) -> None:
    for name in CODE_FILES:
        shutil.copyfile(Path(__file__).with_name(name), Path(folder, name))


def rotary_key_bits(config: MHA2MLAConfig) -> int:
    """Bits in which a cache of the package keeps the rotary keys of a checkpoint whose layout caches the latent alone:
    16 stands for the model's dtype, 8 for int8 and a scale a token, 0 for keys that are computed.

    ``rotary_key_cache`` decides, "auto" by :func:`mha2mla.kernels.kept_key_bits`. The rule asks for no
    device, since every geometry whose keys a kernel computes has one that reads them; 8 bits are left to the backends
    whose caches have :func:`latent_layout`, which those of latents in 8 bits do not.

    Raises:
        ValueError: it is "int8" for latents that are integer codes.
    """
    mode = config.rotary_key_cache
    if not config.rope_from_latent or mode in ("none", "bfloat16"):
        return 16 if config.rope_from_latent and mode == "bfloat16" else 0
    layers = tuple(config.layer_geometry(index) for index in range(config.num_hidden_layers))
    if mode == "auto":
        backend = ATTENTION_BACKENDS.backends.get(config.attention_backend)
        return kept_key_bits(layers, backend is None or backend.cache_layout is latent_layout)
    if any(layer.has_codes for layer in layers):
        raise ValueError(
            f"rotary_key_cache is 'int8' with latent_bits={config.latent_bits}; expected 'none', 'bfloat16' or"
            " 'auto': kernels over codes of latents read keys in 16 bits"
        )
    return 8


def expert_share(config: PreTrainedConfig) -> float:
    """Share of the routed experts that a token goes to; source or converted."""
    source = getattr(config, "source_config", None) or config.get_text_config(decoder=True).to_dict()
    count = source.get("num_local_experts") or source.get("num_experts") or 1
    return min(1.0, (source.get("num_experts_per_tok") or 1) / count)


def touched_experts(share: float, tokens: int) -> float:
    """Share of the routed experts that any of ``tokens`` goes to, each to ``share`` of them, were routing uniform."""
    return 1 - (1 - share) ** tokens


def cache_bytes_per_token(config: PreTrainedConfig, itemsize: int) -> int:
    """Bytes that all layers cache of a new token, for elements of ``itemsize`` bytes; source or converted."""
    return sum(layer_token_bytes(config, itemsize))


def cache_bytes(config: PreTrainedConfig, length: int, itemsize: int) -> int:
    """Bytes that the cache of ``generate`` holds of ``length`` tokens, all layers; source or converted."""
    return sum(map(mul, cached_tokens(config, length), layer_token_bytes(config, itemsize)))


def layer_token_bytes(config: PreTrainedConfig, itemsize: int) -> list[int]:
    """Bytes per token and layer, for elements of ``itemsize`` bytes; source or converted."""
    if isinstance(config, MHA2MLAConfig):
        return [config.cached_geometry(i).cache_bytes_per_token(itemsize) for i in range(config.num_hidden_layers)]
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return [2 * kv_heads * head_dim * itemsize] * config.num_hidden_layers


def cached_tokens(config: PreTrainedConfig, length: int, *, static: bool = False) -> list[int]:
    """Tokens per layer that a cache holds of a sequence of ``length``; source or converted.

    A ``LatentCache`` keeps every token. Of a source, transformers' ``DynamicCache`` keeps one token less than a sliding
    window, all that the next token sees beside itself; its ``StaticCache`` of ``length`` (``static``) the window.
    """
    if isinstance(config, MHA2MLAConfig):
        return [length] * config.num_hidden_layers
    if static:
        return visible_tokens(config, length)
    # transformers slices [-window + 1:], which is everything for a window of 1.
    return [length if window is None else min(length, window - 1 or length) for window in _windows(config)]


def visible_tokens(config: PreTrainedConfig, length: int) -> list[int]:
    """Tokens per layer that the last one of ``length`` attends to, itself included: what a decode step reads."""
    return [length if window is None else min(length, window) for window in _windows(config)]


def _windows(config: PreTrainedConfig) -> list[int | None]:
    """Tokens per layer that a query sees at most, attention sinks included; None: all."""
    if isinstance(config, MHA2MLAConfig):
        windows = map(config.layer_attention_window, range(config.num_hidden_layers))
        return [None if window is None else window + sinks for window, sinks in windows]
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
