"""A converted model over latents of integer codes, in one forward pass.

A row is quantised by itself when it is appended, and attention reads the codes of its own call's tokens too, so a
forward pass over a window reads what decoding token by token reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mha2mla.eval.group_quantizer import GroupQuantizer
from mha2mla.eval.latent_basis import BASES, BasisName, LatentBasis, LatentStatistics, LatentTap, latent_basis

_SINK_INDEX_BITS = 32  # that say which row an exact one is


@dataclass(frozen=True)
class LatentCodes:
    """A latent cache of integer codes; rotary keys that a layout caches beside it stay in 16 bits.

    Args:
        bits: of a code.
        basis: what it is quantised in (:func:`~mha2mla.eval.latent_basis.latent_basis`).
        group, scale_bits: of :class:`~mha2mla.eval.group_quantizer.GroupQuantizer`.
        exact_sinks: the first token of a text, and rows of outlying energy, stay in 16 bits, beside their codes.
        power: of the basis ``"importance"``.

    Raises:
        ValueError: a value outside these.
    """

    bits: int
    basis: BasisName = "importance"
    group: int | None = 32
    scale_bits: int = 16
    exact_sinks: bool = True
    power: float = 0.5

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise ValueError(f"basis is {self.basis!r}; expected one of {BASES}")
        self.quantizer()

    def quantizer(self) -> GroupQuantizer:
        return GroupQuantizer(self.bits, self.group, self.scale_bits)

    @property
    def name(self) -> str:
        return f"latent {self.bits} bits, {self.basis}"

    def bases(self, statistics: Sequence[LatentStatistics]) -> list[LatentBasis]:
        """Of every layer."""
        return [latent_basis(self.basis, layer, group=self.group, power=self.power) for layer in statistics]


class QuantizedLatent:
    """A converted model whose attention reads latents of codes.

    Args:
        model: a converted causal language model.
        codes: of its cache.
        bases: of every layer.
    """

    def __init__(self, model: nn.Module, codes: LatentCodes, bases: Sequence[LatentBasis]) -> None:
        self.model, self.codes, self.bases = model, codes, bases
        self._rows = 0
        self._exact_bits = torch.zeros((), dtype=torch.int64, device=model.device)

    @property
    def name(self) -> str:
        return self.codes.name

    def cache(self) -> CodedLatents:
        """An empty cache, for any forward passes of one batch."""
        return CodedLatents(self)

    def run(self, module: nn.Module, ids: Tensor) -> Any:
        """``module``, the model or its base model, over windows of ids [B, L] without padding."""
        self._rows += ids.numel()
        return module(input_ids=ids, use_cache=True, past_key_values=self.cache())

    def round(self, latent: Tensor, layer_idx: int, is_first: bool) -> Tensor:
        """What the cache of a layer gives back of latents [B, S, d_c]; the first ones of a text, or later ones."""
        basis = self.bases[layer_idx]
        encoded = basis.encode(latent)
        rounded = basis.decode(self.codes.quantizer().round(encoded)).to(latent.dtype)
        if not self.codes.exact_sinks:
            return rounded
        exact = basis.is_sink(encoded)
        if is_first:
            exact[:, 0] = True
        self._exact_bits += exact.sum() * (16 * latent.shape[-1] + _SINK_INDEX_BITS)
        return torch.where(exact[..., None], latent, rounded)

    def share(self, length: int) -> float:
        """Bytes of the caches of what was run over those of the source's in 16 bits, exact rows counted."""
        config, quantizer = self.model.config, self.codes.quantizer()
        geometries = [config.layer_geometry(layer) for layer in range(config.num_hidden_layers)]
        row = sum(
            quantizer.bits_per_row(each.kv_lora_rank) + 16 * (each.cache_numel_per_token - each.kv_lora_rank)
            for each in geometries
        )
        exact = self._exact_bits.item() / max(self._rows, 1)
        return (row + exact) / (8 * config.source_cache_bytes_per_token(2))


class CodedLatents(LatentTap):
    """The cache of :class:`QuantizedLatent`: holds what codes give back."""

    def __init__(self, quantized: QuantizedLatent) -> None:
        config = quantized.model.config
        super().__init__(config.num_hidden_layers, config.has_rope_cache)
        self._quantized = quantized

    def seen(self, latent: Tensor, layer_idx: int) -> Tensor:
        return self._quantized.round(latent, layer_idx, self.get_seq_length(layer_idx) == 0)
