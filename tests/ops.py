"""What is called: functions by a patch, ops of torch by modes that note them or raise in place of one."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def noted(monkeypatch, owner, name, note=lambda *args, **keys: args) -> list:
    """A list that fills up with what ``note`` makes of the arguments of every call of ``owner.name``."""
    calls, call = [], getattr(owner, name)

    def noting(*args, **keys):
        calls.append(note(*args, **keys))
        return call(*args, **keys)

    monkeypatch.setattr(owner, name, noting)
    return calls


class Calls(TorchDispatchMode):
    """Names of the ops that run, such as ``aten::mm``; ``name in calls`` asks for an op of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    def __contains__(self, name: str) -> bool:
        return f"mha2mla::{name}" in self.names


class OutOfMemory(RuntimeError):
    pass


class RaisingAt(TorchDispatchMode):
    """Raises instead of running op number ``at`` from now on; None only counts. ``allocating``: ops that make a tensor
    count alone, and all further ones fail too, as when memory is full."""

    def __init__(self, at: int | None, *, allocating: bool = False) -> None:
        super().__init__()
        self.at, self.allocating, self.seen = at, allocating, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema = func._schema
        allocates = not schema.is_mutable and any(each.alias_info is None for each in schema.returns)
        if allocates or not self.allocating:
            self.seen += 1
            if self.at is not None and (self.seen > self.at if self.allocating else self.seen == self.at + 1):
                raise OutOfMemory(str(func))
        return func(*args, **(kwargs or {}))


class FunctionCalls(TorchFunctionMode):
    """Name of every call of ``functions`` of torch, and the width of its first argument, in order."""

    def __init__(self, *functions):
        super().__init__()
        self.functions, self.made = functions, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.functions:
            self.made.append((func.__name__, args[0].shape[-1]))
        return func(*args, **(kwargs or {}))


class SdpaCalls(TorchFunctionMode):
    """Heads of query and key of each call of PyTorch's SDPA, and whether they are grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, bool]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append((args[0].shape[1], args[1].shape[1], kwargs.get("enable_gqa", False)))
        return function(*args, **(kwargs or {}))
