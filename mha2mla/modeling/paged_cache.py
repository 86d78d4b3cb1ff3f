"""Pages of all layers of a model, the sequences in them, and what a step over some of these shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mha2mla.kernels import MAX_BATCH
from mha2mla.modeling.batch import CacheCapacityError, SequenceBatch
from mha2mla.modeling.cache_layout import PAGE_SIZE, CacheLayout
from mha2mla.modeling.pages import NO_PAGE, OutOfPagesError, PageAllocator, StaleBatchError
from mha2mla.modeling.registry import AttentionBackend, AttentionConstants
from mha2mla.modeling.step import AttentionStep, DecodePlans, mixed_plans


class PagedLayer(NamedTuple):
    """One layer of a PagedCache: what serves it, what its cache is made of, that by the layout's names, each tensor
    [num_pages, page_size, ...], and the model's dtype."""

    backend: AttentionBackend
    constants: AttentionConstants
    layout: CacheLayout
    tensors: dict[str, Tensor]
    dtype: torch.dtype


@dataclass(frozen=True)
class BatchStep(AttentionStep):
    """What a forward pass over a ragged batch hands to its layers.

    Attributes:
        batch: the step's sequences, the same for all layers.
        allocator: of the cache, which knows whether the batch's sequences are still what they were.
        planned_for: [2, B] int64 on the CPU, the batch's tickets when the plans were made.
        prepared: the plans, where all sequences bring as many tokens and one call of the decode op serves them.
    """

    batch: SequenceBatch
    allocator: PageAllocator
    planned_for: Tensor
    prepared: DecodePlans | None

    def check(self) -> None:
        """Raise StaleBatchError if a sequence of the batch ended or changed, or the plans are for another batch.

        By what the host knows: nothing is read on the device. Replays of a CUDA graph run no host code, so there
        :meth:`load` is what refuses.
        """
        self.allocator.check_generations(*self.batch.tickets.tolist())
        if not torch.equal(self.planned_for, self.batch.tickets):
            raise StaleBatchError("batch was replaced after the plans were made; expected a call of refresh() between")

    def load(self, batch: SequenceBatch) -> None:
        """Puts another batch in the place of the step's own (:meth:`SequenceBatch.copy_`); then :meth:`refresh`, or
        replay the CUDA graph that does.

        Raises:
            StaleBatchError: a sequence of ``batch`` ended or changed since it was made; nothing is changed.
            ValueError: its shapes or numbers of new tokens are others.
        """
        self.allocator.check_generations(*batch.tickets.tolist())
        self.batch.copy_(batch)

    def refresh(self) -> None:
        """Plans again, in place, for what the batch's tensors now say (:meth:`load`); for CUDA graphs.

        Raises:
            StaleBatchError: a sequence of the batch ended or changed since it was made.
            ValueError: the batch has queries of more than 8 tokens.
        """
        self.allocator.check_generations(*self.batch.tickets.tolist())
        if self.prepared is not None:
            self.prepared.refresh(self.batches)
        else:
            for plan in {id(plan): plan for plan in self.plans}.values():
                plan.refresh()
        self.planned_for.copy_(self.batch.tickets)

    def run(self, layer_idx: int, tensors: Mapping[str, Tensor | None]) -> tuple[dict[str, Tensor], Tensor | None]:
        """As of any step.

        Raises:
            StaleBatchError: as :meth:`check`, which the first layer asks.
        """
        if layer_idx == 0 and not torch.compiler.is_compiling():
            self.check()
        return super().run(layer_idx, tensors)


class PagedCache:
    """The cache of an engine: sequences come, grow by any number of tokens, fork and go.

    Args:
        layers: backend and constants of every layer (:meth:`MHA2MLAForCausalLM.paged_cache` gives those of a model).
        num_pages: pages of each layer.
        page_size: tokens per page.
        dtype: of the model.
        device: of all tensors.

    Attributes:
        allocator: who owns which page.
        layers: what serves them, and their pages.
    """

    def __init__(
        self,
        layers: Sequence[tuple[AttentionBackend, AttentionConstants]],
        num_pages: int,
        page_size: int = PAGE_SIZE,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.allocator = PageAllocator(num_pages, page_size)
        self.device = torch.device(device)
        layouts = [backend.cache_layout(constants.geometry, page_size, dtype) for backend, constants in layers]
        self.layers = tuple(
            PagedLayer(*served, layout, layout.make(num_pages, self.device), dtype)
            for served, layout in zip(layers, layouts, strict=True)
        )

    @property
    def tensors(self) -> tuple[dict[str, Tensor], ...]:
        """Per layer, its pages by the layout's names."""
        return tuple(layer.tensors for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.allocator.num_pages * sum(layer.layout.bytes_per_page for layer in self.layers)

    def open(self) -> int:
        """A new, empty sequence."""
        return self.allocator.allocate()

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, on the same pages until one of the two grows.

        Run a batch that brings new tokens of the sequence before: afterwards it is stale.
        """
        return self.allocator.fork(sequence)

    def crop(self, sequence: int, length: int) -> None:
        """Forgets the tokens of a sequence from ``length`` on, such as rejected drafts.

        Raises:
            ValueError: no such sequence, ``length`` is negative or more than it has, or tokens that the next one would
                see were given back.
        """
        pages, window = self.allocator.pages(sequence), self.limits[0]
        given = max((i + 1 for i, page in enumerate(pages) if page == NO_PAGE), default=0) * self.allocator.page_size
        if given and length < (least := given - 1 + window):
            raise ValueError(f"length is {length}; expected at least {least}: tokens before {given} were given back")
        self.allocator.truncate(sequence, length)

    @property
    def limits(self) -> tuple[int | None, int]:
        """Window and sinks that hold what any layer sees; a window of None: some layer sees everything."""
        windows, sinks = zip(*(layer.constants.limits for layer in self.layers), strict=True)
        return (None if None in windows else max(windows)), max(sinks)

    def give_back(self, sequence: int) -> int:
        """Pages of a sequence that no further token sees, between attention sinks and window of all layers, are free
        again. Run a batch that brings new tokens of the sequence before: afterwards it is stale.

        Returns:
            How many pages the sequence gave back; none where some layer sees everything.

        Raises:
            ValueError: no such sequence.
        """
        (window, sinks), length = self.limits, self.allocator.length(sequence)
        if window is None or length + 1 - window <= sinks:
            return 0
        return self.allocator.give_back(sequence, sinks, length + 1 - window)

    def close(self, sequence: int) -> None:
        """Ends a sequence and gives its pages back."""
        self.allocator.free(sequence)

    def extend(
        self,
        new_tokens: Mapping[int, int],
        *,
        max_pages: int | None = None,
        num_sequences: int | None = None,
    ) -> SequenceBatch:
        """Makes room for new tokens of some sequences, and says where they go. All of it or nothing.

        Args:
            new_tokens: per sequence.
            max_pages, num_sequences: as in :meth:`SequenceBatch.build`.

        Raises:
            CacheCapacityError: there are too few free pages, or a sequence would have more than ``max_pages``.
            ValueError: no such sequence, a negative number of tokens, or more sequences than ``num_sequences``.
        """
        allocator = self.allocator
        cached = [allocator.length(sequence) for sequence in new_tokens]
        try:
            growth = allocator.plan_growth(new_tokens)
        except OutOfPagesError as error:
            raise CacheCapacityError(str(error)) from error
        for sequence, pages in zip(new_tokens, growth.pages, strict=True):
            if max_pages is not None and len(pages) > max_pages:
                raise CacheCapacityError(
                    f"sequence {sequence} would have {len(pages)} pages; expected at most max_pages={max_pages}"
                )
        # Everything that can fail comes before the commit; copies go to pages that are free until then.
        batch = SequenceBatch.build(
            list(new_tokens.values()),
            cached,
            growth.pages,
            allocator.page_size,
            num_pages=allocator.num_pages,
            max_pages=max_pages,
            num_sequences=num_sequences,
            tickets=[(sequence, growth.generation) for sequence in new_tokens],
            device=self.device,
        )
        for layer in self.layers:
            layer.layout.copy_pages(layer.tensors, growth.copies)
        allocator.commit(growth)
        return batch

    def step(self, batch: SequenceBatch) -> BatchStep:
        """Plans for a batch of :meth:`extend`: one for all layers of the same backend, geometry and window.

        Raises:
            StaleBatchError: a sequence of the batch was closed, extended, cropped or forked since.
        """
        self.allocator.check_generations(*batch.tickets.tolist())
        count, length, prepared = len(self.layers), batch.uniform_length, None
        batches, everyone = (batch,) * count, (True,) * count
        fits = length is not None and batch.num_sequences <= MAX_BATCH
        if fits and all(layer.backend.plan_decode is not None for layer in self.layers):
            prepared = DecodePlans.allocate(self.layers, everyone, (batch.block_table,) * count, length)
            prepared.refresh(batches)
        plans = mixed_plans(self.layers, everyone, batches) if prepared is None else prepared.of_layer
        return BatchStep(self.layers, batches, plans, batch, self.allocator, batch.tickets.clone(), prepared)
