"""The decode kernels against float64 on random geometries and random plans, seeded, each under a time-out.

Compiling takes longer than checking, so both go on at the same time: geometries are compiled in as many processes as
there are processors, and two processes check those that are ready: one that hangs does not hold up all. A time limit
(``budget``) ends everything; what was not reached is a row "not checked: …", and a later run can go on from the rows of
an earlier one.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mha2mla.kernel_testing.problems import UNUSED_PAGE, Problem, judge
from mha2mla.kernel_testing.workers import (
    OUT_OF_TIME,
    Outcome,
    Stage,
    Tally,
    progress_bar,
    run_in_stages,
    run_in_workers,
)
from mha2mla.kernels import DecodePlan, explain_mla_decode, mla_decode
from mha2mla.kernels.devices import capability, device_name, num_sms
from mha2mla.kernels.mla_decode.dispatch import decode_shape
from mha2mla.kernels.mla_decode.selection import (
    MAX_ROPE_PER_HEAD,
    MAX_ROPE_SHARED,
    MAX_ROPE_WIDTH,
    DecodeShape,
    refusal,
    select_kernel,
)
from mha2mla.kernels.split_kv.schedule import COUNT, plan_fragments, write_schedule
from mha2mla.kernels.split_kv.tuning import BATCHES, batch_bucket

COMPILE_TIMEOUT = 300.0
CHECKERS = 2  # processes that launch kernels: one that hangs takes its time-out, then a new one has to start
REPEATS = 3  # a race may show only now and then
SIZES = ("≤ 16", "≤ 32", "≤ 64", "≤ 128", "> 128")
UNSPECIFIED = -(2**31)  # what the planner's oracle leaves in fields that nobody reads
KIND = "kernel-check"  # of the JSON file
NOT_CHECKED = "not checked"  # how the status of a call begins that time did not suffice for
SAVE_INTERVAL = 10.0  # seconds between two reports of what is known so far

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
    "unchecked": "not checked",
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
        call: which of its geometry's calls it is.
    """

    group: int
    problem: Problem
    dtype: str
    share: float | None = None
    call: int = 0

    def shape(self) -> DecodeShape:
        """What is compiled for it."""
        problem = self.problem
        return decode_shape(problem.geometry, problem.page_size, getattr(torch, self.dtype), problem.seqlen_q)

    def num_ctas(self, planned: int) -> int:
        """CTAs that it plans for where the device would plan for ``planned``."""
        return planned if self.share is None else max(1, round(self.share * planned))


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
            cases.append(Case(group, problem, dtype, rng.random() if call % 2 else None, call))
    return cases


def check_kernels(
    count: int = 200,
    seed: int = 0,
    device: str | torch.device | None = None,
    *,
    calls: int = 4,
    progress: bool = True,
    timeout: float = 60.0,
    budget: float | None = None,
    known: Sequence[Mapping[str, Any]] = (),
    save: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Checks the decode op on ``count`` random geometries, ``calls`` random calls and plans each.

    A call is right when :func:`mha2mla.kernel_testing.problems.judge` says so, its plan is the one that the oracle in
    ``schedule.py`` makes, and repeating plan and call gives the same bits. Everything nobody may read is poisoned:
    unused cache, page table, workspace, unused rows of the schedule.

    Args:
        count: geometries; each is one compilation.
        seed: of everything drawn.
        device: default "cuda". "cpu" checks the reference backend on smaller calls.
        calls: per geometry; every second one plans for a random number of CTAs.
        progress: show on standard error how far it is.
        timeout: seconds after which a launch counts as hung and its process is killed.
        budget: seconds after which nothing more is begun, and what is not finished is given up; None: no limit.
        known: rows of an earlier run with this ``seed`` and ``calls``; calls with a verdict there are not repeated.
        save: called with the rows so far every :data:`SAVE_INTERVAL` seconds, so that a run that is killed leaves them.

    Returns:
        A row per call with the geometry, the dynamic arguments, the kernel, both errors and ``status``: "ok",
        "wrong: …", "hung: …", "crashed: …", "not checked: …", or what was raised.

    Raises:
        ValueError: there is no such device, or ``known`` is of other calls.
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
    common = {"progress": progress, "timeout": timeout, "budget": budget, "known": known, "save": save}
    if device.type == "cpu":
        return check_cases(draw_cases(count, seed, calls=calls, longest=200, most_sequences=4), device, **common)

    def accepts(problem: Problem, dtype: str) -> bool:
        why = explain_mla_decode(problem.geometry, problem.page_size, getattr(torch, dtype), device, problem.seqlen_q)
        return why is None

    return check_cases(draw_cases(count, seed, calls=calls, accepts=accepts), device, **common)


def check_cases(
    cases: Sequence[Case],
    device: torch.device,
    *,
    progress: bool = True,
    timeout: float = 60.0,
    budget: float | None = None,
    known: Sequence[Mapping[str, Any]] = (),
    save: Callable[[list[dict[str, Any]]], None] | None = None,
    in_processes: bool | None = None,
) -> list[dict[str, Any]]:
    """Checks the cases in the order in which their kernels are compiled.

    Args:
        cases: no two of a group with the same ``call``.
        device, progress, timeout, budget, known, save: as :func:`check_kernels` has them.
        in_processes: compile and check in other processes; default: on a GPU. On a CPU there is nothing to compile.

    Returns:
        Rows as :func:`check_kernels`, in the order of the cases. After a failure other than a wrong number, a group's
        remaining calls are skipped: they have no row.
    """
    until = None if budget is None else time.monotonic() + budget
    in_processes = device.type == "cuda" if in_processes is None else in_processes
    found = match_known(cases, known)
    names = [_row(case, device if in_processes else None) for case in cases]
    place = {(case.group, case.call): number for number, case in enumerate(cases)}
    if len(place) < len(cases):
        raise ValueError("two of the cases have the same group and call")
    broken = {cases[number].group for number, row in found.items() if is_broken(row["status"])}
    wanted = [case for number, case in enumerate(cases) if number not in found]
    run = _in_processes if in_processes else _here
    tally, counted, saved = Tally(len(cases), "checking", progress), 0, time.monotonic()
    for case, outcome in run(wanted, broken, device, timeout, until):
        number = place[case.group, case.call]
        if outcome.failure != OUT_OF_TIME:
            found[number] = names[number] | (outcome.value or {"status": outcome.failure})
        wrong = sum(row["status"] != "ok" for row in found.values())
        tally.add(len(found) - counted, f"{wrong} not right")
        counted = len(found)
        if save is not None and time.monotonic() - saved >= SAVE_INTERVAL:
            saved = time.monotonic()
            save(_with_unchecked(cases, names, found, broken, "the run has not ended"))
    tally.close()
    return _with_unchecked(cases, names, found, broken, f"budget of {budget:g} s" if budget else "")


def is_broken(status: str) -> bool:
    """Whether a call failed in a way that its geometry's other calls are skipped after."""
    return status != "ok" and not status.startswith(("wrong", NOT_CHECKED))


def not_checked(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that time did not suffice for."""
    return [row for row in rows if row["status"].startswith(NOT_CHECKED)]


def not_right(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that were checked and are not right."""
    return [row for row in rows if row["status"] != "ok" and not row["status"].startswith(NOT_CHECKED)]


def whole_geometries(rows: Sequence[Mapping[str, Any]]) -> str:
    """In words, which of a seed's geometries were checked with all their calls: "geometries 0-57, 59 were checked"."""
    left = {row["group"] for row in not_checked(rows)}
    whole = sorted({row["group"] for row in rows} - left)
    runs: list[list[int]] = []
    for group in whole:
        if runs and runs[-1][1] == group - 1:
            runs[-1][1] = group
        else:
            runs.append([group, group])
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"geometries {text} were checked" if whole else "no geometry was checked with all its calls"


def read_known(
    path: str | os.PathLike[str], settings: Mapping[str, Any], environment: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The rows of a file that ``mha2mla check kernels --json`` wrote, to go on from.

    Args:
        path: the file.
        settings: ``seed``, ``calls`` and ``device`` of this run.
        environment: of this run, as :func:`mha2mla.environment.collect_environment` gives it.

    Raises:
        ValueError: it is no such file, or is about other calls, another GPU, other software or another commit: what
            was right there may be wrong here.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not what `mha2mla check kernels --json` writes: {error}") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ValueError(f"{path} is not what `mha2mla check kernels --json` writes")
    here = {name: settings[name] for name in ("seed", "calls", "device")}
    here |= {name: environment[name] for name in ("gpu", "torch", "tilelang", "commit")}
    there = {name: (content if name in settings else content["environment"]).get(name) for name in here}
    differs = [f"{name} {there[name]!r}; expected {here[name]!r}" for name in here if there[name] != here[name]]
    if differs:
        raise ValueError(f"{path} is of {' and '.join(differs)}")
    return content["rows"]


def match_known(cases: Sequence[Case], known: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rows with a verdict, by the number of the case that they are of.

    Raises:
        ValueError: a row is of a call that is not drawn now.
    """
    place = {(case.group, case.call): number for number, case in enumerate(cases)}
    found = {}
    for row in known:
        number = place.get((row["group"], row["call"]))
        if number is None:
            continue  # of a longer run
        case = cases[number]
        mine = case.problem.columns | {"dtype": case.dtype, "seed": case.problem.seed}
        other = {name: row.get(name) for name in mine}
        if other != mine:
            raise ValueError(
                f"the known row of geometry {case.group}, call {case.call} is {other}; expected {mine}: other seed, "
                f"calls or version"
            )
        if not row["status"].startswith(NOT_CHECKED):
            found[number] = dict(row)
    return found


def _here(
    wanted: Sequence[Case], broken: set[int], device: torch.device, timeout: float, until: float | None
) -> Iterator[tuple[Case, Outcome]]:
    """Checks ``wanted`` in this process, those of ``broken`` groups left out."""
    for case in wanted:
        if until is not None and time.monotonic() >= until:
            return
        if case.group not in broken:
            yield case, Outcome(case, check_case(case, device))


def _in_processes(
    wanted: Sequence[Case], broken: set[int], device: torch.device, timeout: float, until: float | None
) -> Iterator[tuple[Case, Outcome]]:
    """Compiles and checks ``wanted``, those of ``broken`` groups left out; groups that break are added to them."""
    by_shape: dict[DecodeShape, list[Case]] = {}
    for case in wanted:
        if case.group not in broken:
            by_shape.setdefault(case.shape(), []).append(case)
    by_job = {compile_job(shape, cases, device): cases for shape, cases in by_shape.items()}

    def compiled(outcome: Outcome) -> Iterator[Case]:
        if outcome.failure is None:
            yield from (case for case in by_job[outcome.job] if case.group not in broken)

    stages = (
        Stage(compile_shape, _processes(len(by_job)), COMPILE_TIMEOUT, then=compiled),
        Stage(partial(check_case, device=device), CHECKERS, timeout, prepare=partial(start_checking, device)),
    )
    for stage, outcome in run_in_stages(stages, by_job, until=until):
        broke = outcome.failure not in (None, OUT_OF_TIME)
        if stage == 1:
            if broke:
                broken.add(outcome.job.group)
            yield outcome.job, outcome
        elif broke:
            for case in by_job[outcome.job]:
                broken.add(case.group)
                yield case, replace(outcome, failure=f"not compiled: {outcome.failure}")


def _with_unchecked(
    cases: Sequence[Case],
    names: Sequence[dict[str, Any]],
    found: Mapping[int, dict[str, Any]],
    broken: set[int],
    why: str,
) -> list[dict[str, Any]]:
    """The rows found, in order, and one for every call that has none and was not skipped."""
    rows = []
    for number, case in enumerate(cases):
        if number in found:
            rows.append(found[number])
        elif case.group not in broken:
            rows.append(names[number] | {"status": f"{NOT_CHECKED}: {why}"})
    return rows


@dataclass(frozen=True)
class CompileJob:
    """What a process compiles at a time: all that calls of a shape may launch.

    Attributes:
        shape: static part of the calls.
        capability: compute capability, 90 for Hopper.
        gpu: its name.
        merges: sizes of combine kernels (``split_kv.launch.MERGES``); None: all.
        buckets: of batch sizes (``tuning.BATCHES``); None: all.
    """

    shape: DecodeShape
    capability: int
    gpu: str
    merges: tuple[int, ...] | None = None
    buckets: tuple[int, ...] | None = None


def compile_job(shape: DecodeShape, cases: Sequence[Case], device: torch.device) -> CompileJob:
    """What has to be compiled for ``cases`` of a shape, and nothing else."""
    from mha2mla.kernels.split_kv.launch import merge_splits

    buckets, merges = set(), set()
    for batch, case in ((len(case.problem.lengths), case) for case in cases if case.problem.lengths):
        buckets.add(batch_bucket(batch))
        planned = select_kernel(shape, capability(device), device_name(device), batch).num_ctas(num_sms(device))
        # a call without a plan makes the first of them
        merges |= {merge_splits(ctas, batch) for ctas in (planned, case.num_ctas(planned))}
    return CompileJob(
        shape, capability(device), device_name(device), tuple(sorted(merges)), tuple(sorted(buckets)) or None
    )


def compile_shapes(
    shapes: Sequence[DecodeShape], device: torch.device, *, progress: bool = True, timeout: float = COMPILE_TIMEOUT
) -> dict[DecodeShape, str]:
    """Puts the kernels of these shapes into TileLang's disk cache, in parallel processes.

    Returns:
        Why a shape could not be compiled, for those that could not.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    jobs = [CompileJob(shape, capability(device), device_name(device)) for shape in dict.fromkeys(shapes)]
    outcomes = run_in_workers(compile_shape, jobs, workers=_processes(len(jobs)), timeout=timeout)
    bar = progress_bar(outcomes, len(jobs), "compiling", progress)
    return {outcome.job.shape: f"not compiled: {outcome.failure}" for outcome in bar if outcome.failure is not None}


def _processes(jobs: int) -> int:
    """How many compile at a time; two processors are left to whoever waits and checks."""
    return max(1, min(jobs, (os.cpu_count() or 2) - 2))


def compile_shape(job: CompileJob) -> None:
    """Compiles what a job names."""
    from mha2mla.kernels.mla_decode.launch import compile_mla_decode
    from mha2mla.kernels.split_kv.launch import MERGES, compile_merge, compile_planner

    compile_planner(job.capability)
    for bucket in BATCHES if job.buckets is None else job.buckets:
        compile_mla_decode(job.shape, job.capability, job.gpu, bucket)
    for splits in MERGES if job.merges is None else job.merges:
        compile_merge(job.shape.heads, job.shape.kv_lora_rank, job.shape.dtype, splits, job.capability)


def start_checking(device: torch.device) -> None:
    """What a process that checks does once, before it is timed."""
    if device.type == "cuda":
        import tilelang  # noqa: F401

        torch.zeros(1, device=device).item()


@torch.inference_mode()
def check_case(case: Case, device: torch.device) -> dict[str, Any]:
    """Runs one case and compares it with float64; the keys are ``status`` and what was measured."""
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
        "call": case.call,
        **problem.columns,
        "dtype": case.dtype,
        "kernel": "reference",
        "batch": len(problem.lengths),
        "longest": max(problem.lengths, default=0),
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
        choice = select_kernel(case.shape(), capability(device), device_name(device), len(problem.lengths))
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
        unchecked, failed = not_checked(mine), [row["status"] for row in not_right(mine)]
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
                "unchecked": len(unchecked),
                "status": failed[0] if failed else "ok" if measured else unchecked[0]["status"],
            }
        )
    return table
