"""Checking and timing of a case: the read rate R, timing in turn, and the columns that a row gets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.peers import Peer, flash_attention_3_mha, load_peer
from benchmarks.shapes import SpeedCase, decode_case
from mha2mla.kernels import mla_decode
from mha2mla.kernels.parallel_compilation import CompileJob, compile_job
from mha2mla.kernels.split_kv.op import compiled_shape
from mha2mla.testing.numeric_check import Judgement, verdict
from mha2mla.testing.problems import Problem, expected, judge
from mha2mla.testing.timing import Timing, copy_rate, start_device, time_callable

READ_RATE = (32, 128, 64, 2048)  # heads, head width, batch, length of the MHA decode that R is measured with: 2.1 GB

Row = dict[str, Any]


def start_measuring() -> None:
    """Start-up of a process that measures, while others compile: imports, CUDA's start, and unpacking the peers."""
    start_device(torch.device("cuda"))
    for namespace, op in (("_vllm_fa3_C", "fwd"), ("_flashmla_C", "dense_decode_fwd")):
        load_peer(namespace, op)


@torch.inference_mode()
def read_rate() -> Row:
    """R in bytes per second, and what it was measured with."""
    heads, width, batch, length = READ_RATE
    call = flash_attention_3_mha(heads, width, batch, length)
    if not isinstance(call, str):
        size = 4 * heads * width * batch * length
        return {
            "R": size / time_callable(call, "cuda", graph=False).p50 * 1e6,
            "R_from": "FlashAttention-3, MHA decode, 2.1 GB",
        }
    return {"R": copy_rate("cuda"), "R_from": f"device copy of 1 GiB, read and write; FlashAttention-3 {call}"}


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


def check_then_time(
    row: Row,
    judgement: Judgement,
    ours: Callable[[], Any],
    others: Callable[[], Mapping[str, Peer]],
    device: str,
    min_run_time: float,
    *,
    cache_bytes: int | None = None,
    flops: int | None = None,
) -> Row:
    """``row``, with what a check found, and where that is right with the times of our call and of others, in turn.

    Args:
        others: makes column → the call, or "missing: why"; called when ours is right.
        cache_bytes, flops: of the call, for its rates.
    """
    row |= {"error": judgement.error, "torch_error": judgement.torch_error}
    row["status"] = "ok" if judgement.ok else f"wrong: {judgement.reason}"
    if not judgement.ok:
        return row
    peers = others()
    calls = {column: peer for column, peer in peers.items() if not isinstance(peer, str)}
    timings = time_in_turn({"us": ours} | calls, device, min_run_time)
    mine = timings.pop("us")
    row |= {"us_p20": mine.p20, "us": mine.p50, "us_p80": mine.p80, "us_graph_warm": mine.graph}
    row["graph_refused"] = mine.graph_refused
    if cache_bytes is not None:
        row["TB/s"] = cache_bytes / mine.p50 / 1e6
    if flops is not None:
        row["TFLOP/s"] = flops / mine.p50 / 1e6
    row |= {column: peer for column, peer in peers.items() if isinstance(peer, str)}
    for column, timing in timings.items():
        row |= {column: timing.p50, f"{column}_graph": timing.graph}
    return row


def decode_jobs(case: SpeedCase) -> list[CompileJob]:
    """Kernels that a decode case launches on this machine's GPU."""
    here = torch.device("cuda", torch.cuda.current_device())
    calls = [(len(case.problem.lengths), lambda resident: resident)]
    return [compile_job(case.problem.op, compiled_shape(case.problem.shape()), here, calls)]


@torch.inference_mode()
def measure_decode(
    decode: Callable[..., Any],
    peers_of: Callable[[SpeedCase, dict[str, Any], torch.Tensor], Mapping[str, Peer]],
    case: SpeedCase,
    peers: bool,
    min_run_time: float,
    device: str = "cuda:0",
) -> Row:
    """Checks a decode case, then times the op and its peers in turn. On a CPU that is the reference backend.

    Args:
        decode: the op.
        peers_of: case, inputs and float64's result → column → the call, or "missing: why".
        case, peers, min_run_time: as :class:`benchmarks.runner.Benchmark` has them.
    """
    problem, backend = case.problem, "reference" if device == "cpu" else "tilelang"
    batch, shape, here = len(problem.lengths), compiled_shape(problem.shape()), torch.device(device)
    inputs = problem.inputs(torch.bfloat16, device)
    plan = problem.plan(inputs, backend)
    out = torch.empty(plan.shape, dtype=torch.bfloat16, device=device)
    row: Row = {"name": case.name, **problem.columns, "B": batch, "longest": max(problem.lengths)}
    row |= {"MB": problem.cache_bytes() / 1e6, "kernel": backend}
    if backend == "tilelang":
        choice = problem.op.choose(shape, here)
        row |= choice.configuration() | {"reason": choice.reason}
    ours = partial(decode, **inputs, plan=plan, out=out, backend=backend)
    _, lse = ours(return_lse=True)
    right = expected(inputs, **problem.visibility)
    judgement = verdict(out, lse, *right)
    row |= {"num_ctas": plan.num_ctas, "splits": int(plan.splits[:, 0].max()) if plan.num_ctas else None}
    clean(inputs)
    row = check_then_time(
        row, judgement, ours, lambda: peers_of(case, inputs, right[0]) if peers else {}, device, min_run_time,
        cache_bytes=problem.cache_bytes(), flops=problem.flops(),
    )  # fmt: skip
    if judgement.ok:  # a third as many runs as an implementation has
        planning = partial(plan.refresh, inputs["cache_seqlens"], inputs["cache_starts"])
        row["plan_us"] = time_callable(planning, device, min_run_time=min_run_time / 3, graph=False).p50
    return row


def beside(problem: Problem, device: torch.device) -> Peer:
    """The call of another problem, on inputs of its own, or where float64 has other numbers "missing: why"."""
    backend = "reference" if device.type == "cpu" else "tilelang"
    inputs = problem.inputs(torch.bfloat16, device)
    plan, out = problem.plan(inputs, backend), torch.empty_like(inputs["q_latent"])
    call = partial(mla_decode, **inputs, plan=plan, out=out, backend=backend)
    judgement = judge(inputs, *call(return_lse=True))
    clean(inputs)
    return call if judgement.ok else f"missing: wrong result: {judgement.reason}"


def measure_beside(
    others: Mapping[str, Callable[[Any], Problem]],
    case: SpeedCase,
    peers: bool,
    min_run_time: float,
    device: str = "cuda:0",
) -> Row:
    """:func:`measure_decode` of ``mla_decode``, with the times of ``others`` than the case's problem by their columns,
    and ``ratio``, the case's time over that of the first."""
    problems = {column: other(case.problem) for column, other in others.items()}

    def peers_of(*_: Any) -> dict[str, Peer]:
        return {column: beside(problem, torch.device(device)) for column, problem in problems.items()}

    row = measure_decode(mla_decode, peers_of, case, peers, min_run_time, device)
    first = next(iter(problems))
    row["beside"] = decode_case(problems[first]).name
    if isinstance(row.get(first), float):
        row["ratio"] = row["us"] / row[first]
    return row


def clean(inputs: dict[str, Any]) -> None:
    """Takes the poison out of a call's caches and table: peers promise nothing about a cache that holds NaN."""
    caches = [x for name, x in inputs.items() if name.endswith(("_cache", "_scale")) and isinstance(x, torch.Tensor)]
    for cache in caches:
        if cache.dtype == torch.float8_e4m3fn:
            codes = cache.view(torch.uint8)
            codes.masked_fill_(codes & 127 == 127, 0)  # NaN of either sign
        else:
            cache.nan_to_num_()
    table = inputs["block_table"]
    table.masked_fill_(table >= caches[0].shape[0], 0)
