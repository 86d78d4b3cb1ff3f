"""Beyond the length that a conversion was made for the model says so: once, in every way to run it, without a sync."""

import warnings

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from mha2mla.modeling import LatentCache
from mha2mla.modeling.model import UncalibratedLengthWarning
from tests.folders import edit_config
from tests.modeling import models

LIMIT = 12


def said(run) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            run()
    return [str(each.message) for each in caught if each.category is UncalibratedLengthWarning]


def generate(model, prompt, new, **keys):
    return lambda: model.generate(models.tokens(1, prompt), max_new_tokens=new, min_new_tokens=new, **keys)


def batch_of(model, cache, lengths):
    def run():
        batch = cache.extend({cache.open(): length for length in lengths})
        model.forward_batch(models.tokens(1, sum(lengths))[0], cache.step(batch))

    return run


@pytest.mark.parametrize(("case", "loss"), [("per-group", "much worse"), ("latent", "lost no more beyond that length")])
@pytest.mark.parametrize("use_cache", [False, True])
def test_first_sequence_beyond_the_limit_is_warned_of(use_cache, case, loss):
    model = models.mla_model(case, calibrated_length=LIMIT)
    assert said(lambda: model(models.tokens(2, LIMIT), use_cache=use_cache)) == []
    (message,) = said(lambda: model(models.tokens(2, LIMIT + 1), use_cache=use_cache))
    assert "a sequence of 13 tokens: this checkpoint was calibrated on at most 12" in message
    assert loss in message
    assert said(lambda: model(models.tokens(2, LIMIT + 2), use_cache=use_cache)) == []


def test_sequence_that_grows_beyond_the_limit():
    model = models.mla_model(calibrated_length=LIMIT)
    assert said(generate(model, 8, LIMIT - 8)) == []
    (message,) = said(generate(model, 8, LIMIT))
    assert "a sequence of 13 tokens" in message  # the very first one
    assert said(generate(model, 8, LIMIT)) == []


@pytest.mark.parametrize("kind", [DynamicCache, LatentCache])
def test_what_a_callers_cache_holds_counts(kind):
    model = models.mla_model(calibrated_length=LIMIT)
    cache = kind(config=model.config)
    assert said(lambda: model(models.tokens(1, LIMIT), past_key_values=cache)) == []
    assert len(said(lambda: model(models.tokens(1, 1), past_key_values=cache))) == 1


def test_a_static_cache_counts_as_what_it_is_made_for():
    """Its length is on the device, where nobody looks."""
    model = models.mla_model(calibrated_length=LIMIT)
    short, long = (LatentCache(model.config, max_cache_len=length) for length in (LIMIT, LIMIT + 1))
    assert said(lambda: model(models.tokens(1, 2), past_key_values=short)) == []
    assert len(said(lambda: model(models.tokens(1, 2), past_key_values=long))) == 1


def test_ragged_batch_counts_its_longest_sequence():
    model = models.mla_model(calibrated_length=LIMIT)
    cache = model.paged_cache(num_pages=16, page_size=16)
    assert said(batch_of(model, cache, [LIMIT, 3, LIMIT])) == []
    (message,) = said(batch_of(model, cache, [2, LIMIT + 3, 1]))
    assert "a sequence of 15 tokens" in message


def test_no_warning_without_calibrated_length():
    model = models.mla_model()
    assert said(generate(model, 40, 4)) == []
    assert said(batch_of(model, model.paged_cache(num_pages=16, page_size=16), [60])) == []


def test_the_limit_is_that_of_the_config_now():
    model = models.mla_model(calibrated_length=LIMIT)
    model.config.calibrated_length = None
    assert said(lambda: model(models.tokens(1, LIMIT + 1))) == []
    model.config.calibrated_length = LIMIT + 1
    assert len(said(lambda: model(models.tokens(1, LIMIT + 2)))) == 1


def test_a_compiled_step_stays_one_graph(fresh_dynamo):
    model = models.mla_model(calibrated_length=LIMIT)
    step = torch.compile(model, backend="eager", fullgraph=True)
    assert said(lambda: step(models.tokens(1, LIMIT + 5), use_cache=False)) == []


def test_the_config_keeps_it_and_older_ones_have_none(tmp_path):
    models.mla_config(calibrated_length=LIMIT).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).calibrated_length == LIMIT
    edit_config(tmp_path, calibrated_length=...)
    assert AutoConfig.from_pretrained(tmp_path).calibrated_length is None
    with pytest.raises(ValueError, match="calibrated_length is 0; expected None or a number of tokens >= 1"):
        models.mla_config(calibrated_length=0)
