"""One layer of the latent cache: pages of the latent c, of the rotated k_pe where it is cached, nothing else."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from mha2mla.kernels import (
    MAX_DECODE_QUERY_LENGTH,
    LatentRope,
    absorbs_up_to,
    dequantize_latent,
    is_absorbed,
    kept_keys,
)
from mha2mla.modeling.backends import ATTENTION_BACKENDS, append_latents
from mha2mla.modeling.batch import UniformBatch
from mha2mla.modeling.cache_layout import CacheLayout, in_bytes, quantizer_of
from mha2mla.modeling.registry import AttentionBackend, AttentionConstants
from mha2mla.modeling.served import name_over_cache


class Pages(NamedTuple):
    """The tensors of a layer, as :class:`LatentLayer` has them by these names."""

    tensors: dict[str, Tensor]
    block_table: Tensor
    cache_seqlens: Tensor


class LayerBackend(NamedTuple):
    """Backend of a layer, its cache's layout, and whether it serves prompts too."""

    backend: AttentionBackend
    layout: CacheLayout
    prefills: bool


class LatentLayer(CacheLayerMixin):
    """One layer of a :class:`~mha2mla.modeling.LatentCache`, which sees to it that all layers say the same.

    Sequence ``b`` owns pages ``b * max_pages … (b + 1) * max_pages - 1``, so that a sequence's tokens also lie side by
    side and the expanded form reads them as a view.

    Args:
        page_size, max_cache_len, room: of the cache.
        backend_name: of what serves it: :meth:`choose`.
        prefills: its backend serves prompts too, if it can, also where it is not asked for by name.

    Attributes:
        backend: what serves the layer; once it has pages.
        tensors: of the backend's cache layout, [B * max_pages, page, ...]: latents, rotated keys.
        dtype: of the model; latents may be stored in fewer bits.
        block_table: [B, max_pages] int32, an arange.
        cache_seqlens: [B] int32, tokens per sequence, padding included; the same for all sequences.
        is_compileable: the capacity is fixed, so addresses and shapes stay what they are.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        constants: AttentionConstants,
        page_size: int,
        max_cache_len: int | None,
        room: int,
        backend_name: str | None,
        prefills: bool,
    ) -> None:
        super().__init__()
        self.constants, self.geometry = constants, constants.geometry
        self.page_size = page_size
        self.backend_name, self._wants_prompts = backend_name, prefills
        self.backend: AttentionBackend | None = None
        self._absorbs_up_to = absorbs_up_to(self.geometry)
        self.max_cache_len = max_cache_len
        self.is_compileable = max_cache_len is not None
        self.max_pages = -(-(room if max_cache_len is None else max_cache_len) // page_size)
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
        return sum(tensor.nbytes for tensor in self.tensors.values()) if self.is_initialized else 0

    def choose(self, name: str | None, dtype: torch.dtype, device: torch.device) -> LayerBackend:
        """Backend called ``name`` for the layer; None: the best one.

        Raises:
            ValueError: it refuses the layer, or its cache is made of other tensors than what is cached.
        """
        found, long_queries = name_over_cache(name, self.geometry.to_dict(), self.page_size, dtype, device)
        backend = ATTENTION_BACKENDS.get(found)
        layout = backend.cache_layout(self.geometry, self.page_size, dtype)
        if self.is_initialized and layout != self._layout:
            raise ValueError(
                f"attention backend {backend.name!r} has a cache of layout {layout.name!r}; expected"
                f" {self._layout.name!r}, that of the cached tokens: make a new cache"
            )
        # Asked for by name it serves prompts too, if it can; else the attention implementation does.
        return LayerBackend(backend, layout, (name is not None or self._wants_prompts) and long_queries)

    def serve_by(self, chosen: LayerBackend) -> None:
        self.backend, self._layout, self._prefills = chosen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates a static layer's pages; a dynamic one starts without.

        ``key_states [B, ...]`` gives batch, dtype and device; the widths are the geometry's.
        """
        self._initialize(key_states.shape[0], self.max_pages, key_states.dtype, key_states.device)

    def _initialize(
        self, batch: int, max_pages: int, dtype: torch.dtype, device: torch.device, like: LatentLayer | None = None
    ) -> None:
        if like is not None and like.constants is self.constants and (like.dtype, like.device) == (dtype, device):
            self.backend, self._layout, self._prefills = like.backend, like._layout, like._prefills
        else:
            self.serve_by(self.choose(self.backend_name, dtype, device))
        self.dtype = dtype
        self._set(self._allocated(batch, max_pages, device))
        # Like transformers' StaticLayer: a compiled step may then mutate these in place inside a CUDA graph.
        if self.is_compileable and not torch.compiler.is_compiling():
            for tensor in (*self.tensors.values(), self.block_table, self.cache_seqlens):
                torch._dynamo.mark_static_address(tensor)

    def _allocated(self, batch: int, max_pages: int, device: torch.device) -> Pages:
        """New pages. Not filled: nothing reads what lies behind a sequence's tokens."""
        pages = batch * max_pages
        # Not inference tensors, which nothing outside inference_mode could append to.
        with torch.inference_mode(False):
            return Pages(
                self._layout.make(pages, device, fill=None),
                torch.arange(pages, dtype=torch.int32, device=device).view(batch, max_pages),
                torch.full((batch,), self._length, dtype=torch.int32, device=device),
            )

    def _set(self, pages: Pages) -> None:
        """Makes these the layer's pages. Nothing here can fail: a layer has its old pages or its new ones."""
        self.tensors, self.block_table, self.cache_seqlens = pages
        self.batch_size, self.max_pages = pages.block_table.shape
        self.device = pages.block_table.device
        self.is_initialized = True

    def sharing_pages(self, static: bool) -> LatentLayer:
        """The layer's part of :meth:`LatentCache.sharing_pages`."""
        twin = copy.copy(self)
        twin.is_compileable, twin.max_cache_len = static, self.capacity if static else None
        return twin

    def forget_pages(self) -> None:
        """Back to the state before :meth:`lazy_initialization`."""
        for name in (*Pages._fields, "batch_size", "dtype", "device"):
            if hasattr(self, name):
                delattr(self, name)
        self.is_initialized, self.is_empty, self._length = False, True, 0
        if not self.is_compileable:
            self.max_pages = 0

    def rows(self) -> list[Tensor]:
        """Views [B, capacity, ...] of the pages, to be moved about."""
        shape = (self.batch_size, self.capacity)
        return [in_bytes(tensor.view(*shape, *tensor.shape[2:])) for tensor in self.tensors.values()]

    def grow(self, max_pages: int) -> None:
        """Makes a dynamic layer's sequences ``max_pages`` long, if they are shorter; tokens stay."""
        if max_pages <= self.max_pages:
            return
        pages = self._allocated(self.batch_size, max_pages, self.device)
        if self._length:
            for new, old in zip(pages.tensors.values(), self.rows(), strict=True):
                new = in_bytes(new.view(self.batch_size, max_pages * self.page_size, *new.shape[2:]))
                new[:, : self._length] = old[:, : self._length]
        self._set(pages)

    def pages_for(self, new_tokens: int) -> int:
        """Pages per sequence that ``new_tokens`` more take: what there is, or at least twice as many."""
        pages = -(-(self._length + new_tokens) // self.page_size)
        if self.is_compileable or pages <= self.max_pages:
            return self.max_pages
        return max(pages, 2 * self.max_pages)

    def open(
        self,
        batch: int,
        new_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        max_pages: int | None = None,
        like: LatentLayer | None = None,
    ) -> None:
        """Sees to it that there are pages for ``new_tokens`` more in each of ``batch`` sequences.

        Args:
            dtype, device: of the pages, where there are none yet.
            max_pages: per sequence, at least :meth:`pages_for`, which is the default.
            like: a layer of the same cache that has pages, and whose backend serves this one where both are alike.

        Raises:
            ValueError: another batch size than before, or more tokens than an empty static layer holds.
        """
        max_pages = self.pages_for(new_tokens) if max_pages is None else max_pages
        if self.is_compileable and self.is_empty and new_tokens > self.capacity:
            raise ValueError(
                f"key_states has {new_tokens} tokens; expected at most {self.capacity}, the capacity of this "
                "static cache"
            )
        if not self.is_initialized:
            self._initialize(batch, max_pages, dtype, device, like)
        if batch != self.batch_size:
            if self.is_compileable or not self.is_empty:
                raise ValueError(
                    f"key_states has batch size {batch}; expected {self.batch_size}, that of the cached tokens"
                )
            self._set(self._allocated(batch, self.max_pages, device))
        self.grow(max_pages)

    def attends(self, query_length: int) -> bool:
        """True where the backend attends to ``query_length`` new tokens, and not the attention implementation.

        Over what is cached it does in the absorbed form; over new tokens alone, which it is cheaper to expand, and over
        longer queries, where it was asked for by name.
        """
        if self.backend.attend is None or (self.is_empty and not self._prefills):
            return False
        if query_length <= MAX_DECODE_QUERY_LENGTH:
            return True
        if self.is_compileable and not self.is_empty:
            return False  # plans for more are made on the host, which does not know the length
        return self._prefills or is_absorbed(query_length, self._length, self._absorbs_up_to)

    def append_to(self, position_ids: Tensor, starts: Tensor | None = None) -> UniformBatch:
        """Cache positions of S new tokens of every sequence, on the device, after :meth:`open` has made room.

        Args:
            position_ids: [B or 1, S], for RoPE.
            starts: [B] int32, first visible token of each sequence.
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
        return UniformBatch(
            positions.flatten().int(),
            slots.flatten(),
            self.block_table,
            self.cache_seqlens + position_ids.shape[1],
            None if starts is None else starts.to(self.device),
        )

    def count(self, tokens: int) -> None:
        """Updates the host's length by ``tokens``, negative to crop; the cache updates the device's."""
        if self.is_compileable:
            self.is_empty = self.is_empty and tokens <= 0
        else:
            self._length += tokens
            self.is_empty = self._length == 0

    def tokens_with(
        self, new_tokens: int, latent_centers: Tensor | None = None, rope: LatentRope | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens that the expanded form reads once ``new_tokens`` are written, before they are counted: latents
        [B, T, d_c] and rotated keys [B, T, G, d_r] if they are cached, as many as :meth:`get_mask_sizes` says.

        Args:
            latent_centers: [2, d_c] of the layer, where latents are codes.
            rope: of the layer, whose bias keys in 8 bits lack; None: no such keys are given.
        """
        width, _ = self.get_mask_sizes(new_tokens)
        shape = (self.batch_size, self.capacity)
        stored = {name: tensor.view(*shape, *tensor.shape[2:])[:, :width] for name, tensor in self.tensors.items()}
        latent, keys = stored["latent_cache"], stored.get("rope_cache")
        if self.geometry.has_key_codes:
            places = torch.arange(width, dtype=torch.int32, device=self.device)
            given = None if rope is None else (keys[:, :, 0], stored["rope_scale"], rope, places, self.dtype)
            keys = None if given is None else kept_keys(*given, backend=None)[:, :, None]
        if "latent_scale" in stored:
            latent = dequantize_latent(latent, stored["latent_scale"], self.dtype)
        if self.geometry.has_codes:
            width = self.geometry.kv_lora_rank
            latent = quantizer_of(self.geometry).decode(latent, width, self.dtype, latent_centers)
        if not self.is_compileable or self.is_empty:
            return latent, keys
        # All of a static layer's, with zeros behind those that are there: the expanded form multiplies masked values by
        # zero, and what was never written, or was cropped, may be NaN.
        there = (torch.arange(self.capacity, device=self.device) < self.cache_seqlens[0] + new_tokens)[:, None]
        return torch.where(there, latent, 0.0), None if keys is None else torch.where(there[..., None], keys, 0.0)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, latent_centers: Tensor | None = None, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Appends S tokens to every sequence.

        The cache keeps values, not their history: gradients pass a first call only. (The model refuses gradients over a
        filled cache.)

        Args:
            key_states: [B, 1, S, d_c], the latent.
            value_states: [B, 1, S, G * d_r], rotated keys, without their bias where they are cached in 8 bits; of no
                width where none are cached, as what is returned.
            latent_centers: [2, d_c] of the layer, where latents are codes.

        Returns:
            Tokens that the expanded form reads, as wide as ``get_mask_sizes`` said before this call: the arguments
            themselves if the layer was empty and latents are no codes; else [B, 1, T, d_c] and [B, 1, T, G * d_r] with
            T tokens cached (dynamic) or the capacity (static; zeros behind the cached tokens).

        Raises:
            ValueError: another batch size than before, or more tokens than an empty static layer holds.
        """
        batch, _, new_tokens, _ = key_states.shape
        self.open(batch, new_tokens, key_states.dtype, key_states.device)
        latent, rotated = (states.detach()[:, 0].flatten(0, 1).to(self.dtype) for states in (key_states, value_states))
        rope_cache = self.tensors.get("rope_cache")
        heads = rotated.unflatten(-1, (1, 0) if rope_cache is None else rope_cache.shape[2:])
        new = self.append_to(torch.zeros(1, new_tokens, dtype=torch.int32, device=self.device))
        # Keys are rotated already: frequencies of zero leave them alone, exactly in plain torch.
        tensors = {
            "latent": latent,
            "k_pe": None if rope_cache is None else heads,
            "q_pe": heads[:, :0],
            "inv_freq": heads.new_zeros(1, heads.shape[-1] // 2, dtype=torch.float32),
            "latent_centers": latent_centers,
        }
        append_latents("reference", tensors, self.tensors, new, self.constants)
        if self.is_empty and not self.geometry.has_codes:
            returned = key_states, value_states
        else:
            latent, rope = self.tokens_with(new_tokens, latent_centers)
            returned = latent[:, None], (latent[..., :0] if rope is None else rope.flatten(2))[:, None]
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

    def used(self) -> list[Tensor]:
        """Rows that may hold tokens, as far as the host knows: a static layer's whole capacity."""
        width = self.capacity if self.is_compileable else self._length
        return [rows[:, :width] for rows in self.rows()]

    def selected(self, indices: Tensor) -> Pages:
        """The pages as they would be with sequences ``indices`` only, in that order; repetitions allowed."""
        indices = indices.to(self.device)
        with torch.inference_mode(False):
            rows = [rows[indices] for rows in self.rows()]
            tensors = {
                name: kept.view(tensor.dtype).view(-1, *tensor.shape[1:])
                for kept, (name, tensor) in zip(rows, self.tensors.items(), strict=True)
            }
            pages = torch.arange(len(rows[0]) * self.max_pages, dtype=torch.int32, device=self.device)
            return Pages(tensors, pages.view(-1, self.max_pages), self.cache_seqlens[indices])
