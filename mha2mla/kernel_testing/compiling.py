"""Kernels of decode shapes into TileLang's disk cache, in parallel processes that launch nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mha2mla.kernel_testing.cases import Case
from mha2mla.kernel_testing.workers import progress_bar, run_in_workers
from mha2mla.kernels.devices import capability, device_name, num_sms
from mha2mla.kernels.mla_decode.api import MLA
from mha2mla.kernels.mla_decode.selection import DecodeShape, select_kernel
from mha2mla.kernels.split_kv.tuning import BATCHES, batch_bucket

COMPILE_TIMEOUT = 300.0


@dataclass(frozen=True)
class CompileJob:
    """What a process compiles at a time: all that calls of a shape may launch.

    Attributes:
        shape: static part of the calls.
        capability: compute capability, 90 for Hopper.
        gpu: its name.
        merges: sizes of combine kernels (``split_kv.launch.MERGES``); None: all.
        buckets: of batch sizes (``tuning.BATCHES``); None: all.
    """

    shape: DecodeShape
    capability: int
    gpu: str
    merges: tuple[int, ...] | None = None
    buckets: tuple[int, ...] | None = None


def compile_job(shape: DecodeShape, cases: Sequence[Case], device: torch.device) -> CompileJob:
    """What has to be compiled for ``cases`` of a shape, and nothing else."""
    from mha2mla.kernels.split_kv.launch import merge_splits

    buckets, merges = set(), set()
    for batch, case in ((len(case.problem.lengths), case) for case in cases if case.problem.lengths):
        buckets.add(batch_bucket(batch))
        planned = select_kernel(shape, capability(device), device_name(device), batch).num_ctas(num_sms(device))
        # a call without a plan makes the first of them
        merges |= {merge_splits(ctas, batch) for ctas in (planned, case.num_ctas(planned))}
    return CompileJob(
        shape, capability(device), device_name(device), tuple(sorted(merges)), tuple(sorted(buckets)) or None
    )


def compile_shapes(
    shapes: Sequence[DecodeShape], device: torch.device, *, progress: bool = True, timeout: float = COMPILE_TIMEOUT
) -> dict[DecodeShape, str]:
    """Puts the kernels of these shapes into TileLang's disk cache, in parallel processes.

    Returns:
        Why a shape could not be compiled, for those that could not.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    jobs = [CompileJob(shape, capability(device), device_name(device)) for shape in dict.fromkeys(shapes)]
    outcomes = run_in_workers(compile_shape, jobs, workers=processes_for(len(jobs)), timeout=timeout)
    bar = progress_bar(outcomes, len(jobs), "compiling", progress)
    return {outcome.job.shape: f"not compiled: {outcome.failure}" for outcome in bar if outcome.failure is not None}


def processes_for(jobs: int) -> int:
    """How many compile at a time; two processors are left to whoever waits and checks."""
    return max(1, min(jobs, (os.cpu_count() or 2) - 2))


def compile_shape(job: CompileJob) -> None:
    """Compiles what a job names."""
    from mha2mla.kernels.split_kv.launch import MERGES, compile_choice, compile_merge, compile_planner

    compile_planner(job.capability)
    for bucket in BATCHES if job.buckets is None else job.buckets:
        compile_choice(MLA, job.shape, select_kernel(job.shape, job.capability, job.gpu, bucket), job.capability)
    for splits in MERGES if job.merges is None else job.merges:
        compile_merge(job.shape.heads, job.shape.kv_lora_rank, job.shape.dtype, splits, job.capability)
