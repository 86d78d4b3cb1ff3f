"""Shared by all ops: checks of tensors and backends, devices, and registration with torch. No kernels, no TileLang."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mha2mla.kernels.split_kv.choice import HOPPER

BACKENDS = ("tilelang", "reference")
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


def sizes_of(name: str, tensor: Tensor, dims: str) -> dict[str, int]:
    """Sizes of a tensor, called ``name``, by the names of ``dims``. Raises ValueError for another number of them."""
    names = dims.split()
    if tensor.dim() != len(names):
        raise argument_error(f"{name}.shape", tuple(tensor.shape), f"[{', '.join(names)}]")
    return dict(zip(names, tensor.shape, strict=True))


def check_float(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError for a dtype, called ``name``, that no op takes."""
    if dtype not in _FLOATS:
        raise argument_error(name, dtype, "bfloat16, float16, float32 or float64")


def check_scale(softmax_scale: float) -> None:
    """Raise ValueError for one that is no finite number of at least 1e-20: scores are masked before they are scaled."""
    if not isinstance(softmax_scale, (int, float)) or not 1e-20 <= softmax_scale < math.inf:
        raise argument_error("softmax_scale", repr(softmax_scale), "a positive finite number, at least 1e-20")


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
            "G|H" is G, which has to divide H; a number is itself. What is in parentheses lies side by side in memory
            and is one dimension to the kernels of a paged op; without any, the last. There the dimensions before may be
            strided, by multiples of 16 bytes where the query is of 16 bits (TMA).
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

    def check(self, tensor: Layout, query: Layout, query_name: str, sizes: dict[str, int], is_paged: bool) -> None:
        """Raise ValueError if a tensor's dimensions, dtype or device are not as they must be beside the query and
        ``sizes``, or numbers in parentheses not side by side; its own sizes join them. ``is_paged``: or if its strides
        are not as kernels of a paged op need them."""
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
            if sizes.setdefault(dim, int(dim) if dim.isdigit() else size) != size:
                raise argument_error(f"{name}.shape", tuple(shape), self._expected(sizes))
        if is_paged or "(" in self.dims:
            self._check_dense(tensor)
        step = ALIGNMENT // tensor.dtype.itemsize
        for dim in range(self.strided if is_paged and query.dtype.itemsize == 2 and 0 not in shape else 0):
            if tensor.strides[dim] % step and shape[dim] > 1:
                expected = f"a multiple of {step} elements ({ALIGNMENT} bytes)"
                raise argument_error(f"{name}.stride({dim})", tensor.strides[dim], expected)

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


def check_tensors(
    arguments: tuple[Argument, ...], tensors: Iterable[Tensor | None], is_paged: bool = False, **known: int
) -> dict[str, int]:
    """Everything of an op's tensors but addresses, and strides outside parentheses; not to be written to: their sizes
    by name.

    Args:
        arguments: the query first.
        tensors: of each argument; None where an optional one is left out.
        is_paged: strides too, as kernels of a paged op need them.
        known: sizes that something else says.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    layouts = tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])
    # Dynamo traces the check itself: its sizes may be symbols, which cannot be remembered.
    check = check_layouts if torch.compiler.is_compiling() else _check_layouts_once
    return check(arguments, layouts, is_paged, tuple(known.items()))


def check_layouts(
    arguments: tuple[Argument, ...], layouts: tuple[tuple | None, ...], is_paged: bool = False, known: tuple = ()
) -> dict[str, int]:
    """:func:`check_tensors` of shape, strides, dtype and device of each; nothing is remembered."""
    name, sizes = arguments[0].name, dict(known)
    if layouts[0] is None:
        raise argument_error(name, None, f"a tensor [{arguments[0].dims}]")
    query = Layout(*layouts[0])
    check_float(f"{name}.dtype", query.dtype)
    for argument, layout in sorted(zip(arguments, layouts, strict=True), key=lambda pair: pair[0].optional):
        if layout is not None:
            argument.check(Layout(*layout), query, name, sizes, is_paged)
        elif not argument.optional:
            raise argument_error(argument.name, None, f"a tensor [{argument.dims}]")
    return sizes


_check_layouts_once = lru_cache(maxsize=4096)(check_layouts)  # a decode loop asks in every layer


def with_dense_rows(x: Tensor) -> Tensor:
    """``x`` itself where its last dimension is dense: parts of one projection are read where they lie."""
    return x if x.stride(-1) == 1 else x.contiguous()


def vector_of(*tensors: Tensor) -> int:
    """Numbers that may be moved at a time, at most 16 bytes: pointers and strides are multiples of so many."""
    size, bits = tensors[0].element_size(), 16
    for tensor in tensors:
        bits |= tensor.data_ptr()
        for stride in tensor.stride()[:-1]:
            bits |= stride * size
    return max(1, (bits & -bits) // size)  # the lowest bit: the largest power of two that divides all


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_backend(backend: str | None) -> None:
    """Raise ValueError for one that is unknown."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; expected None or one of {BACKENDS}")


def runs_compiled(backend: str | None, device: torch.device, *dtypes: torch.dtype) -> bool:
    """True where an op with kernels for any shape in float32, bfloat16 and float16 runs compiled, not as its reference.

    Raises:
        ValueError: ``backend`` is unknown, or TileLang is asked for and does not serve ``dtypes`` on ``device``.
    """
    if backend not in (None, *BACKENDS):  # a call less in every op of a step
        check_backend(backend)
    served = device.type == "cuda" and torch.float64 not in dtypes
    if backend == "tilelang" and not served:
        what = " and ".join(dict.fromkeys(map(str, dtypes))) or "tensors"
        raise ValueError(f"backend is 'tilelang' for {what} on {device}; expected float32, bfloat16 or float16 on CUDA")
    return served and backend != "reference"


@lru_cache(maxsize=64)
def capability(device: torch.device) -> int:
    """Compute capability as a number; a Hopper's where there is no GPU, so that machines without one can ask."""
    if not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@lru_cache(maxsize=64)
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_HERE = nullcontext()


@lru_cache(maxsize=1)
def _is_the_only_one() -> bool:
    return torch.cuda.device_count() <= 1


def on_device(device: torch.device) -> AbstractContextManager:
    """``torch.cuda.device`` of a tensor's device, and nothing where that is the current one: it costs two changes, and
    half a microsecond to ask for."""
    here = _is_the_only_one() or device.index == torch.accelerator.current_device_index()
    return _HERE if here else torch.cuda.device(device)


LIBRARY = torch.library.Library("mha2mla", "FRAGMENT")
load = cache(resolve_name)  # imports TileLang when it is needed; takes "module:function"


def in_plain_eager_mode(tensor: Tensor) -> bool:
    """True where an op on a tensor needs no dispatcher, but for autograd."""
    return not torch.compiler.is_compiling() and type(tensor) is Tensor and not is_in_torch_dispatch_mode()


def register(
    schema: str, call: Callable[..., Any], fake: Callable[..., Any], plain: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """``mha2mla::name`` of a schema "name(Tensor …) -> …", what it does on every device and what it makes of fake
    tensors; returned as a function. ``plain`` does the same where the last argument is False, of the others."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mha2mla::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.mha2mla, name)

    def run(first: Tensor, *others: Any) -> Any:
        traced = torch.is_grad_enabled() or torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
        if traced or type(first) is not Tensor:
            return op(first, *others)
        if plain is not None and not others[-1]:
            return plain(first, *others[:-1])
        return call(first, *others)

    return run


def register_kernel(
    schema: str, reference: Callable[..., Any], empty: Callable[..., Any], launch: str
) -> Callable[..., Any]:
    """:func:`register` of an op whose last argument says whether its kernel runs, or plain torch.

    Args:
        schema: ends in "bool compiled"; the functions below take what comes before it.
        reference: the op in plain torch.
        empty: the output, not filled; several as a tuple, of an op without one None.
        launch: "module:function" that runs the kernel, and takes the outputs behind all arguments. Imported when it is
            needed, as it imports TileLang.
    """

    def call(*arguments: Any) -> Any:
        *given, compiled = arguments
        if not compiled:
            return reference(*given)
        made = empty(*given)
        load(launch)(*given, *(made if isinstance(made, tuple) else () if made is None else (made,)))
        return made

    return register(schema, call, lambda *arguments: empty(*arguments[:-1]), reference)
