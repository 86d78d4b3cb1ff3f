"""The e4m3 latent cache on a GPU: error and speed of decode and append, beside bfloat16 in the same run.

    python benchmarks/fp8_decode.py speed --json benchmarks/results/h200-fp8-decode.json
    python benchmarks/fp8_decode.py append

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

from benchmarks.measuring import Row, check_then_time, decode_jobs, time_in_turn
from benchmarks.recording import Recording, command
from benchmarks.runner import Benchmark, speed_of
from benchmarks.shapes import SpeedCase, fp8_cases
from mha2mla.kernel_testing.compiling import CompileJob, compile_launches
from mha2mla.kernel_testing.judgement import errors
from mha2mla.kernel_testing.problems import exact, judge
from mha2mla.kernels import dequantize_latent, mla_append, mla_decode, plan_mla_decode, quantize_latent
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


@torch.inference_mode()
def append(json: str | None = None, tokens: int = 65536, device: str = "cuda", min_run_time: float = 0.3) -> bool:
    """Times ``mla_append`` into an e4m3 cache and into a bfloat16 one, and a copy of the former's bytes.

    Args:
        json: also write the rows to this file.
        tokens: new tokens of one call.
        device: where.
        min_run_time: seconds per row.
    """
    table = Recording("fp8-append", json)
    for heads, groups, d_c, d_r in ((32, 1, 512, 64), (32, 32, 512, 16)):
        make = torch.Generator(device).manual_seed(0)
        like = {"device": device, "dtype": torch.bfloat16}
        given = {
            "latent": torch.randn(tokens, d_c, generator=make, **like),
            "k_pe": torch.randn(tokens, groups, d_r, generator=make, **like),
            "q_pe": torch.randn(tokens, heads, d_r, generator=make, **like),
            "rope_cache": torch.zeros(tokens // 64 + 1, 64, groups, d_r, **like),
            "positions": torch.arange(tokens, device=device, dtype=torch.int32),
            "slots": torch.randperm(tokens, generator=make, device=device).int(),
            "inv_freq": torch.rand(groups, d_r // 2, generator=make, device=device),
        }
        pages = given["rope_cache"].shape[:2]
        codes = {
            "latent_cache": torch.zeros(*pages, d_c, device=device, dtype=torch.uint8).view(torch.float8_e4m3fn),
            "latent_scale": torch.zeros(*pages, device=device),
        }
        plain = {"latent_cache": torch.zeros(*pages, d_c, **like)}
        mla_append(**given, **codes)
        expected, expected_scale = quantize_latent(given["latent"])
        slots = given["slots"].long()
        right = torch.equal(codes["latent_cache"].view(torch.uint8).flatten(0, 1)[slots], expected.view(torch.uint8))
        right &= torch.equal(codes["latent_scale"].flatten()[slots], expected_scale)
        moved = tokens * (2 * d_c + d_c + 4 + 4 * (groups + heads) * d_r)  # read, and written
        source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        timings = time_in_turn(
            {
                "fp8": lambda given=given, codes=codes: mla_append(**given, **codes),
                "bf16": lambda given=given, plain=plain: mla_append(**given, **plain),
                "copy": lambda source=source, target=target: target.copy_(source),
            },
            device,
            min_run_time,
        )
        table.add(
            {"shape": f"H={heads} G={groups} d_c={d_c} d_r={d_r} x {tokens}", "MB": moved / 1e6}
            | {name: timing.p50 for name, timing in timings.items()}
            | {"of a copy": timings["copy"].p50 / timings["fp8"].p50, "status": "ok" if right else "wrong"}
        )
    return table.show("mla_append, µs with cold L2")


if __name__ == "__main__":
    sys.exit(command(speed, append))
