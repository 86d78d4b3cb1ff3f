"""The mixed-batch ops: any query lengths in one call equal sequences one by one; layout, chunks, poison, refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import (
    LatentRope,
    attention_combine,
    gqa_attention,
    mla_attention,
    plan_gqa_attention,
    plan_mla_attention,
    rotary_keys,
)
from mha2mla.kernels.mixed_attention.expanded import MAX_PARTIALS, gather_rows
from mha2mla.kernels.mixed_attention.layout import absorbs_up_to, lay_out
from mha2mla.kernels.mla_decode.quantization import dequantize_latent, quantize_latent
from mha2mla.modeling.batch import SequenceBatch
from tests.kernels.oracles import attend_sequences, mla_attention_reference, rows_of

SCALE = 0.3


@dataclass(frozen=True)
class Widths:
    heads: int
    kv_heads: int
    rope_heads: int
    latent: int
    rope: int
    nope: int
    value: int
    page: int = 16
    from_latent: bool = False  # nothing rotary is cached


WIDTHS = {
    "per group": Widths(6, 2, 2, 16, 8, 8, 16),
    "shared": Widths(4, 4, 1, 24, 8, 16, 8),
    "odd groups": Widths(6, 2, 3, 16, 8, 8, 8),
    "no nope": Widths(4, 2, 2, 32, 16, 0, 16),
    "from the latent": Widths(4, 2, 1, 24, 8, 16, 8, from_latent=True),
    "no nope from the latent": Widths(6, 2, 1, 16, 24, 0, 16, from_latent=True),
}
# new and cached tokens: decodes, a draft, an empty one, a short query over a long context, chunks, a fresh prompt
LENGTHS = ([1, 0, 1, 3, 12, 1, 40, 25, 8], [5, 4, 37, 16, 50, 0, 33, 0, 20])


def widths_on_gpu() -> list[Widths]:
    return [
        Widths(32, 32, 32, 512, 16, 112, 128, 64),
        Widths(9, 3, 3, 192, 16, 48, 64, 64),
        Widths(32, 32, 1, 512, 64, 64, 128, 64),
        Widths(32, 8, 1, 512, 64, 64, 128, 64, from_latent=True),
    ]


@dataclass(frozen=True)
class Problem:
    widths: Widths
    batch: SequenceBatch
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    latent_cache: torch.Tensor
    rope_cache: torch.Tensor | None
    k_up: torch.Tensor | None
    v_up: torch.Tensor
    rope: LatentRope | None = None

    @classmethod
    def make(cls, widths, lengths=LENGTHS, dtype=torch.float32, device="cpu", combined=False, starts=None, **pad):
        """Everything that no query may look at is NaN."""
        page = widths.page
        counts = [-(-(new + old) // page) for new, old in zip(*lengths, strict=True)]
        shuffled = iter(torch.randperm(sum(counts) + 3).tolist())
        pages = [[next(shuffled) for _ in range(count)] for count in counts]
        batch = SequenceBatch.build(
            *lengths, pages, page, num_pages=sum(counts) + 3, cache_starts=starts, device=device, **pad
        )

        def normal(*shape, scale=1.0):
            return (torch.randn(*shape) * scale).to(device, dtype)

        rows = normal(sum(counts) + 3, page, widths.latent + widths.rope_heads * widths.rope)
        used = torch.zeros(rows.shape[:2], dtype=torch.bool)
        for index, mine in enumerate(pages):
            for t in range(0 if starts is None else starts[index], lengths[0][index] + lengths[1][index]):
                used[mine[t // page], t % page] = True
        rows[~used] = torch.nan
        latent, rope = rows.split((widths.latent, widths.rope_heads * widths.rope), -1)
        rope = rope.unflatten(-1, (widths.rope_heads, widths.rope))
        if not combined:
            latent, rope = latent.contiguous(), rope.contiguous()
        tokens = batch.num_tokens
        k_up = normal(widths.kv_heads, widths.nope, widths.latent, scale=widths.latent**-0.5) if widths.nope else None
        made = None
        if widths.from_latent:
            weight = normal(widths.rope, widths.latent, scale=widths.latent**-0.5)
            inv_freq = (10.0 ** -torch.rand(widths.rope // 2)).to(device)
            rope, made = None, LatentRope(weight, normal(widths.rope), inv_freq, 1.3)
        return cls(
            widths, batch, normal(tokens, widths.heads, widths.nope), normal(tokens, widths.heads, widths.rope), latent,
            rope, k_up, normal(widths.kv_heads, widths.value, widths.latent, scale=widths.latent**-0.5), made,
        )  # fmt: skip

    def plan(self, **options):
        w, b = self.widths, self.batch
        return plan_mla_attention(
            self.latent_cache, self.rope_cache, b.block_table, b.cache_seqlens, b.lengths, num_attention_heads=w.heads,
            num_key_value_heads=w.kv_heads, qk_nope_head_dim=w.nope, v_head_dim=w.value, cache_starts=b.cache_starts,
            **({"qk_rope_head_dim": w.rope} if w.from_latent else {}), **options,
        )  # fmt: skip

    def run(self, plan=None, backend=None, **options):
        plan = self.plan(backend=backend, **options) if plan is None else plan
        return mla_attention(
            self.q_nope, self.q_pe, self.latent_cache, self.rope_cache, self.k_up, self.v_up, plan,
            softmax_scale=SCALE, backend=backend, rope=self.rope,
        )  # fmt: skip

    def keys(self):
        """``rope_cache`` as it would be: rotary keys of the latents at their places in their sequences."""
        if self.rope is None:
            return self.rope_cache
        places = torch.zeros(self.latent_cache.shape[:2], dtype=torch.int64, device=self.latent_cache.device)
        for pages in self.batch.block_table.tolist():
            for index, page in enumerate(page for page in pages if page >= 0):
                places[page] = torch.arange(self.widths.page) + index * self.widths.page
        return rotary_keys(self.latent_cache.double(), self.rope, places)[:, :, None]

    def exact(self, dtype=torch.float64, window=None, sinks=0):
        """The oracle at a dtype; whatever the sequence does not see is zero there, since 0 · NaN is NaN."""
        moved = [
            None if x is None else x.nan_to_num(0.0).to(dtype)
            for x in (self.q_nope, self.q_pe, self.latent_cache, self.keys(), self.k_up, self.v_up)
        ]
        queries, _, starts = self.batch.lengths.tolist()
        return mla_attention_reference(
            *moved, self.batch.block_table, queries, self.batch.cache_seqlens.tolist(), softmax_scale=SCALE,
            cache_starts=starts, window=window, sinks=sinks,
        )  # fmt: skip


def layout_of(plan):
    return plan.parts().layout


def error(value, expected):
    return float((value.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_any_mix_equals_sequences_one_by_one(widths, combined):
    problem = Problem.make(widths, combined=combined, num_tokens=95)
    out = problem.run()
    assert out.shape == (95, widths.heads, widths.value) and not out[91:].any()
    assert error(out, problem.exact()) < 2e-6


@pytest.mark.parametrize("widths", ["per group", "from the latent"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_as_torch_does(dtype, widths):
    problem = Problem.make(WIDTHS[widths], dtype=dtype)
    exact, eps = problem.exact(), torch.finfo(dtype).eps
    # Rounded on the way: absorbed query, latent output, expanded keys and values, the result; each by eps / 2 a number.
    assert error(problem.run(), exact) < 2 * eps


@pytest.mark.parametrize("limit", [7, 16, 64])
@pytest.mark.parametrize("widths", ["per group", "from the latent"])
def test_chunks_of_the_context_are_merged(widths, limit):
    problem = Problem.make(WIDTHS[widths])
    plan = problem.plan(max_expanded_tokens=limit)
    waves = layout_of(plan).waves
    assert limit == 64 or any(len(wave.chunks) > 1 for wave in waves)
    assert all(chunk.tokens <= max(limit, wave.tokens) for wave in waves for chunk in wave.chunks)
    assert error(problem.run(plan), problem.exact()) < 2e-6


def test_more_chunks_than_partials_are_held():
    problem = Problem.make(Widths(8, 1, 1, 64, 8, 16, 8), ([9], [150]))  # one kv head: expanding is cheap
    plan = problem.plan(max_expanded_tokens=10)
    assert len(layout_of(plan).waves[0].chunks) == 16 > MAX_PARTIALS
    assert error(problem.run(plan), problem.exact()) < 2e-6


def test_the_merges_run_where_the_caller_said(monkeypatch):
    asked = []

    def combine(*tensors, backend):
        asked.append(backend)
        return attention_combine(*tensors, backend=backend)

    monkeypatch.setattr("mha2mla.kernels.mixed_attention.expanded.attention_combine", combine)
    problem = Problem.make(WIDTHS["per group"])
    for backend in ("reference", None):
        problem.run(backend=backend, max_expanded_tokens=7)
        assert asked and set(asked) == {backend}
        asked.clear()


@pytest.mark.parametrize("widths", ["per group", "from the latent"])
def test_first_visible_tokens(widths):
    starts = [2, 0, 30, 0, 11, 0, 7, 5, 28]
    problem = Problem.make(WIDTHS[widths], starts=starts)
    out = problem.run()
    assert not out.isnan().any() and error(out, problem.exact()) < 2e-6
    assert error(problem.run(max_expanded_tokens=9), problem.exact()) < 2e-6


STARTS = [0, 0, 7, 3, 20, 0, 4, 0, 12]


@pytest.mark.parametrize("starts", [None, STARTS], ids=["", "left padding"])
@pytest.mark.parametrize("widths", ["per group", "from the latent"])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 1), (5, 0), (5, 4), (30, 0), (30, 3), (30, 60), (100, 4)])
def test_sliding_windows_and_sinks(window, sinks, widths, starts):
    """In both forms of long queries; over gaps between sinks and window, and where they meet."""
    problem = Problem.make(WIDTHS[widths], starts=starts)
    limits = {"window": window, "sinks": sinks}
    exact = problem.exact(**limits)
    assert bool(layout_of(problem.plan(**limits)).waves) == (window >= 30)
    assert error(problem.run(**limits), exact) < 2e-6
    # As many tokens at a time as a query has: longer spans under a window run in pieces.
    assert error(problem.run(**limits, max_expanded_tokens=30), exact) < 2e-6


def test_what_lies_between_sinks_and_window_is_not_read():
    """No page there, and NaN in what is left of it: in pieces, in a wave and in a decode."""
    problem = Problem.make(WIDTHS["per group"], ([40, 12, 1], [200, 250, 190]))
    limits = {"window": 40, "sinks": 4}
    layout = layout_of(problem.plan(**limits))
    assert layout.waves and any(group.first_token < 0 for group in layout.groups)
    exact, (table, lengths) = problem.exact(**limits), (problem.batch.block_table, problem.batch.lengths.tolist())
    for row, cached in enumerate(lengths[1]):
        for token in range(4, cached + 1 - 40):
            problem.latent_cache[table[row, token // 16], token % 16] = torch.nan
        # Whole tiles of 64 tokens are what the decode op leaves alone.
        table[row, 4 : (cached + 1 - 40) // 64 * 4] = -1
    assert bool((table[:, 4:8] < 0).all())
    assert error(problem.run(**limits), exact) < 2e-6


@pytest.mark.parametrize("lengths", [([], []), ([0, 0], [3, 0]), ([1], [0]), ([9], [0]), ([30], [1])])
def test_smallest_batches(lengths):
    problem = Problem.make(WIDTHS["per group"], lengths)
    out = problem.run()
    assert out.shape[0] == sum(lengths[0])
    assert not out.numel() or error(out, problem.exact()) < 2e-6


def test_padding_rows_are_zero_and_touch_nothing():
    problem = Problem.make(WIDTHS["per group"], ([1, 1], [9, 20]), num_sequences=5)
    out = problem.run()
    assert not out[2:].any() and error(out, problem.exact()) < 2e-6


@pytest.mark.parametrize("token", [0, 30, 59])
def test_nan_stays_in_its_sequence(token):
    """Two prompts in one wave, one of them with a NaN in its cache."""
    problem = Problem.make(WIDTHS["per group"], ([30, 40], [30, 5]))
    assert len(layout_of(problem.plan()).waves) == 1
    clean = problem.run()
    row = int((problem.batch.order == 0).nonzero())
    page = int(problem.batch.block_table[row, token // 16])
    problem.latent_cache[page, token % 16] = torch.nan
    problem.rope_cache[page, token % 16] = torch.nan
    out = problem.batch.unflatten(problem.run())
    assert torch.equal(out[1], problem.batch.unflatten(clean)[1])
    seen = torch.arange(30, 60) >= token
    assert out[0][seen].isnan().all() and not out[0][~seen].isnan().any()


def test_the_oracle_does_not_hide_nan():
    """A query that is NaN gives NaN; what it does not see does not."""
    query, values = torch.randn(2, 1, 4), torch.randn(3, 1, 4)
    values[0] = torch.nan
    out = attend_sequences(query, [2], [(torch.zeros(3, 1, 4), values)], [1], 1.0, None)
    assert out.isfinite().all()
    query[1] = torch.nan
    out = attend_sequences(query, [2], [(torch.zeros(3, 1, 4), values)], [1], 1.0, None)
    assert out[0].isfinite().all() and out[1].isnan().all()


@pytest.mark.parametrize("rows", [0, 3])
def test_long_rows_of_padding_read_no_page(rows):
    """They have as many new tokens as the shortest query, and no page: page 0 is somebody else's."""
    problem = Problem.make(WIDTHS["per group"], ([30, 40], [0, 5]), num_sequences=2 + rows)
    problem.latent_cache.nan_to_num_(1e30)
    out = problem.run()
    padding = torch.repeat_interleave(problem.batch.order < 0, problem.batch.lengths[0])
    assert not out[padding].any() and len(out[padding]) == 30 * rows
    assert error(out[~padding], problem.exact()[~padding]) < 2e-6


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


def test_slots_without_a_page_are_read_as_zeros():
    cache = torch.randn(3, 4, 2)
    slots = torch.tensor([5, -1, 0], dtype=torch.int32)
    strided = torch.randn(3, 8, 2)[:, :4]
    for each in (cache, strided, cache.to(torch.float8_e4m3fn)):
        rows = gather_rows(each, slots).float()
        assert (
            not rows[1].any() and torch.equal(rows[0], each.float()[1, 1]) and torch.equal(rows[2], each.float()[0, 0])
        )


def test_a_plan_refuses_fewer_tokens_and_other_pages():
    problem = Problem.make(WIDTHS["per group"])
    plan = problem.plan()
    with pytest.raises(ValueError, match="the query has 90 tokens; expected at least 91"):
        replace(problem, q_nope=problem.q_nope[:90], q_pe=problem.q_pe[:90]).run(plan)
    with pytest.raises(ValueError, match=r"latent_cache.shape is .*; expected \[\d+, 8, "):
        problem.run(replace(plan, page_size=8))


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
    wrong = replace(problem, batch=replace(problem.batch, lengths=problem.batch.lengths[:2]))
    with pytest.raises(ValueError, match=r"lengths is torch.int32 \(2, 9\) on cpu; expected torch.int32 \(3, 9\)"):
        wrong.plan()


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


def gqa_problem(dtype=torch.float32, device="cpu", heads=6, kv_heads=2, width=16, value=8, page=16, lengths=LENGTHS):
    widths = Widths(heads, 1, kv_heads, kv_heads * value, width, 0, value, page)
    problem = Problem.make(widths, lengths, dtype, device)
    values = problem.latent_cache.unflatten(-1, (kv_heads, value)).contiguous()
    return problem.batch, problem.q_pe, problem.rope_cache, values


def gqa_exact(batch, query, keys, values, dtype=torch.float64, window=None, sinks=0):
    pairs = [
        tuple(rows_of(cache.nan_to_num(0.0).to(dtype), table, length) for cache in (keys, values))
        for table, length in zip(batch.block_table, batch.cache_seqlens.tolist(), strict=True)
    ]
    queries, _, starts = batch.lengths.tolist()
    return attend_sequences(query.to(dtype), queries, pairs, starts, SCALE, window, sinks)


@pytest.mark.parametrize("widths", ["per group", "from the latent"])
def test_latents_of_eight_bits(widths):
    """The same numbers as over the dequantised latents; their scales are NaN where nobody may look."""
    problem = Problem.make(WIDTHS[widths])
    codes, scale = quantize_latent(problem.latent_cache)
    unseen = problem.latent_cache.isnan().any(-1)
    exact = replace(problem, latent_cache=dequantize_latent(codes, scale).masked_fill(unseen[..., None], torch.nan))
    eight = replace(problem, latent_cache=codes)
    out = mla_attention(
        problem.q_nope, problem.q_pe, codes, problem.rope_cache, problem.k_up, problem.v_up,
        eight.plan(dtype=torch.float32), softmax_scale=SCALE, latent_scale=scale, rope=problem.rope,
    )  # fmt: skip
    assert error(out, exact.exact()) < 2e-6
    with pytest.raises(ValueError, match="latent_scale is None for a latent_cache of torch.float8_e4m3fn"):
        eight.run()


@pytest.mark.parametrize("limit", [20, 16384])
def test_gqa_mix_equals_sequences_one_by_one(limit):
    batch, query, keys, values = gqa_problem()
    plan = plan_gqa_attention(
        keys, values, batch.block_table, batch.cache_seqlens, batch.lengths, num_attention_heads=6,
        max_expanded_tokens=limit,
    )  # fmt: skip
    out = gqa_attention(query, keys, values, plan, softmax_scale=SCALE)
    assert error(out, gqa_exact(batch, query, keys, values)) < 2e-6


@pytest.mark.parametrize("limits", [{"window": 5}, {"window": 5, "sinks": 2}, {"window": 17, "sinks": 3}])
def test_gqa_windows_and_sinks(limits):
    batch, query, keys, values = gqa_problem()
    plan = plan_gqa_attention(
        keys, values, batch.block_table, batch.cache_seqlens, batch.lengths, num_attention_heads=6, **limits
    )
    assert bool(layout_of(plan).waves) == (limits["window"] == 17)
    out = gqa_attention(query, keys, values, plan, softmax_scale=SCALE)
    assert error(out, gqa_exact(batch, query, keys, values, **limits)) < 2e-6


def test_a_plan_for_other_lengths_in_the_same_tensors():
    """What a CUDA graph replays: the batch's tensors change, and the plan is refreshed on the device."""
    problem = Problem.make(WIDTHS["per group"], ([1, 1], [9, 20]), num_sequences=4)
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
    plan = plan_gqa_attention(
        keys, values, batch.block_table, batch.cache_seqlens, batch.lengths, num_attention_heads=6
    )
    gqa_attention(query, keys, values, plan, softmax_scale=SCALE)
    batch.cache_seqlens.sub_(1)
    with pytest.raises(ValueError, match="plan was (last refreshed|made) for"):
        gqa_attention(query, keys, values, plan, softmax_scale=SCALE)


def test_opcheck():
    problem = Problem.make(WIDTHS["per group"])
    torch.library.opcheck(
        torch.ops.mha2mla.mla_attention.default,
        (
            problem.q_nope, problem.q_pe, problem.latent_cache, None, problem.rope_cache, problem.k_up, problem.v_up,
            None, None, None, 1.0, *problem.plan().fields(), SCALE, None,
        ),
    )  # fmt: skip
    problem = Problem.make(WIDTHS["from the latent"])
    rope = problem.rope
    torch.library.opcheck(
        torch.ops.mha2mla.mla_attention.default,
        (
            problem.q_nope, problem.q_pe, problem.latent_cache, None, None, problem.k_up, problem.v_up, rope.weight,
            rope.bias, rope.inv_freq, rope.scaling, *problem.plan().fields(), SCALE, None,
        ),
    )  # fmt: skip
    batch, query, keys, values = gqa_problem()
    plan = plan_gqa_attention(
        keys, values, batch.block_table, batch.cache_seqlens, batch.lengths, num_attention_heads=6
    )
    torch.library.opcheck(torch.ops.mha2mla.gqa_attention.default, (query, keys, values, *plan.fields(), SCALE, None))


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("widths", "dtype"),
    # Not every pair: each op's own tests have both dtypes, and a pair takes up to ten compilations.
    list(zip(widths_on_gpu(), (torch.bfloat16, torch.float16, torch.bfloat16, torch.bfloat16), strict=True)),
    ids=("per head", "per group", "shared", "from the latent"),
)
def test_kernels_are_as_right_as_torch(widths, dtype):
    lengths = ([1, 1, 4, 40, 300, 0, 1, 129], [700, 0, 90, 500, 1000, 5, 64, 0])
    problem = Problem.make(widths, lengths, dtype, "cuda", num_tokens=480)
    for limits in ({}, {"window": 150, "sinks": 4}):
        exact = problem.exact(**limits)
        torch_error = error(problem.run(backend="reference", **limits), exact)
        for options in ({}, {"max_expanded_tokens": 512}):
            out = problem.run(**options, **limits)
            assert not out.isnan().any() and not out[476:].any()
            assert error(out, exact) < 2 * torch_error


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("limit", [64, 16384])
def test_sequences_that_see_nothing_or_less_than_they_ask(limit, device):
    """In a decode, alone in a wave, beside others in one, and with more queries than visible keys."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    lengths, starts = ([1, 1, 40, 130, 300, 40], [70, 9, 10, 5, 20, 100]), [71, 3, 50, 135, 300, 0]
    problem = Problem.make(widths_on_gpu()[1], lengths, dtype, device, starts=starts)
    exact = problem.exact()
    torch_error = error(problem.run(backend="reference"), exact)
    out = problem.run(max_expanded_tokens=limit)
    seen = exact.flatten(1).any(1)
    assert 0 < seen.sum() < len(seen) and not out[~seen].any() and not out.isnan().any()
    assert error(out, exact) < (2e-6 if device == "cpu" else 2 * torch_error)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_gqa_kernels_are_as_right_as_torch():
    lengths = ([1, 1, 40, 300, 0, 1, 129], [700, 0, 500, 1000, 5, 64, 0])
    batch, *tensors = gqa_problem(torch.bfloat16, "cuda", 32, 8, 128, 128, 64, lengths)

    def run(backend=None, **options):
        plan = plan_gqa_attention(
            *tensors[1:], batch.block_table, batch.cache_seqlens, batch.lengths, num_attention_heads=32,
            backend=backend, **options,
        )  # fmt: skip
        return gqa_attention(*tensors, plan, softmax_scale=SCALE, backend=backend)

    for limits in ({}, {"window": 150, "sinks": 4}):
        exact = gqa_exact(batch, *tensors, **limits)
        torch_error = error(run("reference", **limits), exact)
        for options in ({}, {"max_expanded_tokens": 512}):
            out = run(**options, **limits)
            assert not out.isnan().any() and error(out, exact) < 2 * torch_error


@pytest.mark.gpu
def test_no_synchronisation():
    problem = Problem.make(widths_on_gpu()[1], ([1, 1, 40, 300], [700, 0, 500, 90]), torch.float16, "cuda")
    problem.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
