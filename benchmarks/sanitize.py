"""Small decode calls for compute-sanitizer: each kernel family, windows, several new tokens, empty sequences.

Compile first, in parallel and without the tool; then run under each tool, in one process that compiles nothing:

    python benchmarks/sanitize.py compile
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1    # every tensor an allocation of its own, so that its bounds are seen
    for tool in memcheck racecheck initcheck; do
        compute-sanitizer --tool $tool --kernel-name kns=mla_decode --error-exitcode 9 python benchmarks/sanitize.py run
    done

``kns`` restricts the tool to the kernels of this package by a part of their names: torch's own would take most of the
time. Inputs are drawn and results judged on the CPU: a copy counts as written for initcheck, what a kernel outside
``kns`` wrote does not. Workspace and outputs are not filled beforehand, so initcheck sees what is read before it was
written; the cache is written everywhere, with NaN where no query may look, since TMA reads whole tiles.

racecheck needs registers and shared memory of its own; ``run --only swap_ab_ws`` leaves out the kernels that take all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import command
from mha2mla.kernels import mla_decode
from mha2mla.kernels.parallel_compilation import compile_in_processes, compile_job, compile_launches
from mha2mla.kernels.split_kv.op import compiled_shape
from mha2mla.testing.problems import LatentProblem, Problem, RowCodesProblem, judge

PROBLEMS = (
    Problem(32, 32, 512, 16, (0, 1, 65, 700)),  # a converted MHA model, one rope head per head
    Problem(32, 32, 512, 16, (17, 130), page_size=16),
    Problem(32, 8, 512, 16, (129, 300), page_size=128, starts=(3, 64)),
    Problem(16, 1, 512, 64, (64, 200), combined=True, seqlen_q=4),
    Problem(9, 3, 192, 64, (5, 300), window=100, sinks=4),
    Problem(14, 2, 80, 8, (65, 300), page_size=32, window=1),
    Problem(64, 1, 512, 64, (0, 200), combined=True),
    Problem(128, 1, 512, 64, (1, 64, 400), combined=True),
    Problem(128, 1, 512, 64, (90, 260), seqlen_q=2, window=128, sinks=70),
    Problem(40, 40, 448, 16, (65, 190), seqlen_q=3, causal=False),
    Problem(32, 1, 1024, 64, (1, 64, 300), window=100, sinks=4),
    LatentProblem(32, 1, 512, 64, (0, 1, 65, 400), shuffled=True),
    RowCodesProblem(32, 1, 512, 64, (0, 1, 65, 400)),
    RowCodesProblem(32, 1, 1024, 64, (65, 300), page_size=16, bits=8),
    LatentProblem(9, 1, 192, 96, (17, 300), page_size=16, window=100, sinks=4),
    LatentProblem(16, 1, 72, 32, (130, 64), seqlen_q=4, combined=True),
    LatentProblem(32, 1, 1024, 32, (0, 1, 65, 300), page_size=16, shuffled=True),  # two CTAs share the columns
    LatentProblem(9, 1, 640, 96, (17, 200), window=100, sinks=4),
    LatentProblem(3, 1, 1024, 128, (5, 70)),
    LatentProblem(9, 1, 192, 128, (0, 1, 65, 300), page_size=16, window=100, sinks=4, codes=True),
)
DTYPE = torch.bfloat16


def compile() -> bool:
    """Puts every kernel into TileLang's disk cache."""
    device = torch.device("cuda", torch.cuda.current_device())
    jobs = [
        compile_job(problem.op, compiled_shape(problem.shape()), device, [(len(problem.lengths), lambda n: n)])
        for problem in PROBLEMS
    ]
    broken = compile_in_processes(compile_launches, jobs)
    for job, why in broken.items():
        print(f"{job.shape}: {why}")
    return not broken


def to_device(tensors: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The same arguments on ``device``, views of one buffer staying views of one buffer."""
    buffers: dict[int, torch.Tensor] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in buffers:
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            buffers[storage.data_ptr()] = whole.to(device)
        return buffers[storage.data_ptr()].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return {name: moved(value) if isinstance(value, torch.Tensor) else value for name, value in tensors.items()}


@torch.inference_mode()
def run(only: str | None = None) -> bool:
    """One plan and one call of each problem; prints which kernel served it and whether the result is right.

    Args:
        only: run the problems that this kernel serves.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    right = True
    for number, problem in enumerate(PROBLEMS):
        kernel = problem.op.choose(compiled_shape(problem.shape()), device).kernel
        if only is not None and kernel != only:
            continue
        inputs = problem.inputs(DTYPE, "cpu")
        on_device = to_device(inputs, device)
        if rope := inputs.get("rope"):
            on_device["rope"] = replace(rope, **to_device(vars(rope), device))
        plan = problem.plan(on_device, "tilelang")
        out = mla_decode(**on_device, plan=plan, backend="tilelang").cpu()
        judgement = judge(inputs, out, None, **problem.visibility)
        right &= judgement.ok
        print(f"{number} {kernel:<12} {judgement.reason or 'ok'} error {judgement.error:.1e} {problem}", flush=True)
    return right


if __name__ == "__main__":
    sys.exit(command(compile, run))
