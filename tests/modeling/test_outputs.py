"""Outputs beside logits, and inputs that are refused: what the source gives, the model gives or refuses by name."""

import pytest
import torch

from mha2mla.modeling import LatentCache
from tests.modeling import models


@pytest.fixture
def padded():
    return models.padded(12, 9)


@pytest.fixture(params=models.BUILDS)
def build(request):
    return models.BUILDS[request.param]


def eager(model):
    model.set_attn_implementation("eager")
    return model


class TestAttentions:
    @pytest.mark.parametrize("case", ["llama", "qwen3", "mistral-sliding"])
    @torch.no_grad()
    def test_are_the_sources(self, case, padded, build):
        source = eager(models.source_model(case))
        model = build(eager(models.full_rank(source)))
        expected = source(**padded, output_attentions=True, use_cache=False).attentions
        for keys in ({"use_cache": False}, {"use_cache": True}):
            attentions = model(**padded, output_attentions=True, **keys).attentions
            assert len(attentions) == len(expected) == 2
            for ours, theirs in zip(attentions, expected, strict=True):
                assert models.relative_error(ours[:, :, 3:], theirs[:, :, 3:]) < models.TOLERANCE

    @torch.no_grad()
    def test_of_a_step_over_a_cache(self, padded):
        """The absorbed form has none: a step that is asked for them is expanded."""
        model = eager(models.mla_model())
        ids, mask = padded.values()
        expected = model(**padded, output_attentions=True, use_cache=False).attentions[1][:, :, 11:]
        for max_cache_len in (None, 16):
            cache = LatentCache(model.config, max_cache_len=max_cache_len, page_size=16)
            model(ids[:, :11], attention_mask=mask[:, :11], past_key_values=cache)
            out = model(ids[:, 11:], attention_mask=mask, past_key_values=cache, output_attentions=True)
            assert models.relative_error(out.attentions[1][..., :12], expected) < models.TOLERANCE
            assert not out.attentions[1][..., 12:].any()
        out = model.generate(ids, max_new_tokens=3, output_attentions=True, return_dict_in_generate=True)
        assert [len(step) for step in out.attentions] == [2, 2, 2]

    def test_are_refused_where_nothing_computes_them(self, padded, build):
        model = build(models.mla_model())
        with pytest.raises(ValueError, match="output_attentions is True with attn_implementation 'sdpa'; expected 'ea"):
            model(**padded, output_attentions=True)
        assert model(**padded).attentions is None

    def test_the_config_may_ask_for_them(self, padded, build):
        model = build(eager(models.mla_model()))
        model.config.output_attentions = True
        assert len(model(**padded).attentions) == 2

    def test_while_checkpointing(self, padded, build):
        model = build(eager(models.mla_model())).train()
        model.gradient_checkpointing_enable()
        out = model(**padded, labels=padded["input_ids"], output_attentions=True)
        out.loss.backward()
        assert len(out.attentions) == 2


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe"])
class TestRouters:
    def test_loss_is_the_sources(self, case, padded, build):
        source = models.source_model(case, router_aux_loss_coef=0.5)
        model = build(models.full_rank(source))
        inputs = {**padded, "labels": padded["input_ids"], "use_cache": False}
        without = model(**inputs).loss
        for keys in ({}, {"attention_mask": None}):
            expected = source(**{**inputs, **keys}, output_router_logits=True)
            out = model(**{**inputs, **keys}, output_router_logits=True)
            torch.testing.assert_close(out.loss, expected.loss)
            torch.testing.assert_close(out.aux_loss, expected.aux_loss)
            assert len(out.router_logits) == len(expected.router_logits) == 2
            for ours, theirs in zip(out.router_logits, expected.router_logits, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert (out.loss - without).abs() > 0.1
        out.loss.backward()
        source(**{**inputs, "attention_mask": None}, output_router_logits=True).loss.backward()
        weight = "model.layers.1.mlp.gate.weight"
        assert models.relative_error(model.get_parameter(weight).grad, source.get_parameter(weight).grad) < 1e-3

    @torch.no_grad()
    def test_of_a_step_over_a_cache(self, case, padded):
        """The loss is that of the step's own tokens, padding left out."""
        model = models.full_rank(models.source_model(case))
        ids, mask = padded.values()
        model.config.output_router_logits = True
        losses = []
        for max_cache_len in (None, 16):
            cache = LatentCache(model.config, max_cache_len=max_cache_len, page_size=16)
            model(ids[:, :2], attention_mask=mask[:, :2], past_key_values=cache)
            out = model(ids[:, 2:], attention_mask=mask, past_key_values=cache)
            assert out.router_logits[0].shape[0] == 2 * 10
            losses.append(out.aux_loss)
        torch.testing.assert_close(*losses)
        model.model.config.output_router_logits = model.model.config.output_hidden_states = True
        out = model(ids, output_router_logits=False, output_hidden_states=False)
        assert getattr(out, "router_logits", None) is None and out.hidden_states is None


@torch.no_grad()
def test_hidden_states_are_the_sources(padded, build):
    """Asked for in the call, by the config, and of a step over a cache."""
    source = models.source_model("qwen3")
    model = build(models.full_rank(source))
    expected = source(**padded, output_hidden_states=True).hidden_states
    called = model(**padded, output_hidden_states=True).hidden_states
    assert model(**padded).hidden_states is None
    model.config.output_hidden_states = True
    ids, mask = padded.values()
    cache = model(ids[:, :11], attention_mask=mask[:, :11]).past_key_values
    step = model(ids[:, 11:], attention_mask=mask, past_key_values=cache).hidden_states
    for found, start in ((called, 3), (model(**padded).hidden_states, 3), (step, 11)):
        assert len(found) == len(expected) == 3
        for ours, theirs in zip(found, expected, strict=True):
            assert models.relative_error(ours[:, start - 12 :], theirs[:, start:]) < models.TOLERANCE
    assert not model(**padded, output_hidden_states=False).hidden_states
    assert not isinstance(model(**padded, return_dict=False), dict)
    made = model.generate(**padded, max_new_tokens=3, return_dict_in_generate=True, output_hidden_states=True)
    assert [len(each) for each in made.hidden_states] == [3, 3, 3]


def test_loss_counts_items_of_the_batch(padded, build):
    """``num_items_in_batch``, as a trainer gives it that accumulates gradients."""
    source = models.source_model("llama")
    labels = padded["input_ids"].clone()
    labels[1, :4] = -100  # padding, and the token behind it
    given = {**padded, "labels": labels}
    for keys in ({}, {"num_items_in_batch": 7}):
        torch.testing.assert_close(build(models.full_rank(source))(**given, **keys).loss, source(**given, **keys).loss)


def test_a_model_without_routers_has_no_router_loss(padded, build):
    out = build(models.mla_model())(**padded, output_router_logits=True)
    assert "aux_loss" not in out and "router_logits" not in out


def test_inputs_are_given_once(padded, build):
    model = build(models.mla_model())
    with pytest.raises(ValueError, match="input_ids and inputs_embeds: neither given; expected exactly one"):
        model()
    with pytest.raises(ValueError, match="input_ids and inputs_embeds: both given"):
        model(**padded, inputs_embeds=torch.zeros(2, 12, 48))


@pytest.mark.parametrize("case", ["per-group", "latent"])
@torch.no_grad()
def test_forward_batch_under_autocast(case):
    """Projections in bfloat16, attention in the cache's dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        model = models.mla_model(case, qk_rope_head_dim=8).to(dtype)
        ids = models.tokens(1, 9)[0]
        logits = {}
        for enabled in (False, True):
            pages = model.paged_cache(num_pages=4, page_size=16)
            sequence = pages.open()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                parts = [models.batch_logits(model, pages, {sequence: part})[sequence] for part in (ids[:8], ids[8:])]
            logits[enabled] = torch.cat(parts)
        assert models.relative_error(logits[True], logits[False]) < 0.05


@pytest.mark.parametrize("case", ["per-group", "latent"])
@torch.no_grad()
def test_decoding_under_autocast(case):
    model = models.mla_model(case, qk_rope_head_dim=8)
    ids = models.tokens(2, 12)
    expected = model(ids, use_cache=False).logits[:, 10:]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounding = models.relative_error(model(ids, use_cache=False).logits[:, 10:], expected)
    for form in ("absorbed", "expanded"):
        model.config.attention_backend = models.FORMS[form]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cache = model(ids[:, :10]).past_key_values
            logits = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in (10, 11)]
        assert cache.layers[0].dtype == torch.bfloat16
        assert models.relative_error(torch.cat(logits, dim=1), expected) < 2 * rounding < 0.2
