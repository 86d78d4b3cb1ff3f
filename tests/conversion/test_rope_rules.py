"""RoPE rules keep the pairs that they say, and refuse layouts that they do not serve."""

import re
from dataclasses import dataclass, replace

import pytest
import torch

from mha2mla.conversion.families import AttentionWeights
from mha2mla.conversion.rope import (
    RopeRule,
    RoRoPE,
    Scored,
    axis_components,
    folded_components,
    key_second_moment,
    rotation_cost,
)
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
    for fold in (3, 0, -1):
        with pytest.raises(ValueError, match=f"rope.selection folds {fold} frequencies; expected a divisor of .* 8"):
            RoRoPE(fold).check(Layer("llama").spec)


def test_the_mean_phase_is_the_best_constant_and_its_loss_is_the_cost():
    angle = torch.linspace(0, 2, 50, dtype=torch.float64)
    turns = torch.polar(torch.ones_like(angle), angle)
    mean = turns.mean()
    least = (turns - mean).abs().square().mean()
    assert torch.allclose(rotation_cost(mean), least)
    assert all((turns - factor).abs().square().mean() > least for factor in (1.0, 0.9 * mean, 1.1 * mean, mean.conj()))


SCORES = torch.arange(16, dtype=torch.float64).view(8, 2)
SPOILT_SCORES = {
    "gave torch.float64 (2, 8) on cpu; expected a real tensor (8, 2)": SCORES.T,
    "gave torch.float64 (8,) on cpu": SCORES[:, 0],
    "gave torch.complex128 (8, 2) on cpu": SCORES + 0j,
    "gave torch.float64 (8, 2) on meta": SCORES.to("meta"),
    "gave [[0.0, 1.0], ": SCORES.tolist(),
}
PAIRS = axis_components(SCORES < 4)
SPOILT_PAIRS = {
    "encode torch.complex64 (4, 2, 8) on cpu; expected torch.complex128": {"encode": PAIRS.encode.to(torch.complex64)},
    "decode torch.complex128 (2, 8, 3) on cpu": {"decode": PAIRS.decode[..., 1:]},
    "decode that is off the identity by 1; expected": {"decode": 2 * PAIRS.decode},
    "frequency torch.int64 (3,) on cpu; expected torch.int64 (4,)": {"frequency": PAIRS.frequency[1:]},
    "frequencies -8 to -7; expected indices from 0 to 7": {"frequency": PAIRS.frequency - 8},
}


@dataclass(frozen=True)
class Spoilt(Scored):
    """A rule that breaks its contract."""

    found: str

    def scores(self, problem):
        return SPOILT_SCORES[self.found] if self.found in SPOILT_SCORES else SCORES * torch.nan

    def components(self, problem):
        changed = SPOILT_PAIRS.get(self.found)
        return super().components(problem) if changed is None else replace(PAIRS, **changed)


@pytest.mark.parametrize("found", [*SPOILT_SCORES, *SPOILT_PAIRS])
def test_what_a_rule_gives_is_checked(found):
    recipe = Recipe(layout="shared", rope=Spoilt(found), qk_rope_head_dim=8, kv_lora_rank=32, fit_queries=False)
    with pytest.raises(ValueError, match=f"Spoilt.(scores|components) .*{re.escape(found)}"):
        basis_of(Layer("llama"), recipe)


@dataclass(frozen=True)
class Turned(RopeRule):
    """Pairs of another shape."""

    def kept(self, problem, *, per_head):
        return (SCORES < 4).T


@pytest.mark.parametrize("layout", ["shared", "per-group"])
def test_pairs_of_another_shape_are_refused(layout):
    recipe = Recipe(layout=layout, rope=Turned(), qk_rope_head_dim=4, kv_lora_rank=32, fit_queries=False)
    with pytest.raises(
        ValueError, match=r"Turned.kept gave torch.bool \(2, 8\) on cpu .* expected torch.bool \(8, 2\)"
    ):
        basis_of(Layer("llama"), recipe)


@pytest.mark.parametrize("layout", ["shared", "per-group"])
def test_scores_that_are_no_numbers_choose_nothing(layout):
    """A sort takes NaN for the largest; the plainest rules convert the layer, as where other statistics fail."""
    recipe = Recipe(layout=layout, rope=Spoilt("NaN"), qk_rope_head_dim=4, kv_lora_rank=32, fit_queries=False)
    with pytest.raises(torch.linalg.LinAlgError, match="Spoilt.scores gave NaN"):
        basis_of(Layer("llama"), recipe)
