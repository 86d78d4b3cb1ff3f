"""Closed-form fits to the source's attention: against the same problem written out, and what they must not break."""

import dataclasses

import pytest
import torch

from mha2mla.conversion.calibration.statistics import AttentionSample, StatisticsCollector
from mha2mla.conversion.fit import closed_form
from mha2mla.conversion.latent.rules import LowRankRule, factorise
from mha2mla.conversion.layer import finish_layer, latent_problem, prepare_layer, rotary_keys, un_rotated_keys
from mha2mla.conversion.target import LAYOUTS
from tests.conversion import tiny
from tests.conversion.one_layer import Layer, basis_of
from tests.conversion.plain_mla import plain_mla_attention
from tests.conversion.tiny import Recipe, relative
from tests.ops import FunctionCalls

CASES = ["llama", "qwen2", "qwen3-biases-yarn", "mistral-sliding", "olmo2", "gemma3"]


class SampledLayer(Layer):
    """A layer whose statistics hold all its inputs."""

    def __init__(self, case: str, **keys):
        super().__init__(case, **keys)
        sample = AttentionSample(self.inputs, self.spec.sliding_windows[0])
        self.statistics = dataclasses.replace(self.statistics, sample=sample)

    def error(self, recipe: Recipe) -> float:
        tensors = tiny.convert_layer(self.spec, recipe.geometry(self.spec), recipe, self.weights, self.statistics)
        return relative(self.output(recipe, tensors), self.source_output())


def basis_and_keys(layer: Layer, **keys):
    recipe = Recipe(**{"layout": "shared", "qk_rope_head_dim": 8, "kv_lora_rank": 40, **keys})
    basis = basis_of(layer, recipe)
    return basis, un_rotated_keys(layer.spec, layer.weights, basis)


def maps_of(layer: Layer, layout: str):
    """Basis and keys of a recipe; where rotary ones come from a latent, such as it gives them back."""
    rank = 20 if layout == "latent" else 40
    basis, keys = basis_and_keys(layer, layout=layout, kv_lora_rank=rank)
    given = None if layout == "latent" else basis
    windows = closed_form.score_windows(layer.spec, layer.weights, layer.statistics.sample, given)
    if layout != "latent":
        return basis, closed_form.KeyMaps(keys), windows
    problem = latent_problem(layer.spec, layer.weights, basis, layer.statistics, has_rope_cache=False)
    factors = factorise(LowRankRule.find("whitened-joint"), problem, rank, centered=True)
    keys, rotary = (decoder @ factors.encoder for decoder in (factors.key_decoder, factors.rope_decoder))
    scaling = layer.spec.attention_factor
    return basis, closed_form.KeyMaps(keys, rotary, factors.rope_offset, basis.inv_freq, scaling), windows


def score_losses(layer: Layer, windows, maps, queries) -> torch.Tensor:
    """[H], squared errors of scores under the source's attention."""
    scale, error = layer.spec.softmax_scale, 0
    for window in windows:
        left = window.target - window.scores(queries, window.asked(maps)) * scale
        error = error + (window.weight * left.square()).sum((1, 2))
    return error


@pytest.mark.parametrize("layout", ["per-group", "latent"])
@pytest.mark.parametrize("case", ["llama", "qwen3-biases-yarn"])
def test_conjugate_gradients_reach_the_least_squares_solution(case, layout, monkeypatch):
    """Every query, no ridge, many steps: the solution of the normal equations, written out."""
    layer = SampledLayer(case)
    monkeypatch.setattr(closed_form, "_RIDGE", 0.0)
    monkeypatch.setattr(closed_form, "_STEPS", 30)
    basis, maps, windows = maps_of(layer, layout)
    start_map = closed_form.fitted_queries(basis, maps)
    found = closed_form.refit_queries(layer.spec, windows, start_map, maps)
    head, scale = 1, layer.spec.softmax_scale
    rows, targets = [], []
    for window in windows:
        # A query map's rotary rows turn with the query: column by column.
        columns = torch.eye(found[0].numel(), dtype=torch.float64).view(-1, *found[0].shape)
        table = maps.table(window.position, torch.float64)
        turned = maps.turned(window.query[head] @ columns.mT, table)
        outer = torch.einsum("nqe,te->qtn", turned, window.keys(maps)[head]) * scale
        weight = window.weight[head][..., None]
        centred = outer - (weight * outer).sum(1, keepdim=True)
        rows.append((weight.sqrt() * centred).flatten(0, 1))
        targets.append((weight[..., 0].sqrt() * window.target[head]).flatten())
    rows, targets = torch.cat(rows), torch.cat(targets)
    best = targets - rows @ torch.linalg.lstsq(rows, targets[:, None], driver="gelsd").solution[:, 0]
    reached = targets - rows @ found[head].flatten()
    start = targets - rows @ start_map[head].flatten()
    losses = [float(part.square().sum()) for part in (best, reached, start)]
    assert losses[0] * (1 - 1e-9) <= losses[1] <= losses[0] + 1e-2 * (losses[2] - losses[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_refit_of_queries_never_raises_what_it_minimises(case, layout):
    """As it is: few steps, with a ridge."""
    layer = SampledLayer(case)
    basis, maps, windows = maps_of(layer, layout)
    start = closed_form.fitted_queries(basis, maps)
    with FunctionCalls(torch.Tensor.cos) as calls:
        found = closed_form.refit_queries(layer.spec, windows, start, maps)
    assert len(calls.made) == (2 * len(windows) if layout == "latent" else 0), "of its keys, of its queries"
    before, after = (score_losses(layer, windows, maps, queries) for queries in (start, found))
    assert (after <= before).all() and after.sum() < before.sum()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_refits_bring_the_output_nearer_to_the_source(case, layout, monkeypatch):
    monkeypatch.setattr(closed_form, "_OUTPUT_STRIDE", 1)  # the sample is small
    layer = SampledLayer(case)
    keys = {"layout": layout, "qk_rope_head_dim": 4}
    wide, narrow = ({"kv_lora_rank": rank, **keys} for rank in (28, 8))
    assert layer.error(Recipe(**wide)) < layer.error(Recipe(fit_queries=False, **wide))
    # Where more is lost, more can be won back by the output.
    assert layer.error(Recipe(fit_output=True, **narrow)) < layer.error(Recipe(**narrow))


def test_an_output_that_cannot_be_mended_is_left_alone():
    """Errors that have nothing to do with the heads' outputs: no ridge helps the held-out part, only the mean does."""
    layer = SampledLayer("llama")
    basis, keys = basis_and_keys(layer)
    spec, weights = layer.spec, layer.weights
    values = weights.v_weight.view(spec.num_key_value_heads, spec.head_dim, -1)
    offset = torch.zeros(spec.num_attention_heads, spec.head_dim, dtype=torch.float64)
    change, bias = closed_form.refit_output(
        spec,
        weights,
        layer.statistics.sample,
        basis,
        closed_form.KeyMaps(torch.zeros_like(keys)),
        1e-9 * values,
        offset,
    )
    assert torch.isfinite(change).all() and torch.isfinite(bias).all()
    features, share = torch.randn(64, 16, dtype=torch.float64), torch.ones(64, 1, dtype=torch.float64)
    moments = closed_form._moments(features, features[:, :3], share, True)
    assert torch.equal(moments.mean, features.mean(0)) and torch.equal(moments.target_mean, features[:, :3].mean(0))
    exact = closed_form._ridge_regression(closed_form._moments(features, features[:, :3], share, False), 0.0)
    assert torch.allclose(exact, torch.eye(3, 16, dtype=torch.float64))


@pytest.mark.parametrize("case", CASES)
def test_rotary_keys_that_are_the_source_s_keep_their_queries(case):
    """Every pair rotates, and the latent loses nothing: scores are the source's already."""
    layer = SampledLayer(case)
    width = layer.spec.num_key_value_heads * layer.spec.head_dim
    basis, keys = basis_and_keys(layer, layout="latent", qk_rope_head_dim=width, kv_lora_rank=width)
    rotary = rotary_keys(layer.spec, layer.weights, basis)
    maps = closed_form.KeyMaps(keys, *rotary, basis.inv_freq, layer.spec.attention_factor)
    windows = closed_form.score_windows(layer.spec, layer.weights, layer.statistics.sample, None)
    found = closed_form.refit_queries(layer.spec, windows, closed_form.fitted_queries(basis, maps), maps)
    assert torch.allclose(found, basis.query_rope, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", [10.0, 60.0])
def test_biases_of_hundreds_are_fitted_as_in_float64(std, dtype):
    """Keys whose bias is hundreds of times the rest: some heads attend one token, and keys do not vary under that."""
    layer = Layer("qwen2")
    attention = layer.model.model.layers[0].self_attn
    torch.nn.init.normal_(attention.k_proj.bias, std=std, generator=torch.Generator().manual_seed(0))
    torch.nn.init.normal_(attention.q_proj.bias, std=std / 3, generator=torch.Generator().manual_seed(1))
    layer.weights = layer.stored_weights()
    layer.measure()
    layer.statistics = dataclasses.replace(layer.statistics, sample=AttentionSample(layer.inputs.to(dtype), None))
    basis, maps, windows = maps_of(layer, "latent")
    start = closed_form.fitted_queries(basis, maps)
    found = closed_form.refit_queries(layer.spec, windows, start, maps)
    assert torch.isfinite(found).all()
    exact = [dataclasses.replace(w, **{k: v.double() for k, v in vars(w).items() if k != "share"}) for w in windows]
    before, after = (score_losses(layer, exact, maps, queries) for queries in (start, found))
    assert (after <= before * (1 + 1e-3) + 1e-6).all() and after.sum() < before.sum()


def test_an_uncentred_refit_makes_no_bias():
    layer = SampledLayer("llama")
    # A latent that knows nothing of the inputs leaves the output something to mend.
    keys = {"layout": "shared", "qk_rope_head_dim": 4, "kv_lora_rank": 8, "latent_rule": "svd-joint"}
    recipe = Recipe(**keys, latent_centered=False, fit_output=True)
    tensors = tiny.convert_layer(layer.spec, recipe.geometry(layer.spec), recipe, layer.weights, layer.statistics)
    assert "o_proj.bias" not in tensors
    without = dataclasses.replace(recipe.fit, output=False)
    assert layer.error(recipe) < layer.error(dataclasses.replace(recipe, fit=without))


def test_windows_ask_from_different_positions():
    """At one stride from one position, pairs whose turn divides it would look as if they stood still."""
    layer = SampledLayer("llama")
    basis, _ = basis_and_keys(layer)
    rounds, length = 5, layer.inputs.shape[1]
    for stride in (1, 4, 7):
        inputs = layer.inputs[:1].expand(rounds * stride, -1, -1)
        sample = AttentionSample(inputs, None, pairs=rounds * length**2)
        seen = torch.zeros(length, dtype=torch.int64)
        for window in closed_form.score_windows(layer.spec, layer.weights, sample, basis):
            positions = (window.weight[0] > 0).sum(-1) - 1
            assert torch.equal(positions.diff(), torch.full_like(positions[1:], stride))
            assert positions[0] < stride and positions[-1] >= length - stride
            seen[positions] += 1
        assert (seen - rounds).abs().max() <= 2  # each position about as often


def test_a_window_shorter_than_the_stride_still_asks():
    layer = SampledLayer("llama")
    basis, _ = basis_and_keys(layer)
    short = AttentionSample(layer.inputs[:1, :2].expand(12, -1, -1), None, pairs=1)
    for window in closed_form.score_windows(layer.spec, layer.weights, short, basis):
        assert window.weight.shape[1] == 1 and torch.isfinite(window.target).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_prepared_serves_every_rank(layout):
    layer = SampledLayer("qwen3-biases-yarn")
    recipes = [Recipe(layout=layout, qk_rope_head_dim=4, kv_lora_rank=rank, fit_output=True) for rank in (8, 24)]
    first = recipes[0].geometry(layer.spec)
    prepared = prepare_layer(layer.spec, first, recipes[0].layer_rules(first), layer.weights, layer.statistics)
    for recipe in recipes:
        geometry = recipe.geometry(layer.spec)
        alone = tiny.convert_layer(layer.spec, geometry, recipe, layer.weights, layer.statistics)
        shared = finish_layer(layer.spec, geometry, recipe.layer_rules(geometry), prepared)
        assert shared.keys() == alone.keys() and all(torch.equal(shared[name], alone[name]) for name in alone)


def test_the_written_scores_are_those_of_the_layer():
    """The source's attention and the converted one, as the fits see them, are the layers' own."""
    layer = SampledLayer("qwen3-biases-yarn")
    keys = {"layout": "shared", "qk_rope_head_dim": 8, "kv_lora_rank": 56}
    recipe = Recipe(**keys, fit_queries=False, latent_centered=False)
    geometry = recipe.geometry(layer.spec)
    tensors = tiny.convert_layer(layer.spec, geometry, recipe, layer.weights, layer.statistics)
    basis, keys = basis_and_keys(layer, kv_lora_rank=56, fit_queries=False, latent_centered=False)
    values = layer.weights.v_weight.view(layer.spec.num_key_value_heads, layer.spec.head_dim, -1)
    outputs, sources = [], []
    visible = layer.statistics.sample.window
    for index, inputs in enumerate(layer.inputs):
        window, rotary = closed_form._score_window(layer.spec, layer.weights, inputs, visible, basis, 1, index)
        value = torch.einsum("ade,te->atd", values, inputs)
        for weight, found in (
            (closed_form._converted(layer.spec, window, rotary, basis.query_nope, closed_form.KeyMaps(keys)), outputs),
            (window.weight, sources),
        ):
            attended = closed_form._attend(weight, value, layer.spec).flatten(1) @ layer.weights.o_weight.T
            found.append(attended + plain_bias(layer, tensors))
    assert relative(torch.stack(sources), layer.source_output()) < 2e-6
    full = plain_mla_attention(layer.inputs, tensors, geometry, layer.spec, layer.mask)
    assert relative(torch.stack(outputs), full) < 1e-3  # a latent of full rank that a ridge of 1e-9 was solved with


def plain_bias(layer: Layer, tensors) -> torch.Tensor:
    return tensors["o_proj.bias"] if "o_proj.bias" in tensors else torch.zeros(layer.spec.hidden_size)


def test_a_sample_is_spread_over_all_that_was_added():
    layer = Layer("llama")
    collector = StatisticsCollector(layer.spec, layer.weights, window=None, sample_tokens=3 * 40)
    inputs = torch.randn(11, 40, layer.spec.hidden_size, dtype=torch.float64)
    for part in inputs.split(2):
        collector.add(part)
    sample = collector.finish().sample
    assert torch.equal(torch.stack(sample.hidden), inputs[::4]) and sample.window is None
    assert StatisticsCollector(layer.spec, layer.weights, window=None).sample_tokens == 0


def test_recipes_say_whether_inputs_are_needed():
    layer = Layer("llama")
    for recipe, expected in (
        (Recipe(), True),
        (Recipe(fit_queries=False), False),
        (Recipe(fit_queries=False, fit_output=True), True),
        (Recipe(cache_ratio=1.0, fit_output=True), False),
    ):
        assert recipe.needs_sample(recipe.geometry(layer.spec)) is expected
