"""Rotary bases commute with RoPE, keep pairs whole, and fold the mean phase of what they leave into the query."""

import pytest
import torch

from mha2mla.conversion.recipe import selections
from mha2mla.conversion.rope import rules as rope_rules
from mha2mla.conversion.target import LAYOUTS
from tests.conversion.one_layer import Layer, Recipe, basis_of, frequencies, shared_basis

# A fold treats neighbouring frequencies as one: what it mixes commutes only nearly.
EXACT = [name for name in selections("shared") if not name.startswith("rorope-")]


@pytest.mark.parametrize("selection", EXACT)
def test_rope_commutes_with_a_unitary_map_across_heads(selection):
    """Kept and dropped parts of a shared basis add up to the source's scores when both are rotated."""
    layer = Layer("qwen2", num_key_value_heads=4)
    basis = shared_basis(layer, 12, selection)
    spec = layer.spec
    heads, kv_heads, d = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    query = torch.randn(heads, d, dtype=torch.float64)
    key = torch.randn(kv_heads, d, dtype=torch.float64)

    def score(query, key, inv_freq, distance):
        half = query.shape[-1] // 2
        turn = torch.polar(torch.ones(half, dtype=torch.float64), inv_freq.double() * distance)
        return (
            (torch.complex(query[..., :half], query[..., half:]) * turn)
            .conj()
            .mul(torch.complex(key[..., :half], key[..., half:]))
            .real.sum(-1)
        )

    for distance in (0, 1, 17):
        expected = score(query, key.repeat_interleave(spec.group_size, 0), spec.inv_freq, distance)
        stacked = key.flatten()
        kept = score(
            torch.einsum("hed,hd->he", basis.query_rope, query),
            basis.key_rope[0] @ stacked,
            basis.inv_freq[0],
            distance,
        )
        left = (basis.key_nope @ stacked).repeat_interleave(spec.group_size, 0)
        dropped = score(torch.einsum("hed,hd->he", basis.query_nope, query), left, spec.inv_freq, distance)
        assert torch.allclose(kept + dropped, expected)


def test_a_kept_pair_keeps_both_its_halves():
    """A dim kept without its partner."""
    layer = Layer("llama-mha")
    recipe = Recipe(rope_selection="2-norm", qk_rope_head_dim=6, kv_lora_rank=32)
    basis = basis_of(layer, recipe)
    for head in range(4):
        rows = basis.key_rope[head].view(6, 4, 16)
        chosen = rows.nonzero()
        assert (chosen[:, 1] == head).all()
        dims = chosen[:, 2].tolist()
        assert [dim - 8 for dim in dims[3:]] == dims[:3] == frequencies(layer.spec, basis)[head].tolist()
        rest = set(basis.key_nope[head].view(10, 4, 16).nonzero()[:, 2].tolist())
        assert rest | set(dims) == set(range(16)) and not rest & set(dims)


def test_the_attention_factor_reaches_un_rotated_pairs_squared():
    layer = Layer("llama-yarn")
    assert layer.spec.attention_factor == 1.3
    recipe = Recipe(qk_rope_head_dim=4, kv_lora_rank=56, fit_queries=False, rope_selection="high")
    basis = basis_of(layer, recipe)
    assert torch.allclose(basis.query_nope.square().sum(-1), torch.full((4, 12), 1.3**4, dtype=torch.float64))
    assert torch.equal(basis.query_rope.square().sum(-1), torch.ones(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_the_mean_phase_is_a_linear_fold_of_the_query(layout, strength, monkeypatch):
    """Un-rotated queries are the source's times 1 + s (g − 1), pair by pair."""
    layer = Layer("llama")
    recipe = Recipe(layout=layout, qk_rope_head_dim=8, kv_lora_rank=32)
    monkeypatch.setattr(rope_rules, "MEAN_PHASE", strength)
    plain = Recipe(layout=layout, qk_rope_head_dim=8, kv_lora_rank=32, fit_queries=False)
    folded, unfolded = (basis_of(layer, r) for r in (recipe, plain))
    factor = 1 + strength * (layer.statistics.mean_phase - 1)
    turn = torch.cat(
        [
            torch.cat([torch.diag_embed(factor.real), torch.diag_embed(-factor.imag)], -1),
            torch.cat([torch.diag_embed(factor.imag), torch.diag_embed(factor.real)], -1),
        ],
        -2,
    )
    assert torch.allclose(folded.query_nope, unfolded.query_nope @ turn)
    assert torch.equal(folded.query_rope, unfolded.query_rope)
    assert torch.equal(folded.key_nope, unfolded.key_nope)
