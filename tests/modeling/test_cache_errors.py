"""Errors in the middle of what a LatentCache does in all of its layers: the cases that random ones meet seldom."""

import copy

import pytest
import torch
from transformers import LlamaConfig

from mha2mla.modeling import LatentCache
from tests.modeling import models
from tests.modeling.test_cache_machine import contents, same
from tests.ops import OutOfMemory, RaisingAt


def broken_off(action, cache, stride=1) -> int:
    """At which allocation ``action`` could not be broken off any more; the cache was as before each time."""
    for at in range(0, 1000, stride):
        before = contents(cache)
        try:
            with RaisingAt(at, allocating=True):
                action()
            return at
        except OutOfMemory:
            assert same(before, contents(cache)), f"broken off at allocation {at}"
    raise AssertionError("never came through")


@pytest.mark.parametrize("stops", [(40, 41), (20, 41)])
@torch.no_grad()
def test_growth_interrupted_between_layers(stops):
    """Layers share the places of new tokens: with other numbers of pages each, they would write to other sequences."""
    model = models.mla_model("per layer")
    ids = models.tokens(3, 60)
    expected = model(ids, use_cache=False).logits
    for at in range(0, 60):
        cache = LatentCache(model.config, page_size=16)
        model(ids[:, :16], past_key_values=cache)
        with pytest.raises(OutOfMemory), RaisingAt(at, allocating=True):
            model(ids[:, 16:20], past_key_values=cache)
        if len({layer.max_pages for layer in cache.layers}) > 1:
            break
    else:
        raise AssertionError("no such error")
    # Three pages: of one page twice as many would be too few, of two pages four are taken. Two, which some layers have.
    for stop in stops:
        start = int(cache.get_seq_length())
        logits = model(ids[:, start:stop], past_key_values=cache).logits
        assert models.relative_error(logits, expected[:, start:stop]) < models.TOLERANCE


@torch.no_grad()
def test_a_step_whose_loss_fails_has_not_happened():
    """Counting is the last thing that a step does."""
    model = models.mla_model()
    for cached in (0, 9):
        cache = LatentCache(model.config)
        if cached:
            model(models.tokens(2, cached), past_key_values=cache)
        before = contents(cache)
        with pytest.raises((ValueError, RuntimeError)):
            model(models.tokens(2, 3), labels=models.tokens(2, 7), past_key_values=cache)
        assert same(before, contents(cache))


@pytest.mark.parametrize("max_cache_len", [None, 32])
def test_call_with_gradients_counts_in_all_or_none(max_cache_len):
    """There the layers count by themselves; also in a cache that was used and reset."""
    model = models.mla_model("per layer")
    cache = LatentCache(model.config, max_cache_len=max_cache_len)
    for _ in range(2):
        ids = models.tokens(2, 5)
        assert broken_off(lambda ids=ids: model(ids, past_key_values=cache), cache, 9) > 50
        assert cache.get_seq_length() == 5
        cache.reset()


@torch.no_grad()
def test_static_cache_that_did_not_fit_fits_fewer():
    model = models.mla_model()
    cache = LatentCache(model.config, max_cache_len=32)
    with pytest.raises(OutOfMemory), RaisingAt(20, allocating=True):
        model(models.tokens(8, 5), past_key_values=cache)
    assert cache.nbytes == 0
    model(models.tokens(2, 5), past_key_values=cache)
    assert cache.batch_size == 2


def test_what_inference_mode_cached_goes_on_outside():
    """Tensors that it makes may not change outside of it; the cache's are none of those."""
    model = models.mla_model()
    ids = models.tokens(2, 20)
    for max_cache_len in (None, 40):
        cache = LatentCache(model.config, max_cache_len=max_cache_len, page_size=16)
        with torch.inference_mode():
            model(ids[:, :10], past_key_values=cache)
            model(ids[:, 10:11], past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.batch_select_indices(torch.tensor([1, 0]))
        with torch.no_grad():
            cache.crop(-1)
            logits = model(ids[:, 10:], past_key_values=cache).logits
            expected = model(ids, use_cache=False).logits[:, 10:]
        assert models.relative_error(logits, expected) < models.TOLERANCE
        cache.crop(-3)
        prompt = ids[:, :18]
        out = model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert torch.equal(out, model.generate(prompt, use_cache=False, max_new_tokens=4, do_sample=False))
    pages = model.paged_cache(num_pages=4, page_size=16)
    assert not any(tensor.is_inference() for tensors in pages.tensors for tensor in tensors.values())
    with torch.inference_mode():
        pages = model.paged_cache(num_pages=4, page_size=16)
    assert not any(tensor.is_inference() for tensors in pages.tensors for tensor in tensors.values())


class TestGradients:
    """A LatentCache keeps values, not their history."""

    def test_gradients_without_their_history_raise(self):
        model = models.mla_model()
        ids = models.tokens(2, 12)
        cache = model(ids[:, :8]).past_key_values
        for labels in (None, ids[:, 8:]):
            out = model(ids[:, 8:], labels=labels, past_key_values=cache, output_hidden_states=True)
            with pytest.raises(ValueError, match="past_key_values was a LatentCache .* expected a DynamicCache"):
                (out.logits.sum() if labels is None else out.loss).backward()
            with pytest.raises(ValueError, match="past_key_values was a LatentCache"):
                out.hidden_states[1].sum().backward()
            cache.crop(-4)
        assert all(parameter.grad is None for parameter in model.parameters() if parameter is not model.lm_head.weight)

    def test_embeddings_as_inputs_count(self):
        model = models.mla_model().requires_grad_(False)
        embeddings = model.get_input_embeddings()(models.tokens(1, 6))
        cache = model(inputs_embeds=embeddings[:, :5]).past_key_values
        logits = model(inputs_embeds=embeddings[:, 5:].requires_grad_(), past_key_values=cache).logits
        with pytest.raises(ValueError, match="past_key_values was a LatentCache"):
            logits.sum().backward()


@torch.no_grad()
def test_a_cache_of_another_models_config_is_refused():
    layouts = {case: models.mla_model(case) for case in ("latent", "per-group")}
    scaled = models.mla_config("per-group", softmax_scale=0.9)
    for case, config in (
        ("latent", layouts["per-group"].config),
        ("per-group", layouts["latent"].config),
        ("per-group", scaled),
        ("per-group", models.mla_config("per-group", num_hidden_layers=1)),
    ):
        cache = LatentCache(config)
        with pytest.raises(ValueError, match="past_key_values (was made by another model's config|has 1 layers)"):
            layouts[case](models.tokens(1, 5), past_key_values=cache)
        assert cache.is_empty
    cache = LatentCache(layouts["latent"].config.with_options(rotary_key_cache="bfloat16", attention_window=20))
    layouts["latent"](models.tokens(1, 5), past_key_values=cache)


def test_a_config_of_no_converted_model_is_refused():
    for config, kind in ((None, "NoneType"), (LlamaConfig(), "LlamaConfig")):
        with pytest.raises(ValueError, match=f"config is a {kind}; expected a converted model's"):
            LatentCache(config)


@torch.no_grad()
def test_only_an_empty_cache_of_another_config_is_compared_with_the_model(monkeypatch):
    model, calls, check = models.mla_model(), [], LatentCache.check_model
    monkeypatch.setattr(LatentCache, "check_model", lambda *given: calls.append(check(*given)))
    for config, times in ((model.config, 0), (copy.deepcopy(model.config), 1)):
        model.generate(models.tokens(1, 5), max_new_tokens=6, do_sample=False, past_key_values=LatentCache(config))
        assert len(calls) == times
