"""What ops check of a tensor argument before they look at anything else: rank, dtype, device and strides."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size > 1 and stride != expected:
            raise argument_error(f"{name}.stride()", tensor.strides, "contiguous")
        expected *= size
