"""The tensors that every paged op takes behind its own."""

from __future__ import annotations

import torch

from mha2mla.kernels.layouts import Argument

INDICES = (
    Argument("block_table", "(B max_pages)", torch.int32),
    Argument("cache_seqlens", "(B)", torch.int32),
    Argument("cache_starts", "(B)", torch.int32),
)
