"""Rotary positions of tokens where the cache holds none (``config.has_rope_cache`` is False).

A row of such a cache is turned, when it is read, by its place in the sequence's cache; so are queries. Scores depend on
distances alone, so that is right for every numbering of tokens that counts on one by one, padding included or not, and
wrong for every other one (gaps behind right padding, several tokens at one position): those are refused. The host looks
once a prefill; a single token on an accelerator, a captured CUDA graph and a compiled step are asserted by the device.
Without a cache any ``position_ids`` are right, and they are not looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mha2mla.modeling.visibility import first_shown, host_may_look, is_padding_mask

REFUSED_POSITIONS = (
    "position_ids do not count on from each row's first visible token; a cache that keeps no rotary keys "
    "(has_rope_cache is False) expects them one by one without gaps: the place in the cache, padding counted or not "
    "(a batch that is padded on the right: set tokenizer.padding_side = 'left')"
)


def places(
    cache: Cache, position_ids: Tensor | None, attention_mask: Any, query_length: int, device: torch.device
) -> Tensor:
    """[1, S] int64, where ``query_length`` new tokens come in every row of ``cache``; call before they are appended.

    Args:
        position_ids: [B or 1, S] that the caller gave, or None.
        attention_mask: [B, at least cached + S], or [B, 1, S, T], or None; other masks are not looked into.

    Raises:
        ValueError: the ``position_ids`` of tokens that are seen are neither their places, nor these less the first
            place that is seen; under a 4-D mask, not their places less any one number. Where the host may not look, a
            RuntimeError by the device.
    """
    place = torch.arange(query_length, device=device) + cache.get_seq_length()
    if position_ids is not None:
        fit = _are_places(position_ids.to(device), attention_mask, place, cache, query_length)
        if not host_may_look(position_ids, query_length):
            torch._assert_async(fit, REFUSED_POSITIONS)
        elif not fit:
            raise ValueError(f"{REFUSED_POSITIONS}; they are {position_ids.tolist()!s:.200}")
    return place[None]


def _are_places(position_ids: Tensor, attention_mask: Any, place: Tensor, cache: Cache, query_length: int) -> Tensor:
    """[] bool, on the device of ``place`` [S]."""
    ahead = position_ids - place
    if isinstance(attention_mask, dict):  # by layer type, of a static cache
        attention_mask = attention_mask.get("full_attention")
    if attention_mask is None:
        return (ahead == 0).all()
    if is_padding_mask(attention_mask):
        shown = attention_mask.to(place.device).bool()
        # Clamped: a mask that is too short is the base model's to refuse, and no out-of-bounds read on a device.
        hidden = ~shown[:, place.clamp(max=shown.shape[1] - 1)]
        first = first_shown(shown)[:, None]
        if query_length == 1:  # asked in every step: no sum over tokens of a row, and the two answers as one product
            return ((ahead * (ahead + first) == 0) | hidden).all()
        return (((ahead == 0) | hidden).all(-1) | ((ahead == -first) | hidden).all(-1)).all()
    if not isinstance(attention_mask, Tensor):
        return torch.ones((), dtype=torch.bool, device=place.device)
    # A token that is seen sees itself.
    _, start = cache.get_mask_sizes(query_length, 0)
    own = attention_mask.to(place.device)[:, 0, torch.arange(query_length, device=place.device), place - start]
    hidden = ~own if own.dtype == torch.bool else own != 0
    ahead = ahead.expand(hidden.shape[0], -1)
    bound = torch.iinfo(ahead.dtype).max
    return (ahead.masked_fill(hidden, -bound).amax(-1) <= ahead.masked_fill(hidden, bound).amin(-1)).all()
