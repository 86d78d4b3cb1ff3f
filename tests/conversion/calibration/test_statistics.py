"""Statistics of a layer are those of the formulas, whole or in blocks."""

import pytest
import torch

from mha2mla.conversion.calibration.statistics import StatisticsCollector
from mha2mla.conversion.rope import key_second_moment
from tests.conversion.one_layer import Layer
from tests.ops import FunctionCalls


def test_statistics_are_those_of_the_formulas():
    layer = Layer("qwen3-biases-yarn")
    spec, weights, x = layer.spec, layer.weights, layer.inputs

    def project(weight, bias, norm):
        heads = (x @ weight.T + bias).unflatten(-1, (-1, spec.head_dim))
        return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + spec.norm_eps) * norm

    query = project(weights.q_weight, weights.q_bias, weights.q_norm)
    key = project(weights.k_weight, weights.k_bias, weights.k_norm)
    features = torch.cat([key.flatten(2), x], -1).flatten(0, 1)
    statistics = layer.statistics
    assert torch.allclose(statistics.mean, features.mean(0))
    assert torch.allclose(statistics.covariance, torch.cov(features.T, correction=0))
    expected = torch.einsum("wlhd,wlhe->hde", query, query) / 240
    assert torch.allclose(statistics.query_second_moment, expected)
    half = spec.head_dim // 2
    pairs = torch.complex(key[..., :half], key[..., half:])
    assert torch.allclose(statistics.key_covariance, torch.einsum("wlaj,wlbj->jab", pairs, pairs.conj()) / 240)
    # Phases, one attention weight at a time.
    turned = torch.polar(torch.ones(40, half).double(), torch.arange(40).double()[:, None] * spec.inv_freq.double())
    q = torch.complex(query[..., :half], query[..., half:]) * turned[:, None]
    k = (pairs * turned[:, None]).repeat_interleave(spec.group_size, 2)
    scores = torch.einsum("wshj,wthj->whst", q.conj(), k).real * spec.softmax_scale * spec.attention_factor**2
    weight = scores.masked_fill(~layer.mask, float("-inf")).softmax(-1)
    weight[..., 0] = 0
    distance = torch.arange(40)[:, None] - torch.arange(40)[None]
    turns = torch.polar(torch.ones(40, 40, half).double(), distance[..., None] * spec.inv_freq.double())
    expected = torch.einsum("whst,stj->hj", weight.to(turns.dtype), turns) / weight.sum((0, 2, 3))[:, None]
    assert torch.allclose(statistics.mean_phase, expected)


def test_attended_statistics_are_those_of_the_formulas():
    layer = Layer("qwen2-sliding", max_window_layers=0)
    spec, weights, x = layer.spec, layer.weights, layer.inputs
    query = (x @ weights.q_weight.T + weights.q_bias).unflatten(-1, (-1, spec.head_dim))
    key = (x @ weights.k_weight.T + weights.k_bias).unflatten(-1, (-1, spec.head_dim))
    turn = torch.polar(torch.ones(40, 8).double(), torch.arange(40).double()[:, None] * spec.inv_freq.double())[:, None]
    q, k = (torch.complex(*part.chunk(2, -1)) * turn for part in (query, key))
    scores = (
        torch.einsum("wshj,wthj->whst", q.conj(), k.repeat_interleave(spec.group_size, 2)).real * spec.softmax_scale
    )
    assert layer.mask.sum() < 40 * 9
    weight = scores.masked_fill(~layer.mask, float("-inf")).softmax(-1)[:, :, ::8]
    averages = weight @ x[:, None]  # [windows, H, queries, E]
    statistics = layer.statistics
    assert torch.allclose(statistics.attended_mean, averages.mean((0, 2)))
    centred = averages - averages.mean((0, 2))[:, None]
    count = averages[..., 0].numel()
    assert torch.allclose(statistics.attended_covariance, torch.einsum("whse,whsf->ef", centred, centred) / count)
    within = x[:, None, None] - averages[:, :, :, None]  # [windows, H, queries, keys, E]
    expected = torch.einsum("whst,whste,whstf->ef", weight, within, within) / count
    assert torch.allclose(statistics.attention_covariance, expected)
    distance = (torch.arange(40)[::8, None] - torch.arange(40)).clamp_min(0)
    mass = weight[..., 1:].sum(0).flatten(1)  # without the sink
    expected = torch.zeros(4, 40).double().index_add_(1, distance[:, 1:].flatten(), mass)
    assert torch.allclose(statistics.distances, expected / expected.sum(-1, keepdim=True))


def test_a_head_that_looks_nowhere_but_at_the_sink_looks_no_distance_back():
    layer = Layer("llama")
    collector = StatisticsCollector(layer.spec, layer.weights, window=None, distances=True)
    collector.add(layer.inputs[:, :1])
    collector.add(layer.inputs[:, :1])
    assert collector.finish().distances.tolist() == [[1.0]] * 4
    collector.add(layer.inputs)  # longer windows than before
    assert torch.allclose(collector.finish().distances, layer.statistics.distances)


def test_a_query_of_a_long_window_counts_as_much_as_one_of_a_short_window(monkeypatch):
    """Of long windows fewer queries are looked at: here the eighth that is attended anyway."""
    layer = Layer("llama")
    every, few = (StatisticsCollector(layer.spec, layer.weights, window=None, distances=True) for _ in range(2))
    for collector in every, few:
        collector.add(layer.inputs.repeat(1, 4, 1)[:, :128])
        monkeypatch.setattr("mha2mla.conversion.calibration.statistics._QUERIES", 16)
        collector.add(layer.inputs[:, :16])
    assert torch.allclose(few.finish().distances, every.finish().distances)


def test_distances_cost_few_operations_a_query():
    """Each is a launch on a GPU, where there are a thousand queries in a layer."""
    layer = Layer("llama")
    with FunctionCalls(torch.Tensor.flip, torch.Tensor.double) as calls:
        StatisticsCollector(layer.spec, layer.weights, window=None, distances=True)._add_distances(
            torch.rand(4, 5, 40), range(0, 40, 8), 1.0
        )
    assert [name for name, _ in calls.made] == ["flip", "double"]


def test_blocks_of_an_attention_map_add_up(monkeypatch):
    layer = Layer("mistral-sliding")
    monkeypatch.setattr("mha2mla.conversion.calibration.statistics._MAP_ELEMENTS", 6 * 4 * 40 * 7)
    collector = StatisticsCollector(layer.spec, layer.weights, window=9, phases=True)
    collector.add(layer.inputs)
    assert torch.allclose(collector.finish().mean_phase, layer.statistics.mean_phase)
    assert collector.finish().attended_mean is None


@pytest.mark.parametrize("case", ["qwen2", "qwen3-biases-yarn"])
def test_second_moments_of_keys_agree_with_those_per_frequency(case):
    layer = Layer(case)
    spec, half = layer.spec, layer.spec.head_dim // 2
    heads = spec.num_key_value_heads
    moment = key_second_moment(spec, layer.statistics, layer.weights).view(heads, 2, half, heads, 2, half)
    parts = moment.diagonal(dim1=2, dim2=5).permute(4, 0, 2, 1, 3)  # [half, h_kv, h_kv, 2, 2]
    expected = torch.complex(parts[..., 0, 0] + parts[..., 1, 1], parts[..., 1, 0] - parts[..., 0, 1])
    assert torch.allclose(layer.statistics.key_covariance, expected)
