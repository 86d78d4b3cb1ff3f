"""The decode op on a GPU: every kernel against float64, poisoned caches, graphs, streams, counts of compilations."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from mha2mla.kernels import mla_decode, plan_mla_decode
from mha2mla.kernels.mla_decode.api import MLA
from mha2mla.kernels.mla_decode.selection import heads_on_m_variants, list_kernels, rope_variants
from mha2mla.kernels.split_kv.limits import MAX_SPLITS
from mha2mla.kernels.split_kv.schedule import MAX_BATCH
from mha2mla.kernels.split_kv.tiling import tile_rows
from tests.kernels.problems import (
    Problem,
    assert_right,
    errors,
    exact,
    poison_unseen_pages,
    random_schedule_call,
    random_work,
    run_kernels,
    same_schedule,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPES = [
    Problem(32, 32, 512, 16, (0, 1, 63, 64, 65, 700)),
    Problem(32, 32, 512, 16, (0, 1, 15, 16, 17, 700), page_size=16),
    Problem(32, 8, 512, 16, (129, 4096), page_size=128),
    Problem(32, 1, 512, 64, (1, 64, 2000), combined=True),
    Problem(9, 3, 192, 64, (5, 300)),
    Problem(9, 9, 256, 16, (5, 300)),
    Problem(9, 3, 216, 24, (5, 300)),
    Problem(14, 2, 80, 8, (65, 300), page_size=32),
    Problem(14, 14, 88, 24, (65, 300)),
    Problem(12, 12, 144, 32, (65, 300), combined=True),
    Problem(24, 8, 320, 24, (65, 300)),
    Problem(24, 24, 384, 40, (65, 300)),
    Problem(40, 40, 448, 16, (65, 300)),
    Problem(40, 8, 512, 48, (65, 300)),
    Problem(3, 1, 512, 256, (65, 300)),
    Problem(1, 1, 8, 8, (1, 300)),
    Problem(63, 63, 128, 8, (65, 300)),
    Problem(126, 2, 512, 128, (65, 300)),
    Problem(128, 128, 512, 16, (65, 300)),
    Problem(128, 1, 512, 64, (65, 300)),
    Problem(64, 16, 192, 128, (65, 300)),
    Problem(63, 7, 304, 32, (65, 300), page_size=16),  # two warpgroups, more chunks of rope columns than the ring holds
    Problem(14, 1, 256, 216, (65, 300), seqlen_q=4),
    Problem(32, 1, 1024, 64, (0, 1, 63, 64, 65, 2000), combined=True),
    Problem(32, 8, 896, 16, (0, 1, 15, 16, 17, 700), page_size=16),
    Problem(64, 1, 960, 64, (65, 300)),
    Problem(64, 8, 1024, 32, (65, 300), page_size=128),
    Problem(16, 16, 768, 24, (65, 300), page_size=32),
    Problem(9, 3, 520, 40, (5, 300)),
    Problem(40, 8, 576, 32, (65, 300)),
    Problem(128, 1, 1024, 64, (65, 300)),
    Problem(12, 1, 1000, 96, (65, 300), seqlen_q=4),
    Problem(3, 1, 1024, 256, (65, 300)),
]


def name(problem: Problem) -> str:
    return (
        f"H{problem.heads}-G{problem.num_rope_heads}-c{problem.kv_lora_rank}-r{problem.qk_rope_head_dim}"
        f"-p{problem.page_size}-q{problem.seqlen_q}"
    )


def check(problem: Problem, dtype=torch.bfloat16, planned: bool | None = None) -> torch.Tensor:
    """Runs the op on a problem, by a plan or (without a window) by one made for the call, and judges the output."""
    inputs = poison_unseen_pages(problem, problem.inputs(dtype, "cuda"))
    plan = problem.plan(inputs, "tilelang") if planned or problem.window is not None else None
    if plan is not None:
        plan.partial_out.fill_(torch.nan)
        plan.partial_lse.fill_(torch.nan)
    out, lse = mla_decode(**inputs, plan=plan, return_lse=True, backend="tilelang")
    assert_right(inputs, out, lse, dtype, **problem.visibility)
    return out


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@pytest.mark.parametrize("problem", SHAPES, ids=name)
def test_no_shape_reads_poison_or_drops_heads(problem):
    """Odd heads and widths over poisoned pages, in both dtypes of the cache, bit-equal when run again."""
    out = check(problem)
    for _ in range(5):
        again = mla_decode(**problem.inputs(torch.bfloat16, "cuda"), backend="tilelang")
        assert torch.equal(out, again)


@pytest.mark.parametrize("problem", [SHAPES[0], SHAPES[4], SHAPES[9], *SHAPES[23:26]], ids=name)
def test_float16(problem):
    check(problem, torch.float16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q", [2, 3, 4, 8])
def test_several_new_tokens_are_aligned_bottom_right(seqlen_q, causal):
    # 65, 130 and 195 end in a tile that the earlier queries do not see at all
    lengths = (0, 1, seqlen_q, 64 + seqlen_q, 200, 65, 130, 195)
    check(Problem(16, 16, 512, 16, lengths, seqlen_q=seqlen_q, causal=causal))
    check(Problem(6, 2, 64, 16, lengths, seqlen_q=seqlen_q, causal=causal, starts=(0, 1, 0, 70, 190, 64, 7, 195)))
    check(Problem(9, 3, 192, 64, lengths, seqlen_q=seqlen_q, causal=causal))
    check(Problem(64, 1, 512, 64, lengths, seqlen_q=seqlen_q, causal=causal))  # rows for heads_on_m
    check(Problem(24, 1, 960, 64, lengths, seqlen_q=seqlen_q, causal=causal))


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


def test_left_padding():
    check(Problem(32, 8, 512, 16, (70, 140, 64, 2000, 90), starts=(1, 64, 63, 1900, 90)))


WINDOWED = (0, 1, 63, 64, 65, 100, 321, 470, 3000)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 1), (20, 4), (64, 64), (65, 100), (200, 5), (5000, 4)])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(32, 32, 512, 16, WINDOWED),
        Problem(9, 3, 216, 24, WINDOWED, page_size=16),
        Problem(128, 1, 512, 64, WINDOWED, page_size=128),
        Problem(32, 8, 128, 16, WINDOWED, page_size=32, seqlen_q=2),
        Problem(16, 1, 256, 64, WINDOWED, page_size=16, seqlen_q=4, causal=False),
        Problem(32, 1, 1024, 64, WINDOWED),
        Problem(64, 8, 648, 16, WINDOWED, page_size=16),
    ],
    ids=name,
)
def test_windows_and_sinks_over_poisoned_pages(problem, window, sinks):
    """Windows begin and sinks end in the middle of tiles, whose other pages have no table entry."""
    problem = dataclasses.replace(problem, window=window, sinks=sinks)
    check(problem)
    check(dataclasses.replace(problem, starts=(0, 1, 60, 0, 65, 30, 130, 17, 2900)))


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
        (c.kernel, c.warpgroups, c.ctas_per_sm): c
        for c in reversed(list_kernels(problem.shape(), capability()))
        if c.variant == variant_of_the_rule(c, problem)
    }
    for choice in choices.values():
        check_choice(problem, choice)


VARIANTS = [
    (Problem(32, 32, 512, 16, (0, 1, 65, 700, 64)), ("blocks", "gemv")),
    (Problem(32, 8, 512, 64, (0, 1, 65, 700, 64)), ("blocks", "gemv")),
    (Problem(9, 3, 256, 16, (0, 1, 65, 700, 64)), ("gemv",)),
    (Problem(64, 4, 128, 32, (0, 1, 65, 700, 64), page_size=16), ("gemv",)),
    (Problem(128, 1, 512, 64, (0, 1, 65, 700, 64)), heads_on_m_variants(tile_rows(128, 1, 1, 64, 1))),
    (Problem(128, 1, 512, 64, (0, 1, 65, 700, 64), page_size=16), ("plain",)),
    (Problem(64, 1, 512, 64, (0, 1, 65, 700, 64), seqlen_q=2), ("plain",)),
    (Problem(64, 1, 512, 64, (0, 1, 65, 700, 64)), ("lazy",)),
]


@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        pytest.param(problem, variant, id=f"{name(problem)}-{variant}")
        for problem, variants in VARIANTS
        for variant in variants
    ],
)
def test_every_variant_is_right(problem, variant):
    """Those that only a tuning table chooses, and of 128 rows the rule's too; rows whose maximum grows by little and by
    much, and large scores."""
    choice = next(c for c in list_kernels(problem.shape(), capability()) if c.variant == variant)
    check_choice(problem, choice)
    for scale in (30.0, 3e5) if "lazy" in variant else (30.0,):
        check_choice(dataclasses.replace(problem, scale=scale), choice)


def variant_of_the_rule(choice, problem: Problem) -> str:
    if choice.kernel == "swap_ab_ws":
        return next(iter(rope_variants(choice.tiling, problem.qk_rope_head_dim)))
    return heads_on_m_variants(choice.tiling)[0] if choice.kernel == "heads_on_m" else ""


def check_choice(problem: Problem, choice) -> None:
    """A configuration by plans of the planner and by plans no planner makes, twice, with and without a window."""
    from mha2mla.kernels.split_kv.launch import MERGES, compile_choice, compile_merge, merge_rows

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
            splits = sorted(MERGES)[i % len(MERGES)]
            rows = merge_rows(shape.heads, shape.seqlen_q, splits)
            merge = compile_merge(shape.heads, shape.kv_lora_rank, shape.dtype, splits, capability(), rows)
            first = run_kernels(split, merge, inputs, num_ctas, work, **case.visibility)
            try:
                assert_right(inputs, *first, torch.bfloat16, **case.visibility)
            except AssertionError as error:
                raise AssertionError(f"{choice.reason}; {num_ctas} CTAs, plan {i}: {error}") from error
            second = run_kernels(split, merge, inputs, num_ctas, work, **case.visibility)
            assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), choice.reason


@pytest.mark.parametrize("batch", [2, 40, 131, 300])
def test_mixed_lengths(batch):
    """Many CTAs, more sequences than CTAs, short and empty sequences beside long ones."""
    draw = random.Random(batch)
    lengths = tuple(draw.choice([0, 1, draw.randint(1, 200), draw.randint(1, 4000)]) for _ in range(batch))
    for problem in (Problem(32, 8, 128, 16, lengths), Problem(128, 1, 128, 64, lengths, page_size=128)):
        check(problem, planned=True)
        check(dataclasses.replace(problem, window=100, sinks=4))


@pytest.mark.parametrize("problem", [Problem(9, 3, 192, 64, (1,)), Problem(8, 1, 64, 16, (1,))], ids=name)
def test_one_long_sequence_is_in_as_many_pieces_as_there_are_ctas(problem):
    """The combine must hold a weight for each."""
    num_ctas = problem.plan(problem.inputs(torch.bfloat16, "cuda"), "tilelang").num_ctas
    assert num_ctas <= MAX_SPLITS
    problem = dataclasses.replace(problem, lengths=(128 * num_ctas,))
    plan = problem.plan(problem.inputs(torch.bfloat16, "cuda"), "tilelang")
    assert plan.splits.tolist() == [[num_ctas, 0]]
    check(problem, planned=True)
    check(dataclasses.replace(problem, lengths=(0, 64 * 900 + 1, 3)), planned=True)


def test_a_sequence_in_one_fragment_is_written_at_once():
    problem = Problem(32, 8, 512, 16, (64,) * 1000)
    inputs = problem.inputs(torch.bfloat16, "cuda")
    plan = problem.plan(inputs, "tilelang")
    assert int((plan.splits[:, 0] == 1).sum()) == 1000
    plan.partial_out.fill_(torch.nan)
    plan.partial_lse.fill_(torch.nan)
    out, lse = mla_decode(**inputs, plan=plan, return_lse=True, backend="tilelang")
    assert_right(inputs, out, lse, torch.bfloat16)
    assert plan.partial_lse.isnan().all()


def test_the_planner_on_the_gpu_does_what_the_oracle_says():
    from mha2mla.kernels.split_kv.launch import compile_planner

    planner = compile_planner(capability())
    for seed in range(50):
        assert same_schedule(planner, random_schedule_call(random.Random(seed)), "cuda"), f"seed {seed}"
    draw = random.Random(50)
    for most in (1, 100, 9000):
        call = random_schedule_call(draw) | {"lengths": [draw.randint(0, most) for _ in range(MAX_BATCH)]}
        assert same_schedule(planner, call | {"starts": None, "num_ctas": 264, "num_splits": 0}, "cuda")


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
    assert_right(mine, out, lse, torch.bfloat16)
    _, _, other, _ = run(inputs["cache_seqlens"].clamp(max=900).index_fill(0, torch.tensor([0], device="cuda"), 5000))
    assert torch.equal(other[0], out[0]) and torch.equal(other[4], out[4]) and not torch.equal(other[5], out[5])


def test_large_scores_are_not_taken_for_masked_ones():
    problem = Problem(32, 32, 512, 16, (65, 1000), scale=3e5)
    inputs = problem.inputs(torch.bfloat16, "cuda")
    out, lse = mla_decode(**inputs, return_lse=True, backend="tilelang")
    expected, expected_lse = exact(inputs)
    assert float(expected_lse.abs().max()) > 3e5
    assert not torch.isnan(out).any()
    assert errors(out, expected)[0] < 2e-2
    assert float(((lse - expected_lse) / expected_lse).abs().max()) < 1e-4


def test_strided_queries_are_not_misread():
    problem = SHAPES[2]
    inputs = problem.inputs(torch.bfloat16, "cuda")
    plain = mla_decode(**inputs, backend="tilelang")
    q = inputs["q_latent"].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = torch.cat([inputs["q_pe"], inputs["q_pe"]], -1)[..., : problem.qk_rope_head_dim]
    assert torch.equal(mla_decode(**(inputs | {"q_latent": q, "q_pe": wide}), backend="tilelang"), plain)
    assert q.stride() != inputs["q_latent"].stride()


def test_addresses_do_not_overflow_32_bits():
    """Pages more than 2^31 elements into the cache."""
    page, d_c, d_r = 64, 512, 16
    pages = 2**31 // (page * d_c) + 8
    latent = torch.empty(pages, page, d_c, dtype=torch.bfloat16, device="cuda")
    rope = torch.empty(pages, page, 1, d_r, dtype=torch.bfloat16, device="cuda")
    few = Problem(32, 1, d_c, d_r, (130,)).inputs(torch.bfloat16, "cuda")
    used = few["block_table"][0, :3].long()
    far = torch.arange(pages - 3, pages, device="cuda")
    latent[far], rope[far] = few["latent_cache"][used], few["rope_cache"][used]
    table = far.int()[None].contiguous()
    far_away = mla_decode(
        **(few | {"latent_cache": latent, "rope_cache": rope, "block_table": table}), backend="tilelang"
    )
    near = mla_decode(**(few | {"block_table": used.int()[None].contiguous()}), backend="tilelang")
    assert torch.equal(far_away, near)


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (70, 3)])
@pytest.mark.parametrize("heads", [32, 128])
def test_a_graph_captured_at_one_length_serves_others(heads, window, sinks):
    """The plan is made inside the graph, so it follows the lengths."""
    problem = Problem(heads, 1, 512, 64, (100, 100, 100), slack=20)
    inputs = problem.inputs(torch.bfloat16, "cuda")
    inputs["latent_cache"], inputs["rope_cache"] = (
        torch.randn_like(inputs[name]).repeat(10, *([1] * (inputs[name].dim() - 1)))
        for name in ("latent_cache", "rope_cache")
    )
    pages = inputs["latent_cache"].shape[0]
    inputs["block_table"] = torch.randint(0, pages, inputs["block_table"].shape, dtype=torch.int32, device="cuda")
    inputs["cache_starts"] = torch.zeros_like(inputs["cache_seqlens"])
    plan = dataclasses.replace(problem, window=window, sinks=sinks).plan(inputs, "tilelang")
    out = torch.empty_like(inputs["q_latent"])

    def step():
        plan.refresh(inputs["cache_seqlens"], inputs["cache_starts"])
        return mla_decode(**inputs, plan=plan, out=out, return_lse=True, backend="tilelang")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = step()
    for lengths, starts in (
        ((1, 0, 1400), (0, 0, 3)),
        ((64, 65, 0), (10, 0, 0)),
        ((0, 0, 0), (0, 0, 0)),
        ((1400, 1399, 2), (0, 1000, 1)),
        ((9999, 5, 7), (0, 5, 0)),  # more than the table holds, and one that sees nothing
    ):
        inputs["cache_seqlens"].copy_(torch.tensor(lengths))
        inputs["cache_starts"].copy_(torch.tensor(starts))
        for buffer in (plan.partial_out, plan.partial_lse, out, lse):
            buffer.fill_(torch.nan)
        plan.schedule.fill_(-(2**31))
        plan.splits.fill_(-7)
        graph.replay()
        expected, expected_lse = exact(inputs, window, sinks)
        assert not torch.isnan(out).any()
        assert errors(out, expected)[0] < 4e-3 or float(expected.norm()) == 0
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-3)


def test_a_plan_is_for_the_lengths_it_was_refreshed_with():
    problem = Problem(32, 8, 512, 16, (100, 900, 3))
    inputs = problem.inputs(torch.bfloat16, "cuda")
    plan = plan_mla_decode(
        inputs["q_latent"],
        inputs["rope_cache"],
        inputs["block_table"],
        torch.tensor([5, 0, 3], dtype=torch.int32, device="cuda"),
        qk_rope_head_dim=16,
    )
    plan.refresh(inputs["cache_seqlens"])
    for _ in range(3):  # the layers of a model
        out, lse = mla_decode(**inputs, plan=plan, return_lse=True, backend="tilelang")
        assert_right(inputs, out, lse, torch.bfloat16)


def test_one_compilation_serves_all_lengths_and_batches():
    from mha2mla.kernels.split_kv.launch import MERGES, compile_choice, compile_merge, compile_planner

    def misses() -> list[int]:
        return [cached.cache_info().misses for cached in (compile_choice, compile_planner, compile_merge)]

    before = misses()
    for i in range(1, 51):
        problem = Problem(8, 2, 72, 16, (i * 7,) * (1, 2, 3, 50, 200)[i % 5], window=None if i % 3 else 30 + i)
        inputs = problem.inputs(torch.bfloat16, "cuda")
        mla_decode(**inputs, plan=problem.plan(inputs, "tilelang"), backend="tilelang")
    split, planner, merge = (after - b for after, b in zip(misses(), before, strict=True))
    assert split == 1
    assert planner <= 1
    assert merge <= len(MERGES)


def test_it_runs_on_the_current_stream():
    """The kernels wait for what their own stream does before them, and for nothing else; of a remembered call too."""
    inputs = SHAPES[2].inputs(torch.bfloat16, "cuda")
    plan = SHAPES[2].plan(inputs, "tilelang")
    expected = [mla_decode(**inputs, plan=plan, backend="tilelang") for _ in range(2)][-1].clone()
    for planned in (None, plan):
        late = {**inputs, "q_latent": torch.zeros_like(inputs["q_latent"])}
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late["q_latent"].copy_(inputs["q_latent"])
            out = mla_decode(**late, plan=planned, backend="tilelang")
        stream.synchronize()
        assert torch.equal(out, expected)
    assert len(plan.memory.launches) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device on this machine")
def test_it_runs_on_a_second_device():
    inputs = SHAPES[2].inputs(torch.bfloat16, "cuda:1")
    plan = SHAPES[2].plan(inputs, "tilelang")
    for planned in (None, plan, plan):
        out, lse = mla_decode(**inputs, plan=planned, return_lse=True, backend="tilelang")
        assert_right(inputs, out, lse, torch.bfloat16)
    assert torch.cuda.current_device() == 0 and plan.memory.launches


def test_it_breaks_no_compiled_graph():
    inputs = SHAPES[2].inputs(torch.bfloat16, "cuda")
    compiled = torch.compile(lambda i: mla_decode(**i, backend="tilelang"), fullgraph=True)
    assert torch.equal(compiled(inputs), mla_decode(**inputs, backend="tilelang"))


def test_no_host_synchronisation():
    inputs = SHAPES[2].inputs(torch.bfloat16, "cuda")
    plan = SHAPES[2].plan(inputs, "tilelang")
    mla_decode(**inputs, plan=plan, backend="tilelang")
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.refresh(inputs["cache_seqlens"])
        mla_decode(**inputs, plan=plan, backend="tilelang")
        mla_decode(**inputs, backend="tilelang")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("seed", range(24))
def test_random_dynamic_arguments(seed):
    """One geometry, random batch, lengths, starts, table width and new tokens."""
    make = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=make))

    lengths = tuple(draw(0, 900) for _ in range(draw(1, 40)))
    starts = tuple(draw(0, length) for length in lengths) if seed % 2 else None
    window = draw(1, 300) if seed % 3 == 0 else None
    check(
        Problem(
            12,
            4,
            128,
            16,
            lengths,
            page_size=32,
            seqlen_q=draw(1, 2),
            starts=starts,
            window=window,
            sinks=draw(0, 90) if window else 0,
            slack=draw(0, 9),
            seed=seed,
        ),
        planned=bool(seed % 4),
    )


def draw_geometry(seed: int) -> Problem:
    """A random geometry within the contract, over short sequences."""
    make = torch.Generator().manual_seed(seed)

    def one_of(options):
        return options[int(torch.randint(len(options), (), generator=make))]

    groups = one_of((1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 32, 48, 96, 128))
    per_group = one_of([n for n in (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 40, 64, 128) if n * groups <= 128])
    widest = min(256 if groups == 1 else 128, 2048 // groups)
    seqlen_q = one_of((1, 1, 1, 2, 4, 8))
    return Problem(
        heads=groups * per_group,
        num_rope_heads=groups,
        kv_lora_rank=8 * one_of(range(1, 65)),
        qk_rope_head_dim=8 * one_of(range(1, widest // 8 + 1)),
        lengths=tuple(one_of((0, 1, 17, 63, 64, 65, 127, 130, 321)) for _ in range(4)),
        page_size=one_of((16, 32, 64, 128)),
        seqlen_q=seqlen_q,
        combined=bool(one_of((0, 1))),
        window=one_of((None, None, 1, 50, 100)),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(28))
def test_random_geometries(seed):
    """Any H, G, d_c, d_r, page and S_q of the contract."""
    check(draw_geometry(seed), torch.float16 if seed % 4 == 3 else torch.bfloat16)


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
    """What sm_80 and sm_89 would run (mma.sync, their shared memory), on this GPU: no wgmma, no TMA."""
    import tilelang

    from mha2mla.kernels.compilation import PASS_CONFIGS, target_of
    from mha2mla.kernels.mla_decode.build import make_split
    from mha2mla.kernels.mla_decode.selection import select_kernel
    from mha2mla.kernels.split_kv.launch import MERGES, make_merge

    shape = problem.shape()
    choice = select_kernel(shape, older_capability)
    assert choice.kernel == "swap_ab"
    older = PASS_CONFIGS | {"tl.disable_wgmma": True, "tl.disable_tma_lower": True}
    split, merge = (
        tilelang.compile(function, target=target_of(capability()), pass_configs=older)
        for function in (
            make_split(shape, choice),
            make_merge(shape.heads, shape.kv_lora_rank, shape.dtype, max(MERGES)),
        )
    )
    assert "wgmma" not in split.get_kernel_source()
    for case in (problem, dataclasses.replace(problem, window=33, sinks=5)):
        inputs = poison_unseen_pages(case, case.inputs(torch.bfloat16, "cuda"))
        work = random_work([span.tiles for span in case.spans()], 7, random.Random(0))
        for num_ctas, plan in ((1, None), (3, None), (40, None), (7, work)):
            out, lse = run_kernels(split, merge, inputs, num_ctas, plan, **case.visibility)
            assert_right(inputs, out, lse, torch.bfloat16, **case.visibility)
