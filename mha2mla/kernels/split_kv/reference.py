"""Oracles of paged decode ops, float64-capable: visible tokens, attention over them, and the planner."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels.mla_decode.codes_selection import bits_of
from mha2mla.kernels.mla_decode.quantization import dequantize_latent
from mha2mla.kernels.ops import accumulator
from mha2mla.kernels.rope_append.api import LatentRope, kept_keys, rotary_keys
from mha2mla.kernels.row_codes.api import RowQuantizer
from mha2mla.kernels.split_kv.choice import FIELDS, FRAGMENT_TILES, TILE_TOKENS, Column


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


def gqa_decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    **visibility: Any,
) -> tuple[Tensor, Tensor]:
    """``softmax(softmax_scale * q K^T) V`` over each sequence's pages, one kv head for every H / G query heads.

    Shapes as in :func:`mha2mla.kernels.gqa_decode`; ``visibility``, arithmetic and results as of
    ``mla_decode_reference``.
    """
    tokens = find_tokens(q, k_cache, block_table, cache_seqlens, **visibility)
    return attend((q,), (tokens.read(k_cache),), tokens.read(v_cache), tokens, softmax_scale)


@dataclass(frozen=True)
class Span:
    """Tokens and tiles of one sequence that some query sees; fields as ``Column``, in its order."""

    start: int
    stop: int
    low: int
    sink_stop: int
    tile0: int
    sink_tiles: int
    window_tile: int
    tiles: int

    def tile(self, attended: int) -> int:
        """Tile of the cache that is the ``attended``-th of those read."""
        if attended < self.sink_tiles:
            return self.tile0 + attended
        return self.window_tile + attended - self.sink_tiles


def attended_span(
    seqlen: int, start: int, capacity: int, seqlen_q: int, causal: bool, window: int | None, sinks: int
) -> Span:
    """The attended part of one sequence.

    Query s of S_q sits at position ``p = seqlen - 1 - (S_q - 1 - s)`` (causal) or ``seqlen - 1`` and sees tokens
    ``start <= t <= p`` with ``t > p - window`` or ``t < start + sinks`` (streaming attention, arXiv 2309.17453).
    """
    stop = max(0, min(seqlen, capacity))
    start = max(0, min(start, stop))
    low = start if window is None else max(start, stop - (seqlen_q - 1) * causal - window)
    sink_stop = min(start + sinks, low)
    tile0 = (start if sink_stop > start else low) // TILE_TOKENS
    sink_end = max(tile0, -(-sink_stop // TILE_TOKENS)) if sink_stop > start else tile0
    window_tile = max(low // TILE_TOKENS, sink_end)
    sink_tiles = sink_end - tile0
    tiles = sink_tiles + -(-stop // TILE_TOKENS) - window_tile if stop > start else 0
    return Span(start, stop, low, sink_stop, tile0, sink_tiles, window_tile, tiles)


@dataclass(frozen=True)
class Fragment:
    """Tiles ``first`` ... ``first + tiles - 1`` of those that sequence ``sequence`` reads; ``slot`` as in Column."""

    sequence: int
    first: int
    tiles: int
    slot: int


def plan_fragments(tiles: list[int], num_ctas: int, num_splits: int = 0) -> list[list[Fragment]]:
    """The fragments of each CTA for sequences that read so many tiles each.

    ``num_splits``: that many even pieces of each sequence, or as many as it has tiles, each in a CTA of its own, of
    which there are enough; 0: what balances best.

    Two ways to cut. *Aligned*: every CTA gets one piece of one sequence, sequences being cut evenly; taken when its
    longest piece costs at most one tile more than a perfect balance. *Stream*: the concatenation of all sequences, each
    lengthened by the fixed cost FRAGMENT_TILES, is cut evenly; a cut inside the fixed cost falls on the sequence's
    beginning. (FlashMLA's and FlashInfer's schedulers are of the second kind.)
    """
    total, nonempty = sum(tiles), sum(n > 0 for n in tiles)
    cost = total + FRAGMENT_TILES * nonempty
    if total == 0:
        return [[] for _ in range(num_ctas)]
    piece = None if num_splits else aligned_piece(tiles, num_ctas)
    if num_splits or piece is not None:
        counts = [min(n, num_splits) if num_splits else -(-n // piece) for n in tiles]
        cuts = [(b, tiles[b] * j // count) for b, count in enumerate(counts) for j in range(count)]
        cuts += [(len(tiles), 0)] * (num_ctas + 1 - len(cuts))
    else:
        begin, cuts, b = 0, [], 0
        for i in range(num_ctas):
            position = cost * i // num_ctas
            while tiles[b] == 0 or position >= begin + tiles[b] + FRAGMENT_TILES:
                begin += tiles[b] + FRAGMENT_TILES * (tiles[b] > 0)
                b += 1
            cuts.append((b, max(0, position - begin - FRAGMENT_TILES)))
        cuts.append((len(tiles), 0))
    work: list[list[Fragment]] = []
    for i, ((b, first), end) in enumerate(pairwise(cuts)):
        mine: list[Fragment] = []
        while (b, first) < end and b < len(tiles):
            stop = end[1] if b == end[0] else tiles[b]
            if stop > first:
                whole = first == 0 and stop == tiles[b]
                mine.append(Fragment(b, first, stop - first, -1 if whole else 2 * i + (len(mine) > 0)))
            b, first = b + 1, 0
        work.append(mine)
    return work


def aligned_piece(tiles: list[int], num_ctas: int) -> int | None:
    """Largest piece, in tiles, of the aligned way of cutting; None if it needs too many CTAs or balances badly."""
    total = sum(tiles)
    least = -(-total // num_ctas)
    most = -(-(total + FRAGMENT_TILES * sum(n > 0 for n in tiles)) // num_ctas) + 1
    for piece in range(max(1, least), most + 1):
        if sum(-(-n // piece) for n in tiles) <= num_ctas:
            return piece
    return None


def splits_of(work: list[list[Fragment]], batch: int) -> list[tuple[int, int]]:
    """(number of fragments, slot of the first one) per sequence; the k-th one's slot is ``2 * (slot // 2 + k)``."""
    splits = [(0, -1)] * batch
    for fragment in (fragment for mine in work for fragment in mine):
        count, slot = splits[fragment.sequence]
        splits[fragment.sequence] = (count + 1, fragment.slot if fragment.first == 0 else slot)
    return splits


def write_schedule(spans: list[Span], work: list[list[Fragment]], is_planned: bool = True) -> tuple[Tensor, Tensor]:
    """``schedule`` [num_ctas + B, FIELDS] and ``splits`` [B, 2] (int32) as the device planner makes them of its work;
    not ``is_planned``: of any fragments on any CTAs. Rows that nothing points at hold the smallest number."""
    schedule = torch.full((len(work) + max(len(spans), sum(map(len, work))), FIELDS), -(2**31), dtype=torch.int32)
    rank = [0, *accumulate(span.tiles > 0 for span in spans)]
    later = list(accumulate((max(0, len(mine) - 1) for mine in work), initial=-1))
    for cta, mine in enumerate(work):
        schedule[cta, Column.COUNT] = len(mine)
        after = len(work) + (rank[mine[0].sequence] if is_planned and mine else later[cta])
        for f, fragment in enumerate(mine):
            row = schedule[cta if f == 0 else after + f]
            row[: Column.NEXT] = torch.tensor(astuple(fragment))
            row[Column.START : Column.WINDOW_TILE + 1] = torch.tensor(astuple(spans[fragment.sequence])[:-1])
            if f == 0:
                row[Column.NEXT] = after
    splits = torch.tensor(splits_of(work, len(spans)), dtype=torch.int32).view(-1, 2)
    return (schedule[: len(work) + len(spans)] if is_planned else schedule), splits


def mla_decode_reference(
    q_latent: Tensor,
    q_pe: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    latent_scale: Tensor | None = None,
    centers: Tensor | None = None,
    rope_cache: Tensor | None = None,
    rope_scale: Tensor | None = None,
    rope_weight: Tensor | None = None,
    rope_bias: Tensor | None = None,
    inv_freq: Tensor | None = None,
    page_offsets: Tensor | None = None,
    scaling: float = 1.0,
    **visibility: Any,
) -> tuple[Tensor, Tensor]:
    """``softmax(softmax_scale * (q_latent c^T + q_pe k_pe^T)) c`` over each sequence's pages (DeepSeek-V2, 2.1).

    Shapes as in :func:`mha2mla.kernels.mla_decode`; ``visibility``: ``causal``, ``cache_starts``, and as in
    :func:`mha2mla.kernels.plan_mla_decode` ``window`` and ``sinks``. The arithmetic is float64 for float64 inputs and
    float32 for all others; only ``out`` is rounded to the input's dtype. Values of tokens that no query sees are never
    used, so NaN in unused pages does not matter. Reads no tensor on the host.

    Rotary keys are those of ``rope_cache``. With the fields of :class:`LatentRope` they are not rounded: int8 ones are
    dequantised by :func:`kept_keys`; without a ``rope_cache`` :func:`rotary_keys` makes them of the latents.

    Returns:
        ``out [B, S_q, H, d_c]`` in the dtype of ``q_latent`` and ``lse [B, H, S_q]`` (natural log) in the dtype of the
        arithmetic. A query that sees no token gives zeros and ``-inf``.
    """
    tokens = find_tokens(q_latent, latent_cache, block_table, cache_seqlens, **visibility)
    latent = tokens.read(_dequantised(q_latent, latent_cache, latent_scale, centers))
    if inv_freq is None:
        k_pe = tokens.read(rope_cache)
    else:
        token = torch.arange(tokens.page.shape[1], device=tokens.page.device)
        positions = token.expand(tokens.page.shape)
        if page_offsets is not None:
            positions = positions + page_offsets.long()[:, token // latent_cache.shape[1]]
        if rope_cache is None:
            k_pe = rotary_keys(latent, LatentRope(rope_weight, rope_bias, inv_freq, scaling), positions)[:, :, None]
        else:
            rope = LatentRope(rope_bias.new_empty(rope_bias.shape[0], 0), rope_bias, inv_freq, scaling)
            codes, scale = tokens.read(rope_cache)[:, :, 0], tokens.read(rope_scale)
            k_pe = kept_keys(codes, scale, rope, positions, tokens.dtype)[:, :, None]
    latent = latent[:, :, None]
    return attend((q_latent, q_pe), (latent, k_pe), latent, tokens, softmax_scale)


def _dequantised(q_latent: Tensor, latent_cache: Tensor, latent_scale: Tensor | None, centers: Tensor | None) -> Tensor:
    """The cached latents; of codes not rounded to the queries' dtype."""
    dtype, width = accumulator(q_latent.dtype), q_latent.shape[-1]
    if latent_scale is not None:
        return dequantize_latent(latent_cache, latent_scale, dtype)
    if centers is not None:
        return RowQuantizer(bits_of(width, latent_cache.shape[-1])).decode(latent_cache, width, dtype, centers)
    return latent_cache
