"""Decode over integer codes of latents on a GPU, beside 16-bit latents, copies of codes, and the source's own decode.

    python benchmarks/codes_decode.py --json benchmarks/results/h200-codes-decode.json --min-run-time 0.1 --budget 150
    python benchmarks/codes_decode.py --only "H32 G1 c512"

Each call is checked against float64 on short sequences of its shape, then all of a case are timed in turn:

=================  ==================================================================================================
us, codes8_us      4 and 8 bits beside kept rotary keys; the kernel over codes, or where there is none the copy
kept_us            16-bit latents beside kept rotary keys
computed_us        16-bit latents alone: keys computed from them
copy_us            4 bits and kept keys as a step has them: ``read_codes``, a copy of the keys' pages, the 16-bit kernel
copy_computed_us   4 bits alone: ``read_codes``, the 16-bit kernel
codes_computed_us  4 bits alone: the kernel over codes that computes keys from them
codes3_computed_us, codes2_computed_us, codes8_computed_us: the same, of 3, 2 and 8 bits
e4m3_us, e4m3_computed_us: latents in e4m3 with one scale a token, beside kept keys and alone
source_us          GQA decode over the source's 16-bit KV cache
=================  ==================================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Row, check_then_time, clean
from benchmarks.recording import command
from benchmarks.runner import Benchmark, speed_of
from benchmarks.shapes import SpeedCase, Target, decode_case
from mha2mla.kernels import gqa_decode, mla_decode, read_codes
from mha2mla.kernels.parallel_compilation import CompileJob, compile_job, compile_launches
from mha2mla.kernels.split_kv.op import compiled_shape
from mha2mla.testing.problems import (
    GQAProblem,
    LatentCodesProblem,
    LatentProblem,
    PagedProblem,
    Problem,
    RowCodesProblem,
    judge,
)

# H, d_c, d_r of the conversion; kv heads and their width of the source
SHAPES = (
    (32, 512, 64, 8, 128),  # Llama-3-8B at a quarter of its cache
    (32, 1024, 64, 8, 128),
    (28, 512, 128, 4, 128),  # Qwen2.5-7B at half
    (28, 448, 128, 4, 128),
    (9, 192, 64, 3, 64),  # SmolLM2-135M at half
    (9, 192, 128, 3, 64),
)
SOURCES = {shape[:3]: shape[3:] for shape in SHAPES}
BATCHES = ((64, 4096), (16, 8192), (64, 8192), (128, 8192))
SHORT = (300, 64, 1, 2000)  # tokens of the sequences that are checked

Call = Callable[..., Any]


def cases() -> list[SpeedCase]:
    target = Target(peers=(("kept_us",), 1.1))
    return [
        decode_case(RowCodesProblem(*shape[:1], 1, *shape[1:3], (length,) * batch, slack=0), target)
        for shape in SHAPES
        for batch, length in BATCHES
    ]


def forms(coded: RowCodesProblem) -> dict[str, PagedProblem]:
    """The problems of a case by their column."""
    heads, d_c, d_r = coded.heads, coded.kv_lora_rank, coded.qk_rope_head_dim
    shared = {"lengths": coded.lengths, "slack": 0, "seqlen_q": coded.seqlen_q}
    kv_heads, width = SOURCES.get((heads, d_c, d_r), (1, 64))
    return {
        "us": coded,
        "codes8_us": replace(coded, bits=8),
        "kept_us": Problem(heads, 1, d_c, d_r, **shared),
        "computed_us": LatentProblem(heads, 1, d_c, d_r, **shared),
        **{
            f"codes{'' if bits == 4 else bits}_computed_us": LatentCodesProblem(heads, 1, d_c, d_r, bits=bits, **shared)
            for bits in (4, 3, 2, 8)
        },
        "e4m3_us": Problem(heads, 1, d_c, d_r, codes=True, **shared),
        "e4m3_computed_us": LatentProblem(heads, 1, d_c, d_r, codes=True, **shared),
        "source_us": GQAProblem(heads, kv_heads, width, width, **shared),
    }


def by_kernel(problem: PagedProblem, inputs: dict[str, Any], backend: str) -> Call:
    """The op of a problem."""
    plan = problem.plan(inputs, backend)
    return partial(gqa_decode if "q" in inputs else mla_decode, **inputs, plan=plan, backend=backend)


def by_copy(
    coded: RowCodesProblem, problem: Problem, codes: dict[str, Any], inputs: dict[str, Any], backend: str
) -> Call:
    """The 16-bit op of ``problem`` over a copy of the pages of ``codes``, with the other ``inputs``."""
    table = inputs["block_table"]
    places = torch.arange(table.numel(), dtype=torch.int32, device=table.device).view_as(table)
    quantizer, centers = coded.quantizer, codes["centers"]
    given = {name: value for name, value in inputs.items() if name not in ("latent_cache", "rope_cache", "block_table")}
    wide = places.new_empty((), dtype=torch.bfloat16).expand(table.numel(), coded.page_size, coded.kv_lora_rank)
    rope = inputs["rope_cache"]
    stand_in = None if rope is None else rope.new_empty(()).expand(table.numel(), *rope.shape[1:])
    plan = problem.plan(given | {"latent_cache": wide, "rope_cache": stand_in, "block_table": places}, backend)

    def call(**options: Any) -> Any:
        width, dtype = coded.kv_lora_rank, torch.bfloat16
        latent = read_codes(codes["latent_cache"], table, width, quantizer, centers, dtype, backend=backend)
        kept = None if rope is None else rope[table.flatten().long()]
        return mla_decode(
            **given, latent_cache=latent, rope_cache=kept, block_table=places, plan=plan, backend=backend, **options
        )

    return call


def is_direct(problem: RowCodesProblem, device: torch.device) -> bool:
    """True where a kernel made for it serves: threads that read bytes one by one are not worth timing."""
    return device.type == "cpu" or problem.op.choose(compiled_shape(problem.shape()), device).kernel != "codes_portable"


def calls_of(case: SpeedCase, device: torch.device, lengths: tuple[int, ...] | None) -> dict[str, tuple[Call, dict]]:
    """The call of each column and the inputs that it is judged by; of ``lengths`` in place of the case's."""
    backend = "reference" if device.type == "cpu" else "tilelang"
    problems, found = forms(case.problem), {}
    if lengths is not None:
        problems = {name: replace(problem, lengths=lengths) for name, problem in problems.items()}
    inputs = {name: problem.inputs(torch.bfloat16, device) for name, problem in problems.items()}
    for name, mine in inputs.items():
        if lengths is None:
            clean(mine)
        elif name != "source_us":  # copies are of whole pages, whatever lies on those that no query sees
            mine["block_table"].clamp_(max=len(mine["latent_cache"]) - 1)
    codes = inputs["us"]
    shared = {name: codes[name] for name in ("q_latent", "q_pe", "block_table", "cache_seqlens", "cache_starts")}
    alone = inputs["computed_us"] | shared
    copies = {
        "copy_us": (problems["kept_us"], codes, codes),
        "copy_computed_us": (problems["computed_us"], alone, alone | {"latent_cache": codes["latent_cache"]}),
    }
    for name, (problem, given, judged) in copies.items():
        given = {key: value for key, value in given.items() if key != "centers"}
        call = by_copy(problems["us"], problem, codes, given, backend)
        found[name] = call, judged | {"centers": codes["centers"]}
    for name, problem in problems.items():
        if isinstance(problem, RowCodesProblem) and not is_direct(problem, device):
            if name == "us":
                found[name] = found["copy_us"]
            continue
        found[name] = by_kernel(problem, inputs[name], backend), inputs[name]
    return found


@torch.inference_mode()
def measure(case: SpeedCase, peers: bool, min_run_time: float, device: str = "cuda:0") -> Row:
    here, problem = torch.device(device), case.problem
    row: Row = {"name": case.name, **problem.columns, "B": len(problem.lengths), "longest": max(problem.lengths)}
    row |= {"MB": problem.cache_bytes() / 1e6, "MB_bf16": forms(problem)["kept_us"].cache_bytes() / 1e6}
    row["kernel"] = (
        problem.op.choose(compiled_shape(problem.shape()), here).kernel if is_direct(problem, here) else "copy"
    )
    short = calls_of(case, here, SHORT)
    judged = {name: judge(inputs, *call(return_lse=True)) for name, (call, inputs) in short.items()}
    wrong = {name: f"missing: wrong result: {found.reason}" for name, found in judged.items() if not found.ok}
    calls = {name: call for name, (call, _) in calls_of(case, here, None).items()}
    mine = calls.pop("us")
    row = check_then_time(
        row, judged["us"], mine, lambda: calls | wrong if peers else {}, device, min_run_time,
        cache_bytes=problem.cache_bytes(), flops=problem.flops(),
    )  # fmt: skip
    if not judged["us"].ok:
        return row
    return row | {
        f"of_{name}": row["us"] / row[f"{name}_us"]
        for name in ("kept", "source")
        if isinstance(row.get(f"{name}_us"), float)
    }


def jobs(case: SpeedCase) -> list[CompileJob]:
    """Kernels of every column; the planner's and the copy's compile where they are timed."""
    here = torch.device("cuda", torch.cuda.current_device())
    listed = [p for p in forms(case.problem).values() if not isinstance(p, RowCodesProblem) or is_direct(p, here)]
    batches = {len(case.problem.lengths), len(SHORT)}
    calls = [(batch, lambda resident: resident) for batch in batches]
    return [compile_job(p.op, compiled_shape(p.shape()), here, calls) for p in listed]


BENCHMARK = Benchmark(
    kind="codes-decode-speed",
    title="mla_decode over codes of 4 bits beside its alternatives, bfloat16, page 64, µs with cold L2",
    measure=measure,
    compile=compile_launches,
    jobs=jobs,
    peers=(*(column for column in forms(cases()[0].problem) if column != "us"), "copy_us", "copy_computed_us"),
    reads_cache=False,
)
speed = speed_of(BENCHMARK, cases)

if __name__ == "__main__":
    sys.exit(command(speed))
