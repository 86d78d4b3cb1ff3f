"""Gradients: of the expanded form, against the source's; checkpointing; what a latent cache cannot carry is refused."""

import pytest
import torch
from transformers import DynamicCache

from mha2mla.modeling import LatentCache
from tests.modeling import models


def loss_and_gradients(model, ids, **keys):
    model.zero_grad()
    loss = model(ids, labels=ids, **keys).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", ["llama", "qwen3", "mistral-sliding"])
def test_gradients_are_the_sources(case):
    """Full rank: what is not attention has the source's gradients; W_O too, unless it had to take in a bias of W_V."""
    source = models.source_model(case).train()
    model = models.full_rank(source).train()
    ids = models.tokens(2, 14)
    expected_loss, expected = loss_and_gradients(source, ids)
    loss, gradients = loss_and_gradients(model, ids)
    torch.testing.assert_close(loss, expected_loss)
    folded = source.model.layers[0].self_attn.v_proj.bias is not None
    shared = [name for name in expected if ".self_attn." not in name or (name.endswith("o_proj.weight") and not folded)]
    assert len(shared) > 10
    for name in shared:
        assert models.relative_error(gradients[name], expected[name]) < 1e-4, name


@pytest.mark.parametrize("rope_from_latent", [False, True])
@pytest.mark.parametrize("case", ["llama", "qwen3", "mistral-sliding"])
def test_right_padded_batches_have_the_sources_loss(case, rope_from_latent):
    """As data collators pad: behind the tokens, with labels of -100 there."""
    source = models.source_model(case).train()
    model = models.full_rank(source, rope_from_latent=rope_from_latent).train()
    ids, mask = models.tokens(3, 14), torch.ones(3, 14, dtype=torch.long)
    mask[0, 5:], mask[1, 11:] = 0, 0
    batch = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    expected = source(ids, **batch)
    out = model(ids.masked_fill(mask == 0, 7), **batch)
    torch.testing.assert_close(out.loss, expected.loss)
    assert models.relative_error(out.logits[mask == 1], expected.logits[mask == 1]) < models.TOLERANCE
    for each in (expected, out):
        each.loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, source.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
    embeddings = [each.get_input_embeddings().weight.grad for each in (model, source)]
    torch.testing.assert_close(*embeddings, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", models.GEOMETRIES)
def test_every_parameter_learns(case):
    model = models.mla_model(case).train()
    ids = models.tokens(2, 14)
    first, gradients = loss_and_gradients(model, ids)
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients.values())
    still = {name for name, gradient in gradients.items() if not gradient.any()}
    # A constant on un-rotated keys is the same for every token, and softmax does not see it.
    assert still <= {name for name in gradients if name.endswith("proj.bias")}
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimiser.step()
    assert loss_and_gradients(model, ids)[0] < first


@pytest.mark.parametrize("case", ["per-group", "latent"])
def test_gradient_checkpointing(case):
    model = models.mla_model(case).train()
    ids = models.tokens(2, 14)
    expected = loss_and_gradients(model, ids)[1]
    model.gradient_checkpointing_enable()
    gradients = loss_and_gradients(model, ids)[1]
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient)


def test_dropout_of_the_source_is_there():
    model = models.mla_model(attention_dropout=0.5)
    ids = models.tokens(2, 14)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_no_cache_while_training_unless_asked_for():
    model = models.mla_model().train()
    ids = models.tokens(2, 14)
    assert model(ids).past_key_values is None
    assert isinstance(model(ids, use_cache=True).past_key_values, LatentCache)
    assert isinstance(model.eval()(ids).past_key_values, LatentCache)


@pytest.mark.parametrize("case", ["per-group", "latent"])
def test_gradients_pass_one_call_over_a_latent_cache(case):
    model = models.mla_model(case).train()
    ids = models.tokens(2, 14)
    expected = loss_and_gradients(model, ids)[1]
    cache = LatentCache(model.config)
    gradients = loss_and_gradients(model, ids, past_key_values=cache, use_cache=True)[1]
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient)
    with pytest.raises(ValueError, match="past_key_values is a LatentCache .* expected a DynamicCache"):
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    with torch.no_grad():
        model(ids[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("case", ["per-group", *models.LATENT_GEOMETRIES])
def test_gradients_pass_a_stock_cache(case):
    model = models.mla_model(case).train()
    ids = models.tokens(2, 14)
    model(ids).logits[:, 9:].square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    cache = DynamicCache()
    model(ids[:, :9], past_key_values=cache, use_cache=True)
    model(ids[:, 9:], past_key_values=cache, use_cache=True).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert models.relative_error(parameter.grad, expected[name]) < 1e-4, name
