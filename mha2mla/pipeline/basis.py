"""Between layers and files: bases that latents are quantised in, and what codes in them lose, of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.fit.repeatable import REPEATABLE_ATTENTION
from mha2mla.conversion.latent.basis import LatentBasis, LatentStatistics, latent_statistics
from mha2mla.conversion.layer_walk import LayerWalk, converted_config
from mha2mla.conversion.predictions import kl_divergence
from mha2mla.conversion.resume import FinishedLayers
from mha2mla.geometry import LATENT_BITS, MLAGeometry
from mha2mla.kernels import RowQuantizer
from mha2mla.modeling.cache_layout import quantizer_of
from mha2mla.pipeline.check import Plan
from mha2mla.terminal import Span

if TYPE_CHECKING:
    from mha2mla.modeling.config import MHA2MLAConfig

LENGTH, TOKENS = 1024, 8192  # most of a calibration window, and of all, that is read
_JUDGED_TOKENS = 4096  # the part of them that predictions over codes are compared on
_CODES = tuple(bits for bits in LATENT_BITS if bits < 16)


def in_quantised_basis(
    plan: Plan, walk: LayerWalk, layers: FinishedLayers, config: MHA2MLAConfig, progress: bool | Span = False
) -> Callable[[int], Mapping[str, torch.Tensor]]:
    """Layer → its tensors: those of ``layers``, in the recipe's basis where latents are cached as codes."""
    geometries = walk.geometries
    if not any(each.has_codes for each in geometries):
        return layers.__getitem__
    tensors = _whole(plan, [layers[layer] for layer in range(len(geometries))])
    statistics = statistics_of(config, tensors, walk.windows, plan.model.device, progress)
    plan.model.source.release()
    rule = plan.recipe.basis_rule
    bases = {i: rule.basis(statistics[i]) for i, each in enumerate(geometries) if each.has_codes}
    return lambda layer: bases[layer].fold(layers[layer]) if layer in bases else layers[layer]


def losses_of_codes(
    plan: Plan,
    windows: TokenBlocks,
    progress: bool | Span,
    geometry: MLAGeometry,
    layers: Sequence[Mapping[str, torch.Tensor]],
) -> list[dict[int, float]]:
    """Loss that codes of each layer's latent add, by bits, in nats per token (16 bits: 0).

    The divergence of the converted model's predictions over codes from its own without, in the recipe's basis and with
    all layers coded, is measured; layers share it by ½ E[δᵀ F δ], with δ the errors of their codes and F the importance
    (:class:`LatentStatistics`).
    """
    spec, device = plan.spec, plan.model.device
    config = converted_config(plan.opened.config, spec, (geometry,) * spec.num_layers, plan.recipe)
    statistics = statistics_of(config, _whole(plan, layers), windows, device, progress)
    rule = plan.recipe.basis_rule
    bases = [rule.basis(each) for each in statistics]
    folded = [basis.fold(layer) for basis, layer in zip(bases, layers, strict=True)]
    config.latent_bits = min(LATENT_BITS)  # the model has centers
    model = _loaded(config, _whole(plan, folded), device)
    plan.model.source.release()
    measured, read = dict.fromkeys(_CODES, 0.0), _windows(windows)
    read = read[: max(1, _JUDGED_TOKENS // read.shape[1])]
    for ids in read.to(device).split(1):
        expected = _predictions(model, ids, 16)
        for bits in _CODES:
            measured[bits] += float(kl_divergence(expected, _predictions(model, ids, bits)).sum()) / read.numel()
    quantizers = {bits: quantizer_of(replace(geometry, latent_bits=bits)) for bits in _CODES}
    errors = [
        {bits: _second_order(each, basis, quantizer) for bits, quantizer in quantizers.items()}
        for each, basis in zip(statistics, bases, strict=True)
    ]
    # Both are near rounding with 8 bits, and zero for a constant latent.
    shares = {bits: max(measured[bits], 0.0) / (sum(each[bits] for each in errors) or 1.0) for bits in _CODES}
    return [{16: 0.0, **{bits: shares[bits] * each[bits] for bits in _CODES}} for each in errors]


def _second_order(statistics: LatentStatistics, basis: LatentBasis, quantizer: RowQuantizer) -> float:
    """½ E[δᵀ F δ] over calibration tokens, in nats per token."""
    found = basis.decode(quantizer.round(basis.encode(statistics.rows), basis.centers))
    errors = (found - statistics.rows).double()
    return float(((errors @ statistics.importance) * errors).sum()) / (2 * len(errors))


@torch.inference_mode()
def _predictions(model: nn.Module, ids: torch.Tensor, bits: int) -> torch.Tensor:
    """Log-probabilities [length, vocabulary], float32, of one window over latents of ``bits``."""
    model.config.latent_bits = bits
    return model(ids, use_cache=False).logits[0].float().log_softmax(-1)


def statistics_of(
    config: MHA2MLAConfig,
    tensors: Mapping[str, torch.Tensor],
    windows: TokenBlocks,
    device: torch.device,
    progress: bool | Span = False,
) -> list[LatentStatistics]:
    """Statistics of every layer's latent, of the whole model in float32 and the longest windows up to :data:`LENGTH`.

    Args:
        tensors: of the model, by their names in its checkpoint.
    """
    config = copy.deepcopy(config)
    config.latent_bits = 16
    return latent_statistics(_loaded(config, tensors, device), _windows(windows), progress=progress)


def _whole(plan: Plan, layers: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors of a whole converted model by their names in its checkpoint: the source's, and those of ``layers``."""
    names = plan.model.expected_names() - plan.opened.attention_names()
    tensors = {name: plan.model.source.tensor(name) for name in names}
    for index, layer in enumerate(layers):
        tensors |= {f"model.layers.{index}.self_attn.{name}": each for name, each in layer.items()}
    return tensors


def _loaded(config: MHA2MLAConfig, tensors: Mapping[str, torch.Tensor], device: torch.device) -> nn.Module:
    """The model in float32, ready to evaluate."""
    from mha2mla.modeling import MHA2MLAForCausalLM

    model = MHA2MLAForCausalLM.from_pretrained(
        None, config=config, state_dict=dict(tensors), dtype=torch.float32, attn_implementation=REPEATABLE_ATTENTION
    )
    return model.to(device).eval().requires_grad_(False)


def _windows(windows: TokenBlocks) -> torch.Tensor:
    """int64 [windows, length] of the longest length up to :data:`LENGTH`, :data:`TOKENS` at most."""
    lengths = windows.window_lengths
    length = max((each for each in lengths if each <= LENGTH), default=min(lengths))
    read = windows.tokens[list(windows.of_length(length))].view(-1, length)[:, :LENGTH]
    return read[: max(1, TOKENS // read.shape[1])]
