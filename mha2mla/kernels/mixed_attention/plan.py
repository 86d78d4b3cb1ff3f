"""Plans of a ragged batch's attention: made once per step, shared by the layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.gqa_decode.api import plan_gqa_decode
from mha2mla.kernels.mixed_attention.layout import MAX_DECODE_QUERY_LENGTH, Group, Wave, absorbs_up_to, lay_out
from mha2mla.kernels.mixed_attention.parts import MixedPlan, Pieces
from mha2mla.kernels.mla_decode.api import plan_mla_decode
from mha2mla.kernels.rope_append.api import slots_of
from mha2mla.kernels.split_kv.plan import DecodePlan, check_window

MAX_EXPANDED_TOKENS = 16384  # 256 MiB of keys and values at 32 heads of 128 + 128 in bfloat16


def plan_mla_attention(
    latent_cache: Tensor,
    rope_cache: Tensor | None,
    block_table: Tensor,
    cache_seqlens: Tensor,
    lengths: Tensor,
    *,
    num_attention_heads: int,
    num_key_value_heads: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    qk_rope_head_dim: int | None = None,
    dtype: torch.dtype | None = None,
    cache_starts: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    max_expanded_tokens: int = MAX_EXPANDED_TOKENS,
    num_splits: int | None = None,
    backend: str | None = None,
) -> MixedPlan:
    """A plan for calls of :func:`mla_attention` over caches of these shapes and sequences of these lengths.

    Args:
        latent_cache: [P, page, d_c]; only shape, dtype and device are looked at, here and in the next.
        rope_cache: [P, page, G, d_r]; None where nothing rotary is cached.
        block_table: [B, max_pages] int32.
        cache_seqlens: [B] int32, tokens per sequence, the new ones included; 0 for rows that pad a batch.
        lengths: [3, B] int32 on the CPU: new tokens, tokens cached before them and the first visible token of each
            sequence. Of sequences with at most 8 new tokens only the first is looked at.
        num_attention_heads, num_key_value_heads, qk_nope_head_dim, v_head_dim: H, h_kv, d_n, d_v.
        qk_rope_head_dim: d_r, to be given exactly where there is no ``rope_cache``.
        dtype: of the queries; None: as ``rope_cache``, or as ``latent_cache`` where there is none.
        cache_starts: [B] int32, first visible token; None: 0.
        window: each query sees only the last ``window`` tokens up to itself; None: all. Tokens before every window are
            not read, but for ``sinks``.
        sinks: the first ``sinks`` tokens of each sequence, from its first visible one on, stay visible (attention
            sinks, arXiv 2309.17453).
        max_expanded_tokens: cached tokens that are expanded to keys and values at a time, which bounds the workspace
            to ``max(max_expanded_tokens, longest query)`` tokens of ``lcm(h_kv, G) (d_n + d_r + d_v)`` numbers.
        num_splits: pieces per sequence of the decode op's calls, as in :func:`plan_mla_decode`.
        backend: as in :func:`mla_attention`.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_window(window, sinks)
    if (rope_cache is None) != (qk_rope_head_dim is not None):
        was = "None" if rope_cache is None else "given"
        raise ValueError(f"qk_rope_head_dim is {qk_rope_head_dim} where rope_cache is {was}; expected one of the two")
    heads, width = num_attention_heads, latent_cache.shape[-1]
    groups, rope = (1, qk_rope_head_dim) if rope_cache is None else rope_cache.shape[2:]
    geometry = MLAGeometry(
        heads, groups, width, rope, qk_nope_head_dim, v_head_dim, num_key_value_heads,
        rope_from_latent=rope_cache is None,
    )  # fmt: skip
    pages = latent_cache if rope_cache is None else rope_cache
    # A stand-in for queries, of which a plan looks at shape, dtype and device.
    query = pages.new_empty((), dtype=dtype or pages.dtype)

    def decode_plan(table: Tensor, seqlens: Tensor, starts: Tensor | None, seqlen_q: int) -> DecodePlan:
        return plan_mla_decode(
            query.expand(table.shape[0], seqlen_q, heads, width), pages, table, seqlens, qk_rope_head_dim=rope,
            cache_starts=starts, window=window, sinks=sinks, latent_dtype=latent_cache.dtype,
            num_splits=num_splits, backend=backend,
        )  # fmt: skip

    return _plan(
        latent_cache.shape[1], block_table, cache_seqlens, lengths, cache_starts, window, sinks,
        absorbs_up_to(geometry), max_expanded_tokens, num_splits, decode_plan,
    )  # fmt: skip


def _plan(
    page_size: int,
    block_table: Tensor,
    cache_seqlens: Tensor,
    lengths: Tensor,
    cache_starts: Tensor | None,
    window: int | None,
    sinks: int,
    short: int,
    max_expanded_tokens: int,
    num_splits: int | None,
    decode_plan: Callable[[Tensor, Tensor, Tensor | None, int], DecodePlan],
) -> MixedPlan:
    batch = block_table.shape[0]
    if lengths.shape != (3, batch) or lengths.dtype != torch.int32 or lengths.device.type != "cpu":
        raise ValueError(
            f"lengths is {lengths.dtype} {tuple(lengths.shape)} on {lengths.device}; expected torch.int32"
            f" {(3, batch)} on the CPU"
        )
    if max_expanded_tokens < 1:
        raise ValueError(f"max_expanded_tokens is {max_expanded_tokens}; expected at least 1")
    for name, tensor in (("cache_seqlens", cache_seqlens), ("cache_starts", cache_starts)):
        if tensor is not None and (tensor.shape != (batch,) or tensor.dtype != torch.int32):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected torch.int32 {(batch,)}, [B]")
    query_lengths, cached_lengths, starts = map(tuple, lengths.tolist())
    limits = (-1 if window is None else window, sinks)
    layout = lay_out(query_lengths, cached_lengths, starts, short, max_expanded_tokens, *limits)
    pieces = Pieces()
    for group in layout.groups:
        mine = _rows_of(group, query_lengths, block_table, cache_seqlens, cache_starts, pieces)
        plan = decode_plan(*mine, group.seqlen_q)
        pieces.put(plan.schedule, plan.splits)
        pieces.reserve(plan.partial_out, plan.partial_lse)
    for wave in layout.waves:
        _put_wave(wave, block_table, cache_seqlens, page_size, sinks, pieces)
    nothing = cache_seqlens.new_empty(0)
    return MixedPlan(
        lengths, block_table, cache_seqlens, cache_starts, torch.cat([nothing, *pieces.index]),
        torch.empty(pieces.numbers, dtype=torch.float32, device=block_table.device),
        torch.tensor(pieces.shapes, dtype=torch.int64).view(-1, 6), short, max_expanded_tokens,
        *limits, page_size, num_splits or 0,
    )  # fmt: skip


def _rows_of(
    group: Group,
    query_lengths: tuple[int, ...],
    block_table: Tensor,
    cache_seqlens: Tensor,
    cache_starts: Tensor | None,
    pieces: Pieces,
) -> list[Tensor | None]:
    """The batch's own tensors for the rows of a group. Where these are pieces of queries, they are kept too, with what
    is read and written in the batch."""
    batch = (block_table, cache_seqlens, cache_starts)
    if group.first_token >= 0:
        rows = slice(group.rows[0], group.rows[-1] + 1)
        return [None if tensor is None else tensor[rows] for tensor in batch]
    device, offset = block_table.device, [0, *accumulate(query_lengths)]
    begins = [(row, q, offset[row] + q) for row, q in zip(group.rows, group.first_query, strict=True)]
    rows, behind, token = to_device(
        [
            group.rows,
            [query_lengths[row] - q - group.seqlen_q for row, q, _ in begins],
            [token for _, _, token in begins],
        ],
        device,
    )
    where = {
        token + q: place * group.seqlen_q + q
        for place, (_, _, token) in enumerate(begins)
        for q in range(group.seqlen_q)
    }
    mine = [None if tensor is None else tensor.index_select(0, rows) for tensor in batch]
    mine[1] = (mine[1] - behind).clamp_min(0)
    pieces.put(*(tensor for tensor in mine if tensor is not None))
    pieces.put((token[:, None] + torch.arange(group.seqlen_q, dtype=torch.int32, device=device)).flatten())
    pieces.put(*to_device([list(where), list(where.values())], device))
    return mine


def _put_wave(
    wave: Wave, block_table: Tensor, cache_seqlens: Tensor, page_size: int, sinks: int, pieces: Pieces
) -> None:
    """Where the queries and the cached tokens of a wave lie."""
    device, table = block_table.device, block_table[wave.first : wave.stop]
    pieces.put(*to_device([[0, *accumulate(wave.query_lengths)]], device))
    for chunk in wave.chunks:
        bounds, begins = to_device([[0, *accumulate(chunk.lengths)], [*chunk.first, 0]], device)
        token = torch.arange(chunk.tokens, dtype=torch.int32, device=device)
        sequence = torch.searchsorted(bounds[1:], token, right=True, out_int32=True)
        position = token + (begins - bounds)[sequence.long()]
        if chunk.gaps:
            (gaps,) = to_device([chunk.gaps], device)
            behind_sinks = token - bounds[sequence.long()] >= sinks
            position = position + gaps[sequence.long()] * behind_sinks
        slots = slots_of(table, sequence, position, page_size)
        _check_pages(slots, wave.first + sequence, position, cache_seqlens)
        pieces.put(slots, position, bounds)


def _check_pages(slots: Tensor, sequence: Tensor, position: Tensor, cache_seqlens: Tensor) -> None:
    """Raise ValueError, on the CPU, where a token of a sequence that is no padding has no page. Elsewhere, where nobody
    waits to look, such tokens are read as zeros."""
    if slots.device.type != "cpu":
        return
    lost = (slots < 0) & (cache_seqlens[sequence.long()] > 0)
    if bool(lost.any()):
        first = int(lost.nonzero()[0])
        raise ValueError(
            f"block_table has no page for token {int(position[first])} of sequence {int(sequence[first])}; expected one"
            " for every cached and new token"
        )


def to_device(rows: list, device: torch.device) -> Tensor:
    """int32 [rows, n] from lists, in one copy that the host does not wait for."""
    tensor = torch.tensor(rows, dtype=torch.int32, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def plan_gqa_attention(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    lengths: Tensor,
    *,
    num_attention_heads: int,
    cache_starts: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    max_expanded_tokens: int = MAX_EXPANDED_TOKENS,
    num_splits: int | None = None,
    backend: str | None = None,
) -> MixedPlan:
    """A plan for calls of :func:`gqa_attention`.

    Args:
        key_cache: [P, page, h_kv, d_k]; only shape, dtype and device are looked at, here and in the next.
        value_cache: [P, page, h_kv, d_v].
        max_expanded_tokens: cached tokens that are gathered at a time.
        block_table, cache_seqlens, lengths, num_attention_heads, cache_starts, window, sinks, num_splits, backend:
            as in :func:`plan_mla_attention`.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_window(window, sinks)
    query = key_cache.new_empty(())

    def decode_plan(table: Tensor, seqlens: Tensor, starts: Tensor | None, seqlen_q: int) -> DecodePlan:
        return plan_gqa_decode(
            query.expand(table.shape[0], seqlen_q, num_attention_heads, key_cache.shape[3]), key_cache, table, seqlens,
            v_head_dim=value_cache.shape[3], cache_starts=starts, window=window, sinks=sinks,
            num_splits=num_splits, backend=backend,
        )  # fmt: skip

    return _plan(
        key_cache.shape[1], block_table, cache_seqlens, lengths, cache_starts, window, sinks,
        MAX_DECODE_QUERY_LENGTH, max_expanded_tokens, num_splits, decode_plan,
    )  # fmt: skip
