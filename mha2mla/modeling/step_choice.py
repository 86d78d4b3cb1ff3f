"""Which layers of a step over a LatentCache their backends serve: by geometry, lengths, and what the mask shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from mha2mla.kernels import MAX_DECODE_QUERY_LENGTH
from mha2mla.modeling.cache import LatentCache
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.step import AttentionStep
from mha2mla.modeling.visibility import (
    REFUSED_MASK,
    are_side_by_side,
    are_to_the_end,
    host_may_look,
    is_padding_mask,
    is_recorded,
    visible_tokens,
)


def choose_step(
    config: MHA2MLAConfig,
    attentions: Sequence[nn.Module],
    cache: Cache | None,
    attention_mask: Any,
    position_ids: Tensor | None,
    shape: tuple[int, int],
    output_attentions: bool,
) -> AttentionStep | None:
    """What the layers share while they append these new tokens to a LatentCache; None: they append them one by one, and
    keep gradients.

    Depends on shapes and on what the host knows of the cache, and on the mask's values where the host may look at them
    (``visibility.py``).

    Args:
        shape: of the new tokens, [B, S].

    Raises:
        ValueError: what ``config.attention_backend`` names refuses the model, or cannot serve what is cached.
    """
    if not isinstance(cache, LatentCache):
        return None
    batch, query_length = shape
    cache.serve_by(config.attention_backend)
    shown, starts, obeys = None, None, attention_mask is None
    if is_padding_mask(attention_mask):
        obeys = cache.padding_is_left and query_length <= MAX_DECODE_QUERY_LENGTH
        if host_may_look(attention_mask, query_length):
            shown = visible_tokens(attention_mask, cache.get_seq_length() + query_length)
            found = torch.stack((are_side_by_side(shown), are_to_the_end(shown)))
            side_by_side, to_the_end, *starts = torch.cat((found, shown.starts)).tolist()
            cache.padding_is_left = bool(to_the_end)
            # A prompt's last logits are looked at, also those of padding.
            obeys = bool(to_the_end if cache.is_empty else side_by_side)
    if query_length > MAX_DECODE_QUERY_LENGTH and is_recorded(position_ids.device):
        obeys = False  # their plans are the host's work, from lengths that a replay does not have
    # A plan is for pages that do not grow under it.
    if (cache.is_empty and torch.is_grad_enabled()) or not _open(attentions, cache, batch, query_length):
        return None
    attends = cache.attends(query_length, obeys and not output_attentions)
    if any(attends) and is_padding_mask(attention_mask) and shown is None:
        shown = visible_tokens(attention_mask, cache.get_seq_length() + query_length)
        torch._assert_async(are_side_by_side(shown), REFUSED_MASK)
    batches = cache.place(position_ids, shown.starts if any(attends) and shown is not None else None)
    return AttentionStep(cache.layers, batches, cache.plan(attends, batches, query_length, starts))


def _open(attentions: Sequence[nn.Module], cache: LatentCache, batch: int, query_length: int) -> bool:
    """Makes room in all layers; False where an empty cache cannot know where its layers will run (offloading)."""
    kinds = []
    for layer, attention in zip(cache.layers, attentions, strict=True):
        weight = attention.v_b_proj
        if layer.is_initialized:
            kinds.append((layer.dtype, layer.device))
        elif weight.device.type == "meta":
            return False
        else:
            autocast = torch.is_autocast_enabled(weight.device.type)
            dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
            kinds.append((dtype, weight.device))
    cache.open(batch, query_length, kinds)
    return True
