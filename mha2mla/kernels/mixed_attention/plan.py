"""Plans of a ragged batch's attention: made once per step, shared by the layers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.export import Dim, ShapesCollection
from torch.nn import functional as F

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels.gqa_decode.api import plan_gqa_decode
from mha2mla.kernels.mixed_attention.layout import (
    ABSORBS_ALL,
    LAUNCH_FLOP,
    MAX_DECODE_QUERY_LENGTH,
    BatchLayout,
    FormCost,
    Group,
    Wave,
    absorbs_up_to,
    expanded_at_a_time,
    expanded_tokens,
    form_costs,
    lay_out,
    saves_launches,
)
from mha2mla.kernels.mla_decode.api import plan_mla_decode
from mha2mla.kernels.ops import argument_error, sizes_of
from mha2mla.kernels.rope_append.api import slots_of
from mha2mla.kernels.split_kv.plan import DecodePlan, check_window

ALIGNMENT = 32  # elements; tensors packed into one begin at multiples of it, 128 bytes


class GroupPart(NamedTuple):
    """Tensors of a :class:`Group` of B_g rows: ``block_table [B_g, max_pages]``, ``cache_seqlens [B_g]``,
    ``cache_starts [B_g]`` or None; then the fields of a plan of the decode op.

    Where rows do not lie side by side, ``tokens [B_g * S_q]`` of the batch are read; ``targets [n]`` are the same
    without repetitions, and their results are rows ``sources [n]``; int32. Else they are None.
    """

    block_table: Tensor
    cache_seqlens: Tensor
    cache_starts: Tensor | None
    tokens: Tensor | None
    targets: Tensor | None
    sources: Tensor | None
    schedule: Tensor
    splits: Tensor
    partial_out: Tensor
    partial_lse: Tensor


class ChunkPart(NamedTuple):
    """Tensors of a chunk's tokens: ``rows [T]`` of the cache; ``lost [T]`` bool, of those without a page (rows that pad
    the batch), or [0] where all have one; ``positions [T]`` in their sequences; and ``cu_seqlens_k [sequences of the
    wave + 1]``. int32."""

    rows: Tensor
    lost: Tensor
    positions: Tensor
    cu_seqlens_k: Tensor


class Parts(NamedTuple):
    """A plan's calls and their tensors: per group, and per wave ``cu_seqlens_q`` and its chunks."""

    layout: BatchLayout
    groups: list[GroupPart]
    waves: list[tuple[Tensor, list[ChunkPart]]]


@dataclass(frozen=True)
class MixedPlan:
    """Calls of a ragged batch, with their index tensors and workspace.

    Made by :func:`plan_mla_attention` or :func:`plan_gqa_attention`. All layers that share lengths, page table, window
    and widths may share a plan, one after another. It holds as many tensors whatever the batch, so that one compiled or
    exported function takes any; tensors that the host reads lie on the CPU.

    Attributes:
        lengths: [3, B] int32 on the CPU: new tokens, tokens cached before them, first visible token, per sequence.
        block_table, cache_seqlens, cache_starts: the batch's own.
        index: int32, further tensors of the calls, packed.
        workspace: float32, partial results of the decode op, packed; written by every call.
        shapes: [tensors, 6] int64 on the CPU: number of dimensions and sizes of every packed tensor, those of ``index``
            first.
        short, max_expanded_tokens: as in :func:`mha2mla.kernels.mixed_attention.layout.lay_out`.
        window, sinks: of the layers that share the plan; a window of -1 is none.
        page_size: tokens per page.
        num_splits: of the decode op's calls; 0: as many as balance best.
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
    sinks: int
    page_size: int
    num_splits: int = 0

    def fields(self) -> tuple:
        """Tensors and numbers in the order of the ops' schemas."""
        return (
            self.lengths, self.block_table, self.cache_seqlens, self.cache_starts, self.index, self.workspace,
            self.shapes, self.short, self.max_expanded_tokens, self.window, self.sinks, self.page_size,
        )  # fmt: skip

    @property
    def capacity(self) -> int:
        """Tokens that a row of the page table holds."""
        return self.block_table.shape[1] * self.page_size

    @cached_property
    def parts(self) -> Parts:
        """The plan's calls and their tensors: views of the packed ones. Reads nothing on the device."""
        layout = lay_out(
            *map(tuple, self.lengths.tolist()), self.short, self.max_expanded_tokens, self.window, self.sinks
        )
        shapes, groups = self.shapes.tolist(), []
        of_index = len(shapes) - 2 * len(layout.groups)
        index, workspace = _unpack(self.index, shapes[:of_index]), _unpack(self.workspace, shapes[of_index:])
        batch, starts = (self.block_table, self.cache_seqlens, self.cache_starts), self.cache_starts is not None
        for group in layout.groups:
            if not group.has_pieces:
                rows = slice(group.rows[0], group.rows[-1] + 1)
                mine = [None if tensor is None else tensor[rows] for tensor in batch]
            else:
                mine = [index.pop(), index.pop(), index.pop() if starts else None]
            mine += [index.pop() if group.first_token < 0 else None for _ in range(3)]
            groups.append(GroupPart(*mine, index.pop(), index.pop(), workspace.pop(), workspace.pop()))
        waves = [
            (
                index.pop(),
                [ChunkPart(index.pop(), _as_bool(index.pop()), index.pop(), index.pop()) for _ in wave.chunks],
            )
            for wave in layout.waves
        ]
        return Parts(layout, groups, waves)

    @cached_property
    def _decode_plans(self) -> dict[tuple[int, int, int], DecodePlan]:
        return {}

    def decode_plan(self, index: int, heads: int, width: int) -> DecodePlan:
        """Plan for the call of group ``index`` with results of ``width`` elements a head. All layers share it: a call
        like an earlier one needs few checks (``DecodePlan.memory``). Raises ValueError where the plan was made for
        others."""
        key = (index, heads, width)
        if key not in self._decode_plans:
            group, part = self.parts.layout.groups[index], self.parts.groups[index]
            if (made := tuple(part.partial_out.shape[3:])) != (heads, width):  # of its workspace
                raise ValueError(f"plan was made for [H, d] = {made} of the decode op; expected {(heads, width)}")
            self._decode_plans[key] = DecodePlan(
                (len(group.rows), group.seqlen_q, heads, width), self.capacity, True,
                None if self.window < 0 else self.window, self.sinks, part.schedule, part.splits, part.partial_out,
                part.partial_lse,
            )  # fmt: skip
        return self._decode_plans[key]

    def refresh(self) -> None:
        """Plans again, in place, for the batch's own tensors as they are now: after :meth:`SequenceBatch.copy_`, inside
        a CUDA graph or before its replay.

        Raises:
            ValueError: there are queries of more than 8 tokens, whose calls depend on lengths that the host must know.
        """
        layout, groups, waves = self.parts
        if waves or any(group.has_pieces for group in layout.groups):
            raise ValueError(
                f"lengths has queries of up to {int(self.lengths[0].max())} tokens; expected at most"
                f" {MAX_DECODE_QUERY_LENGTH}, or a new plan"
            )
        for group, part in zip(layout.groups, groups, strict=True):
            torch.ops.mha2mla.split_kv_plan(
                part.cache_seqlens, part.cache_starts, self.capacity, group.seqlen_q, True, self.window, self.sinks,
                part.schedule, part.splits, self.num_splits,
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


def _as_bool(ones: Tensor) -> Tensor:
    """int32 [T], 0 or 1, as bool without a copy: the lowest byte of each."""
    return ones.view(torch.bool)[::4] if sys.byteorder == "little" else ones.bool()


def _unpack(flat: Tensor, shapes: list[list[int]]) -> list[Tensor]:
    """Tensors packed into ``flat``, the last one first."""
    tensors, first = [], 0
    for ndim, *sizes in shapes:
        numel = math.prod(sizes[:ndim])
        tensors.append(flat[first : first + numel].view(sizes[:ndim]))
        first += numel + -numel % ALIGNMENT
    return tensors[::-1]


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
    max_expanded_tokens: int | None = None,
    num_splits: int | None = None,
    has_padding: bool = True,
    launch_flop: int | None = None,
    backend: str | None = None,
) -> MixedPlan:
    """A plan for calls of :func:`mla_attention` over caches of these shapes and sequences of these lengths.

    Args:
        latent_cache: [P, page, d_c]; only its shape, dtype and device are read, as of ``rope_cache``.
        rope_cache: [P, page, G, d_r]; None where nothing rotary is cached.
        block_table: [B, max_pages] int32.
        cache_seqlens: [B] int32, tokens per sequence, the new ones included; 0 for rows that pad a batch.
        lengths: [3, B] int32 on the CPU: new tokens, tokens cached before them and the first visible token of each
            sequence. Of sequences with at most 8 new tokens only the first is read.
        num_attention_heads, num_key_value_heads, qk_nope_head_dim, v_head_dim: H, h_kv, d_n, d_v.
        qk_rope_head_dim: d_r, to be given exactly where there is no ``rope_cache``.
        dtype: of the queries; None: as ``rope_cache``, or as ``latent_cache`` where there is none or it is e4m3.
        cache_starts: [B] int32, first visible token; None: 0.
        window: each query sees only the last ``window`` tokens up to itself; None: all. Tokens before every window are
            not read, but for ``sinks``.
        sinks: the first ``sinks`` tokens of each sequence, from its first visible one on, stay visible (attention
            sinks, arXiv 2309.17453).
        max_expanded_tokens: cached tokens that are expanded to keys and values at a time, but for one longer query;
            None: 16,384, or as many as take 256 MiB.
        num_splits: pieces per sequence of the decode op's calls, as in :func:`plan_mla_decode`.
        has_padding: rows of the block table may pad the batch. False spares layers a look for tokens without a page.
        launch_flop: FLOP in the time that a launch takes, by which a batch of short prompts runs the absorbed form;
            None: as measured on a GPU, 0 on a CPU.
        backend: as in :func:`mla_attention`.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    window, sinks = check_window(window, sinks)
    if (rope_cache is None) != (qk_rope_head_dim is not None):
        was = "None" if rope_cache is None else "given"
        raise ValueError(f"qk_rope_head_dim is {qk_rope_head_dim} where rope_cache is {was}; expected one of the two")
    heads, width = num_attention_heads, latent_cache.shape[-1]
    groups, rope = (1, qk_rope_head_dim) if rope_cache is None else rope_cache.shape[2:]
    pages = latent_cache if rope_cache is None else rope_cache
    has_key_codes = pages.dtype == torch.int8
    geometry = MLAGeometry(
        heads, groups, width, rope, qk_nope_head_dim, v_head_dim, num_key_value_heads,
        rope_from_latent=rope_cache is None, key_bits=8 if has_key_codes else 16,
    )  # fmt: skip
    like = latent_cache if has_key_codes else pages
    query = pages.new_empty((), dtype=dtype or like.dtype).expand(heads, width)
    decode_plan = partial(plan_mla_decode, qk_rope_head_dim=rope, latent_dtype=latent_cache.dtype, backend=backend)
    if max_expanded_tokens is None:
        max_expanded_tokens = expanded_tokens(geometry, query.dtype.itemsize)
    if launch_flop is None:
        launch_flop = LAUNCH_FLOP if block_table.is_cuda else 0
    return _plan(
        decode_plan, query, pages, block_table, cache_seqlens, lengths, cache_starts, window, sinks,
        absorbs_up_to(geometry), max_expanded_tokens, num_splits, has_padding, form_costs(geometry), launch_flop,
    )  # fmt: skip


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
    max_expanded_tokens: int | None = None,
    num_splits: int | None = None,
    has_padding: bool = True,
    backend: str | None = None,
) -> MixedPlan:
    """A plan for calls of :func:`gqa_attention`.

    Args:
        key_cache: [P, page, h_kv, d_k]; only its shape, dtype and device are read, as of ``value_cache``.
        value_cache: [P, page, h_kv, d_v].
        max_expanded_tokens: cached tokens that are gathered at a time; None as in :func:`plan_mla_attention`.
        block_table, cache_seqlens, lengths, num_attention_heads, cache_starts, window, sinks, num_splits, has_padding,
            backend: as in :func:`plan_mla_attention`.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    window, sinks = check_window(window, sinks)
    query = key_cache.new_empty(()).expand(num_attention_heads, key_cache.shape[3])
    if max_expanded_tokens is None:
        elements = key_cache.shape[2] * (key_cache.shape[3] + value_cache.shape[3])
        max_expanded_tokens = expanded_at_a_time(elements * query.dtype.itemsize)
    decode_plan = partial(plan_gqa_decode, v_head_dim=value_cache.shape[3], backend=backend)
    return _plan(
        decode_plan, query, key_cache, block_table, cache_seqlens, lengths, cache_starts, window, sinks,
        MAX_DECODE_QUERY_LENGTH, max_expanded_tokens, num_splits, has_padding,
    )  # fmt: skip


def _plan(
    decode_plan: Callable[..., DecodePlan], query: Tensor, pages: Tensor, block_table: Tensor, cache_seqlens: Tensor,
    lengths: Tensor, cache_starts: Tensor | None, window: int | None, sinks: int, short: int, max_expanded_tokens: int,
    num_splits: int | None, has_padding: bool, costs: dict[str, FormCost] | None = None, launch_flop: int = 0,
) -> MixedPlan:  # fmt: skip
    """``query`` [H, d], with the queries' dtype and device, and ``pages``: what ``decode_plan`` looks at; ``costs``: of
    the forms, where a batch may be absorbed to save launches."""
    batch, page_size = sizes_of("block_table", block_table, "B max_pages")["B"], pages.shape[1]
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
    if (least := min(query_lengths, default=0)) < 0:
        raise argument_error(f"lengths[0, {query_lengths.index(least)}]", least, "at least 0 new tokens")
    limits = (-1 if window is None else window, sinks)
    layout = lay_out(query_lengths, cached_lengths, starts, short, max_expanded_tokens, *limits)
    if launch_flop and layout.waves:
        absorbed = lay_out(query_lengths, cached_lengths, starts, ABSORBS_ALL, max_expanded_tokens, *limits)
        if saves_launches(costs, layout, absorbed, launch_flop):
            short, layout = ABSORBS_ALL, absorbed
    index, workspace, given = [], [], (block_table, cache_seqlens, cache_starts)
    for group in layout.groups:
        if not group.has_pieces:
            rows = slice(group.rows[0], group.rows[-1] + 1)
            mine = [None if x is None else x[rows] for x in given]
        else:
            mine, packed = _rows_of_pieces(group, query_lengths, given)
            index += packed
        queries = query.expand(len(group.rows), group.seqlen_q, *query.shape)
        options = {"cache_starts": mine[2], "window": window, "sinks": sinks, "num_splits": num_splits}
        plan = decode_plan(queries, pages, *mine[:2], **options)
        index += plan.schedule, plan.splits
        workspace += plan.partial_out, plan.partial_lse
    for wave in layout.waves:
        index += _index_wave(wave, block_table, cache_seqlens, page_size, sinks, has_padding)
    flat = [F.pad(tensor.flatten(), (0, -tensor.numel() % ALIGNMENT)) for tensor in index]
    shapes = [[tensor.ndim, *tensor.shape, *[0] * (5 - tensor.ndim)] for tensor in (*index, *workspace)]
    return MixedPlan(
        lengths, block_table, cache_seqlens, cache_starts, torch.cat([cache_seqlens.new_empty(0), *flat]),
        block_table.new_empty(sum(x.numel() + -x.numel() % ALIGNMENT for x in workspace), dtype=torch.float32),
        torch.tensor(shapes, dtype=torch.int64).view(-1, 6), short, max_expanded_tokens, *limits, page_size,
        num_splits or 0,
    )  # fmt: skip


def _rows_of_pieces(
    group: Group, query_lengths: tuple[int, ...], batch: tuple[Tensor | None, ...]
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Block table, lengths and starts of a group of pieces of a batch's; and all its tensors that are packed."""
    device, offset, size = batch[0].device, [0, *accumulate(query_lengths)], group.seqlen_q
    begins = [offset[row] + first for row, first in zip(group.rows, group.first_query, strict=True)]
    behind = [query_lengths[row] - q - size for row, q in zip(group.rows, group.first_query, strict=True)]
    rows, behind, token = _to_device([group.rows, behind, begins], device)
    mine = [None if tensor is None else tensor.index_select(0, rows) for tensor in batch]
    mine[1] = (mine[1] - behind).clamp_min(0)
    if group.first_token >= 0:
        return mine, [tensor for tensor in mine if tensor is not None]
    result_of = {first + q: piece * size + q for piece, first in enumerate(begins) for q in range(size)}
    tokens = (token[:, None] + torch.arange(size, dtype=torch.int32, device=device)).flatten()
    targets_and_sources = _to_device([list(result_of), list(result_of.values())], device)
    return mine, [*(tensor for tensor in mine if tensor is not None), tokens, *targets_and_sources]


def _index_wave(
    wave: Wave, block_table: Tensor, cache_seqlens: Tensor, page_size: int, sinks: int, has_padding: bool
) -> list[Tensor]:
    """``cu_seqlens_q`` of a wave, then the fields of each :class:`ChunkPart`."""
    device, table = block_table.device, block_table[wave.first : wave.stop]
    tensors = [*_to_device([[0, *accumulate(wave.query_lengths)]], device)]
    for chunk in wave.chunks:
        bounds, begins = _to_device([[0, *accumulate(chunk.lengths)], [*chunk.first, 0]], device)
        token = torch.arange(chunk.tokens, dtype=torch.int32, device=device)
        sequence = torch.searchsorted(bounds[1:], token, right=True, out_int32=True)
        position = token + (begins - bounds)[sequence.long()]
        if chunk.gaps:
            (gaps,) = _to_device([chunk.gaps], device)
            position = position + gaps[sequence.long()] * (token - bounds[sequence.long()] >= sinks)
        slots = slots_of(table, sequence, position, page_size)
        _check_pages(slots, wave.first + sequence, position, cache_seqlens)
        lost = slots < 0 if has_padding else slots[:0]
        tensors += slots.clamp_min(0), lost.int(), position, bounds
    return tensors


def _check_pages(slots: Tensor, sequence: Tensor, position: Tensor, cache_seqlens: Tensor) -> None:
    """Raise ValueError, on the CPU, where a token of a sequence that is no padding has no page. On other devices, which
    the host does not wait for, such tokens are read as zeros."""
    if slots.device.type != "cpu":
        return
    lost = (slots < 0) & (cache_seqlens[sequence.long()] > 0)
    if bool(lost.any()):
        first = int(lost.nonzero()[0])
        raise ValueError(
            f"block_table has no page for token {int(position[first])} of sequence {int(sequence[first])}; expected one"
            " for every cached and new token"
        )


def _to_device(rows: list, device: torch.device) -> Tensor:
    """int32 [rows, n] from lists, in one copy that the host does not wait for."""
    tensor = torch.tensor(rows, dtype=torch.int32, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def check_lengths(layout: BatchLayout, lengths: Tensor, cache_seqlens: Tensor) -> None:
    """Raise ValueError if sequences whose calls were made from ``lengths`` have other lengths by now.

    ``cache_seqlens`` is on the CPU, where reading costs nothing; the decode op checks the other sequences. 0 is a row
    of padding.
    """
    rows = {row for group in layout.groups if group.has_pieces for row in group.rows}
    rows.update(row for wave in layout.waves for row in range(wave.first, wave.stop))
    for row in sorted(rows):
        planned, is_now = int(lengths[:2, row].sum()), int(cache_seqlens[row])
        if is_now not in (0, planned):
            raise ValueError(
                f"plan was made for {planned} tokens of sequence {row}; expected {is_now}, its cache_seqlens: make"
                " a new plan"
            )
