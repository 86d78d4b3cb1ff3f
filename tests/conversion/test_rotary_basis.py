"""Rotary bases commute with RoPE, keep pairs whole, fold the mean phase into the query, and weigh key errors right."""

import pytest
import torch

from mha2mla.conversion import rope as rope_rules
from mha2mla.conversion.layer import joint_key_metric
from mha2mla.conversion.recipe import selections
from mha2mla.conversion.rope import rotate
from mha2mla.conversion.target import LAYOUTS
from tests.conversion import tiny
from tests.conversion.one_layer import Layer, Recipe, basis_of, frequencies, shared_basis

# A fold treats neighbouring frequencies as one: what it mixes commutes only nearly.
EXACT = [name for name in selections("shared") if not name.startswith("rorope-")]
DISTANCES = (0, 1, 7, 30)


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
        query, key = (torch.complex(x[..., :half], x[..., half:]) for x in (query, key))
        return ((query * turn).conj() * key).real.sum(-1)

    for distance in (0, 1, 17):
        expected = score(query, key.repeat_interleave(spec.group_size, 0), spec.inv_freq, distance)
        stacked = key.flatten()
        rotary, nope = (torch.einsum("hed,hd->he", maps, query) for maps in (basis.query_rope, basis.query_nope))
        kept = score(rotary, basis.key_rope[0] @ stacked, basis.inv_freq[0], distance)
        left = (basis.key_nope @ stacked).repeat_interleave(spec.group_size, 0)
        dropped = score(nope, left, spec.inv_freq, distance)
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
    real, imag = torch.diag_embed(factor.real), torch.diag_embed(factor.imag)
    turn = torch.cat([torch.cat([real, -imag], -1), torch.cat([imag, real], -1)], -2)
    assert torch.allclose(folded.query_nope, unfolded.query_nope @ turn)
    assert torch.equal(folded.query_rope, unfolded.query_rope)
    assert torch.equal(folded.key_nope, unfolded.key_nope)


@pytest.mark.parametrize("case", ["llama", "qwen3-biases-yarn", "phi3-partial", "gemma3-mqa-linear"])
@pytest.mark.parametrize("share_fitted", [False, True])
def test_the_cost_is_the_mean_squared_score_error(case, share_fitted):
    """Of errors of all keys, under queries and distances that are drawn independently of one another."""
    layer = Layer(case)
    spec, generator = layer.spec, torch.Generator().manual_seed(2)
    recipe = tiny.Recipe(layout="latent", qk_rope_head_dim=8, kv_lora_rank=24, fit_queries=share_fitted)
    basis = basis_of(layer, recipe)
    heads, kv_heads, d = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    query = torch.randn(heads, 20, d, generator=generator, dtype=torch.float64)
    shares = torch.zeros(heads, 40, dtype=torch.float64)
    shares[:, DISTANCES] = torch.rand(heads, len(DISTANCES), generator=generator, dtype=torch.float64)
    shares /= shares.sum(-1, keepdim=True)
    metric = joint_key_metric(spec, basis, query.mT @ query / 20, shares)
    nope, rotary = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (kv_heads * d, 8))
    error = torch.cat([nope, rotary])
    expected = 0
    for distance in DISTANCES:
        place = torch.tensor([40])  # of the key; the query is so much later
        key = rotate(rotary[None, None], basis.inv_freq, place, spec.attention_factor)[0]
        read = (query @ basis.query_nope.mT) @ nope.view(kv_heads, d, 1).repeat_interleave(spec.group_size, 0)
        turned = query @ basis.query_rope.mT
        turned = rotate(turned, basis.inv_freq, (place + distance).expand(20), spec.attention_factor)
        scores = read[..., 0] + (turned @ key.T)[..., 0]
        expected += (scores.square().mean(-1) * shares[:, distance]).sum()
    assert torch.allclose(error @ metric @ error, expected)
    assert torch.allclose(metric, metric.T)


def test_far_away_only_what_turns_alike_goes_together():
    """Averaged over many turns, errors of pairs of different frequencies, and un-rotated ones, cost apart."""
    layer = Layer("llama", num_key_value_heads=4)
    spec = layer.spec
    recipe = tiny.Recipe(layout="latent", rope_selection="high", qk_rope_head_dim=16, kv_lora_rank=24)
    basis = basis_of(layer, recipe)
    shares = torch.full((4, 1 << 16), 2.0**-16, dtype=torch.float64)
    metric = joint_key_metric(spec, basis, layer.statistics.query_second_moment, shares)
    scale = metric.diagonal().sqrt()
    metric = (metric / scale / scale[:, None]).abs()
    rope = slice(4 * 16, None)
    same = basis.inv_freq[0].repeat(2) == basis.inv_freq[0].repeat(2)[:, None]
    assert metric[: 4 * 16, rope].max() < 1e-2 and metric[rope, rope][~same].max() < 1e-2
