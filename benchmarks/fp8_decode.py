"""The e4m3 latent cache on a GPU: error and speed of decode, beside bfloat16 in the same run.

    python benchmarks/fp8_decode.py --json benchmarks/results/h200-fp8-decode.json

``error`` is against float64 over the cache as it is stored, ``of original`` over the cache before it was rounded to
e4m3, ``bf16 error`` what the bfloat16 op has there. ``gain`` is the bfloat16 op's time through the fp8 op's, for the
same tokens. ``runner.py`` says what the numbers are.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Row, check_then_time, decode_jobs
from benchmarks.recording import command
from benchmarks.runner import Benchmark, speed_of
from benchmarks.shapes import SpeedCase, fp8_cases
from mha2mla.kernel_testing.compiling import CompileJob, compile_launches
from mha2mla.kernel_testing.judgement import errors
from mha2mla.kernel_testing.problems import exact, judge
from mha2mla.kernels import dequantize_latent, mla_decode, plan_mla_decode, quantize_latent
from mha2mla.kernels.mla_decode.api import FP8, MLA


def jobs(case: SpeedCase) -> list[CompileJob]:
    """Of the fp8 op and of the bfloat16 op beside it."""
    return [job for op in (FP8, MLA) for job in decode_jobs(case, op)]


@torch.inference_mode()
def measure(case: SpeedCase, peers: bool, min_run_time: float, device: str = "cuda") -> Row:
    """One shape's row: both ops checked, then timed in turn. On a CPU these are the references."""
    problem = case.problem
    inputs = problem.inputs(torch.bfloat16, device)
    codes, scale = quantize_latent(inputs["latent_cache"])
    stored = inputs | {"latent_cache": codes, "latent_scale": scale}
    plan = problem.plan(inputs)
    plan_fp8 = plan_mla_decode(
        inputs["q_latent"], inputs["rope_cache"], inputs["block_table"], inputs["cache_seqlens"],
        qk_rope_head_dim=problem.qk_rope_head_dim, latent_dtype=codes.dtype,
    )  # fmt: skip
    out, lse = mla_decode(**stored, plan=plan_fp8, return_lse=True)
    judgement = judge(inputs | {"latent_cache": dequantize_latent(codes, scale, torch.float64)}, out, lse)
    original, _ = exact(inputs)
    plain = mla_decode(**inputs, plan=plan)
    small, large = problem.cache_bytes() - problem.tokens_seen() * (problem.kv_lora_rank - 4), problem.cache_bytes()
    row: Row = {"name": case.name, "MB": small / 1e6, "MB_bf16": large / 1e6}
    row |= {"original_error": errors(out, original)[0], "bf16_error": errors(plain, original)[0]}
    del original
    row = check_then_time(
        row, judgement, partial(mla_decode, **stored, plan=plan_fp8, out=out),
        lambda: {"bf16_us": partial(mla_decode, **inputs, plan=plan, out=plain)} if peers else {}, device, min_run_time,
        cache_bytes=small,
    )  # fmt: skip
    if "bf16_us" in row:
        row["gain"] = row["bf16_us"] / row["us"]
        both = row["us_graph_warm"], row["bf16_us_graph"]
        row["gain_graph"] = None if None in both else both[1] / both[0]
    return row


BENCHMARK = Benchmark(
    kind="fp8-decode-speed",
    title="mla_decode over an fp8 latent cache beside bfloat16",
    measure=measure,
    compile=compile_launches,
    jobs=jobs,
)
speed = speed_of(BENCHMARK, fp8_cases)


if __name__ == "__main__":
    sys.exit(command(speed))
