"""Rows of ``eval latency``: a row has a time only after the same inputs passed their check, or says it was not checked.

Time comes from a library: ``triton.testing`` on CUDA (cold L2 for each run; CUDA-graph time beside it),
``torch.utils.benchmark`` on a CPU; that of ``generate`` is wall clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mha2mla.eval.report import filled, html_table
from mha2mla.testing.numeric_check import NOT_CHECKED, Judgement
from mha2mla.testing.timing import time_callable

WRONG = "wrong: "  # prefix of the status of a row whose check failed
_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # in a RuntimeError: torch has no class for it

COLUMNS = {
    "op": "op",
    "implementation": "implementation",
    "batch": "batch",
    "seqlen": "length",
    "cache_bytes": "cache bytes",
    "us_p20": "p20 µs",
    "us_p50": "p50 µs",
    "us_p80": "p80 µs",
    "us_graph": "graph µs",
    "plan_us": "plan µs",
    "gb_per_s": "GB/s",
    "ms_per_token": "ms a\ntoken",
    "first_token_ms": "first\ntoken ms",
    "tokens_per_s": "tokens/s",
    "peak_bytes": "peak bytes",
    "largest_batch": "largest\nbatch",
    "speed_up": "speed-up",
    "limit_us": "limit µs",
    "of_limit": "of\nlimit",
    "error": "error",
    "status": "status",
}

# Columns in a terminal of 100 columns; JSON and notebooks have all of :data:`COLUMNS`.
_NARROW = ("implementation", "batch", "seqlen", "cache_mb", "us", "first_token_ms", "ms_per_token", "tokens_per_s")
_NARROW += ("peak_gb", "largest_batch", "speed_up", "limit_us", "of_limit", "status")
_HEADINGS = COLUMNS | {"cache_mb": "cache\nMB", "us": "µs", "peak_gb": "peak\nGB"}
_LEFT_OUT = {"generate": ("us", "limit_us", "of_limit"), "decode step": ("ms_per_token",)}


class LatencyRows(list[dict[str, Any]]):
    """Rows of measurements: a line each where they are printed, a table in a notebook."""

    def tables(self) -> Iterator[tuple[str, list[dict[str, Any]], dict[str, str]]]:
        """For each op its name, its rows and the headings of the columns that a terminal has room for."""
        for op in dict.fromkeys(row["op"] for row in self):
            rows = [row | {"us": time_of(row)} for row in self if row["op"] == op]
            for row in rows:
                row["cache_mb"] = scaled(row.get("cache_bytes"), 1e-6)
                row["peak_gb"] = scaled(row.get("peak_bytes"), 1e-9)
            yield op, rows, filled({key: _HEADINGS[key] for key in _NARROW if key not in _LEFT_OUT.get(op, ())}, rows)

    def columns(self) -> dict[str, str]:
        """Key → heading of the columns that any row has."""
        return filled(COLUMNS, self)

    def __repr__(self) -> str:
        return "\n".join(map(_line, self))

    def _repr_html_(self) -> str:
        return html_table(self, self.columns())


def _line(row: Mapping[str, Any]) -> str:
    us, speed_up = time_of(row), row.get("speed_up")
    found = row["status"] if us is None else f"{us:,.1f} µs" + (f", {speed_up:.3g} x the source" if speed_up else "")
    status = "" if us is None or row["status"] == "ok" else f" ({row['status']})"
    return f"{row['op']}, {row['implementation']}, {row['batch']} x {row['seqlen']:,}: {found}{status}"


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def time_of(row: Mapping[str, Any]) -> float | None:
    """µs of a row, in a CUDA graph where that was measured; None if it has no time."""
    return row.get("us_p50") if row.get("us_graph") is None else row["us_graph"]


def is_ours(row: Mapping[str, Any]) -> bool:
    """True for rows of a converted model, False for its source's."""
    return row["implementation"].startswith(("mla_decode", "converted"))


def wrong_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows whose check failed; missing rows, with a reason, are not among them."""
    return [row for row in rows if row["status"].startswith(WRONG)]


def measured(
    call: Callable[[], Any],
    check: Judgement | None,
    read: int | None,
    device: torch.device,
    min_run_time: float,
    *,
    graph: bool = True,
) -> dict[str, Any]:
    """Time of a call that passed its check (None: not checked); otherwise the reason, and no time.

    Args:
        read: bytes of cache that a call reads, for its rate.
    """
    row: dict[str, Any] = {"status": NOT_CHECKED}
    if check is not None:
        row = {"error": check.error, "torch_error": check.torch_error}
        if not check.ok:
            return row | {"status": f"{WRONG}{check.reason}"}
        row["status"] = "ok"
    timing = time_callable(call, device, min_run_time=min_run_time, graph=graph)
    return row | timing.to_row() | ({} if read is None else {"gb_per_s": read / timing.p50 / 1e3})


def unless_out_of_memory(measure: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """``measure(*args)``, or a row whose status names the memory that was missing; that memory is free again."""
    try:
        return measure(*args)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _CPU_OUT_OF_MEMORY not in str(error):
            raise
        reason = str(error).partition(". ")[2].partition(". ")[0] or str(error)
    torch.cuda.empty_cache()  # after the handler, whose error holds the frames that hold the tensors
    return {"status": f"out of memory: {reason}"}


def add_speed_ups(rows: Sequence[dict[str, Any]], rate: float) -> None:
    """Adds ``speed_up``, ``limit_us`` and ``of_limit`` to the rows that have a time.

    Args:
        rate: bytes a second that the device reads.
    """
    timed = [(row, us, (row["op"], row["batch"], row["seqlen"])) for row in rows if (us := time_of(row)) is not None]
    fastest: dict[tuple[Any, ...], float] = {}
    for row, us, shape in timed:
        if not is_ours(row):
            fastest[shape] = min(us, fastest.get(shape, us))
    for row, us, shape in timed:
        if is_ours(row) and shape in fastest:
            row["speed_up"] = fastest[shape] / us
        if row["op"] != "prefill":
            read = row.get("read_bytes", row["cache_bytes"]) + (0 if row["op"] == "attention" else row["weight_bytes"])
            row["limit_us"] = read / rate * 1e6
            row["of_limit"] = row["limit_us"] / us


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """While open, ``model`` computes in float64 without a copy; afterwards its parameters have the same bits.

    Each module's own floating-point parameters are widened when its forward begins and put back when it ends: only the
    modules on the way from the root to one leaf are wide at a time. What a model computes in float32 at any dtype
    (norms, angles) stays so, as in ``model.double()``. Routed experts are computed one by one: grouped products take
    no float64.
    """
    narrow: dict[nn.Module, dict[str, nn.Parameter]] = {}
    configs = {id(each.config): each.config for each in model.modules() if isinstance(each, PreTrainedModel)}
    usual = {key: config._experts_implementation for key, config in configs.items()}

    def widen(module: nn.Module, *_: Any) -> None:
        own = {name: each for name, each in module._parameters.items() if each is not None and each.is_floating_point()}
        narrow[module] = own
        for name, each in own.items():
            module._parameters[name] = nn.Parameter(each.detach().double(), requires_grad=False)

    def restore(module: nn.Module, *_: Any) -> None:
        module._parameters.update(narrow.pop(module, {}))

    def route(implementations: Mapping[int, str | None]) -> None:
        for key, config in configs.items():
            config._experts_implementation = implementations[key]

    with ExitStack() as hooks, torch.no_grad():
        hooks.callback(lambda: [restore(module) for module in list(narrow)])
        hooks.callback(route, usual)
        route(dict.fromkeys(configs, "eager"))
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                hooks.callback(module.register_forward_pre_hook(widen).remove)
                hooks.callback(module.register_forward_hook(restore).remove)
        yield
