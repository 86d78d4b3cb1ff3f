"""A tuning trial in a process of its own: compile it, check it against float64, time it with a cold L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from mha2mla.kernel_testing.case_check import plan_for, refresh_poisoned
from mha2mla.kernel_testing.judgement import verdict
from mha2mla.kernel_testing.problems import Problem, expected
from mha2mla.kernel_testing.timing import time_callable
from mha2mla.kernel_testing.trials import Candidate, Trial
from mha2mla.kernels import DecodePlan
from mha2mla.kernels.split_kv.choice import KernelChoice
from mha2mla.kernels.split_kv.op import PagedOp

ROUNDS = 3


@torch.inference_mode()
def measure(trial: Trial, device: str, capability: int, min_run_time: float) -> dict[str, Any]:
    """Runs in a worker: ``status`` and, if that is "ok", ``us``, the median of each candidate with a cold L2."""
    with torch.cuda.device(device):
        calls = []
        for candidate in trial.candidates:
            call, out, lse = prepared_call(trial.problem, trial.dtype, candidate, device, capability)
            calls.append(call)
            if not trial.final:
                call()
                judgement = verdict(out, lse, *expected_of(trial.problem, trial.dtype, device))
                if not judgement.ok:
                    return {"status": f"wrong: {judgement.reason}"}
        rounds = ROUNDS if trial.final else 1
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, mine in zip(calls, times, strict=True):
                mine.append(time_callable(call, device, min_run_time=min_run_time, graph=False).p50)
        return {"status": "ok", "us": [statistics.median(mine) for mine in times]}


def prepared_call(
    problem: Problem, dtype: str, candidate: Candidate, device: str, capability: int
) -> tuple[Callable[[], None], Tensor, Tensor]:
    """What launches a candidate, planned for the problem over poisoned buffers, and the out and lse that it fills."""
    inputs, plan = _prepared(problem, dtype, device)
    mine = plan_for(plan, candidate.num_ctas)
    refresh_poisoned(mine, inputs)
    out = torch.full_like(inputs["q_latent"], torch.nan)
    batch, seqlen_q, heads, _ = out.shape
    lse = torch.full((batch, heads, seqlen_q), torch.nan, dtype=torch.float32, device=device)
    return launcher(problem.op, problem.shape(dtype), candidate.choice, capability, inputs, mine, out, lse), out, lse


@lru_cache(maxsize=1)
def _prepared(problem: Problem, dtype: str, device: str) -> tuple[dict[str, Any], DecodePlan]:
    """Inputs of a shape and a plan to take buffers after; kept while a worker measures the shape."""
    inputs = problem.inputs(getattr(torch, dtype), device)
    return inputs, problem.plan(inputs, "tilelang")


@lru_cache(maxsize=1)
def expected_of(problem: Problem, dtype: str, device: str) -> tuple[Tensor | None, ...]:
    """What an output is compared with: the same for every configuration of the shape."""
    inputs, _ = _prepared(problem, dtype, device)
    return expected(inputs, **problem.visibility)


def launcher(
    op: PagedOp,
    shape: Any,
    choice: KernelChoice,
    capability: int,
    inputs: dict[str, Any],
    plan: DecodePlan,
    out: Tensor,
    lse: Tensor,
) -> Callable[[], None]:
    """A call that launches a choice's kernels as ``op`` launches those that dispatch chooses."""
    from mha2mla.kernels.split_kv.launch import compile_kernels, launch

    kernels = compile_kernels(op, shape, choice, capability, out.shape[0], out.shape[-1], plan.num_ctas)
    data = [inputs[name] for name in op.names]
    call = (data, inputs["block_table"], inputs["softmax_scale"], inputs["causal"], *plan.buffers, out, lse)
    return partial(launch, op, shape, *call, kernels=kernels)
