"""Compiled GQA kernels on one problem by hand, and their output judged."""

from __future__ import annotations

import torch

from mha2mla.testing.problems import UNUSED_PAGE, GQAProblem, judge
from tests.kernels.problems import prepared


def assert_right(problem: GQAProblem, inputs: dict, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    judgement = judge(inputs, out, lse, **problem.visibility)
    assert judgement.ok, judgement.reason


def run_kernels(problem: GQAProblem, split, merge, inputs: dict, num_ctas: int, work=None):
    """A compiled decode kernel and combine on one problem, every output and all workspace poisoned with NaN before.

    ``work`` None: what the planner makes of the lengths.
    """
    q = inputs["q"]
    shape = (*q.shape[:3], problem.v_head_dim)
    schedule, splits, partial_out, partial_lse, lse = prepared(problem.spans(), shape, num_ctas, work, q.device)
    out = q.new_full(shape, torch.nan)
    split(
        q, inputs["k_cache"], inputs["v_cache"], inputs["block_table"], schedule, partial_out, partial_lse, out, lse,
        inputs["softmax_scale"], int(inputs["causal"]), 2**30 if problem.window is None else problem.window,
        problem.sinks,
    )  # fmt: skip
    merge(splits, partial_out, partial_lse, out, lse)
    return out, lse


def poison_unseen_pages(problem: GQAProblem, inputs: dict) -> dict:
    """Also poisons table entries of pages that no query sees but that lie in a tile with a token that one sees."""
    table, storage = inputs["block_table"], problem.storage
    seen = storage._seen(storage.capacity, table.device).view(*table.shape, problem.page_size).any(2)
    return inputs | {"block_table": torch.where(seen, table, UNUSED_PAGE)}
