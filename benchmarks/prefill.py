"""Varlen prefill on a GPU: speeds beside FlashAttention-3 and torch, after a check against float64.

    python benchmarks/prefill.py --json benchmarks/results/h200-prefill-speed.json
    python benchmarks/prefill.py --only "192"        # shapes.py has the names

TFLOP/s count 2 H (d_qk + d_v) for every (query, key) pair that is not masked, for everybody. FlashAttention-3 runs
twice where all sequences have the same length: with cu_seqlens, as ours, and as one batch; MLA's two key parts are
concatenated for it beforehand, which its time does not contain. ``runner.py`` says what the numbers are.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Row, check_then_time
from benchmarks.peers import Peer, checked, flash_attention_3_prefill, torch_prefill
from benchmarks.recording import command
from benchmarks.runner import Benchmark, speed_of
from benchmarks.shapes import FA3_PREFILL, SpeedCase, prefill_cases
from mha2mla.kernels import attention_varlen, mla_prefill_varlen
from mha2mla.kernels.ops import capability
from mha2mla.testing.prefill_problems import PrefillProblem, judge, sample


def compile_one(job: tuple[int, Any]) -> None:
    from mha2mla.kernels.attention_varlen.warp_specialised import compile_attention_varlen

    compile_attention_varlen(*job)


def jobs(case: SpeedCase) -> list[tuple[int, Any]]:
    return [(capability(torch.device("cuda", torch.cuda.current_device())), case.problem.shape())]


@torch.inference_mode()
def measure(case: SpeedCase, peers: bool, min_run_time: float, device: str = "cuda") -> Row:
    """One case's row: checks it, then times the op and its peers in turn. On a CPU that is the reference backend."""
    problem = case.problem
    inputs = problem.inputs(torch.bfloat16, device)
    op = mla_prefill_varlen if len(problem.widths) == 2 else attention_varlen
    parts = [x for pair in (inputs["queries"], inputs["keys"]) for x in pair]
    bounds = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    out = torch.empty(parts[0].shape[0], problem.heads, problem.v_head_dim, dtype=torch.bfloat16, device=device)
    ours = partial(
        op, *parts, inputs["v"], *bounds, problem.longest, softmax_scale=problem.softmax_scale, causal=problem.causal,
        backend="reference" if device == "cpu" else "tilelang", out=out,
    )  # fmt: skip
    _, lse = ours(return_lse=True)
    judgement = judge(*sample(problem, inputs, out, lse))
    row = check_then_time(
        {"name": case.name}, judgement, ours, lambda: peers_of(problem, inputs, out.clone()) if peers else {}, device,
        min_run_time, flops=problem.flops(),
    )  # fmt: skip
    best = min((row[column] for column in FA3_PREFILL if isinstance(row.get(column), float)), default=None)
    if best is not None:
        row |= {"FA3_TFLOP/s": problem.flops() / best / 1e6, "of_FA3": best / row["us"]}
    return row


def peers_of(problem: PrefillProblem, inputs: dict[str, Any], expected: torch.Tensor) -> dict[str, Peer]:
    """Column → the call, or why there is none; ``expected`` [T_q, H, d_v] is what ours gave, and was checked."""
    if problem.window is not None:
        return dict.fromkeys((*FA3_PREFILL, "torch_us"), "asked for no window")
    q = torch.cat(inputs["queries"], -1)
    heads = max(k.shape[1] for k in inputs["keys"])
    k = torch.cat([k.repeat_interleave(heads // k.shape[1], 1) for k in inputs["keys"]], -1)
    v = inputs["v"]
    longest = problem.longest, max(keys for _, keys in problem.lengths)
    bounds = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    scale, causal = problem.softmax_scale, problem.causal

    def flat(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return out.reshape(expected.shape), expected.double()

    found = {"FA3_varlen_us": checked(lambda: flash_attention_3_prefill(q, k, v, bounds, longest, scale, causal), flat)}
    if len(set(problem.lengths)) == 1:
        batched = [x.unflatten(0, (len(problem.lengths), -1)) for x in (q, k, v)]
        found["FA3_batch_us"] = checked(lambda: flash_attention_3_prefill(*batched, None, longest, scale, causal), flat)
        found["torch_us"] = checked(lambda: torch_prefill(*batched, scale, causal), flat)
    return found


BENCHMARK = Benchmark(
    kind="prefill-speed",
    title="attention_varlen and mla_prefill_varlen, bfloat16, µs with cold L2",
    measure=measure,
    compile=compile_one,
    jobs=jobs,
    peers=(*FA3_PREFILL, "torch_us"),
    reads_cache=False,
)
speed = speed_of(BENCHMARK, prefill_cases)

if __name__ == "__main__":
    sys.exit(command(speed))
