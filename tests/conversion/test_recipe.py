import dataclasses
import os
import re

import pytest

from mha2mla.conversion.families import ADAPTERS
from mha2mla.conversion.presets import PRESETS
from mha2mla.conversion.recipe import Recipe
from tests.conversion import tiny
from tests.conversion.tiny import Recipe as MinimalRecipe


def spec(**keys):
    return ADAPTERS["llama"].specify(tiny.config("llama", **keys))


SMOLLM2 = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"layout": "per-head"}, "layout is 'per-head'"),
        ({"rope_selection": "best"}, "rope_selection is 'best'"),
        ({"low_rank": "svd"}, "low_rank is 'svd'"),
        ({"cache_ratio": 0}, "cache_ratio is 0"),
        ({"cache_ratio": 1.5}, "cache_ratio is 1.5"),
        ({"cache_ratio": float("nan")}, "cache_ratio is nan"),
        ({"cache_ratio": "0.5"}, "cache_ratio is '0.5'"),
        ({"cache_ratio": 0.5, "kv_lora_rank": 8, "qk_rope_head_dim": 8}, "cache_ratio is 0.5 beside kv_lora_rank=8"),
        ({"kv_lora_rank": 8}, "kv_lora_rank is 8 but qk_rope_head_dim is not given"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim is 8 but kv_lora_rank is not given"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 7}, "qk_rope_head_dim is 7"),
        ({"kv_lora_rank": True, "qk_rope_head_dim": 8}, "kv_lora_rank is True"),
        ({"kv_lora_rank": 0, "qk_rope_head_dim": 8}, "kv_lora_rank is 0"),
        ({"rope_share": 1.0}, "rope_share is 1.0"),
        ({"key_weight": -1}, "key_weight is -1"),
        ({"mean_phase": 1.5}, "mean_phase is 1.5"),
        ({"mean_phase": True}, "mean_phase is True"),
        ({"centered": 1}, "centered is 1"),
        ({"calibration_text": ""}, "calibration_text is ''"),
        ({"calibration_tokens": 100, "calibration_length": 128}, "calibration_tokens is 100"),
        ({"calibration_tokens": 600, "calibration_length": [512, 1024]}, "calibration_tokens is 600"),
        ({"calibration_length": 1}, "calibration_length is 1; expected 'auto', an int"),
        ({"calibration_length": [512, 768]}, "calibration_length is [512, 768]; expected lengths that divide"),
        ({"calibration_length": []}, "calibration_length is []"),
        ({"calibration_length": "long"}, "calibration_length is 'long'"),
        ({"seed": -1}, "seed is -1"),
        ({"preset": "best"}, "preset is 'best'"),
        ({"up_projections": "head"}, "up_projections is 'head'"),
        ({"reconstruction_correction": 1.1}, "reconstruction_correction is 1.1"),
    ],
)
def test_a_bad_key_is_named_with_its_value(keys, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        Recipe(**keys)


def test_round_trips_through_dict_and_yaml(tmp_path):
    recipe = Recipe(layout="shared", kv_lora_rank=96, qk_rope_head_dim=32, low_rank="svd-split", key_weight=0.25)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    recipe.to_yaml(tmp_path / "recipe.yaml")
    assert Recipe.from_yaml(tmp_path / "recipe.yaml") == recipe


def test_an_empty_file_is_the_default_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("")
    assert Recipe.from_yaml(tmp_path / "recipe.yaml") == Recipe()


@pytest.mark.parametrize(
    ("text", "named"),
    [("layot: shared", "'layot' is unknown"), ("- shared", "expected a mapping"), ("{", "is not YAML")],
)
def test_a_bad_file_is_named(tmp_path, text, named):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=named):
        Recipe.from_yaml(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("recipe", "rope_heads", "rank", "rope", "nope"),
    [
        (MinimalRecipe(cache_ratio=1.0, layout="per-group"), 3, 192, 64, 0),
        (MinimalRecipe(cache_ratio=1.0, layout="shared"), 1, 192, 192, 0),
        (MinimalRecipe(cache_ratio=0.5, layout="per-group"), 3, 144, 16, 48),
        (MinimalRecipe(cache_ratio=0.5, layout="shared"), 1, 144, 48, 64),
        (MinimalRecipe(cache_ratio=0.3125, layout="shared"), 1, 88, 32, 64),
        (MinimalRecipe(cache_ratio=0.3125, layout="per-group"), 3, 96, 8, 56),
        (MinimalRecipe(layout="shared"), 1, 144, 48, 64),
        (MinimalRecipe(layout="per-group", kv_lora_rank=80, qk_rope_head_dim=24), 3, 80, 24, 40),
    ],
)
def test_the_target_gives_the_geometry(recipe, rope_heads, rank, rope, nope):
    geometry = recipe.geometry(spec(**SMOLLM2))
    assert (geometry.num_rope_heads, geometry.kv_lora_rank, geometry.qk_rope_head_dim, geometry.qk_nope_head_dim) == (
        rope_heads,
        rank,
        rope,
        nope,
    )


@pytest.mark.parametrize("layout", ["per-group", "shared"])
@pytest.mark.parametrize(
    "keys", [SMOLLM2, {**SMOLLM2, "num_key_value_heads": 9}, {"num_key_value_heads": 1, "head_dim": 64}]
)
def test_a_ratio_is_never_exceeded_and_nearly_reached(layout, keys):
    source = spec(**keys)
    for percent in range(35, 100):
        geometry = MinimalRecipe(layout=layout, cache_ratio=percent / 100).geometry(source)
        budget = percent / 100 * geometry.source_cache_numel_per_token
        assert budget - 8 < geometry.cache_numel_per_token <= budget + 1e-6
        assert geometry.kv_lora_rank % 8 == 0 and geometry.qk_rope_head_dim % 8 == 0


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 66}, "qk_rope_head_dim is 66; expected at most 64"),
        ({"kv_lora_rank": 344, "qk_rope_head_dim": 16}, "kv_lora_rank is 344; expected at most 336"),
        ({"cache_ratio": 0.05}, "leaves -5 for the latent"),
        ({"cache_ratio": 0.08}, "leaves 6 for the latent"),
    ],
)
def test_a_target_that_does_not_fit_the_source_is_refused(keys, named):
    with pytest.raises(ValueError, match=named):
        MinimalRecipe(layout="per-group", **keys).geometry(spec(**SMOLLM2))


def test_ranks_replace_the_default_ratio_without_conflict():
    recipe = dataclasses.replace(Recipe(), kv_lora_rank=64, qk_rope_head_dim=16)
    assert recipe.target_cache_ratio is None


def test_calibration_is_asked_for_only_when_a_statistic_enters_the_weights():
    source = spec(**SMOLLM2)

    def needs(**keys):
        recipe = MinimalRecipe(**keys)
        return recipe.needs_calibration(recipe.geometry(source))

    plain = {"rope_selection": "high", "low_rank": "svd-joint", "centered": False, "mean_phase": 0.0}
    plain["refit_queries"] = False
    assert not needs(cache_ratio=1.0)
    assert not needs(**plain)
    for key, value in (
        ("rope_selection", "2-norm"),
        ("rope_selection", "rotation"),
        ("low_rank", "whitened-joint"),
        ("centered", True),
        ("mean_phase", 0.5),
        ("refit_queries", True),
        ("refit_output", True),
    ):
        assert needs(**{**plain, key: value})


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_recorded_with_all_its_keys(name, tmp_path):
    recipe = Recipe.from_preset(name, seed=3)
    assert recipe.preset == name and recipe.seed == 3
    assert {key: getattr(recipe, key) for key in PRESETS[name]} == dict(PRESETS[name])
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    (tmp_path / "recipe.yaml").write_text(f"preset: {name}\nseed: 3\n")
    assert Recipe.from_yaml(tmp_path / "recipe.yaml") == recipe


def test_a_target_beside_a_preset_replaces_the_presets():
    preset = Recipe.from_preset("deepseek-512+64")
    assert (preset.kv_lora_rank, preset.qk_rope_head_dim, preset.cache_ratio) == (512, 64, None)
    other = Recipe.from_preset("deepseek-512+64", cache_ratio=0.5)
    assert (other.kv_lora_rank, other.qk_rope_head_dim, other.cache_ratio) == (None, None, 0.5)
    assert other.centered is False


def test_deepseeks_shape_refuses_a_source_that_caches_less():
    recipe = Recipe.from_preset("deepseek-512+64")
    with pytest.raises(ValueError, match="kv_lora_rank is 512; expected at most 320"):
        recipe.geometry(spec(**SMOLLM2))
    llama2 = spec(hidden_size=4096, num_attention_heads=32, num_key_value_heads=32, head_dim=128)
    geometry = recipe.geometry(llama2)
    assert (geometry.num_rope_heads, geometry.kv_lora_rank, geometry.qk_rope_head_dim) == (1, 512, 64)


def test_an_unknown_preset_is_refused_by_name():
    with pytest.raises(ValueError, match="preset is 'tiny'; expected one of 'auto', 'minimal'"):
        Recipe.from_preset("tiny")


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "named"),
    [
        (BOMB, "aliases are not read"),
        ("- &a [x]\n- *a\n", "aliases are not read"),
        ("[" * 100_000, "is not YAML"),
        ("seed: !!python/object/apply:os.system ['true']", "is not YAML"),
        ("a: b: c", "is not YAML"),
        ("\x00", "is not YAML"),
        ("x" * 10_000, "expected a mapping"),
    ],
)
def test_a_recipe_file_that_is_a_trap_ends_within_seconds(text, named, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=named) as caught:
        Recipe.from_yaml(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.timeout(20)
def test_a_recipe_that_is_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(ValueError, match="no regular file"):
        Recipe.from_yaml(tmp_path / "recipe.yaml")
