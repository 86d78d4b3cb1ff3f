"""The decode op on a GPU: errors over a matrix of shapes, speeds beside other implementations, host time per call.

    python benchmarks/decode.py check --json benchmarks/results/h200-decode-check.json
    python benchmarks/decode.py speed --json benchmarks/results/h200-decode-speed.json
    python benchmarks/decode.py speed --only "H128"        # shapes.py has the names
    python benchmarks/decode.py host --profile true

``runner.py`` says what the numbers of ``speed`` are. Everything that may hang runs in a process of its own, under a
time-out.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import decode_jobs, measure_decode
from benchmarks.peers import Peer, flash_attention_3_mha, mla_peers
from benchmarks.recording import Recording, command
from benchmarks.runner import Benchmark, speed_of
from benchmarks.shapes import MLA_PEERS, SpeedCase, decode_case, decode_cases
from mha2mla.eval.report import write_json
from mha2mla.kernel_testing.cases import Case
from mha2mla.kernel_testing.check import check_cases
from mha2mla.kernel_testing.compiling import compile_launches
from mha2mla.kernel_testing.problems import Problem
from mha2mla.kernels import mla_decode

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


def check(json: str | None = None) -> bool:
    """Errors against float64, beside torch's at bfloat16, of heads x rope heads x page x lengths.

    Args:
        json: also write every row to this file.
    """
    cases = matrix()
    rows = check_cases(cases, torch.device("cuda"))
    labels = {max(lengths): label for label, lengths in LENGTHS.items()}
    summary = Recording("decode-check")
    for group in range(len(cases) // len(LENGTHS)):
        mine = [row for row in rows if row["group"] == group]
        measured = [row for row in mine if "error" in row]
        worst = max(measured, key=lambda row: row["error"] / max(row["torch_error"], 1e-12), default={})
        summary.rows.append(
            {key: mine[0][key] for key in ("H", "G", "d_c", "d_r", "page", "kernel")}
            | {labels[row["longest"]]: row["error"] for row in measured}
            | {
                "torch_worst": worst.get("torch_error"),
                "lse": max((row["lse_error"] for row in measured), default=None),
            }
            | {"status": next((row["status"] for row in mine if row["status"] != "ok"), "ok")}
        )
    summary.show("error against float64 (bfloat16)")
    wrong = sum(row["status"] != "ok" for row in rows)
    print(f"{len(summary.rows)} geometries, {len(rows)} calls; not right: {wrong}")
    if json:
        write_json(json, kind="decode-check", rows=rows, environment=summary.environment)
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


def peers_of(case: SpeedCase, inputs: dict[str, Any], expected: torch.Tensor) -> dict[str, Peer]:
    """Of the call itself; and the attention of the MHA model behind it."""
    problem = case.problem
    peers = mla_peers(problem, inputs, expected)
    if case.mha_head_dim is not None:
        batch, length = len(problem.lengths), problem.lengths[0]
        peers["FA3_MHA_us"] = flash_attention_3_mha(problem.heads, case.mha_head_dim, batch, length)
    return peers


measure = partial(measure_decode, mla_decode, peers_of)
BENCHMARK = Benchmark(
    kind="decode-speed",
    title="mla_decode, bfloat16, µs with cold L2",
    measure=measure,
    compile=compile_launches,
    jobs=decode_jobs,
    peers=(*MLA_PEERS, "FA3_MHA_us"),
)
speed = speed_of(BENCHMARK, decode_cases)


@torch.inference_mode()
def host(profile: bool = False, json: str | None = None, calls: int = 300) -> bool:
    """Host microseconds of an eager call, on inputs so small that the GPU is never what is waited for.

    Args:
        profile: also print where the time of the calls with a plan goes.
        json: also write the rows to this file.
        calls: per row.
    """
    problems = [Problem(32, 32, 512, 16, (64,)), Problem(32, 1, 512, 64, (64,)), Problem(128, 1, 512, 64, (64,))]
    for case in map(decode_case, problems):
        for job in decode_jobs(case):
            compile_launches(job)
    table = Recording("decode-host", json, calls=calls)
    for problem in problems:
        inputs = problem.inputs(torch.bfloat16, "cuda")
        plan, out = problem.plan(inputs), torch.empty_like(inputs["q_latent"])
        ways: dict[str, Callable[[], Any]] = {
            "plan and out": lambda i=inputs, p=plan, o=out: mla_decode(**i, plan=p, out=o),
            "plan": lambda i=inputs, p=plan: mla_decode(**i, plan=p),
            "no plan": lambda i=inputs: mla_decode(**i),
            "refresh": lambda i=inputs, p=plan: p.refresh(i["cache_seqlens"], i["cache_starts"]),
        }
        row: dict[str, Any] = {"shape": decode_case(problem).name}
        for name, call in ways.items():
            row[name] = host_us(call, calls)
        table.add(row)
        if profile:
            profiler = cProfile.Profile()
            profiler.runcall(repeat, ways["plan and out"], calls)
            torch.cuda.synchronize()
            print(f"\n{row['shape']}, {calls} calls with plan and out")
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    return table.show("host µs per call, no synchronisation")


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
    sys.exit(command(check, speed, host))
