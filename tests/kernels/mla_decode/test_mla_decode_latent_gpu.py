"""The decode op over a cache of the latent alone on a GPU: every kernel against float64, far positions, graphs."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from mha2mla.kernels import mla_decode, rotary_keys
from mha2mla.kernels.mla_decode.api import LATENT
from mha2mla.kernels.mla_decode.selection import list_kernels
from mha2mla.testing.problems import LatentProblem, judge
from tests.few import few
from tests.kernels.mla_decode.problems import capability, check
from tests.kernels.problems import assert_right, random_work, run_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# Ten compilations are what one run takes time for; the others are for -m exhaustive.
WS, WIDE, NARROW = (32, 1, 512, 64), (9, 1, 192, 128), (16, 1, 120, 64)  # 1 and 2 warpgroups make keys; 2 CTAs an SM
HALVES = (32, 1, 1024, 32)  # two CTAs share the columns
SHAPES = [
    LatentProblem(*WS, (0, 1, 63, 64, 65, 700, 4096)),
    LatentProblem(*WIDE, (65, 3000, 1), scaling=1.3),
    LatentProblem(*NARROW, (1, 64, 2000), combined=True, shuffled=True),
    LatentProblem(*HALVES, (0, 1, 63, 64, 65, 700, 4096), scaling=1.3),
    LatentProblem(32, 1, 512, 128, (65, 3000, 1), page_size=16, shuffled=True),
    LatentProblem(64, 1, 1024, 64, (65, 3000), first_position=131072),
    LatentProblem(9, 1, 640, 96, (1, 64, 2000), combined=True),
    LatentProblem(16, 1, 1024, 128, (65, 300)),
    LatentProblem(*WS, (0, 1, 15, 16, 17, 700), page_size=16, shuffled=True, scaling=1.3),
    LatentProblem(64, 1, 512, 64, (65, 3000)),
    LatentProblem(16, 1, 256, 64, (65, 300), first_position=131072),
    LatentProblem(16, 1, 384, 96, (65, 300), scaling=0.8),
    LatentProblem(16, 1, 72, 32, (1, 64, 2000), combined=True),
    LatentProblem(16, 1, 120, 96, (65, 300), page_size=32, shuffled=True),
    LatentProblem(40, 1, 384, 32, (65, 300), page_size=128, shuffled=True),
    LatentProblem(64, 1, 256, 64, (65, 300)),
    LatentProblem(3, 1, 504, 128, (65, 300)),
    LatentProblem(1, 1, 8, 8, (1, 300)),
    LatentProblem(128, 1, 504, 24, (65, 300)),
]


def name(problem: LatentProblem) -> str:
    return (
        f"H{problem.heads}-c{problem.kv_lora_rank}-r{problem.qk_rope_head_dim}-p{problem.page_size}-q{problem.seqlen_q}"
    )


@few("problem", SHAPES, count=11, ids=name)
def test_shapes(problem):
    out = check(problem)
    inputs = problem.inputs(torch.bfloat16, "cuda")
    for _ in range(5):
        assert torch.equal(out, mla_decode(**inputs, backend="tilelang")), "bit-equal when run again"


CODES = [
    LatentProblem(*WS, (0, 1, 63, 64, 65, 700, 4096), codes=True),
    LatentProblem(*WIDE, (65, 3000, 1), scaling=1.3, codes=True),
    LatentProblem(*WS, (0, 1, 15, 16, 17, 700), page_size=16, shuffled=True, codes=True),
    LatentProblem(64, 1, 256, 64, (65, 300), page_size=128, codes=True),
    LatentProblem(16, 1, 80, 32, (1, 64, 2000), page_size=32, codes=True),
    LatentProblem(16, 1, 384, 64, (65, 300), first_position=131072, codes=True),
    LatentProblem(1, 1, 16, 8, (1, 300), codes=True),
    LatentProblem(128, 1, 496, 24, (65, 300), codes=True),
]


@few("problem", CODES, count=4, ids=name)
def test_e4m3_latents(problem):
    out = check(problem)
    inputs = problem.inputs(torch.bfloat16, "cuda")
    for _ in range(5):
        assert torch.equal(out, mla_decode(**inputs, backend="tilelang")), "bit-equal when run again"


@few("problem", CODES[:3], count=2, ids=name)
def test_e4m3_latents_windows_new_tokens_and_large_scores(problem):
    lengths = (0, 1, 63, 64, 65, 100, 321, 2000)
    for window, sinks in ((1, 0), (20, 4), (65, 100)):
        check(dataclasses.replace(problem, lengths=lengths, window=window, sinks=sinks))
    check(dataclasses.replace(problem, lengths=lengths, starts=(0, 1, 60, 64, 2, 99, 63, 1999)))
    for scale in (1e-4, 100.0):
        check(dataclasses.replace(problem, lengths=lengths, scale=scale))


def test_e4m3_latents_of_several_new_tokens_in_float16():
    for causal in (True, False):
        check(dataclasses.replace(CODES[1], lengths=(4, 68, 200), seqlen_q=4, causal=causal), torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_e4m3_latents_whose_scales_lie_far_apart(dtype):
    """Weights contain the scales, so that none of them is lost in 16 bits."""
    problem = dataclasses.replace(CODES[1], lengths=(300, 70))
    inputs = problem.inputs(dtype, "cuda")
    exponent = torch.randint(-12, 3, inputs["latent_scale"].shape, device="cuda")
    exponent[:, ::2] = 0
    inputs["latent_scale"] *= torch.exp2(exponent.float())
    out, lse = mla_decode(**inputs, return_lse=True, backend="tilelang")
    assert_right(inputs, out, lse, dtype)


@few("problem", [SHAPES[1], SHAPES[0], SHAPES[3]], count=1, ids=name)
def test_float16(problem):
    check(problem, torch.float16)


@pytest.mark.parametrize("first_position", [0, 131101])  # an angle in float32 is exact at a power of two
@few("problem", [SHAPES[0], SHAPES[1]], count=2, ids=name)
def test_keys_far_out_are_the_definitions(problem, first_position):
    """One token each, so the log-sum-exp is a score: that of the key that torch makes and rounds.

    A key that is off by e before it is rounded falls on the other side of a step u with the probability e / u, and is
    then off by u: a mean square of e u, summed over the squares of the query's numbers. e is 1e-5 here: float32 sums of
    512 products, and 1e-6 of a turn. (Noise of 3e-6 reaches 0.3 of the limit; float32 angles are seven times beyond.)
    """
    far = dataclasses.replace(problem, lengths=(1,) * 256, page_size=64, first_position=first_position, shuffled=False)
    inputs = far.inputs(torch.bfloat16, "cuda")
    inputs["q_latent"].zero_()
    _, lse = mla_decode(**inputs, return_lse=True, backend="tilelang")
    rows = inputs["latent_cache"][inputs["block_table"][:, 0].long(), 0]
    keys = rotary_keys(rows, inputs["rope"], torch.full((256,), first_position, device="cuda"))
    keys, queries = keys.double()[:, None], inputs["q_pe"][:, 0].double() * far.softmax_scale
    off = lse[..., 0].double() - (queries * keys).sum(-1)
    step = torch.finfo(torch.bfloat16).eps * torch.exp2(torch.floor(torch.log2(keys.abs())))
    turned_over = (queries.square() * step * 1e-5).sum(-1).mean()
    summed = (64 * torch.finfo(torch.float32).eps * (queries * keys).abs().sum(-1)).square().mean()
    assert off.square().mean() <= 4 * turned_over + summed


def test_a_sequence_that_reaches_position_131072():
    check(LatentProblem(*WIDE, (131136, 70), window=300, sinks=4))
    check(LatentProblem(*WS, (131136,)))


@pytest.mark.parametrize("causal", [True, False])
@few("seqlen_q", [3, 4, 2, 8], count=2)
def test_several_new_tokens(seqlen_q, causal):
    lengths = (0, 1, seqlen_q, 64 + seqlen_q, 200, 65, 130, 195)
    for starts in (None, (0, 1, 0, 70, 190, 64, 7, 195)):
        check(LatentProblem(*WS, lengths, seqlen_q=seqlen_q, causal=causal, starts=starts))


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (20, 4), (64, 64), (65, 100), (1000, 4)])
def test_windows_and_sinks_over_poisoned_pages(window, sinks):
    lengths = (0, 1, 63, 64, 65, 100, 321, 2000)
    for shape, page_size in ((WS, 16), (WIDE, 64), (HALVES, 64)):
        check(LatentProblem(*shape, lengths, page_size=page_size, window=window, sinks=sinks))


@few("problem", [SHAPES[1], SHAPES[3], SHAPES[0], SHAPES[2]], count=2, ids=name)
def test_every_kernel_under_plans_that_no_planner_makes(problem):
    from mha2mla.kernels.split_kv.combine import SIZES, compile_combine
    from mha2mla.kernels.split_kv.launch import compile_choice

    draw, here = random.Random(0), capability()
    merge = compile_combine(problem.heads, problem.kv_lora_rank, "bfloat16", max(SIZES), here)
    every = reversed(list_kernels(problem.shape(), here, has_rope_cache=False))
    by_kernel = {(choice.kernel, choice.variant, choice.ctas_per_sm): choice for choice in every}
    inputs, tiles = problem.inputs(torch.bfloat16, "cuda"), [span.tiles for span in problem.spans()]
    for choice in by_kernel.values():
        split = compile_choice(LATENT, problem.shape(), choice, here)
        for num_ctas in (1, 7, 60):
            for work in (None, random_work(tiles, num_ctas, draw)):
                judgement = judge(inputs, *run_kernels(split, merge, inputs, num_ctas, work))
                assert judgement.ok, (choice.reason, choice.variant, num_ctas, judgement.reason)


def test_no_page_counts_as_zeros():
    problem = LatentProblem(*WS, (70, 200))
    inputs = problem.inputs(torch.bfloat16, "cuda")
    holes, filled = inputs["block_table"].clone(), inputs["block_table"].clone()
    holes[1, 1], filled[1, 1] = -1, len(inputs["latent_cache"])
    zeros = torch.cat((inputs["latent_cache"], torch.zeros_like(inputs["latent_cache"][:1])))
    out, lse = mla_decode(**inputs | {"block_table": holes}, return_lse=True, backend="tilelang")
    assert_right(inputs | {"block_table": filled, "latent_cache": zeros}, out, lse, torch.bfloat16)


def test_a_graph_follows_lengths_and_cache():
    problem = LatentProblem(*WS, (500, 4000))
    inputs = problem.inputs(torch.bfloat16, "cuda")
    inputs["latent_cache"].nan_to_num_()
    inputs["block_table"].clamp_(max=len(inputs["latent_cache"]) - 1)
    plan, out = problem.plan(inputs, "tilelang"), torch.empty_like(inputs["q_latent"])

    def step():
        plan.refresh(inputs["cache_seqlens"], None)
        mla_decode(**inputs, plan=plan, out=out, backend="tilelang")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    inputs["cache_seqlens"].copy_(torch.tensor([64, 3999]))
    graph.replay()
    torch.cuda.synchronize()
    assert_right(inputs, out, None, torch.bfloat16)
    assert torch.equal(out, mla_decode(**inputs, backend="tilelang"))
