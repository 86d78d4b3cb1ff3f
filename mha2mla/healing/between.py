"""Weights between those before training and those after it: where held-out windows lose least.

Training on text that a model has not seen also writes its noise into the weights. Part of the way back noise shrinks by
more than what was learned (Wortsman et al., "Robust fine-tuning of zero-shot models", arXiv 2109.01903).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mha2mla.healing.student import sharded_as

SHARES = (0.25, 0.5, 0.75)  # of the way from the weights before training


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights that are trained, on the host; of sharded ones this process's part."""
    return {name: _local(each).to("cpu", copy=True) for name, each in module.named_parameters() if each.requires_grad}


def least_between(
    module: nn.Module, start: dict[str, Tensor], losses: tuple[float, float], loss: Callable[[], float]
) -> list[dict[str, float]]:
    """Leaves ``module`` the weights of least loss among those at :data:`SHARES` of the way from ``start`` to its own,
    and both ends.

    Args:
        start: :func:`trained_weights` of the module before it was sharded.
        losses: at both ends.
        loss: of the module as it is; one number in every process.

    Returns:
        Rows of ``share`` and ``held_out_kl``, by falling loss: of the last one the weights are kept.
    """
    trained = {name: each for name, each in module.named_parameters() if name in start}
    start = {name: _local(sharded_as(each, start[name].to(each.device))).cpu() for name, each in trained.items()}
    end = trained_weights(module)
    rows = [{"share": share, "held_out_kl": known} for share, known in zip((0.0, 1.0), losses, strict=True)]
    for share in SHARES:
        _move(module, trained, start, end, share)
        rows.append({"share": share, "held_out_kl": loss()})
    rows.sort(key=lambda row: (-_number(row["held_out_kl"]), -row["share"]))
    _move(module, trained, start, end, rows[-1]["share"])
    return rows


def _number(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


@torch.no_grad()
def _move(
    module: nn.Module, weights: dict[str, Tensor], start: dict[str, Tensor], end: dict[str, Tensor], share: float
) -> None:
    for name, weight in weights.items():
        _local(weight).copy_(torch.lerp(start[name], end[name], share))
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # what the last pass gathered are other weights


def _local(weight: Tensor) -> Tensor:
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight
