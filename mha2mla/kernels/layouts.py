"""Checks of ops' arguments: dimensions by name, dtype, device, strides and addresses of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # that ops take


class Layout(NamedTuple):
    """Properties of a tensor that validation reads."""

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


def check_scale(softmax_scale: float) -> None:
    """Raise ValueError for one that is no positive finite number."""
    if not isinstance(softmax_scale, (int, float)) or not 0 < softmax_scale < math.inf:
        raise argument_error("softmax_scale", repr(softmax_scale), "a positive finite number")


def check_like(name: str, tensor: Tensor, like: Tensor, as_what: str) -> None:
    """Raise ValueError unless a tensor has the dtype and the device of ``like``, called ``as_what``."""
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise argument_error(name, f"{tensor.dtype} on {tensor.device}", f"{like.dtype} on {like.device}, as {as_what}")


def check_beside(as_what: str, first: Tensor, **others: tuple[Tensor | None, torch.Size]) -> None:
    """Raise ValueError unless ``first``, called ``as_what``, has a dtype that ops take, and each of the others that is
    there its dtype, its device and the shape beside it."""
    if first.dtype not in _FLOATS:
        check_float(f"{as_what}.dtype", first.dtype)
    for name, (tensor, shape) in others.items():
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise argument_error(f"{name}.shape", tuple(tensor.shape), f"{tuple(shape)}, by {as_what}")
        if tensor.dtype != first.dtype or tensor.device != first.device:
            check_like(name, tensor, first, as_what)


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


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums over numbers of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Argument:
    """A tensor that an op takes.

    Attributes:
        name: of the argument.
        dims: names of its dimensions, such as "P page (G d_r)". A name stands for one size in all arguments of an op;
            "G|H" is G, which has to divide H. What is in parentheses lies side by side in memory and is one dimension
            to the kernels of a paged op; without any, the last. There the dimensions before may be strided, by
            multiples of 16 bytes where the query is of 16 bits (TMA).
        dtype: None: the query's; a function: what it makes of the query's.
        optional: a call may have None there; kernels of a paged op then get the block table in its place, and are told.
        names, divided, strided: of ``dims``: without parentheses, what each has to divide or "", and how many come
            before what lies side by side.
    """

    name: str
    dims: str
    dtype: torch.dtype | Callable[[torch.dtype], torch.dtype] | None = None
    optional: bool = False
    names: tuple[str, ...] = field(init=False)
    divided: tuple[str, ...] = field(init=False)
    strided: int = field(init=False)

    def __post_init__(self) -> None:
        pairs = [dim.partition("|") for dim in self.dims.replace("(", " ").replace(")", " ").split()]
        before = len(self.dims.partition("(")[0].split()) if "(" in self.dims else len(pairs) - 1
        object.__setattr__(self, "names", tuple(name for name, _, _ in pairs))
        object.__setattr__(self, "divided", tuple(whole for _, _, whole in pairs))
        object.__setattr__(self, "strided", before)

    def check_sizes(self, tensor: Layout, query: Layout, query_name: str, sizes: dict[str, int]) -> None:
        """Raise ValueError if a tensor's dimensions, dtype or device are not as they must be beside the query and
        ``sizes``, or numbers in parentheses not side by side; its own sizes join them."""
        name, shape = self.name, tensor.shape
        if len(shape) != len(self.names):
            raise argument_error(f"{name}.shape", tuple(shape), self._expected(sizes))
        own = isinstance(self.dtype, torch.dtype)
        dtype = self.dtype if own else query.dtype if self.dtype is None else self.dtype(query.dtype)
        if tensor.dtype != dtype:
            raise argument_error(f"{name}.dtype", tensor.dtype, dtype if own else f"{dtype}, as {query_name}")
        if tensor.device != query.device:
            raise argument_error(f"{name}.device", tensor.device, f"{query.device}, as {query_name}")
        for dim, whole, size in zip(self.names, self.divided, shape, strict=True):
            if whole and dim not in sizes and (size < 1 or sizes[whole] % size):
                raise argument_error(f"{name}.shape", tuple(shape), self._expected(sizes))
            if sizes.setdefault(dim, size) != size:
                raise argument_error(f"{name}.shape", tuple(shape), self._expected(sizes))
        if "(" in self.dims:
            self._check_dense(tensor)

    def check(self, tensor: Layout, query: Layout, query_name: str, sizes: dict[str, int]) -> None:
        """:meth:`check_sizes`, and strides as kernels of a paged op need them."""
        self.check_sizes(tensor, query, query_name, sizes)
        self._check_dense(tensor)
        step = ALIGNMENT // tensor.dtype.itemsize
        for dim in range(self.strided if query.dtype.itemsize == 2 and 0 not in tensor.shape else 0):
            if tensor.strides[dim] % step and tensor.shape[dim] > 1:
                expected = f"a multiple of {step} elements ({ALIGNMENT} bytes)"
                raise argument_error(f"{self.name}.stride({dim})", tensor.strides[dim], expected)

    def _check_dense(self, tensor: Layout) -> None:
        dense, shape, strides = 1, tensor.shape, tensor.strides
        for dim in reversed(range(len(shape) if 0 in shape else self.strided, len(shape))):
            if strides[dim] != dense and shape[dim] > 1:
                where = -1 if dim == len(shape) - 1 else dim
                raise argument_error(
                    f"{self.name}.stride({where})", strides[dim], f"{dense}: [{self.dims}] side by side"
                )
            dense = dense * shape[dim]

    def _expected(self, sizes: dict[str, int]) -> str:
        pairs = zip(self.names, self.divided, strict=True)
        divisors = [f"a divisor of {sizes[whole]}" if whole in sizes else dim for dim, whole in pairs]
        return f"[{', '.join(str(sizes.get(dim, text)) for dim, text in zip(self.names, divisors, strict=True))}]"


def check_tensors(arguments: Iterable[Argument], tensors: Iterable[Tensor | None], **known: int) -> dict[str, int]:
    """Everything of an op's tensors but strides outside parentheses and addresses; not to be written to: their sizes by
    name.

    Args:
        arguments: the query first.
        tensors: of each argument; None where an optional one is left out.
        known: sizes that something else says.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    layouts = tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])
    # Dynamo traces the check itself: its sizes may be symbols, which cannot be remembered.
    check = _check_tensors if torch.compiler.is_compiling() else _check_tensors_once
    return check(tuple(arguments), layouts, tuple(known.items()))


def _check_tensors(
    arguments: tuple[Argument, ...], layouts: tuple[tuple | None, ...], known: tuple[tuple[str, int], ...]
) -> dict[str, int]:
    query, name, sizes = Layout(*layouts[0]), arguments[0].name, dict(known)
    check_float(f"{name}.dtype", query.dtype)
    for argument, layout in sorted(zip(arguments, layouts, strict=True), key=lambda pair: pair[0].optional):
        if layout is not None:
            argument.check_sizes(Layout(*layout), query, name, sizes)
        elif not argument.optional:
            raise argument_error(argument.name, None, f"a tensor [{argument.dims}]")
    return sizes


_check_tensors_once = lru_cache(maxsize=4096)(_check_tensors)  # a decode loop asks in every layer


def with_dense_rows(x: Tensor) -> Tensor:
    """``x`` itself where its last dimension is dense: parts of one projection are read where they lie."""
    return x if x.stride(-1) == 1 else x.contiguous()


def vector_of(*tensors: Tensor) -> int:
    """Numbers that may be moved at a time, at most 16 bytes: pointers and strides are multiples of so many."""
    size = tensors[0].element_size()
    places = [tensor.data_ptr() for tensor in tensors]
    strides = [stride * size for tensor in tensors for stride in tensor.stride()[:-1]]
    return max(1, math.gcd(16, *places, *strides) // size)
