"""A model of ragged batches: what converted models and sources have in common, from the cache to the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mha2mla.modeling.batch import SequenceBatch
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.paged_cache import PagedCache
from mha2mla.modeling.registry import AttentionConstants
from mha2mla.modeling.served import batch_backends
from mha2mla.modeling.step import AttentionStep


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
            page_size: tokens per page.
            rotary_key_cache: of a converted model, instead of what its config says.

        Raises:
            ValueError: ``rotary_key_cache`` is not one that the model can have; there is no backend of the name that
                was asked for, or it, or every one, refuses a layer, with the reasons; or layers run on several devices.

        Warns:
            UserWarning: on CUDA plain torch serves a layer, which nobody asked for by name, with the reason.
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
