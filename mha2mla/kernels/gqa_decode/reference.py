"""The oracle of ``gqa_decode``: plain torch, any device, float64-capable. Speed may not live here."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels.split_kv.reference import rows_of, visible_tokens, weights


def gqa_decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    cache_starts: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[Tensor, Tensor]:
    """``softmax(softmax_scale * q K^T) V`` over each sequence's pages, one kv head for every H / G query heads.

    Shapes as in :func:`mha2mla.kernels.gqa_decode`, arithmetic and results as of ``mla_decode_reference``.
    """
    num_pages, page_size, groups, _ = k_cache.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    capacity = block_table.shape[1] * page_size if num_pages else 0
    visible = visible_tokens(cache_seqlens, cache_starts, capacity, q.shape[1], causal, window, sinks)
    used, page, row = rows_of(visible, block_table, page_size, num_pages)
    k, v = (torch.where(used[..., None, None], cache[page, row].to(dtype), 0) for cache in (k_cache, v_cache))

    score = torch.einsum("bsgrd,btgd->bgrst", q.to(dtype).unflatten(2, (groups, -1)), k).flatten(1, 2)
    score = torch.where(visible, score * softmax_scale, -torch.inf)
    lse = torch.logsumexp(score, dim=-1)
    weight = weights(score, lse)
    out = torch.einsum("bgrst,btgd->bsgrd", weight.unflatten(1, (groups, -1)), v).flatten(2, 3)
    return out.to(q.dtype), lse
