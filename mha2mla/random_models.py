"""Models of well-known shapes with random weights, source and converted: speed needs no checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from mha2mla.geometry import MLAGeometry
    from mha2mla.modeling import MHA2MLAConfig

ShapeName = Literal[
    "llama-2-7b",
    "llama-2-13b",
    "llama-3-8b",
    "llama-3.2-1b",
    "mistral-7b",
    "qwen2.5-0.5b",
    "qwen2.5-7b",
    "qwen3-8b",
    "smollm2-135m",
    "smollm2-1.7b",
    "tiny",
]


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> dict:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,  # so that every context can be timed
        "tie_word_embeddings": False,
        **more,
    }


# Sizes from the config.json of each model; positions raised.
SHAPES: Mapping[ShapeName, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
        "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000),
        "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256),
        "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
        "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32768, model_type="mistral", sliding_window=None),
        "qwen2.5-0.5b": _llama(896, 4864, 24, 14, 2, 151936, model_type="qwen2", tie_word_embeddings=True),
        "qwen2.5-7b": _llama(3584, 18944, 28, 28, 4, 152064, model_type="qwen2"),
        "qwen3-8b": _llama(4096, 12288, 36, 32, 8, 151936, model_type="qwen3", head_dim=128),
        "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
        "smollm2-1.7b": _llama(2048, 8192, 24, 32, 32, 49152, tie_word_embeddings=True),
        "tiny": _llama(64, 128, 2, 4, 2, 259),
    }
)


def source_config(name: ShapeName, **changes: Any) -> PreTrainedConfig:
    """The config of a shape, with ``changes`` such as ``num_hidden_layers=4``.

    Raises:
        ValueError: there is no such shape.
    """
    from transformers import AutoConfig

    if name not in SHAPES:
        raise ValueError(f"random_weights is {name!r}; expected one of {', '.join(SHAPES)}")
    return AutoConfig.for_model(**{**SHAPES[name], **changes})


def converted_config(source: PreTrainedConfig, **target: Any) -> MHA2MLAConfig:
    """What a conversion of ``source`` would give, every layer with the same widths.

    Args:
        target: ``layout``, and ``cache_ratio`` or ``kv_lora_rank`` with ``qk_rope_head_dim``, as recipes have them.

    Raises:
        ValueError: the target does not fit the source.
    """
    from mha2mla.conversion import layer
    from mha2mla.conversion.families import adapter_for
    from mha2mla.conversion.recipe import Recipe

    recipe = Recipe.from_preset("minimal", **{key: value for key, value in target.items() if value is not None})
    spec = adapter_for(source.to_dict()).specify(source)
    return layer.converted_config(source, spec, (recipe.geometry(spec),) * source.num_hidden_layers, recipe)


def random_model(config: PreTrainedConfig, device: str | torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model of a config, its weights drawn on the device, ready to evaluate."""
    import torch
    from transformers import AutoModelForCausalLM

    import mha2mla.modeling  # noqa: F401  registers model_type "mha2mla"

    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@dataclass(frozen=True)
class RandomPair:
    """Source and converted model of a shape, made when they are called.

    Attributes:
        source, converted: make the models. geometry: of a converted layer. layers: of both.
    """

    source: Callable[[], PreTrainedModel]
    converted: Callable[[], PreTrainedModel]
    geometry: MLAGeometry
    layers: int


def random_pair(
    name: ShapeName, target: Mapping[str, Any], layers: int | None, device: torch.device, dtype: torch.dtype
) -> RandomPair:
    """A shape beside what converting it gives.

    Args:
        name: of the shape.
        target: as for :func:`converted_config`.
        layers: of both models; None: the shape's.
        dtype: of the weights.

    Raises:
        ValueError: no such shape, no layers, or a target that does not fit the shape.
    """
    if layers is not None and layers < 1:
        raise ValueError(f"layers is {layers}; expected 1 or more")
    source = source_config(name, **({} if layers is None else {"num_hidden_layers": layers}))
    converted = converted_config(source, **target)
    make = partial(random_model, device=device, dtype=dtype)
    geometry = converted.layer_geometry(0)
    return RandomPair(partial(make, source), partial(make, converted), geometry, source.num_hidden_layers)
