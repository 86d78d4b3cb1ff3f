"""The paged cache of an engine: pages of all layers, the sequences in them, steps over these; a model of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels import MAX_BATCH
from mha2mla.modeling.batch import CacheCapacityError, SequenceBatch
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.pages import NO_PAGE, OutOfPagesError, PageAllocator
from mha2mla.modeling.registry import AttentionBackend, AttentionConstants
from mha2mla.modeling.served import batch_backends
from mha2mla.modeling.step import AttentionStep, CacheLayer, StepPlanner


class PagedCache:
    """The cache of an engine: sequences come, grow by any number of tokens, fork and go.

    Args:
        layers: backend and constants of every layer (:meth:`MHA2MLAForCausalLM.paged_cache` gives those of a model).
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
            CacheLayer(*served, layout.make(num_pages, self.device), dtype, layout)
            for served, layout in zip(layers, layouts, strict=True)
        )
        self._has_decode_plans = all(backend.plan_decode is not None for backend, _ in layers)

    @property
    def tensors(self) -> tuple[dict[str, Tensor], ...]:
        """Per layer, its pages by the layout's names."""
        return tuple(layer.tensors for layer in self.layers)

    @property
    def nbytes(self) -> int:
        return self.allocator.num_pages * sum(layer.layout.bytes_per_page for layer in self.layers)

    def open(self) -> int:
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
            The number of pages given back; 0 where some layer sees everything.

        Raises:
            ValueError: no such sequence.
        """
        (window, sinks), length = self.limits, self.allocator.length(sequence)
        if window is None or length + 1 - window <= sinks:
            return 0
        return self.allocator.give_back(sequence, sinks, length + 1 - window)

    def close(self, sequence: int) -> None:
        self.allocator.free(sequence)

    def extend(
        self, new_tokens: Mapping[int, int], *, max_pages: int | None = None, num_sequences: int | None = None
    ) -> SequenceBatch:
        """Makes room for new tokens of some sequences, and says where they go. All of it or nothing.

        Args:
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
            sequence_versions=[(sequence, growth.generation) for sequence in new_tokens],
            device=self.device,
        )
        for layer in self.layers if growth.copies else ():
            layer.layout.copy_pages(layer.tensors, growth.copies)
        allocator.commit(growth)
        return batch

    def step(self, batch: SequenceBatch) -> AttentionStep:
        """A step over a batch of :meth:`extend`, with plans of its own, which a CUDA graph may refresh.

        Raises:
            StaleBatchError: a sequence of the batch was closed, extended, cropped or forked since.
        """
        self.allocator.check_generations(*batch.sequence_versions.tolist())
        decodes = batch.num_sequences <= MAX_BATCH and self._has_decode_plans
        length = batch.uniform_length if decodes else None
        step = StepPlanner().step(self.layers, (batch,) * len(self.layers), length)
        return replace(step, allocator=self.allocator, planned_for=batch.sequence_versions.clone())


class BatchModel:
    """:class:`MHA2MLAForCausalLM`, or a source as :class:`PagedSource`."""

    config: Any
    dtype: torch.dtype

    def _batch_layers(
        self, rotary_key_cache: str | None = None
    ) -> tuple[str | None, Sequence[AttentionConstants], torch.device]:
        """Name of the attention backend or None, what each layer is told, and where all of them run."""
        raise NotImplementedError

    def _prepare_decoder(self) -> None:
        """Fuses weights and makes the :class:`~mha2mla.modeling.decoder.FusedDecoder` of later steps."""
        raise NotImplementedError

    def _batch_logits(self, batch: SequenceBatch, arguments: dict[str, Any], kept: Tensor | None) -> Tensor:
        """[len(kept) or N, vocabulary] of tokens ``kept``, None: of all N; ``arguments`` are the base model's."""
        raise NotImplementedError

    def paged_cache(
        self, num_pages: int, page_size: int = PAGE_SIZE, *, rotary_key_cache: str | None = None
    ) -> PagedCache:
        """A cache for ragged batches of this model, in its dtype and on its device; of a converted model with the
        window of its config.

        Args:
            num_pages: pages of each layer; a converted model's take ``num_pages * page_size *
                config.cache_bytes_per_token(2)`` bytes in 16 bits.
            rotary_key_cache: of a converted model, instead of what its config says.

        Raises:
            ValueError: ``rotary_key_cache`` is not one that the model can have; there is no backend of the name that
                was asked for, or it, or every one, refuses a layer, with the reasons; or layers run on several devices.

        Warns:
            UserWarning: on CUDA plain torch serves a layer, without having been named, with the reason.
        """
        name, constants, device = self._batch_layers(rotary_key_cache)
        self._prepare_decoder()
        backends = batch_backends(name, constants, device, self.dtype, page_size)
        layers = list(zip(backends, constants, strict=True))
        return PagedCache(layers, num_pages, page_size, dtype=self.dtype, device=device)

    @torch.no_grad()
    def forward_batch(self, input_ids: Tensor, step: AttentionStep, *, all_logits: bool = False) -> Tensor:
        """One step over sequences that bring different numbers of new tokens: decodes and (chunks of) prompts alike.

        Args:
            input_ids: [N] new tokens, in the order of ``step.batch`` (:meth:`SequenceBatch.flatten`).
            step: of :meth:`PagedCache.step`. Their tokens are in the cache afterwards.
            all_logits: of every token; else of each sequence's last one, which is where the next token comes from.

        Returns:
            [B, vocabulary], a row for each of the batch's rows (:attr:`SequenceBatch.order` says whose); or
            [N, vocabulary]. Rows of padding are finite and mean nothing.

        Raises:
            ValueError: ``input_ids`` has another length than the batch.
        """
        batch = step.batch
        if input_ids.shape != (batch.num_tokens,):
            raise ValueError(f"input_ids.shape is {tuple(input_ids.shape)}; expected {(batch.num_tokens,)}, [N]")
        if not batch.num_tokens:  # nothing to embed, and no last token to look up
            step.check()
            weight = self.get_output_embeddings().weight
            return weight.new_zeros(0 if all_logits else batch.num_sequences, weight.shape[0])
        arguments = {
            "input_ids": input_ids[None],
            # Passed on as it is, and no layer looks at it.
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),
            "position_ids": batch.positions[None].long(),
            "use_cache": False,
            "mla_step": step,
        }
        return self._batch_logits(batch, arguments, None if all_logits else batch.last_tokens)
