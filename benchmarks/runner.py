"""The one loop of the speed benchmarks: compile, check and time each case in a process of its own, print and write.

A speed is printed only after the same inputs, poisoned wherever nobody may look, gave the right result. The main number
is the median with a cold L2: ``triton.testing.do_bench`` zeroes a buffer before each run, so a part of the L2 cache is
dirty and is written back during the run, for every implementation alike. Plans are made before and timed apart, as a
decode step makes one for all its layers. Shares are of R, the rate at which FlashAttention-3 reads a 2 GB cache in MHA
decode in the same run. ``peers.py`` says where other implementations come from.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks.measuring import Row, read_rate, start_measuring
from benchmarks.recording import Recording
from benchmarks.shapes import SpeedCase, choose, target_us
from mha2mla.environment import describe_environment
from mha2mla.eval.report import print_table
from mha2mla.kernels.parallel_compilation import compile_in_processes, run_in_workers

TIMEOUT = 240.0  # seconds for one case, peers included
PIPE_WIDTH = 260  # width of the table outside a terminal
# Columns of every benchmark's table, in this order; those of no row are left out.
COLUMNS = (
    "preset", "cache_ratio", "loss", "name", "beside", "MB", "MB_bf16", "kernel", "rows",
    "num_stages", "ctas_per_sm", "num_ctas", "splits", "error", "torch_error", "us_p20",
    "us", "us_p80", "stored_us", "bf16_us", "ratio", "us_graph_warm", "stored_us_graph", "bf16_us_graph",
    "codes8_us", "kept_us", "kept8_us", "computed_us", "copy_us", "copy_computed_us", "codes_computed_us",
    "codes3_computed_us", "codes2_computed_us", "codes8_computed_us", "e4m3_us", "e4m3_computed_us", "source_us",
    "of_kept", "of_source", "plan_us", "TB/s", "share", "TFLOP/s", "target_us", "met", "FlashMLA_us", "FA3_MLA_us",
    "Triton_us", "FA3_us", "FA3_varlen_us", "FA3_batch_us", "torch_us", "of_FA3", "FA3_MHA_us", "status",
)  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """A table of speeds.

    Attributes:
        kind: of its JSON file.
        title: of its table.
        measure: case, whether to time other implementations, seconds for each → row; runs in a worker.
        compile: job → None; puts the kernels of a job into TileLang's disk cache; runs in a worker.
        jobs: case → what has to be compiled for it. Raises ValueError where no kernel serves it.
        peers: keys of other implementations: microseconds, or "missing: why".
        reads_cache: whether R is what its times are compared with.
    """

    kind: str
    title: str
    measure: Callable[[SpeedCase, bool, float], Row]
    compile: Callable[[Any], None]
    jobs: Callable[[SpeedCase], Sequence[Any]]
    peers: tuple[str, ...] = ()
    reads_cache: bool = True


def run(
    benchmark: Benchmark,
    cases: Sequence[SpeedCase],
    *,
    peers: bool = True,
    min_run_time: float = 0.3,
    json: str | None = None,
    budget: float | None = None,
) -> bool:
    """Measures the cases, prints their table, and says whether every one that was reached is right.

    Args:
        peers: time the other implementations too.
        min_run_time: seconds of cold-L2 runs per implementation and case.
        json: also write every row to this file, after each case: a run that is cut short keeps what it has.
        budget: seconds for all; None: no limit.
    """
    table = Recording(benchmark.kind, json, compile_seconds=0.0)
    until = None if budget is None else time.monotonic() + budget
    rows: dict[SpeedCase, Row] = {}
    said = table.fields

    def jobs() -> Iterator[SpeedCase | None]:
        began = time.perf_counter()
        broken = _compile(benchmark, cases)
        said["compile_seconds"] = time.perf_counter() - began
        rows.update({case: {"name": case.name, "status": why} for case, why in broken.items()})
        if benchmark.reads_cache:
            yield None
        yield from (case for case in cases if case not in rows)

    work = partial(_work, measure=benchmark.measure, peers=peers, min_run_time=min_run_time)
    outcomes = run_in_workers(work, jobs(), timeout=TIMEOUT, until=until, prepare=start_measuring)
    for outcome in tqdm(outcomes, total=len(cases) + benchmark.reads_cache, desc="timing", disable=None):
        if outcome.job is None:
            said |= outcome.value or {"R": None, "R_from": f"missing: {outcome.failure}"}
        else:
            row = rows[outcome.job] = outcome.value or {"name": outcome.job.name, "status": outcome.failure}
            tqdm.write(f"{row['name']}: {row.get('us') or row['status']} ({outcome.seconds:.1f} s)")
        table.rows = with_targets(cases, rows, said.get("R"))
        table.write()
    table.rows = with_targets(cases, rows, said.get("R"))
    _show(benchmark, table, len(cases))
    return all(row["status"] == "ok" for row in table.rows)


def _compile(benchmark: Benchmark, cases: Sequence[SpeedCase]) -> dict[SpeedCase, str]:
    """Why a case's kernels could not be compiled, for those whose could not."""
    broken, wanted = {}, {}
    for case in cases:
        try:
            wanted[case] = benchmark.jobs(case)
        except ValueError as error:
            broken[case] = f"not compiled: {error}"
    failures = compile_in_processes(benchmark.compile, [job for jobs in wanted.values() for job in jobs])
    failed = {case: [failures[job] for job in jobs if job in failures] for case, jobs in wanted.items()}
    return broken | {case: whys[0] for case, whys in failed.items() if whys}


def _work(case: SpeedCase | None, *, measure: Callable[..., Row], peers: bool, min_run_time: float) -> Row:
    """One case's row, or for None the read rate R; runs in a worker."""
    return read_rate() if case is None else measure(case, peers, min_run_time)


def with_targets(cases: Sequence[SpeedCase], rows: Mapping[SpeedCase, Row], rate: float | None) -> list[Row]:
    """The rows measured so far in the order of ``cases``, with their share of R and their targets."""
    by_name = {case.name: row for case, row in rows.items()}
    table = []
    for case in cases:
        if case not in rows:
            continue
        row = dict(rows[case])
        if "us" in row:
            if rate and "TB/s" in row:
                row["share"] = row["TB/s"] * 1e12 / rate
            row["target_us"] = target_us(case, row, by_name, rate)
            row["met"] = None if row["target_us"] is None else row["us"] <= row["target_us"]
        table.append(row)
    return table


def _show(benchmark: Benchmark, recording: Recording, wanted: int) -> None:
    table, said = recording.rows, recording.fields
    title = benchmark.title
    if benchmark.reads_cache:
        rate = said.get("R")
        title += f"; R = {'not measured' if rate is None else f'{rate / 1e12:.2f} TB/s'} ({said.get('R_from')})"
    absent = [{key: row[key] for key in benchmark.peers if isinstance(row.get(key), str)} for row in table]
    print_table(
        [row | dict.fromkeys(mine, "missing") for row, mine in zip(table, absent, strict=True)],
        title=title,
        columns=[key for key in COLUMNS if any(row.get(key) is not None for row in table)],
        caption=f"{describe_environment(recording.environment)} · compiled in {said['compile_seconds']:.0f} s",
        console=None if sys.stdout.isatty() else Console(width=PIPE_WIDTH),
    )
    missing = collections.Counter(f"{key} {why}" for mine in absent for key, why in mine.items())
    for why, count in missing.items():
        print(f"{why} ({count} shapes)")
    asked = [row for row in table if row.get("met") is not None]
    print(f"targets met: {sum(row['met'] for row in asked)} of {len(asked)}")
    if len(table) < wanted:
        print(f"not reached within the budget: {wanted - len(table)} of {wanted}")


def speed_of(benchmark: Benchmark, cases: Callable[[], list[SpeedCase]], verb: str = "speed") -> Callable[..., bool]:
    """The verb of that name of a benchmark's command line."""

    def speed(
        only: str | None = None,
        json: str | None = None,
        peers: bool = True,
        min_run_time: float = 0.3,
        budget: float | None = None,
    ) -> bool:
        """Times every case, and beside it the other implementations.

        Args:
            only: measure cases whose name contains this, or one of these, separated by commas, and those that their
                targets refer to.
            json: also write every row to this file.
            peers: time the other implementations too.
            min_run_time: seconds of cold-L2 runs per implementation and case.
            budget: seconds for all.
        """
        chosen = choose(cases(), only)
        return run(benchmark, chosen, peers=peers, min_run_time=min_run_time, json=json, budget=budget)

    speed.__name__ = verb
    return speed
