"""What a decode step shares between its layers: plans of the decode op, their buffers, the angles of RoPE."""

from dataclasses import replace

import pytest
import torch

from mha2mla.kernels import DecodePlan
from mha2mla.modeling import LatentCache, backends, modeling_mha2mla
from tests.modeling import models
from tests.ops import noted


@pytest.fixture
def refreshed(monkeypatch) -> list[tuple]:
    """Stands in for a GPU, where plans have buffers; fills up with (plan, lengths, starts) of every refresh."""
    seen, allocate = [], backends.plan_mla_decode

    def with_buffers(q_latent, *args, **keys):
        plan = allocate(q_latent, *args, **keys)
        batch, seqlen_q, heads, d_c = plan.shape
        num_ctas = 4
        return replace(
            plan,
            schedule=torch.zeros(num_ctas + batch, 16, dtype=torch.int32),
            partial_out=torch.zeros(num_ctas, 2, seqlen_q, heads, d_c),
            partial_lse=torch.zeros(num_ctas, 2, seqlen_q, heads),
        )

    def refresh(plan, cache_seqlens, cache_starts=None):
        seen.append((plan, cache_seqlens.tolist(), None if cache_starts is None else cache_starts.tolist()))

    monkeypatch.setattr(backends, "plan_mla_decode", with_buffers)
    monkeypatch.setattr(DecodePlan, "refresh", refresh)
    return seen


@pytest.fixture
def used(monkeypatch) -> list[DecodePlan]:
    """Fills up with the plan of every call of the decode op."""
    return noted(monkeypatch, backends, "mla_absorbed", lambda *_, plan, **__: plan)


def addresses(plan: DecodePlan) -> list[int]:
    return [t.data_ptr() for t in (plan.schedule, plan.splits, plan.partial_out, plan.partial_lse)]


@pytest.mark.parametrize(("case", "width"), [("per-group", 16), ("latent", 24)])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@torch.no_grad()
def test_one_plan_for_all_layers_and_all_steps(static, case, width, refreshed, used):
    """Lengths are those with the new tokens; buffers stay, also where other numbers of tokens come between."""
    model = models.mla_model(case, num_hidden_layers=2)
    ids = models.tokens(2, 25)
    cache = LatentCache(model.config, max_cache_len=32 if static else None, page_size=32)
    kept, start = {}, 0
    for stop in (11, 12, 13, 16, 17, 20):
        model(ids[:, start:stop], attention_mask=models.left_mask(stop, 0, 3), past_key_values=cache)
        if start:
            ((plan, lengths, starts),) = refreshed
            assert lengths == [stop, stop] == cache.layers[0].cache_seqlens.tolist() and starts == [0, 3]
            assert [other is plan for other in used] == [True, True]
            assert plan.shape == (2, stop - start, 6, width) and plan.capacity == 32
            assert kept.setdefault(stop - start, addresses(plan)) == addresses(plan)
        refreshed.clear()
        used.clear()
        start = stop
    assert sorted(kept) == [1, 3]


@torch.no_grad()
def test_a_schedule_per_window(refreshed, used):
    model = models.mla_model("some sliding")
    cache = model(models.tokens(2, 14)).past_key_values
    model(models.tokens(2, 4), past_key_values=cache)
    assert [(plan.window, lengths) for plan, lengths, _ in refreshed] == [(None, [18, 18]), (models.WINDOW, [18, 18])]
    assert [plan.window for plan in used] == [None, models.WINDOW]
    full, sliding = (addresses(plan) for plan in used)
    assert full[0] != sliding[0] and full[1] != sliding[1]
    assert full[2:] == sliding[2:]


@torch.no_grad()
def test_other_ranks_share_schedule_and_workspace(refreshed, used):
    model = models.mla_model("per layer")
    ids = models.tokens(2, 15)
    expected = model(ids, use_cache=False).logits[:, 14:]
    cache = model(ids[:, :14]).past_key_values
    assert models.relative_error(model(ids[:, 14:], past_key_values=cache).logits, expected) < 2e-5
    assert len(refreshed) == 1
    assert [plan.shape for plan in used] == [(2, 1, 6, 16), (2, 1, 6, 8)]
    assert addresses(used[0]) == addresses(used[1])
    assert [tuple(plan.partial_out.shape) for plan in used] == [(4, 2, 1, 6, 16), (4, 2, 1, 6, 8)]


@torch.no_grad()
def test_plans_follow_the_pages(refreshed, used):
    """Growth and another batch size make new plans, and drop the old ones; a reset keeps them."""
    model = models.mla_model()
    cache = LatentCache(model.config, page_size=16)
    model(models.tokens(2, 15), past_key_values=cache)
    for _ in range(2):
        model(models.tokens(2, 1), past_key_values=cache)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    model(models.tokens(3, 1), past_key_values=cache)
    assert [plan.capacity for plan in used[::2]] == [16, 32, 32]
    assert [plan.shape[0] for plan in used[::2]] == [2, 2, 3]
    assert len(cache.planner.plans) == 1
    before = addresses(used[-1])
    cache.reset()
    model(models.tokens(3, 9), past_key_values=cache)
    model(models.tokens(3, 1), past_key_values=cache)
    assert addresses(used[-1]) == before


@torch.no_grad()
def test_the_backend_may_change_between_steps(used):
    """A plan is for one backend: what it holds follows from it."""
    model = models.mla_model()
    cache = model(models.tokens(2, 9)).past_key_values
    model(models.tokens(2, 1), past_key_values=cache)
    model.config.attention_backend = "mla_reference"
    model(models.tokens(2, 1), past_key_values=cache)
    assert used[0] is not used[2] and len(cache.planner.plans) == 1
    model.config.attention_backend = "mla_fp8_reference"
    with pytest.raises(ValueError, match="'mla_fp8_reference' has a cache of layout 'mla_fp8'; expected 'mla'"):
        model(models.tokens(2, 1), past_key_values=cache)
    model.config.attention_backend = "mla_paged"
    with pytest.raises(ValueError, match="'mla_paged' refuses: dtype is float32"):
        model(models.tokens(2, 1), past_key_values=cache)
    assert {layer.backend.name for layer in cache.layers} == {"mla_reference"} and cache.get_seq_length() == 11


@torch.no_grad()
def test_places_are_computed_once_per_step(monkeypatch):
    """Rotation and writing are one op, which all layers hand the same positions and slots."""

    model = models.mla_model()
    ids = models.tokens(2, 10)
    expected = model(ids, use_cache=False).logits[:, 9:]
    monkeypatch.setattr(modeling_mha2mla, "rotary_cos_sin", None)
    seen = noted(monkeypatch, backends, "mla_append", lambda *args, **_: args[5:7])
    cache = LatentCache(model.config, page_size=16)
    for part in (ids[:, :9], ids[:, 9:]):
        logits = model(part, past_key_values=cache).logits
    assert models.relative_error(logits, expected) < 2e-5
    first, second = seen[2:]
    assert first[0] is second[0] and first[1] is second[1]
    assert [seen[0][0].tolist(), first[0].tolist()] == [[*range(9)] * 2, [9, 9]]
    assert [seen[0][1].tolist(), first[1].tolist()] == [[*range(9), *range(16, 25)], [9, 25]]
