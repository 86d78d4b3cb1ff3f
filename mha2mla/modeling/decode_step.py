"""What a step over a LatentCache works out once for all of its layers: plans of the decode op, places of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha2mla.kernels import DecodePlan
from mha2mla.kernels.mla_decode.plan import empty_plan
from mha2mla.modeling.cache import LatentCache
from mha2mla.modeling.latent_layer import Places


@dataclass(frozen=True)
class DecodeStep:
    """What a forward pass over a LatentCache decided once for all of its layers.

    Attributes:
        plans: per layer, the plan of its call of the decode op; None: the layer runs the expanded form.
        cache_starts: [B] int32, the first token that is not padding; None means 0.
        places: per layer, where its new tokens go.
    """

    plans: tuple[DecodePlan | None, ...]
    cache_starts: Tensor | None
    places: tuple[Places, ...]


@dataclass(frozen=True)
class LayerPlans:
    """Plans for the layers of a model and one number of new tokens. Layers that can share one do.

    Attributes:
        of_layer: per layer; None where the layer runs the expanded form.
        schedules: layer indices; refreshing the plans of these layers refreshes all.
    """

    of_layer: tuple[DecodePlan | None, ...]
    schedules: tuple[int, ...]

    def refresh(self, places: Sequence[Places], cache_starts: Tensor | None) -> None:
        """Plans for the lengths that the cache will have once it holds the new tokens. On the device."""
        for index in self.schedules:
            seqlens = places[index].cache_seqlens
            self.of_layer[index].refresh(seqlens, None if cache_starts is None else cache_starts.to(seqlens.device))


def refreshed_plans(
    cache: LatentCache,
    absorbed: tuple[bool, ...],
    windows: Sequence[int | None],
    num_attention_heads: int,
    query_length: int,
    backend: str | None,
    places: Sequence[Places],
    cache_starts: Tensor | None,
) -> tuple[DecodePlan | None, ...]:
    """Plans for a step that will append ``query_length`` tokens per sequence; call before any layer appends them.

    The cache keeps the buffers from step to step, so that a captured CUDA graph finds them where they were. Inside
    ``torch.compile`` they are temporaries of the compiled step instead, which places (and captures) them itself.

    Args:
        cache: holds tokens, and has room for the new ones.
        absorbed: per layer, whether it runs the absorbed form.
        windows: per layer, its sliding window.
        num_attention_heads: H.
        query_length: S_q.
        backend: of :func:`mha2mla.kernels.mla_decode`.
        places: per layer, of :func:`places_of_layers`.
        cache_starts: [B] int32 or None.

    Returns:
        Per layer a plan, or None where the layer runs the expanded form.
    """
    if torch.compiler.is_compiling():
        plans = _allocate(cache, absorbed, windows, num_attention_heads, query_length, backend)
    else:
        first = cache.layers[0]
        pages = (first.batch_size, first.capacity, first.dtype, first.device)
        key = (query_length, backend, absorbed)
        if cache.plans_for != pages:
            # The pages have moved, so no CUDA graph that was captured over them is of use any more.
            cache.plans_for, cache.plans = pages, {}
        if key not in cache.plans:
            # Not inference tensors, which could not be refreshed outside inference_mode.
            with torch.inference_mode(False):
                cache.plans[key] = _allocate(cache, absorbed, windows, num_attention_heads, query_length, backend)
        plans = cache.plans[key]
    plans.refresh(places, cache_starts)
    return plans.of_layer


def _allocate(
    cache: LatentCache,
    absorbed: tuple[bool, ...],
    windows: Sequence[int | None],
    num_attention_heads: int,
    query_length: int,
    backend: str | None,
) -> LayerPlans:
    """Plans that are not filled yet: one per geometry, a schedule per window, and one workspace per device."""
    plan_of_kind: dict = {}
    layer_of_schedule: dict = {}
    kinds = []
    for index, (layer, window) in enumerate(zip(cache.layers, windows, strict=True)):
        geometry = layer.geometry
        kind = (geometry.num_rope_heads, geometry.kv_lora_rank, geometry.qk_rope_head_dim, window, layer.device)
        kinds.append(kind if absorbed[index] else None)
        if kinds[index] is None or kind in plan_of_kind:
            continue
        plan = empty_plan(
            layer.latent_cache.new_empty(layer.batch_size, query_length, num_attention_heads, geometry.kv_lora_rank),
            layer.rope_cache,
            layer.block_table,
            geometry.qk_rope_head_dim,
            True,
            window,
            0,
            backend or "auto",
        )
        # A schedule says which tokens go to which CTA: layers of other widths share it if they launch as many CTAs.
        same_schedule = (plan.num_ctas, window, layer.device)
        if same_schedule in layer_of_schedule:
            shared = plan_of_kind[kinds[layer_of_schedule[same_schedule]]]
            plan = replace(plan, schedule=shared.schedule, splits=shared.splits)
        else:
            layer_of_schedule[same_schedule] = index
        plan_of_kind[kind] = plan
    if len(plan_of_kind) > 1 and not torch.compiler.is_compiling():
        plan_of_kind = dict(zip(plan_of_kind, _with_one_workspace(list(plan_of_kind.values())), strict=True))
    of_layer = tuple([None if kind is None else plan_of_kind[kind] for kind in kinds])
    return LayerPlans(of_layer, tuple(layer_of_schedule.values()))


def _with_one_workspace(plans: list[DecodePlan]) -> list[DecodePlan]:
    """The plans over the largest workspace among those of a device: layers use it one after another.

    A model whose layers all differ in rank would otherwise hold as many workspaces, tens of MB each.
    """
    for name in ("partial_out", "partial_lse"):
        largest: dict[torch.device, Tensor] = {}
        for plan in plans:
            mine = getattr(plan, name)
            if mine.numel() > largest.get(mine.device, mine.new_empty(0)).numel():
                largest[mine.device] = mine
        plans = [_over(plan, name, largest) for plan in plans]
    return plans


def _over(plan: DecodePlan, name: str, largest: dict[torch.device, Tensor]) -> DecodePlan:
    mine = getattr(plan, name)
    if mine.numel() == 0:
        return plan
    return replace(plan, **{name: largest[mine.device].flatten()[: mine.numel()].view(mine.shape)})


def places_of_layers(cache: LatentCache, position_ids: Tensor) -> tuple[Places, ...]:
    """Where every layer puts the new tokens: one object per device, since all layers cache the same tokens.

    Args:
        cache: with room for them.
        position_ids: [B or 1, S].
    """
    on_device: dict[torch.device, Places] = {}
    for layer in cache.layers:
        if layer.device not in on_device:
            on_device[layer.device] = layer.places(position_ids)
    return tuple([on_device[layer.device] for layer in cache.layers])
