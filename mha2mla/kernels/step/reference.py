"""The oracle of the steps: plain torch, one sequence after another, float64-capable. Reads lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels.mixed_attention.reference import attend_sequences, mla_attention_reference, rows_of
from mha2mla.kernels.rope_append.reference import rotate_reference


def write_tokens(pairs: list[tuple[Tensor, Tensor]], block_table: Tensor, lengths: list[int], seqlen_q: int) -> None:
    """For pairs of a cache [P, page, ...] and rows [B, S_q, ...]: the rows become the last tokens of each sequence."""
    for b, length in enumerate(lengths):
        for s in range(seqlen_q):
            place = length - seqlen_q + s
            if place >= 0:
                for cache, rows in pairs:
                    page = cache.shape[1]
                    cache[int(block_table[b, place // page]), place % page] = rows[b, s]


def _turn(x: Tensor, lengths: list[int], inv_freq: Tensor, scaling: float) -> Tensor:
    """x [B, S_q, heads, d] at the last places of its sequences."""
    batch, seqlen_q = x.shape[:2]
    place = torch.tensor(lengths, device=x.device)[:, None] - seqlen_q + torch.arange(seqlen_q, device=x.device)
    turned = rotate_reference(x.flatten(0, 1), place.clamp_min(0).flatten(), inv_freq, attention_scaling=scaling)
    return turned.unflatten(0, (batch, seqlen_q))


def mla_step_reference(
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    k_up: Tensor | None,
    v_up: Tensor,
    inv_freq: Tensor,
    block_table: Tensor,
    cache_seqlens: list[int],
    *,
    softmax_scale: float,
    cache_starts: list[int] | None = None,
    attention_scaling: float = 1.0,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """Shapes as in :func:`mha2mla.kernels.mla_step`, tokens [B, S_q, ...] at their places, rotary keys cached."""
    query, key = (_turn(x, cache_seqlens, inv_freq, attention_scaling) for x in (q_pe, k_pe))
    write_tokens([(latent_cache, latent), (rope_cache, key)], block_table, cache_seqlens, q_pe.shape[1])
    out = mla_attention_reference(
        q_nope.flatten(0, 1), query.flatten(0, 1), latent_cache, rope_cache, k_up, v_up, block_table,
        [q_pe.shape[1]] * len(cache_seqlens), cache_seqlens, softmax_scale=softmax_scale, cache_starts=cache_starts,
        window=window, sinks=sinks,
    )  # fmt: skip
    return out.unflatten(0, q_pe.shape[:2])


def gqa_step_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    inv_freq: Tensor,
    block_table: Tensor,
    cache_seqlens: list[int],
    *,
    softmax_scale: float,
    cache_starts: list[int] | None = None,
    attention_scaling: float = 1.0,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """Shapes as in :func:`mha2mla.kernels.gqa_step`, tokens [B, S_q, ...] at their places."""
    rotated, turned = (_turn(x, cache_seqlens, inv_freq, attention_scaling) for x in (query, key))
    write_tokens([(key_cache, turned), (value_cache, value)], block_table, cache_seqlens, query.shape[1])
    pairs = [
        tuple(rows_of(cache, table, length) for cache in (key_cache, value_cache))
        for table, length in zip(block_table, cache_seqlens, strict=True)
    ]
    starts = cache_starts or [0] * len(cache_seqlens)
    lengths = [query.shape[1]] * len(cache_seqlens)
    out = attend_sequences(rotated.flatten(0, 1), lengths, pairs, starts, softmax_scale, window, sinks)
    return out.unflatten(0, query.shape[:2])
