"""Fills the tuning table: times the configurations that may serve a decode shape, and keeps the fastest right one.

Each candidate is compiled in a process of its own, checked against float64 on the inputs that it is then timed on, and
timed with a cold L2, under a time-out. The fastest few and the rule's choice are timed again in turn, so that clocks
and heat are the same for all; that decides. What hangs, crashes or is wrong is reported and costs nothing else.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mha2mla.environment import collect_environment
from mha2mla.kernel_testing.compiling import COMPILE_TIMEOUT, CompileJob, compile_in_processes, compile_launches
from mha2mla.kernel_testing.timing import start_device
from mha2mla.kernel_testing.trial_run import measure
from mha2mla.kernel_testing.trials import (
    Candidate,
    Geometry,
    Trial,
    choose_candidates,
    choose_finalists,
    choose_winner,
    make_problem,
    table_row,
)
from mha2mla.kernel_testing.workers import Outcome, run_in_workers
from mha2mla.kernels.devices import capability, device_name, num_sms
from mha2mla.kernels.mla_decode.selection import TUNING, DecodeShape, list_kernels
from mha2mla.kernels.split_kv.limits import DTYPES
from mha2mla.kernels.split_kv.tuning import user_table
from mha2mla.progress import progress_bar

GEOMETRIES: tuple[Geometry, ...] = (
    (32, 32, 512, 16),
    (32, 8, 512, 16),
    (16, 1, 512, 64),
    (32, 1, 512, 64),
    (64, 1, 512, 64),
    (128, 1, 512, 64),
    (9, 3, 256, 16),
    (14, 1, 128, 64),
    (14, 2, 128, 16),
    (24, 8, 512, 16),
    (40, 8, 512, 16),
    (40, 40, 512, 16),
    (48, 8, 512, 16),
    (56, 8, 512, 16),
    *((32, 8, width, 16) for width in (80, 96, 144, 192, 320, 384, 448)),
    (16, 1, 512, 64, 4),
    (32, 1, 512, 64, 2),
    (32, 1, 512, 64, 4),
    (64, 1, 512, 64, 2),
    *((heads, 1, 1024, 64) for heads in (16, 32, 64)),
)

COLUMNS = {
    "shape": "shape",
    "kernel": "kernel",
    "variant": "variant",
    "rows": "rows",
    "tiles": "tiles",
    "stages": "stages",
    "warpgroups": "warpgroups",
    "ctas_per_sm": "CTAs/SM",
    "us": "µs",
    "rule_us": "rule µs",
    "gain": "gain",
    "TB/s": "TB/s",
    "candidates": "candidates",
    "status": "status",
}


def tune(
    geometries: Sequence[Geometry] | None = None,
    *,
    batches: Sequence[int] = (64,),
    seqlen: int | None = None,
    page_size: int = 64,
    dtype: str = "bfloat16",
    candidates: int = 6,
    table: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    min_run_time: float = 0.1,
    timeout: float = 60.0,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Measures decode configurations on this machine's GPU and writes the fastest of each shape into a tuning table.

    The table is written after each shape, so an interrupted run keeps what it has. Processes that run already keep
    their choices.

    Args:
        geometries: (H, G, d_c, d_r) or (H, G, d_c, d_r, S_q) each; default :data:`GEOMETRIES`.
        batches: sequences of a call; each gets a row, which serves batches near it.
        seqlen: cached tokens of each; default as many as make the cache about 280 MB, 67 MB below 16 sequences.
        page_size: tokens per page.
        dtype: "bfloat16" or "float16".
        candidates: configurations to time per shape; never fewer than there are families of them.
        table: file to write; default the user's, which dispatch looks at before the package's.
        device: a CUDA device; default "cuda".
        min_run_time: seconds of measurement per candidate, and again in the final.
        timeout: seconds after which a candidate counts as hung and its process is killed.
        progress: show bars on standard error.

    Returns:
        A row per candidate: shape, configuration, ``us`` (median, cold L2, alone), ``final_us`` (where it was among the
        last), ``rule``, ``chosen``, ``status``: "ok", "wrong: …", "hung: …", "not compiled: …" or what was raised.

    Raises:
        ValueError: no such device, or an argument or a geometry that no kernel serves, named.
    """
    device = _cuda(device)
    least = {"batches": min(batches, default=0), "candidates": candidates, "seqlen": 1 if seqlen is None else seqlen}
    for name, value in least.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; expected {' or '.join(DTYPES)}")
    path = user_table() if table is None else Path(table).expanduser()
    if path is None:
        raise ValueError("there is no home folder to keep a tuning table in; name a file with table")
    major_minor, sms = capability(device), num_sms(device)
    entered: Entered = {}
    for geometry, batch in itertools.product(GEOMETRIES if geometries is None else geometries, batches):
        problem = make_problem(geometry, batch, seqlen, page_size, dtype, device)
        shape = problem.shape(dtype)
        choices = list_kernels(shape, major_minor)
        entered[shape, batch] = [
            Trial(problem, dtype, (Candidate(choice, choice.num_ctas(sms), choice is choices[0]),))
            for choice in choose_candidates(choices, candidates)
        ]
    TUNING.write(path, [])  # before anything is measured: it can be written, and what is there is a table
    failures = compile_all(
        [trial for mine in entered.values() for trial in mine], major_minor, timeout=COMPILE_TIMEOUT, progress=progress
    )
    run = partial(measure, device=str(device), capability=major_minor, min_run_time=min_run_time)
    environment = collect_environment()
    origin = {"tilelang": environment["tilelang"], "date": environment["date"][:10], "commit": environment["commit"]}

    def keep(row: dict[str, Any]) -> None:
        TUNING.write(path, [{"gpu": device_name(device)} | row | origin])

    # apart from any job's time-out: where others compile, importing TileLang and starting CUDA takes most of one
    prepare = partial(start_device, device)
    return _measure_all(entered, failures, run, prepare, keep, timeout=timeout, progress=progress)


Entered = dict[tuple[DecodeShape, int], list[Trial]]
"""(shape, batch) -> a trial of each of its candidates."""


def _measure_all(
    entered: Entered,
    failures: Mapping[Trial, str],
    run: Callable[[Trial], dict[str, Any]],
    prepare: Callable[[], None],
    keep: Callable[[dict[str, Any]], None],
    *,
    timeout: float,
    progress: bool,
) -> list[dict[str, Any]]:
    """:func:`tune`'s rows.

    Args:
        run: measures a trial in a worker. prepare: what a worker does first.
        keep: takes a shape's row for the table.
    """
    results: dict[Trial, dict[str, Any]] = {trial: {"status": why} for trial, why in failures.items()}
    finals: dict[tuple[DecodeShape, int], Outcome] = {}
    total = sum(map(len, entered.values())) - len(failures) + len(entered)

    def jobs() -> Iterator[Trial]:
        for mine in entered.values():
            yield from (trial for trial in mine if trial not in results)
            final = choose_finalists(mine, results)
            if final is not None:
                yield final

    outcomes = run_in_workers(run, jobs(), timeout=timeout, prepare=prepare)
    for outcome in progress_bar(outcomes, total=total, desc="measuring", unit="trial", show=progress):
        trial = outcome.job
        if not trial.final:
            results[trial] = outcome.value or {"status": outcome.failure}
            continue
        finals[trial.shape, len(trial.problem.lengths)] = outcome
        if outcome.failure is None:
            keep(table_row(trial, outcome.value["us"]))
    return [_result_row(trial, results[trial], finals.get(key)) for key, mine in entered.items() for trial in mine]


def compile_all(trials: Sequence[Trial], major_minor: int, *, timeout: float, progress: bool) -> dict[Trial, str]:
    """Compiles in parallel; why a trial's candidate could not be compiled, for those that could not."""
    jobs = {}
    for trial in trials:
        (candidate,) = trial.candidates
        launch = (candidate.choice, candidate.num_ctas, len(trial.problem.lengths))
        jobs[trial] = CompileJob(trial.problem.op.name, trial.shape, major_minor, (launch,))
    broken = compile_in_processes(compile_launches, jobs.values(), progress=progress, timeout=timeout)
    return {trial: broken[job] for trial, job in jobs.items() if job in broken}


def _result_row(trial: Trial, result: dict[str, Any], final: Outcome | None) -> dict[str, Any]:
    (candidate,) = trial.candidates
    problem, choice = trial.problem, candidate.choice
    row = {
        **problem.columns,
        "dtype": trial.dtype,
        "batch": len(problem.lengths),
        "seqlen": problem.lengths[0],
        "MB": problem.cache_bytes() / 1e6,
        **choice.configuration(),
        "num_ctas": candidate.num_ctas,
        "us": result["us"][0] if "us" in result else None,
        "final_us": None,
        "rule": candidate.rule,
        "chosen": False,
        "status": result["status"],
        "reason": choice.reason,
    }
    if final is not None and candidate in final.job.candidates:
        place = final.job.candidates.index(candidate)
        if final.failure is not None:
            row["status"] = f"in the final: {final.failure}"
        else:
            times = final.value["us"]
            row |= {"final_us": times[place], "chosen": place == choose_winner(final.job, times)}
    return row


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per shape, for :data:`COLUMNS`: what was chosen, or that nothing was."""
    shapes: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("H", "G", "d_c", "d_r", "page", "S_q", "dtype", "batch"))
        shapes.setdefault(key, []).append(row)
    table = []
    for mine in shapes.values():
        first = mine[0]
        name = f"H{first['H']} G{first['G']} c{first['d_c']} r{first['d_r']} {first['batch']}x{first['seqlen']}"
        name += f" q{first['S_q']}" * (first["S_q"] > 1) + f" p{first['page']}" * (first["page"] != 64)
        failed = [row["status"] for row in mine if row["status"] != "ok"]
        summary: dict[str, Any] = {"shape": name, "candidates": len(mine)}
        chosen = next((row for row in mine if row["chosen"]), None)
        if chosen is None:
            table.append(summary | {"status": f"no row: {failed[0]}"})
            continue
        rule_us = next((row["final_us"] for row in mine if row["rule"]), None)
        summary |= {
            "kernel": chosen["kernel"],
            "variant": chosen["variant"],
            "rows": chosen["rows"],
            "tiles": chosen["head_tiles"] * chosen["token_tiles"],
            "stages": f"{chosen['num_stages']}+{chosen['rope_stages']}",
            "warpgroups": chosen["warpgroups"],
            "ctas_per_sm": chosen["ctas_per_sm"],
            "us": chosen["final_us"],
            "rule_us": rule_us,
            "gain": None if rule_us is None else f"{rule_us / chosen['final_us'] - 1:.1%}",
            "TB/s": chosen["MB"] / chosen["final_us"],
            "status": f"{len(failed)} not right" if failed else "ok",
        }
        table.append(summary)
    return table


def _cuda(device: str | torch.device | None) -> torch.device:
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise ValueError(f"device is {device}; expected a CUDA device, since that is what is timed")
    if not torch.cuda.is_available():
        raise ValueError(f"device is {device}; no CUDA device is available here")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
