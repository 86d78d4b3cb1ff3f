"""Ranks per layer: the hand-out is optimal and keeps the budget, what is measured repeats, a checkpoint has them."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.latent import ranks as layer_ranks
from mha2mla.conversion.latent.ranks import allocate, choose_layer_ranks, loss_at, most_rank
from mha2mla.geometry import MLAGeometry, code_bytes
from tests.conversion import tiny
from tests.conversion.tiny import Recipe, walk_over
from tests.few import each

LAYERS = 3
SHORT = {"preset": "minimal", "calibration_tokens": 320, "calibration_lengths": 40}
AUTO = {"latent_bits": "auto"}
TEXTS = {"calibration": tiny.some_tokens(8, 40), "evaluation": tiny.some_tokens(2, 40)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("source"), head_dim=32, num_hidden_layers=LAYERS)


CHOICES = [(rank, bits) for rank in (32, 64, 96) for bits in (3, 4, 16)]
SIZES = {(rank, bits): code_bytes(rank, bits) if bits < 16 else 2 * rank for rank, bits in CHOICES}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.0, 1.0), min_size=len(CHOICES), max_size=len(CHOICES)), min_size=1, max_size=3),
    st.integers(0, 500),
)
def test_the_hand_out_is_the_best_there_is(losses, extra):
    """Of any losses, convex or not, against every combination."""
    layers = [{each: (SIZES[each], loss) for each, loss in zip(CHOICES, layer, strict=True)} for layer in losses]
    budget = len(layers) * min(SIZES.values()) + extra
    found = allocate(layers, budget)
    assert sum(SIZES[each] for each in found) <= budget
    best = min(
        sum(layer[each][1] for layer, each in zip(layers, chosen, strict=True))
        for chosen in itertools.product(CHOICES, repeat=len(layers))
        if sum(SIZES[each] for each in chosen) <= budget
    )
    assert sum(layer[each][1] for layer, each in zip(layers, found, strict=True)) == pytest.approx(best, rel=1e-9)


def test_a_loss_never_rises_with_the_rank():
    noisy = {16: 0.1, 32: 0.12, 64: 0.01}
    ranks = range(8, 96, 8)
    found = [loss_at(noisy, rank) for rank in ranks]
    assert found == sorted(found, reverse=True)
    assert loss_at(noisy, 16) == pytest.approx(0.1) and loss_at(noisy, 64) == pytest.approx(0.01)
    assert loss_at({16: 0.1}, 32) < loss_at({16: 0.1}, 16)


def uniform_walk(source, recipe):
    walk = walk_over(source, recipe)
    return replace(walk, geometries=(recipe.geometry(walk.spec),) * LAYERS)


@each("layout, steps", ["shared", "per-group"], [0, 3])
def test_what_is_measured_falls_with_the_rank_and_repeats(layout, steps, source):
    recipe = Recipe(layout=layout, cache_ratio=0.5, latent_ranks="measured", fit_steps=steps, **SHORT)
    walk = uniform_walk(source, recipe)
    first, second = (choose_layer_ranks(walk) for _ in range(2))
    assert first == second
    spec = walk.spec
    chosen, found = first
    ranks = [rank for rank, _ in chosen]
    geometries = recipe.geometries(spec, ranks)
    uniform = recipe.geometry(spec)
    assert len(geometries) == LAYERS
    assert sum(each.cache_numel_per_token for each in geometries) <= LAYERS * uniform.cache_numel_per_token
    losses = {int(rank): values for rank, values in found["ranks"].items()}
    assert len(losses) >= 3 and min(losses) <= min(ranks)
    for layer in range(LAYERS):
        by_rank = [losses[rank][layer] for rank in sorted(losses)]
        assert all(0 < loss < 5 for loss in by_rank) and by_rank[-1] < by_rank[0]


@pytest.mark.parametrize(("rank", "bits"), [(4, 16), (3, 16), (12, 16), (8, 4)])
def test_ranks_of_widths_below_a_step_keep_the_budget(rank, bits, source):
    widths = {"layout": "latent", "kv_lora_rank": rank, "qk_rope_head_dim": 8, "latent_bits": bits}
    walk = uniform_walk(source, Recipe(latent_ranks="measured", **widths, **SHORT))
    chosen, _ = choose_layer_ranks(walk)
    found = sum(replace(walk.geometries[0], kv_lora_rank=each).cache_bytes_per_token(2) for each, _ in chosen)
    assert found <= LAYERS * walk.geometries[0].cache_bytes_per_token(2)


def test_a_converted_layer_alone_loses_what_its_model_says(source):
    """The divergence from streams is the one between whole models, of which one has that layer converted."""
    walk = uniform_walk(source, Recipe(cache_ratio=0.5, latent_ranks="measured", **SHORT))
    fitted, judged = walk.windows.divided(32768, 8192)
    geometry, *others = (replace(walk.geometries[0], kv_lora_rank=rank) for rank in (16, 8, 24))
    found = layer_ranks.measure_losses(replace(walk, windows=fitted), [geometry], judged)
    beside = layer_ranks.measure_losses(replace(walk, windows=fitted), [others[0], geometry, others[1]], judged)
    assert [losses[1:2] for losses in beside] == found  # at others in proportion to the layer's error
    assert all(narrow > middle > wide > 0 for narrow, middle, wide in beside)
    expected_model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    recipe = Recipe(cache_ratio=0.5, **SHORT)
    alone = replace(walk, geometries=(geometry,) * LAYERS, recipe=recipe, windows=fitted)
    tensors = {made.layer: made.tensors for made in alone}
    for layer in range(LAYERS):
        changed = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        attention = alone.empty_attention(layer)
        attention.load_state_dict(
            {name: tensor.float() for name, tensor in tensors[layer].items()}, assign=True, strict=True
        )
        changed.model.layers[layer].self_attn = attention
        with torch.no_grad():
            clean, other = (each(judged.tokens).logits.log_softmax(-1) for each in (expected_model, changed))
        divergence = float((clean.exp() * (clean - other)).sum(-1).mean())
        assert found[layer] == pytest.approx([divergence], rel=2e-2)


def test_layers_are_fitted_at_the_lengths_that_judge_them(source, monkeypatch):
    """A window that is too long to judge by would take its share of the time at every rank."""
    seen = []

    def measured(walk, geometries, judged, *rest, **keys):
        seen.append((walk.windows.window_lengths, judged.window_lengths))
        return [[0.1] * len(geometries)] * LAYERS

    monkeypatch.setattr(layer_ranks, "measure_losses", measured)
    walk = uniform_walk(source, Recipe(layout="shared", cache_ratio=0.5, latent_ranks="measured", **SHORT))
    for blocks in (1, 12):
        windows = [tiny.some_tokens(blocks * 32 // length, length) for length in (8, 32)]
        choose_layer_ranks(replace(walk, windows=TokenBlocks.of(windows)))
    assert seen == [((8,), (8,)), ((8, 32), (8, 32))]


@pytest.fixture(scope="module")
def auto(source, tmp_path_factory):
    """cache_ratio → report of bits that are chosen."""
    folder = tmp_path_factory.mktemp("auto")

    def converted(ratio):
        recipe = Recipe(cache_ratio=ratio, latent_bits="auto", **SHORT)
        return tiny.convert(source, folder / str(ratio), recipe, **TEXTS)

    return {ratio: converted(ratio) for ratio in (1.0, 0.5, 0.16)}


@pytest.mark.parametrize(("ratio", "bits"), [(1.0, {16}), (0.5, {8, 16}), (0.16, {3, 4, 8})])
def test_auto_bits_follow_the_budget(ratio, bits, auto):
    report = auto[ratio]
    assert {row["latent_bits"] for row in report.layers} <= bits
    assert report.cache_ratio <= ratio and report.recipe["latent"]["bits"] == "auto"
    config = AutoModelForCausalLM.from_pretrained(report.destination, dtype=torch.float32).config
    layers = [config.layer_geometry(layer) for layer in range(LAYERS)]
    assert report.cache_bytes_per_token == sum(each.cache_bytes_per_token(2) for each in layers)
    assert [row["latent_bits"] for row in report.layers] == [each.latent_bits for each in layers]
    assert report.geometry == layers[0]
    if ratio < 1:
        assert [each.latent_bits for each in layers] == report.searches["layer_bits"]
        ranks = [each.kv_lora_rank for each in layers]
        assert ranks == report.searches["layer_ranks"] and all(rank % 32 == 0 for rank in ranks)
        assert (f"ranks {min(ranks)} to {max(ranks)} by layer" in str(report)) == (len(set(ranks)) > 1)


def test_a_choice_is_repeated_by_two_lists(source, auto, tmp_path):
    found = auto[0.16]
    given = {"latent_ranks": found.searches["layer_ranks"], "latent_bits": found.searches["layer_bits"]}
    report = tiny.convert(source, tmp_path / "out", Recipe(cache_ratio=0.16, **given, **SHORT), **TEXTS)
    assert report.weights_sha256 == found.weights_sha256 and not report.searches


def test_losses_of_codes_rise_as_bits_fall(auto):
    found = auto[0.16].searches["layer_code_losses"]
    for layer in range(LAYERS):
        by_bits = [found[bits][layer] for bits in ("16", "8", "4", "3")]
        assert by_bits[0] == 0 and by_bits == sorted(by_bits) and 8 * by_bits[1] < by_bits[2] < by_bits[3] / 2


def test_a_checkpoint_of_auto_bits_generates_and_says_them(auto):
    report = auto[0.16]
    model = AutoModelForCausalLM.from_pretrained(report.destination, dtype=torch.float32)
    tokens = torch.tensor([[1, 2, 3]])
    generated = model.generate(tokens, max_new_tokens=20, do_sample=False)
    plain = DynamicCache(config=model.model.config)
    assert torch.equal(generated, model.generate(tokens, max_new_tokens=20, do_sample=False, past_key_values=plain))
    bits = report.searches["layer_bits"]
    card = (Path(report.destination) / "README.md").read_text()
    assert f"codes of {', '.join(map(str, sorted(set(bits))))} bits" in card
    assert "in plain torch, which lies beside the weights and caches latents in the model's dtype." in card
    assert (f"bits {min(bits)} to {max(bits)} by layer" in str(report)) == (len(set(bits)) > 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({**AUTO, "layout": "shared"}, "latent.bits is 'auto' in the shared layout"),
        ({**AUTO, "layout": "latent", "kv_lora_rank": 32, "qk_rope_head_dim": 8}, "with cache_ratio None; expected"),
        ({"latent_bits": [4, 4], "latent_ranks": [32]}, r"latent.bits is \[4, 4\]; expected as many as latent.ranks"),
        ({"latent_bits": [4, 5]}, r"latent.bits is \[4, 5\]; expected one of 16, 8, 4, 3, 2, 'auto' or a list"),
        ({"latent_bits": True}, "latent.bits is True"),
        ({**AUTO, "latent_ranks": [32, 32]}, r"latent.ranks is \[32, 32\]; expected .* beside latent.bits 'auto'"),
        ({"latent_ranks": "most"}, "latent.ranks is 'most'; expected 'uniform', 'measured' or a list"),
        ({"latent_ranks": []}, r"latent.ranks is \[\]"),
        ({"latent_ranks": [8, 0]}, r"latent.ranks is \[8, 0\]; expected .* a list of ints from 1 on"),
        ({"latent_ranks": [8, True]}, r"latent.ranks is \[8, True\]"),
    ],
)
def test_bad_ranks_and_bits_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**keys)


def test_a_layer_of_full_rank_has_the_bias_of_others(tmp_path):
    """Every pair of so few key dims rotates, and a latent of all 64 elements loses nothing."""
    source = tiny.checkpoint(tmp_path / "source", head_dim=16, num_hidden_layers=2)
    recipe = Recipe(layout="latent", kv_lora_rank=32, qk_rope_head_dim=32, latent_ranks=[64, 32], **SHORT)
    tiny.convert(source, tmp_path / "out", recipe, **TEXTS)
    layers = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).model.layers
    assert [bool(layer.self_attn.o_proj.bias.any()) for layer in layers] == [False, True]
    mixed = {"latent_ranks": [64, 64], "latent_bits": [16, 3]}
    recipe = Recipe(layout="latent", kv_lora_rank=32, qk_rope_head_dim=32, **mixed, **SHORT)
    report = tiny.convert(source, tmp_path / "mixed", recipe, **TEXTS)  # exact but for codes, which parity leaves out
    assert report.parity.kl > 1e-4


@pytest.mark.parametrize(
    ("layout", "bits", "rope", "rank", "most"),
    [
        ("latent", 16, 128, 192, 384),  # twice the mean, wherever that has a kernel
        ("latent", 16, 128, 512, 768),
        ("latent", 4, 128, 512, 512),
        ("latent", 16, 64, 1024, 1024),
        ("shared", 16, 64, 960, 1024),
        ("latent", 16, 128, 1200, 2048),  # no kernel anyway: all that the source has
    ],
)
def test_no_layer_leaves_the_widths_of_fast_kernels_that_the_mean_is_in(layout, bits, rope, rank, most):
    geometry = MLAGeometry(32, 1, rank, rope, 128, 128, 8, 8, rope_from_latent=layout == "latent", latent_bits=bits)
    assert most_rank(geometry, 64, rank) == most


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"latent_ranks": [8, 8]}, "latent.ranks has 2 ranks; expected 3, one per layer"),
        ({"latent_ranks": [8, 8, 4096]}, r"latent.ranks\[2\] is 4096; expected at most"),
        ({"latent_ranks": "measured"}, "latent.ranks is 'measured'; expected ranks"),
        ({"cache_ratio": 0.03, "latent_bits": "auto"}, "cache_ratio is 0.03"),
    ],
)
def test_ranks_and_bits_must_fit_the_source(keys, message, source):
    with pytest.raises(ValueError, match=message):
        Recipe(**{"cache_ratio": 0.5, **keys}).geometries(walk_over(source, Recipe()).spec)
