"""Between layers and files: the basis that latents are quantised in, computed of the whole converted model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.fit.repeatable import REPEATABLE_ATTENTION
from mha2mla.conversion.latent.basis import LatentStatistics, latent_statistics
from mha2mla.conversion.resume import FinishedLayers
from mha2mla.pipeline.prepare import Prepared

if TYPE_CHECKING:
    from mha2mla.modeling.config import MHA2MLAConfig

LENGTH, TOKENS = 1024, 8192  # most of a calibration window, and of all, that is read


def in_quantised_basis(
    prepared: Prepared, layers: FinishedLayers, config: MHA2MLAConfig, replaced: Collection[str]
) -> Callable[[int], Mapping[str, torch.Tensor]]:
    """Layer → its tensors: those of ``layers``, in the recipe's basis where latents are cached as codes.

    Args:
        config: of the result.
        replaced: names of the source's tensors that ``layers`` stand for.
    """
    plan, latent = prepared.plan, prepared.plan.recipe.latent
    if latent.bits == 16:
        return layers.__getitem__
    reader = plan.model.source
    tensors = {name: reader.tensor(name) for name in plan.model.expected_names() - set(replaced)}
    for layer in layers:
        tensors |= {f"model.layers.{layer}.self_attn.{name}": each for name, each in layers[layer].items()}
    statistics = statistics_of(config, tensors, prepared.walk.windows, plan.model.device)
    reader.release()
    bases = [plan.recipe.basis_rule.basis(layer, latent.group) for layer in statistics]
    return lambda layer: bases[layer].fold(layers[layer])


def statistics_of(
    config: MHA2MLAConfig, tensors: Mapping[str, torch.Tensor], windows: TokenBlocks, device: torch.device
) -> list[LatentStatistics]:
    """Statistics of every layer's latent, of the whole model in float32 and the longest windows up to :data:`LENGTH`.

    Args:
        tensors: of the model, by their names in its checkpoint.
        windows: calibration text.
    """
    from mha2mla.modeling import MHA2MLAForCausalLM

    config = copy.deepcopy(config)
    config.latent_bits = 16
    model = MHA2MLAForCausalLM.from_pretrained(
        None, config=config, state_dict=dict(tensors), dtype=torch.float32, attn_implementation=REPEATABLE_ATTENTION
    )
    lengths = windows.window_lengths
    length = max((each for each in lengths if each <= LENGTH), default=min(lengths))
    read = windows.tokens[list(windows.of_length(length))].view(-1, length)[:, :LENGTH]
    model = model.to(device).eval().requires_grad_(False)
    return latent_statistics(model, read[: max(1, TOKENS // read.shape[1])])
