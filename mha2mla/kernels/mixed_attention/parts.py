"""A ragged batch's plan: its parts, and how they lie in its few tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.export import Dim, ShapesCollection
from torch.nn import functional as F

from mha2mla.kernels.mixed_attention.layout import MAX_DECODE_QUERY_LENGTH, BatchLayout, lay_out
from mha2mla.kernels.split_kv.plan import DecodePlan

ALIGNMENT = 32  # numbers; pieces of the flat tensors begin at multiples of it, 128 bytes


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
    """Tensors of a chunk's tokens: ``slots [T]`` in the cache, -1 without a page (rows that pad the batch), and
    ``positions [T]`` in their sequences; and ``cu_seqlens_k [sequences of the wave + 1]``. int32."""

    slots: Tensor
    positions: Tensor
    cu_seqlens_k: Tensor


class Parts(NamedTuple):
    """A plan by its parts: groups; and per wave ``cu_seqlens_q`` and its chunks."""

    layout: BatchLayout
    groups: tuple[GroupPart, ...]
    waves: tuple[tuple[Tensor, tuple[ChunkPart, ...]], ...]
    window: int
    sinks: int
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
            sinks=self.sinks,
            schedule=part.schedule,
            splits=part.splits,
            partial_out=part.partial_out,
            partial_lse=part.partial_lse,
        )


class Pieces:
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


@dataclass(frozen=True)
class MixedPlan:
    """Calls of a ragged batch, with their index tensors and workspace.

    Made by :func:`plan_mla_attention` or :func:`plan_gqa_attention`. All layers that share lengths, page table, window
    and widths may share a plan, one after another. It holds as many tensors whatever the batch, so that one compiled or
    exported function takes any; what the host decides by lies on the CPU.

    Attributes:
        lengths: [3, B] int32 on the CPU: new tokens, tokens cached before them, first visible token, per sequence.
        block_table, cache_seqlens, cache_starts: the batch's own.
        index: int32, what the calls need beside them, in pieces.
        workspace: float32, partial results of the decode op, in pieces; written by every call.
        shapes: [pieces, 6] int64 on the CPU: number of dimensions and sizes of every piece, as :meth:`parts` reads
            them.
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

    def parts(self) -> Parts:
        """The plan by its parts. Reads nothing on the device."""
        layout = lay_out(
            *map(tuple, self.lengths.tolist()), self.short, self.max_expanded_tokens, self.window, self.sinks
        )
        given, place = iter(self.shapes.tolist()), [0, 0]
        index, workspace, batch = self.index, self.workspace, (self.block_table, self.cache_seqlens, self.cache_starts)

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
                mine = [t if t is None else t[rows] for t in batch]
                pieces = None
            else:
                mine = take(index, 2 if self.cache_starts is None else 3)
                mine += [None] * (3 - len(mine))
                pieces = PiecesPart(*take(index, 3))
            groups.append(GroupPart(*mine, pieces, *take(index, 2), *take(workspace, 2)))
        waves = tuple(
            [(take(index, 1)[0], tuple([ChunkPart(*take(index, 3)) for _ in wave.chunks])) for wave in layout.waves]
        )
        capacity = self.block_table.shape[1] * self.page_size
        return Parts(layout, tuple(groups), waves, self.window, self.sinks, capacity)

    def refresh(self) -> None:
        """Plans again, in place, for what the batch's own tensors now say: after :meth:`SequenceBatch.copy_`, inside a
        CUDA graph or before its replay.

        Raises:
            ValueError: there are queries of more than 8 tokens, whose calls depend on lengths that the host must know.
        """
        parts = self.parts()
        if parts.layout.waves or any(group.first_token < 0 for group in parts.layout.groups):
            raise ValueError(
                f"lengths has queries of up to {int(self.lengths[0].max())} tokens; expected at most"
                f" {MAX_DECODE_QUERY_LENGTH}, or a new plan"
            )
        for group, part in zip(parts.layout.groups, parts.groups, strict=True):
            torch.ops.mha2mla.split_kv_plan(
                part.cache_seqlens, part.cache_starts, parts.capacity, group.seqlen_q, True, self.window, self.sinks,
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
