"""Recorders of a decode step for ``captured.py``: CUDA graphs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from mha2mla.modeling.cache import LatentCache


class Recorder(Protocol):
    """Protocol of a recorder: :class:`CudaGraphs`, or a replay of the same operations in tests without a GPU."""

    device_type: str

    def explain(self, cache: LatentCache) -> str | None:
        """Why steps over this cache cannot be recorded, or None."""

    def record(
        self, step: Callable[[], Tensor], undo: Callable[[], None], device: torch.device
    ) -> tuple[Tensor, Callable[[], None]]:
        """Result of ``step``, and a function that repeats its device work in place, with the host's values
        of now. ``step`` may be run for that, each time with an ``undo`` behind it."""


@functools.cache
def _stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """One for all recordings of a thread: cuBLAS keeps a workspace for every stream that it ever saw."""
    return torch.cuda.Stream(device)


class CudaGraphs:
    """Records CUDA graphs, all in one memory pool: they must not be replayed at the same time."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._pool: Any = None

    def explain(self, cache: LatentCache) -> str | None:
        """References read tensors on the host."""
        slow = [layer.backend.name for layer in cache.layers if not layer.backend.compiled]
        return f"{slow[0]!r} is no kernel" if slow else None

    def record(
        self, step: Callable[[], Tensor], undo: Callable[[], None], device: torch.device
    ) -> tuple[Tensor, Callable[[], None]]:
        """Records a CUDA graph; waits for the device, once."""
        stream, graph = _stream(device, threading.get_ident()), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step()
            undo()
            generator = torch.cuda.default_generators[device.index or 0]
            state = generator.clone_state()
            try:
                # thread_local: what other threads do meanwhile is no error of this one.
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    result = step()
            except BaseException:
                # A capture that fails leaves the generator to wait for its end, and nobody could sample any more.
                generator.graphsafe_set_state(state)
                raise
        torch.cuda.current_stream(device).wait_stream(stream)
        self._pool = graph.pool()
        return result, graph.replay
