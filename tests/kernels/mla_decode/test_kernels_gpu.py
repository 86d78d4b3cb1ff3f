"""Every decode kernel that could be chosen, by plans of the planner and plans that no planner makes."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from mha2mla.kernels.mla_decode.api import MLA
from mha2mla.kernels.mla_decode.selection import list_kernels
from tests.kernels.mla_decode.problems import capability, name
from tests.kernels.problems import Problem, assert_right, poison_unseen_pages, random_work, run_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CANDIDATES = [
    Problem(32, 32, 512, 16, (0, 1, 65, 700, 64)),
    Problem(64, 8, 512, 16, (0, 1, 65, 700, 64), page_size=16),
    Problem(64, 64, 256, 32, (0, 1, 65, 700, 64)),
    Problem(128, 1, 512, 64, (0, 1, 65, 700, 64)),
    Problem(64, 1, 200, 64, (0, 1, 65, 700, 64), page_size=16),
    Problem(32, 1, 512, 64, (0, 1, 65, 700, 64), seqlen_q=2),
    Problem(9, 3, 72, 16, (0, 1, 65, 700, 64), page_size=32, seqlen_q=8),
    Problem(32, 1, 1024, 64, (0, 1, 65, 700, 64)),
    Problem(64, 1, 576, 64, (0, 1, 65, 700, 64), page_size=16),
    Problem(16, 8, 640, 16, (0, 1, 65, 700, 64), page_size=32, seqlen_q=2),
]


@pytest.mark.parametrize("problem", CANDIDATES, ids=name)
def test_every_kernel_that_could_be_chosen_is_right(problem):
    """Not only the rule's choice; by the planner's plans for any number of CTAs, and by plans no planner makes."""
    choices = {
        (c.kernel, c.warpgroups, c.ctas_per_sm): c for c in reversed(list_kernels(problem.shape(), capability()))
    }
    for choice in choices.values():
        check_choice(problem, choice)


@pytest.mark.parametrize("scale", [30.0, 3e5])
def test_lazy_rescaling_is_right_for_large_scores(scale):
    """Rows whose maximum grows by little and by much."""
    problem = Problem(128, 1, 512, 64, (0, 1, 65, 700, 64), scale=scale)
    choice = list_kernels(problem.shape(), capability())[0]
    assert choice.variant == "lazy"
    check_choice(problem, choice)


def check_choice(problem: Problem, choice) -> None:
    """A configuration by plans of the planner and by plans no planner makes, twice, with and without a window."""
    from mha2mla.kernels.split_kv.combine import SIZES, combine_rows, compile_combine
    from mha2mla.kernels.split_kv.launch import compile_choice

    shape = problem.shape()
    split = compile_choice(MLA, shape, choice, capability())
    for case in (problem, dataclasses.replace(problem, window=40, sinks=3, starts=(0, 0, 2, 30, 5))):
        inputs = poison_unseen_pages(case, case.inputs(torch.bfloat16, "cuda"))
        plans = [(1, None), (2, None), (5, None), (132, None)]
        for seed in range(3):
            num_ctas = (3, 9, 40)[seed]
            work = random_work([span.tiles for span in case.spans()], num_ctas, random.Random(seed))
            plans.append((num_ctas, work))
        for i, (num_ctas, work) in enumerate(plans):
            splits = sorted(SIZES)[i % len(SIZES)]
            rows = combine_rows(shape.heads, shape.seqlen_q, splits)
            merge = compile_combine(shape.heads, shape.kv_lora_rank, shape.dtype, splits, capability(), rows)
            first = run_kernels(split, merge, inputs, num_ctas, work, **case.visibility)
            try:
                assert_right(inputs, *first, torch.bfloat16, **case.visibility)
            except AssertionError as error:
                raise AssertionError(f"{choice.reason}; {num_ctas} CTAs, plan {i}: {error}") from error
            second = run_kernels(split, merge, inputs, num_ctas, work, **case.visibility)
            assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), choice.reason


@pytest.mark.parametrize(
    "problem",
    [
        Problem(32, 8, 512, 16, (0, 1, 65, 300)),
        Problem(9, 3, 144, 64, (65, 300), page_size=16, seqlen_q=2),
        Problem(14, 14, 80, 24, (63, 130), page_size=32, starts=(3, 64)),
    ],
    ids=name,
)
@pytest.mark.parametrize("older_capability", [80, 89])
def test_the_portable_kernel_with_the_instructions_of_older_gpus(problem, older_capability):
    """Code for sm_80 and sm_89 (mma.sync, their shared memory) on this GPU: no wgmma, no TMA."""
    import tilelang

    from mha2mla.kernels.machine import PASS_CONFIGS, target_of
    from mha2mla.kernels.mla_decode.api import MLA
    from mha2mla.kernels.mla_decode.selection import select_kernel
    from mha2mla.kernels.split_kv.combine import SIZES, make_combine

    shape = problem.shape()
    choice = select_kernel(shape, older_capability)
    assert choice.kernel == "swap_ab"
    older = PASS_CONFIGS | {"tl.disable_wgmma": True, "tl.disable_tma_lower": True}
    split, merge = (
        tilelang.compile(function, target=target_of(capability()), pass_configs=older)
        for function in (
            MLA.make_split(shape, choice),
            make_combine(shape.heads, shape.kv_lora_rank, shape.dtype, max(SIZES)),
        )
    )
    assert "wgmma" not in split.get_kernel_source()
    for case in (problem, dataclasses.replace(problem, window=33, sinks=5)):
        inputs = poison_unseen_pages(case, case.inputs(torch.bfloat16, "cuda"))
        work = random_work([span.tiles for span in case.spans()], 7, random.Random(0))
        for num_ctas, plan in ((1, None), (3, None), (40, None), (7, work)):
            out, lse = run_kernels(split, merge, inputs, num_ctas, plan, **case.visibility)
            assert_right(inputs, out, lse, torch.bfloat16, **case.visibility)
