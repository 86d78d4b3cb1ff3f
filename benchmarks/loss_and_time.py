"""Time of a decode call beside the loss of the conversion: fitted conversions on record, timed on a GPU.

    python benchmarks/loss_and_time.py --json benchmarks/results/h200-loss-and-time.json
    python benchmarks/pictures.py

Losses are those of ``benchmarks/conversion.py``'s rows; timed is the decode op of one layer at the layers' mean rank,
and the source's attention beside it. ``runner.py`` says what the numbers are.
"""

from __future__ import annotations

import json as json_format
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Row, decode_jobs, measure_decode
from benchmarks.recording import command
from benchmarks.runner import Benchmark, speed_of
from benchmarks.shapes import SpeedCase, decode_case
from mha2mla.conversion.target import LAYOUTS
from mha2mla.kernels import gqa_decode, mla_decode
from mha2mla.kernels.parallel_compilation import compile_launches
from mha2mla.testing.problems import GQAProblem, LatentProblem, Problem

RESULTS = Path(__file__).parent / "results"
CONVERSIONS = ("h200-conversion.json", "h200-conversion-latent.json")
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64  # SmolLM2-135M's, whose conversions these are
LENGTHS = (8192,) * 64


def conversions() -> dict[SpeedCase, Row]:
    """The decode call of each fitted conversion on record and of the source, with what is known of it: ``preset``,
    ``cache_ratio``, and ``loss``, the ratio in windows of 8192 tokens on the text that loses most."""
    source = GQAProblem(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, LENGTHS, slack=0)
    found = {decode_case(source): {"preset": "source", "cache_ratio": 1.0, "loss": 1.0}}
    rows = (row for file in CONVERSIONS for row in json_format.loads((RESULTS / file).read_text("utf-8"))["rows"])
    for row in rows:
        share, _, layout = row["name"].partition(" ")
        if layout in LAYOUTS and row["status"] == "ok":
            groups, rope, rank = map(int, re.findall(r"\d+", row["geometry"]))
            kind = LatentProblem if LAYOUTS[layout].rope_from_latent else Problem
            case = decode_case(kind(HEADS, groups, rank, rope, LENGTHS, slack=0))
            found[case] = {"preset": layout, "cache_ratio": float(share), "loss": row["8192"]}
    return found


def measure(case: SpeedCase, peers: bool, min_run_time: float, device: str = "cuda:0") -> Row:
    decode = gqa_decode if isinstance(case.problem, GQAProblem) else mla_decode
    return conversions()[case] | measure_decode(decode, lambda *_: {}, case, False, min_run_time, device)


BENCHMARK = Benchmark(
    kind="loss-and-time",
    title="Decode of one layer of SmolLM2-135M and what its conversion lost, bfloat16, page 64, µs with cold L2",
    measure=measure,
    compile=compile_launches,
    jobs=decode_jobs,
)


speed = speed_of(BENCHMARK, lambda: list(conversions()))

if __name__ == "__main__":
    sys.exit(command(speed))
