"""What a paged cache is made of: names, shapes, dtypes and bytes of its tensors, and how they come into being."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.pages import PageCopy


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
        name: of the layout, for messages and reports.
        tensors: each is stored as [num_pages, page_size, *shape].
        page_size: tokens per page.
        combined: all tensors are views of one buffer [num_pages, page_size, numbers per token], one behind the other
            within a token (FlashMLA's layout); they must have one dtype.

    Raises:
        ValueError: ``page_size`` is less than 1, two tensors share a name, or a combined layout has several dtypes.
    """

    name: str
    tensors: tuple[CacheTensor, ...]
    page_size: int
    combined: bool = False

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}; expected at least 1")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names) or not names:
            raise ValueError(
                f"tensors are called {', '.join(names) or 'nothing'}; expected different names, one at least"
            )
        if self.combined and len({tensor.dtype for tensor in self.tensors}) > 1:
            dtypes = ", ".join(f"{tensor.name} {tensor.dtype}" for tensor in self.tensors)
            raise ValueError(f"combined is True for {dtypes}; expected one dtype")

    @property
    def bytes_per_token(self) -> int:
        return sum(tensor.bytes_per_token for tensor in self.tensors)

    @property
    def bytes_per_page(self) -> int:
        return self.page_size * self.bytes_per_token

    def num_pages(self, nbytes: int, num_layers: int = 1) -> int:
        """Whole pages that fit into ``nbytes`` if ``num_layers`` layers have as many each."""
        return nbytes // (num_layers * self.bytes_per_page)

    def make(self, num_pages: int, device: torch.device | str = "cpu", fill: float = 0.0) -> dict[str, Tensor]:
        """The tensors by name, filled with ``fill``.

        Zeros by default: the expanded form multiplies masked values by zero, and NaN times zero is NaN.
        """
        # Not inference tensors, which nothing outside inference_mode could append to.
        with torch.inference_mode(False):
            return self._make(num_pages, device, fill)

    def _make(self, num_pages: int, device: torch.device | str, fill: float) -> dict[str, Tensor]:
        if not self.combined:
            return {
                tensor.name: torch.full(
                    (num_pages, self.page_size, *tensor.shape), fill, dtype=tensor.dtype, device=device
                )
                for tensor in self.tensors
            }
        widths = [torch.Size(tensor.shape).numel() for tensor in self.tensors]
        shape = (num_pages, self.page_size, sum(widths))
        parts = torch.full(shape, fill, dtype=self.tensors[0].dtype, device=device).split(widths, dim=-1)
        return {
            tensor.name: part.unflatten(-1, tensor.shape) if tensor.shape else part.squeeze(-1)
            for tensor, part in zip(self.tensors, parts, strict=True)
        }

    def copy_pages(self, cache: Mapping[str, Tensor], copies: Iterable[PageCopy]) -> None:
        """Carries out what :meth:`PageAllocator.grow` asked for, in every tensor of ``cache``."""
        pairs = [(copy.source, copy.target) for copy in copies]
        if not pairs:
            return
        sources, targets = torch.tensor(pairs).T
        for tensor in self.tensors:
            data = cache[tensor.name]
            data[targets.to(data.device)] = data[sources.to(data.device)]


def latent_layout(
    geometry: MLAGeometry, page_size: int, dtype: torch.dtype = torch.bfloat16, *, combined: bool = False
) -> CacheLayout:
    """``latent_cache`` [.., d_c] and ``rope_cache`` [.., G, d_r], as ``mla_decode`` takes them."""
    rope = (geometry.num_rope_heads, geometry.qk_rope_head_dim)
    tensors = (
        CacheTensor("latent_cache", (geometry.kv_lora_rank,), dtype),
        CacheTensor("rope_cache", rope, dtype),
    )
    return CacheLayout("mla", tensors, page_size, combined)


def gqa_layout(
    num_key_value_heads: int, head_dim: int, v_head_dim: int, page_size: int, dtype: torch.dtype = torch.bfloat16
) -> CacheLayout:
    """``key_cache`` [.., h_kv, d_k] and ``value_cache`` [.., h_kv, d_v] of an MHA/GQA model."""
    tensors = (
        CacheTensor("key_cache", (num_key_value_heads, head_dim), dtype),
        CacheTensor("value_cache", (num_key_value_heads, v_head_dim), dtype),
    )
    return CacheLayout("gqa", tensors, page_size)
