"""A converted layer is the source's attention at full rank, and nearer to it with every rank; its biases and shapes."""

import itertools
from dataclasses import replace

import pytest
import torch

from mha2mla.conversion.calibration.statistics import StatisticsCollector
from mha2mla.conversion.families import SourceSpec
from mha2mla.conversion.latent import rules as latent_rules
from mha2mla.conversion.latent.rules import LowRankRule
from mha2mla.conversion.layer import latent_problem, prepare_layer
from mha2mla.conversion.recipe import selections
from mha2mla.conversion.target import LAYOUTS
from tests.conversion import tiny
from tests.conversion.one_layer import Layer, Recipe, basis_of, shared_basis
from tests.conversion.tiny import relative


@pytest.mark.parametrize("case", tiny.CASES)
def test_full_rank_is_the_source(case):
    layer = Layer(case)
    expected = layer.source_output()
    for layout in LAYOUTS:
        error = relative(layer.output(Recipe(layout=layout, cache_ratio=1.0)), expected)
        assert error < 2e-6, layout  # the source's cos and sin are float32


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["llama-biases", "qwen3-biases-yarn", "smollm3"])
def test_full_rank_leaves_nothing_to_choose(case, layout):
    layer = Layer(case)
    expected = layer.converted(Recipe(layout=layout, cache_ratio=1.0))
    for selection, low_rank in itertools.product(selections(layout), LowRankRule.names()):
        other = Recipe(layout=layout, cache_ratio=1.0, rope_selection=selection, latent_rule=low_rank)
        tensors = layer.converted(other)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["qwen2", "qwen3", "phi3", "olmo2", "gemma3"])
def test_without_rotation_dropping_it_costs_nothing(case, layout):
    """At one position all pairs are un-rotated: partial RoPE at full rank is then exact, biases, norms and all."""
    layer = Layer(case)
    still = SourceSpec(**{**vars(layer.spec), "inv_freq": torch.zeros_like(layer.spec.inv_freq)})
    layer.spec = still
    width = layer.spec.num_key_value_heads * layer.spec.head_dim
    rank = 2 * width - {"latent": 0, "shared": 8, "per-group": 8 * layer.spec.num_key_value_heads}[layout]
    # Of a shared basis this rank is the target's very own, below the number of its rows.
    recipe = Recipe(layout=layout, qk_rope_head_dim=8, kv_lora_rank=rank, fit_queries=False, latent_rule="svd-joint")
    exact = Recipe(layout=layout, cache_ratio=1.0)
    # Principal components come from eigenvalues, squares of singular values: half of float64's digits.
    assert relative(layer.output(recipe), layer.output(exact)) < 1e-6


def test_a_key_bias_on_un_rotated_dims_is_dropped_and_on_rotated_ones_kept():
    layer = Layer("qwen2")
    recipe = Recipe(qk_rope_head_dim=4, kv_lora_rank=40)
    tensors = layer.converted(recipe)
    bias = tensors["kv_a_proj.bias"]
    assert (bias[:40] == 0).all() and (bias[40:] != 0).all()
    # Any bias of un-rotated key rows shifts all scores of a query alike.
    shifted = {**tensors, "kv_a_proj.bias": bias.clone()}
    shifted["k_b_proj"] = torch.cat([tensors["k_b_proj"], torch.randn_like(tensors["k_b_proj"][..., :1])], -1)
    shifted["v_b_proj"] = torch.cat([tensors["v_b_proj"], torch.zeros_like(tensors["v_b_proj"][..., :1])], -1)
    shifted["kv_a_proj.bias"] = torch.cat([bias[:40], torch.ones(1).double(), bias[40:]])
    weight = tensors["kv_a_proj.weight"]
    shifted["kv_a_proj.weight"] = torch.cat([weight[:40], torch.zeros_like(weight[:1]), weight[40:]])
    wider = Recipe(qk_rope_head_dim=4, kv_lora_rank=41)
    assert relative(layer.output(wider, shifted), layer.output(recipe, tensors)) < 1e-9


def test_the_mean_that_a_latent_loses_of_rotary_keys_is_in_their_bias():
    """Inputs that are their mean alone: rotary keys are right then, whatever the rank."""
    layer = Layer("qwen2")
    recipe = Recipe(layout="latent", qk_rope_head_dim=16, kv_lora_rank=12, fit_queries=False)
    tensors, basis = (layer.converted(recipe), basis_of(layer, recipe))
    mean = layer.statistics.mean
    expected = basis.key_rope[0] @ (layer.weights.k_weight @ mean + layer.weights.k_bias)
    latent = tensors["kv_a_proj.weight"] @ mean
    found = tensors["k_rope_proj.weight"] @ latent + tensors["k_rope_proj.bias"]
    assert relative(found, expected) < 1e-9
    assert relative(tensors["k_rope_proj.weight"] @ latent, expected) > 0.1


@pytest.mark.parametrize("case", ["llama", "glm4-no-biases", "olmo2", "gemma3"])
def test_the_gain_of_an_output_is_that_of_the_norms_before_the_mlp(case):
    """With nothing in the residual stream, and all channels of the attention's output equally large."""
    layer = Layer(case)
    block = layer.model.model.layers[0]
    for name, parameter in block.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter)
    weights = layer.stored_weights()
    output = torch.randn(1, 1, layer.spec.hidden_size).sign().double()
    block.self_attn.forward = lambda **_: (output, None)
    seen = []
    block.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    block(torch.zeros_like(output), position_embeddings=None)
    expected = torch.nn.functional.normalize(output * weights.output_gain, dim=-1)
    torch.testing.assert_close(torch.nn.functional.normalize(seen[0], dim=-1), expected, rtol=0, atol=1e-6)


def test_value_errors_count_as_the_mlp_is_given_them():
    layer = Layer("gemma3")
    layer.weights = replace(layer.weights, output_gain=torch.rand(layer.spec.hidden_size, dtype=torch.float64))
    basis = shared_basis(layer, 4)
    problem = latent_problem(layer.spec, layer.weights, basis, layer.statistics)
    error = torch.randn(layer.spec.num_attention_heads, layer.spec.head_dim, dtype=torch.float64)
    for kv_head, metric in enumerate(problem.value_metric):
        group = slice(kv_head * layer.spec.group_size, (kv_head + 1) * layer.spec.group_size)
        one = error[group.start]  # of a value, which all heads of the group read
        each = torch.zeros(layer.spec.group_size, *error.shape, dtype=torch.float64)
        each[range(layer.spec.group_size), range(group.start, group.stop)] = one
        cost = (layer.weights.output_gain * (each.flatten(1) @ layer.weights.o_weight.T)).square().sum()
        torch.testing.assert_close(one @ metric @ one, cost)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_centred_covariance_joint_is_best_on_the_inputs(layout):
    """What attention makes of them belongs to rules that say that they read it."""
    layer = Layer("llama")
    recipe = Recipe(layout=layout, latent_rule="covariance-joint", qk_rope_head_dim=8, kv_lora_rank=12)
    geometry = recipe.geometry(layer.spec)
    given = prepare_layer(layer.spec, geometry, recipe.layer_rules(geometry), layer.weights, layer.statistics).problem
    decoder, encoder = recipe.low_rank_rule.factors(given, 12, centered=True)
    target = torch.cat([given.keys.flatten(0, 1), given.value.flatten(0, 1)])
    root = torch.linalg.cholesky(layer.statistics.covariance)
    lost, best = (target - decoder @ encoder) @ root, torch.linalg.svdvals(target @ root)[12:]
    assert float(lost.square().sum()) == pytest.approx(float(best.square().sum()), rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["llama-biases", "qwen3"])
def test_maps_per_query_head_start_as_the_same_layer(case, layout):
    layer = Layer(case)
    keys = {"layout": layout, "qk_rope_head_dim": 8, "kv_lora_rank": 24, "fit_output": True}
    recipe, split = Recipe(**keys), Recipe(**keys, latent_up_projections="query-head")
    geometry, heads = split.geometry(layer.spec), layer.spec.num_attention_heads
    tensors = layer.converted(split)
    assert tensors["k_b_proj"].shape == (heads, geometry.qk_nope_head_dim, 24)
    assert tensors["v_b_proj"].shape == (heads, layer.spec.head_dim, 24)
    assert geometry.cache_numel_per_token == recipe.geometry(layer.spec).cache_numel_per_token
    assert geometry.source_cache_numel_per_token == recipe.geometry(layer.spec).source_cache_numel_per_token
    assert relative(layer.output(split), layer.output(recipe)) < 1e-12


def test_whitening_fits_the_inputs_that_occur(monkeypatch):
    """On inputs in a subspace the whitened latent is exact at the subspace's rank; plain SVD is not."""
    layer = Layer("llama")
    directions = torch.randn(8, layer.spec.hidden_size, dtype=torch.float64)
    layer.inputs = torch.randn(6, 40, 8, dtype=torch.float64) @ directions
    collector = StatisticsCollector(layer.spec, layer.weights, window=None, phases=True)
    collector.add(layer.inputs)
    layer.statistics = collector.finish()
    recipe = {"rope_selection": "high", "qk_rope_head_dim": 14, "kv_lora_rank": 8, "fit_queries": False}
    monkeypatch.setattr(latent_rules, "SHRINKAGE", 0.0)
    full = Recipe(**{**recipe, "kv_lora_rank": 36})
    expected = layer.output(full)
    assert relative(layer.output(Recipe(**recipe, latent_rule="whitened-joint")), expected) < 1e-6
    assert relative(layer.output(Recipe(**recipe, latent_rule="svd-joint")), expected) > 1e-2


def test_centring_leaves_the_mean_output_of_every_head_intact():
    layer = Layer("llama")
    recipe = Recipe(qk_rope_head_dim=8, kv_lora_rank=8, latent_rule="svd-joint", latent_centered=True)
    tensors = layer.converted(recipe)
    mean = layer.statistics.attended_mean  # [H, E]
    latent = mean @ tensors["kv_a_proj.weight"][:8].T
    approximate = torch.einsum("hdr,hr->hd", tensors["v_b_proj"].repeat_interleave(2, 0), latent).flatten()
    values = layer.weights.v_weight.view(2, 16, -1).repeat_interleave(2, 0)
    exact = torch.einsum("hde,he->hd", values, mean).flatten()
    weight = layer.weights.o_weight
    assert torch.allclose(weight @ approximate + tensors["o_proj.bias"], weight @ exact)
    assert "o_proj.bias" not in layer.converted(Recipe(qk_rope_head_dim=8, kv_lora_rank=8, latent_centered=False))


def test_positions_are_relative():
    layer = Layer("qwen2-tied-yarn")
    for layout in LAYOUTS:
        recipe = Recipe(layout=layout, qk_rope_head_dim=8, kv_lora_rank=32)
        assert relative(layer.output(recipe, first_position=1000), layer.output(recipe)) < 1e-6
