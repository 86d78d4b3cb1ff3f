"""The decode op on a GPU: errors over a matrix of shapes, speeds beside other implementations, host time per call.

    python benchmarks/decode.py check --json benchmarks/results/h200-decode-check.json
    python benchmarks/decode.py speed --json benchmarks/results/h200-decode-speed.json
    python benchmarks/decode.py speed --only "H128"        # shapes.py has the names
    python benchmarks/decode.py host --profile true

A speed is printed only after the same inputs, poisoned wherever nobody may look, gave the right result. The main
number is the median with a cold L2: ``triton.testing.do_bench`` zeroes a buffer before each run, so a part of the L2
cache is dirty and is written back during the run, for every implementation alike. The plan is made before and timed
apart, as a decode step makes one for all its layers. Shares are of R, the rate at which FlashAttention-3 reads a 2 GB
cache in MHA decode in the same run. ``peers.py`` says where the other implementations come from. Everything that may
hang runs in a process of its own, under a time-out.
"""

from __future__ import annotations

import collections
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import (
    PIPE_WIDTH,
    TIMEOUT,
    checked_columns,
    clean,
    is_text,
    read_rate,
    start_measuring,
    time_in_turn,
    time_planning,
    timed_columns,
)
from benchmarks.peers import flash_attention_3_mha, mla_peers
from benchmarks.shapes import PEERS, SpeedCase, choose, target_us
from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval.report import print_table, write_json
from mha2mla.kernel_testing.cases import Case
from mha2mla.kernel_testing.check import check_cases
from mha2mla.kernel_testing.compiling import compile_shapes
from mha2mla.kernel_testing.judgement import verdict
from mha2mla.kernel_testing.problems import Problem, expected
from mha2mla.kernel_testing.workers import run_in_workers
from mha2mla.kernels import mla_decode
from mha2mla.kernels.devices import capability, device_name
from mha2mla.kernels.mla_decode.selection import select_kernel

# heads -> kv heads of a model with so many heads (SmolLM2, Qwen2, Gemma, Llama and their kin)
KV_HEADS = {9: 3, 14: 2, 16: 4, 24: 8, 32: 8, 40: 8, 64: 8, 128: 16}
LATENT = {9: 192, 14: 128, 16: 512, 24: 320, 32: 512, 40: 448, 64: 512, 128: 512}
LENGTHS = {
    "1": (1,) * 3,
    "63": (63,) * 3,
    "64": (64,) * 3,
    "65": (65,) * 3,
    "4096": (4096,) * 3,
    "mixed": (0, 1, 300, 5000, 64),
}


COLUMNS = {
    "name": "shape",
    "MB": "MB",
    "kernel": "kernel",
    "num_ctas": "CTAs",
    "splits": "splits",
    "error": "error",
    "torch_error": "torch",
    "us_p20": "p20",
    "us": "µs",
    "us_p80": "p80",
    "us_graph_warm": "graph, warm",
    "plan_us": "plan",
    "TB/s": "TB/s",
    "share": "of R",
    "TFLOP/s": "TFLOP/s",
    "target_us": "target",
    "met": "met",
    "FlashMLA_us": "FlashMLA",
    "FA3_MLA_us": "FA3 MLA",
    "Triton_us": "Triton",
    "torch_us": "torch µs",
    "FA3_MHA_us": "FA3 MHA",
    "status": "status",
}


PEER_COLUMNS = (*PEERS, "FA3_MHA_us")


def check(json: str | None = None) -> bool:
    """Errors against float64, beside torch's at bfloat16, of heads x rope heads x page x lengths.

    Args:
        json: also write every row to this file.
    """
    cases = matrix()
    rows = check_cases(cases, torch.device("cuda"))
    labels = {max(lengths): label for label, lengths in LENGTHS.items()}
    summary = []
    for group in range(len(cases) // len(LENGTHS)):
        mine = [row for row in rows if row["group"] == group]
        measured = [row for row in mine if "error" in row]
        worst = max(measured, key=lambda row: row["error"] / max(row["torch_error"], 1e-12), default={})
        summary.append(
            {key: mine[0][key] for key in ("H", "G", "d_c", "d_r", "page", "kernel")}
            | {labels[row["longest"]]: row["error"] for row in measured}
            | {
                "torch_worst": worst.get("torch_error"),
                "lse": max((row["lse_error"] for row in measured), default=None),
            }
            | {"status": next((row["status"] for row in mine if row["status"] != "ok"), "ok")}
        )
    environment = collect_environment()
    print_table(summary, title="error against float64 (bfloat16)", caption=describe_environment(environment))
    wrong = sum(row["status"] != "ok" for row in rows)
    print(f"{len(summary)} geometries, {len(rows)} calls; not right: {wrong}")
    if json:
        write_json(json, kind="decode-check", rows=rows, environment=environment)
    return not wrong


def matrix() -> list[Case]:
    """heads x rope heads (1, kv heads, all) x page (16, 64) x lengths; a group is a geometry."""
    geometries = [
        (heads, groups, LATENT[heads], 64 if groups == 1 else 16, page)
        for heads, kv_heads in KV_HEADS.items()
        for groups in dict.fromkeys((1, kv_heads, heads))
        for page in (16, 64)
    ]
    return [
        Case(group, Problem(*geometry, lengths, page_size=page), "bfloat16", call=call)
        for group, (*geometry, page) in enumerate(geometries)
        for call, lengths in enumerate(LENGTHS.values())
    ]


def speed(only: str | None = None, json: str | None = None, peers: bool = True, min_run_time: float = 0.3) -> bool:
    """Times the op (decode and combine kernel) and its peers on every shape of the target table.

    Args:
        only: measure shapes whose name contains this, and those that their targets refer to.
        json: also write every row to this file.
        peers: time the other implementations too.
        min_run_time: seconds of cold-L2 runs per implementation and shape.
    """
    cases = choose(only)
    shapes = [case.problem.shape() for case in cases]
    compile_seconds = 0.0
    rows: dict[str, dict[str, Any]] = {}

    def jobs() -> Iterator[tuple[SpeedCase, bool, float] | None]:
        nonlocal compile_seconds
        began = time.perf_counter()
        broken = compile_shapes(shapes, torch.device("cuda"))
        compile_seconds = time.perf_counter() - began
        for case, shape in zip(cases, shapes, strict=True):
            if shape in broken:
                rows[case.name] = {"name": case.name, "status": broken[shape]}
        yield None
        yield from ((case, peers, min_run_time) for case in cases if case.name not in rows)

    rate: dict[str, Any] = {"R": None, "R_from": "missing"}
    environment = collect_environment()
    table: list[dict[str, Any]] = []
    outcomes = run_in_workers(measure, jobs(), timeout=TIMEOUT, prepare=start_measuring)
    for outcome in tqdm(outcomes, total=len(cases) + 1, desc="timing", disable=None):
        if outcome.job is None:
            rate = outcome.value or {"R": None, "R_from": f"missing: {outcome.failure}"}
        else:
            name = outcome.job[0].name
            rows[name] = outcome.value or {"name": name, "status": outcome.failure}
            tqdm.write(f"{name}: {rows[name].get('us') or rows[name]['status']} ({outcome.seconds:.1f} s)")
        table = with_targets(cases, rows, rate)
        if json:  # after every shape, so that a run that is cut short keeps what it has
            write_json(
                json, kind="decode-speed", rows=table, environment=environment, compile_seconds=compile_seconds, **rate
            )
    shown = "not measured" if rate["R"] is None else f"{rate['R'] / 1e12:.2f} TB/s"
    missing = collections.Counter(
        f"{COLUMNS[key]} {value}"
        for row in table
        for key, value in row.items()
        if key in PEER_COLUMNS and is_text(value)
    )
    print_table(
        [{key: "missing" if key in PEER_COLUMNS and is_text(row[key]) else row[key] for key in row} for row in table],
        title=f"mla_decode, bfloat16, µs with cold L2; R = {shown} ({rate['R_from']})",
        columns={key: heading for key, heading in COLUMNS.items() if any(row.get(key) is not None for row in table)},
        caption=f"{describe_environment(environment)} · compiled in {compile_seconds:.0f} s",
        console=None if sys.stdout.isatty() else Console(width=PIPE_WIDTH),
    )
    for why, count in missing.items():
        print(f"{why} ({count} shapes)")
    asked = [row for row in table if row.get("met") is not None]
    print(f"targets met: {sum(row['met'] for row in asked)} of {len(asked)}")
    return all(row["status"] == "ok" for row in table)


def with_targets(
    cases: Sequence[SpeedCase], rows: Mapping[str, dict[str, Any]], rate: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The rows measured so far in the order of ``cases``, with their share of R and their targets."""
    table = []
    for case in cases:
        if case.name not in rows:
            continue
        row = dict(rows[case.name])
        if "us" in row:
            if rate["R"]:
                row["share"] = row["TB/s"] * 1e12 / rate["R"]
            row["target_us"] = target_us(case, row, rows, rate["R"])
            row["met"] = None if row["target_us"] is None else row["us"] <= row["target_us"]
        table.append(row)
    return table


def measure(job: tuple[SpeedCase, bool, float] | None) -> dict[str, Any]:
    """One shape's row, or for None the read rate R in bytes per second; runs in a worker process."""
    return read_rate() if job is None else measure_case(*job)


@torch.inference_mode()
def measure_case(case: SpeedCase, peers: bool, min_run_time: float, device: str = "cuda:0") -> dict[str, Any]:
    """Checks a shape, then times the op and its peers in turn. On a CPU that is the reference backend."""
    problem = case.problem
    backend = "reference" if device == "cpu" else "tilelang"
    inputs = problem.inputs(torch.bfloat16, device)
    plan = problem.plan(inputs, backend)
    out = torch.empty_like(inputs["q_latent"])

    def ours() -> torch.Tensor:
        return mla_decode(**inputs, plan=plan, out=out, backend=backend)

    _, lse = mla_decode(**inputs, plan=plan, out=out, return_lse=True, backend=backend)
    right = expected(inputs, **problem.visibility)
    judgement = verdict(out, lse, *right)
    row: dict[str, Any] = {
        "name": case.name,
        **problem.columns,
        "B": len(problem.lengths),
        "longest": max(problem.lengths),
        "MB": problem.cache_bytes() / 1e6,
        "kernel": backend,
        **checked_columns(judgement, plan),
    }
    if backend == "tilelang":
        here = torch.device(device)
        choice = select_kernel(problem.shape(), capability(here), device_name(here), len(problem.lengths))
        row |= {"kernel": choice.kernel, "reason": choice.reason}
    if not judgement.ok:
        return row
    clean(inputs)
    calls: dict[str, Callable[[], Any]] = {"us": ours}
    if peers:
        others = mla_peers(problem, inputs, right[0])
        if case.mha_head_dim is not None:
            batch = len(problem.lengths)
            others["FA3_MHA_us"] = flash_attention_3_mha(problem.heads, case.mha_head_dim, batch, problem.lengths[0])
        row |= {column: peer for column, peer in others.items() if isinstance(peer, str)}
        calls |= {column: peer for column, peer in others.items() if not isinstance(peer, str)}
    timings = time_in_turn(calls, device, min_run_time)
    mine = timings.pop("us")
    return row | {
        **timed_columns(mine, problem.cache_bytes()),
        "plan_us": time_planning(plan, inputs, device, min_run_time),
        "TFLOP/s": problem.flops() / mine.p50 / 1e6,
        **{column: timing.p50 for column, timing in timings.items()},
    }


@torch.inference_mode()
def host(profile: bool = False, json: str | None = None, calls: int = 300) -> bool:
    """Host microseconds of an eager call, on inputs so small that the GPU is never what is waited for.

    Args:
        profile: also print where the time of the calls with a plan goes.
        json: also write the rows to this file.
        calls: per row.
    """
    problems = [Problem(32, 32, 512, 16, (64,)), Problem(32, 1, 512, 64, (64,)), Problem(128, 1, 512, 64, (64,))]
    compile_shapes([problem.shape() for problem in problems], torch.device("cuda"))
    rows = []
    for problem in problems:
        inputs = problem.inputs(torch.bfloat16, "cuda")
        plan, out = problem.plan(inputs), torch.empty_like(inputs["q_latent"])
        ways: dict[str, Callable[[], Any]] = {
            "plan and out": lambda i=inputs, p=plan, o=out: mla_decode(**i, plan=p, out=o),
            "plan": lambda i=inputs, p=plan: mla_decode(**i, plan=p),
            "no plan": lambda i=inputs: mla_decode(**i),
            "refresh": lambda i=inputs, p=plan: p.refresh(i["cache_seqlens"], i["cache_starts"]),
        }
        row: dict[str, Any] = {"shape": SpeedCase(problem).name}
        for name, call in ways.items():
            row[name] = host_us(call, calls)
        rows.append(row)
        if profile:
            profiler = cProfile.Profile()
            profiler.runcall(repeat, ways["plan and out"], calls)
            torch.cuda.synchronize()
            print(f"\n{row['shape']}, {calls} calls with plan and out")
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    environment = collect_environment()
    print_table(rows, title="host µs per call, no synchronisation", caption=describe_environment(environment))
    if json:
        write_json(json, kind="decode-host", rows=rows, environment=environment, calls=calls)
    return True


def repeat(call: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        call()


def host_us(call: Callable[[], Any], calls: int, rounds: int = 5) -> float:
    """Median over rounds of the host microseconds of one call; the queue is drained between rounds."""
    repeat(call, 20)
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        repeat(call, calls)
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


if __name__ == "__main__":
    from jsonargparse import auto_cli

    if not torch.cuda.is_available() and not {"-h", "--help"} & set(sys.argv):
        sys.exit("benchmarks/decode.py: no CUDA device is available")
    sys.exit(0 if auto_cli([check, speed, host]) else 1)
