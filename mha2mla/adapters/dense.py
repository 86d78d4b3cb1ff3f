"""Decode over unpaged caches as MHA2MLA's reference keeps them: latents [B, T, d_c], rotary keys [B, H, T, d_r]."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import explain_mla_decode, mla_decode

SMALLEST_PAGE, STAGED_PAGE = 16, 64  # of what kernels take, and of a copy that is made for them


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
    is used where it lies; any other is copied, 2 G d_r bytes a token and call: keep such a cache token-major.

    Tokens are read as pages of the largest power of two that divides T, at most 128. Kernels take pages from 16 on:
    where T is no multiple of 16 (8191, 2050) and a kernel would serve the call, both caches are copied to pages of 64
    every time, and a UserWarning says so: allocate room for a multiple of 16 and give ``cache_seqlens``.

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
    keys = k_pe.transpose(1, 2)  # [B, T, G, d_r]
    if tokens and page < SMALLEST_PAGE and backend != "reference" and _kernel_serves(q_latent, q_pe, keys):
        warnings.warn(
            f"latent has {tokens} tokens of room; kernels take multiples of {SMALLEST_PAGE}: both caches are copied in"
            " every call",
            stacklevel=2,
        )
        # What lies behind the tokens must stay invisible.
        cache_seqlens = None if cache_seqlens is None else cache_seqlens.clamp(max=tokens)
        page, behind = STAGED_PAGE, -tokens % STAGED_PAGE
        latent, keys = F.pad(latent, (0, 0, 0, behind)), F.pad(keys, (0, 0, 0, 0, 0, behind))
    pages = latent.shape[1] // page
    keys = keys if keys.stride()[2:] == (keys.shape[3], 1) or keys.shape[2] == 1 else keys.contiguous()
    block_table = torch.arange(batch * pages, dtype=torch.int32, device=latent.device).view(batch, pages)
    if cache_seqlens is None:
        cache_seqlens = torch.full((batch,), tokens, dtype=torch.int32, device=latent.device)
    out, lse = mla_decode(
        q_latent.transpose(1, 2), q_pe.transpose(1, 2), _paged(latent, page), _paged(keys, page), block_table,
        cache_seqlens, softmax_scale=softmax_scale, causal=causal, return_lse=True, backend=backend,
    )  # fmt: skip
    return (out.transpose(1, 2), lse) if return_lse else out.transpose(1, 2)


def _kernel_serves(q_latent: Tensor, q_pe: Tensor, keys: Tensor) -> bool:
    """Whether a kernel would take the caches in pages of STAGED_PAGE tokens. keys: [B, T, G, d_r]."""
    heads, seqlen_q, latent = q_latent.shape[1:]
    geometry = MLAGeometry(heads, keys.shape[2], latent, q_pe.shape[3])
    return explain_mla_decode(geometry, STAGED_PAGE, q_latent.dtype, q_latent.device, seqlen_q) is None


def _paged(cache: Tensor, page: int) -> Tensor:
    """[B, T, ...] as [B * T / page, page, ...]; a copy only if sequences do not lie one behind the other."""
    return cache.unflatten(1, (-1, page)).flatten(0, 1)
