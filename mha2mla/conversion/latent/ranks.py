"""A rank for every layer, and bits: where a smaller latent hurts the source's predictions least, the cache is taken.

Layers differ in what a byte of cache is worth. Each is converted alone in an otherwise untouched source, and the
divergence of the predictions is what its rank loses there. It is measured at one rank; at a few others it is in
proportion to the error of the layer's own output, which is measured. Where bits are chosen too, codes add a loss
that is measured of the whole conversion at one rank (``latent.codes``), and is taken to be the same at every rank. One
knapsack spends the budget.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from mha2mla.conversion.calibration.blocks import ActivationStore, TokenBlocks
from mha2mla.conversion.calibration.statistics import PAIRS
from mha2mla.conversion.fit.reconstruction import ReconstructionProblem
from mha2mla.conversion.fit.repeatable import tf32_on_cuda
from mha2mla.conversion.latent.codes import losses_of_codes
from mha2mla.conversion.layer_walk import FIRST_SAMPLE_TOKENS, LayerWalk, block_forward, computed, token_weights
from mha2mla.conversion.predictions import kl_divergence
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.conversion.target import GRANULE, fast_rank
from mha2mla.geometry import CODE_BLOCK, LATENT_BITS, MLAGeometry, coded_width
from mha2mla.terminal import Span, progress_bar, split

# Shares of the uniform rank at which layers are measured. No layer gets less than the first: below it a loss can
# rise far faster than between two (layer 0 of Qwen2.5-0.5B, rank 80 to 32: 11 times; from 80 and 128 one expects 1.8).
FACTORS = (0.25, 0.6, 1.0, 1.5)
WIDEST_MEAN = 0.6  # of the full rank: what the uniform rank counts as at most, where bits are chosen too
MOST = 2.0  # most that a layer may get, over the uniform rank
# Gradient steps of a measurement, and their share of a conversion's: closed forms alone flatter the layers that
# gradients help least.
_STEPS, _STEPS_SHARE = 100, 1 / 20
_STEP_TOKENS = 2048  # most that such a step takes, but for a whole block
_FITTED_TOKENS = 98304
# Most tokens to judge by, and their share of the calibration text: each passes all layers behind the one that is
# converted.
_JUDGED_TOKENS, _JUDGED_SHARE = 24576, 1 / 12
_EXACT = 1e-6  # relative squared error of an output: below it a layer's loss may be rounding
_PAIRS = PAIRS // 4  # that the fits of a layer look at, at every rank
_BATCH_TOKENS = 16384
_PREDICTED_TOKENS = 512  # at a time: each has a probability for every token of the vocabulary


Choice = tuple[int, int]  # rank and bits of a layer


def choose_layer_ranks(
    walk: LayerWalk, *, progress: bool | Span = False
) -> tuple[list[Choice], dict[str, dict[str, list[float | None]]]]:
    """Rank and bits of every layer, and the losses they are chosen by: rank → each layer's, bits → each layer's.

    The bytes of all layers add up to the budget at most: what the uniform rank of ``walk`` takes, or where bits are
    ``"auto"`` the recipe's ``cache_ratio``. The loss of a rank is the Kullback-Leibler divergence of the source's
    next-token predictions from those of the source with one layer converted (nats per token, on held-out calibration
    windows), of most ranks by :func:`measure_losses`' proportion; between and above these its logarithm is taken as
    linear. A layer with a loss that is not finite (None in what is returned) gets the uniform rank.
    """
    geometry, is_auto = walk.geometries[0], walk.recipe.latent.bits == "auto"
    budget, mean, bits = geometry.cache_bytes_per_token(2), geometry.kv_lora_rank, [geometry.latent_bits]
    # Few steps make few geometries, and each is a compilation of the decode kernel.
    step = next((step for step in (64, 32, 16) if mean >= 5 * step), GRANULE)
    step = CODE_BLOCK if is_auto or geometry.has_codes else step
    if is_auto:
        bits = sorted(LATENT_BITS)
        budget = math.floor(walk.recipe.target.cache_ratio * 2 * geometry.source_cache_numel_per_token + 1e-9)
        mean, most = reach_of_codes(geometry, budget)
    else:
        step = min(step, mean)  # widths that were given may be less
        most = most_rank(geometry, step, mean)
    ranks = sorted({min(most, max(step, round(factor * mean / step) * step)) for factor in FACTORS})
    fitted, judged = walk.windows.divided(_FITTED_TOKENS, _JUDGED_TOKENS)
    judged = judged.shortened(int(_JUDGED_SHARE * walk.windows.tokens.numel()))
    fitted = fitted.of_lengths(judged.window_lengths)  # others take time and judge nothing
    geometries = [replace(geometry, kv_lora_rank=rank) for rank in ranks]
    keep = (min(geometries, key=lambda each: abs(each.kv_lora_rank - mean)), []) if is_auto else None
    search, coding = split(progress, 3, is_auto)
    losses = measure_losses(replace(walk, windows=fitted), geometries, judged, keep, progress=search)
    codes = losses_of_codes(walk, *keep, coding) if is_auto else [{bits[0]: 0.0}] * len(losses)
    finite = [all(map(math.isfinite, (*layer, *loss.values()))) for layer, loss in zip(losses, codes, strict=True)]
    by_rank = [dict(zip(ranks, layer, strict=True)) for layer in losses]
    open_layers, steps = itertools.compress(zip(by_rank, codes, strict=True), finite), range(ranks[0], most + 1, step)
    layers = [candidates(geometry, steps, *found) for found in open_layers]
    shares = iter(allocate(layers, budget * len(layers)))
    uniform = (geometry.kv_lora_rank, geometry.latent_bits)
    found = {"ranks": by_rank, "bits": codes} if is_auto else {"ranks": by_rank}
    shown = {name: {str(each): [_finite(loss[each]) for loss in by] for each in by[0]} for name, by in found.items()}
    return [next(shares) if is_finite else uniform for is_finite in finite], shown


def candidates(
    geometry: MLAGeometry, ranks: Iterable[int], losses: Mapping[int, float], codes: Mapping[int, float]
) -> dict[Choice, tuple[int, float]]:
    """Rank and bits of a layer → bytes of a token, and loss.

    Args:
        losses, codes: the layer's: of measured ranks, and what bits add.
    """
    return {
        (rank, bits): (
            replace(geometry, kv_lora_rank=rank, latent_bits=bits).cache_bytes_per_token(2),
            loss_at(losses, rank) + added,
        )
        for rank in ranks
        for bits, added in codes.items()
    }


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def reach_of_codes(geometry: MLAGeometry, budget: int) -> tuple[int, int]:
    """Center of the measured ranks, and a layer's largest, where rank and bits share ``budget`` bytes a token."""
    # Where the budget is large, measured ranks still differ: a loss at full rank alone says nothing of a smaller one.
    widest = max(CODE_BLOCK, math.floor(WIDEST_MEAN * geometry.full_kv_lora_rank / CODE_BLOCK) * CODE_BLOCK)
    narrowest = min(LATENT_BITS)  # which hold the widest latent
    mean = min(coded_width(budget, narrowest), widest)
    return mean, most_rank(replace(geometry, latent_bits=narrowest), CODE_BLOCK, mean)


def most_rank(geometry: MLAGeometry, step: int, mean: int) -> int:
    """Largest rank of a layer, for a ``mean`` one: where ``geometry`` has a fast decode kernel, no layer gets a rank
    without."""
    most, fast = geometry.full_kv_lora_rank, fast_rank(geometry)
    most = min(most, fast) if geometry.kv_lora_rank <= fast else most
    return min(most, math.floor(MOST * mean / step) * step)


def measure_losses(
    walk: LayerWalk,
    geometries: Sequence[MLAGeometry],
    judged: TokenBlocks,
    keep: tuple[MLAGeometry, list[dict[str, torch.Tensor]]] | None = None,
    *,
    progress: bool | Span = False,
) -> list[list[float]]:
    """Per layer, the divergence of the predictions on ``judged`` when that layer alone is converted to each of
    ``geometries``, on the windows of ``walk``; these differ in rank or rotary width, and statistics are what the first
    needs.

    The divergence is measured at one geometry, the middle one, or a smaller one where that is exact. At the others it
    is in proportion to the squared error of the layer's output, of every token relative to the output, which mostly
    gives a fifth more or less than the divergence itself (docs/notes/rank-and-bits.md).

    Args:
        keep: one of ``geometries``, and a list that gets the tensors of each layer at it, float32 on the CPU.

    One pass over the source: what each conversion makes of the judged windows follows the source's own layers beside
    the others, so that a layer's weights are read once.
    """
    model, recipe, layers = walk.model, walk.recipe, walk.spec.num_layers
    middle = (len(geometries) - 1) // 2
    steps = min(_STEPS, math.ceil(_STEPS_SHARE * recipe.fit.steps))
    fit = replace(recipe.fit, steps=steps, tokens=min(_STEP_TOKENS, recipe.fit.tokens))
    walks = [replace(walk, geometries=(geometry,) * layers, recipe=replace(recipe, fit=fit)) for geometry in geometries]
    # Streams of judged windows all lie in one place: on disk when they are larger together.
    streams = 3 + layers
    walking, comparing = split(progress, 4, 1)
    judging = replace(walk, windows=judged, spill_bytes=walk.spill_bytes // streams)
    errors: list[tuple[list[float], int]] = []  # of each layer at every geometry, and which is measured
    with walk.stores(2) as (fitted, targets), judging.stores(streams) as (clean, ahead, spare, *perturbed):
        model.embed(fitted)
        model.embed(clean)
        for layer in progress_bar(range(layers), desc="layer ranks", unit="layer", show=walking):
            module = model.layer(layer)
            with tf32_on_cuda(model.device):  # like the walk's own streams
                for store in perturbed[:layer]:
                    model.run_layer(module, layer, store, tokens=_BATCH_TOKENS)
            _pass(lambda hidden: hidden, fitted, targets, model.device)
            collector = walks[0].collector(layer, FIRST_SAMPLE_TOKENS, _PAIRS)
            model.run_layer(module, layer, targets, tokens=_BATCH_TOKENS, observe=collector.add)
            statistics, prepared, window = collector.finish(), {}, walk.first_window(fitted)
            weights = token_weights(targets, _BATCH_TOKENS, model.device) if fit.steps else None
            with tf32_on_cuda(model.device):
                _pass(lambda hidden: hidden, clean, ahead, model.device)
                model.run_layer(module, layer, ahead, tokens=_BATCH_TOKENS)
            found_errors, measured = [], 0
            for index, converting in enumerate(walks):
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
                if keep is not None and converting.geometries[layer] == keep[0]:
                    keep[1].append({name: tensor.detach().to("cpu", torch.float32) for name, tensor in tensors.items()})
                made = spare if index <= middle else None
                with tf32_on_cuda(model.device):
                    change = partial(forward, computed(tensors, model))
                    found_errors.append(_relative_error(change, clean, ahead, made, model.device))
                if index == 0 or (index <= middle and found_errors[-1] > _EXACT):
                    spare, perturbed[layer], measured = perturbed[layer], spare, index
            errors.append((found_errors, measured))
            clean, ahead = ahead, clean
            fitted, targets = targets, fitted
            model.source.release()
        with tf32_on_cuda(model.device):
            divergences = _divergences(model, clean, perturbed, comparing)
    return [
        [divergence * (error / found[index] if found[index] else 1.0) for error in found]
        for divergence, (found, index) in zip(divergences, errors, strict=True)
    ]


def allocate(layers: Sequence[Mapping[Choice, tuple[int, float]]], budget: int) -> list[Choice]:
    """A choice for each layer: of those whose bytes add up to ``budget`` at most, the least sum of losses.

    Args:
        layers: choice → bytes and loss.
        budget: at least the sum of the fewest bytes.
    """
    unit = math.gcd(*(size for layer in layers for size, _ in layer.values())) or 1
    best = torch.zeros(budget // unit + 1, dtype=torch.float64)  # least loss of so many units at most
    taken = []
    for layer in layers:
        sums = torch.full((len(layer), len(best)), math.inf, dtype=torch.float64)
        for row, (size, loss) in zip(sums, layer.values(), strict=True):
            row[size // unit :] = best[: max(0, len(best) - size // unit)] + loss
        best, which = sums.min(0)
        taken.append(which)
    chosen, left = [], len(best) - 1
    for layer, which in zip(reversed(layers), reversed(taken), strict=True):
        chosen.append(list(layer)[int(which[left])])
        left -= layer[chosen[-1]][0] // unit
    return chosen[::-1]


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
    for part in inputs.blocks.batches(_BATCH_TOKENS):
        outputs.write(part, change(inputs.read(part, device)))


@torch.inference_mode()
def _relative_error(
    change: Callable[[torch.Tensor], torch.Tensor],
    inputs: ActivationStore,
    expected: ActivationStore,
    kept: ActivationStore | None,
    device: torch.device,
) -> float:
    """Squared error of what ``change`` makes of ``inputs``, of every token relative to what is ``expected``: the mean.

    Args:
        kept: gets what it makes.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in inputs.blocks.batches(_BATCH_TOKENS):
        made, wanted = change(inputs.read(part, device)), expected.read(part, device)
        error, energy = (each.float().square().sum(-1) for each in (made - wanted, wanted))
        floor = 1e-6 * energy.mean()  # of a token whose output is next to nothing
        total += torch.where(error > 0, error / (energy + floor), error).sum(dtype=torch.float64)
        if kept is not None:
            kept.write(part, made)
    return float(total) / inputs.blocks.tokens.numel()


@torch.inference_mode()
def _divergences(
    model: StreamedModel, clean: ActivationStore, perturbed: Sequence[ActivationStore], progress: bool | Span
) -> list[float]:
    """KL(source ‖ perturbed) in nats per token, for every stream of last hidden states."""
    to_logits = model.to_logits()
    totals = torch.zeros(len(perturbed), dtype=torch.float64, device=model.device)
    parts = list(itertools.product(range(len(clean)), range(0, clean.blocks.size, _PREDICTED_TOKENS)))
    for block, start in progress_bar(parts, desc="layer ranks compared", unit="part", show=progress):
        here = block, slice(start, start + _PREDICTED_TOKENS), model.device
        expected = to_logits(clean.tokens(*here)).log_softmax(-1)
        for index, store in enumerate(perturbed):
            found = to_logits(store.tokens(*here)).log_softmax(-1)
            totals[index] += kl_divergence(expected, found).sum(dtype=torch.float64)
    return (totals / clean.blocks.tokens.numel()).tolist()
