"""Small prefill problems, the op and the kernels called for one of them, and the result judged."""

from __future__ import annotations

import torch

from mha2mla.kernels import attention_varlen, mla_prefill_varlen
from mha2mla.testing.prefill_problems import PrefillProblem, judge

# Every boundary of a tile of 16, 64 and 128, both ways round; sequences without queries, without keys, without either.
MIXED = ((0, 0), (1, 1), (5, 0), (0, 7), (63, 64), (65, 17), (2, 130), (129, 128))
SMALL = [
    PrefillProblem(9, (80,), (3,), 80, MIXED),
    PrefillProblem(4, (64, 16), (4, 1), 64, MIXED),
    PrefillProblem(6, (24, 8), (2, 3), 40, MIXED, value_heads=6, combined=True),
    PrefillProblem(1, (8,), (1,), 8, MIXED, causal=False),
    PrefillProblem(3, (16,), (1,), 72, MIXED, causal=False),
    PrefillProblem(4, (64, 16), (4, 1), 64, MIXED, window=19, sinks=4),
    PrefillProblem(2, (16,), (1,), 24, MIXED, window=1),
    PrefillProblem(2, (16,), (2,), 24, MIXED, window=40, sinks=33),
]


def name_of(problem: PrefillProblem) -> str:
    widths, heads = ("+".join(map(str, x)) for x in (problem.widths, problem.key_heads))
    return f"H{problem.heads}-{widths}x{heads}-v{problem.v_head_dim}-{'causal' if problem.causal else 'full'}" + (
        "" if problem.window is None else f"-{problem.sinks}..{problem.window}"
    )


def call(problem: PrefillProblem, inputs: dict, **further):
    """The public op for the problem's parts, with lse."""
    operands = [x for pair in zip(inputs["queries"], strict=True) for x in pair] + inputs["keys"] + [inputs["v"]]
    op = mla_prefill_varlen if len(problem.widths) == 2 else attention_varlen
    return op(
        *operands, inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], problem.longest, return_lse=True,
        softmax_scale=problem.softmax_scale, causal=problem.causal, window=problem.window, sinks=problem.sinks,
        **further,
    )  # fmt: skip


def assert_right(problem: PrefillProblem, inputs: dict, out: torch.Tensor, lse: torch.Tensor) -> None:
    judgement = judge(problem, inputs, out, lse)
    assert judgement.ok, judgement.reason


def check(problem: PrefillProblem, dtype=torch.bfloat16, device="cpu", inputs=None, of=None, **further) -> torch.Tensor:
    """The op's output, judged; ``of``: the inputs that ``inputs`` are a view of."""
    inputs = inputs or problem.inputs(dtype, device)
    out, lse = call(problem, inputs, **further)
    assert_right(problem, of or inputs, out, lse)
    return out


def launch(kernel, problem: PrefillProblem, inputs: dict, rows: int, section: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of a compiled kernel of tiles of ``rows`` queries; what it does not write is NaN."""
    queries, keys = ((inputs[name] * 2)[:2] for name in ("queries", "keys"))
    out = inputs["v"].new_full((queries[0].shape[0], problem.heads, problem.v_head_dim), torch.nan)
    lse = torch.full((problem.heads, out.shape[0]), torch.nan, device=out.device)
    kernel(
        *queries, *keys, inputs["v"], inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], out, lse, problem.softmax_scale,
        -(-problem.longest // rows), section, problem.window or 0, problem.sinks,
    )  # fmt: skip
    return out, lse
