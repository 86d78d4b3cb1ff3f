"""The oracle of mixed batches: plain torch, one sequence after another, float64-capable. Reads lengths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha2mla.kernels.attention_varlen.api import weighted_sum
from mha2mla.kernels.mixed_attention.api import expand


def attend_sequences(
    query: Tensor,
    query_lengths: list[int],
    keys_and_values: list[tuple[Tensor, Tensor]],
    starts: list[int],
    softmax_scale: float,
    window: int | None,
    sinks: int = 0,
) -> Tensor:
    """Causal attention of query [N, H, d], one sequence behind the other, over each sequence's keys [T, E, d] and
    values [T, E, d_v], bottom-right aligned; a query that sees no key gives zeros. float64 for float64, else float32.
    """
    arithmetic = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads, outs, begin = query.shape[1], [], 0
    for length, (key, value), start in zip(query_lengths, keys_and_values, starts, strict=True):
        tokens = key.shape[0]
        mine = query[begin : begin + length].to(arithmetic)
        begin += length
        key, value = (x.to(arithmetic).repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
        last = tokens - length + torch.arange(length, device=query.device)[:, None]  # the query's own position
        token = torch.arange(tokens, device=query.device)
        seen = (token <= last) & (token >= start)
        if window is not None:
            seen = seen & ((token > last - window) | (token < start + sinks))
        score = torch.einsum("qhd,thd->hqt", mine, key) * softmax_scale
        weight = torch.where(seen, score, -torch.inf).softmax(-1)
        weight = torch.where(seen.any(-1, keepdim=True), weight, 0)
        outs.append(weighted_sum(weight, seen, value))
    width = keys_and_values[0][1].shape[-1] if keys_and_values else 0
    rest = query.new_zeros(query.shape[0] - begin, heads, width, dtype=arithmetic)
    return torch.cat([*outs, rest]).to(query.dtype)


def rows_of(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens of a sequence with pages ``block_table`` [max_pages]: [length, ...]."""
    token = torch.arange(length, device=cache.device)
    return cache[block_table.long()[token // cache.shape[1]], token % cache.shape[1]]


def mla_attention_reference(
    q_nope: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    k_up: Tensor | None,
    v_up: Tensor,
    block_table: Tensor,
    query_lengths: list[int],
    cache_seqlens: list[int],
    *,
    softmax_scale: float,
    cache_starts: list[int] | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """The expanded form of every sequence by itself; shapes as in :func:`mha2mla.kernels.mla_attention`."""
    heads = math.lcm(v_up.shape[0], rope_cache.shape[2])
    wide = torch.float64 if q_pe.dtype == torch.float64 else torch.float32

    def keys_and_values(table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        latent, k_pe = (rows_of(cache, table, length).to(wide) for cache in (latent_cache, rope_cache))
        key, value = k_pe.repeat_interleave(heads // k_pe.shape[1], dim=1), expand(latent, v_up.to(wide))
        if k_up is not None:
            key = torch.cat((expand(latent, k_up.to(wide)).repeat_interleave(heads // k_up.shape[0], dim=1), key), -1)
        return key, value

    pairs = [keys_and_values(table, length) for table, length in zip(block_table, cache_seqlens, strict=True)]
    query = torch.cat((q_nope, q_pe), dim=-1)
    starts = cache_starts or [0] * len(query_lengths)
    return attend_sequences(query, query_lengths, pairs, starts, softmax_scale, window, sinks)
