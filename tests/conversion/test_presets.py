"""Presets: naming one is taking it, naming none takes what the device can run, and old names are still read."""

import pytest

from mha2mla.conversion.families import ADAPTERS
from mha2mla.conversion.presets import AUTO_PRESETS, DEFAULTS, PRESETS, RENAMED, choose_preset, common_default
from mha2mla.conversion.recipe import Recipe, given_fields
from tests.conversion import tiny


def test_every_key_has_a_default_and_presets_set_no_other():
    keys = {each.name for each in given_fields()} - {"preset"}
    assert set(DEFAULTS) == keys
    for name in PRESETS:
        assert set(PRESETS[name]) <= keys, name


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_named_to_the_constructor_is_that_preset(name):
    """Once it was recorded and ignored: the card said `quick` over the plain defaults."""
    recipe = Recipe(preset=name)
    assert recipe.is_resolved and recipe.changes() == {}
    assert {key: getattr(recipe, key) for key in PRESETS[name]} == dict(PRESETS[name])
    changed = Recipe(preset=name, mean_phase=0.125, seed=7)
    assert changed.changes() == {"mean_phase": 0.125, "seed": 7}
    assert changed.given() == recipe.given() | changed.changes()


def test_a_recipe_that_names_no_preset_is_open_until_the_device_is_known():
    recipe = Recipe(cache_ratio=0.25)
    assert recipe.preset == "auto" and not recipe.is_resolved and recipe.target_cache_ratio == 0.25
    assert recipe.to_dict() == {"preset": "auto", "cache_ratio": 0.25}
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    spec = ADAPTERS["llama"].specify(tiny.config("llama"))
    for depends in (recipe.geometry, recipe.geometries, lambda _: recipe.is_exact(None)):
        with pytest.raises(ValueError, match="preset is 'auto', which depends on the device"):
            depends(spec)
    for name in AUTO_PRESETS:
        assert recipe.with_preset(name) == Recipe.from_preset(name, cache_ratio=0.25)


@pytest.mark.parametrize(
    ("given", "device", "chosen"),
    [
        ({}, "cpu", "quick"),
        ({}, "cuda", "shared"),
        ({"layout": "per-group"}, "cpu", "quick"),
        ({"layout": "per-group"}, "cuda", "per-group"),
        ({"layout": "shared", "kv_lora_rank": 64, "qk_rope_head_dim": 16}, "cuda", "shared"),
        ({"cache_ratio": 1.0}, "cuda", "quick"),
    ],
)
def test_auto_is_the_best_that_the_device_can_run(given, device, chosen):
    choice = choose_preset("auto", given, device)
    assert choice.preset == chosen in AUTO_PRESETS and choice.reason.startswith(f"{chosen}, chosen by auto: ")
    Recipe(**given).with_preset(choice.preset)  # and goes with what was given
    assert choose_preset("cpu", given, device).preset == "cpu"


@pytest.mark.parametrize("layout", ["shared", "per-group"])
def test_without_a_gpu_it_says_what_one_would_give_and_where_that_was_measured(layout):
    reason = choose_preset("auto", {"layout": layout}, "cpu").reason
    assert f"{layout} (needs a GPU)" in reason and f"{layout} 1.0" in reason
    assert "windows of 512 / 8192 tokens" in reason


def test_auto_refuses_at_once_what_no_preset_takes_and_nothing_else():
    with pytest.raises(ValueError, match="mean_phase is 2"):
        Recipe(mean_phase=2)
    long = Recipe(calibration_length=65536)  # more than quick calibrates on at all
    assert long.with_preset("shared").calibration_length == 65536
    with pytest.raises(ValueError, match="calibration_tokens is .*65536"):
        long.with_preset("quick")


def test_a_recipe_takes_one_preset():
    recipe = Recipe(preset="quick", seed=3)
    assert recipe.with_preset("quick") is recipe
    with pytest.raises(ValueError, match="preset is 'shared' beside a recipe of preset 'quick'"):
        recipe.with_preset("shared")


def test_another_layout_does_not_get_the_rotary_share_found_for_the_presets():
    assert Recipe(preset="quick").rope_share == 0.21
    assert Recipe(preset="quick", layout="per-group").rope_share == DEFAULTS["rope_share"]
    assert Recipe(preset="quick", layout="per-group", rope_share=0.3).rope_share == 0.3


def test_published_methods_do_not_go_by_this_tools_name():
    assert not {"mha2mla", "transmla"} & set(PRESETS)
    with pytest.raises(ValueError, match="preset is 'mha2mla'; expected one of .*'published-mha2mla'"):
        Recipe(preset="mha2mla")


@pytest.mark.parametrize(("old", "new"), [*RENAMED.items(), (None, "minimal"), ("quick", "quick")])
def test_records_of_earlier_versions_are_read(old, new):
    recorded = Recipe(preset=new, seed=5).to_dict() | {"preset": old}
    assert Recipe.from_dict(recorded) == Recipe(preset=new, seed=5)


def test_help_shows_a_default_only_where_it_does_not_depend_on_the_machine():
    assert common_default("mean_phase") == 0.5 and common_default("longrope_table") == "short"
    assert common_default("reconstruction_steps") is None and common_default("layout") is None
