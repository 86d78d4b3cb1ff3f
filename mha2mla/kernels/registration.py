"""How an op is registered with torch, and called: past the dispatcher, which costs as much as a kernel's launch, where
nothing listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

LIBRARY = torch.library.Library("mha2mla", "FRAGMENT")


def in_plain_eager_mode(tensor: Tensor) -> bool:
    """Whether an op on a tensor needs no dispatcher, but for autograd."""
    return not torch.compiler.is_compiling() and type(tensor) is Tensor and not is_in_torch_dispatch_mode()


def register(schema: str, call: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """``mha2mla::name`` of a schema "name(Tensor …) -> …", what it does on every device and what it makes of fake
    tensors; returned as a function."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mha2mla::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.mha2mla, name)

    def run(first: Tensor, *others: Any) -> Any:
        direct = in_plain_eager_mode(first) and not torch.is_grad_enabled()
        return (call if direct else op)(first, *others)

    return run
