"""RoPE rules keep the pairs that they say, and refuse layouts that they do not serve."""

import pytest
import torch

from mha2mla.conversion.families import AttentionWeights
from mha2mla.conversion.rope import RoRoPE, folded_components, key_second_moment, rotation_cost
from tests.conversion.one_layer import Layer, Recipe, basis_of, frequencies, shared_basis


@pytest.mark.parametrize(("selection", "expected"), [("high", [0, 1]), ("low", [6, 7]), ("uniform", [0, 4])])
def test_fixed_rules_choose_by_frequency(selection, expected):
    layer = Layer("llama")
    recipe = Recipe(rope_selection=selection, qk_rope_head_dim=4, kv_lora_rank=32, fit_queries=False)
    basis = basis_of(layer, recipe, None)
    assert frequencies(layer.spec, basis).tolist() == [expected, expected]
    recipe = Recipe(layout="shared", rope_selection=selection, qk_rope_head_dim=8, kv_lora_rank=32, fit_queries=False)
    basis = basis_of(layer, recipe, None)
    wanted = [0, 2, 4, 6] if selection == "uniform" else sorted(2 * expected)
    assert frequencies(layer.spec, basis).tolist() == [wanted]


def test_a_shared_basis_keeps_the_largest_components():
    layer = Layer("llama", num_key_value_heads=4)
    few, more = shared_basis(layer, 8), shared_basis(layer, 24)
    listed = [sorted(frequencies(layer.spec, basis).flatten().tolist()) for basis in (few, more)]
    remaining = list(listed[1])
    for frequency in listed[0]:
        remaining.remove(frequency)  # ValueError if a pair kept first is dropped later
    assert len(remaining) == 8


def test_heads_earn_uneven_numbers_of_pairs():
    """A head whose queries hardly read its keys gets none."""
    layer = Layer("llama", num_key_value_heads=2)
    weight = layer.weights.q_weight.clone()
    weight[:32] *= 1e-3  # the query heads of the first kv head
    layer.weights = AttentionWeights(**{**vars(layer.weights), "q_weight": weight})
    layer.measure()
    basis = shared_basis(layer, 12, "2-norm")
    read = basis.key_rope[0].view(12, 2, 16).abs().sum((0, 2))
    assert read.tolist() == [0.0, 12.0]


def test_keys_of_one_direction_need_one_component_per_fold():
    """RoRoPE: keys that lie in one real direction of (head, frequency in a fold) are kept whole by one component."""
    layer = Layer("llama", num_key_value_heads=4)
    spec, fold = layer.spec, 2
    half, kv_heads = spec.head_dim // 2, spec.num_key_value_heads
    generator = torch.Generator().manual_seed(3)
    direction = torch.randn(half // fold, kv_heads, fold, generator=generator, dtype=torch.float64)
    content = torch.randn(2, half // fold, 500, generator=generator, dtype=torch.float64)  # of both halves of a pair
    keys = torch.einsum("gaf,igt->aigft", direction, content).reshape(kv_heads * spec.head_dim, -1)
    components = folded_components(spec, keys @ keys.T / 500, half // fold, fold)
    assert components.frequency.tolist() == [0, 2, 4, 6]
    z = torch.complex(*keys.view(kv_heads, 2, half, -1).unbind(1))
    kept = torch.einsum("ajn,nbl,blt->ajt", components.decode, components.encode, z)
    assert torch.allclose(kept, z)
    fewer = folded_components(spec, keys @ keys.T / 500, half // fold - 1, fold)
    lost = z - torch.einsum("ajn,nbl,blt->ajt", fewer.decode, fewer.encode, z)
    assert torch.allclose(lost[:, :6], torch.zeros_like(z[:, :6])) and torch.allclose(lost[:, 6:], z[:, 6:])


@pytest.mark.parametrize(("fold", "pairs"), [(1, 8), (2, 4), (4, 6), (8, 11)])
def test_folded_frequencies_are_taken_at_even_steps(fold, pairs):
    layer = Layer("qwen3", num_key_value_heads=4, head_dim=16)
    moment = key_second_moment(layer.spec, layer.statistics, layer.weights)
    components = folded_components(layer.spec, moment, pairs, fold)
    expected = {1: list(range(8)), 2: [0, 2, 4, 6], 4: [0, 1, 2, 4, 5, 6], 8: [8 * i // 11 for i in range(11)]}
    assert components.frequency.tolist() == expected[fold]
    product = torch.einsum("naj,ajm->nm", components.encode, components.decode)
    assert torch.allclose(product, torch.eye(pairs, dtype=product.dtype))
    assert float(components.encode.imag.abs().max()) == 0.0


def test_rules_of_the_shared_layout_are_refused_in_the_other():
    with pytest.raises(ValueError, match="rope.selection is 'rorope' in the per-group layout"):
        Recipe(rope_selection="rorope")
    with pytest.raises(ValueError, match="rope.selection folds 3 frequencies; expected a divisor of a head's 8"):
        RoRoPE(3).check(Layer("llama").spec)


def test_the_mean_phase_is_the_best_constant_and_its_loss_is_the_cost():
    angle = torch.linspace(0, 2, 50, dtype=torch.float64)
    turns = torch.polar(torch.ones_like(angle), angle)
    mean = turns.mean()
    least = (turns - mean).abs().square().mean()
    assert torch.allclose(rotation_cost(mean), least)
    assert all((turns - factor).abs().square().mean() > least for factor in (1.0, 0.9 * mean, 1.1 * mean, mean.conj()))
