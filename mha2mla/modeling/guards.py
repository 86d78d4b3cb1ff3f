"""Refused gradients, where what was cached or computed by kernels has no history; and a warning of long sequences."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from mha2mla.modeling.cache import LatentCache
from mha2mla.modeling.config import MHA2MLAConfig

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


class UncalibratedLengthWarning(UserWarning):
    """A sequence is longer than ``config.calibrated_length``."""


# Qwen2.5-Coder-0.5B calibrated at 8192 (docs/quality.md): perplexity relative to the source at 8192 and 32768 tokens in
# the first layout; in the second one, at 8192 and 24576.
_BEYOND = {
    True: "Its layout, latent, lost no more beyond that length where it was measured (1.03 at four times the length).",
    False: "Beyond that length it may be much worse than its source (1.32 instead of 1.12 at three times the length).",
}


class LengthWatch:
    """Warns of the first sequence beyond ``config.calibrated_length``. Says nothing while a graph is traced."""

    def __init__(self, config: MHA2MLAConfig) -> None:
        self._config = config
        self._warned = False

    def see(self, cache: Cache | None, tokens: Tensor) -> None:
        """Checks a step that brings ``tokens`` [B, S, ...] to what ``cache`` holds.

        Only the device knows the tokens of a static cache, so its capacity counts.
        """
        if torch.compiler.is_compiling() or self._is_done:
            return
        length = tokens.shape[1]
        if isinstance(cache, LatentCache) and cache.layers[0].max_cache_len is not None:
            length = max(length, cache.layers[0].max_cache_len)
        elif isinstance(cache, LatentCache | DynamicCache):
            length += cache.get_seq_length()
        self._compare(length)

    def see_batch(self, lengths: Tensor) -> None:
        """Checks a ragged step whose sequences have ``lengths`` [B], on the CPU."""
        if not (torch.compiler.is_compiling() or self._is_done) and lengths.numel():
            self._compare(int(lengths.max()))

    @property
    def _is_done(self) -> bool:
        return self._warned or self._config.calibrated_length is None

    def _compare(self, length: int) -> None:
        limit = self._config.calibrated_length
        if length > limit:
            self._warned = True
            warnings.warn(
                f"a sequence of {length} tokens: this checkpoint was calibrated on at most {limit}"
                f" (config.calibrated_length). {_BEYOND[self._config.rope_from_latent]}",
                UncalibratedLengthWarning,
                stacklevel=3,
            )
