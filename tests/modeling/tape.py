"""A recorder of decode steps for machines without a GPU, as strict as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map


class Tape(TorchDispatchMode):
    """Notes every operation that reaches the device, with the very tensors and the Python values that it was given.

    A replay does these operations again and runs no other Python: what was an integer, a shape or a branch when it was
    recorded stays what it was, as in a CUDA graph. Tensors from outside are read and written where they lie; those that
    an operation made are made again. The result is written to where the recorded one lies.
    """

    device_type = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple] = []

    def explain(self, cache) -> None:
        return None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def record(
        self, step: Callable[[], Tensor], undo: Callable[[], None], device: torch.device
    ) -> tuple[Tensor, Callable[[], None]]:
        self._calls = calls = []
        with self:
            result = step()
        undo()

        def replay() -> None:
            made: dict[int, Tensor] = {}

            def now(value):
                return made.get(id(value), value) if isinstance(value, Tensor) else value

            for func, args, kwargs, recorded in calls:
                out = func(*tree_map(now, args), **tree_map(now, kwargs))
                for old, new in zip(tree_iter(recorded), tree_iter(out), strict=True):
                    if isinstance(old, Tensor):
                        made[id(old)] = new
            with torch.inference_mode():  # which may write to what was made under it, or was not
                result.copy_(made[id(result)])

        return result, replay

    def launch(self, replay: Callable[[], None], device: torch.device) -> None:
        replay()

    def wait(self, device: torch.device) -> None:
        pass


class Refusing(Tape):
    """Fails while it records, after the step was run once, as a capture does that meets a synchronisation."""

    def record(self, step, undo, device):
        step()
        undo()
        raise RuntimeError("operation not permitted when stream is capturing")
