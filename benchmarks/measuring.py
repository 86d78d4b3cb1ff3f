"""What the decode benchmarks share: the read rate R, timing in turn, and the columns that a row gets."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers import flash_attention_3_mha, load_peer
from mha2mla.kernel_testing.judgement import Judgement
from mha2mla.kernel_testing.timing import Timing, time_callable
from mha2mla.kernels import DecodePlan

READ_RATE = (32, 128, 64, 2048)  # heads, head width, batch, length of the MHA decode that R is measured with: 2.1 GB
TIMEOUT = 240.0  # seconds for one shape, peers included
PIPE_WIDTH = 260  # of the table of speeds where no terminal says how wide it may be


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def start_measuring() -> None:
    """What a process that measures does once, while others compile: imports, CUDA's start, and unpacking the peers."""
    import tilelang  # noqa: F401
    import triton.testing  # noqa: F401

    torch.zeros(1, device="cuda").item()
    for namespace, op in (("_vllm_fa3_C", "fwd"), ("_flashmla_C", "dense_decode_fwd")):
        load_peer(namespace, op)


@torch.inference_mode()
def read_rate() -> dict[str, Any]:
    """R, and what it was measured with."""
    heads, width, batch, length = READ_RATE
    call = flash_attention_3_mha(heads, width, batch, length)
    if not isinstance(call, str):
        size = 4 * heads * width * batch * length
        return {
            "R": size / time_callable(call, "cuda", graph=False).p50 * 1e6,
            "R_from": "FlashAttention-3, MHA decode, 2.1 GB",
        }
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    us = time_callable(lambda: target.copy_(source), "cuda", graph=False).p50
    return {"R": 2 * 2**30 / us * 1e6, "R_from": f"device copy of 1 GiB, read and write; FlashAttention-3 {call}"}


def time_planning(plan: DecodePlan, inputs: dict[str, Any], device: str, min_run_time: float) -> float:
    """Microseconds of making the plan anew, of a third as many runs as an implementation has."""

    def call() -> None:
        plan.refresh(inputs["cache_seqlens"], inputs["cache_starts"])

    return time_callable(call, device, min_run_time=min_run_time / 3, graph=False).p50


def time_in_turn(
    calls: dict[str, Callable[[], Any]], device: str, min_run_time: float, rounds: int = 3
) -> dict[str, Timing]:
    """Times implementations one after another, several rounds, so that clocks and heat are the same for all.

    Returns:
        Name → medians over the rounds of each quantile.
    """
    found: dict[str, list[Timing]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(time_callable(call, device, min_run_time=min_run_time / rounds))
    return {
        name: Timing(
            *(statistics.median(getattr(timing, quantile) for timing in mine) for quantile in ("p20", "p50", "p80")),
            None if any(timing.graph is None for timing in mine) else statistics.median(t.graph for t in mine),
            mine[0].graph_refused,
        )
        for name, mine in found.items()
    }


def checked_columns(judgement: Judgement, plan: DecodePlan) -> dict[str, Any]:
    """What a check found, and what the plan splits."""
    return {
        "num_ctas": plan.num_ctas,
        "splits": int(plan.splits[:, 0].max()) if plan.num_ctas else None,
        "error": judgement.error,
        "torch_error": judgement.torch_error,
        "status": "ok" if judgement.ok else f"wrong: {judgement.reason}",
    }


def timed_columns(timing: Timing, cache_bytes: int) -> dict[str, Any]:
    """Of the op itself."""
    return {
        "us_p20": timing.p20,
        "us": timing.p50,
        "us_p80": timing.p80,
        "us_graph_warm": timing.graph,
        "graph_refused": timing.graph_refused,
        "TB/s": cache_bytes / timing.p50 / 1e6,
    }


def clean(inputs: dict[str, Any]) -> None:
    """Takes the poison out of a call's caches and table: peers promise nothing about a cache that holds NaN."""
    caches = [tensor for name, tensor in inputs.items() if name.endswith("_cache")]
    for cache in caches:
        cache.nan_to_num_()
    table = inputs["block_table"]
    table.masked_fill_(table >= caches[0].shape[0], 0)
