"""Any query lengths in one call equal sequences one by one: chunks, windows, starts, padding, NaN of neighbours."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from mha2mla.kernels import gqa_attention, mla_attention
from mha2mla.kernels.mixed_attention import api
from mha2mla.kernels.mixed_attention.api import MAX_PARTIALS, gather_rows
from mha2mla.kernels.mla_decode.api import _up_project, mla_absorbed
from mha2mla.kernels.mla_decode.quantization import dequantize_latent, quantize_latent
from mha2mla.testing.problems import Problem as MLAProblem
from mha2mla.testing.problems import RowCodesProblem, with_keys
from tests.gpu import no_waits
from tests.kernels.mixed_attention.problems import (
    SCALE,
    WIDTHS,
    Problem,
    Widths,
    attend_sequences,
    error,
    gqa_exact,
    gqa_plan,
    gqa_problem,
    layout_of,
    widths_on_gpu,
)
from tests.ops import Calls, noted


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_any_mix_equals_sequences_one_by_one(widths, combined):
    problem = Problem.make(widths, combined=combined, tokens=4)
    out = problem.run()
    assert out.shape == (95, widths.heads, widths.value) and not out[91:].any()
    assert error(out, problem.exact()) < 2e-6


@pytest.mark.parametrize("widths", ["per group", "from the latent", "int8 keys"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_as_torch_does(dtype, widths):
    problem = Problem.make(WIDTHS[widths], dtype=dtype)
    exact, eps = problem.exact(), torch.finfo(dtype).eps
    # Rounded on the way: absorbed query, latent output, expanded keys and values, the result; each by eps / 2 a number.
    assert error(problem.run(), exact) < 2 * eps


@pytest.mark.parametrize("limit", [7, 16, 64])
@pytest.mark.parametrize("widths", ["per group", "from the latent", "int8 keys"])
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
    asked = noted(monkeypatch, api, "attention_combine", lambda *_, backend: backend)
    problem = Problem.make(WIDTHS["per group"])
    for backend in ("reference", None):
        problem.run(backend=backend, max_expanded_tokens=7)
        assert asked and set(asked) == {backend}
        asked.clear()


@pytest.mark.parametrize("widths", ["per group", "from the latent", "int8 keys"])
def test_first_visible_tokens(widths):
    starts = [2, 0, 30, 0, 11, 0, 7, 5, 28]
    problem = Problem.make(WIDTHS[widths], starts=starts)
    out = problem.run()
    assert not out.isnan().any() and error(out, problem.exact()) < 2e-6
    assert error(problem.run(max_expanded_tokens=9), problem.exact()) < 2e-6


STARTS = [0, 0, 7, 3, 20, 0, 4, 0, 12]


@pytest.mark.parametrize("starts", [None, STARTS], ids=["", "left padding"])
@pytest.mark.parametrize("widths", ["per group", "from the latent", "int8 keys"])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 1), (5, 0), (5, 4), (30, 0), (30, 3), (30, 60), (100, 4)])
def test_sliding_windows_and_sinks(window, sinks, widths, starts):
    """In both forms of long queries; over gaps between sinks and window, and where they meet."""
    problem = Problem.make(WIDTHS[widths], starts=starts)
    limits = {"window": window, "sinks": sinks}
    exact = problem.exact(**limits)
    assert bool(layout_of(problem.plan(**limits)).waves) == (window >= 30)
    assert error(problem.run(**limits), exact) < 2e-6
    # Only a query's tokens fit at a time: longer spans under a window run in pieces.
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
    assert error(out, problem.exact()) < 2e-6


@pytest.mark.parametrize("launch_flop", [0, 10**12])
@pytest.mark.parametrize("lengths", [([1, 1], [5, 9]), ([3, 1, 40], [5, 9, 0]), ([40, 16], [3, 0]), ([13], [0])])
@pytest.mark.parametrize("gradients", [False, True])
def test_results_lie_where_they_are_to_lie(lengths, launch_flop, gradients):
    """Of a call, of several, of pieces that overlap, and of padding."""
    problem = Problem.make(WIDTHS["from the latent"], lengths, dtype=torch.float64)
    plan = problem.plan(launch_flop=launch_flop)
    room = problem.q_pe.new_full((len(problem.q_pe) + 2, problem.widths.heads, problem.v_up.shape[1]), torch.nan)
    with torch.set_grad_enabled(gradients):
        out = problem.run(plan, out=room[1:-1])
    assert out.data_ptr() == room[1].data_ptr() and room[[0, -1]].isnan().all()
    assert torch.equal(room[1:-1], problem.run(plan))
    with pytest.raises(ValueError, match=r"out.stride\(\) is .* contiguous"):
        problem.run(plan, out=room[1:-1].mT.contiguous().mT)
    with pytest.raises(ValueError, match="out.shape"):
        problem.run(plan, out=room)


def test_padding_rows_are_zero_and_touch_nothing():
    problem = Problem.make(WIDTHS["per group"], ([1, 1], [9, 20]), rows=5)
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
    """A query that is NaN gives NaN, and no other does."""
    query = torch.randn(2, 1, 4)
    query[1] = torch.nan
    out = attend_sequences((query,), [(torch.zeros(3, 1, 4),)], [torch.randn(3, 1, 4)], ([2], [1], [1]))
    assert out[0].isfinite().all() and out[1].isnan().all()


@pytest.mark.parametrize("rows", [0, 3])
def test_long_rows_of_padding_read_no_page(rows):
    """They have as many new tokens as the shortest query, and no page: page 0 is somebody else's."""
    problem = Problem.make(WIDTHS["per group"], ([30, 40], [0, 5]), rows=2 + rows)
    problem.latent_cache.nan_to_num_(1e30)
    out = problem.run()
    padding = torch.repeat_interleave(problem.batch.order < 0, problem.batch.lengths[0])
    assert not out[padding].any() and len(out[padding]) == 30 * rows
    assert error(out[~padding], problem.exact()[~padding]) < 2e-6


def test_slots_without_a_page_are_read_as_zeros():
    cache = torch.randn(3, 4, 2)
    slots = torch.tensor([5, -1, 0], dtype=torch.int32)
    strided = torch.randn(3, 8, 2)[:, :4]
    for each in (cache, strided, cache.to(torch.float8_e4m3fn)):
        rows = gather_rows(each, slots.clamp_min(0), slots < 0).float()
        assert (
            not rows[1].any() and torch.equal(rows[0], each.float()[1, 1]) and torch.equal(rows[2], each.float()[0, 0])
        )


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


@pytest.mark.parametrize("limit", [20, 16384])
def test_gqa_mix_equals_sequences_one_by_one(limit):
    batch, query, keys, values = gqa_problem()
    plan = gqa_plan(batch, keys, values, max_expanded_tokens=limit)
    out = gqa_attention(query, keys, values, plan, softmax_scale=SCALE)
    assert error(out, gqa_exact(batch, query, keys, values)) < 2e-6


@pytest.mark.parametrize("limits", [{"window": 5}, {"window": 5, "sinks": 2}, {"window": 17, "sinks": 3}])
def test_gqa_windows_and_sinks(limits):
    batch, query, keys, values = gqa_problem()
    plan = gqa_plan(batch, keys, values, **limits)
    assert bool(layout_of(plan).waves) == (limits["window"] == 17)
    out = gqa_attention(query, keys, values, plan, softmax_scale=SCALE)
    assert error(out, gqa_exact(batch, query, keys, values, **limits)) < 2e-6


# Parts of the names of ops that write nothing.
VIEWS = ("view", "transpose", "expand", "unsqueeze", "slice", "select", "empty", "unflatten")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "maps"), [(1, 1, 2), (3, 1, 6), (2, 3, 6), (4, 2, 2), (1, 1, 6), (2, 1, 1)]
)
def test_every_head_goes_through_its_map(batch, length, maps, transposed):
    """Around the absorbed form nothing is copied."""
    torch.manual_seed(0)
    whole = torch.randn(batch, length, 6, 14, dtype=torch.float64)
    x = whole[..., 3:11]  # part of a wider projection, read where it lies
    weight = torch.randn(maps, 8, 5, dtype=torch.float64)
    given = weight.mT.contiguous() if transposed else weight
    expected = torch.einsum("bshi,hio->bsho", x, weight.repeat_interleave(6 // maps, 0))
    with torch.no_grad(), Calls() as calls:
        out = _up_project(x, given, transposed)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    copies = 1 if 1 < maps < 6 and batch * length > 1 else 0
    writing = [name for name in calls.names if not any(view in name for view in VIEWS)]
    assert out.is_contiguous() and writing == ["aten::clone"] * copies + ["aten::bmm.out"]
    torch.testing.assert_close(_up_project(x.requires_grad_(), given, transposed), expected, rtol=1e-13, atol=1e-13)


def test_gradients_pass_up_projections():
    x, weight = torch.randn(2, 1, 4, 3, requires_grad=True), torch.randn(4, 3, 5, requires_grad=True)
    _up_project(x, weight).square().sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("widths", "dtype"),
    # Not every pair: each op's own tests have both dtypes, and a pair takes up to ten compilations.
    list(zip(widths_on_gpu(), (torch.bfloat16, torch.float16, *[torch.bfloat16] * 3), strict=True)),
    ids=("per head", "per group", "shared", "from the latent", "int8 keys"),
)
def test_kernels_are_as_right_as_torch(widths, dtype):
    lengths = ([1, 1, 4, 40, 300, 0, 1, 129], [700, 0, 90, 500, 1000, 5, 64, 0])
    problem = Problem.make(widths, lengths, dtype, "cuda", tokens=4)
    for limits in ({}, {"window": 150, "sinks": 4}):
        exact = problem.exact(**limits)
        torch_error = error(problem.run(backend="reference", **limits), exact)
        for options in ({}, {"max_expanded_tokens": 512}):
            out = problem.run(**options, **limits)
            assert not out.isnan().any() and not out[476:].any()
            assert error(out, exact) < 2 * torch_error


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_gqa_kernels_are_as_right_as_torch():
    lengths = ([1, 1, 40, 300, 0, 1, 129], [700, 0, 500, 1000, 5, 64, 0])
    batch, *tensors = gqa_problem(torch.bfloat16, "cuda", 32, 8, 128, 128, 64, lengths)

    def run(backend=None, **options):
        plan = gqa_plan(batch, *tensors[1:], heads=32, backend=backend, **options)
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
    with no_waits():
        problem.run()


@pytest.mark.parametrize("has_nope", [True, False])
def test_codes_are_read_where_they_lie(has_nope):
    """As over the dequantised latents, with W_UK and without un-rotated queries."""
    problem = RowCodesProblem(6, 1, 64, 8, (70, 3), seqlen_q=2)
    inputs = problem.inputs(torch.float64)
    q_pe, latent = inputs["q_pe"], with_keys(inputs)["latent_cache"]
    q_nope = torch.randn(*q_pe.shape[:3], 10 * has_nope, dtype=torch.float64)
    k_up, v_up = torch.randn(2, 3, 10, 64, dtype=torch.float64)
    maps = (k_up if has_nope else None, v_up)
    names = ("block_table", "cache_seqlens")
    call = {"softmax_scale": 0.3, "backend": "reference", **{name: inputs[name] for name in names}}
    found, expected = (
        mla_absorbed(q_nope, q_pe, cache, inputs["rope_cache"], *maps, centers=centers, **call)
        for cache, centers in ((inputs["latent_cache"], inputs["centers"]), (latent, None))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_an_output_that_would_not_be_written_is_refused(batch):
    """Products write into a view of it, of which other memory is a copy."""
    inputs = MLAProblem(4, 2, 16, 8, (70, 3)[:batch]).inputs(torch.float32)
    q_nope, maps = torch.randn(batch, 1, 4, 8), (torch.randn(2, 8, 16), torch.randn(2, 12, 16))
    names = ("q_pe", "latent_cache", "rope_cache", "block_table", "cache_seqlens")
    q_pe, *caches, table, lengths = (inputs[name] for name in names)
    call = partial(mla_absorbed, q_nope, q_pe, *caches, *maps, table, lengths, softmax_scale=0.3)
    with torch.no_grad():
        out = torch.empty(batch, 1, 4, 12)
        assert call(out=out) is out and torch.equal(out, call())
        for other, message in (
            (torch.empty(batch, 1, 12, 4).mT, r"out.stride\(\) is .*; expected contiguous memory"),
            (torch.empty(batch, 1, 4, 13), r"out.shape is \(\d, 1, 4, 13\); expected \(\d, 1, 4, 12\)"),
            (out.double(), "out is torch.float64 on cpu; expected torch.float32"),
        ):
            with pytest.raises(ValueError, match=message):
                call(out=other)


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (2, 2)])
def test_products_of_shared_maps_of_no_tokens(shape):
    x, weight = torch.randn(*shape, 4, 8), torch.randn(2, 8, 16)
    expected = torch.einsum("bshi,hio->bsho", x, weight.repeat_interleave(2, 0))
    assert torch.allclose(_up_project(x, weight), expected, atol=1e-5)
    with pytest.raises(ValueError, match="k_up.shape.0. is 3; expected a divisor of H=4"):
        _up_project(x, weight.new_zeros(3, 8, 16))
