"""What the oracles of paged decode ops share: which tokens a query sees, and where they lie. Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


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
