"""One call of the decode op against float64: its numbers, its plan, and that repeating it gives the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mha2mla.kernel_testing.cases import Case
from mha2mla.kernel_testing.problems import UNUSED_PAGE, Problem, judge
from mha2mla.kernels import DecodePlan, mla_decode
from mha2mla.kernels.split_kv.schedule import COUNT, plan_fragments, write_schedule

REPEATS = 3  # a race may show only now and then
UNSPECIFIED = -(2**31)  # what the planner's oracle leaves in fields that nobody reads


@torch.inference_mode()
def check_case(case: Case, device: torch.device) -> dict[str, Any]:
    """Runs one case and compares it with float64; the keys are ``status`` and what was measured."""
    problem, dtype = case.problem, getattr(torch, case.dtype)
    backend = "tilelang" if device.type == "cuda" else "reference"
    inputs = problem.inputs(dtype, device)
    plan = problem.plan(inputs, backend)
    if plan.num_ctas:
        plan = plan_for(plan, case.num_ctas(plan.num_ctas))
    wrong, first = "", None
    for _ in range(REPEATS):
        refresh_poisoned(plan, inputs)
        out = torch.full_like(inputs["q_latent"], torch.nan)
        out, lse = mla_decode(**inputs, plan=plan, out=out, return_lse=True, backend=backend)
        if first is None:
            first = out, lse
        elif not (torch.equal(out, first[0]) and torch.equal(lse, first[1])):
            wrong = "the same call gave other bits"
    judgement = judge(inputs, *first, **problem.visibility)
    if problem.window is None and case.share is None:  # what a caller without a plan gets
        alone, alone_lse = mla_decode(**inputs, return_lse=True, backend=backend)
        if not (torch.equal(alone, first[0]) and torch.equal(alone_lse, first[1])):
            wrong = wrong or "the call without a plan gave other bits"
    wrong = judgement.reason or plan_error(problem, plan) or wrong
    return {
        "num_ctas": plan.num_ctas,
        "error": judgement.error,
        "torch_error": judgement.torch_error,
        "largest": judgement.largest,
        "torch_largest": judgement.torch_largest,
        "lse_error": judgement.lse_error,
        "status": f"wrong: {wrong}" if wrong else "ok",
    }


def plan_for(plan: DecodePlan, num_ctas: int) -> DecodePlan:
    """A plan like ``plan`` over buffers for another number of CTAs, not yet filled."""
    batch = plan.splits.shape[0]
    return replace(
        plan,
        schedule=plan.schedule.new_empty(num_ctas + batch, plan.schedule.shape[1]),
        splits=torch.empty_like(plan.splits),
        partial_out=plan.partial_out.new_empty(num_ctas, *plan.partial_out.shape[1:]),
        partial_lse=plan.partial_lse.new_empty(num_ctas, *plan.partial_lse.shape[1:]),
    )


def refresh_poisoned(plan: DecodePlan, inputs: dict[str, Any]) -> None:
    """Fills a plan for a call, over poison: NaN in its workspace, and rows of its schedule that nobody may read."""
    for workspace in (plan.partial_out, plan.partial_lse):
        workspace.fill_(torch.nan)
    plan.schedule.fill_(UNUSED_PAGE)
    plan.refresh(inputs["cache_seqlens"], inputs["cache_starts"])


def plan_error(problem: Problem, plan: DecodePlan) -> str:
    """In which way a filled plan differs from the oracle's; empty where it does not."""
    if not plan.num_ctas:
        return ""
    spans = problem.spans()
    schedule, splits = (torch.empty(tensor.shape, dtype=torch.int32) for tensor in (plan.schedule, plan.splits))
    work = plan_fragments([span.tiles for span in spans], plan.num_ctas, plan.num_splits)
    write_schedule(spans, work, schedule, splits)
    differs = (schedule != UNSPECIFIED) & (plan.schedule.cpu() != schedule)
    if bool(differs.any()):
        row, field = differs.nonzero()[0].tolist()
        return (
            f"the plan's row {row}, field {field} is {int(plan.schedule[row, field])}; "
            f"the oracle has {int(schedule[row, field])} ({int(schedule[: plan.num_ctas, COUNT].sum())} fragments)"
        )
    got = plan.splits.cpu()
    if not torch.equal(got[:, 0], splits[:, 0]) or not torch.equal(got[splits[:, 0] > 0], splits[splits[:, 0] > 0]):
        return "the plan's splits differ from the oracle's"
    return ""
