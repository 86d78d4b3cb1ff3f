"""The oracle of paged decode ops: which tokens a query sees, where they lie, and attention over them. Plain torch, any
device, float64-capable. Speed may not live here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mha2mla.kernels.layouts import accumulator


@dataclass(frozen=True)
class Tokens:
    """Cached tokens of B sequences, T places each.

    Attributes:
        visible: [B, 1, S_q, T] bool, which each new token sees.
        used: [B, T], whether to read the token: some query sees it, and it has a page.
        page, row: [B, T], where it is; page 0 for tokens that are not read.
        dtype: of the arithmetic: float64 for float64 queries, float32 for all others.
    """

    visible: Tensor
    used: Tensor
    page: Tensor
    row: Tensor
    dtype: torch.dtype

    def read(self, cache: Tensor) -> Tensor:
        """[B, T, ...] of cache [P, page, ...]; 0 for tokens that are not read, whose NaN do not matter."""
        used = self.used.view(*self.used.shape, *[1] * (cache.ndim - 2))
        return torch.where(used, cache[self.page, self.row].to(self.dtype), 0)


def find_tokens(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    causal: bool = True,
    cache_starts: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> Tokens:
    """The tokens of a call, of whose query [B, S_q, ...] and cache [P, page, ...] shape and dtype are looked at; the
    others as in :func:`mha2mla.kernels.mla_decode` and :func:`mha2mla.kernels.plan_mla_decode`.

    A token that is seen and has no page counts as zeros, as where TMA reads outside a tensor; on the CPU, where looking
    costs nothing, it is an error. Reads no tensor on the host but of the CPU.

    Raises:
        ValueError: on the CPU, a token that a query sees has no page in ``block_table``.
    """
    num_pages, page_size = cache.shape[:2]
    capacity = block_table.shape[1] * page_size if num_pages else 0
    token = torch.arange(capacity, device=cache_seqlens.device)
    length = cache_seqlens.long().clamp(0, capacity)[:, None]
    start = torch.zeros_like(length) if cache_starts is None else cache_starts.long().clamp(min=0)[:, None]
    limit = length[:, :, None].expand(-1, 1, query.shape[1])  # [B, 1, S_q], first token that a query does not see
    if causal:  # bottom-right aligned: the last query sees everything
        limit = limit - (query.shape[1] - 1) + torch.arange(query.shape[1], device=token.device)
    visible = (token >= start)[:, None, None] & (token < limit[..., None])
    if window is not None:
        visible = visible & ((token >= limit[..., None] - window) | (token < start + sinks)[:, None, None])
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
    row = (token % page_size).expand_as(page)
    return Tokens(visible, used, torch.where(used, page, 0), row, accumulator(query.dtype))


def attend(
    queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], values: Tensor, tokens: Tokens, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """``softmax(softmax_scale * sum_i queries[i] keys[i]^T) values``: in the dtype of the arithmetic, but for ``out``.

    Args:
        queries: parts [B, S_q, H, d_i]. keys: parts [B, T, G_i, d_i], G_i dividing H. values: [B, T, G, d].
        tokens: of the call.
        softmax_scale: of the scores.

    Returns:
        ``out [B, S_q, H, d]`` in the dtype of the queries and ``lse [B, H, S_q]`` (natural log). A query that sees no
        token gives zeros and ``-inf``.
    """
    score = 0
    for query, key in zip(queries, keys, strict=True):
        grouped = query.to(tokens.dtype).unflatten(2, (key.shape[2], -1))
        score = score + torch.einsum("bsgrd,btgd->bgrst", grouped, key).flatten(1, 2)
    score = torch.where(tokens.visible, score * softmax_scale, -torch.inf)
    lse = torch.logsumexp(score, dim=-1)
    # Not exp(score - lse): a log-sum-exp of 8 is rounded by up to 5e-7 in float32, and all weights with it.
    weight = torch.where((lse == -torch.inf)[..., None], 0, torch.softmax(score, dim=-1))
    out = torch.einsum("bgrst,btgd->bsgrd", weight.unflatten(1, (values.shape[2], -1)), values)
    return out.flatten(2, 3).to(queries[0].dtype), lse
