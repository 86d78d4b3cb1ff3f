"""Decode over layout latent on a GPU: rotary keys computed whenever they are read, or kept in 16 and in 8 bits.

    python benchmarks/rotary_keys.py --json benchmarks/results/h200-rotary-keys.json
    python benchmarks/rotary_keys.py --only "512+128,192+128"

A row is one decode call over 64 sequences, 300 MB with kept keys. All ways are checked against float64 first. The limit
of a way reads its cache once at R; "share" is limit over time, with a dirty L2. ``whole_models.py`` has whole steps.
"""

from __future__ import annotations

import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Row, beside, decode_jobs, measure_decode, read_rate
from benchmarks.peers import Peer
from benchmarks.recording import Recording, command
from benchmarks.shapes import SpeedCase, decode_case
from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import mla_decode
from mha2mla.kernels.mla_decode.cost import kept_key_bits
from mha2mla.kernels.parallel_compilation import CompileJob, compile_in_processes, compile_launches
from mha2mla.testing.problems import KeyCodesProblem, LatentProblem, Problem

WAYS = {"computed": "none", "kept": "bfloat16", "kept8": "int8"}  # rotary_key_cache
KEPT = {"kept": Problem, "kept8": KeyCodesProblem}
WIDTHS = ((512, 64), (1024, 64), (512, 128), (192, 128))  # d_c, d_r
HEADS = (9, 28, 40)
OP_BYTES, OP_BATCH = 300e6, 64
COLUMNS = (
    "level", "shape", "H", "batch", "context", "auto", *(
        f"{way}_{key}" for key in ("MB", "us", "limit_us", "share", "graph_share", "error") for way in WAYS
    ), "gain", "gain8", "status",
)  # fmt: skip


def op_problem(heads: int, d_c: int, d_r: int, batch: int = OP_BATCH, size: float = OP_BYTES) -> LatentProblem:
    """A call over the latent alone, as long as ``size`` bytes with kept keys allow, in whole pages."""
    length = max(1, int(size / (2 * (d_c + d_r) * batch) / 64)) * 64
    return LatentProblem(heads, 1, d_c, d_r, (length,) * batch, slack=0)


def with_kept_keys(problem: LatentProblem, way: str = "kept") -> Problem:
    """The same call over stored keys."""
    return KEPT[way](**{field.name: getattr(problem, field.name) for field in fields(Problem)})


def peers_of(case: SpeedCase, inputs: dict[str, Any], expected: torch.Tensor) -> dict[str, Peer]:
    """The calls over kept keys."""
    return {way: beside(with_kept_keys(case.problem, way), inputs["q_latent"].device) for way in KEPT}


def op_row(problem: LatentProblem, rate: float, min_run_time: float, device: str) -> Row:
    """All ways of a decode call; ``rate``: R, bytes per second."""
    found = measure_decode(mla_decode, peers_of, decode_case(problem), True, min_run_time, device)
    wrong = next((f"{way}: {found[way]}" for way in KEPT if isinstance(found.get(way), str)), None)
    width = f"{problem.kv_lora_rank}+{problem.qk_rope_head_dim}"
    row: Row = {"level": "op", "shape": width, "H": problem.heads, "batch": len(problem.lengths)}
    row |= {"context": problem.lengths[0], "status": wrong or found["status"], "computed_error": found["error"]}
    for way in WAYS:
        each = problem if way == "computed" else with_kept_keys(problem, way)
        us, graph = (found.get(key) for key in (("us", "us_graph_warm") if each is problem else (way, f"{way}_graph")))
        us, graph = (None, None) if isinstance(us, str) else (us, graph)
        row |= {f"{way}_MB": each.cache_bytes() / 1e6, f"{way}_limit_us": (limit := each.cache_bytes() / rate * 1e6)}
        row |= {} if us is None else {f"{way}_us": us, f"{way}_share": limit / us}
        row |= {} if graph is None else {f"{way}_graph_share": limit / graph}
    return row


def jobs() -> list[CompileJob]:
    """Kernels of the decode calls of all rows, for this machine's GPU."""
    problems = [op_problem(heads, *widths) for heads in HEADS for widths in WIDTHS]
    problems += [with_kept_keys(problem, way) for problem in problems for way in KEPT]
    return [job for problem in problems for job in decode_jobs(decode_case(problem))]


def rotary_keys(
    only: str | None = None,
    min_run_time: float = 0.1,
    budget: float = 170.0,
    json: str | None = None,
) -> bool:
    """Checks and times decode calls with computed and with kept rotary keys, these in 16 and in 8 bits.

    Args:
        only: rows whose name ("512+64") contains this, or one of these, separated by commas.
        min_run_time: seconds for each way of each row.
        budget: seconds after which nothing more is begun.
        json: also write every row to this file.

    Returns:
        Whether every row that was reached is right.
    """
    until, device = time.monotonic() + budget, "cuda:0"

    def is_wanted(name: str) -> bool:
        return time.monotonic() < until and (only is None or any(part in name for part in only.split(",")))

    failures = compile_in_processes(compile_launches, jobs())
    rate = read_rate()
    table = Recording("rotary-keys", json, **rate, not_compiled=list(failures.values()))
    for d_c, d_r in WIDTHS:
        for heads in HEADS:
            if is_wanted(f"{d_c}+{d_r}"):
                row, problem = {"level": "op", "shape": f"{d_c}+{d_r}", "H": heads}, op_problem(heads, d_c, d_r)
                try:
                    row = op_row(problem, rate["R"], min_run_time, device)
                except Exception as error:  # of TileLang or CUDA: other rows go on
                    row["status"] = f"{type(error).__name__}: {error}"
                add(table, row, problem.geometry)
    title = f"rotary keys computed, and kept in 16 and 8 bits; R = {rate['R'] / 1e12:.2f} TB/s ({rate['R_from']})"
    return table.show(title, [column for column in COLUMNS if any(column in row for row in table.rows)])


def add(table: Recording, row: Row, layer: MLAGeometry) -> None:
    """Puts a row into the table, with what "auto" would take and how many times faster kept keys are."""
    row["auto"] = {0: "computed", 8: "kept8", 16: "kept"}[kept_key_bits((layer,))]
    for way, gain in zip(KEPT, ("gain", "gain8"), strict=True):
        if f"{way}_us" in row and "computed_us" in row:
            row[gain] = row["computed_us"] / row[f"{way}_us"]
    table.add(row)


if __name__ == "__main__":
    sys.exit(command(rotary_keys))
