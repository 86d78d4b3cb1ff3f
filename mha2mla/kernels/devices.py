"""Devices and backends of every op, and its registration with torch. No kernels, no TileLang."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mha2mla.kernels.split_kv.choice import HOPPER

BACKENDS = ("tilelang", "reference")


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
    if backend is not None:
        check_backend(backend)
    served = device.type == "cuda" and torch.float64 not in dtypes
    if backend == "tilelang" and not served:
        raise ValueError(
            f"backend is 'tilelang' for {dtypes[0]} on {device}; expected float32, bfloat16 or float16 on CUDA"
        )
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
