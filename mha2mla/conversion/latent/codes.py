"""Bases that a conversion's latents are quantised in, and what codes in them lose: one layer's weights at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from mha2mla.conversion.calibration.blocks import ActivationStore, TokenBlocks
from mha2mla.conversion.latent.basis import FIRST_TOKENS, GradientTap, LatentBasis, LatentStatistics, statistics_of
from mha2mla.conversion.layer_walk import BATCH_TOKENS, LayerWalk, block_forward, computed
from mha2mla.conversion.predictions import kl_divergence
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.geometry import LATENT_BITS, MLAGeometry
from mha2mla.modeling.cache_layout import quantizer_of
from mha2mla.terminal import Span, progress_bar

LENGTH, TOKENS = 1024, 8192  # most of a calibration window, and of all, that is read
_JUDGED_TOKENS = 4096  # the part of them that predictions over codes are compared on
_CODES = tuple(bits for bits in LATENT_BITS if bits < 16)
LayerTensors = Callable[[int], Mapping[str, Tensor]]


def in_quantised_basis(walk: LayerWalk, layers: LayerTensors, progress: bool | Span = False) -> LayerTensors:
    """Layer → its tensors: those of ``layers``, in the recipe's basis where latents are cached as codes."""
    coded = [index for index, each in enumerate(walk.geometries) if each.has_codes]
    if not coded:
        return layers
    statistics, rule = streamed_statistics(walk, layers, progress=progress), walk.recipe.basis_rule
    bases = {index: rule.basis(statistics[index]) for index in coded}
    return lambda index: bases[index].fold(layers(index)) if index in bases else layers(index)


def losses_of_codes(
    walk: LayerWalk, geometry: MLAGeometry, layers: Sequence[Mapping[str, Tensor]], progress: bool | Span = False
) -> list[dict[int, float]]:
    """Loss that codes of each layer's latent add, by bits, in nats per token (16 bits: 0).

    The divergence of the converted model's predictions over codes from its own without, in the recipe's basis and with
    all layers coded, is measured; layers share it by ½ E[δᵀ F δ], with δ the errors of their codes and F the importance
    (:class:`LatentStatistics`).

    Args:
        geometry, layers: of all layers, and the tensors of each.
    """
    walk = replace(walk, geometries=(geometry,) * len(layers))
    statistics, rule = streamed_statistics(walk, layers.__getitem__, progress=progress), walk.recipe.basis_rule
    bases = [rule.basis(each) for each in statistics]
    measured = _divergences(walk, layers, bases)
    errors = [
        {bits: _second_order(each, basis, replace(geometry, latent_bits=bits)) for bits in _CODES}
        for each, basis in zip(statistics, bases, strict=True)
    ]
    # Both are near rounding with 8 bits, and zero for a constant latent.
    shares = {bits: max(measured[bits], 0.0) / (sum(each[bits] for each in errors) or 1.0) for bits in _CODES}
    return [{16: 0.0, **{bits: shares[bits] * each[bits] for bits in _CODES}} for each in errors]


def _second_order(statistics: LatentStatistics, basis: LatentBasis, geometry: MLAGeometry) -> float:
    """½ E[δᵀ F δ] over calibration tokens, in nats per token."""
    found = basis.decode(quantizer_of(geometry).round(basis.encode(statistics.rows), basis.centers))
    errors = (found - statistics.rows).double()
    return float(((errors @ statistics.importance) * errors).sum()) / (2 * len(errors))


@torch.inference_mode()
def _divergences(
    walk: LayerWalk, layers: Sequence[Mapping[str, Tensor]], bases: Sequence[LatentBasis]
) -> dict[int, float]:
    """Bits → KL(16 bits ‖ codes) in nats per token, of the whole conversion in ``bases``."""
    model, windows = walk.model, _windows(walk.windows)
    windows = TokenBlocks.of(windows.tokens[: max(1, _JUDGED_TOKENS // windows.size)])
    (geometry, *_), widths = walk.geometries, (16, *_CODES)
    walks = {
        bits: replace(walk, windows=windows, geometries=(replace(geometry, latent_bits=bits),) * len(layers))
        for bits in widths
    }
    with ExitStack() as stack:
        streams = {bits: stack.enter_context(each.stores(1))[0] for bits, each in walks.items()}
        for store in streams.values():
            model.embed(store)
        for index in range(len(layers)):
            module = model.layer(index)
            plain, folded = (computed(each, model) for each in (layers[index], bases[index].fold(layers[index])))
            for bits, store in streams.items():
                tensors = plain if bits == 16 else folded
                forward = block_forward(walks[bits], index, module, with_codes=bits < 16)
                for part in windows.batches(BATCH_TOKENS):
                    store.write(part, forward(tensors, store.read(part, model.device)))
            model.source.release()
        to_logits, found = model.to_logits(), dict.fromkeys(_CODES, 0.0)
        for block in range(len(windows)):
            read = slice(block, block + 1), model.device
            expected, *coded = (to_logits(streams[bits].read(*read)).log_softmax(-1) for bits in widths)
            for bits, each in zip(_CODES, coded, strict=True):
                found[bits] += float(kl_divergence(expected, each).sum()) / windows.tokens.numel()
    return found


@torch.inference_mode(False)
def streamed_statistics(
    walk: LayerWalk, layers: LayerTensors, seed: int = 0, *, progress: bool | Span = False
) -> list[LatentStatistics]:
    """:func:`~mha2mla.conversion.latent.basis.latent_statistics` of the conversion of ``walk`` with the tensors of
    ``layers``, on the longest windows up to :data:`LENGTH`.

    Hidden states at all layer boundaries are kept; gradients of the log-likelihood take their place from the last to
    the first. Each layer is read twice.
    """
    model, count = walk.model, walk.spec.num_layers
    walk = replace(walk, windows=_windows(walk.windows), spill_bytes=walk.spill_bytes // (count + 1))
    blocks, has_rope_cache = walk.windows, walk.geometries[0].has_rope_cache
    step = max(1, blocks.tokens.numel() // FIRST_TOKENS)
    starts = replace(walk, windows=TokenBlocks.of(blocks.tokens.flatten()[::step][:, None]))
    first, found = [], []
    with walk.stores(count + 1) as boundaries, starts.stores(1) as (beginning,):
        model.embed(boundaries[0])
        model.embed(beginning)
        with progress_bar(show=progress, total=2 * count, desc="basis of the codes", unit="layer") as bar:
            for index, (inputs, outputs) in enumerate(pairwise(boundaries)):
                module, tensors = model.layer(index), computed(layers(index), model)
                forward, tap = block_forward(walk, index, module), GradientTap(index + 1, has_rope_cache)
                with torch.no_grad():
                    for part in blocks.batches(BATCH_TOKENS):
                        outputs.write(part, forward(tensors, inputs.read(part, model.device)))
                    begun = beginning.read(slice(0, len(beginning)), model.device)
                    begun = block_forward(starts, index, module)(tensors, begun, past_key_values=tap)
                    beginning.write(slice(0, len(beginning)), begun)
                first.append(tap.latents[0][:, 0].float())
                model.source.release()
                bar.update()
            _write_gradients(model, boundaries[-1], torch.Generator(model.device).manual_seed(seed))
            for index, (inputs, slopes) in reversed(list(enumerate(pairwise(boundaries)))):
                forward = partial(block_forward(walk, index, model.layer(index)), computed(layers(index), model))
                found.append(_through(forward, index, has_rope_cache, inputs, slopes, first.pop(), model.device))
                model.source.release()
                bar.update()
    return found[::-1]


def _write_gradients(model: StreamedModel, hidden: ActivationStore, generator: torch.Generator) -> None:
    """Last hidden states give way to gradients of -log p of tokens that are drawn from their predictions."""
    to_logits = model.to_logits()
    for block in range(len(hidden)):
        part = slice(block, block + 1)
        states = hidden.read(part, model.device).requires_grad_()
        with torch.enable_grad():
            logits = to_logits(states)[0]
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
            (slope,) = torch.autograd.grad(F.cross_entropy(logits, drawn, reduction="sum"), states)
        hidden.write(part, slope)


def _through(
    forward: Callable[..., Tensor],
    index: int,
    has_rope_cache: bool,
    inputs: ActivationStore,
    slopes: ActivationStore,
    first: Tensor,
    device: torch.device,
) -> LatentStatistics:
    """Statistics of one layer. Its ``inputs`` are replaced by gradients, those that follow from ``slopes`` at its
    outputs."""
    latents, gradients = [], []
    for part in inputs.blocks.batches(BATCH_TOKENS):
        states, tap = inputs.read(part, device).requires_grad_(), GradientTap(index + 1, has_rope_cache)
        with torch.enable_grad():
            made = forward(states, past_key_values=tap)
            given, gradient = torch.autograd.grad(made, (states, tap.zeros[0]), slopes.read(part, device))
        inputs.write(part, given)
        latents.append(tap.latents[0][:, 1:].flatten(0, 1))  # without the first token, which is a sink
        gradients.append(gradient[:, 1:].flatten(0, 1))
    return statistics_of(torch.cat(latents), torch.cat(gradients), first)


def _windows(windows: TokenBlocks) -> TokenBlocks:
    """The longest windows up to :data:`LENGTH`, or the beginnings of longer ones; :data:`TOKENS` at most."""
    lengths = windows.window_lengths
    length = max((each for each in lengths if each <= LENGTH), default=min(lengths))
    read = windows.tokens[list(windows.of_length(length))].view(-1, length)[:, :LENGTH]
    return TokenBlocks.of(read[: max(1, TOKENS // read.shape[1])])
