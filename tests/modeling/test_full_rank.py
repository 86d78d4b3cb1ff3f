"""The full-rank MLA model is its source, to rounding, for every family and every trait."""

import pytest
import torch

from tests.few import each
from tests.modeling import models


@pytest.fixture(params=models.BUILDS)
def build(request):
    return models.BUILDS[request.param]


@pytest.mark.parametrize("rope_from_latent", [False, True])
@each("case, implementation", models.SOURCES, ["sdpa", "eager"])
@torch.no_grad()
def test_logits_are_the_sources(case, implementation, rope_from_latent, build):
    """Scale, pairing, and biases, norms, head width, rope scaling, tied embeddings, sliding windows."""
    source = models.source_model(case)
    model = build(models.full_rank(source, rope_from_latent=rope_from_latent))
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == model.model.config._attn_implementation == implementation
    ids = models.tokens(2, 37)
    expected = source(ids).logits
    assert models.relative_error(model(ids, use_cache=False).logits, expected) < 1e-5
    positions = torch.arange(100, 137)[None]
    shifted = model(ids, position_ids=positions, use_cache=False).logits
    assert models.relative_error(shifted, source(ids, position_ids=positions).logits) < 1e-5


@each("case, rope_from_latent", models.SOURCES, [False, True])
def test_greedy_tokens_of_a_padded_batch(case, rope_from_latent, build):
    source = models.source_model(case)
    model = build(models.full_rank(source, rope_from_latent=rope_from_latent))
    options = models.padded(12, 7, 1) | {"max_new_tokens": 12, "do_sample": False}
    expected = source.generate(**options)
    for implementation in ("dynamic", "static"):
        assert torch.equal(model.generate(cache_implementation=implementation, **options), expected)


@pytest.mark.parametrize("case", ["mistral", "mixtral", "qwen3-moe", "gemma3"])  # no value bias, RoPE in bfloat16
@torch.no_grad()
def test_bfloat16_is_the_source_bit_by_bit(case, build):
    """The same products in the same order: rounding, too, is the source's (c is the values, and W_UV copies them).
    From the latent: sums of the same products and zeros, in another order."""
    source, ids = models.source_model(case), models.tokens(2, 20)
    exact = source(ids).logits
    model = build(models.full_rank(source)).to(torch.bfloat16)
    latent = build(models.full_rank(source, rope_from_latent=True)).to(torch.bfloat16)
    rotary = source.model.rotary_emb
    tables = {name: table.clone() for name, table in rotary.named_buffers()}
    source.to(torch.bfloat16)
    for name, table in tables.items():
        setattr(rotary, name, table)  # which .to() rounds in transformers' models, and must not in ours
    expected = source(ids).logits
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    error = models.relative_error(latent(ids, use_cache=False).logits, exact)
    assert error < 2 * models.relative_error(expected, exact)
