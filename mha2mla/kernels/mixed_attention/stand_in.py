"""Plain torch in place of attention_varlen and gqa_decode, until they are there."""

from __future__ import annotations

import torch

from mha2mla.kernels.mla_decode.reference import mla_decode_reference


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, *, softmax_scale, causal=True, out=None, return_lse=False,
    backend=None,
):  # fmt: skip
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    tokens, keys, heads = q.shape[0], k.shape[0], q.shape[1]
    query, key = torch.arange(tokens, device=q.device), torch.arange(keys, device=q.device)
    sq = torch.searchsorted(cu_seqlens_q[1:], query, right=True)
    sk = torch.searchsorted(cu_seqlens_k[1:], key, right=True)
    seen = sq[:, None] == sk[None]
    if causal:
        last = cu_seqlens_k[sq + 1] - (cu_seqlens_q[sq + 1] - query)
        seen = seen & (key[None] <= last[:, None])
    kk, vv = (x.to(wide).repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    score = torch.einsum("qhd,khd->hqk", q.to(wide), kk) * softmax_scale
    score = torch.where(seen, score, -torch.inf)
    lse = torch.logsumexp(score, -1)
    weight = torch.exp(score - torch.where(lse == -torch.inf, 0, lse)[..., None])
    made = torch.einsum("hqk,khd->qhd", weight, vv).to(q.dtype)
    if out is not None:
        out.copy_(made)
        made = out
    return (made, lse) if return_lse else made


def gqa_decode(
    q, k_cache, v_cache, block_table, cache_seqlens, *, softmax_scale, causal=True, cache_starts=None, plan=None,
    out=None, return_lse=False, backend=None,
):  # fmt: skip
    groups, heads = k_cache.shape[2], q.shape[2]
    outs = []
    for g in range(groups):
        mine = q[:, :, g * heads // groups : (g + 1) * heads // groups]
        # The decode op with the value as its latent: no query against it, all of the key as rotary part.
        latent = v_cache[:, :, g]
        zero = mine.new_zeros(*mine.shape[:3], latent.shape[-1])
        outs.append(
            mla_decode_reference(
                zero, mine, latent, k_cache[:, :, g : g + 1], block_table, cache_seqlens, softmax_scale=softmax_scale,
                causal=causal, cache_starts=cache_starts,
            )[0]
        )  # fmt: skip
    return torch.cat(outs, 2)
