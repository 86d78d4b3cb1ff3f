"""Rows of ``eval latency``: a time stands in one after, and only after, the same inputs passed their check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mha2mla.kernel_testing.judgement import Judgement
from mha2mla.kernel_testing.timing import time_callable

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
    "error": "error",
    "status": "status",
}


def measured(
    call: Callable[[], Any], check: Judgement, read: int, device: torch.device, min_run_time: float
) -> dict[str, Any]:
    """The time of a call that passed its check; the reason, and no time, otherwise."""
    row = {"error": check.error, "torch_error": check.torch_error}
    if not check.ok:
        return row | {"status": f"{WRONG}{check.reason}"}
    row["status"] = "ok"
    timing = time_callable(call, device, min_run_time=min_run_time)
    return row | timing.to_row() | {"gb_per_s": read / timing.p50 / 1e3}


def wrong_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows whose check failed; those that are missing, with a reason, are not among them."""
    return [row for row in rows if row["status"].startswith(WRONG)]
