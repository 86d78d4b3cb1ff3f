"""One layer of the latent cache: pages of the latent c and of the rotated k_pe, and nothing else."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from mha2mla.geometry import MLAGeometry

PAGE_SIZE = 64


class Places(NamedTuple):
    """Where the new tokens of a step go: ``positions`` and ``slots`` [B * S] int32, as ``mla_append`` takes them, and
    ``cache_seqlens`` [B] int32, the lengths once they are there."""

    positions: Tensor
    slots: Tensor
    cache_seqlens: Tensor


class Pages(NamedTuple):
    """The tensors of a layer, as :class:`LatentLayer` has them by these names."""

    latent_cache: Tensor
    rope_cache: Tensor
    block_table: Tensor
    cache_seqlens: Tensor


class LatentLayer(CacheLayerMixin):
    """One layer of a :class:`~mha2mla.modeling.LatentCache`, which sees to it that all layers say the same.

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
        self._set(self._allocated(key_states.shape[0], self.max_pages, key_states.dtype, key_states.device))
        # As transformers' StaticLayer: a compiled step may then mutate these in place inside a CUDA graph.
        if self.is_compileable and not torch.compiler.is_compiling():
            for tensor in self._pages():
                torch._dynamo.mark_static_address(tensor)

    def _allocated(self, batch: int, max_pages: int, dtype: torch.dtype, device: torch.device) -> Pages:
        """New pages. Not filled: nothing reads what lies behind a sequence's tokens."""
        geometry, pages = self.geometry, batch * max_pages
        kind = {"dtype": dtype, "device": device}
        # Not inference tensors, which nothing outside inference_mode could append to.
        with torch.inference_mode(False):
            return Pages(
                torch.empty(pages, self.page_size, geometry.kv_lora_rank, **kind),
                torch.empty(pages, self.page_size, geometry.num_rope_heads, geometry.qk_rope_head_dim, **kind),
                torch.arange(pages, dtype=torch.int32, device=device).view(batch, max_pages),
                torch.full((batch,), self._length, dtype=torch.int32, device=device),
            )

    def _set(self, pages: Pages) -> None:
        """Makes these the layer's pages. Nothing here can fail: a layer has its old pages or its new ones."""
        self.latent_cache, self.rope_cache, self.block_table, self.cache_seqlens = pages
        self.batch_size, self.max_pages = pages.block_table.shape
        self.dtype, self.device = pages.latent_cache.dtype, pages.latent_cache.device
        self.is_initialized = True

    def _pages(self) -> Pages:
        return Pages(self.latent_cache, self.rope_cache, self.block_table, self.cache_seqlens)

    def forget_pages(self) -> None:
        """As it was before :meth:`lazy_initialization`."""
        for name in (*Pages._fields, "batch_size", "dtype", "device"):
            if hasattr(self, name):
                delattr(self, name)
        self.is_initialized, self.is_empty, self._length = False, True, 0
        if not self.is_compileable:
            self.max_pages = 0

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Views [B, 1, capacity, d_c] and [B, 1, capacity, G * d_r] of the pages."""
        batch, capacity = self.batch_size, self.capacity
        latent = self.latent_cache.view(batch, 1, capacity, self.geometry.kv_lora_rank)
        return latent, self.rope_cache.view(batch, 1, capacity, self.geometry.rope_width)

    def grow(self, max_pages: int) -> None:
        """Makes a dynamic layer's sequences ``max_pages`` long, if they are shorter; tokens stay."""
        if max_pages <= self.max_pages:
            return
        pages = self._allocated(self.batch_size, max_pages, self.dtype, self.device)
        if self._length:
            for new, old in zip(pages[:2], self.tokens(), strict=True):
                new = new.view(self.batch_size, 1, max_pages * self.page_size, -1)
                new[:, :, : self._length] = old[:, :, : self._length]
        self._set(pages)

    def pages_for(self, new_tokens: int) -> int:
        """Pages per sequence that ``new_tokens`` more take: what there is, or at least twice as many."""
        pages = -(-(self._length + new_tokens) // self.page_size)
        if self.is_compileable or pages <= self.max_pages:
            return self.max_pages
        return max(pages, 2 * self.max_pages)

    def open(
        self, batch: int, new_tokens: int, dtype: torch.dtype, device: torch.device, max_pages: int | None = None
    ) -> None:
        """Sees to it that there are pages for ``new_tokens`` more in each of ``batch`` sequences.

        Args:
            dtype, device: of the pages, where there are none yet.
            max_pages: per sequence, at least :meth:`pages_for`, which is the default.

        Raises:
            ValueError: another batch size than before, or more tokens than an empty static layer holds.
        """
        if self.is_compileable and self.is_empty and new_tokens > self.capacity:
            raise ValueError(
                f"key_states has {new_tokens} tokens; expected at most {self.capacity}, the capacity of this "
                "static cache"
            )
        if not self.is_initialized:
            probe = torch.empty(batch, 1, 0, 0, dtype=dtype, device=device)
            self.lazy_initialization(probe, probe)
        if batch != self.batch_size:
            if self.is_compileable or not self.is_empty:
                raise ValueError(
                    f"key_states has batch size {batch}; expected {self.batch_size}, that of the cached tokens"
                )
            self._set(self._allocated(batch, self.max_pages, dtype, device))
        self.grow(self.pages_for(new_tokens) if max_pages is None else max_pages)

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

    def count(self, tokens: int) -> None:
        """What the host knows after ``tokens`` more (or fewer, below 0); the device's part is the cache's."""
        if self.is_compileable:
            self.is_empty = self.is_empty and tokens <= 0
        else:
            self._length += tokens
            self.is_empty = self._length == 0

    def tokens_with(self, new_tokens: int) -> tuple[Tensor, Tensor]:
        """What the expanded form attends over once ``new_tokens`` were written, before they are counted:
        [B, 1, T, d_c] and [B, 1, T, G * d_r], as wide as :meth:`get_mask_sizes` says."""
        if self.is_compileable and not self.is_empty:
            return self._tokens_or_zeros(self.cache_seqlens[0] + new_tokens)
        width, _ = self.get_mask_sizes(new_tokens)
        latent, rope = self.tokens()
        return latent[:, :, :width], rope[:, :, :width]

    def _tokens_or_zeros(self, length: Tensor) -> tuple[Tensor, Tensor]:
        """All of a static layer's tokens, with zeros behind the first ``length`` []: the expanded form multiplies
        masked values by zero, and what was never written, or was cropped, may be NaN."""
        there = (torch.arange(self.capacity, device=self.device) < length)[:, None]
        latent, rope = self.tokens()
        return torch.where(there, latent, 0.0), torch.where(there, rope, 0.0)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Appends S tokens to every sequence.

        The cache keeps values, not their history: gradients pass a first call only. (The model refuses gradients over a
        filled cache.)

        Args:
            key_states: [B, 1, S, d_c], the latent.
            value_states: [B, 1, S, G * d_r], rotated keys.

        Returns:
            What the expanded form attends over, as wide as ``get_mask_sizes`` said before this call: the arguments
            themselves if the layer was empty; else [B, 1, T, d_c] and [B, 1, T, G * d_r] with T tokens cached (dynamic)
            or the capacity (static; zeros behind the cached tokens).

        Raises:
            ValueError: another batch size than before, or more tokens than an empty static layer holds.
        """
        batch, _, new_tokens, _ = key_states.shape
        self.open(batch, new_tokens, key_states.dtype, key_states.device)
        first_call, stored = self.is_empty, (key_states.detach(), value_states.detach())
        if self.is_compileable:
            # Positions are computed on the device: nothing here depends on the length's value.
            positions = torch.arange(new_tokens, device=self.device) + self.cache_seqlens[:1]
            for tokens, new in zip(self.tokens(), stored, strict=True):
                tokens.index_copy_(2, positions, new)
        else:
            for tokens, new in zip(self.tokens(), stored, strict=True):
                tokens[:, :, self._length : self._length + new_tokens] = new
        returned = (key_states, value_states) if first_call else self.tokens_with(new_tokens)
        self.cache_seqlens.add_(new_tokens)
        self.count(new_tokens)
        return returned

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

    def used(self) -> tuple[Tensor, Tensor]:
        """Views [B, 1, T, d_c] and [B, 1, T, G * d_r] of what the host must take for tokens: a static layer's whole
        capacity."""
        latent, rope = self.tokens()
        width = self.capacity if self.is_compileable else self._length
        return latent[:, :, :width], rope[:, :, :width]

    def selected(self, indices: Tensor) -> Pages:
        """The pages as they would be with sequences ``indices`` only, in that order; repetitions allowed."""
        indices = indices.to(self.device)
        with torch.inference_mode(False):
            latent, rope = (tokens[indices] for tokens in self.tokens())
            pages = torch.arange(latent.shape[0] * self.max_pages, dtype=torch.int32, device=self.device)
            return Pages(
                latent.view(-1, *self.latent_cache.shape[1:]),
                rope.view(-1, *self.rope_cache.shape[1:]),
                pages.view(-1, self.max_pages),
                self.cache_seqlens[indices],
            )
