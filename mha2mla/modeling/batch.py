"""One step's sequences: lengths, page table, positions and slots, prepared once and shared by all layers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor
from torch.export import Dim, ShapesCollection

from mha2mla.kernels import MAX_DECODE_QUERY_LENGTH, MAX_SLOTS, slots_of
from mha2mla.modeling.pages import NO_PAGE


class CacheCapacityError(ValueError):
    """New tokens have no place in the cache; nothing was changed."""


class UniformBatch(NamedTuple):
    """B sequences that bring S new tokens each, as a LatentCache has them: what backends read of a SequenceBatch.

    ``positions`` and ``slots`` [B * S], ``block_table`` [B, max_pages], ``cache_seqlens`` and ``cache_starts`` [B] are
    as there; ``lengths`` too, where a plan needs them: of queries of more than 8 tokens.
    """

    positions: Tensor
    slots: Tensor
    block_table: Tensor
    cache_seqlens: Tensor
    cache_starts: Tensor | None
    lengths: Tensor | None = None

    @property
    def has_padding(self) -> bool:
        """False: rows that pad an engine's batch bring no tokens."""
        return False


@dataclass(frozen=True)
class SequenceBatch:
    """A ragged batch of B sequences that bring N new tokens to a paged cache.

    Rows are sorted by the number of new tokens, so that sequences which run together lie together; callers keep their
    own order with :meth:`flatten` and :meth:`unflatten`. It is a pytree: an argument of compiled and exported
    functions.

    Attributes:
        cu_seqlens_q: [B + 1] int32, where the tokens of each row begin.
        cache_seqlens: [B] int32, tokens with the new ones; 0 for rows that pad the batch.
        cache_starts: [B] int32, first visible token, or None.
        block_table: [B, max_pages] int32, NO_PAGE behind a sequence's pages.
        positions: [N] int32, of each token in its sequence.
        slots: [N] int32, page · page_size + offset of each token; -1: none.
        lengths: [3, B] int32 on the CPU: new tokens, cached tokens, first visible token; the host decides by it.
        order: [B] int64 on the CPU, which of the caller's sequences each row is; -1 for rows that pad the batch.
        sequence_versions: [2, B] int64 on the CPU: the sequence of each row and its generation, by which a
            :class:`~mha2mla.modeling.pages.PageAllocator` knows whether the row's pages are still its own; -1 for rows
            that pad the batch, and in batches that no allocator vouches for.
        page_size: tokens per page.
    """

    cu_seqlens_q: Tensor
    cache_seqlens: Tensor
    cache_starts: Tensor | None
    block_table: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    order: Tensor
    sequence_versions: Tensor
    page_size: int

    @classmethod
    def build(
        cls,
        query_lengths: Sequence[int],
        cached_lengths: Sequence[int],
        pages: Sequence[Sequence[int]],
        page_size: int,
        *,
        num_pages: int | None = None,
        cache_starts: Sequence[int] | None = None,
        max_pages: int | None = None,
        num_sequences: int | None = None,
        sequence_versions: Sequence[tuple[int, int]] | None = None,
        device: torch.device | str = "cpu",
    ) -> SequenceBatch:
        """A batch from what the host knows. Two small copies to the device, and nothing read from it.

        Args:
            query_lengths: new tokens per sequence, in the caller's order.
            pages: of each sequence, with room for the new tokens (:class:`~mha2mla.modeling.pages.PageAllocator`).
            num_pages: of the cache; None: not checked.
            max_pages: columns of the page table; default the most that a sequence has, at least one.
            num_sequences: rows to pad the batch to, for a CUDA graph of that size; they have as many new tokens as the
                shortest sequence (one, if there is none: what to capture a graph over), cache nothing and see nothing.
            sequence_versions: sequence and generation of each.

        Raises:
            CacheCapacityError: a sequence's pages do not hold its tokens, are not in the cache, are more than
                ``max_pages``, or lie beyond what int32 slots address; or two sequences would write to one page.
            ValueError: naming the argument, what it was and what it must be.
        """
        count = len(query_lengths)
        starts = [0] * count if cache_starts is None else list(cache_starts)
        sequence_versions = [(-1, -1)] * count if sequence_versions is None else list(sequence_versions)
        lengths = {"query_lengths": query_lengths, "cached_lengths": cached_lengths, "cache_starts": starts}
        for name, given in {**lengths, "pages": pages, "sequence_versions": sequence_versions}.items():
            if len(given) != count:
                raise ValueError(f"{name} has {len(given)} entries; expected {count}, one per sequence")
            if name in lengths and any(value < 0 for value in given):
                raise ValueError(f"{name} is {list(given)}; expected no negative number")
        width = max(1, *(len(row) for row in pages)) if pages else 1
        _check_capacity(query_lengths, cached_lengths, pages, page_size, num_pages)
        if max_pages is not None and max_pages < width:
            raise CacheCapacityError(f"max_pages is {max_pages}; expected at least {width}, the longest sequence's")
        if num_sequences is not None and num_sequences < count:
            raise ValueError(f"num_sequences is {num_sequences}; expected at least {count}, those of the batch")
        order, shortest = _row_order(query_lengths, 0 if num_sequences is None else num_sequences - count)

        def in_order(values: Sequence, fill: object) -> list:
            return [fill if i < 0 else values[i] for i in order]

        queries = in_order(query_lengths, shortest)
        cached, starts = in_order(cached_lengths, 0), in_order(starts, 0)
        stops = [0 if i < 0 else cached_lengths[i] + query_lengths[i] for i in order]
        table = torch.full((len(order), max_pages or width), NO_PAGE, dtype=torch.int32)
        for row, mine in zip(table, in_order(pages, ()), strict=True):
            row[: len(mine)] = torch.tensor(mine, dtype=torch.int32)
        cu_seqlens = [0, *itertools.accumulate(queries)]
        device = torch.device(device)
        packed = torch.tensor([cu_seqlens, [*cached, 0], [*stops, 0], [*starts, 0]], dtype=torch.int32)
        packed, table = to_device(packed, device), to_device(table, device)
        boundaries, cached_on, seqlens_on, starts_on = (row.clone() for row in packed)
        positions, slots = token_places(boundaries, cached_on[:-1], table, cu_seqlens[-1], page_size)
        versions = torch.tensor(in_order(sequence_versions, (-1, -1)), dtype=torch.int64)
        return cls(
            cu_seqlens_q=boundaries,
            cache_seqlens=seqlens_on[:-1],
            cache_starts=None if cache_starts is None else starts_on[:-1],
            block_table=table,
            positions=positions,
            slots=slots,
            lengths=torch.tensor([queries, cached, starts], dtype=torch.int32).view(3, -1),
            order=torch.tensor(order, dtype=torch.int64),
            sequence_versions=versions.view(-1, 2).T.contiguous(),
            page_size=page_size,
        )

    @property
    def num_sequences(self) -> int:
        """B, rows of padding included."""
        return self.block_table.shape[0]

    @property
    def num_tokens(self) -> int:
        """N, padding included."""
        return self.positions.shape[0]

    @property
    def has_padding(self) -> bool:
        """True where rows pad the batch, which have new tokens and no pages."""
        return -1 in self.order.tolist()

    @property
    def uniform_length(self) -> int | None:
        """New tokens of each row, if all rows bring as many, 8 at most."""
        return uniform_length(self.lengths[0].tolist(), self.num_tokens)

    @property
    def max_seqlen_q(self) -> int:
        """The largest number of new tokens."""
        return max(self.lengths[0].tolist(), default=0)

    @property
    def last_tokens(self) -> Tensor:
        """[B] int64, the last token of each row; token 0 for rows without one."""
        return (self.cu_seqlens_q[1:].long() - 1).clamp_min(0)

    def copy_(self, other: SequenceBatch) -> SequenceBatch:
        """Puts another batch into this one's tensors, which stay where they are: for replaying a CUDA graph.

        :meth:`AttentionStep.load` does so for the batch of a step, and refuses a stale one.

        Raises:
            ValueError: shapes or numbers of new tokens differ, or there are long queries, whose launches depend on
                lengths that only the host knows.
        """
        same = torch.equal(self.lengths[0], other.lengths[0]) and self.page_size == other.page_size
        if not same or self.block_table.shape != other.block_table.shape:
            raise ValueError(
                f"other has {other.num_sequences} sequences of {other.block_table.shape[1]} pages and query lengths"
                f" {other.lengths[0].tolist()}; expected {self.num_sequences} of {self.block_table.shape[1]} and"
                f" {self.lengths[0].tolist()}"
            )
        if self.max_seqlen_q > MAX_DECODE_QUERY_LENGTH:
            raise ValueError(f"max_seqlen_q is {self.max_seqlen_q}; expected at most {MAX_DECODE_QUERY_LENGTH}")
        if (self.cache_starts is None) != (other.cache_starts is None):
            raise ValueError("cache_starts is given in one batch only; expected both or neither")
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, Tensor):
                mine.copy_(theirs, non_blocking=True)
        return self

    def flatten(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors of the caller's sequences, each [S_i, ...], as [N, ...] in the order of the rows; zeros for padding.

        Raises:
            ValueError: another number of sequences, or of new tokens in one.
        """
        own = [i for i in self.order.tolist() if i >= 0]
        if len(parts) != len(own):
            raise ValueError(f"parts has {len(parts)} entries; expected {len(own)}, one per sequence")
        if not parts:
            raise ValueError("parts is empty; expected at least one sequence")
        rows = []
        for index, length in zip(self.order.tolist(), self.lengths[0].tolist(), strict=True):
            part = parts[index] if index >= 0 else parts[0].new_zeros(length, *parts[0].shape[1:])
            if part.shape[0] != length:
                raise ValueError(f"parts[{index}] has {part.shape[0]} tokens; expected {length}")
            rows.append(part)
        return torch.cat(rows)

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        """Views [S_i, ...] of flat [N, ...], in the caller's order, without padding."""
        pieces = flat.split(self.lengths[0].tolist())
        mine = {index: piece for index, piece in zip(self.order.tolist(), pieces, strict=True) if index >= 0}
        return [mine[index] for index in range(len(mine))]

    def dynamic_shapes(self, shapes: ShapesCollection | None = None) -> ShapesCollection:
        """Declares for ``torch.export`` which sizes vary: sequences, tokens, and columns of the page table.

        Args:
            shapes: what else the caller declares; added to.
        """
        shapes = ShapesCollection() if shapes is None else shapes
        for field in fields(self):
            tensor = getattr(self, field.name)
            if isinstance(tensor, Tensor):
                first = 1 if field.name in ("lengths", "sequence_versions") else 0
                shapes[tensor] = dict.fromkeys(range(first, tensor.ndim), Dim.AUTO)
        return shapes


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


torch.export.register_dataclass(SequenceBatch, serialized_type_name="mha2mla.modeling.SequenceBatch")


def uniform_length(query_lengths: Sequence[int], num_tokens: int) -> int | None:
    """New tokens of each sequence if all bring as many, at most 8; else None.

    Args:
        query_lengths: per row; 0 for rows behind the sequences that pad a CUDA graph, whose tokens are counted in
            ``num_tokens``.
        num_tokens: rows times that length.
    """
    first = query_lengths[0] if len(query_lengths) else 0
    if not 0 < first <= MAX_DECODE_QUERY_LENGTH or first * len(query_lengths) != num_tokens:
        return None
    present = list(query_lengths[: sum(length > 0 for length in query_lengths)])
    return first if present == [first] * len(present) else None


def token_places(
    cu_seqlens_q: Tensor, cached_lengths: Tensor, block_table: Tensor, num_tokens: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Position and slot [N] int32 of every new token; 0 and -1 behind the last row. On the device."""
    token = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens_q.device)
    sequences = torch.searchsorted(cu_seqlens_q[1:], token, right=True, out_int32=True)
    inside = sequences < cached_lengths.shape[0]
    sequences = torch.where(inside, sequences, -1)
    if cached_lengths.shape[0] == 0:
        return torch.zeros_like(token), torch.full_like(token, -1)
    row = sequences.clamp_min(0).long()
    positions = torch.where(inside, cached_lengths[row] + token - cu_seqlens_q[row], 0)
    return positions, slots_of(block_table, sequences, positions, page_size)


def _row_order(query_lengths: Sequence[int], padding: int) -> tuple[list[int], int]:
    """The sequence of each row, by their numbers of new tokens, -1 for ``padding`` rows with as many as the shortest;
    and how many these are, one if there is no sequence."""
    rows = sorted(range(len(query_lengths)), key=lambda i: query_lengths[i])
    shortest = min(query_lengths, default=1)
    place = next((at for at, i in enumerate(rows) if query_lengths[i] > shortest), len(rows))
    return [*rows[:place], *[-1] * padding, *rows[place:]], shortest


def _check_capacity(
    query_lengths: Sequence[int],
    cached_lengths: Sequence[int],
    pages: Sequence[Sequence[int]],
    page_size: int,
    num_pages: int | None,
) -> None:
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; expected at least 1")
    last = MAX_SLOTS // page_size - 1 if num_pages is None else min(num_pages, MAX_SLOTS // page_size) - 1
    for sequence, (old, mine) in enumerate(zip(cached_lengths, pages, strict=True)):
        whole = old // page_size  # some may be given back; what is written lies behind
        lowest = min(mine[whole:], default=0), min(mine, default=0) - NO_PAGE
        if min(lowest) < 0 or max(mine, default=last) > last:
            least = [NO_PAGE if place < whole else 0 for place in range(len(mine))]
            page = next(page for page, low in zip(mine, least, strict=True) if not low <= page <= last)
            raise CacheCapacityError(f"pages[{sequence}] has page {page}; expected 0 to {last}")
    # All pages, in every step: counted without an object for each, which the garbage collector would go through.
    owners = Counter(itertools.chain.from_iterable(pages))
    for sequence, (new, old, mine) in enumerate(zip(query_lengths, cached_lengths, pages, strict=True)):
        if new + old > len(mine) * page_size:
            raise CacheCapacityError(
                f"sequence {sequence} will have {old} + {new} tokens; expected at most {len(mine) * page_size}, what"
                f" its {len(mine)} pages of {page_size} hold"
            )
        for page in mine[old // page_size : -(-(old + new) // page_size)] if new else ():
            if owners[page] > 1:
                tables = [index for index, others in enumerate(pages) if page in others]
                raise CacheCapacityError(
                    f"sequence {sequence} would write to page {page}, which is in the tables of {tables};"
                    " expected a page of its own (PageAllocator.plan_growth gives one)"
                )
