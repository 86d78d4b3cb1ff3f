"""What a ragged batch's attention needs beside queries and caches: made once per step, shared by the layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.export import Dim, ShapesCollection
from torch.nn import functional as F

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.gqa_decode.api import plan_gqa_decode
from mha2mla.kernels.mixed_attention.layout import MAX_DECODE_QUERY_LENGTH, BatchLayout, absorbs_up_to, lay_out
from mha2mla.kernels.mla_decode.api import plan_mla_decode
from mha2mla.kernels.rope_append.api import slots_of
from mha2mla.kernels.split_kv.plan import DecodePlan, check_window

MAX_EXPANDED_TOKENS = 16384  # 256 MiB of keys and values at 32 heads of 128 + 128 in bfloat16
ALIGNMENT = 32  # numbers; pieces of the flat tensors begin at multiples of it, 128 bytes


@dataclass(frozen=True)
class MixedPlan:
    """Which calls a ragged batch takes, and their index tensors and workspace.

    Made by :func:`plan_mla_attention` or :func:`plan_gqa_attention`. All layers that share lengths, page table, window
    and widths may share a plan, one after another. It holds as many tensors whatever the batch, so that one compiled or
    exported function takes any; what the host decides by lies on the CPU.

    Attributes:
        lengths: [3, B] int32 on the CPU: new tokens, tokens cached before them, first visible token, per sequence.
        block_table, cache_seqlens, cache_starts: the batch's own.
        index: int32, what the calls need beside them, in pieces.
        workspace: float32, partial results of the decode op, in pieces; written by every call.
        shapes: [pieces, 6] int64 on the CPU: number of dimensions and sizes of every piece, as :func:`parts_of` reads
            them.
        short, max_expanded_tokens: as in :func:`mha2mla.kernels.mixed_attention.layout.lay_out`.
        window: of the layers that share the plan; -1: none.
        page_size: tokens per page.
    """

    lengths: Tensor
    block_table: Tensor
    cache_seqlens: Tensor
    cache_starts: Tensor | None
    index: Tensor
    workspace: Tensor
    shapes: Tensor
    short: int
    max_expanded_tokens: int
    window: int
    page_size: int

    def fields(self) -> tuple:
        """As :func:`parts_of` and the ops' schemas take them."""
        return (
            self.lengths, self.block_table, self.cache_seqlens, self.cache_starts, self.index, self.workspace,
            self.shapes, self.short, self.max_expanded_tokens, self.window, self.page_size,
        )  # fmt: skip

    def refresh(self) -> None:
        """Plans again, in place, for what the batch's own tensors now say: after :meth:`SequenceBatch.copy_`, inside a
        CUDA graph or before its replay.

        Raises:
            ValueError: there are queries of more than 8 tokens, whose calls depend on lengths that the host must know.
        """
        parts = parts_of(*self.fields())
        if parts.layout.waves or any(group.first_token < 0 for group in parts.layout.groups):
            raise ValueError(
                f"lengths has queries of up to {int(self.lengths[0].max())} tokens; expected at most"
                f" {MAX_DECODE_QUERY_LENGTH}, or a new plan"
            )
        for group, part in zip(parts.layout.groups, parts.groups, strict=True):
            torch.ops.mha2mla.mla_decode_plan(
                part.cache_seqlens, part.cache_starts, parts.capacity, group.seqlen_q, True, self.window, 0,
                part.schedule, part.splits,
            )  # fmt: skip

    def dynamic_shapes(self, shapes: ShapesCollection) -> ShapesCollection:
        """Declares for ``torch.export`` which sizes vary with the batch: adds them to ``shapes``."""
        shapes[self.lengths] = {1: Dim.AUTO}
        for tensor in (self.block_table, self.cache_seqlens, self.cache_starts, self.index, self.workspace):
            if tensor is not None:
                shapes[tensor] = dict.fromkeys(range(tensor.ndim), Dim.AUTO)
        shapes[self.shapes] = {0: Dim.AUTO}
        return shapes


torch.export.register_dataclass(MixedPlan, serialized_type_name="mha2mla.kernels.MixedPlan")


class PiecesPart(NamedTuple):
    """Rows of a group that are pieces of queries: ``tokens [B_g * S_q]`` of the batch are read; ``targets [n]`` are the
    same without repetitions, and their results are rows ``sources [n]``. int32."""

    tokens: Tensor
    targets: Tensor
    sources: Tensor


class GroupPart(NamedTuple):
    """Tensors of a :class:`~mha2mla.kernels.mixed_attention.layout.Group` of B_g rows: ``block_table [B_g,
    max_pages]``, ``cache_seqlens [B_g]``, ``cache_starts [B_g]`` or None, ``pieces`` where the rows are no whole
    queries; then the fields of a plan of the decode op."""

    block_table: Tensor
    cache_seqlens: Tensor
    cache_starts: Tensor | None
    pieces: PiecesPart | None
    schedule: Tensor
    splits: Tensor
    partial_out: Tensor
    partial_lse: Tensor


class ChunkPart(NamedTuple):
    """``slots [T]`` in the cache of a chunk's tokens, -1 where there is no page (of rows that pad the batch), and
    ``cu_seqlens_k [sequences of the wave + 1]``. int32."""

    slots: Tensor
    cu_seqlens_k: Tensor


class Parts(NamedTuple):
    """A plan by its parts: groups; and per wave ``cu_seqlens_q`` and its chunks."""

    layout: BatchLayout
    groups: tuple[GroupPart, ...]
    waves: tuple[tuple[Tensor, tuple[ChunkPart, ...]], ...]
    window: int
    capacity: int

    def check_lengths(self, lengths: Tensor, cache_seqlens: Tensor) -> None:
        """Raise ValueError if sequences whose calls were made from ``lengths`` have other lengths on the device by now.

        On the CPU only, where looking costs nothing; the decode op looks after the others. 0 is a row of padding.
        """
        if cache_seqlens.device.type != "cpu":
            return
        rows = {row for group in self.layout.groups if group.first_token < 0 for row in group.rows}
        rows.update(row for wave in self.layout.waves for row in range(wave.first, wave.stop))
        for row in sorted(rows):
            planned, is_now = int(lengths[:2, row].sum()), int(cache_seqlens[row])
            if is_now not in (0, planned):
                raise ValueError(
                    f"plan was made for {planned} tokens of sequence {row}; expected {is_now}, its cache_seqlens: make"
                    " a new plan"
                )

    def decode_plan(self, group: int, heads: int, width: int) -> DecodePlan:
        """The decode op's plan for a group, whose queries are [B_g, S_q, heads, width]."""
        part, shape = self.groups[group], self.layout.groups[group]
        return DecodePlan(
            shape=(len(shape.rows), shape.seqlen_q, heads, width),
            capacity=self.capacity,
            causal=True,
            window=None if self.window < 0 else self.window,
            sinks=0,
            schedule=part.schedule,
            splits=part.splits,
            partial_out=part.partial_out,
            partial_lse=part.partial_lse,
        )


class _Pieces:
    """Tensors of different shapes in one: ``index`` keeps what they hold, ``workspace`` room for it."""

    def __init__(self) -> None:
        self.index: list[Tensor] = []
        self.numbers = 0  # of the workspace
        self.shapes: list[list[int]] = []

    def put(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._shape(tensor)
            self.index.append(F.pad(tensor.flatten(), (0, -tensor.numel() % ALIGNMENT)))

    def reserve(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._shape(tensor)
            self.numbers += _aligned(tensor.numel())

    def _shape(self, tensor: Tensor) -> None:
        self.shapes.append([tensor.ndim, *tensor.shape, *[0] * (5 - tensor.ndim)])


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNMENT) * ALIGNMENT


def parts_of(
    lengths: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    cache_starts: Tensor | None,
    index: Tensor,
    workspace: Tensor,
    shapes: Tensor,
    short: int,
    max_expanded_tokens: int,
    window: int,
    page_size: int,
) -> Parts:
    """The parts of a plan from its fields. Reads nothing on the device."""
    layout = lay_out(*map(tuple, lengths.tolist()), short, max_expanded_tokens, window >= 0)
    given, place = iter(shapes.tolist()), [0, 0]

    def take(flat: Tensor, count: int) -> list[Tensor]:
        which, taken = int(flat is workspace), []
        for _ in range(count):
            ndim, *sizes = next(given)
            numbers = math.prod(sizes[:ndim])
            taken.append(flat[place[which] : place[which] + numbers].view(sizes[:ndim]))
            place[which] += _aligned(numbers)
        return taken

    groups = []
    for group in layout.groups:
        if group.first_token >= 0:
            rows = slice(group.rows[0], group.rows[-1] + 1)
            mine = [t if t is None else t[rows] for t in (block_table, cache_seqlens, cache_starts)]
            pieces = None
        else:
            mine = take(index, 2 if cache_starts is None else 3)
            mine += [None] * (3 - len(mine))
            pieces = PiecesPart(*take(index, 3))
        groups.append(GroupPart(*mine, pieces, *take(index, 2), *take(workspace, 2)))
    waves = tuple(
        [(take(index, 1)[0], tuple([ChunkPart(*take(index, 2)) for _ in wave.chunks])) for wave in layout.waves]
    )
    return Parts(layout, tuple(groups), waves, window, block_table.shape[1] * page_size)


def plan_mla_attention(
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    lengths: Tensor,
    *,
    num_attention_heads: int,
    num_key_value_heads: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    cache_starts: Tensor | None = None,
    window: int | None = None,
    max_expanded_tokens: int = MAX_EXPANDED_TOKENS,
    backend: str | None = None,
) -> MixedPlan:
    """A plan for calls of :func:`mla_attention` over caches of these shapes and sequences of these lengths.

    Args:
        latent_cache: [P, page, d_c]; only shape, dtype and device are looked at, here and in the next.
        rope_cache: [P, page, G, d_r].
        block_table: [B, max_pages] int32.
        cache_seqlens: [B] int32, tokens per sequence, the new ones included; 0 for rows that pad a batch.
        lengths: [3, B] int32 on the CPU: new tokens, tokens cached before them and the first visible token of each
            sequence. Of sequences with at most 8 new tokens only the first is looked at.
        num_attention_heads, num_key_value_heads, qk_nope_head_dim, v_head_dim: H, h_kv, d_n, d_v.
        cache_starts: [B] int32, first visible token; None: 0.
        window: each query sees only the last ``window`` tokens up to itself; None: all.
        max_expanded_tokens: cached tokens that are expanded to keys and values at a time, which bounds the workspace
            to ``max(max_expanded_tokens, longest query)`` tokens of ``lcm(h_kv, G) (d_n + d_r + d_v)`` numbers.
        backend: as in :func:`mla_attention`.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_window(window, 0)
    heads, width = num_attention_heads, latent_cache.shape[-1]
    rope = rope_cache.shape[-1]
    geometry = MLAGeometry(heads, rope_cache.shape[2], width, rope, qk_nope_head_dim, v_head_dim, num_key_value_heads)
    # A stand-in for queries, of which a plan looks at shape, dtype and device.
    query = rope_cache.new_empty(())

    def decode_plan(table: Tensor, seqlens: Tensor, starts: Tensor | None, seqlen_q: int) -> DecodePlan:
        return plan_mla_decode(
            query.expand(table.shape[0], seqlen_q, heads, width), rope_cache, table, seqlens, qk_rope_head_dim=rope,
            cache_starts=starts, window=window, latent_dtype=latent_cache.dtype, backend=backend,
        )  # fmt: skip

    return _plan(
        rope_cache.shape[1], block_table, cache_seqlens, lengths, cache_starts, window, absorbs_up_to(geometry),
        max_expanded_tokens, decode_plan,
    )  # fmt: skip


def _plan(
    page_size: int,
    block_table: Tensor,
    cache_seqlens: Tensor,
    lengths: Tensor,
    cache_starts: Tensor | None,
    window: int | None,
    short: int,
    max_expanded_tokens: int,
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
    device = block_table.device
    query_lengths, cached_lengths, starts = map(tuple, lengths.tolist())
    layout = lay_out(query_lengths, cached_lengths, starts, short, max_expanded_tokens, window is not None)
    pieces = _Pieces()
    for group in layout.groups:
        first, stop = group.rows[0], group.rows[-1] + 1
        if group.first_token >= 0:
            mine = [t if t is None else t[first:stop] for t in (block_table, cache_seqlens, cache_starts)]
        else:
            offset = [0, *_cumulative(query_lengths)]
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
            mine = [t if t is None else t.index_select(0, rows) for t in (block_table, cache_seqlens, cache_starts)]
            mine[1] = (mine[1] - behind).clamp_min(0)
            pieces.put(*(tensor for tensor in mine if tensor is not None))
            pieces.put((token[:, None] + torch.arange(group.seqlen_q, dtype=torch.int32, device=device)).flatten())
            pieces.put(*to_device([list(where), list(where.values())], device))
        plan = decode_plan(*mine, group.seqlen_q)
        pieces.put(plan.schedule, plan.splits)
        pieces.reserve(plan.partial_out, plan.partial_lse)
    for wave in layout.waves:
        pieces.put(*to_device([[0, *_cumulative(wave.query_lengths)]], device))
        table = block_table[wave.first : wave.stop]
        for chunk in wave.chunks:
            bounds, begins = to_device([[0, *_cumulative(chunk.lengths)], [*chunk.first, 0]], device)
            token = torch.arange(chunk.tokens, dtype=torch.int32, device=device)
            sequence = torch.searchsorted(bounds[1:], token, right=True, out_int32=True)
            position = token + (begins - bounds)[sequence.long()]
            slots = slots_of(table, sequence, position, page_size)
            _check_pages(slots, wave.first + sequence, position, cache_seqlens)
            pieces.put(slots, bounds)
    nothing = cache_seqlens.new_empty(0)
    return MixedPlan(
        lengths, block_table, cache_seqlens, cache_starts, torch.cat([nothing, *pieces.index]),
        torch.empty(pieces.numbers, dtype=torch.float32, device=device),
        torch.tensor(pieces.shapes, dtype=torch.int64).view(-1, 6), short, max_expanded_tokens,
        -1 if window is None else window, page_size,
    )  # fmt: skip


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


def _cumulative(lengths: tuple[int, ...]) -> list[int]:
    total, sums = 0, []
    for length in lengths:
        total += length
        sums.append(total)
    return sums


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
    max_expanded_tokens: int = MAX_EXPANDED_TOKENS,
    backend: str | None = None,
) -> MixedPlan:
    """A plan for calls of :func:`gqa_attention`.

    Args:
        key_cache: [P, page, h_kv, d_k]; only shape, dtype and device are looked at, here and in the next.
        value_cache: [P, page, h_kv, d_v].
        max_expanded_tokens: cached tokens that are gathered at a time.
        block_table, cache_seqlens, lengths, num_attention_heads, cache_starts, window, backend: as in
            :func:`plan_mla_attention`.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    check_window(window, 0)
    query = key_cache.new_empty(())

    def decode_plan(table: Tensor, seqlens: Tensor, starts: Tensor | None, seqlen_q: int) -> DecodePlan:
        return plan_gqa_decode(
            query.expand(table.shape[0], seqlen_q, num_attention_heads, key_cache.shape[3]), key_cache, table, seqlens,
            v_head_dim=value_cache.shape[3], cache_starts=starts, window=window, backend=backend,
        )  # fmt: skip

    return _plan(
        key_cache.shape[1], block_table, cache_seqlens, lengths, cache_starts, window, MAX_DECODE_QUERY_LENGTH,
        max_expanded_tokens, decode_plan,
    )  # fmt: skip
