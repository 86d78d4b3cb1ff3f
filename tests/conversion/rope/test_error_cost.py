"""What key errors cost: against scores written out, distance by distance."""

import pytest
import torch

from mha2mla.conversion.rope.basis import joint_key_metric, rotate
from tests.conversion.one_layer import Layer, basis_of
from tests.conversion.tiny import Recipe

DISTANCES = (0, 1, 7, 30)


@pytest.mark.parametrize("case", ["llama", "qwen3-biases-yarn", "phi3-partial", "gemma3-mqa-linear"])
@pytest.mark.parametrize("share_fitted", [False, True])
def test_the_cost_is_the_mean_squared_score_error(case, share_fitted):
    """Of errors of all keys, under queries and distances that are drawn independently of one another."""
    layer = Layer(case)
    spec, generator = layer.spec, torch.Generator().manual_seed(2)
    recipe = Recipe(layout="latent", qk_rope_head_dim=8, kv_lora_rank=24, fit_queries=share_fitted)
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
    recipe = Recipe(layout="latent", rope_selection="high", qk_rope_head_dim=16, kv_lora_rank=24)
    basis = basis_of(layer, recipe)
    shares = torch.full((4, 1 << 16), 2.0**-16, dtype=torch.float64)
    metric = joint_key_metric(spec, basis, layer.statistics.query_second_moment, shares)
    scale = metric.diagonal().sqrt()
    metric = (metric / scale / scale[:, None]).abs()
    rope = slice(4 * 16, None)
    same = basis.inv_freq[0].repeat(2) == basis.inv_freq[0].repeat(2)[:, None]
    assert metric[: 4 * 16, rope].max() < 1e-2 and metric[rope, rope][~same].max() < 1e-2
