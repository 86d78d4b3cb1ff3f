"""A rank for every layer: where a smaller latent hurts the source's predictions least, the cache is taken from.

Layers differ in what a number of cache is worth. Each is converted alone, at a few ranks, in an otherwise untouched
source, and the divergence of the predictions is what that rank loses there; the budget goes where it saves most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from mha2mla.conversion.calibration.activations import ActivationStore
from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.fit.reconstruction import ReconstructionProblem
from mha2mla.conversion.fit.repeatable import tf32_on_cuda
from mha2mla.conversion.layer_walk import LayerWalk, block_forward, computed, token_weights
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.conversion.target import GRANULE, fast_rank
from mha2mla.geometry import MLAGeometry
from mha2mla.predictions import kl_divergence
from mha2mla.terminal import Span, progress_bar

# Shares of the uniform rank at which layers are measured. No layer gets less than the first: below it a loss can
# rise far faster than between two (layer 0 of Qwen2.5-0.5B, rank 80 to 32: 11 times; from 80 and 128 one expects 1.8).
FACTORS = (0.25, 0.6, 1.0, 1.5)
MOST = 2.0  # most that a layer may get, over the uniform rank
STEPS = 100  # gradient steps of a measurement; closed forms alone flatter the layers that gradients help least
_STEP_TOKENS = 2048  # most that such a step takes, but for a whole block
_FITTED_TOKENS = 98304
_JUDGED_TOKENS = 24576
_BATCH_TOKENS = 16384
_PREDICTED_TOKENS = 512  # at a time: each has a probability for every token of the vocabulary


def choose_layer_ranks(
    walk: LayerWalk, *, progress: bool | Span = False
) -> tuple[list[int], dict[str, list[float | None]]]:
    """A rank for every layer, and rank → what it loses in each.

    The ranks of all layers add up to what the uniform rank of ``walk`` gives, at most. A loss is the Kullback-Leibler
    divergence of the source's next-token predictions from those of the source with one layer converted (nats per token,
    on held-out calibration windows). Between and above the measured ranks its logarithm is taken as linear; the budget
    is handed out in steps to whichever layer saves most (the optimum where losses are convex, and add up). A layer with
    a loss that is not finite (None in what is returned) gets the uniform rank.
    """
    geometry = walk.geometries[0]
    step = geometry.latent_group if geometry.has_codes else rank_step(geometry.kv_lora_rank)
    uniform, full = geometry.kv_lora_rank, geometry.full_kv_lora_rank
    ranks = sorted({min(full, max(step, round(factor * uniform / step) * step)) for factor in FACTORS})
    fitted, judged = walk.windows.divided(_FITTED_TOKENS, _JUDGED_TOKENS)
    geometries = [replace(geometry, kv_lora_rank=rank) for rank in ranks]
    losses = measure_losses(replace(walk, windows=fitted), geometries, judged, progress=progress)
    finite = [all(map(math.isfinite, layer)) for layer in losses]
    by_rank = [dict(zip(ranks, layer, strict=True)) for layer in losses]
    allocated = allocate(
        list(itertools.compress(by_rank, finite)), uniform * sum(finite), step=step, most=most_rank(geometry, step)
    )
    shares = iter(allocated)
    chosen = [next(shares) if is_finite else uniform for is_finite in finite]
    shown = {str(rank): [layer[rank] if math.isfinite(layer[rank]) else None for layer in by_rank] for rank in ranks}
    return chosen, shown


def rank_step(kv_lora_rank: int) -> int:
    """By what ranks differ: few steps make few geometries, and each is a compilation of the decode kernel."""
    return next((step for step in (64, 32, 16) if kv_lora_rank >= 5 * step), GRANULE)


def most_rank(geometry: MLAGeometry, step: int) -> int:
    """Largest rank of a layer: where the uniform rank has a fast decode kernel, no layer gets one without."""
    most = min(geometry.full_kv_lora_rank, math.floor(MOST * geometry.kv_lora_rank / step) * step)
    fast = fast_rank(geometry)
    return min(most, fast) if geometry.kv_lora_rank <= fast else most


def measure_losses(
    walk: LayerWalk, geometries: Sequence[MLAGeometry], judged: TokenBlocks, *, progress: bool | Span = False
) -> list[list[float]]:
    """Per layer, the divergence of the predictions on ``judged`` when that layer alone is converted to each of
    ``geometries``, on the windows of ``walk``; these differ in rank or rotary width, and statistics are what the first
    needs.

    One pass over the source: what each conversion makes of the judged windows follows the source's own layers beside
    the others, so that a layer's weights are read once.
    """
    model, recipe, layers = walk.model, walk.recipe, walk.spec.num_layers
    fit = replace(recipe.fit, steps=min(STEPS, recipe.fit.steps), tokens=min(_STEP_TOKENS, recipe.fit.tokens))
    walks = [replace(walk, geometries=(geometry,) * layers, recipe=replace(recipe, fit=fit)) for geometry in geometries]
    # Streams of judged windows all lie in one place: on disk when they are larger together.
    streams = 1 + layers * len(geometries)
    judging = replace(walk, windows=judged, spill_bytes=walk.spill_bytes // streams)
    fitted, targets = walk.new_stores(2, on_device=True)
    clean, *others = judging.new_stores(streams, on_device=True)
    unused, perturbed = iter(others), []
    try:
        model.embed(fitted)
        model.embed(clean)
        for layer in progress_bar(range(layers), desc="layer ranks", unit="layer", show=progress):
            module = model.layer(layer)
            with tf32_on_cuda(model.device):  # like the walk's own streams
                for store in perturbed:
                    model.run_layer(module, layer, store, tokens=_BATCH_TOKENS)
            _pass(lambda hidden: hidden, fitted, targets, model.device)
            collector = walks[0].collector(layer)
            model.run_layer(module, layer, targets, tokens=_BATCH_TOKENS, observe=collector.add)
            statistics, prepared, window = collector.finish(), {}, walk.first_window(fitted)
            weights = None
            if fit.steps:
                weights = token_weights(targets, _BATCH_TOKENS, model.device)
            for converting in walks:
                width = converting.geometries[layer].qk_rope_head_dim
                tensors, _ = converting.convert(
                    layer,
                    statistics,
                    runs=partial(converting.runs, layer, module, window),
                    prepared=prepared.setdefault(width, {}),
                )
                forward = block_forward(converting, layer, module)
                if weights is not None and not converting.geometries[layer].is_full_rank:
                    problem = ReconstructionProblem(fitted, targets, weights, forward, model.device)
                    found, _ = converting.reconstruct(layer, problem, tensors, fit)
                    tensors = tensors if found is None else found.tensors
                perturbed.append(next(unused))
                with tf32_on_cuda(model.device):
                    _pass(partial(forward, computed(tensors, model)), clean, perturbed[-1], model.device)
            with tf32_on_cuda(model.device):
                model.run_layer(module, layer, clean, tokens=_BATCH_TOKENS)
            fitted, targets = targets, fitted
            model.source.release()
        with tf32_on_cuda(model.device):
            divergences = _divergences(model, clean, perturbed)
    finally:
        for store in (fitted, targets, clean, *others):
            store.close()
    count = len(geometries)
    return [divergences[first : first + count] for first in range(0, len(divergences), count)]


def allocate(losses: Sequence[Mapping[int, float]], budget: int, *, step: int, most: int) -> list[int]:
    """Ranks that add up to ``budget`` at most: every step of rank goes to the layer where it saves most.

    Args:
        losses: per layer, rank → loss; at least one rank each. No layer gets less than its smallest.
        budget: sum of the ranks; at least the sum of the smallest.
        step: ranks are a layer's smallest plus a multiple of it.
        most: rank of a layer.
    """
    ranks = [min(layer) for layer in losses]
    current = [loss_at(layer, rank) for layer, rank in zip(losses, ranks, strict=True)]
    following = [loss_at(layer, rank + step) for layer, rank in zip(losses, ranks, strict=True)]
    while sum(ranks) + step <= budget:
        open_layers = [layer for layer, rank in enumerate(ranks) if rank + step <= most]
        if not open_layers:
            break
        best = max(open_layers, key=lambda layer: current[layer] - following[layer])
        ranks[best] += step
        current[best], following[best] = following[best], loss_at(losses[best], ranks[best] + step)
    return ranks


def loss_at(losses: Mapping[int, float], rank: int) -> float:
    """A layer's loss at any rank: log-linear between and above the measured ones, and never rising with the rank."""
    known = sorted(losses)
    logs = [math.log(max(losses[each], 1e-12)) for each in known]
    logs = [min(logs[: index + 1]) for index in range(len(logs))]
    if len(known) == 1:
        return math.exp(logs[0]) * known[0] / max(rank, 1)
    right = next((index for index in range(1, len(known)) if rank <= known[index]), len(known) - 1)
    slope = (logs[right] - logs[right - 1]) / (known[right] - known[right - 1])
    return math.exp(logs[right] + slope * (rank - known[right]))


@torch.inference_mode()
def _pass(
    change: Callable[[torch.Tensor], torch.Tensor],
    inputs: ActivationStore,
    outputs: ActivationStore,
    device: torch.device,
) -> None:
    """Writes ``change`` of the inputs to ``outputs``."""
    for part in inputs.blocks.batches(_BATCH_TOKENS):
        outputs.write(part, change(inputs.read(part, device)))


@torch.inference_mode()
def _divergences(model: StreamedModel, clean: ActivationStore, perturbed: Sequence[ActivationStore]) -> list[float]:
    """KL(source ‖ perturbed) in nats per token, for every stream of last hidden states."""
    norm, head = model.final_norm(), model.head_rows(0, model.vocab_size)

    def predictions(hidden: torch.Tensor) -> torch.Tensor:
        return (norm(hidden) @ head.T).float().log_softmax(-1)

    totals = torch.zeros(len(perturbed), dtype=torch.float64, device=model.device)
    parts = range(0, clean.blocks.size, _PREDICTED_TOKENS)
    for block, start in itertools.product(range(len(clean)), parts):
        here = block, slice(start, start + _PREDICTED_TOKENS), model.device
        expected = predictions(clean.tokens(*here))
        for index, store in enumerate(perturbed):
            totals[index] += kl_divergence(expected, predictions(store.tokens(*here))).sum(dtype=torch.float64)
    return (totals / clean.blocks.tokens.numel()).tolist()
