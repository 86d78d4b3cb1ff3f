"""The split of a cache budget between rotary key and latent, chosen by what it loses on held-out calibration text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.func import functional_call

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.families import SourceSpec
from mha2mla.conversion.layer_walk import LayerWalk, computed
from mha2mla.conversion.recipe import Recipe
from mha2mla.geometry import MLAGeometry

SHARES = (0.08, 0.125, 0.17, 0.21, 0.25, 0.29, 0.34, 0.42, 0.5)
_LAYERS = 6  # spread over the depth
_FITTED_TOKENS, _JUDGED_TOKENS = 6144, 2048  # of the calibration text, or whole blocks
_BATCH_TOKENS = 2048


def choose_rope_share(walk: LayerWalk) -> tuple[float, dict[str, float]]:
    """The rotary share that loses least, and what every split "qk_rope_head_dim+kv_lora_rank" loses.

    A few layers are converted by the recipe of ``walk``, without gradient steps, at every share of :data:`SHARES` that
    gives another geometry. What a share loses is the relative squared error of the attention's output on held-out
    windows of the source's inputs, mean over those layers. One pass over a part of the calibration text; the result
    depends on the walk and the machine only.

    Raises:
        ValueError: no share gives a geometry that fits the source.
    """
    recipe, spec = walk.recipe, walk.spec
    recipes = candidates(recipe, spec)
    if not recipes:
        recipe.with_share(0.25).geometry(spec)  # says why
        raise ValueError(f"rope.share is 'auto', but no share fits cache_ratio={recipe.target.cache_ratio}")
    losses = dict.fromkeys(recipes, 0.0)
    for layer, inputs, held in _inputs(walk, walk.windows.divided(_FITTED_TOKENS, _JUDGED_TOKENS)):
        statistics = None
        for geometry, candidate in recipes.items():
            converting = replace(walk, geometries=(geometry,) * spec.num_layers, recipe=candidate)
            if statistics is None:  # which ones are needed does not depend on the split
                collector = converting.collector(layer)
                for batch in inputs:
                    collector.add(batch)
                statistics = collector.finish()
            losses[geometry] += _loss(converting, layer, converting.convert(layer, statistics), held)
    count = len(_chosen_layers(spec.num_layers))
    best = min(losses, key=losses.__getitem__)
    found = {f"{geometry.qk_rope_head_dim}+{geometry.kv_lora_rank}": loss / count for geometry, loss in losses.items()}
    return recipes[best].rope.share, found


def candidates(recipe: Recipe, spec: SourceSpec) -> dict[MLAGeometry, Recipe]:
    """Geometry → recipe without gradient steps, for the shares that fit the source; the smallest of equal ones."""
    found: dict[MLAGeometry, Recipe] = {}
    for share in SHARES:
        candidate = replace(recipe.with_share(share), fit=replace(recipe.fit, steps=0))
        try:
            geometry = candidate.geometry(spec)
        except ValueError:
            continue
        found.setdefault(geometry, candidate)
    return found


def _chosen_layers(num_layers: int) -> list[int]:
    count = min(_LAYERS, num_layers)
    return [(2 * index + 1) * num_layers // (2 * count) for index in range(count)]


def _inputs(
    walk: LayerWalk, parts: Sequence[TokenBlocks]
) -> Iterator[tuple[int, list[torch.Tensor], list[torch.Tensor]]]:
    """Layer, and batches of what its attention is given in each of two ``parts`` of the text, for the chosen layers."""
    model, layers = walk.model, _chosen_layers(walk.spec.num_layers)
    stores = [store for part in parts for store in replace(walk, windows=part).new_stores(1)]
    try:
        for store in stores:
            model.embed(store)
        for layer in range(layers[-1] + 1):
            module, seen = model.layer(layer), ([], [])
            for store, batches in zip(stores, seen, strict=True):
                observe = batches.append if layer in layers else None
                model.run_layer(module, layer, store, tokens=_BATCH_TOKENS, observe=observe)
            if layer in layers:
                yield layer, *seen
            model.source.release()
    finally:
        for store in stores:
            store.close()


@torch.inference_mode()
def _loss(walk: LayerWalk, layer: int, tensors: dict[str, torch.Tensor], held: list[torch.Tensor]) -> float:
    """Relative squared error of one converted attention on batches ``held`` of windows [n, length, hidden]."""
    model = walk.model
    source, converted = model.layer(layer).self_attn, walk.empty_attention(layer)
    named = computed(tensors, model)
    error = energy = 0.0
    for window in (window[None] for batch in held for window in batch):
        arguments = model.layer_arguments(layer, window)
        expected = source(window, **arguments)[0]
        found = functional_call(converted, named, (window,), arguments)[0]
        error += float((found.float() - expected.float()).square().sum(dtype=torch.float64))
        energy += float(expected.float().square().sum(dtype=torch.float64))
    return error / energy
