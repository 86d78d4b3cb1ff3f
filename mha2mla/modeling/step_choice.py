"""Which layers of a step over a LatentCache run the absorbed form: by geometry, mask, and what the caller asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import DecodePlan
from mha2mla.modeling.attention import MLAAttention
from mha2mla.modeling.cache import LatentCache
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.decode_step import DecodeStep, places_of_layers, refreshed_plans
from mha2mla.modeling.forms import MAX_DECODE_QUERY_LENGTH, is_absorbed
from mha2mla.modeling.visibility import REFUSED_MASK, host_may_look, is_padding_mask, visible_tokens


@dataclass(frozen=True)
class LayerKinds:
    """How the layers of a model differ. Layers of one geometry are served alike: a step asks once per geometry.

    Attributes:
        geometries: the different ones.
        of_layer: per layer, the index of its geometry.
        windows: per layer, its sliding window.
    """

    geometries: tuple[MLAGeometry, ...]
    of_layer: tuple[int, ...]
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, attentions: Iterable[MLAAttention]) -> LayerKinds:
        attentions = list(attentions)
        geometries = tuple(dict.fromkeys([each.geometry for each in attentions]))
        of_layer = tuple([geometries.index(each.geometry) for each in attentions])
        return cls(geometries, of_layer, tuple([each.sliding_window for each in attentions]))

    def absorbed(self, config: MHA2MLAConfig, cache: LatentCache, query_length: int) -> tuple[bool, ...]:
        """Per layer, whether the absorbed form serves ``query_length`` more tokens over what the cache holds."""
        if cache.is_empty:
            # There is nothing to attend over but the new tokens: expanding them is cheaper.
            return (False,) * len(cache.layers)
        kinds = [(index, layer.dtype, layer.device) for index, layer in zip(self.of_layer, cache.layers, strict=True)]
        answers = {}
        for index, dtype, device in dict.fromkeys(kinds):
            geometry = self.geometries[index]
            answers[index, dtype, device] = is_absorbed(
                geometry.num_attention_heads,
                geometry.num_rope_heads,
                geometry.kv_lora_rank,
                geometry.qk_rope_head_dim,
                mla_form=config.mla_form,
                decode_backend=config.decode_backend,
                attn_implementation=config._attn_implementation,
                query_length=query_length,
                page_size=cache.page_size,
                dtype=dtype,
                device=device,
            )
        return tuple([answers[kind] for kind in kinds])


def choose_step(
    config: MHA2MLAConfig,
    kinds: LayerKinds,
    attentions: Sequence[MLAAttention],
    cache: Cache | None,
    attention_mask: Any,
    position_ids: Tensor | None,
    batch: int,
    query_length: int,
    output_attentions: bool,
) -> DecodeStep | None:
    """What the layers share while they append these new tokens to a LatentCache; None: they append them one by one, and
    keep gradients.

    Depends on shapes and on what the host knows of the cache, and on the mask's values where the host may look at them
    (``visibility.py``).

    Raises:
        ValueError: ``config.mla_form`` is "absorbed", and the call cannot be served so.
    """
    forced = config.mla_form == "absorbed" and query_length <= MAX_DECODE_QUERY_LENGTH
    if not isinstance(cache, LatentCache):
        if forced and cache is not None:
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; expected a LatentCache, since mla_form is 'absorbed'"
            )
        return None
    absorbed = kinds.absorbed(config, cache, query_length)
    visible, can_absorb = None, attention_mask is None
    if is_padding_mask(attention_mask):
        can_absorb, look = cache.padding_is_left, host_may_look(attention_mask, query_length)
        if look or (any(absorbed) and can_absorb):
            visible = visible_tokens(attention_mask, cache.get_seq_length() + query_length)
        if look:
            can_absorb, cache.padding_is_left = torch.stack(visible[1:]).tolist()
        elif any(absorbed) and can_absorb and not output_attentions:
            torch._assert_async(visible.side_by_side, REFUSED_MASK)
    if any(absorbed) and (output_attentions or not can_absorb):
        if forced:
            refused = "output_attentions is True; expected False" if can_absorb else REFUSED_MASK
            raise ValueError(f"{refused}, since mla_form is 'absorbed'")
        absorbed = (False,) * len(absorbed)
    if cache.is_empty and torch.is_grad_enabled():
        return None
    # A plan is for pages that do not grow under it.
    if not _open(attentions, cache, batch, query_length):
        return None
    places = places_of_layers(cache, position_ids)
    plans: tuple[DecodePlan | None, ...] = (None,) * len(absorbed)
    starts = None
    if any(absorbed):
        starts = None if visible is None else visible.starts
        plans = refreshed_plans(
            cache,
            absorbed,
            kinds.windows,
            config.num_attention_heads,
            query_length,
            config.decode_backend,
            places,
            starts,
        )
    return DecodeStep(plans, starts, places)


def _open(attentions: Sequence[nn.Module], cache: LatentCache, batch: int, query_length: int) -> bool:
    """Makes room in all layers; False where an empty cache cannot know where its layers will run (offloading)."""
    kinds = []
    for layer, attention in zip(cache.layers, attentions, strict=True):
        weight = attention.v_b_proj
        if layer.is_initialized:
            kinds.append((layer.dtype, layer.device))
        elif weight.device.type == "meta":
            return False
        else:
            autocast = torch.is_autocast_enabled(weight.device.type)
            dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
            kinds.append((dtype, weight.device))
    cache.open(batch, query_length, kinds)
    return True
