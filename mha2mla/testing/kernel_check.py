"""The decode kernels against float64 on random geometries, calls and plans: ``mha2mla check kernels``.

Kernels are compiled in parallel and launched in a process of their own, under a time-out.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mha2mla.kernels import DecodePlan, mla_decode
from mha2mla.kernels.mla_decode.selection import MAX_ROPE_PER_HEAD, MAX_ROPE_SHARED, MAX_ROPE_WIDTH, DecodeShape
from mha2mla.kernels.parallel_compilation import (
    OUT_OF_TIME,
    CompileJob,
    compile_in_processes,
    compile_job,
    compile_launches,
    run_in_workers,
)
from mha2mla.kernels.split_kv.op import compiled_shape
from mha2mla.kernels.split_kv.reference import Span, plan_fragments, write_schedule
from mha2mla.terminal import progress_bar
from mha2mla.testing.numeric_check import NOT_CHECKED
from mha2mla.testing.problems import UNUSED_PAGE, KeyCodesProblem, LatentProblem, Problem, judge
from mha2mla.testing.timing import start_device

REPEATS = 3  # a race may show only now and then
UNSPECIFIED = -(2**31)  # fields that the planner's oracle leaves open
COLUMNS = (
    "kernel", "geometries", "calls", "error", "torch_error", "ratio", "lse_error", "wrong", "unchecked", "status",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call to check.

    Attributes:
        group: number of the geometry; its cases share a compilation.
        problem: the call.
        dtype: "bfloat16" or "float16".
        share: CTAs of the plan relative to those that are resident; None: the usual plan.
        call: number of the call among its geometry's.
    """

    group: int
    problem: Problem
    dtype: str
    share: float | None = None
    call: int = 0

    def shape(self) -> DecodeShape:
        """The shape to compile."""
        return compiled_shape(self.problem.shape(self.dtype))

    def num_ctas(self, resident: int) -> int:
        """CTAs of its plan on a device where ``resident`` are resident at once."""
        return resident if self.share is None else max(1, round(self.share * resident))


def draw_geometry(rng: random.Random, latent: bool) -> tuple[Problem, str]:
    """A problem without lengths, and a dtype; popular geometries often. ``latent``: of the layout that caches it alone,
    every third one of e4m3 latents and some with int8 keys; else over stored rotary keys."""
    page, seqlen_q = rng.choice((16, 32, 64, 64, 128)), rng.choice((1, 1, 1, 2, 4, 8))
    paged = {"lengths": (), "page_size": page, "seqlen_q": seqlen_q}
    dtype = rng.choice(("bfloat16", "bfloat16", "float16"))
    if latent:
        heads = rng.choice((1, 8, 9, 14, 16, 24, 32, 40, 64, 128, rng.randint(1, 128)))
        d_c = rng.choice((72, 120, 192, 256, 384, 512, 1024, *[8 * rng.randint(1, 64)] * 5, 8 * rng.randint(65, 128)))
        d_r = rng.choice((32, 64, 64, 96, 128, 8 * rng.randint(1, 16)))
        extra = {"scaling": rng.choice((1.0, 1.3)), "codes": rng.random() < 1 / 3}
        if not extra["codes"] and rng.random() < 1 / 3:
            return KeyCodesProblem(heads, 1, d_c, -(-d_r // 16) * 16, **paged, scaling=extra["scaling"]), dtype
        return LatentProblem(heads, 1, d_c, d_r, **paged, **extra), dtype
    heads = rng.choice((1, 3, 8, 9, 12, 14, 16, 24, 32, 40, 48, 56, 63, 64, 126, 128, *[rng.randint(1, 128)] * 8))
    groups = rng.choice((1, heads, rng.choice([g for g in range(1, heads + 1) if heads % g == 0])))
    wide = (520, 576, 768, 960, 1024, 8 * rng.randint(65, 128))
    d_c = rng.choice((64, 80, 96, 128, 144, 192, 256, 320, 384, 448, 512, *[8 * rng.randint(1, 64)] * 8, *wide))
    widest = min(MAX_ROPE_SHARED if groups == 1 else MAX_ROPE_PER_HEAD, MAX_ROPE_WIDTH // groups // 8 * 8)
    d_r = min(widest, rng.choice((8, 16, 24, 32, 64, *[8 * rng.randint(1, widest // 8)] * 3)))
    return Problem(heads, groups, d_c, d_r, **paged), dtype


def draw_call(rng: random.Random, geometry: Problem, longest: int, most_sequences: int) -> Problem:
    """A call of a geometry: batch, lengths, starts, window, sinks, layout, table width, seed."""
    page = geometry.page_size
    edges = (0, 1, page - 1, page, page + 1, 63, 64, 65, 127, 128, 130)

    def length() -> int:
        return min(longest, rng.choice((rng.choice(edges), rng.randint(0, longest // 8), rng.randint(0, longest))))

    lengths = tuple(length() for _ in range(rng.choice((1, 2, 3, rng.randint(1, most_sequences)))))
    windowed = rng.random() < 0.4
    if isinstance(geometry, LatentProblem):
        first = rng.choice((0, 0, 131072, rng.randint(0, 2**17)))
        geometry = replace(geometry, first_position=first, shuffled=rng.random() < 0.3)
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
    explain: Callable[[Problem, str], str | None] = lambda problem, dtype: problem.op.refusal(problem.shape(dtype)),
) -> list[Case]:
    """``calls`` calls of each of ``count`` geometries; every fourth one is of a cache of the latent alone.

    Args:
        seed: of everything drawn; its n-th geometry is the same whatever ``count`` is.
        longest, most_sequences: most cached tokens of a sequence, and sequences of a batch.
        explain: why a geometry is drawn again, or None.
    """
    cases = []
    for group in range(count):
        rng = random.Random(f"{seed}/{group}")
        geometry, dtype = draw_geometry(rng, group % 4 == 3)
        while explain(geometry, dtype) is not None:
            geometry, dtype = draw_geometry(rng, group % 4 == 3)
        for call in range(calls):
            problem = draw_call(rng, geometry, longest, most_sequences)
            cases.append(Case(group, problem, dtype, rng.random() if call % 2 else None, call))
    return cases


@torch.inference_mode()
def check_case(case: Case, device: torch.device) -> dict[str, Any]:
    """Runs one case over poison; compares it with float64, its plan with the oracle's, and repetitions bit by bit.

    Returns:
        ``status`` ("ok" or "wrong: …") and the measured errors.
    """
    problem, dtype = case.problem, getattr(torch, case.dtype)
    backend = "tilelang" if device.type == "cuda" else "reference"
    inputs = problem.inputs(dtype, device)
    plan = problem.plan(inputs, backend)
    if plan.num_ctas:
        plan = plan_for(plan, case.num_ctas(plan.num_ctas))
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
    judgement = judge(inputs, *first, **problem.visibility)
    if problem.window is None and case.share is None:  # a caller without a plan gets the same
        alone, alone_lse = mla_decode(**inputs, return_lse=True, backend=backend)
        if not (torch.equal(alone, first[0]) and torch.equal(alone_lse, first[1])):
            wrong = wrong or "the call without a plan gave other bits"
    wrong = judgement.reason or plan_error(problem, plan) or wrong
    return {
        "num_ctas": plan.num_ctas,
        "error": judgement.error,
        "torch_error": judgement.torch_error,
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
    """The first difference of a filled plan from the oracle's; empty where there is none."""
    if not plan.num_ctas:
        return ""
    return schedule_error(problem.spans(), plan.num_ctas, plan.num_splits, plan.schedule.cpu(), plan.splits.cpu())


def schedule_error(spans: Sequence[Span], num_ctas: int, num_splits: int, planned: Tensor, got: Tensor) -> str:
    """The first difference of the planner's schedule and splits from the oracle's."""
    schedule, splits = write_schedule(spans, plan_fragments([span.tiles for span in spans], num_ctas, num_splits))
    differs = (schedule != UNSPECIFIED) & (planned != schedule)
    if bool(differs.any()):
        row, field = differs.nonzero()[0].tolist()
        was, expected = int(planned[row, field]), int(schedule[row, field])
        return f"the plan's row {row}, field {field} is {was}; the oracle has {expected}"
    return "" if torch.equal(got, splits) else "the plan's splits differ from the oracle's"


def check_kernels(
    count: int = 200,
    seed: int = 0,
    device: str | torch.device | None = None,
    *,
    calls: int = 4,
    progress: bool = True,
    timeout: float = 60.0,
    budget: float | None = None,
) -> list[dict[str, Any]]:
    """Checks the decode op on ``count`` random geometries, ``calls`` random calls and plans each.

    A call is right when :func:`mha2mla.testing.problems.judge` says so, its plan is the one that the oracle in
    ``split_kv/reference.py`` makes, and repeating plan and call gives the same bits. Unused cache, page table,
    workspace and rows of the schedule are poisoned.

    Args:
        count: geometries; each is one compilation.
        seed: of everything drawn.
        device: default "cuda". "cpu" checks the reference backend on smaller calls.
        calls: per geometry; every second one plans for a random number of CTAs.
        progress: show a bar on standard error.
        timeout: seconds after which a launch counts as hung and its process is killed.
        budget: seconds after which nothing more is begun; None: no limit.

    Returns:
        A row per call with the geometry, the dynamic arguments, the kernel, both errors and ``status``: "ok",
        "wrong: …", "hung: …", "crashed: …", "not compiled: …", "not checked: …", or what was raised.

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
    if budget is not None and not budget > 0:
        raise ValueError(f"budget is {budget}; expected None or more than 0 seconds")
    until = None if budget is None else time.monotonic() + budget
    if device.type == "cpu":
        cases = draw_cases(count, seed, calls=calls, longest=200, most_sequences=4)
        found = ((case, check_case(case, device)) for case in cases if until is None or time.monotonic() < until)
    else:
        cases = draw_cases(count, seed, calls=calls, explain=lambda p, dtype: p.op.explain(p.shape(dtype), device))
        found = check_in_processes(cases, device, timeout, until)
    results = dict(progress_bar(found, total=len(cases), desc="checking", unit="call", show=progress))
    why = {"status": f"{NOT_CHECKED}: budget of {budget} s, or an earlier call of the geometry failed"}
    return [case_row(case, device) | results.get(case, why) for case in cases]


def check_in_processes(
    cases: Sequence[Case], device: torch.device, timeout: float, until: float | None
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Compiles in parallel, some geometries at a time, and checks in one process; results as they come in.

    Calls of a geometry whose call hung, crashed or raised are left out.
    """
    by_job: dict[CompileJob, list[Case]] = {}
    for group in dict.fromkeys(case.group for case in cases):
        mine = [case for case in cases if case.group == group]
        # A call without a plan makes the usual one.
        calls = [(len(case.problem.lengths), ctas) for case in mine for ctas in (lambda n: n, case.num_ctas)]
        by_job.setdefault(compile_job(mine[0].problem.op, mine[0].shape(), device, calls), []).extend(mine)
    failed: set[int] = set()
    not_compiled: list[tuple[Case, dict[str, Any]]] = []

    def compiled() -> Iterator[Case]:
        remaining = iter(by_job)
        while jobs := list(islice(remaining, 2 * (os.cpu_count() or 1))):
            broken = compile_in_processes(compile_launches, jobs, until)
            for job in jobs:
                if job not in broken:
                    yield from (case for case in by_job[job] if case.group not in failed)
                elif OUT_OF_TIME not in broken[job]:
                    not_compiled.extend((case, {"status": broken[job]}) for case in by_job[job])

    check = partial(check_case, device=device)
    for outcome in run_in_workers(
        check, compiled(), timeout=timeout, until=until, prepare=partial(start_device, device)
    ):
        if outcome.failure is not None:
            failed.add(outcome.job.group)
        if outcome.failure != OUT_OF_TIME:
            yield outcome.job, outcome.value or {"status": outcome.failure}
    yield from not_compiled


def case_row(case: Case, device: torch.device) -> dict[str, Any]:
    """The columns that name a case, and its kernel."""
    problem, lengths = case.problem, case.problem.lengths
    kernel = problem.op.choose(case.shape(), device).kernel if device.type == "cuda" else "reference"
    sizes = {"dtype": case.dtype, "kernel": kernel, "batch": len(lengths), "longest": max(lengths, default=0)}
    names = ("starts", "causal", "window", "sinks", "combined", "scale", "seed")
    numbers = {"group": case.group, "call": case.call}
    return numbers | problem.columns | sizes | {name: getattr(problem, name) for name in names}


def not_right(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that were checked and are not right."""
    return [row for row in rows if row["status"] != "ok" and not row["status"].startswith(NOT_CHECKED)]


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per kernel, with :data:`COLUMNS`."""
    table = []
    for kernel in sorted({row["kernel"] for row in rows}):
        mine = [row for row in rows if row["kernel"] == kernel]
        measured, failed = [row for row in mine if "error" in row], [row["status"] for row in not_right(mine)]
        unchecked = [row["status"] for row in mine if row["status"].startswith(NOT_CHECKED)]
        worst = max(measured, key=lambda row: row["error"], default={})
        ratio = max((row["error"] / max(row["torch_error"], 1e-12) for row in measured), default=None)
        lse_error = max((row["lse_error"] for row in measured), default=None)
        status = failed[0] if failed else "ok" if measured else unchecked[0]
        values = (
            kernel, len({row["group"] for row in mine}), len(mine), worst.get("error"), worst.get("torch_error"), ratio,
            lse_error, len(failed), len(unchecked), status,
        )  # fmt: skip
        table.append(dict(zip(COLUMNS, values, strict=True)))
    return table
