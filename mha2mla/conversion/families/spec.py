"""Description of a source model for conversion, and the weights of one of its layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from mha2mla.checkpoints import NamedError


class UnsupportedSourceError(NamedError):
    """The source cannot be converted exactly or sensibly; the message names what stands in the way."""


def pair_factors(inv_freq: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor`` of every pair that rotates, float64; 1 for those of frequency zero, which stand for none."""
    return torch.where(inv_freq == 0, 1.0, torch.tensor(factor, dtype=torch.float64))


def visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """[queries, keys] bool: which positions each position attends to, in a sliding ``window`` or all before it."""
    distance = queries[:, None] - keys[None]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@dataclass(frozen=True)
class RotaryTable:
    """RoPE of one kind of layer.

    Attributes:
        inv_freq: [rotated dims of a head // 2] float32, after any scaling.
        attention_factor: what cos and sin are multiplied by.
        note: what was decided, for the model card.
        lengths: shortest and longest window at which the source uses this table; None: any length from there.
    """

    inv_freq: torch.Tensor
    attention_factor: float
    note: str = ""
    lengths: tuple[int, int | None] = (1, None)


@dataclass(frozen=True)
class SourceSpec:
    """Description of a source model. Layers share everything but the sliding window and, in some
    families, the rotary table and its factor (``of_layer``).

    Attributes:
        norm_eps: of the norms on q and k.
        inv_freq: [head_dim // 2] float32, rotary frequencies after any scaling (llama3, linear, yarn, longrope); zero
            for dims that the source does not rotate.
        attention_factor: what the source multiplies cos and sin by (yarn, longrope) where it rotates; 1.0 otherwise.
        rope_note: what was decided about the rotary table, for the model card.
        sliding_windows: per layer, the number of visible tokens, or None for all.
        norm_per_head: whether q's and k's norms act on every head by itself (Qwen3) or on all heads together (OLMo2).
        norm_offset: what the norms add to their stored weight (Gemma: 1).
        rotary_dim: dims of a head that the source rotates; None for all.
        tables: of each layer, for whole heads.
        table_lengths: shortest and longest window at which the source uses these tables; None: any length from there.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    softmax_scale: float
    qk_norm: bool
    norm_eps: float
    q_bias: bool
    k_bias: bool
    v_bias: bool
    o_bias: bool
    inv_freq: torch.Tensor
    attention_factor: float
    rope_note: str
    sliding_windows: tuple[int | None, ...]
    tables: tuple[RotaryTable, ...]
    norm_per_head: bool = True
    norm_offset: float = 0.0
    rotary_dim: int | None = None
    table_lengths: tuple[int, int | None] = (1, None)

    @property
    def group_size(self) -> int:
        """Query heads that read one kv head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def feature_size(self) -> int:
        """Width of the encoder's input: the hidden state, with the normed keys in front under q/k-norm."""
        return self.hidden_size + (self.num_key_value_heads * self.head_dim if self.qk_norm else 0)

    @property
    def pair_factors(self) -> torch.Tensor:
        """[head_dim // 2] float64: what cos and sin of every pair are multiplied by; 1 where nothing rotates."""
        return pair_factors(self.inv_freq, self.attention_factor)

    def of_layer(self, layer: int) -> SourceSpec:
        """The same with ``inv_freq`` and ``attention_factor`` of this layer."""
        table = self.tables[layer]
        return replace(self, inv_freq=table.inv_freq, attention_factor=table.attention_factor)

    def heads(self, hidden: torch.Tensor, weights: AttentionWeights, which: Literal["q", "k"]) -> torch.Tensor:
        """q or k of every head after bias and norm, before RoPE: [..., heads, head_dim] of inputs [..., hidden], in
        their dtype."""
        parts = (getattr(weights, f"{which}_{part}") for part in ("weight", "bias", "norm"))
        weight, bias, norm = (None if part is None else part.to(hidden.dtype) for part in parts)
        return self.split_heads(torch.nn.functional.linear(hidden, weight, bias), norm)

    def split_heads(self, projected: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """q or k of every head before RoPE, [..., heads, head_dim].

        Args:
            projected: [..., heads * head_dim].
            norm: stored weight of the RMSNorm on q or k, [head_dim] or [heads * head_dim]; None without one.
        """
        if norm is not None and not self.norm_per_head:
            projected = self._rms_norm(projected, norm)
        heads = projected.unflatten(-1, (-1, self.head_dim))
        return self._rms_norm(heads, norm) if norm is not None and self.norm_per_head else heads

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight + self.norm_offset, self.norm_eps)


@dataclass(frozen=True)
class AttentionWeights:
    """One source layer's attention tensors; weights are [out, in], norms as they are stored.

    Rotary pairs are (j, j + head_dim / 2), as in Llama: where a family pairs otherwise or rotates only part of a head,
    q and k have their rows in this order (scores do not change when both do).

    Attributes:
        output_gain: [hidden], how much of a channel of the attention's output the MLP is given, by the gains of the
            norms between them; it changes nothing, it says what an error of that channel costs.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    v_weight: torch.Tensor
    o_weight: torch.Tensor
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    output_gain: torch.Tensor | None = None
