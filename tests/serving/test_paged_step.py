"""Another engine's steps over its own pages: plans, row layout, and the tokens of a model that calls them."""

from dataclasses import replace

import pytest
import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import MAX_EXPANDED_TOKENS, DecodePlan
from mha2mla.kernels.split_kv.choice import SEQLENS_Q
from mha2mla.modeling import ATTENTION_BACKENDS
from mha2mla.modeling.batch import uniform_length
from mha2mla.serving.paged_step import EngineSteps, cache_views, host_lengths, row_width, warm_up, warm_up_batches
from mha2mla.serving.warm_up import layer_tensors
from tests.modeling.models import mla_model

PAGE = 4
BACKEND = ATTENTION_BACKENDS.get("mla_reference")


def test_a_row_is_the_latent_and_then_the_rotary_keys():
    geometry = MLAGeometry(4, 2, 16, 8, 8, 8)
    rows = torch.arange(3 * PAGE * geometry.cache_numel_per_token).view(3, PAGE, -1)
    views = cache_views(rows, geometry)
    assert geometry.cache_numel_per_token == 32
    assert views["latent_cache"].tolist() == rows[..., :16].tolist()
    assert views["rope_cache"][1, 2, 1].tolist() == rows[1, 2, 24:].tolist()
    assert views["rope_cache"].data_ptr() == rows.data_ptr() + 16 * rows.element_size()
    alone = MLAGeometry(4, 1, 32, 8, 8, 8, rope_from_latent=True)
    assert list(cache_views(rows, alone)) == ["latent_cache"]
    with pytest.raises(ValueError, match="expected rows of 32"):
        cache_views(rows[..., :31], geometry)


def test_a_page_of_keys_in_8_bits_has_parts():
    """All latents, all keys and all scales, of which none is another's; of 16 bits no byte is left over."""
    geometry = MLAGeometry(4, 1, 16, 8, 8, 8).with_key_codes
    assert row_width(geometry, 2) == 16 + 4 + 2 and row_width(geometry, 4) == 16 + 2 + 1
    rows = torch.zeros(3, PAGE, 22, dtype=torch.bfloat16)
    views = cache_views(rows, geometry)
    shapes = {name: (tuple(view.shape[1:]), view.dtype) for name, view in views.items()}
    assert shapes == {
        "latent_cache": ((PAGE, 16), torch.bfloat16),
        "rope_cache": ((PAGE, 1, 8), torch.float8_e4m3fn),
        "rope_scale": ((PAGE,), torch.float32),
    }
    for name, view in views.items():
        assert not rows[1].view(torch.uint8).eq(255).any()
        bytes_of = view[1].view(torch.uint8)
        bytes_of.fill_(255)
        assert rows[1].view(torch.uint8).eq(255).sum() == bytes_of.numel(), name
        bytes_of.zero_()
    with pytest.raises(ValueError, match="expected rows of 22"):
        cache_views(rows[..., :21], geometry)


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
    (a,), (b,) = first.plans, second.plans
    assert a is b
    assert a.splits[:, 1].tolist() == [4, 6]
    assert first.batch.positions.data_ptr() == second.batch.positions.data_ptr()
    assert second.batch.slots.tolist() == [3, 5]


def test_warm_up_batches_need_every_kernel():
    steps = [tuple(queries) for queries, totals in warm_up_batches(512, 100) if queries == totals]
    decode = {(uniform_length(queries, sum(queries)), len(queries)) for queries in steps}
    assert decode >= {(length, batch) for length in SEQLENS_Q for batch in (1, 2, 4, 8, 16, 32, 64)}
    for most, longest, totals in ((300, 10**6, [1, 299 + MAX_EXPANDED_TOKENS]), (300, 200, [1, 200, 99]), (1, 9, [1])):
        assert warm_up_batches(most, longest)[-1][1] == totals
        assert all(sum(queries) <= most for queries, _ in warm_up_batches(most, longest))
        assert sum(warm_up_batches(most, longest)[-1][0]) == most


@pytest.mark.parametrize("case", ["per-group", "latent", "kept qk-norm", "float8 latent"])
def test_warm_up_runs_both_forms(case):
    config = mla_model(case.removeprefix("float8 ")).config
    config.rotary_key_cache = "float8" if case.startswith("float8") else config.rotary_key_cache
    (layer, *_), tokens, ran = config.attention_constants(), 40, []

    def attend(tensors, cache, batch, plan, constants):
        out = BACKEND.attend(tensors, cache, batch, plan, constants)
        ran.append((type(plan), len(batch.cache_seqlens), out.shape[0], bool(out.isfinite().all())))
        return out

    tensors = layer_tensors(layer, tokens, torch.float32, torch.device("cpu"))
    warm_up(tensors, replace(BACKEND, attend=attend), layer, 100)
    assert all(finite for *_, finite in ran)
    assert {(batch, count) for kind, batch, count, _ in ran if kind is DecodePlan} >= {(1, 8), (4, 32), (32, 32)}
    assert [(batch, count) for kind, batch, count, _ in ran if kind is not DecodePlan] == [(2, tokens)]
