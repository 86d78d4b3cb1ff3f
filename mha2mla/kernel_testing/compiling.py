"""Kernels of decode calls into TileLang's disk cache, in parallel processes that launch nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mha2mla.kernel_testing.cases import Case
from mha2mla.kernel_testing.workers import run_in_workers
from mha2mla.kernels.devices import capability, num_sms
from mha2mla.kernels.gqa_decode.api import GQA
from mha2mla.kernels.mla_decode.api import FP8, LATENT, LATENT_FP8, MLA
from mha2mla.kernels.split_kv.choice import KernelChoice
from mha2mla.progress import progress_bar

OPS = {op.name: op for op in (MLA, FP8, LATENT, LATENT_FP8, GQA)}
COMPILE_TIMEOUT = 300.0


@dataclass(frozen=True)
class CompileJob:
    """What a process compiles at a time: all that some calls of a shape launch.

    Attributes:
        op: name of the op.
        shape: static part of the calls.
        capability: compute capability, 90 for Hopper.
        launches: of each call the kernel, the CTAs of its plan and its batch.
    """

    op: str
    shape: Any
    capability: int
    launches: tuple[tuple[KernelChoice, int, int], ...]


def compile_job(cases: Sequence[Case], device: torch.device) -> CompileJob:
    """What has to be compiled for ``cases`` of one shape, and nothing else.

    Raises:
        ValueError: no kernel serves the shape.
    """
    op, shape = cases[0].problem.op, cases[0].shape()
    launches: dict[tuple[KernelChoice, int, int], None] = {}
    for batch, case in ((len(case.problem.lengths), case) for case in cases if case.problem.lengths):
        choice = op.choose(shape, device)
        planned = choice.num_ctas(num_sms(device))
        # a call without a plan makes the first of them
        launches |= dict.fromkeys((choice, ctas, batch) for ctas in (planned, case.num_ctas(planned)))
    return CompileJob(op.name, shape, capability(device), tuple(launches))


def compile_launches(job: CompileJob) -> None:
    """Compiles what a job names."""
    from mha2mla.kernels.split_kv.launch import compile_kernels, compile_planner

    # no line for each kernel; TileLang sets its level when it is imported
    logging.getLogger("tilelang").setLevel(logging.WARNING)
    op, shape = OPS[job.op], job.shape
    width = shape.v_head_dim if op is GQA else shape.kv_lora_rank
    compile_planner(job.capability)
    for choice, num_ctas, batch in job.launches:
        compile_kernels(op, shape, choice, job.capability, batch, width, num_ctas)


def compile_in_processes(
    function: Callable[[Any], None], jobs: Iterable[Any], *, progress: bool = True, timeout: float = COMPILE_TIMEOUT
) -> dict[Any, str]:
    """Calls ``function(job)`` of every job, as many at a time as there are processors.

    Returns:
        Why a job could not be compiled, for those that could not.
    """
    jobs = list(dict.fromkeys(jobs))
    outcomes = run_in_workers(function, jobs, workers=processes_for(len(jobs)), timeout=timeout)
    bar = progress_bar(outcomes, total=len(jobs), desc="compiling", unit="job", show=progress)
    return {outcome.job: f"not compiled: {outcome.failure}" for outcome in bar if outcome.failure is not None}


def processes_for(jobs: int) -> int:
    """How many compile at a time; two processors are left to whoever waits and checks."""
    return max(1, min(jobs, (os.cpu_count() or 2) - 2))
