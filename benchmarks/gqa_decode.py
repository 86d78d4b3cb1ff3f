"""Decode of MHA and GQA models on a GPU: the op beside FlashAttention-3 on the same pages.

    python benchmarks/gqa_decode.py speed --json benchmarks/results/h200-gqa-decode.json

``runner.py`` says what the numbers are; ``shapes.py`` has the cases.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import decode_jobs, measure_decode
from benchmarks.peers import Peer, flash_attention_3_gqa
from benchmarks.recording import command
from benchmarks.runner import Benchmark, speed_of
from benchmarks.shapes import SpeedCase, gqa_cases
from mha2mla.kernel_testing.compiling import compile_launches
from mha2mla.kernels import gqa_decode


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


if __name__ == "__main__":
    sys.exit(command(speed))
