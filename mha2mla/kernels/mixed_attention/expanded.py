"""Long queries over a paged cache: gather, expand, attend, and merge where a context comes in chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mha2mla.kernels.attention_combine.api import attention_combine
from mha2mla.kernels.mixed_attention.layout import Wave
from mha2mla.kernels.mixed_attention.parts import ChunkPart

MAX_PARTIALS = 8  # partial results held before they are merged

# attend(tokens of the batch, where the keys are, cu_seqlens_q, cu_seqlens_k, longest query, and by name causal,
# out [tokens, H, d_v], return_lse) -> out, or out and lse [H, tokens]
Attend = Callable[..., "Tensor | tuple[Tensor, Tensor]"]


def gather_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """cache [P, page, ...] at slots [T]: [T, ...]; zeros for a negative slot, whose token has no page: it must not see
    another sequence's. Never copies the whole cache, whatever its strides."""
    if cache.dtype == torch.float8_e4m3fn:  # not every device's indexing knows it; its bytes it does
        return gather_rows(cache.view(torch.uint8), slots).view(cache.dtype)
    page, known = cache.shape[1], slots.clamp_min(0)
    if cache.stride(0) == page * cache.stride(1):  # pages lie one behind the other
        rows = cache.as_strided((cache.shape[0] * page, *cache.shape[2:]), cache.stride()[1:], cache.storage_offset())
        rows = rows.index_select(0, known)
    else:
        rows = cache[known // page, known % page]
    return rows.masked_fill_((slots < 0).view(-1, *[1] * (rows.ndim - 1)), 0)


def expand(latent: Tensor, decoder: Tensor) -> Tensor:
    """latent [T, d_c] through decoder [h_kv, width, d_c]: [T, h_kv, width] (DeepSeek-V2, arXiv 2405.04434, 2.1)."""
    return F.linear(latent, decoder.flatten(0, 1)).unflatten(-1, decoder.shape[:2])


def attend_wave(
    attend: Attend,
    wave: Wave,
    cu_seqlens_q: Tensor,
    chunks: tuple[ChunkPart, ...],
    out: Tensor,
    backend: str | None = None,
) -> None:
    """Attention of the sequences of a wave.

    Args:
        attend: over some keys of the cache.
        cu_seqlens_q, chunks: of the plan.
        out: [N, H, d_v] of the whole batch; the wave's rows are written.
        backend: of the merges, as in :func:`mha2mla.kernels.attention_combine`.
    """
    if not wave.tokens:
        return
    tokens = slice(wave.first_token, wave.first_token + wave.tokens)
    mine, longest = out[tokens], max(wave.query_lengths)
    if len(chunks) == 1:
        attend(tokens, chunks[0], cu_seqlens_q, chunks[0].cu_seqlens_k, longest, causal=True, out=mine)
        return
    partial_out = out.new_empty(min(MAX_PARTIALS, len(chunks)), 1, *mine.shape)
    lses: list[Tensor] = []
    for chunk, part in zip(wave.chunks, chunks, strict=True):
        if len(lses) == MAX_PARTIALS:
            merged, lse = _merge(partial_out, lses, backend)
            partial_out[0].copy_(merged)
            lses = [lse]
        _, lse = attend(
            tokens, part, cu_seqlens_q, part.cu_seqlens_k, longest, causal=chunk.causal,
            out=partial_out[len(lses), 0], return_lse=True,
        )  # fmt: skip
        lses.append(lse[None])  # [1, H, tokens]
    out[tokens] = _merge(partial_out, lses, backend)[0][0]


def _merge(partial_out: Tensor, lses: list[Tensor], backend: str | None) -> tuple[Tensor, Tensor]:
    return attention_combine(partial_out[: len(lses)], torch.stack(lses), backend=backend)
