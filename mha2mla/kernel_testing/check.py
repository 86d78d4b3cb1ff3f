"""The decode kernels against float64 on random geometries and random plans, seeded, each under a time-out.

Compiling takes longer than checking, so both go on at the same time: geometries are compiled in as many processes as
there are processors, and two processes check those that are ready: one that hangs does not hold up all. A time limit
(``budget``) ends everything; what was not reached is a row "not checked: …", and a later run can go on from the rows of
an earlier one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mha2mla.kernel_testing.case_check import check_case
from mha2mla.kernel_testing.cases import Case, draw_cases
from mha2mla.kernel_testing.check_rows import case_row, is_broken, match_known
from mha2mla.kernel_testing.compiling import COMPILE_TIMEOUT, compile_job, compile_launches, processes_for
from mha2mla.kernel_testing.judgement import NOT_CHECKED
from mha2mla.kernel_testing.problems import Problem
from mha2mla.kernel_testing.timing import start_device
from mha2mla.kernel_testing.workers import OUT_OF_TIME, Outcome, Stage, run_in_stages
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.progress import progress_bar

CHECKERS = 2  # processes that launch kernels: one that hangs takes its time-out, then a new one has to start
SAVE_INTERVAL = 10.0  # seconds between two reports of what is known so far


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
        shape = problem.shape(dtype, problem.seqlen_q)
        return problem.op.explain(shape, device) is None

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
    names = [case_row(case, device if in_processes else None) for case in cases]
    place = {(case.group, case.call): number for number, case in enumerate(cases)}
    if len(place) < len(cases):
        raise ValueError("two of the cases have the same group and call")
    broken = {cases[number].group for number, row in found.items() if is_broken(row["status"])}
    wanted = [case for number, case in enumerate(cases) if number not in found]
    run = _in_processes if in_processes else _here
    bar, saved = progress_bar(total=len(cases), desc="checking", unit="call", show=progress), time.monotonic()
    for case, outcome in run(wanted, broken, device, timeout, until):
        number = place[case.group, case.call]
        if outcome.failure != OUT_OF_TIME:
            found[number] = names[number] | (outcome.value or {"status": outcome.failure})
        wrong = sum(row["status"] != "ok" for row in found.values())
        bar.set_postfix_str(f"{wrong} not right", refresh=False)
        bar.update(len(found) - bar.n)
        if save is not None and time.monotonic() - saved >= SAVE_INTERVAL:
            saved = time.monotonic()
            save(_with_unchecked(cases, names, found, broken, "the run has not ended"))
    bar.close()
    return _with_unchecked(cases, names, found, broken, f"budget of {budget:g} s" if budget else "")


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
    by_shape: dict[tuple[str, DecodeShape], list[Case]] = {}
    for case in wanted:
        if case.group not in broken:
            by_shape.setdefault((case.problem.op.name, case.shape()), []).append(case)
    by_job = {compile_job(cases, device): cases for cases in by_shape.values()}

    def compiled(outcome: Outcome) -> Iterator[Case]:
        if outcome.failure is None:
            yield from (case for case in by_job[outcome.job] if case.group not in broken)

    stages = (
        Stage(compile_launches, processes_for(len(by_job)), COMPILE_TIMEOUT, then=compiled),
        Stage(partial(check_case, device=device), CHECKERS, timeout, prepare=partial(start_device, device)),
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
