"""The oracle of ``mla_decode``: plain torch, any device, float64-capable. Speed may not live here."""

from __future__ import annotations

import torch
from torch import Tensor


def mla_decode_reference(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    cache_starts: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[Tensor, Tensor]:
    """``softmax(softmax_scale * (q_latent c^T + q_pe k_pe^T)) c`` over each sequence's pages (DeepSeek-V2, 2.1).

    Shapes as in :func:`mha2mla.kernels.mla_decode`; ``window`` and ``sinks`` as in
    :func:`mha2mla.kernels.plan_mla_decode`. The arithmetic is float64 for float64 inputs and float32 for all
    others; only ``out`` is rounded to the input's dtype. Values of tokens that no query sees are never used, so NaN in
    unused pages does not matter. Reads no tensor on the host.

    Returns:
        ``out [B, S_q, H, d_c]`` in the dtype of ``q_latent`` and ``lse [B, H, S_q]`` (natural log) in the dtype of the
        arithmetic. A query that sees no token gives zeros and ``-inf``.
    """
    batch, seqlen_q, heads, _ = q_latent.shape
    num_pages, page_size, num_rope_heads, rope_dim = rope_cache.shape
    dtype = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    capacity = block_table.shape[1] * page_size if num_pages else 0
    visible = visible_tokens(cache_seqlens, cache_starts, capacity, seqlen_q, causal, window, sinks)
    used, page, row = rows_of(visible, block_table, page_size, num_pages)
    latent = torch.where(used[..., None], latent_cache[page, row].to(dtype), 0)  # [B, T, d_c]
    k_pe = torch.where(used[..., None, None], rope_cache[page, row].to(dtype), 0)  # [B, T, G, d_r]

    grouped = q_pe.to(dtype).view(batch, seqlen_q, num_rope_heads, heads // num_rope_heads, rope_dim)
    score = torch.einsum("bshd,btd->bhst", q_latent.to(dtype), latent)
    score = score + torch.einsum("bsgrd,btgd->bgrst", grouped, k_pe).reshape(score.shape)
    score = torch.where(visible, score * softmax_scale, -torch.inf)
    lse = torch.logsumexp(score, dim=-1)
    weight = weights(score, lse)
    out = torch.einsum("bhst,btd->bshd", weight, latent)
    return out.to(q_latent.dtype), lse


def weights(score: Tensor, lse: Tensor) -> Tensor:
    """Softmax of scores [..., T] over their tokens; 0 where ``lse`` [...] says that none is seen.

    Not ``exp(score - lse)``: a log-sum-exp of 8 is rounded by up to 5e-7 in float32, and all weights with it.
    """
    return torch.where((lse == -torch.inf)[..., None], 0, torch.softmax(score, dim=-1))


def visible_tokens(
    cache_seqlens: Tensor,
    cache_starts: Tensor | None,
    capacity: int,
    seqlen_q: int,
    causal: bool,
    window: int | None,
    sinks: int,
) -> Tensor:
    """[B, 1, S_q, capacity] bool: which cached token each new token sees."""
    token = torch.arange(capacity, device=cache_seqlens.device)
    length = cache_seqlens.long().clamp(0, capacity)[:, None]
    start = torch.zeros_like(length) if cache_starts is None else cache_starts.long().clamp(min=0)[:, None]
    limit = length[:, :, None].expand(-1, 1, seqlen_q)  # [B, 1, S_q], first token that a query does not see
    if causal:  # bottom-right aligned: the last query sees everything
        limit = limit - (seqlen_q - 1) + torch.arange(seqlen_q, device=token.device)
    visible = (token >= start)[:, None, None] & (token < limit[..., None])
    if window is not None:
        visible = visible & ((token >= limit[..., None] - window) | (token < start + sinks)[:, None, None])
    return visible


def rows_of(visible: Tensor, block_table: Tensor, page_size: int, num_pages: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T] each: whether to read the token, and its page and row there (page 0 for tokens that are not read).

    Tokens are read that some query sees and that have a page. One that is seen and has none counts as zeros, as where
    TMA reads outside a tensor; on the CPU, where looking costs nothing, it is an error.

    Raises:
        ValueError: on the CPU, a token that a query sees has no page in ``block_table``.
    """
    token = torch.arange(visible.shape[-1], device=visible.device)
    seen = visible.any(2)[:, 0]
    page = block_table.long()[:, token // page_size]
    there = (page >= 0) & (page < num_pages)
    if seen.device.type == "cpu" and bool((seen & ~there).any()):
        row, first = (seen & ~there).nonzero()[0].tolist()
        raise ValueError(
            f"block_table[{row}, {first // page_size}] is {int(page[row, first])}, and token {first} of the sequence is"
            f" visible; expected a page from 0 to {num_pages - 1}"
        )
    used = seen & there
    return used, torch.where(used, page, 0), (token % page_size).expand_as(page)
