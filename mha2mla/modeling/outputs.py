"""Gradients that are refused: what was cached, or computed by kernels, has no history."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NO_HISTORY = (
    "past_key_values was a LatentCache that held tokens, and it keeps no gradients: those of this call would leave out "
    "what is cached; expected a DynamicCache or None"
)


class _RefusedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, why: str) -> Tensor:
        ctx.why = why
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        raise ValueError(ctx.why)


def refuse_gradients(value: Tensor, why: str = _NO_HISTORY) -> Tensor:
    """``value``, which seems to require a gradient; a backward pass that comes here raises ValueError, with ``why``."""
    with torch.enable_grad():
        return _RefusedGradient.apply(value, torch.empty(0, requires_grad=True), why)
