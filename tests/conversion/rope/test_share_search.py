"""The search for a split of the budget: which splits it tries, that it takes the best one, and that it repeats."""

import math

import pytest
import torch

import mha2mla
from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.families import ADAPTERS
from mha2mla.conversion.layer_walk import LayerWalk
from mha2mla.conversion.rope.share_search import candidates, choose_rope_share
from mha2mla.conversion.source.checkpoint import CheckpointReader
from mha2mla.conversion.source.streaming import StreamedModel
from tests.conversion import tiny
from tests.conversion.tiny import Recipe

SHORT = {"preset": "minimal", "calibration_tokens": 320, "calibration_lengths": 40}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("source"), head_dim=32, num_hidden_layers=3)


def walk_over(folder, recipe):
    config = tiny.config("llama", head_dim=32, num_hidden_layers=3)
    spec = ADAPTERS["llama"].specify(config)
    reader = CheckpointReader(folder)
    model = StreamedModel(config, reader, spec.sliding_windows, device=torch.device("cpu"), dtype=torch.float32)
    windows = TokenBlocks.of(tiny.some_tokens(8, 40))
    return LayerWalk(model, ADAPTERS["llama"], spec, (), recipe, windows, folder)


def test_splits_keep_the_budget_and_differ():
    spec = ADAPTERS["llama"].specify(tiny.config("llama", num_key_value_heads=4, num_attention_heads=8, head_dim=64))
    for layout in ("shared", "per-group"):
        recipe = Recipe(layout=layout, cache_ratio=0.5, rope_share="auto", fit_steps=100)
        found = candidates(recipe, spec)
        widths = [geometry.qk_rope_head_dim for geometry in found]
        assert len(widths) == len(set(widths)) >= 4
        for geometry, candidate in found.items():
            assert candidate.geometry(spec) == geometry and candidate.fit.steps == 0
            assert 256 - 8 < geometry.cache_numel_per_token <= 256


@pytest.mark.parametrize("layout", ["shared", "per-group"])
def test_the_search_takes_what_loses_least_and_repeats(layout, source):
    recipe = Recipe(layout=layout, cache_ratio=0.5, rope_share="auto", **SHORT)
    walk = walk_over(source, recipe)
    first, second = (choose_rope_share(walk) for _ in range(2))
    assert first == second
    share, losses = first
    assert len(losses) > 1 and all(0 < loss < 2 and math.isfinite(loss) for loss in losses.values())
    geometry = recipe.with_share(share).geometry(walk.spec)
    best = min(losses, key=losses.get)
    assert best == f"{geometry.qk_rope_head_dim}+{geometry.kv_lora_rank}"


def test_a_conversion_records_the_choice(source, tmp_path):
    recipe = Recipe(layout="shared", cache_ratio=0.5, rope_share="auto", **SHORT)
    report = mha2mla.convert(
        source,
        tmp_path / "out",
        recipe,
        calibration=tiny.some_tokens(8, 40),
        evaluation=tiny.some_tokens(2, 40),
        progress=False,
    )
    losses = report.searches["rope_share_losses"]
    best = min(losses, key=losses.get)
    assert best == f"{report.geometry.qk_rope_head_dim}+{report.geometry.kv_lora_rank}"
    repeated = mha2mla.Recipe.from_dict(report.recipe).with_share(report.searches["rope_share"])
    assert repeated.geometry(walk_over(source, recipe).spec).kv_lora_rank == report.geometry.kv_lora_rank


def test_a_geometry_is_refused_before_the_choice():
    spec = ADAPTERS["llama"].specify(tiny.config("llama"))
    with pytest.raises(ValueError, match="rope.share is 'auto'"):
        Recipe(layout="shared", rope_share="auto").geometry(spec)
    exact = Recipe(layout="shared", rope_share="auto", cache_ratio=1.0)
    assert not exact.searches_rope_share and exact.geometry(spec).qk_nope_head_dim == 0
    ranks = Recipe(layout="shared", rope_share="auto", kv_lora_rank=24, qk_rope_head_dim=8)
    assert not ranks.searches_rope_share and ranks.geometry(spec).kv_lora_rank == 24
    with pytest.raises(ValueError, match="rope.share is 'best'"):
        Recipe(rope_share="best")


def test_a_budget_that_fits_no_split_is_refused_by_its_reason(source):
    recipe = Recipe(layout="per-group", cache_ratio=0.1, rope_share="auto", **SHORT)
    with pytest.raises(ValueError, match="leaves -?[0-9]+ for the latent"):
        choose_rope_share(walk_over(source, recipe))
