"""Decode plans on a GPU: splits, the planner, remembered calls, devices, counts of compilations."""

from __future__ import annotations

import random

import pytest
import torch

from mha2mla.kernels import mla_decode, plan_mla_decode
from mha2mla.kernels.ops import capability
from mha2mla.kernels.split_kv.choice import MAX_BATCH
from mha2mla.testing.problems import Problem
from tests.kernels.problems import assert_right, planner_error, random_schedule_call

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROBLEM = Problem(32, 8, 512, 16, (129, 4096), page_size=128)


def test_a_sequence_in_one_fragment_is_written_at_once():
    problem = Problem(32, 8, 512, 16, (64,) * 1000)
    inputs = problem.inputs(torch.bfloat16, "cuda")
    plan = problem.plan(inputs, "tilelang")
    assert int((plan.splits[:, 0] == 1).sum()) == 1000
    plan.partial_out.fill_(torch.nan)
    plan.partial_lse.fill_(torch.nan)
    out, lse = mla_decode(**inputs, plan=plan, return_lse=True, backend="tilelang")
    assert_right(inputs, out, lse)
    assert plan.partial_lse.isnan().all()


def test_the_planner_on_the_gpu_does_what_the_oracle_says():
    from mha2mla.kernels.split_kv.plan_kernel import compile_planner

    planner = compile_planner(capability(torch.device("cuda")))
    for seed in range(50):
        assert planner_error(planner, random_schedule_call(random.Random(seed)), "cuda") == "", f"seed {seed}"
    draw = random.Random(50)
    for most in (1, 100, 9000):
        call = random_schedule_call(draw) | {"lengths": [draw.randint(0, most) for _ in range(MAX_BATCH)]}
        assert planner_error(planner, call | {"starts": None, "num_ctas": 264, "num_splits": 0}, "cuda") == ""


@pytest.mark.parametrize("num_splits", [1, 3, 40])
def test_splits_that_were_asked_for(num_splits):
    """Right at any number; a sequence's numbers do not depend on the others in the batch."""
    problem = Problem(32, 8, 512, 16, (5000, 64, 0, 1, 700, 5000))
    inputs = problem.inputs(torch.bfloat16, "cuda")

    def run(lengths: torch.Tensor):
        mine = inputs | {"cache_seqlens": lengths, "cache_starts": None}
        plan = plan_mla_decode(
            mine["q_latent"], mine["rope_cache"], mine["block_table"], lengths, qk_rope_head_dim=16,
            num_splits=num_splits, backend="tilelang",
        )  # fmt: skip
        return mine, plan, *mla_decode(**mine, plan=plan, return_lse=True, backend="tilelang")

    mine, plan, out, lse = run(inputs["cache_seqlens"])
    assert plan.splits[:, 0].tolist() == [min(-(-length // 64), num_splits) for length in problem.lengths]
    assert_right(mine, out, lse)
    _, _, other, _ = run(inputs["cache_seqlens"].clamp(max=900).index_fill(0, torch.tensor([0], device="cuda"), 5000))
    assert torch.equal(other[0], out[0]) and torch.equal(other[4], out[4]) and not torch.equal(other[5], out[5])


def test_a_plan_is_for_the_lengths_it_was_refreshed_with():
    problem = Problem(32, 8, 512, 16, (100, 900, 3))
    inputs = problem.inputs(torch.bfloat16, "cuda")
    other = torch.tensor([5, 0, 3], dtype=torch.int32, device="cuda")
    call = (inputs["q_latent"], inputs["rope_cache"], inputs["block_table"], other)
    plan = plan_mla_decode(*call, qk_rope_head_dim=16)
    plan.refresh(inputs["cache_seqlens"])
    for _ in range(3):  # the layers of a model
        out, lse = mla_decode(**inputs, plan=plan, return_lse=True, backend="tilelang")
        assert_right(inputs, out, lse)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_latent": lambda x: x.half()}, "q_pe.dtype is torch.bfloat16; expected torch.float16"),
        ({"latent_cache": lambda x: x[:-1]}, "rope_cache.shape is "),
        ({"rope_cache": lambda x: x.half()}, "rope_cache.dtype is torch.float16"),
        ({"q_pe": lambda x: x.cpu()}, "q_pe.device is cpu"),
        ({"block_table": lambda x: x[:1]}, "block_table.shape is "),
        ({"block_table": lambda x: x.long()}, "block_table.dtype is torch.int64"),
        ({"cache_seqlens": lambda x: x.cpu()}, "cache_seqlens.device is cpu"),
        ({"q_latent": lambda x: x[:1], "q_pe": lambda x: x[:1]}, "shape is "),
    ],
)
def test_a_call_like_a_remembered_one_is_refused_by_name_where_it_differs(change, message):
    """A plan looks at what the kernels' host code does not; what that refuses has to have its name as well."""
    problem = Problem(32, 1, 512, 64, (65, 300))
    inputs = problem.inputs(torch.bfloat16, "cuda")
    plan = problem.plan(inputs, "tilelang")
    expected = mla_decode(**inputs, plan=plan)
    assert len(plan.memory.launches) == 1
    wrong = inputs | {name: changed(inputs[name]) for name, changed in change.items()}
    with pytest.raises(ValueError, match=message):
        mla_decode(**wrong, plan=plan)
    assert torch.equal(mla_decode(**inputs, plan=plan), expected) and len(plan.memory.launches) == 1


def test_one_compilation_serves_all_lengths_and_batches():
    from mha2mla.kernels.split_kv.combine import SIZES, compile_combine
    from mha2mla.kernels.split_kv.launch import compile_choice
    from mha2mla.kernels.split_kv.plan_kernel import compile_planner

    def misses() -> list[int]:
        return [cached.cache_info().misses for cached in (compile_choice, compile_planner, compile_combine)]

    before = misses()
    for i in range(1, 51):
        problem = Problem(8, 2, 72, 16, (i * 7,) * (1, 2, 3, 50, 200)[i % 5], window=None if i % 3 else 30 + i)
        inputs = problem.inputs(torch.bfloat16, "cuda")
        mla_decode(**inputs, plan=problem.plan(inputs, "tilelang"), backend="tilelang")
    split, planner, merge = (after - b for after, b in zip(misses(), before, strict=True))
    assert split == 1
    assert planner <= 1
    assert merge <= len(SIZES)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device on this machine")
def test_it_runs_on_a_second_device():
    inputs = PROBLEM.inputs(torch.bfloat16, "cuda:1")
    plan = PROBLEM.plan(inputs, "tilelang")
    for planned in (None, plan, plan):
        out, lse = mla_decode(**inputs, plan=planned, return_lse=True, backend="tilelang")
        assert_right(inputs, out, lse)
    assert torch.cuda.current_device() == 0 and plan.memory.launches


def test_it_breaks_no_compiled_graph():
    inputs = PROBLEM.inputs(torch.bfloat16, "cuda")
    compiled = torch.compile(lambda i: mla_decode(**i, backend="tilelang"), fullgraph=True)
    assert torch.equal(compiled(inputs), mla_decode(**inputs, backend="tilelang"))
