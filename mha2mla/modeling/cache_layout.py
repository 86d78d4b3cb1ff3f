"""Layouts of a paged cache: names, shapes, dtypes and bytes of its tensors, and their allocation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import RowQuantizer
from mha2mla.modeling.pages import PageCopy

PAGE_SIZE = 64


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a cache: ``shape`` numbers of ``dtype`` per token."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class CacheLayout:
    """The tensors of one layer's cache, in pages.

    Args:
        tensors: each is stored as [num_pages, page_size, *shape].
        page_size: tokens per page.

    Raises:
        ValueError: ``page_size`` is less than 1, or two tensors share a name.
    """

    name: str
    tensors: tuple[CacheTensor, ...]
    page_size: int

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}; expected at least 1")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names) or not names:
            raise ValueError(
                f"tensors are called {', '.join(names) or 'nothing'}; expected different names, one at least"
            )

    @property
    def bytes_per_token(self) -> int:
        return sum(tensor.bytes_per_token for tensor in self.tensors)

    @property
    def bytes_per_page(self) -> int:
        return self.page_size * self.bytes_per_token

    def make(self, num_pages: int, device: torch.device | str = "cpu", fill: float | None = 0.0) -> dict[str, Tensor]:
        """The tensors by name, filled with ``fill``; None: with whatever is there.

        Zeros by default: the expanded form multiplies masked values by zero, and NaN times zero is NaN.
        """
        made = {}
        # Not inference tensors, which nothing outside inference_mode could append to.
        with torch.inference_mode(False):
            for tensor in self.tensors:
                shape = (num_pages, self.page_size, *tensor.shape)
                made[tensor.name] = torch.empty(shape, dtype=tensor.dtype, device=device)
                if fill is not None:
                    made[tensor.name].fill_(fill)
        return made

    def views(self, pages: Tensor) -> dict[str, Tensor]:
        """The tensors by name in pages of bytes [P, page_size, bytes_per_token] uint8: in each page the rows of one
        tensor behind those of another, so that rows lie side by side.

        Raises:
            ValueError: pages have another shape or dtype.
        """
        wanted = (self.page_size, self.bytes_per_token)
        if pages.shape[1:] != wanted or pages.dtype != torch.uint8:
            raise ValueError(
                f"pages is {pages.dtype} {tuple(pages.shape)}; expected torch.uint8 {('P', *wanted)} for {self.name}"
            )
        parts = pages.flatten(1).split([self.page_size * tensor.bytes_per_token for tensor in self.tensors], dim=1)
        return {
            tensor.name: part.view(tensor.dtype).unflatten(1, (self.page_size, *tensor.shape))
            for part, tensor in zip(parts, self.tensors, strict=True)
        }

    def copy_pages(self, cache: Mapping[str, Tensor], copies: Iterable[PageCopy]) -> None:
        """Carries out what :meth:`PageAllocator.plan_growth` asks for, in every tensor of ``cache``."""
        pairs = [(copy.source, copy.target) for copy in copies]
        if not pairs:
            return
        sources, targets = torch.tensor(pairs).T
        for tensor in self.tensors:
            data = in_bytes(cache[tensor.name])
            data[targets.to(data.device)] = data[sources.to(data.device)]


def in_bytes(tensor: Tensor) -> Tensor:
    """``tensor`` to be moved about: e4m3 numbers as uint8, since not every device's indexing knows them."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def latent_layout(geometry: MLAGeometry, page_size: int, dtype: torch.dtype = torch.bfloat16) -> CacheLayout:
    """``latent_cache`` [.., d_c] and ``rope_cache`` [.., G, d_r], as ``mla_decode`` takes them; the first alone with
    ``has_rope_cache`` False. Keys in 8 bits are int8 with ``rope_scale`` per token; latents that are codes
    [.., bytes of a row] uint8."""
    width, name = geometry.kv_lora_rank, "mla"
    if geometry.has_codes:
        latent = CacheTensor("latent_cache", (quantizer_of(geometry).bytes_per_row(width),), torch.uint8)
        name = f"mla_{geometry.latent_bits}_bits"
    else:
        latent = CacheTensor("latent_cache", (width,), dtype)
    name += "_int8_keys" * geometry.has_key_codes
    return CacheLayout(name, (latent, *_rope(geometry, dtype)), page_size)


def quantizer_of(geometry: MLAGeometry) -> RowQuantizer:
    """The codes of a layer's cached latents."""
    return RowQuantizer(geometry.latent_bits)


def fp8_layout(geometry: MLAGeometry, page_size: int, dtype: torch.dtype = torch.bfloat16) -> CacheLayout:
    """``latent_cache`` as e4m3 numbers with ``latent_scale`` per token, and ``rope_cache``, if any, in the model's
    dtype."""
    tensors = (
        CacheTensor("latent_cache", (geometry.kv_lora_rank,), torch.float8_e4m3fn),
        CacheTensor("latent_scale", (), torch.float32),
        *_rope(geometry, dtype),
    )
    return CacheLayout("mla_fp8", tensors, page_size)


def _rope(geometry: MLAGeometry, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
    if not geometry.has_rope_cache:
        return ()
    width = (geometry.num_rope_heads, geometry.qk_rope_head_dim)
    if geometry.has_key_codes:
        scale = CacheTensor("rope_scale", (), torch.float32)
        return CacheTensor("rope_cache", width, torch.int8), scale
    return (CacheTensor("rope_cache", width, dtype),)


def gqa_layout(geometry: Any, page_size: int, dtype: torch.dtype = torch.bfloat16) -> CacheLayout:
    """``key_cache`` [.., h_kv, d_k] and ``value_cache`` [.., h_kv, d_v] of an MHA/GQA model, by its ``GQAGeometry``."""
    tensors = (
        CacheTensor("key_cache", (geometry.num_key_value_heads, geometry.qk_head_dim), dtype),
        CacheTensor("value_cache", (geometry.num_key_value_heads, geometry.v_head_dim), dtype),
    )
    return CacheLayout("gqa", tensors, page_size)
