"""Cached tokens that a 2-D attention mask shows, and the masks that the absorbed form can obey.

The absorbed form attends, in every sequence, to one run of tokens: from a first one up to the query. So it can obey a
mask [B, T] if in every sequence the tokens that it shows lie side by side: padding in front of them, padding behind
them (queries that are padding themselves mean nothing), but no hole. The expanded form obeys every mask.

Where the host may look at the mask, it looks, and a step over a mask with a hole runs the expanded form. It may look on
a CPU, and once a call where several tokens come together. A single token on an accelerator, a captured CUDA graph and a
compiled step are not worth a synchronisation: after a look that found zeros behind ones they run the expanded form,
else the absorbed one, and the device asserts that there is no hole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mha2mla.modeling.modeling_mha2mla import first_shown

REFUSED_MASK = (
    "attention_mask hides tokens between visible ones, and the absorbed form cannot; expected left padding at most "
    "(tokenizer.padding_side = 'left'), or attention_backend 'mla_expanded'"
)


class VisibleTokens(NamedTuple):
    """Cached and new tokens that a mask shows.

    Attributes:
        starts: [B] int32, the first token shown; 0 where none is.
        counts: [B], how many are shown.
        stops: [B], behind the last one shown; 0 where none is.
        length: int or [], tokens that are cached or new.
    """

    starts: Tensor
    counts: Tensor
    stops: Tensor
    length: int | Tensor


def are_side_by_side(shown: VisibleTokens) -> Tensor:
    """[] bool, no sequence has hidden tokens between shown ones."""
    return (shown.stops - shown.starts == shown.counts).all()


def are_to_the_end(shown: VisibleTokens) -> Tensor:
    """[] bool, nor behind them: zeros, then ones."""
    return ((shown.starts + shown.counts == shown.length) | (shown.counts == 0)).all()


def visible_tokens(attention_mask: Tensor, length: int | Tensor) -> VisibleTokens:
    """Tokens that ``attention_mask`` [B, T] shows of the first ``length`` (int or []) tokens, on its device."""
    token = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
    shown = attention_mask.to(torch.bool)
    if isinstance(length, Tensor) or length < attention_mask.shape[1]:
        length = length.to(token.device) if isinstance(length, Tensor) else length
        shown = shown & (token <= length)
    return VisibleTokens(first_shown(shown).int(), shown.sum(dim=-1), (shown * token).amax(dim=-1), length)


def check_mask(attention_mask: Tensor, batch: int, query_length: int, cache: Cache | None) -> Tensor:
    """``attention_mask`` as [B, T], T at least the tokens that are cached and new.

    Args:
        attention_mask: [B or 1, T].
        cache: a LatentCache, or None.

    Raises:
        ValueError: another number of sequences, or of tokens. (How many a static cache holds is known to its device
            alone, which asserts it.)
    """
    if attention_mask.shape[0] not in (1, batch):
        raise ValueError(f"attention_mask.shape is {tuple(attention_mask.shape)}; expected {batch} sequences")
    tokens = query_length
    if cache is not None:
        cached = cache.get_seq_length()
        if isinstance(cached, Tensor):
            if attention_mask.shape[1] < cache.capacity:
                torch._assert_async(
                    cached + query_length <= attention_mask.shape[1],
                    f"attention_mask has {attention_mask.shape[1]} tokens; expected as many as are cached and new",
                )
        else:
            tokens += cached
    if attention_mask.shape[1] < tokens:
        raise ValueError(
            f"attention_mask.shape is {tuple(attention_mask.shape)}; expected at least {tokens} tokens, those that are "
            "cached and new"
        )
    return attention_mask.expand(batch, -1)
