"""The paged cache of the absorbed form: per layer the latent c, the rotated k_pe where it is cached, nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mha2mla.kernels import MAX_DECODE_QUERY_LENGTH
from mha2mla.modeling.batch import UniformBatch
from mha2mla.modeling.cache_layout import PAGE_SIZE
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.modeling.latent_layer import LatentLayer
from mha2mla.modeling.registry import AttentionConstants, Plan
from mha2mla.modeling.step import DecodePlans, mixed_plans


class LatentCache(Cache):
    """Cache of a converted model for transformers: pages of c and stored k_pe per layer, served by attention backends.

    Every verb, a model's step included, is done in all layers or in none: after an error (out of memory included) the
    cache holds the tokens that it held before.

    Args:
        config: of the model; what its ``attention_backend`` names serves. Its ``attention_window`` and
            ``num_sink_tokens`` stay those of the cache. All tokens stay cached; what no query sees is not read.
        max_cache_len: tokens per sequence, padding included, of a static cache (CUDA graphs, ``torch.compile``); None
            for a dynamic one, which doubles its pages when they are full.
        page_size: tokens per page, a power of two >= 16.
        room: tokens per sequence that a dynamic cache has pages for from the first one on.

    Attributes:
        padding_is_left: whether the last attention mask that the host looked at was zeros, then ones
            (``visibility.py``). Steps whose mask the host does not look at go by it.
        captured: recorded decode steps over the pages, which ``generate`` replays (``captured.py``); None: none are.
        plans: of the decode op, with their workspace, which steps reuse; by what they were made for, beside
            ``plans_for``, the batch size, capacity, dtype and device of the pages.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self, config: MHA2MLAConfig, max_cache_len: int | None = None, page_size: int = PAGE_SIZE, room: int = 0
    ) -> None:
        if page_size < 16 or page_size & (page_size - 1):
            raise ValueError(f"page_size is {page_size}; expected a power of two >= 16")
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"max_cache_len is {max_cache_len}; expected None or a positive number of tokens")
        self.page_size = page_size
        self.padding_is_left = True
        self.captured: Any = None
        self.plans: dict[tuple, DecodePlans] = {}
        self.plans_for: tuple | None = None
        # Under a window of the user's a mask of the expanded form would be as large as queries times keys.
        served = (config.attention_backend, config.attention_window is not None)
        super().__init__(
            layers=[
                LatentLayer(constants, page_size, max_cache_len, *served) for constants in config.attention_constants()
            ]
        )
        if max_cache_len is None:
            for layer in self.layers:
                layer.max_pages = -(-room // page_size)

    def sharing_pages(self, *, static: bool) -> LatentCache:
        """Another cache over the same pages, lengths on the device and plans: a static one, for a cache that holds
        tokens; or a dynamic one, to be :meth:`reset`, since the host does not know how many these are."""
        twin = copy.copy(self)
        twin.captured, twin.layers = None, [layer.sharing_pages(static) for layer in self.layers]
        return twin

    @property
    def is_empty(self) -> bool:
        """No token was cached since creation or the last reset."""
        return self.layers[0].is_empty

    @property
    def constants(self) -> tuple[AttentionConstants, ...]:
        """Per layer, what its attention is told: windows and sinks among it."""
        return tuple([layer.constants for layer in self.layers])

    @property
    def capacity(self) -> int:
        """Tokens per sequence that the pages hold."""
        return self.layers[0].capacity

    @property
    def nbytes(self) -> int:
        """Bytes of all pages: ``batch * capacity * config.cache_bytes_per_token(itemsize)``."""
        return sum(layer.nbytes for layer in self.layers)

    def open(self, batch: int, new_tokens: int, kinds: Sequence[tuple[torch.dtype, torch.device]]) -> None:
        """Makes room for ``new_tokens`` more in each of ``batch`` sequences, so that pages do not move meanwhile.

        Args:
            kinds: per layer, dtype and device of its pages where it has none yet.

        Raises:
            ValueError: another batch size than that of the cached tokens, or more than an empty static cache holds.
        """
        # Layers share the places of new tokens, so their sequences are equally long, also where an earlier call ran out
        # of memory between two layers.
        max_pages = max([layer.pages_for(new_tokens) for layer in self.layers])
        for layer, (dtype, device) in zip(self.layers, kinds, strict=True):
            layer.open(batch, new_tokens, dtype, device, max_pages)

    @contextmanager
    def unchanged_by_errors(self) -> Iterator[None]:
        """What is raised inside leaves the cache with the tokens that it had. For appending: what is raised before
        :meth:`advance` has changed nothing anyway, unless the cache is empty and its layers are only just made."""
        made, was_empty = [layer.is_initialized for layer in self.layers], self.is_empty
        padding_is_left = self.padding_is_left
        try:
            yield
        except BaseException:
            for layer, was_made in zip(self.layers, made, strict=True):
                if not was_made:
                    layer.forget_pages()
                elif was_empty and not layer.is_empty:
                    layer.is_empty, layer._length = True, 0
                    layer.cache_seqlens.zero_()
            self.padding_is_left = padding_is_left
            raise

    def serve_by(self, name: str | None) -> None:
        """What is cached, and what comes, is served by the backend of that name (``config.attention_backend``).

        Raises:
            ValueError: it refuses a layer, or its cache is made of other tensors than what is cached.
        """
        if name == self.layers[0].backend_name:
            return
        layers = [layer for layer in self.layers if layer.is_initialized]
        for layer, chosen in [(layer, layer.choose(name, layer.dtype, layer.device)) for layer in layers]:
            layer.serve_by(chosen)
        for layer in self.layers:
            layer.backend_name = name
        self.plans = {}

    def attends(self, query_length: int, obeys_mask: bool) -> tuple[bool, ...]:
        """Per layer, whether its backend attends in a step that brings so many tokens: :meth:`LatentLayer.attends`."""
        return tuple([obeys_mask and layer.attends(query_length) for layer in self.layers])

    def place(self, position_ids: Tensor, starts: Tensor | None) -> tuple[UniformBatch, ...]:
        """Per layer, where it puts the new tokens: one object per device, since all layers cache the same tokens.

        Args:
            position_ids: [B or 1, S].
            starts: [B] int32, first visible token of each sequence; None: all are.
        """
        on_device: dict[torch.device, UniformBatch] = {}
        for layer in self.layers:
            if layer.device not in on_device:
                on_device[layer.device] = layer.place(position_ids, starts)
        return tuple([on_device[layer.device] for layer in self.layers])

    def plan(
        self,
        attends: tuple[bool, ...],
        batches: Sequence[UniformBatch],
        query_length: int,
        starts: Sequence[int] | None = None,
    ) -> tuple[Plan | None, ...]:
        """Per layer a plan for its backend, None where it does not attend; call before any layer appends its tokens.

        Of up to 8 tokens the cache keeps the plans' buffers from step to step, so that a captured CUDA graph finds them
        where they were. Inside ``torch.compile`` they are temporaries of the compiled step instead, which places (and
        captures) them itself.

        Args:
            attends: per layer.
            batches: of :meth:`place`.
            query_length: S.
            starts: first visible tokens as the host knows them; looked at for longer queries, None: 0.
        """
        if not any(attends):
            return (None,) * len(attends)
        if query_length > MAX_DECODE_QUERY_LENGTH:
            cached, batch = self.layers[0].get_seq_length(), self.batch_size
            lengths = torch.tensor([[query_length] * batch, [cached] * batch, starts or [0] * batch], dtype=torch.int32)
            return mixed_plans(self.layers, attends, [batch._replace(lengths=lengths) for batch in batches])
        tables = [layer.block_table for layer in self.layers]
        if torch.compiler.is_compiling():
            plans = DecodePlans.allocate(self.layers, attends, tables, query_length)
        else:
            first = self.layers[0]
            pages, key = (first.batch_size, first.capacity, first.dtype, first.device), (query_length, attends)
            if self.plans_for != pages:
                # The pages have moved, so no CUDA graph that was captured over them is of use any more.
                self.plans_for, self.plans = pages, {}
            if key not in self.plans:
                # Not inference tensors, which could not be refreshed outside inference_mode.
                with torch.inference_mode(False):
                    self.plans[key] = DecodePlans.allocate(self.layers, attends, tables, query_length)
            plans = self.plans[key]
        plans.refresh(batches)
        return plans.of_layer

    def next_positions(self, new_tokens: int, device: torch.device) -> Tensor:
        """[1, S] int64, positions of ``new_tokens`` more tokens; padding counts."""
        return (torch.arange(new_tokens, device=device) + self.get_seq_length()).unsqueeze(0)

    def advance(self, new_tokens: int) -> None:
        """Counts ``new_tokens`` per sequence in all layers, which have written them to their places."""
        # The device first: counting on the host cannot fail.
        for lengths in self._lengths():
            torch._foreach_add_(lengths, new_tokens)
        for layer in self.layers:
            layer.count(new_tokens)

    def _lengths(self) -> list[list[Tensor]]:
        """``cache_seqlens`` of all layers that have pages, by device."""
        on_device: dict[torch.device, list[Tensor]] = {}
        for layer in self.layers:
            if layer.is_initialized:
                on_device.setdefault(layer.device, []).append(layer.cache_seqlens)
        return list(on_device.values())

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | list[int],
        head_dim: int | list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates all layers. ``num_heads`` and ``head_dim`` are not looked at: the config has the widths."""
        with self.unchanged_by_errors():
            for layer in self.layers:
                if not layer.is_initialized:
                    layer.open(batch_size, 0, dtype, device)

    def reset(self) -> None:
        """Forgets all tokens and keeps the pages."""
        for lengths in self._lengths():
            torch._foreach_zero_(lengths)
        for layer in self.layers:
            layer.is_empty, layer._length = True, 0
        self.padding_is_left = True

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Removes the last ``-tokens_to_remove`` tokens of every sequence.

        Raises:
            ValueError: a positive number, or more tokens than there are. (How many a static cache holds is known to its
                device alone; on a GPU the device asserts it, in its stream.)
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding gives a tensor, which no step may have to wait for
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; expected 0 or minus the number of tokens to remove"
            )
        if tokens_to_remove == 0 or self.is_empty:
            return
        for length in {layer.device: layer.get_seq_length() for layer in self.layers}.values():
            if isinstance(length, int) or length.device.type == "cpu":
                if length + tokens_to_remove < 0:
                    raise ValueError(f"tokens_to_remove is {tokens_to_remove}; the cache holds {int(length)} tokens")
            else:
                torch._assert_async(length + tokens_to_remove >= 0, f"tokens_to_remove is {tokens_to_remove}: too many")
        for lengths in self._lengths():
            torch._foreach_add_(lengths, tokens_to_remove)
        for layer in self.layers:
            layer.count(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes a copy of sequence ``beam_idx[b]`` [B]; addresses stay.

        Raises:
            ValueError: ``beam_idx`` has another shape.
        """
        if self.is_empty:
            return
        if beam_idx.shape != (self.batch_size,):
            raise ValueError(f"beam_idx.shape is {tuple(beam_idx.shape)}; expected {(self.batch_size,)}, [B]")
        # Layers change in place, one after another, so all memory that this takes is taken before the first does.
        used = [tokens for layer in self.layers for tokens in layer.used()]
        scratch: dict[tuple, Tensor] = {}
        indices: dict[torch.device, Tensor] = {}
        for tokens in used:
            kind = (tokens.device, tokens.dtype)
            if kind not in scratch or scratch[kind].numel() < tokens.numel():
                scratch[kind] = tokens.new_empty(tokens.numel())
            if tokens.device not in indices:
                indices[tokens.device] = beam_idx.to(tokens.device)
        for tokens in used:
            copy = scratch[tokens.device, tokens.dtype][: tokens.numel()].view(tokens.shape)
            torch.index_select(tokens, 0, indices[tokens.device], out=copy)
            tokens.copy_(copy)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times, side by side."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps sequences ``indices``, in that order; repetitions allowed. [N] integers, or [B] booleans."""
        if not self.is_initialized:
            return
        for layer, pages in [(layer, layer.selected(indices)) for layer in self.layers]:
            layer._set(pages)
