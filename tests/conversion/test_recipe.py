import os
import re

import pytest
import yaml

from mha2mla.conversion.families import ADAPTERS
from mha2mla.conversion.presets import PRESETS
from mha2mla.conversion.recipe import Recipe, recipe_file
from mha2mla.conversion.stages import Fit, Rope
from mha2mla.conversion.target import LAYOUTS, Target
from tests.conversion import tiny
from tests.conversion.tiny import Recipe as MinimalRecipe


def spec(**keys):
    return ADAPTERS["llama"].specify(tiny.config("llama", **keys))


SMOLLM2 = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"layout": "per-head"}, "layout is 'per-head'; expected one of 'per-group', 'shared', 'latent'"),
        ({"rope.selection": "best"}, "rope.selection is 'best'; expected one of 'high'"),
        ({"layout": "latent", "rope.share": 0.2}, "rope.share is 0.2 in the latent layout; expected none"),
        ({"rope.share": 0.2}, "nothing rotary, or layout: shared (or per-group) beside it"),
        (
            {"kv_lora_rank": 64, "qk_rope_head_dim": 16},
            "kv_lora_rank is 64 and qk_rope_head_dim 16 but layout is not given; expected layout: shared, which caches",
        ),
        ({"reconstruction_steps": 3}, "recipe key 'reconstruction_steps' is unknown"),
        ({"rope": Fit()}, "recipe stage 'rope' is Fit("),
        ({"latent.rule": "svd"}, "latent.rule is 'svd'; expected one of 'svd-joint'"),
        ({"cache_ratio": 0}, "cache_ratio is 0; expected a number above 0, at most 1"),
        ({"cache_ratio": float("nan")}, "cache_ratio is nan"),
        ({"cache_ratio": "0.5"}, "cache_ratio is '0.5'"),
        ({"cache_ratio": 0.5, "kv_lora_rank": 8, "qk_rope_head_dim": 8}, "cache_ratio is 0.5 beside kv_lora_rank=8"),
        ({"kv_lora_rank": 8}, "kv_lora_rank is 8 but qk_rope_head_dim is not given"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim is 8 but kv_lora_rank is not given"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; expected an even int"),
        ({"kv_lora_rank": True, "qk_rope_head_dim": 8}, "kv_lora_rank is True"),
        ({"kv_lora_rank": 0, "qk_rope_head_dim": 8}, "kv_lora_rank is 0; expected an int from 1"),
        ({"rope.share": 1.0}, "rope.share is 1.0; expected null or a number above 0 and less than 1"),
        ({"rope.longrope_table": "both"}, "rope.longrope_table is 'both'"),
        ({"latent.centered": 1}, "latent.centered is 1; expected true or false"),
        ({"latent.up_projections": "head"}, "latent.up_projections is 'head'"),
        ({"fit.steps": -1}, "fit.steps is -1; expected an int from 0"),
        ({"fit.tokens": 0.5}, "fit.tokens is 0.5"),
        ({"fit.queries": "yes"}, "fit.queries is 'yes'"),
        ({"calibration.text": ""}, "calibration.text is ''"),
        ({"calibration.tokens": 100, "calibration.lengths": 128}, "calibration.tokens is 100; expected at least one"),
        ({"calibration.tokens": 600, "calibration.lengths": [512, 1024]}, "calibration.tokens is 600"),
        ({"calibration.lengths": 1}, "calibration.lengths is 1; expected 'auto', an int"),
        ({"calibration.lengths": [512, 768]}, "calibration.lengths is [512, 768]; expected lengths that divide"),
        ({"calibration.lengths": []}, "calibration.lengths is []"),
        ({"calibration.lengths": "long"}, "calibration.lengths is 'long'"),
        ({"calibration.seed": -1}, "calibration.seed is -1"),
        ({"preset": "best"}, "preset is 'best'; expected one of 'auto', 'minimal'"),
        ({"fit": 3}, "recipe stage 'fit' is 3; expected a mapping"),
        ({"fit": {"stops": 3}}, "recipe key 'fit.stops' is unknown; did you mean 'fit.steps'? expected one of preset,"),
        ({"qqq": 3}, "recipe key 'qqq' is unknown; expected one of preset, layout"),
        ({"fit.steps": 3, "fit": {"steps": 3}}, "recipe key 'fit.steps' is given twice"),
        ({"fit": {"steps": 3}, "fit.steps": None}, "recipe key 'fit.steps' is given twice"),
        ({"target": {"layout": "shared"}, "layout": "latent"}, "recipe key 'layout' is given twice"),
    ],
)
def test_a_bad_key_is_named_with_its_value(keys, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        Recipe.from_dict(keys)


def test_a_stage_refuses_a_bad_value_wherever_it_is_made():
    with pytest.raises(ValueError, match="cache_ratio is 2"):
        Target(cache_ratio=2)
    with pytest.raises(ValueError, match="rope.selection is 'rorope' in the per-group layout; expected one of 'high'"):
        Recipe(target=Target(layout="per-group"), rope=Rope(selection="rorope"))


@pytest.mark.parametrize(
    "values",
    [
        {"cache_ratio": 0.25, "fit.steps": 3, "rope.selection": "2-norm"},
        {"target": {"cache_ratio": 0.25}, "fit": {"steps": 3}, "rope": {"selection": "2-norm", "share": None}},
        {"target": {"cache_ratio": 0.25, "layout": None}, "fit": {"steps": 3}, "rope.selection": "2-norm"},
    ],
)
def test_keys_lie_beside_one_another_or_in_their_stages(values):
    expected = Recipe(
        preset="minimal", target=Target(cache_ratio=0.25), rope=Rope(selection="2-norm"), fit=Fit(steps=3)
    )
    assert Recipe.from_dict({"preset": "minimal", **values}) == expected
    assert Recipe.from_preset("minimal", **values) == expected
    assert Recipe(preset="minimal", **values) == expected


def test_an_empty_file_is_the_default_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("")
    assert recipe_file(tmp_path / "recipe.yaml") == {} and Recipe.from_dict({}) == Recipe()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("layot: shared", "'layot' is unknown; did you mean 'layout'?"),
        ("- shared", "expected a mapping"),
        ("{", "is not YAML"),
        ("cache_ratio: 0.5\nlayout: shared\ncache_ratio: 0.3\n", "(?s)key 'cache_ratio' is given twice.*line 3"),
        ("{layout: shared, layout: shared}", "key 'layout' is given twice"),
        ("fit: {steps: 1}\nfit: {tokens: 64}\n", "key 'fit' is given twice"),
        ("fit:\n  steps: 1\n  tokens: 64\n  steps: 2\n", "(?s)key 'fit.steps' is given twice.*line 4"),
        ("fit.steps: 1\nfit.steps: 2\n", "key 'fit.steps' is given twice"),
        ("fit.steps: 1\nfit:\n  steps: 1\n", "key 'fit.steps' is given twice"),
        (BOMB, "aliases are not read"),
        ("- &a [x]\n- *a\n", "aliases are not read"),
        ("[" * 100_000, "is not YAML"),
        ("calibration.seed: !!python/object/apply:os.system ['true']", "is not YAML"),
        ("a: b: c", "is not YAML"),
        ("\x00", "is not YAML"),
        ("x" * 10_000, "expected a mapping"),
    ],
)
def test_a_bad_file_or_a_trap_is_refused(tmp_path, text, named):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=named) as caught:
        recipe_file(tmp_path / "recipe.yaml")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("recipe", "rope_heads", "rank", "rope", "nope"),
    [
        (MinimalRecipe(cache_ratio=1.0, layout="per-group"), 3, 192, 64, 0),
        (MinimalRecipe(cache_ratio=1.0, layout="shared"), 1, 192, 192, 0),
        (MinimalRecipe(cache_ratio=0.5, layout="per-group"), 3, 144, 16, 48),
        (MinimalRecipe(cache_ratio=0.5, layout="shared"), 1, 152, 40, 64),
        (MinimalRecipe(cache_ratio=0.3125, layout="shared"), 1, 96, 24, 64),
        (MinimalRecipe(cache_ratio=0.3125, layout="per-group"), 3, 96, 8, 56),
        (MinimalRecipe(cache_ratio=1.0, layout="latent"), 1, 384, 192, 0),
        (MinimalRecipe(cache_ratio=0.5, layout="latent"), 1, 192, 128, 64),
        (MinimalRecipe(cache_ratio=0.1875, layout="latent"), 1, 72, 128, 64),
        (MinimalRecipe(layout="latent", kv_lora_rank=120, qk_rope_head_dim=192), 1, 120, 192, 0),
        (MinimalRecipe(layout="shared", rope_share=0.25), 1, 144, 48, 64),
        (MinimalRecipe(layout="per-group", kv_lora_rank=80, qk_rope_head_dim=24), 3, 80, 24, 40),
    ],
)
def test_the_target_gives_the_geometry(recipe, rope_heads, rank, rope, nope):
    geometry = recipe.geometry(spec(**SMOLLM2))
    assert (geometry.num_rope_heads, geometry.kv_lora_rank) == (rope_heads, rank)
    assert (geometry.qk_rope_head_dim, geometry.qk_nope_head_dim) == (rope, nope)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "ratio", "rope"),
    [(8, 128, 0.5, 128), (8, 96, 0.5, 160), (32, 128, 0.125, 128), (8, 128, 0.25, 104), (4, 256, 0.5, 216)],
)
def test_shared_rotary_keys_are_no_wider_than_fused_attention_takes(kv_heads, head_dim, ratio, rope):
    """The prefill of wider ones runs the reference; heads of 256 are too wide anyway."""
    wide = spec(**{**SMOLLM2, "num_attention_heads": 32, "num_key_value_heads": kv_heads, "head_dim": head_dim})
    geometry = MinimalRecipe(layout="shared", cache_ratio=ratio).geometry(wide)
    assert geometry.qk_rope_head_dim == rope
    asked = MinimalRecipe(layout="shared", cache_ratio=ratio, rope_share=0.25).geometry(wide)
    assert asked.qk_rope_head_dim == round(0.25 * ratio * 2 * kv_heads * head_dim)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "half", "quarter", "nope"),
    [(8, 128, 64, 128, 128), (8, 96, 128, 128, 96), (1, 64, 64, 64, 0), (8, 192, 64, 64, 192), (4, 256, 64, 128, 256)]
    + [(32, 128, 128, 128, 128)],
)
def test_rotary_keys_of_the_latent_are_as_wide_as_fast_kernels_go(kv_heads, head_dim, half, quarter, nope):
    """64 of 1,024 numbers; 128 of up to 768, and where no kernel goes."""
    source = spec(**{**SMOLLM2, "num_attention_heads": 32, "num_key_value_heads": kv_heads, "head_dim": head_dim})
    for ratio, rope in ((0.5, half), (0.25, quarter)):
        geometry = MinimalRecipe(layout="latent", cache_ratio=ratio).geometry(source)
        assert (geometry.qk_rope_head_dim, geometry.qk_nope_head_dim) == (rope, nope) and not geometry.has_rope_cache
        assert geometry.cache_numel_per_token == geometry.kv_lora_rank == ratio * 2 * kv_heads * head_dim


@pytest.mark.parametrize(
    ("bits", "ratio", "rope"),
    [(4, 0.064, 128), (4, 0.08, 64), ("auto", 0.032, 128), ("auto", 0.04, 64), ([4], 0.04, 64)],
)
def test_rotary_keys_of_codes_are_as_wide_as_their_kernels_go(bits, ratio, rope):
    """128 of up to 512 elements; those that 2 bits hold where bits are by layer."""
    source = spec(**{**SMOLLM2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128})
    ranks = {"latent.ranks": [64]} if isinstance(bits, list) else {}
    recipe = MinimalRecipe(layout="latent", cache_ratio=ratio, **{"latent.bits": bits}, **ranks)
    assert recipe.geometry(source).qk_rope_head_dim == rope


def test_a_budget_beyond_the_full_rank_narrows_no_rotary_key():
    """At half of 384 elements, 2 bits would hold 1,520, and 64 rotary dims would lose more than a quarter does."""
    for ratio in (0.125, 0.25, 0.5):
        recipe = MinimalRecipe(layout="latent", cache_ratio=ratio, **{"latent.bits": "auto"})
        assert recipe.geometry(spec(**SMOLLM2)).qk_rope_head_dim == 128


@pytest.mark.parametrize("layout", LAYOUTS)
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
    ("layout", "rank", "rope", "ratio", "named"),
    [
        ("per-group", 8, 66, None, "qk_rope_head_dim is 66; expected at most 64"),
        ("per-group", 344, 16, None, "kv_lora_rank is 344; expected at most 336"),
        ("per-group", None, None, 0.05, "leaves -5 for the latent"),
        ("per-group", None, None, 0.08, "leaves 6 for the latent"),
        ("latent", 8, 194, None, "qk_rope_head_dim is 194; expected at most 192"),
        ("latent", 392, 16, None, "kv_lora_rank is 392; expected at most 384, which with 0 rotary elements"),
        ("latent", None, None, 0.02, "leaves 7 for the latent"),
    ],
)
def test_a_target_that_does_not_fit_the_source_is_refused(layout, rank, rope, ratio, named):
    with pytest.raises(ValueError, match=named):
        MinimalRecipe(layout=layout, kv_lora_rank=rank, qk_rope_head_dim=rope, cache_ratio=ratio).geometry(
            spec(**SMOLLM2)
        )


def test_calibration_is_asked_for_only_when_a_statistic_enters_the_weights():
    source = spec(**SMOLLM2)

    def needs(**keys):
        recipe = MinimalRecipe(**keys)
        return recipe.needs_calibration(recipe.geometry(source))

    plain = {"rope_selection": "high", "latent_rule": "svd-joint", "latent_centered": False, "fit_queries": False}
    assert not needs(cache_ratio=1.0)
    assert not needs(cache_ratio=1.0, latent_bits="auto") and needs(cache_ratio=1.0, latent_bits=8)
    assert not needs(**plain)
    for key, value in (
        ("rope_selection", "2-norm"),
        ("rope_selection", "rotation"),
        ("latent_rule", "whitened-joint"),
        ("latent_centered", True),
        ("fit_queries", True),
        ("fit_output", True),
        ("fit_steps", 1),
    ):
        assert needs(**{**plain, key: value})


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_recorded_with_all_its_keys(name, tmp_path):
    recipe, file = Recipe.from_preset(name, **{"calibration.seed": 3}), tmp_path / "recipe.yaml"
    assert recipe.preset == name and recipe.changes() == {"calibration.seed": 3}
    assert {key: recipe.flat()[key] for key in PRESETS[name]} == dict(PRESETS[name])
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    for text in (f"preset: {name}\ncalibration:\n  seed: 3\n", yaml.safe_dump(recipe.to_dict())):
        file.write_text(text)
        assert Recipe.from_dict(recipe_file(file)) == recipe


def test_deepseeks_shape_refuses_a_source_that_caches_less():
    recipe = Recipe.from_preset("deepseek-512+64")
    assert recipe.target == Target(layout="shared", kv_lora_rank=512, qk_rope_head_dim=64)
    other = Recipe.from_preset("deepseek-512+64", cache_ratio=0.5)  # a target beside a preset replaces the preset's
    assert other.target == Target(layout="shared", cache_ratio=0.5) and other.latent.centered is False
    with pytest.raises(ValueError, match="kv_lora_rank is 512; expected at most 320"):
        recipe.geometry(spec(**SMOLLM2))
    llama2 = spec(hidden_size=4096, num_attention_heads=32, num_key_value_heads=32, head_dim=128)
    geometry = recipe.geometry(llama2)
    assert (geometry.num_rope_heads, geometry.kv_lora_rank, geometry.qk_rope_head_dim) == (1, 512, 64)


def test_a_recipe_that_is_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(ValueError, match="is no file"):
        recipe_file(tmp_path / "recipe.yaml")
