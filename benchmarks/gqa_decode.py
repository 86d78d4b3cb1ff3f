"""Decode of MHA and GQA models on a GPU: the op beside FlashAttention-3 on the same pages.

    python benchmarks/gqa_decode.py speed --json benchmarks/results/h200-gqa-decode.json
    python benchmarks/gqa_decode.py variants --only "H32 G32"     # every configuration that fits, timed

``runner.py`` says what the numbers are; ``shapes.py`` has the cases.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import decode_jobs, measure_decode
from benchmarks.peers import Peer, flash_attention_3_gqa
from benchmarks.recording import command
from benchmarks.runner import Benchmark, run, speed_of
from benchmarks.shapes import SpeedCase, choose, gqa_cases
from mha2mla.kernel_testing.compiling import compile_launches
from mha2mla.kernels import gqa_decode
from mha2mla.kernels.devices import capability
from mha2mla.kernels.gqa_decode.selection import list_kernels


def peers_of(case: SpeedCase, inputs: dict[str, Any], expected: torch.Tensor) -> dict[str, Peer]:
    return {"FA3_us": flash_attention_3_gqa(case.problem, inputs, expected)}


measure = partial(measure_decode, gqa_decode, peers_of)
BENCHMARK = Benchmark(
    kind="gqa-decode-speed",
    title="gqa_decode, bfloat16, page 64, µs with cold L2",
    measure=measure,
    compile=compile_launches,
    jobs=decode_jobs,
    peers=("FA3_us",),
)
speed = speed_of(BENCHMARK, gqa_cases)


def variants(
    only: str | None = None,
    json: str | None = None,
    most: int = 6,
    min_run_time: float = 0.1,
    budget: float | None = None,
) -> bool:
    """Times the first configurations of the rule's list on every shape; arguments as of :func:`speed`.

    Args:
        most: configurations per shape at most.
    """
    here = capability(torch.device("cuda:0"))
    cases = [
        replace(case, choice=choice)
        for case in choose(gqa_cases(), only)
        for choice in list_kernels(case.problem.shape(), here)[:most]
    ]
    return run(BENCHMARK, cases, peers=False, min_run_time=min_run_time, json=json, budget=budget)


if __name__ == "__main__":
    sys.exit(command(speed, variants))
