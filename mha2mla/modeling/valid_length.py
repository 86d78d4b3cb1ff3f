"""A word, once, when a sequence is longer than its conversion was made for; from what the host knows, never a sync."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from mha2mla.modeling.cache import LatentCache
from mha2mla.modeling.config import MHA2MLAConfig


class UncalibratedLengthWarning(UserWarning):
    """A sequence is longer than ``config.calibrated_length``."""


class LengthWatch:
    """Warns of the first sequence beyond ``config.calibrated_length``. Says nothing while a graph is traced."""

    def __init__(self, config: MHA2MLAConfig) -> None:
        self._config = config
        self._warned = False

    def see(self, cache: Cache | None, tokens: Tensor) -> None:
        """Looks at a step that brings ``tokens`` [B, S, ...] to what ``cache`` holds.

        How many tokens a static cache holds is known to the device alone; what counts is how many it is made for.
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
        """Looks at a ragged step whose sequences have ``lengths`` [B], on the CPU."""
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
                " (config.calibrated_length), and beyond them it may be much worse than its source",
                UncalibratedLengthWarning,
                stacklevel=3,
            )
