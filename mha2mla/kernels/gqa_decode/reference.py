"""The oracle of ``gqa_decode``: plain torch, any device, float64-capable. Speed may not live here."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mha2mla.kernels.split_kv.reference import attend, find_tokens


def gqa_decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    **visibility: Any,
) -> tuple[Tensor, Tensor]:
    """``softmax(softmax_scale * q K^T) V`` over each sequence's pages, one kv head for every H / G query heads.

    Shapes as in :func:`mha2mla.kernels.gqa_decode`; ``visibility``, arithmetic and results as of
    ``mla_decode_reference``.
    """
    tokens = find_tokens(q, k_cache, block_table, cache_seqlens, **visibility)
    return attend((q,), (tokens.read(k_cache),), tokens.read(v_cache), tokens, softmax_scale)
