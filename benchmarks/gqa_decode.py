"""Decode of MHA and GQA models on a GPU: the op beside FlashAttention-3 on the same pages.

    python benchmarks/gqa_decode.py speed --json benchmarks/results/h200-gqa-decode.json
    python benchmarks/gqa_decode.py variants --only "H32 G32"     # every configuration that fits, timed

As ``decode.py``: a speed is printed only after the same inputs, poisoned wherever nobody may look, gave the right
result; medians with a cold L2; the plan is made before and timed apart; R is the rate at which FlashAttention-3 reads a
2 GB cache in the same run; everything that may hang runs in a process of its own, under a time-out.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from benchmarks.peers import flash_attention_3_gqa
from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval.report import print_table, write_json
from mha2mla.kernel_testing.compiling import COMPILE_TIMEOUT, processes_for
from mha2mla.kernel_testing.gqa_problems import GQAProblem
from mha2mla.kernel_testing.judgement import verdict
from mha2mla.kernel_testing.problems import expected
from mha2mla.kernel_testing.workers import run_in_workers
from mha2mla.kernels import DecodePlan, gqa_decode
from mha2mla.kernels.devices import capability, num_sms
from mha2mla.kernels.gqa_decode.api import GQA
from mha2mla.kernels.gqa_decode.selection import GQAShape, list_kernels, select_kernel
from mha2mla.kernels.split_kv.choice import KernelChoice

# What a time may be at most, as a multiple of FlashAttention-3's in the same run.
FACTOR = 1.1
CASES = tuple(
    GQAProblem(heads, groups, qk, v, (length,) * batch, seqlen_q=seqlen_q, slack=0)
    for heads, groups, qk, v, batch, length, seqlen_q in (
        (32, 32, 128, 128, 64, 4096, 1),
        (32, 32, 128, 128, 16, 16384, 1),
        (32, 8, 128, 128, 64, 4096, 1),
        (32, 8, 128, 128, 64, 4096, 4),
        (28, 4, 128, 128, 64, 4096, 1),
        (28, 4, 128, 128, 1, 32768, 1),
        (14, 2, 64, 64, 64, 4096, 1),
        (9, 3, 64, 64, 64, 4096, 1),
        (32, 32, 80, 80, 64, 4096, 1),
        (24, 8, 96, 96, 64, 4096, 1),
        (16, 16, 192, 128, 64, 4096, 1),
    )
)
COLUMNS = {
    "name": "shape",
    "MB": "MB",
    "rows": "rows",
    "stages": "stages",
    "ctas_per_sm": "CTAs/SM",
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
    "FA3_us": "FA3",
    "factor": "× FA3",
    "met": "met",
    "status": "status",
}


def case_name(problem: GQAProblem) -> str:
    """Such as "H32 G8 d128 64x4096"."""
    widths = {problem.qk_head_dim: ""}.get(problem.v_head_dim, f"/{problem.v_head_dim}")
    name = f"H{problem.heads} G{problem.num_kv_heads} d{problem.qk_head_dim}{widths} "
    name += f"{len(problem.lengths)}x{max(problem.lengths)}"
    return name + (f" q{problem.seqlen_q}" if problem.seqlen_q > 1 else "")


def cases_named(only: str | None) -> list[GQAProblem]:
    """The cases whose name contains one of the texts between commas; all for None."""
    return [case for case in CASES if only is None or any(part in case_name(case) for part in only.split(","))]


def speed(
    only: str | None = None, json: str | None = None, peers: bool = True, min_run_time: float = 0.3, budget: float = 1e9
) -> bool:
    """Times the op and FlashAttention-3 on every shape.

    Args:
        only: measure shapes whose name contains this, or one of these, separated by commas.
        json: also write every row to this file.
        peers: time FlashAttention-3 too.
        min_run_time: seconds of cold-L2 runs per implementation and shape.
        budget: seconds for all.
    """
    until = time.monotonic() + budget
    jobs = [(case, None, peers, min_run_time) for case in cases_named(only)]
    return report(jobs, until, json)


def variants(
    only: str | None = None,
    json: str | None = None,
    most: int = 6,
    min_run_time: float = 0.1,
    budget: float = 1e9,
) -> bool:
    """Times the first configurations of the rule's list on every shape; arguments as of :func:`speed`.

    Args:
        most: configurations per shape at most.
    """
    until = time.monotonic() + budget
    jobs: list[MeasureJob] = []
    for case in cases_named(only):
        listed = list_kernels(case.shape(), capability(torch.device("cuda:0")))
        jobs += [(case, choice, False, min_run_time) for choice in listed[:most]]
    return report(jobs, until, json)


MeasureJob = tuple[GQAProblem, KernelChoice | None, bool, float]
"""A case, a configuration in place of the rule's, whether to time the peers, and :func:`speed`'s ``min_run_time``."""


def report(jobs: Sequence[MeasureJob], until: float, json: str | None) -> bool:
    """Compiles, measures one job after another, prints the table and says whether every row is right."""
    rows: list[dict[str, Any]] = []
    rate: dict[str, Any] = {"R": None, "R_from": "missing"}
    compile_seconds = 0.0
    environment = collect_environment()
    here, sms = capability(torch.device("cuda:0")), num_sms(torch.device("cuda:0"))

    def compiled() -> Iterator[MeasureJob | None]:
        nonlocal compile_seconds
        began = time.perf_counter()
        wanted = {job: compile_job(*job[:2], here, sms) for job in jobs}
        workers = processes_for(len(set(wanted.values())))
        outcomes = run_in_workers(compile_one, set(wanted.values()), workers=workers, timeout=COMPILE_TIMEOUT)
        broken = {outcome.job: outcome.failure for outcome in outcomes if outcome.failure is not None}
        compile_seconds = time.perf_counter() - began
        yield None
        why = {job: f"not compiled: {broken[wanted[job]]}" for job in jobs if wanted[job] in broken}
        rows.extend({"name": case_name(job[0]), "status": why[job]} for job in why)
        yield from (job for job in jobs if job not in why)

    for outcome in run_in_workers(measure, compiled(), timeout=TIMEOUT, until=until, prepare=start_measuring):
        if outcome.job is None:
            rate = outcome.value or {"R": None, "R_from": f"missing: {outcome.failure}"}
            continue
        row = outcome.value or {"name": case_name(outcome.job[0]), "status": outcome.failure}
        if rate["R"] and "TB/s" in row:
            row["share"] = row["TB/s"] * 1e12 / rate["R"]
        rows.append(row)
        tqdm.write(
            f"{row['name']}: {row.get('us') or row['status']}, FA3 {row.get('FA3_us')} ({outcome.seconds:.1f} s)"
        )
        if json:  # after every shape, so that a run that is cut short keeps what it has
            write_json(json, kind="gqa-decode-speed", rows=rows, environment=environment, **rate)
    shown = "not measured" if rate["R"] is None else f"{rate['R'] / 1e12:.2f} TB/s"
    print_table(
        [row | ({"FA3_us": "missing"} if is_text(row.get("FA3_us")) else {}) for row in rows],
        title=f"gqa_decode, bfloat16, page 64, µs with cold L2; R = {shown} ({rate['R_from']})",
        columns={key: heading for key, heading in COLUMNS.items() if any(row.get(key) is not None for row in rows)},
        caption=f"{describe_environment(environment)} · compiled in {compile_seconds:.0f} s",
        console=None if sys.stdout.isatty() else Console(width=PIPE_WIDTH),
    )
    for why in sorted({row["FA3_us"] for row in rows if is_text(row.get("FA3_us"))}):
        print(f"FA3 {why}")
    return all(row["status"] == "ok" for row in rows)


CompileJob = tuple[GQAShape, KernelChoice, int, int, int]
"""A shape, its configuration, the compute capability, and the batch and CTAs that decide which combine kernel it is."""


def compile_job(case: GQAProblem, choice: KernelChoice | None, here: int, sms: int) -> CompileJob:
    """What a case needs on a GPU of capability ``here`` with ``sms`` multiprocessors; by default the rule's choice."""
    choice = choice or select_kernel(case.shape(), here)
    return case.shape(), choice, here, len(case.lengths), choice.num_ctas(sms)


def compile_one(job: CompileJob) -> None:
    """Puts all that a case launches into TileLang's disk cache; runs in a worker process."""
    from mha2mla.kernels.split_kv.launch import compile_kernels, compile_planner

    quieten_tilelang()
    shape, choice, here, batch, num_ctas = job
    compile_planner(here)
    compile_kernels(GQA, shape, choice, here, batch, shape.v_head_dim, num_ctas)


def quieten_tilelang() -> None:
    """No line for each kernel that is compiled; TileLang sets its level when it is imported, so call this after."""
    logging.getLogger("tilelang").setLevel(logging.WARNING)


def measure(job: MeasureJob | None) -> dict[str, Any]:
    """One shape's row, or for None the read rate R in bytes per second; runs in a worker process."""
    return read_rate() if job is None else measure_case(*job)


@torch.inference_mode()
def measure_case(
    problem: GQAProblem, choice: KernelChoice | None, peers: bool, min_run_time: float, device: str = "cuda:0"
) -> dict[str, Any]:
    """Checks a shape, then times the op and FlashAttention-3 in turn. On a CPU that is the reference backend.

    ``choice``: a configuration in place of the rule's, launched without the op around it.
    """
    backend = "reference" if device == "cpu" else "tilelang"
    inputs = problem.inputs(torch.bfloat16, device)
    plan = problem.plan(inputs, backend)
    out = torch.empty(*inputs["q"].shape[:3], problem.v_head_dim, dtype=torch.bfloat16, device=device)
    row: dict[str, Any] = {"name": case_name(problem), "MB": problem.cache_bytes() / 1e6, "kernel": backend}
    if backend == "tilelang":
        quieten_tilelang()
        used = choice or select_kernel(problem.shape(), capability(torch.device(device)))
        row |= {"kernel": used.kernel, "rows": used.tiling.rows, "stages": used.num_stages}
        row |= {"ctas_per_sm": used.ctas_per_sm, "reason": used.reason}
    if choice is None:
        ours = partial(gqa_decode, **inputs, plan=plan, out=out, backend=backend)
        _, lse = ours(return_lse=True)
    else:
        plan, lse, ours = configured_call(problem, choice, inputs, plan, out)
        ours()
    right = expected(inputs, **problem.visibility)
    judgement = verdict(out, lse, *right)
    row |= checked_columns(judgement, plan)
    if not judgement.ok:
        return row
    calls: dict[str, Callable[[], Any]] = {"us": ours}
    if peers:
        clean(inputs)
        peer = flash_attention_3_gqa(problem, inputs, right[0])
        if is_text(peer):
            row["FA3_us"] = peer
        else:
            calls["FA3_us"] = peer
    timings = time_in_turn(calls, device, min_run_time)
    row |= timed_columns(timings["us"], problem.cache_bytes())
    if choice is None:
        row["plan_us"] = time_planning(plan, inputs, device, min_run_time)
    if "FA3_us" in timings:
        row["FA3_us"] = timings["FA3_us"].p50
        row["factor"] = row["us"] / row["FA3_us"]
        row["met"] = row["factor"] <= FACTOR
    return row


def configured_call(
    problem: GQAProblem, choice: KernelChoice, inputs: dict[str, Any], plan: DecodePlan, out: torch.Tensor
) -> tuple[DecodePlan, torch.Tensor, Callable[[], None]]:
    """A configuration's plan, made; the log-sum-exp that its call fills, with ``out``; and the call."""
    from mha2mla.kernels.split_kv.launch import compile_kernels, launch
    from mha2mla.kernels.split_kv.plan import allocate_plan

    num_ctas = choice.num_ctas(num_sms(out.device))
    plan = allocate_plan(plan.shape, num_ctas, plan.capacity, plan.causal, plan.window, plan.sinks, out.device)
    plan.refresh(inputs["cache_seqlens"], inputs["cache_starts"])
    shape, here = problem.shape(), capability(out.device)
    kernels = compile_kernels(GQA, shape, choice, here, len(problem.lengths), problem.v_head_dim, num_ctas)
    lse = torch.empty(len(problem.lengths), problem.heads, problem.seqlen_q, device=out.device)
    data = tuple(inputs[name] for name in ("q", "k_cache", "v_cache", "block_table"))

    def call() -> None:
        launch(GQA, shape, data, problem.softmax_scale, True, *plan.buffers, out, lse, kernels=kernels)

    return plan, lse, call


if __name__ == "__main__":
    from jsonargparse import auto_cli

    if not torch.cuda.is_available() and not {"-h", "--help"} & set(sys.argv):
        sys.exit("benchmarks/gqa_decode.py: no CUDA device is available")
    sys.exit(0 if auto_cli([speed, variants]) else 1)
