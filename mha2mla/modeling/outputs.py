"""Outputs beside logits: router losses of mixtures of experts, and gradients that are refused for want of history."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig


def load_balancing_loss(
    source: PreTrainedConfig, router_logits: tuple[Tensor, ...], attention_mask: Tensor | None
) -> Tensor:
    """The auxiliary loss [] of the source's family, which keeps tokens spread over experts.

    Args:
        source: config of the source's architecture.
        router_logits: per layer with experts, [B * S, experts].
        attention_mask: [B, S], 0 on tokens that do not count; None: all count.

    Raises:
        ValueError: the family has routers and no such loss.
    """
    family = MODEL_FOR_CAUSAL_LM_MAPPING[type(source)]
    function = getattr(sys.modules[family.__module__], "load_balancing_loss_func", None)
    if function is None:
        raise ValueError(
            f"output_router_logits is True; expected False: {source.model_type} has no load_balancing_loss_func"
        )
    experts = source.num_experts if hasattr(source, "num_experts") else source.num_local_experts
    return function(router_logits, experts, source.num_experts_per_tok, attention_mask)


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
