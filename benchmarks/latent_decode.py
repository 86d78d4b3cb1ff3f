"""Decode over a cache of the latent alone on a GPU, beside the op over stored rotary keys at equal bytes.

    python benchmarks/latent_decode.py speed --json benchmarks/results/h200-latent-decode.json
    python benchmarks/latent_decode.py speed --only "H32,H9"
    python benchmarks/latent_decode.py codes         # e4m3 latents, beside 16-bit ones of as many tokens

Both forms read as many bytes: d_c numbers a token, or d_c' + d_r' of them. Both are checked against float64, and timed
in turn in one process. ``runner.py`` says what the numbers are; ``loss_and_time.py`` times what loses as much.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Row, clean, decode_jobs, measure_decode
from benchmarks.peers import Peer
from benchmarks.recording import command
from benchmarks.runner import Benchmark, speed_of
from benchmarks.shapes import SpeedCase, Target, decode_case
from mha2mla.kernels import mla_decode
from mha2mla.kernels.parallel_compilation import CompileJob, compile_launches
from mha2mla.testing.problems import LatentProblem, Problem, judge

# H, d_c, d_r, tokens of each of 64 sequences (256 MB and more), times the stored form's time at most, or of R at least
TELLING = (
    (32, 512, 64, 4096, 1.15),
    (32, 512, 64, 16384, 1.15),
    (64, 512, 64, 4096, 1.6),
    (9, 192, 128, 12288, 1.2),  # SmolLM2 at half its cache
    (9, 120, 128, 18432, 1.2),
    (16, 192, 64, 12288, 1.2),
    (16, 256, 64, 8192, 1.2),
    (16, 384, 96, 6144, 1.2),
    (32, 1024, 32, 4096, 0.55),  # 8 kv heads of 128 at half their cache
    (32, 1024, 64, 4096, 0.55),
    (32, 1024, 128, 4096, 0.55),
    (32, 512, 128, 4096, 1.15),
)
CODES = tuple((h, d_c, d_r, n) for h, d_c, d_r, n, _ in TELLING if d_c % 16 == 0 and d_c <= 512 and d_r * d_c < 65536)


def code_cases() -> list[SpeedCase]:
    return [decode_case(LatentProblem(h, 1, d_c, d_r, (n,) * 64, slack=0, codes=True)) for h, d_c, d_r, n in CODES]


def cases() -> list[SpeedCase]:
    return [
        decode_case(
            LatentProblem(h, 1, d_c, d_r, (n,) * 64, slack=0),
            Target(share=limit) if limit < 1 else Target(peers=(("stored_us",), limit)),
        )
        for h, d_c, d_r, n, limit in TELLING
    ]


def stored_form(problem: LatentProblem) -> Problem:
    """The stored form of as many elements, up to a third of them rotary keys; beside codes, 16-bit latents."""
    if problem.codes:
        return replace(problem, codes=False)
    kept = min(problem.qk_rope_head_dim, problem.kv_lora_rank // 24 * 8)
    return Problem(problem.heads, 1, problem.kv_lora_rank - kept, kept, problem.lengths, slack=0)


def peers_of(case: SpeedCase, inputs: dict[str, Any], expected: torch.Tensor) -> dict[str, Peer]:
    """The stored form, on inputs of its own."""
    stored, device = stored_form(case.problem), inputs["q_latent"].device
    backend = "reference" if device.type == "cpu" else "tilelang"
    mine = stored.inputs(torch.bfloat16, device)
    plan, out = stored.plan(mine, backend), torch.empty_like(mine["q_latent"])
    call = partial(mla_decode, **mine, plan=plan, out=out, backend=backend)
    judgement = judge(mine, *call(return_lse=True))
    if not judgement.ok:
        return {"stored_us": f"missing: wrong result: {judgement.reason}"}
    clean(mine)
    return {"stored_us": call}


def measure(case: SpeedCase, peers: bool, min_run_time: float, device: str = "cuda:0") -> Row:
    row = measure_decode(mla_decode, peers_of, case, peers, min_run_time, device)
    stored = stored_form(case.problem)
    row["stored"] = "16-bit latent" if case.problem.codes else f"{stored.kv_lora_rank} + {stored.qk_rope_head_dim}"
    if isinstance(row.get("stored_us"), float):
        row["ratio"] = row["us"] / row["stored_us"]
    return row


def jobs(case: SpeedCase) -> list[CompileJob]:
    return decode_jobs(case) + decode_jobs(decode_case(stored_form(case.problem)))


BENCHMARK = Benchmark(
    kind="latent-decode-speed",
    title="mla_decode of the latent alone beside stored k_pe, bfloat16, page 64, µs with cold L2",
    measure=measure,
    compile=compile_launches,
    jobs=jobs,
    peers=("stored_us",),
)


speed, codes = speed_of(BENCHMARK, cases), speed_of(BENCHMARK, code_cases, "codes")

if __name__ == "__main__":
    sys.exit(command(speed, codes))
