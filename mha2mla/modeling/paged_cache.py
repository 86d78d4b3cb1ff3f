"""Pages of all layers of a model, the sequences in them, and what a step over some of these shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha2mla.kernels import MixedPlan
from mha2mla.modeling.backends import AttentionBackend, AttentionConstants
from mha2mla.modeling.batch import CacheCapacityError, SequenceBatch
from mha2mla.modeling.pages import PageAllocator


@dataclass(frozen=True)
class BatchStep:
    """What a forward pass over a ragged batch hands to its layers.

    Attributes:
        batch: the step's sequences.
        backends, constants, caches, plans: per layer; layers that can share a plan do.
    """

    batch: SequenceBatch
    backends: tuple[AttentionBackend, ...]
    constants: tuple[AttentionConstants, ...]
    caches: tuple[Mapping[str, Tensor], ...]
    plans: tuple[MixedPlan, ...]

    def refresh(self) -> None:
        """Plans again, in place, for what the batch's tensors now say (:meth:`SequenceBatch.copy_`); for CUDA graphs.

        Raises:
            ValueError: the batch has queries of more than 8 tokens.
        """
        for plan in {id(plan): plan for plan in self.plans}.values():
            plan.refresh()

    def attend(self, layer_idx: int, tensors: Mapping[str, Tensor | None]) -> Tensor:
        """Appends a layer's new tokens and attends; ``tensors`` by the backend's names. [N, H, d_v]."""
        backend = self.backends[layer_idx]
        return backend.run(
            tensors, self.caches[layer_idx], self.batch, self.plans[layer_idx], self.constants[layer_idx]
        )


class PagedCache:
    """The cache of an engine: sequences come, grow by any number of tokens, fork and go.

    Args:
        layers: backend and constants of every layer (:meth:`MHA2MLAForCausalLM.paged_cache` gives those of a model).
        num_pages: pages of each layer.
        page_size: tokens per page.
        dtype: of the model.
        device: of the tensors; one for each layer, or one for all.

    Attributes:
        allocator: who owns which page.
        layouts: per layer, what its cache is made of.
        tensors: per layer, by the layout's names, [num_pages, page_size, ...].
    """

    def __init__(
        self,
        layers: Sequence[tuple[AttentionBackend, AttentionConstants]],
        num_pages: int,
        page_size: int = 64,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.allocator = PageAllocator(num_pages, page_size)
        self.layers = tuple(layers)
        self.device = torch.device(device)
        self.layouts = tuple(
            backend.cache_layout(constants.geometry, page_size, dtype) for backend, constants in self.layers
        )
        self.tensors = tuple(layout.make(num_pages, self.device) for layout in self.layouts)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.allocator.num_pages * sum(layout.bytes_per_page for layout in self.layouts)

    def open(self) -> int:
        """A new, empty sequence."""
        return self.allocator.allocate()

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, on the same pages until one of the two grows."""
        return self.allocator.fork(sequence)

    def close(self, sequence: int) -> None:
        """Ends a sequence and gives its pages back."""
        self.allocator.free(sequence)

    def extend(
        self,
        new_tokens: Mapping[int, int],
        *,
        max_pages: int | None = None,
        num_sequences: int | None = None,
        num_tokens: int | None = None,
    ) -> SequenceBatch:
        """Makes room for new tokens of some sequences, and says where they go. All of it or nothing.

        Args:
            new_tokens: per sequence.
            max_pages, num_sequences, num_tokens: as in :meth:`SequenceBatch.build`.

        Raises:
            CacheCapacityError: there are too few free pages, or a sequence would have more than ``max_pages``.
            ValueError: no such sequence, or a negative number of tokens.
        """
        allocator, size = self.allocator, self.allocator.page_size
        cached = [allocator.length(sequence) for sequence in new_tokens]
        needed = self._pages_needed(new_tokens)
        if needed > allocator.num_free:
            raise CacheCapacityError(
                f"new_tokens asks for {sum(new_tokens.values())} tokens, {needed} pages of {size};"
                f" {allocator.num_free} of {allocator.num_pages} are free"
            )
        for (sequence, new), old in zip(new_tokens.items(), cached, strict=True):
            pages = -(-(new + old) // size)
            if max_pages is not None and pages > max_pages:
                raise CacheCapacityError(
                    f"sequence {sequence} would have {pages} pages; expected at most max_pages={max_pages}"
                )
        for sequence, new in new_tokens.items():
            copies = allocator.grow(sequence, new)
            for layout, tensors in zip(self.layouts, self.tensors, strict=True):
                layout.copy_pages(tensors, copies)
        return SequenceBatch.build(
            list(new_tokens.values()),
            cached,
            [allocator.pages(sequence) for sequence in new_tokens],
            size,
            num_pages=allocator.num_pages,
            max_pages=max_pages,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            device=self.device,
        )

    def _pages_needed(self, new_tokens: Mapping[int, int]) -> int:
        """Free pages that growing takes, one after another. Of a shared page's owners the last to write keeps it."""
        allocator = self.allocator
        shared: Counter[int] = Counter()
        needed = 0
        for sequence, new in new_tokens.items():
            if new < 0:
                raise ValueError(f"new_tokens[{sequence}] is {new}; expected at least 0")
            needed += allocator.pages_to_grow(sequence, new)
            if new and allocator.length(sequence) % allocator.page_size:
                shared[allocator.pages(sequence)[-1]] += 1
        return needed - sum(1 for page, writers in shared.items() if writers == allocator.owners(page) > 1)

    def step(self, batch: SequenceBatch) -> BatchStep:
        """Plans for a batch of :meth:`extend`: one for all layers of the same backend, geometry and window."""
        plans: dict[tuple, MixedPlan] = {}
        keys = [(backend.name, constants.geometry, constants.window) for backend, constants in self.layers]
        for key, (backend, constants), tensors in zip(keys, self.layers, self.tensors, strict=True):
            if key not in plans:
                plans[key] = backend.plan(tensors, batch, constants)
        shared = dict(zip(plans, with_one_workspace(plans.values()), strict=True))
        return BatchStep(
            batch,
            tuple(backend for backend, _ in self.layers),
            tuple(constants for _, constants in self.layers),
            self.tensors,
            tuple([shared[key] for key in keys]),
        )


def with_one_workspace(plans: Iterable[MixedPlan]) -> list[MixedPlan]:
    """The plans over the largest workspace among them: layers run one after another."""
    plans = list(plans)
    largest = max((plan.workspace for plan in plans), key=Tensor.numel, default=None)
    return [replace(plan, workspace=largest[: plan.workspace.numel()]) for plan in plans]
