"""Optimizers of healing: averages of orthogonalised gradients, large where gradients agree; Muon; AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from mha2mla.healing.settings import Optimizer, Settings
from mha2mla.healing.student import parameter_groups, sharded_as, whole

BETAS, EPSILON = (0.9, 0.95), 1e-8  # AdamW's
MOMENTUM = 0.95  # of averages of matrices
# Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024): five steps of this polynomial bring
# singular values from 0.002 to 1 between 0.7 and 1.2.
_ITERATIONS, _POLYNOMIAL = 5, (3.4445, -4.7750, 2.0315)
# Elements of matrices of one shape that are orthogonalised at once: one by one, those of a small model are some fifty
# launches each.
_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class Schedule:
    """Decay of an optimizer's rate.

    Attributes:
        decay: share of the steps in which the rate falls to 0, at most all that follow the warm-up.
        shape: of the fall, as transformers' ``decay_type``.
    """

    decay: float
    shape: str


SCHEDULES: Mapping[Optimizer, Schedule] = MappingProxyType(
    {
        "orthogonal": Schedule(decay=1.0, shape="linear"),
        "muon": Schedule(decay=1.0, shape="linear"),
        "adamw": Schedule(decay=0.2, shape="1-sqrt"),
    }
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


def orthogonal_direction(gradient: Tensor) -> Tensor:
    """The orthogonalised gradient [..., rows, columns], its elements' root mean square about 1 at full rank."""
    return orthogonalise(gradient).mul_(math.sqrt(max(gradient.shape[-2:])))


def _alike(weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Weights in groups of one shape, each small enough to orthogonalise in one batch."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for weight in weights:
        by_shape.setdefault(weight.shape, []).append(weight)
    for shape, same in by_shape.items():
        count = max(1, _AT_ONCE // shape.numel())
        yield from (same[start : start + count] for start in range(0, len(same), count))


class Orthogonal(torch.optim.Optimizer):
    """Averages of orthogonalised gradients for groups that say ``matrices``, by matrix or head; AdamW for the others.
    No weight decay.

    An orthogonalised gradient has one size in all of its directions. In the average (Tuddenham et al., arXiv
    2202.07052) those on which the gradients of some twenty steps agree keep it, and noise has a sixth of it,
    √((1 - m) / (1 + m)) for m = :data:`MOMENTUM`. Muon orthogonalises the average, with Nesterov's momentum, and so
    moves by noise as far as by what gradients agree on.

    Sharded weights are gathered: every process makes the whole step and keeps its part.

    Args:
        groups: of parameters, with ``lr``, what a step changes an element by, and ``matrices``.
        muon: orthogonalises the average in place of averaging what is orthogonalised.
    """

    def __init__(self, groups: list[dict[str, Any]], *, muon: bool = False) -> None:
        super().__init__(groups, {})
        self._muon = muon

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not group["matrices"]:
                self._move_elements(weights, group["lr"])
                continue
            for alike in _alike(weights):
                torch._foreach_add_(alike, self._of_matrices(alike), alpha=-group["lr"])

    def _of_matrices(self, weights: list[Tensor]) -> Sequence[Tensor]:
        """Directions of weights of one shape."""
        gradients = [weight.grad for weight in weights]
        (averages,), steps = self._states(weights, "average")
        torch._foreach_add_(steps, 1)
        if self._muon:
            torch._foreach_lerp_(averages, gradients, 1 - MOMENTUM)
            # No _foreach_lerp: sharded tensors have it in place alone.
            gradients = torch._foreach_add(torch._foreach_mul(gradients, 1 - MOMENTUM), averages, alpha=MOMENTUM)
        made = orthogonal_direction(torch.stack([whole(each) for each in gradients]))
        directions = [sharded_as(weight.grad, each) for weight, each in zip(weights, made, strict=True)]
        if self._muon:
            return directions
        torch._foreach_lerp_(averages, directions, 1 - MOMENTUM)
        return torch._foreach_div(averages, [1 - MOMENTUM ** step.item() for step in steps])

    def _move_elements(self, weights: list[Tensor], rate: float) -> None:
        moments, steps = self._states(weights, "first", "second")
        gradients, (beta1, beta2) = [weight.grad for weight in weights], BETAS
        options = {"amsgrad": False, "maximize": False, "weight_decay": 0.0, "eps": EPSILON}
        adamw(weights, gradients, *moments, [], steps, lr=rate, beta1=beta1, beta2=beta2, **options)

    def _states(self, weights: list[Tensor], *names: str) -> tuple[list[list[Tensor]], list[Tensor]]:
        """States of the weights by name, zeros at first, and the steps that each has made, on the CPU."""
        for weight in weights:
            if not self.state[weight]:
                zeros = {name: torch.zeros_like(weight.grad) for name in names}
                self.state[weight] |= {**zeros, "step": torch.zeros(())}
        states = [self.state[weight] for weight in weights]
        return [[state[name] for state in states] for name in names], [state["step"] for state in states]


def matrices_of(student: nn.Module) -> set[int]:
    """Ids of the weights that move as matrices: of two dimensions and more, but for embeddings, whose gradients
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
    return Orthogonal(parts, muon=settings.optimizer == "muon")


def first_directions(student: nn.Module, settings: Settings) -> list[tuple[Tensor, Tensor]]:
    """Trained weights that have a gradient, and what the optimizer's first step subtracts for a rate of 1."""
    matrices = matrices_of(student) if settings.optimizer != "adamw" else set()
    trained = [each for each in student.parameters() if each.grad is not None]
    found = [(each, each.grad / (each.grad.abs() + EPSILON)) for each in trained if id(each) not in matrices]
    for same in _alike(each for each in trained if id(each) in matrices):
        found += zip(same, orthogonal_direction(torch.stack([each.grad for each in same])), strict=True)
    return found
