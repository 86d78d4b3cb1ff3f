"""Optimizers of healing: AdamW, and Muon, whose steps are as large in every direction of a weight matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from mha2mla.healing.settings import Optimizer, Settings
from mha2mla.healing.student import parameter_groups, sharded_as, whole

BETAS, EPSILON = (0.9, 0.95), 1e-8  # AdamW's
MOMENTUM = 0.95  # Muon's
# Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024): five steps of this polynomial bring
# singular values from 0.002 to 1 between 0.7 and 1.2.
_ITERATIONS, _POLYNOMIAL = 5, (3.4445, -4.7750, 2.0315)
# Elements of matrices of one shape that are orthogonalised at once: one by one, those of a small model are some fifty
# launches each.
_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class Schedule:
    """How the rate of an optimizer is chosen and how it falls.

    Attributes:
        share: of the rate at which a first step does little harm.
        decay: share of the steps in which the rate falls to 0, at most all that follow the warm-up.
        shape: of the fall, as transformers' ``decay_type``.
    """

    share: float
    decay: float
    shape: str


# Where gradients are noise a step of AdamW is a fourth of its first, and Muon's is as large: so Muon starts lower, and
# nearly all that it gains it gains while the rate falls.
SCHEDULES: Mapping[Optimizer, Schedule] = MappingProxyType(
    {"muon": Schedule(share=0.5, decay=1.0, shape="linear"), "adamw": Schedule(share=1.0, decay=0.2, shape="1-sqrt")}
)


def orthogonalise(matrices: Tensor) -> Tensor:
    """The matrices with nearly the same singular vectors and singular values between 0.7 and 1.2, in float32.

    Args:
        matrices: [..., rows, columns], finite; one of zeros stays so, and one below about 1e-38 may come out smaller.
    """
    wide = (matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT).float()
    wide = wide.reshape(-1, *wide.shape[-2:])
    for order in (math.inf, 2):  # by the largest first: squares of 1e-23 are 0, those of 1e20 infinite
        size = torch.linalg.vector_norm(wide, order, dim=(-2, -1), keepdim=True)
        wide = wide / size.clamp_min(torch.finfo(torch.float32).tiny)
    wide = wide.to(torch.bfloat16 if wide.is_cuda else torch.float32)
    first, third, fifth = _POLYNOMIAL
    for _ in range(_ITERATIONS):
        square = wide @ wide.mT
        square = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        wide = torch.baddbmm(wide, square, wide, beta=first)
    wide = wide if matrices.shape[-2] <= matrices.shape[-1] else wide.mT
    return wide.reshape(matrices.shape).float()


def muon_direction(gradient: Tensor) -> Tensor:
    """The orthogonalised gradient [..., rows, columns], its elements' root mean square about 1 at full rank."""
    return orthogonalise(gradient).mul_(math.sqrt(max(gradient.shape[-2:])))


def _alike(weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Those that have a gradient, by shape, as many as are orthogonalised at once."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for weight in weights:
        if weight.grad is not None:
            by_shape.setdefault(weight.shape, []).append(weight)
    for shape, same in by_shape.items():
        count = max(1, _AT_ONCE // shape.numel())
        yield from (same[start : start + count] for start in range(0, len(same), count))


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum for groups that say ``matrices``, by matrix or head; AdamW for the others. No
    weight decay.

    Sharded weights are gathered: every process makes the whole step and keeps its part.

    Args:
        groups: of parameters, with ``lr``, what a step changes an element by, and ``matrices``.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if group["matrices"]:
                for weights in _alike(group["params"]):
                    for weight, direction in zip(weights, self._of_matrices(weights), strict=True):
                        weight.sub_(direction, alpha=group["lr"])
            else:
                for weight in group["params"]:
                    if weight.grad is not None:
                        weight.sub_(self._of_elements(weight.grad, self.state[weight]), alpha=group["lr"])

    def _of_matrices(self, weights: list[Tensor]) -> Iterator[Tensor]:
        """Directions of weights of one shape."""
        ahead = []
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["momentum"] = torch.zeros_like(weight.grad)
            ahead.append(weight.grad.lerp(state["momentum"].lerp_(weight.grad, 1 - MOMENTUM), MOMENTUM))
        made = muon_direction(torch.stack([whole(each) for each in ahead]))
        yield from (sharded_as(each, direction) for each, direction in zip(ahead, made, strict=True))

    @staticmethod
    def _of_elements(gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        if not state:
            state |= {name: torch.zeros_like(gradient) for name in ("first", "second")} | {"step": torch.zeros(())}
        state["step"] += 1
        first, second = state["first"].lerp_(gradient, 1 - BETAS[0]), state["second"]
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        steps = state["step"].item()
        size = (second / (1 - BETAS[1] ** steps)).sqrt_().add_(EPSILON)
        return first / (1 - BETAS[0] ** steps) / size


def matrices_of(student: nn.Module) -> set[int]:
    """Ids of the weights that Muon moves as matrices: of two dimensions and more, but for embeddings, whose gradients
    are of few words."""
    words = {id(each.weight) for each in (student.get_input_embeddings(), student.get_output_embeddings())}
    return {id(each) for each in student.parameters() if each.ndim > 1 and id(each) not in words}


def make_optimizer(student: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer of ``settings`` over the trained parameters."""
    groups = parameter_groups(student, settings)
    if settings.optimizer == "adamw":
        fused = next(student.parameters()).is_cuda
        return torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=fused)
    matrices = matrices_of(student)
    parts = []
    for group in groups:
        for chosen in (True, False):
            found = [each for each in group["params"] if (id(each) in matrices) is chosen]
            parts += [{**group, "params": found, "matrices": chosen}] if found else []
    return Muon(parts)


def first_directions(student: nn.Module, settings: Settings) -> list[tuple[Tensor, Tensor]]:
    """Trained weights that have a gradient, and what the optimizer's first step subtracts for a rate of 1."""
    matrices = matrices_of(student) if settings.optimizer == "muon" else set()
    trained = [each for each in student.parameters() if each.grad is not None]
    found = [(each, each.grad / (each.grad.abs() + EPSILON)) for each in trained if id(each) not in matrices]
    for same in _alike(each for each in trained if id(each) in matrices):
        found += zip(same, muon_direction(torch.stack([each.grad for each in same])), strict=True)
    return found
