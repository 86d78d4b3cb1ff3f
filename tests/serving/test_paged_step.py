"""Another engine's steps over its own pages: plans, row layout, and the tokens of a model that calls them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import FEWEST_EXPANDED, DecodePlan
from mha2mla.kernels.split_kv.choice import SEQLENS_Q
from mha2mla.kernels.split_kv.plan import allocate_plan
from mha2mla.modeling import ATTENTION_BACKENDS
from mha2mla.modeling.batch import uniform_length
from mha2mla.modeling.cache_layout import latent_layout
from mha2mla.serving.paged_step import (
    MAX_COPIED_TOKENS,
    EngineSteps,
    cache_views,
    calls_of,
    codes_without_kernel,
    host_lengths,
    row_of,
    warm_up,
    warm_up_batches,
)
from mha2mla.serving.warm_up import engine_layers, layer_tensors
from tests.modeling.models import mla_config, mla_model

PAGE = 4
BACKEND = ATTENTION_BACKENDS.get("mla_reference")


def test_a_row_is_the_latent_and_then_the_rotary_keys():
    geometry = MLAGeometry(4, 2, 16, 8, 8, 8)
    rows = torch.arange(3 * PAGE * geometry.cache_numel_per_token).view(3, PAGE, -1)
    views = cache_views(rows, geometry, rows.dtype)
    assert row_of(geometry, rows.dtype) == (geometry.cache_numel_per_token, rows.dtype) == (32, torch.int64)
    assert views["latent_cache"].tolist() == rows[..., :16].tolist()
    assert views["rope_cache"][1, 2, 1].tolist() == rows[1, 2, 24:].tolist()
    assert views["rope_cache"].data_ptr() == rows.data_ptr() + 16 * rows.element_size()
    alone = MLAGeometry(4, 1, 32, 8, 8, 8, rope_from_latent=True)
    assert list(cache_views(rows, alone, rows.dtype)) == ["latent_cache"]
    with pytest.raises(ValueError, match=r"expected rows of 32 torch\.int64"):
        cache_views(rows[..., :31], geometry, rows.dtype)


KEPT_CODES = MLAGeometry(4, 1, 64, 8, 8, 8, latent_bits=4)


@pytest.mark.parametrize(
    ("geometry", "latent", "others"),
    [
        (MLAGeometry(4, 1, 64, 8, 8, 8, rope_from_latent=True, latent_bits=3), (4 + 24, torch.uint8), {}),
        (KEPT_CODES, (4 + 32, torch.uint8), {"rope_cache": ((1, 8), torch.bfloat16)}),
        (MLAGeometry(4, 1, 16, 8, 8, 8).with_key_codes, (16, torch.bfloat16), {}),
    ],
    ids=["codes", "codes beside kept keys", "keys in 8 bits"],
)
def test_a_page_of_codes_has_parts(geometry, latent, others):
    """One behind another, of which none is another's; together every byte that the cache counts."""
    row = row_of(geometry, torch.bfloat16)
    assert row == (geometry.cache_bytes_per_token(2), torch.uint8)
    rows = torch.zeros(3, PAGE, row.width, dtype=torch.uint8)
    views = cache_views(rows, geometry, torch.bfloat16)
    layout = latent_layout(geometry, PAGE, torch.bfloat16)
    kinds = {name: (tuple(view.shape[2:]), view.dtype) for name, view in views.items()}
    assert kinds == {tensor.name: (tensor.shape, tensor.dtype) for tensor in layout.tensors}
    assert kinds["latent_cache"] == ((latent[0],), latent[1]) and others.items() <= kinds.items()
    for name, view in views.items():
        mine = view[1].view(torch.uint8)
        mine.fill_(255)
        assert rows.eq(255).sum() == rows[1].eq(255).sum() == mine.numel(), name
        assert view[1].is_contiguous(), name
        mine.zero_()
    with pytest.raises(ValueError, match=f"expected rows of {row.width} torch.uint8"):
        cache_views(rows[..., :-1], geometry, torch.bfloat16)
    with pytest.raises(ValueError, match=f"expected rows of {row.width} torch.uint8"):
        cache_views(rows.view(torch.int8), geometry, torch.bfloat16)


@pytest.mark.parametrize(
    ("lengths", "num_tokens", "expected"),
    [
        ([1, 1, 1], 3, 1),
        ([2, 2, 0, 0], 8, 2),  # a graph's padding
        ([1, 1, 0], 2, None),
        ([1, 0, 1], 3, None),
        ([1, 2], 3, None),
        ([9, 9], 18, None),
        ([], 0, None),
    ],
)
def test_which_batches_a_decode_plan_serves(lengths, num_tokens, expected):
    assert uniform_length(lengths, num_tokens) == expected


def test_host_lengths():
    assert host_lengths([3, 1, 0], [5, 9, 0]).tolist() == [[3, 1, 0], [2, 8, 0], [0, 0, 0]]
    assert host_lengths([], []).shape == (3, 0)


@pytest.mark.parametrize(
    ("query", "total", "expected"),
    [
        ([1, 1, 1, 40, 7], [90, 9, 9, 50, 60], [(0, 3, 1), (3, 5, None)]),
        ([4, 4, 3, 90], [90] * 4, [(0, 2, 4), (2, 4, None)]),
        ([40, 1, 1], [40, 9, 9], [(0, 3, None)]),
        ([9, 9], [9, 9], [(0, 2, None)]),
        ([1, 1], [5, 5], [(0, 2, None)]),  # beside tokens that pad the step
        ([], [], [(0, 0, None)]),
        # Two of three sequences are what may be copied, one that is longer goes alone.
        ([1, 9, 9, 9, 9], [1, *[MAX_COPIED_TOKENS // 2] * 3, 9], [(0, 1, 1), (1, 3, None), (3, 5, None)]),
        ([9, 9, 9], [9, 2 * MAX_COPIED_TOKENS, 9], [(0, 1, None), (1, 2, None), (2, 3, None)]),
    ],
)
def test_calls_of_a_mixed_step_over_codes(query, total, expected):
    assert calls_of(query, total, has_codes=True) == expected
    assert calls_of(query, total, has_codes=False) == [(0, len(query), None)]


def test_decode_plans_stay_where_they_are():
    config = mla_model("per layer").config
    layers = config.attention_constants()
    widths = {layer.geometry.cache_numel_per_token for layer in layers}
    assert len(widths) == 2  # so each has a planner of its own
    planner = EngineSteps(layers[:1], BACKEND, torch.float32, 8, torch.device("cpu"))
    rows = torch.zeros(4, PAGE, layers[0].geometry.cache_numel_per_token)
    table, seqlens = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    where = torch.tensor([2, 4])
    first = planner.step(rows, [1, 1], [3, 5], where, where, table, seqlens)
    second = planner.step(rows, [1, 1], [4, 6], where + 1, where + 1, table, seqlens + 1)
    ((_, one),), ((_, other),) = first.calls, second.calls
    (a,), (b,) = one.plans, other.plans
    assert a is b
    assert a.splits[:, 1].tolist() == [4, 6]
    assert first.batch.positions.data_ptr() == second.batch.positions.data_ptr()
    assert second.batch.slots.tolist() == [3, 5]


def test_warm_up_batches_need_every_kernel():
    steps = [tuple(queries) for queries, totals in warm_up_batches(512, 100) if queries == totals]
    decode = {(uniform_length(queries, sum(queries)), len(queries)) for queries in steps}
    assert decode >= {(length, batch) for length in SEQLENS_Q for batch in (1, 2, 4, 8, 16, 32, 64)}
    for most, longest, totals in ((300, 10**6, [1, 299 + FEWEST_EXPANDED]), (300, 200, [1, 200, 99]), (1, 9, [1])):
        assert warm_up_batches(most, longest)[-1][1] == totals
        assert all(sum(queries) <= most for queries, _ in warm_up_batches(most, longest))
        assert sum(warm_up_batches(most, longest)[-1][0]) == most


@pytest.mark.parametrize("longest", [100, 8192, 10**6])
def test_warm_up_batches_copy_as_much_as_any_step(longest):
    """And every number of short queries attends to a copy."""
    calls = [
        (queries[first:stop], totals[first:stop])
        for queries, totals in warm_up_batches(8192, longest, has_codes=True)
        if uniform_length(queries, sum(queries)) is None
        for first, stop, length in calls_of(queries, totals, has_codes=True)
        if length is None
    ]
    assert {query for queries, _ in calls for query in queries} >= {1, 2, 4, 8}
    copied = [len(totals) * -(-max(totals) // 64) * 64 for _, totals in calls]
    fits = MAX_COPIED_TOKENS - (longest if longest > 100 else 128)
    assert max(copied) >= max(longest, fits) and max(copied) <= max(-(-longest // 64) * 64, MAX_COPIED_TOKENS)
    assert all(sum(queries) <= 8192 for queries, _ in warm_up_batches(8192, longest, has_codes=True))


@pytest.mark.parametrize("case", ["per-group", "latent", "kept qk-norm", "int8 latent", "codes", "kept codes"])
def test_warm_up_runs_both_forms(case):
    config = mla_model("latent" if "codes" in case else case.removeprefix("int8 ")).config
    config.latent_bits = 4 if "codes" in case else 16
    config.rotary_key_cache = "bfloat16" if case == "kept codes" else config.rotary_key_cache
    config.rotary_key_cache = "int8" if case.startswith("int8") else config.rotary_key_cache
    (layer, *_), tokens, ran = config.attention_constants(), 40, []

    def attend(tensors, cache, batch, plan, constants):
        out = BACKEND.attend(tensors, cache, batch, plan, constants)
        ran.append((type(plan), len(batch.cache_seqlens), out.shape[0], bool(out.isfinite().all())))
        return out

    tensors = layer_tensors(layer, tokens, torch.float32, torch.device("cpu"))
    warm_up(tensors, replace(BACKEND, attend=attend), layer, 100)
    assert all(finite for *_, finite in ran)
    assert {(batch, count) for kind, batch, count, _ in ran if kind is DecodePlan} >= {(1, 8), (4, 32), (32, 32)}
    mixed = [(batch, count) for kind, batch, count, _ in ran if kind is not DecodePlan]
    assert mixed == ([(38, 38), (19, 38), (9, 36), (4, 32), (1, 39)] if "codes" in case else [(2, tokens)])


def test_warm_up_launches_every_combine_kernel(monkeypatch):
    """Of 24 heads and 8 new tokens an H200 merges 5 sequences by a kernel of their own, which 4 and 8 do not take."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    plan = allocate_plan((1, 7, 24, 64), 22, 64, True, None, 0, torch.device("cpu"))
    assert plan.combine_batches() == [1, 2, 5, 6] and replace(plan, partial_lse=torch.empty(0)).combine_batches() == []
    (layer, *_), sizes = mla_model("latent").config.attention_constants(), set()

    def attend(tensors, cache, batch, plan, constants):
        sizes.add(tuple(plan.shape[:2]) if isinstance(plan, DecodePlan) else None)
        return BACKEND.attend(tensors, cache, batch, plan, constants)

    monkeypatch.setattr(DecodePlan, "combine_batches", lambda plan: [1, 5, 33])
    tensors = layer_tensors(layer, 40, torch.float32, torch.device("cpu"))
    warm_up(tensors, replace(BACKEND, attend=attend), layer, 100)
    assert sizes >= {(5, 1), (33, 1), (5, 8)} and (33, 2) not in sizes


def test_codes_without_a_kernel_are_named():
    """Those of 16-bit queries that a kernel decodes on a Hopper are held, others are not."""

    def asked(bits, rank, dtype=torch.bfloat16):
        def cached_geometry(layer):
            return MLAGeometry(6, 1, rank[layer], 16, 16, 16, 2, latent_bits=bits[layer])

        config = SimpleNamespace(num_hidden_layers=2, cached_geometry=cached_geometry)
        return codes_without_kernel(config, dtype, ranks=2, drafted=3)

    assert asked([4, 3], [64, 96]) is asked([16, 3], [40, 96]) is asked([16, 16], [40, 40]) is None
    assert asked([4, 3], [64, 40]) == asked([4, 3], [64, 72]) == 1
    assert asked([4, 3], [64, 96], torch.float32) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_that_are_compiled_ahead_are_a_ranks(ranks):
    """Each of the different ones once, with codes only where vLLM's cache holds them: where all layers' are decoded."""

    def found(rank, dtype=torch.bfloat16):
        config = mla_config("latent", kv_lora_rank=rank, qk_rope_head_dim=16, qk_nope_head_dim=16, latent_bits=4)
        layers = [each.geometry for each in engine_layers(config, dtype, ranks)]
        assert {each.num_attention_heads for each in layers} == {6 // ranks}
        return [(each.kv_lora_rank, each.latent_bits) for each in layers]

    assert found([64, 96]) == [(64, 4), (96, 4)] and found([64, 64]) == [(64, 4)]
    assert found([64, 40]) == [(64, 16), (40, 16)] and found([64, 64], torch.float32) == [(64, 16)]
