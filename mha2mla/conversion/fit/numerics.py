"""Settings of torch that hold inside a ``with`` and are put back after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    """torch's deterministic mode; ``warn_only``: what has no kernel that repeats runs all the same.

    Memory that nothing was written to stays as it is: the mode would fill it.
    """
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


@contextmanager
def tf32_on_cuda(device: torch.device) -> Iterator[None]:
    """float32 products with TF32's mantissa on a CUDA device: errors of 1e-3, where fits make do with 1e-2."""
    usual = torch.get_float32_matmul_precision()
    try:
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        yield
    finally:
        torch.set_float32_matmul_precision(usual)
