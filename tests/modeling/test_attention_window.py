"""A window of the user's, with attention sinks: every way of calling a model against explicit masks in float64."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from mha2mla.modeling import LatentCache, StaleBatchError
from tests.few import each
from tests.modeling import models

# Between ways of computing the same in float64, where transformers' norms round to float32: half a unit is 6e-8.
TOLERANCE = 1e-6
CASES = ("per-group", "shared", "no nope", "per layer", "some sliding", "latent", "kept some sliding")
LIMITS = ((11, 0), (10, 3), (30, 4))


def model_in_float64(case: str, window: int | None = None, sinks: int = 0):
    return models.mla_model(case, attention_window=window, num_sink_tokens=sinks).double()


def allowed(starts: list[int], length: int, window: int | None, sinks: int) -> torch.Tensor:
    """[B, 1, length, length] bool, token by token."""
    mask = torch.zeros(len(starts), 1, length, length, dtype=torch.bool)
    for row, start in enumerate(starts):
        for query in range(start, length):
            for token in range(start, query + 1):
                mask[row, 0, query, token] = window is None or query - token < window or token - start < sinks
    return mask


@torch.no_grad()
def masked(model, ids: torch.Tensor, starts: list[int], window: int, sinks: int) -> torch.Tensor:
    """Logits of the same model without the window, under masks; layers with a window of their own keep it."""
    config = model.config
    asked, implementation = (config.attention_window, config.num_sink_tokens), config._attn_implementation
    model.set_attn_implementation("sdpa")
    model.config.num_sink_tokens, model.config.attention_window = 0, None
    mask = allowed(starts, ids.shape[1], window, sinks)
    if model.config.layer_types and "sliding_attention" in model.config.layer_types:
        mask = {"full_attention": mask, "sliding_attention": allowed(starts, ids.shape[1], models.WINDOW, 0)}
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    model.config.attention_window, model.config.num_sink_tokens = asked
    model.set_attn_implementation(implementation)
    return logits


def seen_errors(logits: torch.Tensor, expected: torch.Tensor, starts: list[int]) -> float:
    """The largest relative error of a row, padding left out."""
    return max(models.relative_error(logits[i, s:], expected[i, s:]) for i, s in enumerate(starts))


@each("case, limits, form", CASES, LIMITS, models.FORMS)
@torch.no_grad()
def test_prefill_chunks_and_decode_equal_masks(case, limits, form):
    """Left-padded rows; a prompt, single tokens, drafts, and chunks too long to absorb."""
    model, starts = model_in_float64(case, *limits), [0, 5, 13]
    model.config.attention_backend = models.FORMS[form]
    ids = models.tokens(3, 75)
    expected, mask = masked(model, ids, starts, *limits), models.left_mask(75, *starts)
    assert models.relative_error(expected[0], masked(model, ids, starts, 200, 0)[0]) > 1e-3, "the window is seen"
    assert seen_errors(model(ids, attention_mask=mask, use_cache=False).logits, expected, starts) < TOLERANCE
    for static in (False, True):
        cache = LatentCache(model.config, 80 if static else None, 16)
        logits = models.logits_of_calls(model, cache, ids, (21, 22, 23, 27, 52, 53, 75), mask)
        assert seen_errors(logits, expected, starts) < TOLERANCE


@each("case, limits", CASES, LIMITS)
@torch.no_grad()
def test_batches_equal_masks(case, limits):
    model = model_in_float64(case, *limits)
    ids = models.tokens(2, 90)
    expected = masked(model, ids, [0, 0], *limits)
    cache = model.paged_cache(num_pages=16, page_size=16)
    steps = [{0: one, 1: two} for one, two in ((5, 40), (1, 30), (3, 1), (50, 9), (31, 10))]
    assert max(models.batch_errors(model, cache, ids, expected, steps)) < TOLERANCE


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
@pytest.mark.parametrize("case", ["per-group", "latent some sliding"])
@torch.no_grad()
def test_other_caches_and_implementations(case, kind, attention):
    model, starts = model_in_float64(case, 10, 3), [0, 6]
    model.set_attn_implementation(attention)
    ids = models.tokens(2, 40)
    expected, mask = masked(model, ids, starts, 10, 3), models.left_mask(40, *starts)
    if kind == "none":
        logits = model(ids, attention_mask=mask, use_cache=False).logits
    else:
        made = {"dynamic": DynamicCache, "static": lambda: StaticCache(model.model.config, max_cache_len=48)}
        logits = models.logits_of_calls(model, made[kind](), ids, (25, 26, 40), mask)
    assert seen_errors(logits, expected, starts) < TOLERANCE


@pytest.mark.parametrize("build", models.BUILDS)
@pytest.mark.parametrize("case", ["per-group", "latent"])
def test_a_static_cache_of_transformers_without_padding(case, build):
    """Its prompt has no mask, and more keys than queries."""
    made = models.BUILDS[build](models.mla_model(case, attention_window=10, num_sink_tokens=3))
    ids, options = models.tokens(2, 24), {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    cache = StaticCache(made.model.config, max_cache_len=40)
    found = made.generate(ids, past_key_values=cache, **options)
    assert torch.equal(found, made.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("hidden", [-1e4, -1e9, -torch.inf, torch.finfo(torch.float32).min])
@torch.no_grad()
def test_masks_that_are_added_to_scores(hidden):
    """By whatever number they hide tokens, the window ends with each query's own."""
    model, ids = models.mla_model("per-group", attention_window=7, num_sink_tokens=2), models.tokens(2, 20)
    mask = torch.zeros(2, 1, 20, 20).masked_fill(~allowed([0, 0], 20, None, 0), hidden)
    expected = model(ids, use_cache=False).logits
    for use_cache in (False, True):
        logits = model(ids, attention_mask=mask, use_cache=use_cache).logits
        assert models.relative_error(logits, expected) < models.TOLERANCE


def test_gradients_are_those_of_the_mask():
    model = model_in_float64("per-group", 7, 2)
    ids = models.tokens(2, 30)
    weight = model.model.layers[0].self_attn.kv_a_proj.weight
    (found,) = torch.autograd.grad(model(ids, use_cache=False).logits.square().sum(), weight)
    model.config.num_sink_tokens, model.config.attention_window = 0, None
    logits = model(ids, attention_mask=allowed([0, 0], 30, 7, 2), use_cache=False).logits
    (expected,) = torch.autograd.grad(logits.square().sum(), weight)
    assert models.relative_error(found, expected) < TOLERANCE


def greedy(model, ids: torch.Tensor, starts: list[int], window: int, sinks: int, new: int) -> torch.Tensor:
    for _ in range(new):
        ids = torch.cat((ids, masked(model, ids, starts, window, sinks)[:, -1:].argmax(-1)), 1)
    return ids


@each("case, backend", ["per-group", "latent", "some sliding", "kept no nope"], [None, "mla_reference", "mla_expanded"])
def test_generate_takes_a_window_for_one_call(case, backend):
    """And says what the masked model says, whatever serves it; the config, and other calls, stay as they are."""
    model, starts = model_in_float64(case), [0, 4]
    model.config.attention_backend = backend
    ids, mask = models.tokens(2, 24), models.left_mask(24, *starts)
    expected = greedy(model, ids, starts, 12, 3, 14)
    options = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False}
    limits = {"attention_window": 12, "num_sink_tokens": 3}
    for further in ({}, {"cache_implementation": "static"}, {"prefill_chunk_size": 10}):
        assert torch.equal(model.generate(ids, **options, **limits, **further), expected)
    assert (model.config.attention_window, model.config.num_sink_tokens) == (None, 0)
    assert not torch.equal(model.generate(ids, **options), expected)
    model.config.attention_window, model.config.num_sink_tokens = 12, 3
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, **options, cache_implementation="dynamic"), expected)


def test_a_cache_that_is_brought_keeps_its_window():
    model = model_in_float64("per-group")
    ids = models.tokens(1, 20)
    windowed = models.mla_config("per-group", attention_window=6, num_sink_tokens=2)
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = greedy(model, ids, [0], 6, 2, 4)
    assert torch.equal(model.generate(ids, past_key_values=LatentCache(windowed), **options), expected)
    limits = {"attention_window": 6, "num_sink_tokens": 2}
    assert torch.equal(model.generate(ids, past_key_values=LatentCache(windowed), **options, **limits), expected)
    for cache in (LatentCache(model.config), DynamicCache()):
        with pytest.raises(
            ValueError, match=f"attention_window is 6, num_sink_tokens is 2, .* for {type(cache).__name__};"
        ):
            model.generate(ids, past_key_values=cache, **options, **limits)
    with pytest.raises(ValueError, match="attention_window is 6, num_sink_tokens is 2, .* for no cache;"):
        model.generate(ids, use_cache=False, **options, **limits)


def test_refusals_name_the_key():
    with pytest.raises(ValueError, match="attention_window is 0; expected at least 1"):
        models.mla_config("per-group", attention_window=0)
    with pytest.raises(ValueError, match="num_sink_tokens is 4 with attention_window=None"):
        models.mla_config("per-group", num_sink_tokens=4)
    with pytest.raises(ValueError, match="attention_window is 8; expected at least 9, the sliding_window of layer 1"):
        models.mla_config("some sliding", attention_window=8)
    config = models.mla_config("some sliding", attention_window=9, num_sink_tokens=4)
    assert [config.layer_attention_window(index) for index in range(2)] == [(9, 4), (9, 0)]
    for value in ([4], "4", 4.0, True):
        with pytest.raises(ValueError, match="attention_window is .*; expected at least 1"):
            models.mla_config(attention_window=value)
    with pytest.raises(ValueError, match="num_sink_tokens is -1; expected at least 0"):
        config.num_sink_tokens = -1
    model = model_in_float64("per-group", 9, 4)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="attn_implementation is 'flex_attention' with attention_window=9 and num_sin"):
        model(models.tokens(1, 12), use_cache=False)


@pytest.mark.parametrize("case", ["sliding", "some sliding", "latent some sliding"])
@torch.no_grad()
def test_a_model_loaded_without_its_window(case, tmp_path):
    """As the refusal of a narrower one advises; and again without it where it is saved so."""
    model, ids = models.mla_model(case), models.tokens(1, 30)
    model.save_pretrained(tmp_path / "with")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "with", sliding_window=200)
    expected = loaded(ids, use_cache=False).logits
    AutoModelForCausalLM.from_pretrained(tmp_path / "with", sliding_window=None).save_pretrained(tmp_path / "without")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "without", attention_window=200)
    for made in (loaded, models.as_file(loaded)):
        assert made.config.attention_window == 200
        for cache in (None, DynamicCache(config=made.config), made._new_cache()):
            stops = (30,) if cache is None else (15, 16, 22, 30)
            logits = models.logits_of_calls(made, cache, ids, stops)
            assert models.relative_error(logits, expected) < models.TOLERANCE
    assert models.relative_error(model(ids, use_cache=False).logits, expected) > 1e-3, "the window is seen"


def test_the_report_tells_of_the_window():
    model = models.mla_model("some sliding", attention_window=30, num_sink_tokens=4)
    assert [layer.sliding_window for layer in model.attention_report()] == [30, models.WINDOW]
    (prompt,) = {(layer.form, layer.backend) for layer in model.attention_report(query_length=10_000)}
    assert prompt == ("expanded", "mla_reference")


@torch.no_grad()
def test_tokens_between_sinks_and_window_are_not_read():
    """They are NaN there, in decodes and chunks of prompts."""
    model = model_in_float64("per-group", 20, 4)
    model.config.attention_backend = "mla_reference"
    ids = models.tokens(1, 120)
    expected, cache = masked(model, ids, [0], 20, 4), LatentCache(model.config, page_size=16)
    model(ids[:, :90], past_key_values=cache)
    for layer in cache.layers:
        for tensor in layer.tensors.values():
            tensor.flatten(0, 1)[4 : 90 - 19] = torch.nan
    found = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((90, 91), (91, 95), (95, 120))]
    assert models.relative_error(torch.cat(found, 1), expected[:, 90:]) < TOLERANCE


@pytest.mark.parametrize("case", ["per-group", "latent"])
@torch.no_grad()
def test_pages_that_nobody_sees_are_given_back(case):
    """A stream of any length takes a bounded number of pages; a fork keeps its own."""
    model = model_in_float64(case, 30, 4)
    ids = models.tokens(2, 200)
    expected = masked(model, ids, [0, 0], 30, 4)
    cache, done = model.paged_cache(num_pages=14, page_size=16), 0
    first, second, fork = cache.open(), cache.open(), None
    for count in (40, 1, 3, 30, 1, 25, 12, 20, 8, 30, 9, 20):
        batch = cache.extend({first: count, second: count})
        new = [ids[row, done : done + count] for row in range(2)]
        step = cache.step(batch)
        logits = batch.unflatten(model.forward_batch(batch.flatten(new), step, all_logits=True))
        for row, mine in enumerate(logits):
            assert models.relative_error(mine, expected[row, done : done + count]) < TOLERANCE
        done += count
        if done == 74:
            fork = cache.fork(first)
        gave = cache.give_back(first), cache.give_back(second)
        assert sum(page >= 0 for page in cache.allocator.pages(first)) <= 1 + 3
        if done == 74:
            assert gave == (1, 1) and cache.allocator.pages(fork)[1] >= 0
            with pytest.raises(StaleBatchError, match="was extended, cropped or forked"):
                step.check()
            cache.close(fork)
    assert done == 199 and cache.allocator.num_free == 14 - 8
    with pytest.raises(ValueError, match="length is 150; expected at least 189: tokens before 160 were given back"):
        cache.crop(first, 150)
    cache.crop(first, 190)
    assert cache.give_back(first) == 0
    cache.close(first)
    cache.close(second)
    assert cache.allocator.num_free == 14


def test_a_layer_that_sees_everything_keeps_its_pages():
    config = models.mla_config("some sliding")
    cache = models.mla_model("some sliding").paged_cache(num_pages=9, page_size=16)
    sequence = cache.open()
    cache.extend({sequence: 100})
    assert config.layer_attention_window(0) == cache.limits == (None, 0) and cache.give_back(sequence) == 0
    with pytest.raises(ValueError, match="first and stop are 3 and 101; expected 0 to 100, ascending"):
        cache.allocator.give_back(sequence, 3, 101)
    assert cache.allocator.give_back(sequence, 3, 64) == 3 and cache.allocator.pages(sequence)[:5].count(-1) == 3
    cache.close(sequence)
    assert cache.allocator.num_free == 9
