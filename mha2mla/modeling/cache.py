"""The paged cache of the absorbed form: per layer the latent c and the rotated k_pe, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.config import MHA2MLAConfig

if TYPE_CHECKING:
    from mha2mla.modeling.decode_step import LayerPlans

PAGE_SIZE = 64


class Places(NamedTuple):
    """Where the new tokens of a step go: ``positions`` and ``slots`` [B * S] int32, as ``mla_append`` takes them, and
    ``cache_seqlens`` [B] int32, the lengths once they are there."""

    positions: Tensor
    slots: Tensor
    cache_seqlens: Tensor


class LatentLayer(CacheLayerMixin):
    """One layer of a :class:`LatentCache`.

    Sequence ``b`` owns pages ``b * max_pages … (b + 1) * max_pages - 1``, so that a sequence's tokens also lie side by
    side and the expanded form reads them as a view.

    Attributes:
        latent_cache: [B * max_pages, page, d_c].
        rope_cache: [B * max_pages, page, G, d_r], rotated.
        block_table: [B, max_pages] int32, an arange.
        cache_seqlens: [B] int32, tokens per sequence, padding included; the same for all sequences.
        is_compileable: the capacity is fixed, so addresses and shapes stay what they are.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, geometry: MLAGeometry, page_size: int = PAGE_SIZE, max_cache_len: int | None = None) -> None:
        super().__init__()
        self.geometry = geometry
        self.page_size = page_size
        self.max_cache_len = max_cache_len
        self.is_compileable = max_cache_len is not None
        self.max_pages = 0 if max_cache_len is None else -(-max_cache_len // page_size)
        # Known on the host, so that a first call needs no look at the device. Dynamic layers know their length as well;
        # static ones keep it on the device only: a graph captured at one length is replayed at others.
        self.is_empty = True
        self._length = 0

    @property
    def capacity(self) -> int:
        """Tokens per sequence that the allocated pages hold (a static layer: will hold)."""
        return self.max_pages * self.page_size

    @property
    def cumulative_length(self) -> Tensor:
        """``cache_seqlens``, by the name that transformers' static layers give it."""
        return self.cache_seqlens

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated pages."""
        return self.latent_cache.nbytes + self.rope_cache.nbytes if self.is_initialized else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates a static layer's pages; a dynamic one starts without.

        ``key_states [B, ...]`` gives batch, dtype and device; the widths are the geometry's.
        """
        self._allocate(key_states.shape[0], key_states.dtype, key_states.device)
        # As transformers' StaticLayer: a compiled step may then mutate these in place inside a CUDA graph.
        if self.is_compileable and not torch.compiler.is_compiling():
            for tensor in (self.latent_cache, self.rope_cache, self.block_table, self.cache_seqlens):
                torch._dynamo.mark_static_address(tensor)

    def _allocate(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> None:
        geometry, pages = self.geometry, batch_size * self.max_pages
        kind = {"dtype": dtype, "device": device}
        self.batch_size, self.dtype, self.device = batch_size, dtype, device
        # Zeros, not empty: the expanded form multiplies masked values by zero, and NaN times zero is NaN.
        self.latent_cache = torch.zeros(pages, self.page_size, geometry.kv_lora_rank, **kind)
        self.rope_cache = torch.zeros(pages, self.page_size, geometry.num_rope_heads, geometry.qk_rope_head_dim, **kind)
        self.block_table = self._new_block_table()
        self.cache_seqlens = torch.full((batch_size,), self._length, dtype=torch.int32, device=device)
        self.is_initialized = True

    def _new_block_table(self) -> Tensor:
        pages = torch.arange(self.batch_size * self.max_pages, dtype=torch.int32, device=self.device)
        return pages.view(self.batch_size, self.max_pages)

    def _tokens(self) -> tuple[Tensor, Tensor]:
        """Views [B, 1, capacity, d_c] and [B, 1, capacity, G * d_r] of the pages."""
        batch, capacity = self.batch_size, self.capacity
        latent = self.latent_cache.view(batch, 1, capacity, self.geometry.kv_lora_rank)
        return latent, self.rope_cache.view(batch, 1, capacity, self.geometry.rope_width)

    def reserve(self, batch: int, new_tokens: int) -> None:
        """Makes room for ``new_tokens`` more per sequence in a dynamic layer, at least doubling what there is.

        Raises:
            ValueError: ``batch`` is another batch size than that of the cached tokens.
        """
        if batch != self.batch_size:
            raise ValueError(
                f"key_states has batch size {batch}; expected {self.batch_size}, that of the cached tokens"
            )
        length = self._length + new_tokens
        if self.is_compileable or length <= self.capacity:
            return
        old = self._tokens() if self._length else ()
        self.max_pages = max(-(-length // self.page_size), 2 * self.max_pages)
        self._allocate(self.batch_size, self.dtype, self.device)
        for new_tokens, old_tokens in zip(self._tokens(), old, strict=False):
            new_tokens[:, :, : self._length] = old_tokens[:, :, : self._length]

    def open(self, batch: int, new_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """Sees to it that there are pages for ``new_tokens`` more in each of ``batch`` sequences.

        Raises:
            ValueError: another batch size than before, or more tokens than an empty static layer holds.
        """
        if not self.is_initialized:
            probe = torch.empty(batch, 1, 0, 0, dtype=dtype, device=device)
            self.lazy_initialization(probe, probe)
        if batch != self.batch_size and self.is_empty and not self.is_compileable:
            self._allocate(batch, dtype, device)
        self.reserve(batch, new_tokens)
        if self.is_compileable and self.is_empty and new_tokens > self.capacity:
            raise ValueError(
                f"key_states has {new_tokens} tokens; expected at most {self.capacity}, the capacity of this "
                "static cache"
            )

    def places(self, position_ids: Tensor) -> Places:
        """Where S new tokens of every sequence go, once :meth:`open` has made room; on the device.

        Args:
            position_ids: [B or 1, S], for RoPE.
        """
        token = self.cache_seqlens[:, None]
        if position_ids.shape[1] > 1:
            token = token + torch.arange(position_ids.shape[1], dtype=torch.int32, device=self.device)
        slots = token + self.block_table[:, :1] * self.page_size  # pages of a sequence lie one behind the other
        if self.is_compileable:
            # A static layer's length is known to the device alone, so the device checks it.
            inside = token < self.capacity
            torch._assert_async(inside[0, -1], f"past_key_values is full: it holds {self.capacity} tokens a sequence")
            slots = torch.where(inside, slots, -1)
        positions = position_ids.to(self.device).expand(self.batch_size, -1)
        return Places(positions.flatten().int(), slots.flatten(), self.cache_seqlens + position_ids.shape[1])

    def advance(self, new_tokens: int) -> None:
        """Counts tokens that were written to :meth:`places`; on the host only, see :meth:`LatentCache.advance`."""
        self.is_empty = False
        if not self.is_compileable:
            self._length += new_tokens

    def tokens_with(self, new_tokens: int) -> tuple[Tensor, Tensor]:
        """What the expanded form attends over once ``new_tokens`` were written, before they are counted: views
        [B, 1, T, d_c] and [B, 1, T, G * d_r], as wide as :meth:`get_mask_sizes` says."""
        width, _ = self.get_mask_sizes(new_tokens)
        latent, rope = self._tokens()
        return latent[:, :, :width], rope[:, :, :width]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Appends S tokens to every sequence.

        The cache keeps values, not their history: gradients pass a first call only. (Training over a filled cache is
        refused by the model.)

        Args:
            key_states: [B, 1, S, d_c], the latent.
            value_states: [B, 1, S, G * d_r], rotated keys.

        Returns:
            What the expanded form attends over, as wide as ``get_mask_sizes`` said before this call: the arguments
            themselves if the layer was empty; else [B, 1, T, d_c] and [B, 1, T, G * d_r] with T tokens cached (dynamic)
            or the capacity (static; what lies behind the cached tokens is finite, and masked).

        Raises:
            ValueError: another batch size than before, or more tokens than an empty static layer holds.
        """
        batch, _, new_tokens, _ = key_states.shape
        self.open(batch, new_tokens, key_states.dtype, key_states.device)
        first_call, self.is_empty = self.is_empty, False
        stored = (key_states.detach(), value_states.detach())
        if self.is_compileable:
            # Positions are computed on the device: nothing here depends on the length's value.
            positions = torch.arange(new_tokens, device=self.device) + self.cache_seqlens[:1]
            for tokens, new in zip(self._tokens(), stored, strict=True):
                tokens.index_copy_(2, positions, new)
            self.cache_seqlens.add_(new_tokens)
            return (key_states, value_states) if first_call else self._tokens()
        length = self._length + new_tokens
        for tokens, new in zip(self._tokens(), stored, strict=True):
            tokens[:, :, self._length : length] = new
        self._length = length
        self.cache_seqlens.add_(new_tokens)
        if first_call:
            return key_states, value_states
        latent, rope = self._tokens()
        return latent[:, :, :length], rope[:, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens, first token) that ``update`` with ``query_length`` new tokens will return."""
        if self.is_empty:
            return query_length, 0
        return (self.capacity if self.is_compileable else self._length + query_length), 0

    def get_seq_length(self) -> int | Tensor:
        """Tokens cached per sequence; of a static layer that holds some, a 0-dimensional tensor on its device."""
        if self.is_empty:
            return 0
        return self.cache_seqlens[0] if self.is_compileable else self._length

    def get_max_length(self) -> int:
        """Tokens that a static layer holds; -1 for a dynamic one, which grows."""
        return self.capacity if self.is_compileable else -1

    def reset(self) -> None:
        """Forgets all tokens and keeps the pages."""
        self.is_empty, self._length = True, 0
        if self.is_initialized:
            # Zeroed for the sake of the expanded form over a static layer, which multiplies unused pages by zero.
            for tensor in (self.latent_cache, self.rope_cache, self.cache_seqlens):
                tensor.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: a positive number, or more tokens than there are (dynamic layers, which know on the host).
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; expected 0 or minus the number of tokens to remove"
            )
        if tokens_to_remove == 0 or self.is_empty:
            return
        if not self.is_compileable:
            if -tokens_to_remove > self._length:
                raise ValueError(f"tokens_to_remove is {tokens_to_remove}; the cache holds {self._length} tokens")
            self._length += tokens_to_remove
            self.is_empty = self._length == 0
        self.cache_seqlens.add_(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes a copy of sequence ``beam_idx[b]`` [B]; addresses stay."""
        if self.is_empty:
            return
        index = beam_idx.to(self.device)
        for tokens in self._tokens():
            used = tokens if self.is_compileable else tokens[:, :, : self._length]
            used.copy_(used.index_select(0, index))
        self.cache_seqlens.copy_(self.cache_seqlens.index_select(0, index))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times, side by side."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps sequences ``indices``, in that order; repetitions allowed."""
        if not self.is_initialized:
            return
        indices = indices.to(self.device)
        latent, rope = (tokens[indices] for tokens in self._tokens())
        self.batch_size = latent.shape[0]
        self.latent_cache = latent.view(-1, *self.latent_cache.shape[1:])
        self.rope_cache = rope.view(-1, *self.rope_cache.shape[1:])
        self.block_table = self._new_block_table()
        self.cache_seqlens = self.cache_seqlens[indices]


class LatentCache(Cache):
    """Cache of a converted model: pages of c and k_pe per layer, which :func:`mha2mla.kernels.mla_decode` reads.

    Args:
        config: of the model.
        max_cache_len: tokens per sequence, padding included, of a static cache (CUDA graphs, ``torch.compile``); None
            for a dynamic one, which doubles its pages when they are full.
        page_size: tokens per page, a power of two >= 16.

    Attributes:
        padding_is_left: every attention mask so far was zeros, then ones; only then does the absorbed form, which takes
            one first token per sequence, see the right tokens.
        plans: of the decode op, with their workspace, which steps reuse; by what they were made for, beside
            ``plans_for``, the batch size, capacity, dtype and device of the pages. See ``decode_step.py``.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(self, config: MHA2MLAConfig, max_cache_len: int | None = None, page_size: int = PAGE_SIZE) -> None:
        if page_size < 16 or page_size & (page_size - 1):
            raise ValueError(f"page_size is {page_size}; expected a power of two >= 16")
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"max_cache_len is {max_cache_len}; expected None or a positive number of tokens")
        self.page_size = page_size
        self.padding_is_left = True
        self.plans: dict[tuple, LayerPlans] = {}
        self.plans_for: tuple | None = None
        super().__init__(
            layers=[
                LatentLayer(config.layer_geometry(index), page_size, max_cache_len)
                for index in range(config.num_hidden_layers)
            ]
        )

    @property
    def is_empty(self) -> bool:
        """No token was cached since creation or the last reset."""
        return self.layers[0].is_empty

    @property
    def capacity(self) -> int:
        """Tokens per sequence that the pages hold."""
        return self.layers[0].capacity

    @property
    def nbytes(self) -> int:
        """Bytes of all pages: ``batch * capacity * config.cache_bytes_per_token(itemsize)``."""
        return sum(layer.nbytes for layer in self.layers)

    def reserve(self, batch: int, new_tokens: int) -> None:
        """Makes room for ``new_tokens`` more per sequence in all layers, so that pages do not move while they append.

        Raises:
            ValueError: ``batch`` is another batch size than that of the cached tokens.
        """
        for layer in self.layers:
            layer.reserve(batch, new_tokens)

    def next_positions(self, new_tokens: int, device: torch.device) -> Tensor:
        """[1, S] int64, positions of ``new_tokens`` more tokens; padding counts."""
        return (torch.arange(new_tokens, device=device) + self.get_seq_length()).unsqueeze(0)

    def advance(self, new_tokens: int) -> None:
        """Counts ``new_tokens`` per sequence in all layers, which have written them to their places."""
        lengths: dict[torch.device, list[Tensor]] = {}
        for layer in self.layers:
            layer.advance(new_tokens)
            lengths.setdefault(layer.device, []).append(layer.cache_seqlens)
        for tensors in lengths.values():
            torch._foreach_add_(tensors, new_tokens)

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | list[int],
        head_dim: int | list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates all layers. ``num_heads`` and ``head_dim`` are not looked at: the config has the widths."""
        for layer in self.layers:
            if not layer.is_initialized:
                probe = torch.empty(batch_size, 1, 0, 0, dtype=dtype, device=device)
                layer.lazy_initialization(probe, probe)

    def reset(self) -> None:
        super().reset()
        self.padding_is_left = True
