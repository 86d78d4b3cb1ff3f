"""The expanded form over a paged cache: gather, expand, attend, and merge where a context comes in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mha2mla.kernels.attention_combine.api import attention_combine
from mha2mla.kernels.mixed_attention.layout import Wave
from mha2mla.kernels.mixed_attention.plan import ChunkPart

MAX_PARTIALS = 8  # partial results held before they are merged

# key [T, heads, d_qk] and value [T, heads, d_v] of cached tokens at slots [T]
ReadCache = Callable[[Tensor], tuple[Tensor, Tensor]]


def gather_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """cache [P, page, ...] at slots [T]: [T, ...]. Never copies the whole cache, whatever its strides."""
    page = cache.shape[1]
    if cache.stride(0) == page * cache.stride(1):  # pages lie one behind the other
        rows = cache.as_strided((cache.shape[0] * page, *cache.shape[2:]), cache.stride()[1:], cache.storage_offset())
        return rows.index_select(0, slots)
    return cache[slots // page, slots % page]


def expand_latent(
    latent: Tensor, k_pe: Tensor, k_up: Tensor | None, v_up: Tensor, num_heads: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of every expanded head (DeepSeek-V2, arXiv 2405.04434, equations 10 and 11).

    Args:
        latent: [T, d_c].
        k_pe: [T, G, d_r], rotated.
        k_up: [h_kv, d_n, d_c], or None for d_n = 0.
        v_up: [h_kv, d_v, d_c].
        num_heads: E, a common multiple of h_kv and G.

    Returns:
        [T, E, d_n + d_r] and [T, E, d_v].
    """

    def decoded(decoder: Tensor) -> Tensor:
        return _repeat(F.linear(latent, decoder.flatten(0, 1)).unflatten(-1, decoder.shape[:2]), num_heads)

    key = _repeat(k_pe, num_heads)
    if k_up is not None:
        key = torch.cat((decoded(k_up), key), dim=-1)
    return key.contiguous(), decoded(v_up).contiguous()


def expanded_heads(num_key_value_heads: int, num_rope_heads: int) -> int:
    """The fewest heads that both kv heads and rope heads divide."""
    return math.lcm(num_key_value_heads, num_rope_heads)


def _repeat(x: Tensor, heads: int) -> Tensor:
    """[T, n, d] -> [T, heads, d], every head ``heads / n`` times side by side."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def attend_wave(
    attend: Callable[..., tuple[Tensor, Tensor] | Tensor],
    query: Tensor,
    read: ReadCache,
    wave: Wave,
    cu_seqlens_q: Tensor,
    chunks: tuple[ChunkPart, ...],
    out: Tensor,
) -> None:
    """Attention of the sequences of a wave.

    Args:
        attend: ``attention_varlen`` with scale and backend bound.
        query: [N, H, d_qk] of the whole batch.
        read: keys and values at slots of the cache.
        cu_seqlens_q, chunks: of the plan.
        out: [N, H, d_v] of the whole batch; the wave's rows are written.
    """
    if not wave.tokens:
        return
    tokens = slice(wave.first_token, wave.first_token + wave.tokens)
    mine, longest = query[tokens], max(wave.query_lengths)
    if len(chunks) == 1:
        key, value = read(chunks[0].slots)
        attend(mine, key, value, cu_seqlens_q, chunks[0].cu_seqlens_k, longest, causal=True, out=out[tokens])
        return
    partial_out = out.new_empty(min(MAX_PARTIALS, len(chunks)), 1, *out[tokens].shape)
    lses: list[Tensor] = []
    for chunk, part in zip(wave.chunks, chunks, strict=True):
        if len(lses) == MAX_PARTIALS:
            merged, lse = _merge(partial_out, lses)
            partial_out[0].copy_(merged)
            lses = [lse]
        key, value = read(part.slots)
        _, lse = attend(
            mine, key, value, cu_seqlens_q, part.cu_seqlens_k, longest, causal=chunk.causal,
            out=partial_out[len(lses), 0], return_lse=True,
        )  # fmt: skip
        lses.append(lse[None])  # [1, H, tokens]
    out[tokens] = _merge(partial_out, lses)[0][0]


def _merge(partial_out: Tensor, lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    return attention_combine(partial_out[: len(lses)], torch.stack(lses))
