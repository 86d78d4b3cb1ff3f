"""The decode kernels against float64 on random geometries and random plans, seeded, each under a time-out."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mha2mla.eval.problems import UNUSED_PAGE, Problem, judge
from mha2mla.eval.workers import progress_bar, run_in_workers
from mha2mla.kernels import DecodePlan, explain_mla_decode, mla_decode
from mha2mla.kernels.devices import capability, device_name
from mha2mla.kernels.mla_decode.dispatch import decode_shape
from mha2mla.kernels.mla_decode.schedule import COUNT, plan_fragments, write_schedule
from mha2mla.kernels.mla_decode.selection import (
    MAX_ROPE_PER_HEAD,
    MAX_ROPE_SHARED,
    MAX_ROPE_WIDTH,
    DecodeShape,
    refusal,
    select_kernel,
)

COMPILE_TIMEOUT = 300.0
REPEATS = 3  # a race may show only now and then
SIZES = ("≤ 16", "≤ 32", "≤ 64", "≤ 128", "> 128")
UNSPECIFIED = -(2**31)  # what the planner's oracle leaves in fields that nobody reads

COLUMNS = {
    "kernel": "kernel",
    "rows": "H·S_q",
    "rope_heads": "G",
    "geometries": "geometries",
    "calls": "calls",
    "error": "worst error",
    "torch_error": "torch there",
    "ratio": "worst ratio",
    "lse_error": "lse",
    "wrong": "wrong",
    "hung": "hung",
    "status": "status",
}


@dataclass(frozen=True)
class Case:
    """One call to check.

    Attributes:
        group: number of the geometry; its cases share a compilation.
        problem: the call.
        dtype: "bfloat16" or "float16".
        share: of the CTAs that the device would plan for; None: all of them, the plan of every day.
    """

    group: int
    problem: Problem
    dtype: str
    share: float | None = None

    def shape(self) -> DecodeShape:
        """What is compiled for it."""
        problem = self.problem
        return decode_shape(problem.geometry, problem.page_size, getattr(torch, self.dtype), problem.seqlen_q)


def draw_geometry(rng: random.Random) -> tuple[Problem, str]:
    """A problem without lengths, and a dtype: any geometry that the kernels accept by contract, popular ones often."""
    while True:
        heads = rng.choice((1, 3, 8, 9, 12, 14, 16, 24, 32, 40, 48, 56, 63, 64, 126, 128, *[rng.randint(1, 128)] * 8))
        divisors = [g for g in range(1, heads + 1) if heads % g == 0]
        groups = rng.choice((1, heads, rng.choice(divisors)))
        d_c = rng.choice((64, 80, 96, 128, 144, 192, 256, 320, 384, 448, 512, *[8 * rng.randint(1, 64)] * 8))
        widest = min(MAX_ROPE_SHARED if groups == 1 else MAX_ROPE_PER_HEAD, MAX_ROPE_WIDTH // groups // 8 * 8)
        d_r = min(widest, rng.choice((8, 16, 24, 32, 64, *[8 * rng.randint(1, widest // 8)] * 3)))
        problem = Problem(
            heads,
            groups,
            d_c,
            d_r,
            (),
            page_size=rng.choice((16, 32, 64, 64, 128)),
            seqlen_q=rng.choice((1, 1, 1, 2, 4, 8)),
        )
        dtype = rng.choice(("bfloat16", "bfloat16", "float16"))
        if refusal(problem.geometry, problem.page_size, dtype, problem.seqlen_q) is None:
            return problem, dtype


def draw_call(rng: random.Random, geometry: Problem, longest: int, most_sequences: int) -> Problem:
    """Random dynamic arguments for a geometry: batch, lengths, starts, window, sinks, layout, table width, numbers."""
    page = geometry.page_size
    edges = (0, 1, page - 1, page, page + 1, 63, 64, 65, 127, 128, 130)

    def length() -> int:
        return rng.choice((rng.choice(edges), rng.randint(0, longest // 8), rng.randint(0, longest)))

    batch = rng.choice((1, 2, 3, rng.randint(1, most_sequences)))
    lengths = tuple(min(length(), longest) for _ in range(batch))
    windowed = rng.random() < 0.4
    return replace(
        geometry,
        lengths=lengths,
        seqlen_q=rng.randint(geometry.seqlen_q // 2 + 1, geometry.seqlen_q),  # all of these run one compilation
        starts=tuple(rng.choice((0, rng.randint(0, n))) for n in lengths) if rng.random() < 0.4 else None,
        causal=rng.random() < 0.85,
        window=rng.choice((1, 64, rng.randint(1, 300), rng.randint(1, longest), 10**6)) if windowed else None,
        sinks=rng.choice((0, 4, rng.randint(1, 130))) if windowed else 0,
        combined=rng.random() < 0.3,
        slack=rng.randint(0, 5),
        scale=rng.choice((1.0, 1.0, 1.0, 30.0)),
        seed=rng.getrandbits(31),
    )


def draw_cases(
    count: int,
    seed: int,
    *,
    calls: int = 4,
    longest: int = 3000,
    most_sequences: int = 40,
    accepts: Callable[[Problem, str], bool] = lambda problem, dtype: True,
) -> list[Case]:
    """``count`` geometries times ``calls`` calls. The n-th geometry of a seed is the same whatever ``count`` is.

    Args:
        count, seed, calls: as :func:`check_kernels`.
        longest: cached tokens of a sequence at most.
        most_sequences: in a batch at most.
        accepts: whether a geometry, with a dtype, can be checked here; others are drawn anew.
    """
    cases = []
    for group in range(count):
        rng = random.Random(f"{seed}/{group}")
        geometry, dtype = draw_geometry(rng)
        while not accepts(geometry, dtype):
            geometry, dtype = draw_geometry(rng)
        for call in range(calls):
            problem = draw_call(rng, geometry, longest, most_sequences)
            cases.append(Case(group, problem, dtype, rng.random() if call % 2 else None))
    return cases


def check_kernels(
    count: int = 200,
    seed: int = 0,
    device: str | torch.device | None = None,
    *,
    calls: int = 4,
    progress: bool = True,
    timeout: float = 60.0,
) -> list[dict[str, Any]]:
    """Checks the decode op on ``count`` random geometries, ``calls`` random calls and plans each.

    A call is right when :func:`mha2mla.eval.problems.judge` says so, its plan is the one that the oracle in
    ``schedule.py`` makes, and repeating plan and call gives the same bits. Everything nobody may read is poisoned:
    unused cache, page table, workspace, unused rows of the schedule.

    Args:
        count: geometries; each is one compilation.
        seed: of everything drawn.
        device: default "cuda". "cpu" checks the reference backend on smaller calls.
        calls: per geometry; every second one plans for a random number of CTAs.
        progress: show bars on standard error.
        timeout: seconds after which a launch counts as hung and its process is killed.

    Returns:
        A row per call with the geometry, the dynamic arguments, the kernel, both errors and ``status``: "ok",
        "wrong: …", "hung: …", "crashed: …", or what was raised.

    Raises:
        ValueError: there is no such device.
    """
    device = torch.device("cuda" if device is None else device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device is cuda; no CUDA device is available here (device cpu checks the reference backend against torch)"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device}; expected cpu or a CUDA device")
    if count < 1 or calls < 1:
        raise ValueError(f"count is {count} and calls is {calls}; expected at least 1")
    if device.type == "cpu":
        cases = draw_cases(count, seed, calls=calls, longest=200, most_sequences=4)
        return [
            _row(case, None) | check_case(case, device)
            for case in progress_bar(cases, len(cases), "checking", progress)
        ]

    def accepts(problem: Problem, dtype: str) -> bool:
        why = explain_mla_decode(problem.geometry, problem.page_size, getattr(torch, dtype), device, problem.seqlen_q)
        return why is None

    return check_cases(
        draw_cases(count, seed, calls=calls, accepts=accepts), device, progress=progress, timeout=timeout
    )


def check_cases(
    cases: Sequence[Case], device: torch.device, *, progress: bool = True, timeout: float = 60.0
) -> list[dict[str, Any]]:
    """Compiles what the cases need, in parallel, then checks them one after another on ``device`` (CUDA).

    Returns:
        Rows as :func:`check_kernels`. After a failure other than a wrong number, a group's remaining calls are skipped.
    """
    broken = compile_shapes([case.shape() for case in cases], device, progress=progress)
    failed = {case.group: broken[case.shape()] for case in cases if case.shape() in broken}
    rows = [_row(case, device) | {"status": failed[case.group]} for case in cases if case.group in failed]

    def remaining() -> Iterator[Case]:
        for case in cases:
            if case.group not in failed:
                yield case

    outcomes = run_in_workers(partial(check_case, device=device), remaining(), timeout=timeout)
    for outcome in progress_bar(outcomes, len(cases) - len(rows), "checking", progress):
        if outcome.failure is not None:
            failed[outcome.job.group] = outcome.failure
        rows.append(_row(outcome.job, device) | (outcome.value or {"status": outcome.failure}))
    return rows


def compile_shapes(
    shapes: Sequence[DecodeShape], device: torch.device, *, progress: bool = True, timeout: float = COMPILE_TIMEOUT
) -> dict[DecodeShape, str]:
    """Puts the kernels of these shapes into TileLang's disk cache, in parallel processes.

    Returns:
        Why a shape could not be compiled, for those that could not.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    jobs = [(shape, capability(device), device_name(device)) for shape in dict.fromkeys(shapes)]
    processes = max(1, min(len(jobs), (os.cpu_count() or 2) - 2))
    outcomes = run_in_workers(compile_shape, jobs, workers=processes, timeout=timeout)
    bar = progress_bar(outcomes, len(jobs), "compiling", progress)
    return {outcome.job[0]: f"not compiled: {outcome.failure}" for outcome in bar if outcome.failure is not None}


def compile_shape(job: tuple[DecodeShape, int, str]) -> None:
    """Compiles all that a call of a shape may launch. ``job`` is (shape, compute capability, name of the GPU)."""
    from mha2mla.kernels.mla_decode.build import MERGES
    from mha2mla.kernels.mla_decode.launch import compile_merge, compile_mla_decode, compile_planner

    shape, major_minor, gpu = job
    compile_planner(major_minor)
    compile_mla_decode(shape, major_minor, gpu)
    for splits in MERGES:
        compile_merge(shape, splits, major_minor)


@torch.inference_mode()
def check_case(case: Case, device: torch.device) -> dict[str, Any]:
    """Runs one case and compares it with float64; the keys are ``status`` and what was measured."""
    problem, dtype = case.problem, getattr(torch, case.dtype)
    backend = "tilelang" if device.type == "cuda" else "reference"
    inputs = problem.inputs(dtype, device)
    plan = problem.plan(inputs, backend)
    if plan.num_ctas:
        plan = plan_for(plan, plan.num_ctas if case.share is None else max(1, round(case.share * plan.num_ctas)))
    wrong, first = "", None
    for _ in range(REPEATS):
        for workspace in (plan.partial_out, plan.partial_lse):
            workspace.fill_(torch.nan)
        plan.schedule.fill_(UNUSED_PAGE)
        plan.refresh(inputs["cache_seqlens"], inputs["cache_starts"])
        out = torch.full_like(inputs["q_latent"], torch.nan)
        out, lse = mla_decode(**inputs, plan=plan, out=out, return_lse=True, backend=backend)
        if first is None:
            first = out, lse
        elif not (torch.equal(out, first[0]) and torch.equal(lse, first[1])):
            wrong = "the same call gave other bits"
    judgement = judge(inputs, *first, dtype, **problem.visibility)
    if problem.window is None and case.share is None:  # what a caller without a plan gets
        alone, alone_lse = mla_decode(**inputs, return_lse=True, backend=backend)
        if not (torch.equal(alone, first[0]) and torch.equal(alone_lse, first[1])):
            wrong = wrong or "the call without a plan gave other bits"
    wrong = judgement.reason or plan_error(problem, plan) or wrong
    return {
        "num_ctas": plan.num_ctas,
        "error": judgement.error,
        "torch_error": judgement.torch_error,
        "largest": judgement.largest,
        "torch_largest": judgement.torch_largest,
        "lse_error": judgement.lse_error,
        "status": f"wrong: {wrong}" if wrong else "ok",
    }


def plan_for(plan: DecodePlan, num_ctas: int) -> DecodePlan:
    """A plan like ``plan`` over buffers for another number of CTAs, not yet filled."""
    batch = plan.splits.shape[0]
    return replace(
        plan,
        schedule=plan.schedule.new_empty(num_ctas + batch, plan.schedule.shape[1]),
        splits=torch.empty_like(plan.splits),
        partial_out=plan.partial_out.new_empty(num_ctas, *plan.partial_out.shape[1:]),
        partial_lse=plan.partial_lse.new_empty(num_ctas, *plan.partial_lse.shape[1:]),
    )


def plan_error(problem: Problem, plan: DecodePlan) -> str:
    """In which way a filled plan differs from the oracle's; empty where it does not."""
    if not plan.num_ctas:
        return ""
    spans = problem.spans()
    schedule, splits = (torch.empty(tensor.shape, dtype=torch.int32) for tensor in (plan.schedule, plan.splits))
    write_schedule(spans, plan_fragments([span.tiles for span in spans], plan.num_ctas), schedule, splits)
    differs = (schedule != UNSPECIFIED) & (plan.schedule.cpu() != schedule)
    if bool(differs.any()):
        row, field = differs.nonzero()[0].tolist()
        return (
            f"the plan's row {row}, field {field} is {int(plan.schedule[row, field])}; "
            f"the oracle has {int(schedule[row, field])} ({int(schedule[: plan.num_ctas, COUNT].sum())} fragments)"
        )
    got = plan.splits.cpu()
    if not torch.equal(got[:, 0], splits[:, 0]) or not torch.equal(got[splits[:, 0] > 0], splits[splits[:, 0] > 0]):
        return "the plan's splits differ from the oracle's"
    return ""


def _row(case: Case, device: torch.device | None) -> dict[str, Any]:
    """What a case is; the kernel is named where there is a GPU to choose one for."""
    problem = case.problem
    row = {
        "group": case.group,
        **problem.columns,
        "dtype": case.dtype,
        "kernel": "reference",
        "batch": len(problem.lengths),
        "longest": max(problem.lengths),
        "tokens": sum(problem.lengths),
        "starts": problem.starts is not None,
        "causal": problem.causal,
        "window": problem.window,
        "sinks": problem.sinks,
        "combined": problem.combined,
        "scale": problem.scale,
        "seed": problem.seed,
    }
    if device is not None:
        choice = select_kernel(case.shape(), capability(device), device_name(device))
        row |= {"kernel": choice.kernel, "reason": choice.reason}
    return row


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per kernel, number of query rows and kind of rope heads, for :data:`COLUMNS`."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        query_rows = row["H"] * row["S_q"]
        size = next(
            (size for size, limit in zip(SIZES, (16, 32, 64, 128), strict=False) if query_rows <= limit), SIZES[-1]
        )
        kind = "1" if row["G"] == 1 else "H" if row["G"] == row["H"] else "1 < G < H"
        groups.setdefault((row["kernel"], size, kind), []).append(row)
    table = []
    for (kernel, size, kind), mine in sorted(groups.items(), key=lambda item: (item[0][0], SIZES.index(item[0][1]))):
        measured = [row for row in mine if "error" in row]
        worst = max(measured, key=lambda row: row["error"], default={})
        failed = [row["status"] for row in mine if row["status"] != "ok"]
        table.append(
            {
                "kernel": kernel,
                "rows": size,
                "rope_heads": kind,
                "geometries": len({row["group"] for row in mine}),
                "calls": len(mine),
                "error": worst.get("error"),
                "torch_error": worst.get("torch_error"),
                "ratio": max((row["error"] / max(row["torch_error"], 1e-12) for row in measured), default=None),
                "lse_error": max((row["lse_error"] for row in measured), default=None),
                "wrong": sum(not status.startswith("hung") for status in failed),
                "hung": sum(status.startswith("hung") for status in failed),
                "status": failed[0] if failed else "ok",
            }
        )
    return table
