"""Forward passes in float64 without a copy of the model: one module's weights at a time are wide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """While open, ``model`` computes in float64; its parameters are the same objects with the same bits afterwards.

    Each module's own floating-point parameters are widened when its forward begins and put back when it ends, so at
    most the modules on the way from the root to one leaf are wide at a time. What a model computes in float32 whatever
    its dtype (norms, angles) stays so, as it does in ``model.double()``.
    """
    narrow: dict[nn.Module, dict[str, nn.Parameter]] = {}

    def widen(module: nn.Module, *_: Any) -> None:
        own = {name: each for name, each in module._parameters.items() if each is not None and each.is_floating_point()}
        narrow[module] = own
        for name, each in own.items():
            module._parameters[name] = nn.Parameter(each.detach().double(), requires_grad=False)

    def restore(module: nn.Module, *_: Any) -> None:
        module._parameters.update(narrow.pop(module, {}))

    with ExitStack() as hooks:
        hooks.callback(lambda: [restore(module) for module in list(narrow)])
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                hooks.callback(module.register_forward_pre_hook(widen).remove)
                hooks.callback(module.register_forward_hook(restore).remove)
        with torch.no_grad():
            yield
