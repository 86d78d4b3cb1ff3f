"""The tensors of a paged op: their dimensions by name, and every check of them that the host can make."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mha2mla.kernels.layouts import ALIGNMENT, Layout, argument_error


@dataclass(frozen=True)
class Argument:
    """A tensor that an op takes.

    Attributes:
        name: of the argument.
        dims: names of its dimensions, such as "P page (G d_r)". A name stands for one size in all arguments of an op.
            What is in parentheses lies side by side in memory and is one dimension to kernels; without any, the last.
            The dimensions before may be strided, by multiples of 16 bytes where the query is of 16 bits (TMA).
        dtype: None: the query's.
        optional: a call may have None there; kernels then get the block table in its place, and are told.
        names, strided: of ``dims``: without parentheses, and how many come before what lies side by side.
    """

    name: str
    dims: str
    dtype: torch.dtype | None = None
    optional: bool = False
    names: tuple[str, ...] = field(init=False)
    strided: int = field(init=False)

    def __post_init__(self) -> None:
        names = tuple(self.dims.replace("(", " ").replace(")", " ").split())
        before = len(self.dims.partition("(")[0].split()) if "(" in self.dims else len(names) - 1
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "strided", before)

    def check(self, tensor: Layout, query: Layout, query_name: str, sizes: dict[str, int]) -> None:
        """Raise ValueError if a tensor is not as it must be beside the query and ``sizes``; its own join them."""
        name, shape, strides = self.name, tensor.shape, tensor.strides
        if len(shape) != len(self.names):
            raise argument_error(f"{name}.shape", tuple(shape), self._expected(sizes))
        if tensor.dtype != (query.dtype if self.dtype is None else self.dtype):
            expected = f"{query.dtype}, as {query_name}" if self.dtype is None else self.dtype
            raise argument_error(f"{name}.dtype", tensor.dtype, expected)
        if tensor.device != query.device:
            raise argument_error(f"{name}.device", tensor.device, f"{query.device}, as {query_name}")
        for dim, size in zip(self.names, shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                raise argument_error(f"{name}.shape", tuple(shape), self._expected(sizes))
        if 0 in shape:
            return
        dense = 1
        for dim in reversed(range(self.strided, len(shape))):
            if strides[dim] != dense and shape[dim] > 1:
                where = -1 if dim == len(shape) - 1 else dim
                raise argument_error(f"{name}.stride({where})", strides[dim], f"{dense}: [{self.dims}] side by side")
            dense = dense * shape[dim]
        if query.dtype.itemsize == 2:
            step = ALIGNMENT // tensor.dtype.itemsize
            for dim in range(self.strided):
                if strides[dim] % step and shape[dim] > 1:
                    raise argument_error(
                        f"{name}.stride({dim})", strides[dim], f"a multiple of {step} elements ({ALIGNMENT} bytes)"
                    )

    def _expected(self, sizes: dict[str, int]) -> str:
        return f"[{', '.join(str(sizes.get(dim, dim)) for dim in self.names)}]"


INDICES = (
    Argument("block_table", "(B max_pages)", torch.int32),
    Argument("cache_seqlens", "(B)", torch.int32),
    Argument("cache_starts", "(B)", torch.int32),
)
