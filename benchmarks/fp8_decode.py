"""The e4m3 latent cache on a GPU: error and speed of decode and append, beside bfloat16 in the same run.

    python benchmarks/fp8_decode.py speed --json benchmarks/results/h200-fp8-decode.json
    python benchmarks/fp8_decode.py append

A speed is printed only after the same inputs, poisoned wherever nobody may look, gave the right result: ``error`` is
against float64 over the cache as it is stored, ``of original`` over the cache before it was rounded to e4m3, ``bf16``
what the bfloat16 op has there. Times are medians with a cold L2 (decode and combine kernel), ``graph`` those of CUDA
graph replays. ``gain`` is the bfloat16 op's time through the fp8 op's, for the same tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import time_in_turn
from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval.report import print_table, write_json
from mha2mla.kernel_testing.judgement import errors
from mha2mla.kernel_testing.problems import Problem, exact, judge
from mha2mla.kernel_testing.workers import run_in_workers
from mha2mla.kernels import (
    dequantize_latent,
    mla_append,
    mla_decode,
    plan_mla_decode,
    quantize_latent,
)

TARGET = ("H=32 G=1 d_c=512 d_r=64 64x16384", 1.6)  # issue 5, item 8
TIMEOUT = 180.0  # seconds for one shape
# heads, rope heads, latent width, rope width, batch, length
SHAPES = [
    (32, 1, 512, 64, 64, 16384),
    (32, 1, 512, 64, 64, 4096),
    (32, 1, 512, 64, 8, 4096),
    (32, 1, 512, 64, 1, 32768),
    (16, 1, 512, 64, 64, 4096),
    (32, 8, 512, 16, 64, 4096),
    (9, 3, 256, 16, 64, 8192),
    (128, 1, 512, 64, 64, 4096),
]
COLUMNS = {
    "name": "shape",
    "MB": "MB",
    "MB_bf16": "MB bf16",
    "error": "error",
    "torch_error": "torch",
    "original_error": "of original",
    "bf16_error": "bf16",
    "us": "µs",
    "us_bf16": "µs bf16",
    "gain": "gain",
    "us_graph": "graph",
    "us_graph_bf16": "graph bf16",
    "gain_graph": "gain, graph",
    "TB/s": "TB/s",
    "met": "met",
    "status": "status",
}


def speed(only: str | None = None, json: str | None = None, min_run_time: float = 0.3) -> bool:
    """Times both decode ops on every shape.

    Args:
        only: measure shapes whose name contains this.
        json: also write every row to this file.
        min_run_time: seconds of cold-L2 runs per op and shape.
    """
    jobs = [(*shape, min_run_time) for shape in SHAPES if only is None or only in name_of(*shape)]
    rows = []
    environment = collect_environment()
    for outcome in run_in_workers(measure, jobs, timeout=TIMEOUT):
        rows.append(outcome.value or {"name": name_of(*outcome.job[:-1]), "status": outcome.failure})
        tqdm.write(f"{rows[-1]['name']}: {rows[-1].get('us') or rows[-1]['status']}, bf16 {rows[-1].get('us_bf16')}")
        if json:  # after every shape, so that a run that is cut short keeps what it has
            write_json(json, kind="fp8-decode-speed", rows=rows, environment=environment)
    shown = {key: heading for key, heading in COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    print_table(
        rows,
        title="mla_decode over an fp8 latent cache beside bfloat16",
        columns=shown,
        caption=describe_environment(environment),
    )
    return all(row["status"] == "ok" and row.get("met") is not False for row in rows)


def name_of(heads: int, groups: int, d_c: int, d_r: int, batch: int, length: int) -> str:
    return f"H={heads} G={groups} d_c={d_c} d_r={d_r} {batch}x{length}"


@torch.inference_mode()
def measure(job: tuple[Any, ...], device: str = "cuda") -> dict[str, Any]:
    """One shape's row: both ops checked, then timed in turn. On a CPU these are the references."""
    *shape, min_run_time = job
    heads, groups, d_c, d_r, batch, length = shape
    problem = Problem(heads, groups, d_c, d_r, (length,) * batch)
    inputs = problem.inputs(torch.bfloat16, device)
    codes, scale = quantize_latent(inputs["latent_cache"])
    stored = inputs | {"latent_cache": codes, "latent_scale": scale}
    plan = problem.plan(inputs)
    plan_fp8 = plan_mla_decode(
        inputs["q_latent"], inputs["rope_cache"], inputs["block_table"], inputs["cache_seqlens"], qk_rope_head_dim=d_r,
        latent_dtype=codes.dtype,
    )  # fmt: skip
    out, lse = mla_decode(**stored, plan=plan_fp8, return_lse=True)
    judgement = judge(inputs | {"latent_cache": dequantize_latent(codes, scale, torch.float64)}, out, lse)
    original, _ = exact(inputs)
    plain = mla_decode(**inputs, plan=plan)
    small, large = (problem.tokens_seen() * width for width in (d_c + 4 + 2 * groups * d_r, 2 * (d_c + groups * d_r)))
    row = {
        "name": name_of(*shape),
        "MB": small / 1e6,
        "MB_bf16": large / 1e6,
        "error": judgement.error,
        "torch_error": judgement.torch_error,
        "original_error": errors(out, original)[0],
        "bf16_error": errors(plain, original)[0],
        "status": "ok" if judgement.ok else f"wrong: {judgement.reason}",
    }
    del original
    if not judgement.ok:
        return row
    kept, kept_plain = torch.empty_like(out), torch.empty_like(plain)
    timings = time_in_turn(
        {
            "fp8": lambda: mla_decode(**stored, plan=plan_fp8, out=kept),
            "bf16": lambda: mla_decode(**inputs, plan=plan, out=kept_plain),
        },
        device,
        min_run_time,
    )
    mine, other = timings["fp8"], timings["bf16"]
    gain = other.p50 / mine.p50
    return row | {
        "us": mine.p50,
        "us_bf16": other.p50,
        "gain": gain,
        "us_graph": mine.graph,
        "us_graph_bf16": other.graph,
        "gain_graph": None if mine.graph is None or other.graph is None else other.graph / mine.graph,
        "TB/s": small / mine.p50 / 1e6,
        "met": gain >= TARGET[1] if row["name"] == TARGET[0] else None,
    }


@torch.inference_mode()
def append(json: str | None = None, tokens: int = 65536, device: str = "cuda", min_run_time: float = 0.3) -> bool:
    """Times ``mla_append`` into an e4m3 cache and into a bfloat16 one, and a copy of the former's bytes.

    Args:
        json: also write the rows to this file.
        tokens: new tokens of one call.
        device: where.
        min_run_time: seconds per row.
    """
    rows = []
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
        rows.append(
            {"shape": f"H={heads} G={groups} d_c={d_c} d_r={d_r} x {tokens}", "MB": moved / 1e6}
            | {name: timing.p50 for name, timing in timings.items()}
            | {"of a copy": timings["copy"].p50 / timings["fp8"].p50, "status": "ok" if right else "wrong"}
        )
    environment = collect_environment()
    print_table(rows, title="mla_append, µs with cold L2", caption=describe_environment(environment))
    if json:
        write_json(json, kind="fp8-append", rows=rows, environment=environment)
    return all(row["status"] == "ok" for row in rows)


if __name__ == "__main__":
    from jsonargparse import auto_cli

    if not torch.cuda.is_available() and not {"-h", "--help"} & set(sys.argv):
        sys.exit("benchmarks/fp8_decode.py: no CUDA device is available")
    sys.exit(0 if auto_cli([speed, append]) else 1)
