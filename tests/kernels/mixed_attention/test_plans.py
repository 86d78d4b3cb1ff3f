"""Plans of the mixed-batch ops: their layout, the lengths that they are for, and what they refuse by name."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import FEWEST_EXPANDED, expanded_tokens, gqa_attention, plan_mla_attention
from mha2mla.kernels.mixed_attention.layout import (
    ABSORBS_ALL,
    LAUNCH_FLOP,
    absorbs_up_to,
    form_costs,
    lay_out,
    saves_launches,
)
from mha2mla.kernels.split_kv.op import PagedOp
from tests.kernels.mixed_attention.problems import (
    SCALE,
    WIDTHS,
    Problem,
    Widths,
    error,
    gqa_plan,
    gqa_problem,
    layout_of,
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90), st.integers(0, 20)), max_size=8),
    st.integers(8, 50),
    st.integers(1, 100),
    st.integers(-1, 100).filter(bool),
    st.integers(0, 12),
)
@example([(9, 0, 10), (9, 39, 0)], 8, 47, -1, 0)  # more padding than tokens is no room for others
def test_layout_covers_every_query_once(sequences, short, limit, window, sinks):
    queries, cached, starts = zip(*sequences, strict=True) if sequences else ((), (), ())
    layout = lay_out(queries, cached, starts, short, limit, window, sinks)
    seen = [[0] * length for length in queries]
    for group in layout.groups:
        for row, first in zip(group.rows, group.first_query, strict=True):
            for q in range(group.seqlen_q):
                seen[row][first + q] += 1
    for wave in layout.waves:
        assert wave.tokens == sum(queries[wave.first : wave.stop])
        for i, sequence in enumerate(range(wave.first, wave.stop)):
            assert queries[sequence] > 8
            seen[sequence] = [count + 1 for count in seen[sequence]]
            stop = cached[sequence] + queries[sequence]
            assert wave.chunks[0].first[i] == min(starts[sequence], stop)
            ends = [chunk.first[i] + chunk.lengths[i] for chunk in wave.chunks]
            gap = wave.chunks[-1].gaps[i] if wave.chunks[-1].gaps else 0
            assert ends[:-1] == [chunk.first[i] for chunk in wave.chunks[1:]] and ends[-1] == stop - gap
            behind = wave.chunks[0].first[i] + sinks + gap
            assert gap == 0 or (window > 0 and len(wave.chunks) == 1 and behind == cached[sequence] + 1 - window)
            assert [chunk.causal for chunk in wave.chunks] == [False] * (len(wave.chunks) - 1) + [True]
        assert all(chunk.tokens <= limit or wave.stop - wave.first == 1 for chunk in wave.chunks)
    assert all(count >= 1 for counts in seen for count in counts)
    assert all(counts == [1] * len(counts) for counts in seen if len(counts) <= 8)


def test_the_form_follows_from_flop():
    """H=32, d_c=512, d_r=16, 112 + 128: 2·512·32·240 FLOP expand a token, (2·32·1040 − 2·32·256) a query costs more."""
    assert absorbs_up_to(MLAGeometry(32, 32, 512, 16, 112, 128)) == (512 * 32 * 240) // (32 * 1040 - 32 * 256) == 156
    assert absorbs_up_to(MLAGeometry(4, 4, 4, 8, 8, 8)) == 2**30  # a latent narrower than a head never needs expanding
    # Keys from the latent: 512·64 once a token, and once in 8 queries of the absorbed form.
    geometry = MLAGeometry(32, 1, 512, 64, 64, 128, 8, rope_from_latent=True)
    assert absorbs_up_to(geometry) == (512 * 8 * 192 + 512 * 64) // (32 * 1088 + 512 * 8 - 32 * 256) == 26


@pytest.mark.parametrize("computed", [False, True], ids=["stored keys", "computed keys"])
def test_form_costs_are_those_of_their_products(computed):
    """Counted product by product; SmolLM2's shape at half of its cache, in prompts and chunks of them."""
    heads, latent, rope, nope, value, up = 9, 192, 128, 64, 64, 3
    costs = form_costs(MLAGeometry(heads, 1, latent, rope, nope, value, up, rope_from_latent=computed))
    for queries, cached in ((1, 0), (1, 100), (8, 5), (13, 0), (20, 700), (2048, 5120)):
        tokens, pairs = cached + queries, sum(cached + at + 1 for at in range(queries))
        keys = 2 * tokens * latent * rope if computed else 0
        expand = 2 * tokens * up * latent * (nope + value)
        attend = 2 * pairs * heads * (nope + rope) + 2 * pairs * heads * value
        assert costs["expanded"].flops(queries, cached) == expand + attend + keys
        maps = 2 * queries * heads * nope * latent + 2 * queries * heads * latent * value
        attend = 2 * pairs * heads * (latent + rope) + 2 * pairs * heads * latent
        assert costs["absorbed"].flops(queries, cached) == maps + attend + keys * -(-queries // 8)


SMALL = {computed: MLAGeometry(9, 1, 192, 128, 64, 64, 3, rope_from_latent=computed) for computed in (False, True)}


@pytest.mark.parametrize(
    ("computed", "lengths", "saves"),
    [
        (True, [512], True),  # 2.3 GFLOP more against a launch
        (True, [704], True),
        (True, [720], False),
        (True, [509], False),  # pieces overlap: no launch less
        (True, [512] * 2, False),  # launches are the batch's, FLOP each sequence's
        (True, [128] * 8, True),
        (True, [1, 128], True),  # a call of its own for what decodes, in both
        (True, [1, 512], True),
        (True, [1, 509], False),
        (False, [1200], True),
        (False, [128], True),
        (False, [127], False),
    ],
)
def test_short_prompts_are_absorbed_to_save_launches(computed, lengths, saves):
    """SmolLM2's shape at half of its cache."""
    costs = form_costs(SMALL[computed])
    assert [cost.launches for cost in costs.values()] == [4, 5]
    zeros = (0,) * len(lengths)
    both = [
        lay_out(tuple(lengths), zeros, zeros, short, 16384) for short in (absorbs_up_to(SMALL[computed]), ABSORBS_ALL)
    ]
    assert both[0].waves and not both[1].waves
    assert saves_launches(costs, *both) is saves
    flop = [sum(costs[form].flops(length, 0) for length in lengths if length > 8) for form in ("absorbed", "expanded")]
    assert saves_launches(costs, *both, launch_flop=flop[0]) is all(length % 8 == 0 for length in lengths if length > 8)
    assert not saves_launches(costs, *both, launch_flop=0)
    assert round(LAUNCH_FLOP / 166e12, 6) == 27e-6


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("per group", ([16, 24], [0, 0])),
        ("no nope from the latent", ([16, 24], [9, 0])),
        ("from the latent", ([40, 16], [3, 0])),
        ("int8 keys", ([13], [0])),
        ("int8 keys", ([40, 16, 1], [3, 0, 7])),
    ],
)
def test_prompts_that_are_absorbed_for_their_launches(name, lengths):
    problem = Problem.make(WIDTHS[name], lengths, dtype=torch.float64)
    assert layout_of(problem.plan()).waves  # launches cost nothing on a CPU
    plan = problem.plan(launch_flop=10**12)
    layout, parts, _ = plan.parts
    assert not layout.waves and [group.has_pieces for group in layout.groups] == [False] * (1 in lengths[0]) + [True]
    assert (parts[-1].tokens is None) is (lengths[0] != [13])  # pieces of 8 lie side by side
    assert error(problem.run(plan), problem.exact()) < 1e-14


@torch.no_grad()
def kernels_of(problem, plan) -> list[str]:
    """Names of the kernels of a call that is not the first of its plan."""
    problem.run(plan)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        problem.run(plan)
        torch.cuda.synchronize()
    return [each.name for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu
@pytest.mark.parametrize("keys", ["computed", "kept", "int8"])
@pytest.mark.parametrize("length", [256, 250])
@torch.no_grad()
def test_forms_launch_as_many_kernels_as_counted(keys, length):
    widths = Widths(9, 3, 1, 192, 128, 64, 64, 64, from_latent=keys == "computed", key_codes=keys == "int8")
    problem = Problem.make(widths, ([length], [0]), torch.bfloat16, "cuda")
    geometry = MLAGeometry(9, 1, 192, 128, 64, 64, 3, rope_from_latent=keys == "computed")
    costs = form_costs(replace(geometry, key_bits=8) if keys == "int8" else geometry)
    for form, flop in (("expanded", 0), ("absorbed", 10**15)):
        plan = problem.plan(launch_flop=flop, has_padding=False)
        if bool(layout_of(plan).waves) is (form == "absorbed"):
            assert form == "absorbed" and keys != "int8" and length == 250  # which saves nothing
            continue
        kernels = kernels_of(problem, plan)
        expected = costs[form].launches + 3 * (form == "absorbed" and length == 250)
        assert len(kernels) == expected, kernels
        assert error(problem.run(plan), problem.exact()) < 2e-2


def test_layers_share_the_plan_of_a_decode_call(monkeypatch):
    """Whose memory spares later layers the checks of the first."""
    problem, seen, decode = Problem.make(WIDTHS["from the latent"], ([1, 40], [5, 0])), [], PagedOp.__call__

    def call(op, *arguments, **options):
        seen.append(arguments[7])
        return decode(op, *arguments, **options)

    assert inspect.getfullargspec(decode).args[8] == "plan"
    monkeypatch.setattr(PagedOp, "__call__", call)
    plan = problem.plan()
    with torch.no_grad():
        for _ in range(3):
            problem.run(plan)
        problem.run(replace(plan))
    assert [each is seen[0] for each in seen] == [True] * 3 + [False]


@pytest.mark.gpu
def test_a_sequence_that_decodes_beside_a_prompt_costs_no_copy():
    widths = Widths(9, 3, 1, 192, 128, 64, 64, 64)
    problem = Problem.make(widths, ([1, 256], [300, 0]), torch.bfloat16, "cuda")
    plan = problem.plan(launch_flop=0, has_padding=False)
    assert layout_of(plan).waves
    kernels, costs = kernels_of(problem, plan), form_costs(MLAGeometry(9, 1, 192, 128, 64, 64, 3))
    # Of one token, merging and W_UV are one kernel.
    assert len(kernels) == sum(cost.launches for cost in costs.values()) - 1, kernels


@pytest.mark.parametrize("name", ["per group", "from the latent"])
def test_a_batch_without_padding_is_gathered_as_it_is(name):
    problem = Problem.make(WIDTHS[name], ([12, 40], [5, 0]))
    plans = [problem.plan(has_padding=has_padding) for has_padding in (True, False)]
    lost = [[len(chunk.lost) for _, chunks in plan.parts.waves for chunk in chunks] for plan in plans]
    assert lost == [[57], [0]]
    assert torch.equal(*map(problem.run, plans))
    assert error(problem.run(plans[1]), problem.exact()) < 2e-6


def test_a_plan_for_other_lengths_in_the_same_tensors():
    """A CUDA graph's replay: the batch's tensors change, and the plan is refreshed on the device."""
    problem = Problem.make(WIDTHS["per group"], ([1, 1], [9, 20]), rows=4)
    plan = problem.plan()
    problem.batch.cache_seqlens.sub_(torch.tensor([2, 7, 0, 0], dtype=torch.int32))
    plan.refresh()
    assert error(problem.run(plan), problem.exact()) < 2e-6
    with pytest.raises(ValueError, match="queries of up to 40 tokens; expected at most 8"):
        Problem.make(WIDTHS["per group"]).plan().refresh()


@pytest.mark.parametrize("window", [None, 5])
def test_a_plan_that_was_not_refreshed_is_refused(window):
    """Kernels attend over the plan's lengths; the reference must not be right where they are wrong."""
    problem = Problem.make(WIDTHS["per group"], ([1, 1], [9, 20]), starts=[0, 3])
    plan = problem.plan(window=window)
    for change in (problem.batch.cache_seqlens, problem.batch.cache_starts):
        change.sub_(torch.tensor([0, 2], dtype=torch.int32))
        with pytest.raises(ValueError, match="plan was last refreshed for tokens .* of sequence 1; expected"):
            problem.run(plan)
        plan.refresh()
        problem.run(plan)


@pytest.mark.parametrize("window", [None, 30, 5], ids=["expanded", "expanded, windowed", "pieces"])
def test_a_plan_of_long_queries_is_for_its_lengths(window):
    problem = Problem.make(WIDTHS["per group"], ([1, 40], [9, 20]))
    plan = problem.plan(window=window)
    problem.run(plan)
    problem.batch.cache_seqlens[1] -= 4
    with pytest.raises(ValueError, match="plan was made for 60 tokens of sequence 1; expected 56, its cache_seqlens"):
        problem.run(plan)


def test_a_gqa_plan_that_was_not_refreshed_is_refused():
    batch, query, keys, values = gqa_problem()
    plan = gqa_plan(batch, keys, values)
    gqa_attention(query, keys, values, plan, softmax_scale=SCALE)
    batch.cache_seqlens.sub_(1)
    with pytest.raises(ValueError, match="plan was (last refreshed|made) for"):
        gqa_attention(query, keys, values, plan, softmax_scale=SCALE)


def test_a_plan_refuses_fewer_tokens_and_other_pages():
    problem = Problem.make(WIDTHS["per group"])
    plan = problem.plan()
    with pytest.raises(ValueError, match="the query has 90 tokens; expected at least 91"):
        replace(problem, q_nope=problem.q_nope[:90], q_pe=problem.q_pe[:90]).run(plan)
    with pytest.raises(ValueError, match=r"latent_cache.shape is .*; expected \[\d+, 8, "):
        problem.run(replace(plan, page_size=8))


@pytest.mark.parametrize("change", [{"heads": 12}, {"latent": 32}])
def test_a_plan_refuses_other_heads_and_widths(change):
    """Its workspace is of those that it was made for."""
    problem, other = (Problem.make(widths) for widths in (WIDTHS["per group"], replace(WIDTHS["per group"], **change)))
    with pytest.raises(ValueError, match=r"plan was made for \[H, d\] = \(6, 16\) of the decode op; expected \("):
        other.run(problem.plan())


@pytest.mark.parametrize(("lengths", "entry"), [(([1, 3], [30, 20]), 1), (([12], [40]), 0), (([40], [9]), 2)])
def test_a_hole_in_the_page_table_is_refused(lengths, entry):
    """In a decode, in pieces and in a wave."""
    problem = Problem.make(WIDTHS["per group"], lengths)
    plan = problem.plan()
    problem.batch.block_table[0, entry] = -1
    with pytest.raises(ValueError, match="block_table.*expected (a page from 0 to|one for every cached)"):
        problem.run()
    if not layout_of(plan).waves and layout_of(plan).groups[0].first_token >= 0:
        with pytest.raises(ValueError, match=r"block_table\[0, 1\] is -1"):
            problem.run(plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_nope": torch.zeros(3, 6, 8)}, r"q_nope.shape is \(3, 6, 8\)"),
        ({"k_up": None}, "k_up is None"),
        ({"k_up": torch.zeros(2, 8, 15)}, r"k_up.shape is \(2, 8, 15\)"),
        ({"v_up": torch.zeros(4, 8, 16)}, r"v_up.shape is \(4, 8, 16\); expected \[a divisor of 6"),
        ({"v_up": torch.zeros(2, 8, 16).double()}, "v_up.dtype is torch.float64"),
        ({"rope_cache": torch.zeros(1, 16, 2, 8)}, r"rope_cache.shape is \(1, 16, 2, 8\)"),
        ({"latent_cache": torch.zeros(1, 16, 2, 8)}, r"latent_cache.shape is \(1, 16, 2, 8\)"),
    ],
)
def test_refusals_name_the_argument(change, message):
    problem = Problem.make(WIDTHS["per group"])
    plan = problem.plan()
    with pytest.raises(ValueError, match=message):
        replace(problem, **change).run(plan)


def test_refusals_of_what_rotary_keys_are_made_from():
    problem, stored = Problem.make(WIDTHS["from the latent"]), Problem.make(WIDTHS["shared"])
    plan, weight, bias, inv_freq = problem.plan(), *(getattr(problem.rope, n) for n in ("weight", "bias", "inv_freq"))
    offsets = torch.zeros_like(problem.batch.block_table)
    for change, message in (
        ({"rope": None}, "rope_cache and rope: neither given; expected exactly one"),
        ({"rope_cache": stored.rope_cache}, "rope_cache and rope: both given; expected exactly one"),
        ({"rope": replace(problem.rope, page_offsets=offsets)}, "rope.page_offsets is given; expected None"),
        ({"rope": replace(problem.rope, weight=weight[:, 1:])}, r"rope.weight.shape is \(8, 23\); expected \[8, 24\]"),
        ({"rope": replace(problem.rope, weight=weight.double())}, "rope.weight.dtype is torch.float64"),
        ({"rope": replace(problem.rope, bias=bias.double())}, "rope.bias.dtype is torch.float64"),
        ({"rope": replace(problem.rope, inv_freq=inv_freq.double())}, "rope.inv_freq.dtype is torch.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(problem, **change).run(plan)
    with pytest.raises(ValueError, match="qk_rope_head_dim is None where rope_cache is None; expected one of the two"):
        replace(problem, widths=replace(problem.widths, from_latent=False)).plan()
    with pytest.raises(ValueError, match="qk_rope_head_dim is 8 where rope_cache is given; expected one of the two"):
        stored.plan(qk_rope_head_dim=8)


def test_refusals_of_a_plan():
    problem = Problem.make(WIDTHS["per group"])
    with pytest.raises(ValueError, match="window is 0"):
        problem.plan(window=0)
    with pytest.raises(ValueError, match="sinks is 4 with window=None"):
        problem.plan(sinks=4)
    with pytest.raises(ValueError, match="max_expanded_tokens is 0"):
        problem.plan(max_expanded_tokens=0)
    with pytest.raises(ValueError, match=r"block_table.shape is \(\d+,\); expected \[B, max_pages\]"):
        replace(problem, batch=replace(problem.batch, block_table=problem.batch.block_table[:, 0])).plan()
    with pytest.raises(ValueError, match=r"lengths\[0, 0\] is -2; expected at least 0 new tokens"):
        replace(problem, batch=replace(problem.batch, lengths=problem.batch.lengths - 2)).plan()
    wrong = replace(problem, batch=replace(problem.batch, lengths=problem.batch.lengths[:2]))
    with pytest.raises(ValueError, match=r"lengths is torch.int32 \(2, 9\) on cpu; expected torch.int32 \(3, 9\)"):
        wrong.plan()


@pytest.mark.parametrize(
    ("geometry", "tokens"),
    [
        (MLAGeometry(9, 1, 192, 128, 0, 64, 3, rope_from_latent=True), 2**28 // (2 * (192 + 192 + 128) + 8 * 128)),
        (MLAGeometry(9, 1, 192, 128, 0, 64, 3, key_bits=8), 2**28 // (2 * (192 + 192 + 128) + 8 * 128)),
        (MLAGeometry(32, 1, 1024, 64, 64, 128, 8), 2**28 // (2 * (1024 + 8 * 192 + 64))),
        (MLAGeometry(64, 64, 512, 64, 128, 128, 64), FEWEST_EXPANDED),  # 264 MiB take fewer
        (MLAGeometry(2, 1, 16, 8, 0, 16, 1), 2**18),
    ],
    ids=["computed keys", "8-bit keys", "wide", "the fewest", "the most"],
)
def test_tokens_expanded_at_a_time_by_their_bytes(geometry, tokens):
    assert expanded_tokens(geometry, 2) == tokens
    cache = torch.empty(1, 64, geometry.kv_lora_rank, dtype=torch.bfloat16)
    keys = {torch.int8 if geometry.has_key_codes else torch.bfloat16}
    rope = [torch.empty(1, 64, geometry.num_rope_heads, geometry.qk_rope_head_dim, dtype=dtype) for dtype in keys]
    given = (
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        torch.tensor([[1], [0], [0]]).int(),
    )
    plan = plan_mla_attention(
        cache, rope[0] if geometry.has_rope_cache else None, *given,
        num_attention_heads=geometry.num_attention_heads, num_key_value_heads=geometry.num_up_projection_heads,
        qk_nope_head_dim=geometry.qk_nope_head_dim, v_head_dim=geometry.v_head_dim,
        qk_rope_head_dim=None if geometry.has_rope_cache else geometry.qk_rope_head_dim, dtype=torch.bfloat16,
    )  # fmt: skip
    assert plan.max_expanded_tokens == tokens
