"""What tests on a GPU watch and record: waits of the host, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """In here a wait of the host for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graph_of(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """``run`` captured, and what a replay writes; kernels are compiled by a call before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out
