"""What ops check of a tensor argument: rank, dtype, device and strides before anything else, its address in time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # that ops take


class Layout(NamedTuple):
    """What validation looks at of a tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def argument_error(name: str, was: object, expected: object) -> ValueError:
    return ValueError(f"{name} is {was}; expected {expected}")


def check_float(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError for a dtype, called ``name``, that no op takes."""
    if dtype not in _FLOATS:
        raise argument_error(name, dtype, "bfloat16, float16, float32 or float64")


def check_like(name: str, tensor: Tensor, like: Tensor, as_what: str, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless a tensor has the dtype (or ``dtype``) and the device of ``like``, called ``as_what``."""
    dtype = like.dtype if dtype is None else dtype
    if tensor.dtype != dtype or tensor.device != like.device:
        raise argument_error(name, f"{tensor.dtype} on {tensor.device}", f"{dtype} on {like.device}, as {as_what}")


def check_aligned(**tensors: Tensor | None) -> None:
    """Raise ValueError for the first argument that does not begin at a multiple of 16 bytes, as TMA and 16-byte loads
    and stores ask for. For kernels only: a reference reads views of any offset.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % ALIGNMENT and tensor.numel():
            raise argument_error(f"{name}.data_ptr()", tensor.data_ptr(), f"a multiple of {ALIGNMENT} bytes")


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and beginning at a multiple of 16 bytes: itself, or a copy."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
