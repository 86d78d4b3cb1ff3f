"""Rows of ``eval latency``: a time stands in one after, and only after, the same inputs passed their check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mha2mla.testing.numeric_check import NOT_CHECKED, Judgement
from mha2mla.testing.timing import time_callable

WRONG = "wrong: "  # how the status of a row begins whose check failed

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
    "ms_per_token": "ms a token",
    "first_token_ms": "first token ms",
    "tokens_per_s": "tokens/s",
    "peak_bytes": "peak bytes",
    "largest_batch": "largest batch",
    "speed_up": "speed-up",
    "limit_us": "limit µs",
    "of_limit": "share of limit",
    "error": "error",
    "status": "status",
}


def measured(
    call: Callable[[], Any],
    check: Judgement | None,
    read: int | None,
    device: torch.device,
    min_run_time: float,
    *,
    graph: bool = True,
) -> dict[str, Any]:
    """The time of a call that passed its check, or was not asked to (None); the reason, and no time, otherwise.

    Args:
        read: bytes of cache that a call reads, for its rate.
        graph: measure its time in a CUDA graph too.
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
    """What ``measure(*args)`` returns; where the device's memory does not suffice, a status that says so, and that
    memory is free again."""
    try:
        return measure(*args)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[2].partition(". ")[0] or str(error)
    torch.cuda.empty_cache()  # behind the handler, whose error holds the frames that hold the tensors
    return {"status": f"out of memory: {reason}"}


def is_ours(row: Mapping[str, Any]) -> bool:
    """Whether a row is of what a conversion gives, and not of its source."""
    return row["implementation"].startswith(("mla_decode", "converted"))


def wrong_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows whose check failed; those that are missing, with a reason, are not among them."""
    return [row for row in rows if row["status"].startswith(WRONG)]
