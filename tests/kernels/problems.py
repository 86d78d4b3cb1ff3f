"""What kernel tests share: the package's decode problems, its verdict as an assertion, and compiled kernels by hand."""

from __future__ import annotations

import torch

from mha2mla.eval.problems import UNUSED_PAGE, Problem, errors, exact, judge, torch_at

__all__ = ["UNUSED_PAGE", "Problem", "assert_right", "errors", "exact", "judge", "run_kernels", "torch_at"]


def assert_right(
    inputs: dict,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    dtype: torch.dtype,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[float, float]:
    """Asserts what :func:`mha2mla.eval.problems.judge` finds; returns the relative error and torch's at ``dtype``."""
    judgement = judge(inputs, out, lse, dtype, window, sinks)
    assert judgement.ok, judgement.reason
    return judgement.error, judgement.torch_error


def run_kernels(split, merge, inputs: dict, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A compiled split kernel and combine on one problem, every output and all workspace poisoned with NaN before."""
    q, lengths, starts = inputs["q_latent"], inputs["cache_seqlens"], inputs["cache_starts"]
    batch, seqlen_q, heads, d_c = q.shape
    floats = {"dtype": torch.float32, "device": q.device}
    partial_out = torch.full((batch, num_splits, seqlen_q, heads, d_c), torch.nan, **floats)
    partial_lse = torch.full((batch, num_splits, seqlen_q, heads), torch.nan, **floats)
    out, lse = torch.full_like(q, torch.nan), torch.full((batch, heads, seqlen_q), torch.nan, **floats)
    split(
        q,
        inputs["q_pe"],
        inputs["latent_cache"],
        inputs["rope_cache"].flatten(2),
        inputs["block_table"],
        lengths,
        lengths if starts is None else starts,
        partial_out,
        partial_lse,
        inputs["softmax_scale"],
        int(inputs["causal"]),
        int(starts is not None),
    )
    merge(partial_out, partial_lse, out, lse)
    return out, lse
