"""Time of one call, from a library: ``triton.testing`` on CUDA, ``torch.utils.benchmark`` on a CPU."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

GRAPH_REPLAYS = 10  # that do_bench_cudagraph times, each of a graph of as many calls as fit into its ``rep``
SHORTEST_GRAPH = 2.0  # ms, beside which launching the graph (about 8 µs) does not count


@dataclass(frozen=True)
class Timing:
    """Quantiles of one call in µs, and its CUDA-graph time (``None``: no GPU, or why it cannot be captured)."""

    p20: float
    p50: float
    p80: float
    graph: float | None = None
    graph_refused: str | None = None

    def to_row(self) -> dict[str, Any]:
        row = {"us_p20": self.p20, "us_p50": self.p50, "us_p80": self.p80, "us_graph": self.graph}
        return row | ({"graph_refused": self.graph_refused} if self.graph_refused else {})


def start_device(device: torch.device) -> None:
    """Start-up of a process that launches kernels, before its jobs have a time-out: imports and CUDA's start."""
    if device.type == "cuda":
        import tilelang  # noqa: F401
        import triton.testing  # noqa: F401

        logging.getLogger("tilelang").setLevel(logging.WARNING)  # no line for each kernel; importing it sets a level
        torch.zeros(1, device=device).item()


def time_callable(
    call: Callable[[], Any], device: torch.device | str, *, min_run_time: float = 0.3, graph: bool = True
) -> Timing:
    """Times a call that leaves its inputs as they were.

    Args:
        call: what to time; takes nothing. Warmed up before anything counts.
        device: where it computes.
        min_run_time: seconds to spend measuring, and again for the graph time.
        graph: measure the graph time too (CUDA).

    Returns:
        Quantiles over runs. CUDA: device time of a run with cold L2, from events; the graph time is with warm L2.
    """
    device = torch.device(device)
    if device.type == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph

        with torch.cuda.device(device):
            p20, p50, p80 = do_bench(call, warmup=25, rep=int(min_run_time * 1000), quantiles=[0.2, 0.5, 0.8])
            replayed = refused = None
            length = max(SHORTEST_GRAPH, min_run_time * 1000 / GRAPH_REPLAYS)
            try:
                if graph:
                    replayed = do_bench_cudagraph(call, rep=length, return_mode="median") * 1000
            except Exception as error:  # a call that cannot be captured fails in its own way: host sync, allocation, …
                torch.cuda.synchronize()
                refused = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Timing(p20 * 1000, p50 * 1000, p80 * 1000, replayed, refused)

    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    timer.timeit(1)
    times = [seconds * 1e6 for seconds in timer.blocked_autorange(min_run_time=min_run_time).times]
    if len(times) == 1:
        times *= 2  # a single long block: all quantiles are that one
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(tenths[1], tenths[4], tenths[7])


def copy_rate(device: torch.device | str, min_run_time: float = 0.3) -> float:
    """Bytes a second, read and written, of a copy of 1 GiB on CUDA, of 64 MiB on a CPU: what memory gives."""
    device = torch.device(device)
    source = torch.zeros(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    us = time_callable(lambda: target.copy_(source), device, min_run_time=min_run_time, graph=False).p50
    return 2 * source.nbytes / us * 1e6
