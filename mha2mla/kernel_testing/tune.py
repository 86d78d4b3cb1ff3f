"""Fills the tuning table: times the configurations that may serve a decode shape, and keeps the fastest right one.

Each candidate is compiled in a process of its own, checked against float64 on the inputs that it is then timed on, and
timed with a cold L2, under a time-out. The fastest few and the rule's choice are timed again in turn, so that clocks
and heat are the same for all; that decides. What hangs, crashes or is wrong is reported and costs nothing else.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mha2mla.environment import collect_environment
from mha2mla.geometry import MLAGeometry
from mha2mla.kernel_testing.case_check import plan_for
from mha2mla.kernel_testing.compiling import COMPILE_TIMEOUT, processes_for
from mha2mla.kernel_testing.judgement import verdict
from mha2mla.kernel_testing.problems import UNUSED_PAGE, Problem, expected
from mha2mla.kernel_testing.timing import time_callable
from mha2mla.kernel_testing.workers import Outcome, progress_bar, run_in_workers
from mha2mla.kernels import DecodePlan, explain_mla_decode
from mha2mla.kernels.devices import capability, device_name, num_sms
from mha2mla.kernels.mla_decode.dispatch import decode_shape
from mha2mla.kernels.mla_decode.selection import DecodeShape, KernelChoice, list_kernels
from mha2mla.kernels.split_kv.limits import DTYPES
from mha2mla.kernels.split_kv.tuning import configuration, shape_fields, user_table, write_rows

Geometry = tuple[int, ...]  # H, G, d_c, d_r and, if it is not 1, S_q

FINALISTS = 3  # that are timed again in turn, beside the rule's choice
ROUNDS = 3
MARGIN = 0.01  # the rule's choice is kept where nothing else is faster by more
CACHE_BYTES = 280e6  # of a shape whose length nobody gives: many times an L2, so that reading it is what is timed
SMALL_CACHE_BYTES = 67e6  # the same for fewer than 16 sequences

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


@dataclass(frozen=True)
class Candidate:
    """A configuration of a shape. ``num_ctas``: of the plan, per tile of query rows. ``rule``: whether it is the rule's
    choice."""

    choice: KernelChoice
    num_ctas: int
    rule: bool


@dataclass(frozen=True)
class Trial:
    """What a worker measures at a time: one candidate that is checked first, or (the final) several, in turn."""

    problem: Problem
    dtype: str
    candidates: tuple[Candidate, ...]
    final: bool = False

    @property
    def shape(self) -> DecodeShape:
        return self.problem.shape(self.dtype)


def parse_geometry(text: str) -> Geometry:
    """ "H,G,d_c,d_r" or "H,G,d_c,d_r,S_q" as numbers.

    Raises:
        ValueError: it is neither.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) not in (4, 5):
        raise ValueError(f"geometry is {text!r}; expected H,G,d_c,d_r or H,G,d_c,d_r,S_q, such as 32,8,512,16")
    return numbers


def choose_candidates(choices: Sequence[KernelChoice], count: int) -> list[KernelChoice]:
    """The rule's choice, the best of each family by the rule (kernel, warpgroups, rows, CTAs a multiprocessor) and of
    each variant, then what the rule likes best of the others: ``count`` in all, or as many as those are."""
    families: dict[tuple[Any, ...], KernelChoice] = {}
    for choice in choices:
        family = (choice.kernel, choice.warpgroups, choice.tiling.rows, choice.ctas_per_sm)
        families.setdefault(family, choice)
        families.setdefault((choice.kernel, choice.variant), choice)
    best = list(dict.fromkeys(families.values()))
    others = [choice for choice in choices if choice not in best]
    return best + others[: max(0, count - len(best))]


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
    major_minor, gpu, sms = capability(device), device_name(device), num_sms(device)
    environment = collect_environment()
    origin = {"tilelang": environment["tilelang"], "date": environment["date"][:10], "commit": environment["commit"]}

    entered: dict[tuple[DecodeShape, int], list[Trial]] = {}
    for geometry, batch in itertools.product(GEOMETRIES if geometries is None else geometries, batches):
        problem = make_problem(geometry, batch, seqlen, page_size, dtype, device)
        shape = problem.shape(dtype)
        choices = list_kernels(shape, major_minor)
        entered[shape, batch] = [
            Trial(problem, dtype, (Candidate(choice, choice.num_ctas(sms), choice is choices[0]),))
            for choice in choose_candidates(choices, candidates)
        ]
    write_rows(path, [])  # before anything is measured: it can be written, and what is there is a table
    trials = [trial for mine in entered.values() for trial in mine]
    failures = compile_all(trials, major_minor, timeout=COMPILE_TIMEOUT, progress=progress)
    results: dict[Trial, dict[str, Any]] = {
        trial: {"status": f"not compiled: {failures[trial]}"} for trial in trials if trial in failures
    }
    finals: dict[tuple[DecodeShape, int], Outcome] = {}

    def jobs() -> Iterator[Trial]:
        for mine in entered.values():
            yield from (trial for trial in mine if trial not in results)
            final = choose_finalists(mine, results)
            if final is not None:
                yield final

    measuring = run_in_workers(
        partial(measure, device=str(device), capability=major_minor, min_run_time=min_run_time),
        jobs(),
        timeout=timeout,
    )
    for outcome in progress_bar(measuring, len(trials) - len(failures) + len(entered), "measuring", progress):
        trial = outcome.job
        if not trial.final:
            results[trial] = outcome.value or {"status": outcome.failure}
            continue
        finals[trial.shape, len(trial.problem.lengths)] = outcome
        if outcome.failure is None:
            write_rows(path, [{"gpu": gpu} | table_row(trial, outcome.value["us"]) | origin])
    return [_result_row(trial, results[trial], finals.get(key)) for key, mine in entered.items() for trial in mine]


def make_problem(
    geometry: Geometry, batch: int, seqlen: int | None, page_size: int, dtype: str, device: torch.device
) -> Problem:
    """The call that a geometry is timed with; S_q is what is compiled for it.

    Raises:
        ValueError: no kernel serves it.
    """
    if len(geometry) not in (4, 5):
        raise ValueError(f"geometry is {geometry}; expected (H, G, d_c, d_r) or (H, G, d_c, d_r, S_q)")
    mla, seqlen_q = MLAGeometry(*geometry[:4]), geometry[4] if len(geometry) == 5 else 1
    why = explain_mla_decode(mla, page_size, getattr(torch, dtype), device, seqlen_q)
    if why is not None:
        raise ValueError(f"geometry {','.join(map(str, geometry))}: {why}")
    shape = decode_shape(mla, page_size, getattr(torch, dtype), seqlen_q)
    if seqlen is None:
        size = CACHE_BYTES if batch >= 16 else SMALL_CACHE_BYTES
        seqlen = max(1, math.ceil(size / (batch * mla.cache_bytes_per_token(2)) / 1024)) * 1024
    return Problem(*geometry[:4], (seqlen,) * batch, page_size=page_size, seqlen_q=shape.seqlen_q, slack=0)


def choose_finalists(trials: Sequence[Trial], results: dict[Trial, dict[str, Any]]) -> Trial | None:
    """The fastest right ones of a shape and the rule's choice if it is right, to be timed in turn; None if there are
    none."""
    right = sorted((trial for trial in trials if results[trial]["status"] == "ok"), key=lambda t: results[t]["us"][0])
    if not right:
        return None
    last = right[:FINALISTS] + [trial for trial in right[FINALISTS:] if trial.candidates[0].rule]
    return Trial(right[0].problem, right[0].dtype, tuple(trial.candidates[0] for trial in last), final=True)


def choose_winner(final: Trial, us: Sequence[float]) -> int:
    """Place of the fastest candidate; of the rule's choice if that is slower by no more than :data:`MARGIN`."""
    fastest = min(range(len(us)), key=us.__getitem__)
    rule = next((place for place, candidate in enumerate(final.candidates) if candidate.rule), fastest)
    return rule if us[rule] <= us[fastest] * (1 + MARGIN) else fastest


def table_row(final: Trial, us: Sequence[float]) -> dict[str, Any]:
    """A row of the table, without the GPU and where the numbers come from."""
    winner = choose_winner(final, us)
    rule = next((time for candidate, time in zip(final.candidates, us, strict=True) if candidate.rule), None)
    return {
        **shape_fields(final.shape),
        **configuration(final.candidates[winner].choice),
        "us": round(us[winner], 2),
        "rule_us": None if rule is None else round(rule, 2),
        "batch": len(final.problem.lengths),
        "seqlen": final.problem.lengths[0],
    }


def compile_candidate(job: tuple[DecodeShape, KernelChoice, int, int, int]) -> None:
    """Puts all that a candidate launches into TileLang's disk cache. ``job`` is (shape, choice, CTAs, batch, compute
    capability)."""
    from mha2mla.kernels.mla_decode.launch import compile_choice
    from mha2mla.kernels.split_kv.launch import compile_merge, compile_planner, merge_splits

    shape, choice, num_ctas, batch, major_minor = job
    compile_planner(major_minor)
    compile_choice(shape, choice, major_minor)
    compile_merge(shape.heads, shape.kv_lora_rank, shape.dtype, merge_splits(num_ctas, batch), major_minor)


def compile_all(trials: Sequence[Trial], major_minor: int, *, timeout: float, progress: bool) -> dict[Trial, str]:
    """Compiles in parallel; why a trial's candidate could not be compiled, for those that could not."""
    jobs = {}
    for trial in trials:
        (candidate,) = trial.candidates
        jobs[trial.shape, candidate.choice, candidate.num_ctas, len(trial.problem.lengths), major_minor] = trial
    outcomes = run_in_workers(compile_candidate, list(jobs), workers=processes_for(len(jobs)), timeout=timeout)
    bar = progress_bar(outcomes, len(jobs), "compiling", progress)
    return {jobs[outcome.job]: outcome.failure for outcome in bar if outcome.failure is not None}


@torch.inference_mode()
def measure(trial: Trial, device: str, capability: int, min_run_time: float) -> dict[str, Any]:
    """Runs in a worker: ``status`` and, if that is "ok", ``us``, the median of each candidate with a cold L2."""
    with torch.cuda.device(device):
        calls = []
        for candidate in trial.candidates:
            call, out, lse = prepared_call(trial.problem, trial.dtype, candidate, device, capability)
            calls.append(call)
            if not trial.final:
                call()
                judgement = verdict(out, lse, *expected_of(trial.problem, trial.dtype, device))
                if not judgement.ok:
                    return {"status": f"wrong: {judgement.reason}"}
        rounds = ROUNDS if trial.final else 1
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, mine in zip(calls, times, strict=True):
                mine.append(time_callable(call, device, min_run_time=min_run_time, graph=False).p50)
        return {"status": "ok", "us": [statistics.median(mine) for mine in times]}


def prepared_call(
    problem: Problem, dtype: str, candidate: Candidate, device: str, capability: int
) -> tuple[Callable[[], None], Tensor, Tensor]:
    """What launches a candidate, planned for the problem over poisoned buffers, and the out and lse that it fills."""
    inputs, plan = _prepared(problem, dtype, device)
    mine = plan_for(plan, candidate.num_ctas)
    for workspace in (mine.partial_out, mine.partial_lse):
        workspace.fill_(torch.nan)
    mine.schedule.fill_(UNUSED_PAGE)
    mine.refresh(inputs["cache_seqlens"], inputs["cache_starts"])
    out = torch.full_like(inputs["q_latent"], torch.nan)
    batch, seqlen_q, heads, _ = out.shape
    lse = torch.full((batch, heads, seqlen_q), torch.nan, dtype=torch.float32, device=device)
    return launcher(problem.shape(dtype), candidate.choice, capability, inputs, mine, out, lse), out, lse


@lru_cache(maxsize=1)
def _prepared(problem: Problem, dtype: str, device: str) -> tuple[dict[str, Any], DecodePlan]:
    """Inputs of a shape and a plan to take buffers after; kept while a worker measures the shape."""
    inputs = problem.inputs(getattr(torch, dtype), device)
    return inputs, problem.plan(inputs, "tilelang")


@lru_cache(maxsize=1)
def expected_of(problem: Problem, dtype: str, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What an output is compared with: the same for every configuration of the shape."""
    inputs, _ = _prepared(problem, dtype, device)
    return expected(inputs, **problem.visibility)


def launcher(
    shape: DecodeShape,
    choice: KernelChoice,
    capability: int,
    inputs: dict[str, Any],
    plan: DecodePlan,
    out: Tensor,
    lse: Tensor,
) -> Callable[[], None]:
    """A call that launches a choice's decode kernel and the combine kernel, as ``launch.launch_mla_decode`` does with
    the kernel that dispatch chooses."""
    from mha2mla.kernels.mla_decode.launch import compile_choice
    from mha2mla.kernels.split_kv.launch import NO_WINDOW, compile_merge, merge_splits

    split = compile_choice(shape, choice, capability)
    splits = merge_splits(plan.num_ctas, plan.splits.shape[0])
    merge = compile_merge(shape.heads, shape.kv_lora_rank, shape.dtype, splits, capability)
    arguments = (
        inputs["q_latent"],
        inputs["q_pe"],
        inputs["latent_cache"],
        inputs["rope_cache"].flatten(2),
        inputs["block_table"],
        plan.schedule,
        plan.partial_out,
        plan.partial_lse,
        out,
        lse,
        inputs["softmax_scale"],
        int(inputs["causal"]),
        NO_WINDOW if plan.window is None else plan.window,
        plan.sinks,
    )

    def call() -> None:
        split(*arguments)
        merge(plan.splits, plan.partial_out, plan.partial_lse, out, lse)

    return call


def _result_row(trial: Trial, result: dict[str, Any], final: Outcome | None) -> dict[str, Any]:
    (candidate,) = trial.candidates
    problem, choice = trial.problem, candidate.choice
    row = {
        **problem.columns,
        "dtype": trial.dtype,
        "batch": len(problem.lengths),
        "seqlen": problem.lengths[0],
        "MB": problem.cache_bytes() / 1e6,
        **configuration(choice),
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
