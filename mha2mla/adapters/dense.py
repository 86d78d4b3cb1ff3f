"""Decode over unpaged caches as MHA2MLA's reference keeps them: latents [B, T, d_c], rotary keys [B, H, T, d_r]."""

from __future__ import annotations

import torch
from torch import Tensor

from mha2mla.kernels import mla_decode


def mla_decode_dense(
    q_latent: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    cache_seqlens: Tensor | None = None,
    *,
    softmax_scale: float,
    causal: bool = True,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`mla_decode` for caches without pages, heads before tokens.

    A head-major tensor that is a transposed view of token-major memory (``torch.empty(B, T, G, d_r).transpose(1, 2)``)
    is used where it lies; any other is copied, 2 G d_r bytes a token and call: keep such a cache token-major. T is one
    page where it is a power of two from 16 on, else tokens are read as pages of the largest power of two that divides
    T; a kernel serves those from 16 on.

    Args:
        q_latent: [B, H, S_q, d_c]. q_pe: [B, H, S_q, d_r], rotated.
        latent: [B, T, d_c]. k_pe: [B, G, T, d_r], rotated; G divides H.
        cache_seqlens: [B] int32, valid tokens; None: all T.
        softmax_scale, causal, return_lse, backend: as in :func:`mla_decode`.

    Returns:
        out [B, H, S_q, d_c], and with ``return_lse`` lse [B, H, S_q].

    Raises:
        ValueError: as :func:`mla_decode`.
    """
    batch, tokens = latent.shape[:2]
    page = min(tokens & -tokens, 128) if tokens else 1
    pages = tokens // page
    keys = k_pe.transpose(1, 2)  # [B, T, G, d_r]
    keys = keys if keys.stride()[2:] == (keys.shape[3], 1) or keys.shape[2] == 1 else keys.contiguous()
    block_table = torch.arange(batch * pages, dtype=torch.int32, device=latent.device).view(batch, pages)
    if cache_seqlens is None:
        cache_seqlens = torch.full((batch,), tokens, dtype=torch.int32, device=latent.device)
    out, lse = mla_decode(
        q_latent.transpose(1, 2), q_pe.transpose(1, 2), _paged(latent, page), _paged(keys, page), block_table,
        cache_seqlens, softmax_scale=softmax_scale, causal=causal, return_lse=True, backend=backend,
    )  # fmt: skip
    return (out.transpose(1, 2), lse) if return_lse else out.transpose(1, 2)


def _paged(cache: Tensor, page: int) -> Tensor:
    """[B, T, ...] as [B * T / page, page, ...]; a copy only if sequences do not lie one behind the other."""
    return cache.unflatten(1, (-1, page)).flatten(0, 1)
