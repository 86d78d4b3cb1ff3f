"""Varlen prefill on a GPU: speeds beside FlashAttention-3 and torch, after a check against float64.

    python benchmarks/prefill.py --json benchmarks/results/h200-prefill-speed.json
    python benchmarks/prefill.py --only "192"        # cases() has the names

TFLOP/s count 2 H (d_qk + d_v) for every (query, key) pair that is not masked, for everybody. Times are medians with a
cold L2, implementations in turn. FlashAttention-3 runs twice where all sequences have the same length: with cu_seqlens,
as ours, and as one batch; MLA's two key parts are concatenated for it beforehand, which its time does not contain.
``peers.py`` says where the other implementations come from. Everything that may hang runs in a process of its own.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import PIPE_WIDTH, start_measuring, time_in_turn
from benchmarks.peers import checked, flash_attention_3_prefill, torch_prefill
from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval.report import print_table, write_json
from mha2mla.kernel_testing.prefill_problems import PrefillProblem, judge, sample
from mha2mla.kernel_testing.workers import run_in_workers
from mha2mla.kernels import attention_varlen, mla_prefill_varlen
from mha2mla.kernels.devices import capability

TIMEOUT = 120.0  # seconds for one case, peers included
COMPILE_TIMEOUT = 300.0

COLUMNS = {
    "name": "case",
    "error": "error",
    "torch_error": "torch",
    "us": "µs",
    "TFLOP/s": "TFLOP/s",
    "FA3_varlen_us": "FA3 varlen",
    "FA3_batch_us": "FA3 batch",
    "torch_us": "torch µs",
    "share": "of FA3",
    "target": "target",
    "met": "met",
    "status": "status",
}
PEER_COLUMNS = ("FA3_varlen_us", "FA3_batch_us", "torch_us")


@dataclass(frozen=True)
class PrefillCase:
    """A call to time. ``target``: share of FlashAttention-3's rate to reach, the better of its two."""

    name: str
    problem: PrefillProblem
    target: float | None = None


def mixed(count: int, longest: int, seed: int = 0) -> tuple[tuple[int, int], ...]:
    """Log-uniform lengths from 64 to ``longest``."""
    rng = random.Random(seed)
    lengths = [round(64 * (longest / 64) ** rng.random()) for _ in range(count)]
    return tuple((length, length) for length in lengths)


def cases() -> list[PrefillCase]:
    found = []

    def add(name: str, heads, widths, key_heads, d_v, lengths, target=None, masks=(True, False)) -> None:
        for causal in masks:
            problem = PrefillProblem(heads, widths, key_heads, d_v, lengths, causal=causal, behind=0)
            found.append(PrefillCase(f"{name} {'causal' if causal else 'full'}", problem, target))

    long = ((8192, 8192),)
    add("H32 128/128 1x8192", 32, (128,), (32,), 128, long, 0.85)
    add("H32 192/128 1x8192", 32, (192,), (32,), 128, long, 0.75)
    add("H32 128+64/128 G1 1x8192", 32, (128, 64), (32, 1), 128, long, 0.75)
    only = (True,)
    add("H32 128/128 4x2048", 32, (128,), (32,), 128, ((2048, 2048),) * 4, masks=only)
    add("H32/8 128/128 1x8192", 32, (128,), (8,), 128, long, masks=only)
    add("H32/8 128/128 16 mixed 64-8192", 32, (128,), (8,), 128, mixed(16, 8192), masks=only)
    add("H32/8 128/128 1024 of 9216", 32, (128,), (8,), 128, ((1024, 9216),), masks=only)
    add("H128 128+64/128 G1 1x4096", 128, (128, 64), (128, 1), 128, ((4096, 4096),), masks=only)
    add("H32 112+16/128 G32 1x8192", 32, (112, 16), (32, 32), 128, long, masks=only)
    add("H9 48+16/64 G3 4x2048", 9, (48, 16), (3, 3), 64, ((2048, 2048),) * 4, masks=only)
    add("H32 64/64 1x8192", 32, (64,), (32,), 64, long, masks=only)
    add("H32 80/80 1x8192", 32, (80,), (32,), 80, long, masks=only)
    add("H32 96/96 1x8192", 32, (96,), (32,), 96, long, masks=only)
    add("H16 256/256 1x8192", 16, (256,), (16,), 256, long, masks=only)
    return found


def choose(only: str | None) -> list[PrefillCase]:
    """The cases whose name contains ``only``."""
    chosen = [case for case in cases() if only is None or only in case.name]
    if not chosen:
        raise ValueError(f"only is {only!r}; expected a part of one of {[case.name for case in cases()]}")
    return chosen


def speed(only: str | None = None, json: str | None = None, min_run_time: float = 0.3) -> bool:
    """Times the op and its peers on every case.

    Args:
        only: measure cases whose name contains this.
        json: also write every row to this file.
        min_run_time: seconds of cold-L2 runs per implementation and case.
    """
    chosen = choose(only)
    environment = collect_environment()
    workers = max(1, min(len(chosen), (os.cpu_count() or 2) - 2))
    here = capability(torch.device("cuda", torch.cuda.current_device()))
    jobs = [(here, shape) for shape in dict.fromkeys(case.problem.shape() for case in chosen)]
    rows: list[dict[str, Any]] = []

    def ready() -> Iterator[tuple[PrefillCase, float]]:
        outcomes = run_in_workers(compile_one, jobs, workers=workers, timeout=COMPILE_TIMEOUT)
        outcomes = tqdm(outcomes, total=len(jobs), desc="compiling", disable=None)
        broken = {outcome.job[1]: outcome.failure for outcome in outcomes if outcome.failure is not None}
        why = {case: broken[case.problem.shape()] for case in chosen if case.problem.shape() in broken}
        rows.extend({"name": case.name, "status": f"not compiled: {why[case]}"} for case in why)
        yield from ((case, min_run_time) for case in chosen if case not in why)

    measured = run_in_workers(measure, ready(), timeout=TIMEOUT, prepare=start_measuring)
    for outcome in tqdm(measured, total=len(chosen), desc="timing", disable=None):
        rows.append(outcome.value or {"name": outcome.job[0].name, "status": outcome.failure})
        row = rows[-1]
        tqdm.write(
            f"{row['name']}: {row.get('us') or row['status']}, {row.get('share')} of FA3 ({outcome.seconds:.1f} s)"
        )
        if json:  # after every case, so that a run that is cut short keeps what it has
            write_json(json, kind="prefill-speed", rows=rows, environment=environment)
    print_table(
        rows,
        title="attention_varlen and mla_prefill_varlen, bfloat16, µs with cold L2",
        columns={key: heading for key, heading in COLUMNS.items() if any(row.get(key) is not None for row in rows)},
        caption=describe_environment(environment),
        console=None if sys.stdout.isatty() else Console(width=PIPE_WIDTH),
    )
    return all(row["status"] == "ok" and row.get("met") is not False for row in rows)


def compile_one(job: tuple[int, Any]) -> None:
    from mha2mla.kernels.attention_varlen.launch import compile_attention_varlen

    compile_attention_varlen(*job)


@torch.inference_mode()
def measure(job: tuple[PrefillCase, float], device: str = "cuda") -> dict[str, Any]:
    """One case's row: checks it, then times the op and its peers in turn. On a CPU that is the reference backend."""
    case, min_run_time = job
    problem = case.problem
    inputs = problem.inputs(torch.bfloat16, device)
    backend = "reference" if device == "cpu" else "tilelang"
    op = mla_prefill_varlen if len(problem.widths) == 2 else attention_varlen
    parts = [x for pair in (inputs["queries"], inputs["keys"]) for x in pair]
    bounds = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    out = torch.empty(parts[0].shape[0], problem.heads, problem.v_head_dim, dtype=torch.bfloat16, device=device)
    options = {"softmax_scale": problem.softmax_scale, "causal": problem.causal, "backend": backend, "out": out}

    def ours(return_lse: bool = False) -> Any:
        return op(*parts, inputs["v"], *bounds, problem.longest, return_lse=return_lse, **options)

    _, lse = ours(return_lse=True)
    judgement = judge(*sample(problem, inputs, out, lse))
    row: dict[str, Any] = {
        "name": case.name,
        "error": judgement.error,
        "torch_error": judgement.torch_error,
        "target": case.target,
        "status": "ok" if judgement.ok else f"wrong: {judgement.reason}",
    }
    if not judgement.ok:
        return row
    calls: dict[str, Callable[[], Any]] = {"us": ours}
    for column, peer in peers(problem, inputs, out.clone()).items():
        if isinstance(peer, str):
            row[column] = peer
        else:
            calls[column] = peer
    timings = {name: timing.p50 for name, timing in time_in_turn(calls, device, min_run_time).items()}
    row |= timings
    row["TFLOP/s"] = problem.flops() / row["us"] / 1e6
    best = min((timings[column] for column in PEER_COLUMNS[:2] if column in timings), default=None)
    if best is not None:
        row["FA3_TFLOP/s"] = problem.flops() / best / 1e6
        row["share"] = best / row["us"]
        row["met"] = None if case.target is None else row["share"] >= case.target
    return row


def peers(problem: PrefillProblem, inputs: dict[str, Any], expected: torch.Tensor) -> dict[str, Any]:
    """Column → the call, or why there is none; ``expected`` [T_q, H, d_v] is what ours gave, and was checked."""
    q = torch.cat(inputs["queries"], -1)
    heads = max(k.shape[1] for k in inputs["keys"])
    k = torch.cat([k.repeat_interleave(heads // k.shape[1], 1) for k in inputs["keys"]], -1)
    v = inputs["v"]
    longest = problem.longest, max(keys for _, keys in problem.lengths)
    bounds = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    scale, causal = problem.softmax_scale, problem.causal

    def flat(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return out.reshape(expected.shape), expected.double()

    found = {"FA3_varlen_us": checked(lambda: flash_attention_3_prefill(q, k, v, bounds, longest, scale, causal), flat)}
    if len(set(problem.lengths)) == 1:
        batched = [x.unflatten(0, (len(problem.lengths), -1)) for x in (q, k, v)]
        found["FA3_batch_us"] = checked(lambda: flash_attention_3_prefill(*batched, None, longest, scale, causal), flat)
        found["torch_us"] = checked(lambda: torch_prefill(*batched, scale, causal), flat)
    return found


if __name__ == "__main__":
    from jsonargparse import auto_cli

    if not torch.cuda.is_available() and not {"-h", "--help"} & set(sys.argv):
        sys.exit("benchmarks/prefill.py: no CUDA device is available")
    sys.exit(0 if auto_cli([speed]) else 1)
