"""What ops check of a tensor argument: rank, dtype, device and strides before anything else, its address in time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes


class Layout(NamedTuple):
    """What validation looks at of a tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def argument_error(name: str, was: object, expected: object) -> ValueError:
    return ValueError(f"{name} is {was}; expected {expected}")


def check_data(
    name: str, tensor: Layout, layout: str, like: Layout, like_name: str, tma_dims: int | None = None
) -> None:
    """Rank, dtype and device as ``like``; last dimension contiguous, 16-bit rows on 16-byte boundaries (TMA).

    Args:
        name: of the argument.
        tensor: to check.
        layout: its dimensions, such as "[B, S_q, H, d]".
        like, like_name: the argument that it must agree with.
        tma_dims: how many leading dimensions are strided by TMA; None: all but the last.
    """
    if len(tensor.shape) != layout.count(",") + 1:
        raise argument_error(f"{name}.shape", tuple(tensor.shape), layout)
    if tensor.dtype != like.dtype:
        raise argument_error(f"{name}.dtype", tensor.dtype, f"{like.dtype}, as {like_name}")
    if tensor.device != like.device:
        raise argument_error(f"{name}.device", tensor.device, f"{like.device}, as {like_name}")
    shape, strides = tensor.shape, tensor.strides
    if strides[-1] != 1 and shape[-1] > 1:
        raise argument_error(f"{name}.stride(-1)", strides[-1], "1")
    if tensor.dtype.itemsize == 2:
        for dim, stride in enumerate(strides[: len(strides) - 1 if tma_dims is None else tma_dims]):
            if stride % 8 and shape[dim] > 1:
                raise argument_error(f"{name}.stride({dim})", stride, "a multiple of 8 elements (16 bytes)")


def check_index(name: str, tensor: Layout, like: Layout, like_name: str, shape: str, *sizes: int) -> None:
    """int32, contiguous, on the device of ``like``; the first dimensions of ``shape`` have ``sizes``."""
    if len(tensor.shape) != shape.count(",") + 1 or tuple(tensor.shape[: len(sizes)]) != sizes:
        raise argument_error(f"{name}.shape", tuple(tensor.shape), shape)
    if tensor.dtype != torch.int32:
        raise argument_error(f"{name}.dtype", tensor.dtype, "torch.int32")
    if tensor.device != like.device:
        raise argument_error(f"{name}.device", tensor.device, f"{like.device}, as {like_name}")
    if 0 in tensor.shape:
        return
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size > 1 and stride != expected:
            raise argument_error(f"{name}.stride()", tensor.strides, "contiguous")
        expected *= size


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
