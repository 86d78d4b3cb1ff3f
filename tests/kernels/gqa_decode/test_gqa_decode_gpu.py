"""GQA decode on a GPU: errors at most twice torch's, poisoned memory, plans, graphs, streams."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from mha2mla.kernels import gqa_decode
from mha2mla.kernels.devices import dtype_name, num_sms
from mha2mla.kernels.gqa_decode.selection import list_kernels, select_kernel
from mha2mla.kernels.split_kv.choice import KernelChoice
from mha2mla.testing.numeric_check import errors
from mha2mla.testing.problems import GQAProblem, exact, judge
from tests.kernels.gqa_decode.problems import poison_unseen_pages, run_kernels
from tests.kernels.problems import random_work

pytestmark = pytest.mark.gpu

# A static shape costs half a minute of compiling. Those of page 64 and one new token are also what
# benchmarks/decode.py times, and nearly every other test here takes one of the first four.
SHAPES = [
    GQAProblem(32, 32, 128, 128, (0, 1, 65, 300, 64)),
    GQAProblem(9, 3, 64, 64, (1, 63, 64, 65, 1000)),
    GQAProblem(14, 2, 64, 64, (130, 4, 700, 0, 64), page_size=16, seqlen_q=2),
    GQAProblem(28, 4, 128, 128, (77, 500, 3, 64, 0), seqlen_q=8),
    GQAProblem(24, 8, 96, 96, (300, 5, 64, 129, 63)),
    GQAProblem(16, 16, 192, 128, (300, 5, 64, 129, 63)),
    GQAProblem(8, 1, 256, 256, (300, 5, 64, 129, 63), page_size=128),
    GQAProblem(63, 1, 8, 88, (300, 5, 64, 129, 63), seqlen_q=4),
    GQAProblem(1, 1, 80, 80, (300, 5, 64, 129, 63), page_size=32, combined=True),
]


def name(problem: GQAProblem) -> str:
    return problem.name


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def check(problem: GQAProblem, dtype: torch.dtype = torch.bfloat16, planned: bool = True) -> None:
    inputs = problem.inputs(dtype, "cuda")
    assert planned or problem.window is None
    plan = problem.plan(inputs, "tilelang") if planned else None
    if plan is not None:
        plan.partial_out.fill_(torch.nan)
        plan.partial_lse.fill_(torch.nan)
    out = inputs["q"].new_full((*inputs["q"].shape[:3], problem.v_head_dim), torch.nan)
    _, lse = gqa_decode(**inputs, plan=plan, out=out, return_lse=True, backend="tilelang")
    judgement = judge(inputs, out, lse, **problem.visibility)
    chosen = select_kernel(problem.shape(dtype_name(dtype)), capability()).reason
    assert judgement.ok, f"{problem.name} {dtype}: {judgement}; {chosen}"


@pytest.mark.parametrize("problem", SHAPES, ids=name)
def test_no_shape_reads_poison_or_drops_heads(problem):
    check(problem)
    check(problem, planned=False)
    check(dataclasses.replace(problem, window=40, sinks=3, starts=(0, 1, 2, 30, 5)))
    check(dataclasses.replace(problem, causal=False, lengths=(0, 0, 0, 0, 0)))


def varied(problem: GQAProblem) -> list[KernelChoice]:
    """The rule's choice and the portable kernel; of one shape, all numbers of CTAs a multiprocessor."""
    listed = list_kernels(problem.shape(), capability())
    every = problem is SHAPES[1]
    return list({(c.kernel, every and c.ctas_per_sm): c for c in reversed(listed)}.values())


def compile_rules_merge(problem: GQAProblem):
    """The combine that a call launches; a plan with more partials than it was made for makes it loop."""
    from mha2mla.kernels.split_kv.combine import combine_rows, combine_splits, compile_combine

    num_ctas = select_kernel(problem.shape(), capability()).num_ctas(num_sms(torch.device("cuda")))
    splits = combine_splits(num_ctas, len(problem.lengths))
    rows = combine_rows(problem.heads, problem.seqlen_q, splits)
    return compile_combine(problem.heads, problem.v_head_dim, "bfloat16", splits, capability(), rows)


@pytest.mark.parametrize("problem", SHAPES[1:3], ids=name)
def test_float16(problem):
    check(problem, torch.float16)


@pytest.mark.parametrize("problem", SHAPES[:4], ids=name)
def test_every_kernel_is_right_under_any_plan(problem):
    """Not only the rule's choice; plans for any number of CTAs and plans no planner makes; the same bits twice."""
    from mha2mla.kernels.gqa_decode.api import GQA
    from mha2mla.kernels.split_kv.launch import compile_choice

    merge = compile_rules_merge(problem)
    for choice in varied(problem):
        split = compile_choice(GQA, problem.shape(), choice, capability())
        for case in (problem, dataclasses.replace(problem, window=40, sinks=3, starts=(0, 0, 2, 30, 5))):
            inputs = poison_unseen_pages(case, case.inputs(torch.bfloat16, "cuda"))
            plans = [(1, None), (2, None), (132, None)]
            for seed, num_ctas in enumerate((3, 40)):
                tiles = [span.tiles for span in case.spans()]
                plans.append((num_ctas, random_work(tiles, num_ctas, random.Random(seed))))
            for i, (num_ctas, work) in enumerate(plans):
                first = run_kernels(case, split, merge, inputs, num_ctas, work)
                judgement = judge(inputs, *first, **case.visibility)
                assert judgement.ok, f"{choice.reason}; {num_ctas} CTAs, plan {i}: {judgement.reason}"
                second = run_kernels(case, split, merge, inputs, num_ctas, work)
                assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), choice.reason


@pytest.mark.parametrize("batch", [2, 131, 300])
def test_mixed_lengths(batch):
    """Many CTAs, more sequences than CTAs, short and empty sequences beside long ones."""
    draw = random.Random(batch)
    lengths = tuple(draw.choice([0, 1, draw.randint(1, 200), draw.randint(1, 3000)]) for _ in range(batch))
    check(dataclasses.replace(SHAPES[1], lengths=lengths))
    check(dataclasses.replace(SHAPES[1], lengths=lengths, window=100, sinks=4))


def test_one_long_sequence_is_in_as_many_pieces_as_there_are_ctas():
    problem = GQAProblem(9, 3, 64, 64, (1,))
    num_ctas = problem.plan(problem.inputs(torch.bfloat16, "cuda"), "tilelang").num_ctas
    problem = dataclasses.replace(problem, lengths=(128 * num_ctas,))
    plan = problem.plan(problem.inputs(torch.bfloat16, "cuda"), "tilelang")
    assert plan.splits.tolist() == [[num_ctas, 0]]
    check(problem)


def test_an_mla_plan_serves_a_call_of_the_same_output_shape():
    """A plan says which CTA reads which tokens, not of which kernel."""
    from mha2mla.kernels import plan_mla_decode

    problem = SHAPES[0]
    inputs = problem.inputs(torch.bfloat16, "cuda")
    plan = plan_mla_decode(
        inputs["q"], inputs["k_cache"][:, :, :1], inputs["block_table"], inputs["cache_seqlens"], qk_rope_head_dim=64
    )
    out, lse = gqa_decode(**inputs, plan=plan, return_lse=True, backend="tilelang")
    assert judge(inputs, out, lse).ok


def test_large_scores_are_not_taken_for_masked_ones():
    problem = dataclasses.replace(SHAPES[0], lengths=(65, 1000), scale=1e5)
    inputs = problem.inputs(torch.bfloat16, "cuda")
    out, lse = gqa_decode(**inputs, return_lse=True, backend="tilelang")
    expected, expected_lse = exact(inputs)
    assert float(expected_lse.abs().max()) > 3e5
    assert not torch.isnan(out).any()
    assert errors(out, expected)[0] < 2e-2
    assert float(((lse - expected_lse) / expected_lse).abs().max()) < 1e-4


def test_strided_inputs_are_not_misread():
    problem = SHAPES[1]
    inputs = problem.inputs(torch.bfloat16, "cuda")
    plain = gqa_decode(**inputs, backend="tilelang")
    q = inputs["q"].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = torch.cat([inputs["k_cache"], inputs["k_cache"]], -1)[..., : problem.qk_head_dim]
    by_head = inputs["v_cache"].transpose(1, 2).contiguous().transpose(1, 2)  # [P, G, page, d] in memory
    out = torch.empty(9, *plain.shape[:2], 64, dtype=torch.bfloat16, device="cuda").permute(1, 2, 0, 3)
    gqa_decode(**(inputs | {"q": q, "k_cache": wide, "v_cache": by_head}), out=out, backend="tilelang")
    assert torch.equal(out, plain)


@pytest.mark.parametrize("problem", [SHAPES[1], SHAPES[2]], ids=name)
def test_the_portable_kernel_with_the_instructions_of_older_gpus(problem):
    """Code for sm_80 (mma.sync, its shared memory) on this GPU: no wgmma, no TMA."""
    import tilelang

    from mha2mla.kernels.gqa_decode.api import GQA
    from mha2mla.kernels.machine import PASS_CONFIGS, target_of

    shape = problem.shape()
    choice = select_kernel(shape, 80)
    assert choice.kernel == "portable"
    older = PASS_CONFIGS | {"tl.disable_wgmma": True, "tl.disable_tma_lower": True}
    split = tilelang.compile(GQA.make_split(shape, choice), target=target_of(capability()), pass_configs=older)
    assert "wgmma" not in split.get_kernel_source()
    merge = compile_rules_merge(problem)
    for case in (problem, dataclasses.replace(problem, window=33, sinks=5)):
        inputs = poison_unseen_pages(case, case.inputs(torch.bfloat16, "cuda"))
        work = random_work([span.tiles for span in case.spans()], 7, random.Random(0))
        for num_ctas, plan in ((1, None), (40, None), (7, work)):
            judgement = judge(inputs, *run_kernels(case, split, merge, inputs, num_ctas, plan), **case.visibility)
            assert judgement.ok, judgement.reason
