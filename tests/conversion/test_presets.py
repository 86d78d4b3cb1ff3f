"""Presets: naming one is taking it, and naming none takes what the device can run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mha2mla.conversion.latent.rules import LowRankRule
from mha2mla.conversion.presets import MEASURED, better_than, choose_preset, is_device_dependent
from mha2mla.conversion.recipe import Recipe
from mha2mla.conversion.target import LAYOUTS, Target
from mha2mla.environment import compute_device
from mha2mla.pipeline.check import merge_keys

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def named_recipe(recipe, preset, device):
    return Recipe.choose(merge_keys(recipe, preset, {}), device.type)


@pytest.mark.parametrize(
    ("given", "device", "chosen"),
    [
        ({}, "cpu", "quick"),
        ({}, "cuda", "latent"),
        ({"layout": "shared"}, "cuda", "shared"),
        ({"layout": "per-group"}, "cpu", "quick"),
        ({"layout": "per-group"}, "cuda", "per-group"),
        ({"layout": "latent"}, "cpu", "quick"),
        ({"layout": "latent"}, "cuda", "latent"),
        ({"layout": "shared", "kv_lora_rank": 64, "qk_rope_head_dim": 16}, "cuda", "shared"),
        ({"cache_ratio": 1.0}, "cuda", "quick"),
    ],
)
def test_auto_is_the_best_that_the_device_can_run(given, device, chosen):
    preset, why = choose_preset("auto", given, device)
    assert preset == chosen and why.startswith(f"{chosen}, chosen by auto: ")
    Recipe.from_preset(preset, **given)  # goes with what was given
    assert choose_preset("cpu", given, device)[0] == "cpu"


@pytest.mark.parametrize("layout", MEASURED)
def test_without_a_gpu_it_says_what_one_would_give_and_where_that_was_measured(layout):
    better = better_than("quick", layout, 0.5)
    assert f"cpu (an hour or two), {layout} (needs a GPU)" in better
    assert all(f"{preset} {ratios}" in better for preset, ratios in MEASURED[layout].items())
    assert "windows of 512 / 8192 tokens" in better
    assert better_than("minimal", layout, 0.5).startswith("preset quick, cpu (an hour or two), ")
    assert better_than("cpu", layout, 0.5).startswith(f"preset {layout} (needs a GPU)")
    best = better_than(layout, layout, 0.5)
    assert best.startswith("a larger cache_ratio") and ("or layout latent" in best) == (layout != "latent")
    assert (f"latent by quick {MEASURED['latent']['quick']}" in best) == (layout != "latent")
    assert better_than("deepseek-512+64", "shared", None) == better_than("shared", "shared", 0.5)
    assert better_than("quick", layout, 1.0) == "nothing: no number was lost"


def test_the_default_layout_s_figures_are_those_of_the_recorded_row():
    rows = json.loads((RESULTS / "h200-row-codes.json").read_text(encoding="utf-8"))["rows"]
    (row,) = (row for row in rows if row["cache"] == "quick, auto 0.5" and row["model"].startswith("SmolLM2"))
    assert MEASURED["latent"] == {"quick": f"{row['ratio 512']:.2f} / {row['ratio 8,192']:.2f}"}


@pytest.mark.parametrize(
    ("preset", "keys", "bits"),
    [
        *((preset, {}, "auto") for preset in ("quick", "cpu", "latent")),
        ("latent", {"cache_ratio": 0.125}, "auto"),
        ("latent", {"cache_ratio": 0.125, "latent.bits": 3}, 3),
        ("quick", {"layout": "latent", "kv_lora_rank": 64, "qk_rope_head_dim": 16}, 16),
        ("quick", {"latent.ranks": [32, 64]}, 16),
        ("quick", {"latent.ranks": [32, 64], "latent.bits": [3, 4]}, [3, 4]),
        ("quick", {"latent.ranks": "measured"}, "auto"),
        *((preset, {"layout": "shared"}, 16) for preset in ("quick", "cpu", "latent", "shared")),
        *((preset, {}, 16) for preset in ("minimal", "care", "shared", "per-group", "deepseek-512+64")),
    ],
)
def test_bits_are_by_layer_where_a_preset_leaves_them_open(preset, keys, bits):
    assert Recipe.from_preset(preset, **keys).latent.bits == bits


@pytest.mark.parametrize("preset", ["quick", "cpu", "minimal"])
def test_presets_that_name_no_layout_cache_the_latent_alone(preset):
    assert Recipe.from_preset(preset).target.layout == "latent"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_widths_and_shares_need_a_layout_on_every_machine(device):
    widths, where = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}, torch.device(device)
    for preset in (None, "auto", "quick", "cpu"):
        for keys, named in ((widths, "layout is not given"), ({"rope.share": 0.2}, "or layout: shared")):
            with pytest.raises(ValueError, match=named):
                named_recipe(keys, preset, where)
    for layout in LAYOUTS:
        assert named_recipe({**widths, "layout": layout}, None, where)[0].target.layout == layout
    for preset in ("shared", "per-group", "latent", "deepseek-512+64"):  # these name theirs
        assert named_recipe(widths, preset, where)[0].target.kv_lora_rank == 64


def test_a_mapping_takes_the_preset_of_its_own_the_argument_s_or_the_machine_s():
    quick = Recipe.from_preset("quick", cache_ratio=0.25)
    assert named_recipe({"cache_ratio": 0.25, "preset": "quick"}, None, CPU)[0] == quick
    assert named_recipe({"cache_ratio": 0.25}, "quick", CPU)[0] == quick
    assert named_recipe({"cache_ratio": 0.25, "preset": "auto"}, None, CPU)[0] == quick
    assert named_recipe({"target": {"cache_ratio": 0.25}}, None, CPU)[0] == quick
    assert named_recipe(quick, "quick", CPU)[0] == quick
    assert named_recipe(None, None, CPU)[0] == Recipe.from_preset("quick")


@pytest.mark.parametrize("keys", [{}, {"cache_ratio": 0.25}, {"layout": "shared"}, {"cache_ratio": 1.0}])
def test_naming_no_preset_is_auto_everywhere(keys):
    there, _ = named_recipe(keys, None, compute_device(None))
    assert Recipe(**keys) == Recipe.from_dict(keys) == Recipe.from_preset("auto", **keys) == there
    assert Recipe(target=Target(**keys)) == there and there.preset in ("quick", *LAYOUTS)


def test_a_stage_replaces_the_presets():
    recipe = Recipe.from_preset("published-transmla")
    other = replace(recipe, rope=replace(recipe.rope, share=None))
    assert recipe.rope.share == 1 / 3 and other.rope.share is None and other.latent == recipe.latent


def test_care_is_transmla_with_another_rule_and_ranks():
    care, transmla = (Recipe.from_preset(name).flat() for name in ("care", "published-transmla"))
    differ = {key: value for key, value in care.items() if value != transmla[key]}
    assert differ == {"latent.rule": "covariance-joint", "latent.ranks": "measured"}
    assert Recipe.from_preset("care").low_rank_rule == replace(LowRankRule.find("balanced-pca"), balanced=False)


def test_a_recipe_takes_one_preset():
    for recipe in (Recipe.from_preset("quick"), {"preset": "quick"}):
        with pytest.raises(ValueError, match="preset is 'shared' beside a recipe of preset 'quick'"):
            named_recipe(recipe, "shared", CPU)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_s_own_preset_has_its_name(layout):
    recipe = Recipe.from_preset(layout)
    assert recipe.target.layout == layout and recipe.fit.steps
    shared = Recipe.from_preset("shared")
    assert replace(recipe, target=shared.target, latent=replace(recipe.latent, bits=16), preset="shared") == shared
    assert f"{layout} (needs a GPU)" in better_than("quick", layout, 0.5)


def test_each_layout_has_a_rotary_share_of_its_own():
    from mha2mla.conversion.families import ADAPTERS
    from tests.conversion import tiny

    spec = ADAPTERS["llama"].specify(tiny.config("llama", num_key_value_heads=4, num_attention_heads=8, head_dim=64))
    widths = {layout: Recipe.from_preset("quick", layout=layout).geometry(spec) for layout in ("shared", "per-group")}
    assert widths["shared"].qk_rope_head_dim == 56 and widths["per-group"].qk_rope_head_dim == 16
    given = Recipe.from_preset("quick", layout="shared", **{"rope.share": 0.4}).geometry(spec)
    assert given.qk_rope_head_dim == 104


def test_help_shows_a_default_only_where_it_does_not_depend_on_the_machine():
    assert not is_device_dependent("rope.longrope_table") and not is_device_dependent("latent.rule")
    assert is_device_dependent("fit.steps") and is_device_dependent("layout")
