"""The oracle of the append ops: plain torch, any device, float64-capable. Speed may not live here."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def rotate_reference(
    x: Tensor, positions: Tensor, inv_freq: Tensor, *, attention_scaling: float = 1.0, interleaved: bool = False
) -> Tensor:
    """RoPE (arXiv 2104.09864) of x [N, heads, d_r] at positions [N] by inv_freq [G, d_r / 2], G dividing heads.

    Angles are float32 products of position and frequency, as transformers' (float64 for float64 inputs); the result is
    rounded once, to the dtype of x. ``attention_scaling`` (YaRN, longrope) leaves pairs of frequency zero alone.
    """
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    arithmetic = torch.float64 if x.dtype == torch.float64 else torch.float32
    angle = positions.to(arithmetic)[:, None, None] * inv_freq.to(arithmetic)  # [N, G, d_r / 2]
    angle = angle.repeat_interleave(x.shape[1] // inv_freq.shape[0], dim=1)
    factor = torch.where(inv_freq == 0, 1.0, attention_scaling).to(arithmetic)
    factor = factor.repeat_interleave(x.shape[1] // inv_freq.shape[0], dim=0)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    wide = x.to(arithmetic)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)


def append_reference(rows: Tensor, keys: Tensor, row_cache: Tensor, rope_cache: Tensor, slots: Tensor) -> None:
    """Writes rows [N, width] and rotated keys [N, G, d_r] to slots [N] of row_cache [P, page, width] and rope_cache
    [P, page, G, d_r]; a slot outside 0 … P · page − 1 writes nothing. Reads no tensor on the host."""
    write_rows(((row_cache, rows), (rope_cache, keys)), slots)


def write_rows(pairs: Iterable[tuple[Tensor, Tensor]], slots: Tensor) -> None:
    """For pairs of a cache [P, page, ...] and new rows [N, ...]: each row to its slot, or nowhere."""
    pairs = list(pairs)
    page = pairs[0][0].shape[1]
    row_cache = pairs[0][0]
    capacity = row_cache.shape[0] * page
    if capacity == 0 or not len(slots):
        return
    slots = slots.long()
    valid = (slots >= 0) & (slots < capacity)
    # Tokens without a slot rewrite what the first token with one writes; if there is none, what is there already.
    chosen = valid.long().argmax()
    source = torch.where(valid, torch.arange(len(slots), device=slots.device), chosen)
    slot = torch.where(valid, slots, slots.index_select(0, chosen[None]).clamp(0, capacity - 1))
    for cache, new in pairs:
        where = slot // page, slot % page
        keep = valid.any().expand(len(slots)).view(-1, *[1] * (new.ndim - 1))
        cache[where] = torch.where(keep, new[source], cache[where])
