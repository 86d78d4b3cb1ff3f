"""generate(): greedy, sampled, beams, padded batches; growing, static and stock caches; the same tokens from all."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from mha2mla.modeling import LatentCache
from tests.few import each
from tests.modeling import models

LAYOUTS = ("per-group", "latent")


@each("case, form", models.GEOMETRIES, models.FORMS)
def test_greedy_tokens_of_every_form_and_cache(case, form):
    """Against no cache at all; windows are left behind on the way."""
    model, inputs = models.mla_model(case), models.padded(12, 7, 1)
    options = {"max_new_tokens": 14, "do_sample": False}
    expected = model.generate(**inputs, use_cache=False, **options)
    model.config.attention_backend = models.FORMS[form]
    for kind in (None, "static"):
        assert torch.equal(model.generate(**inputs, cache_implementation=kind, **options), expected), kind
    for cache in (
        DynamicCache(config=model.config),
        StaticCache(config=model.config, max_cache_len=26),
        LatentCache(model.config, page_size=16),
        LatentCache(model.config, max_cache_len=26, page_size=16),
    ):
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **options), expected), cache


@pytest.mark.parametrize("case", ["some sliding", "latent some sliding"])
def test_eight_bit_latents_under_generate(case):
    """The same tokens from a growing and a static cache, one sequence at a time, and where beams are reordered; and
    from ragged batches, which hold the same codes."""
    model = models.mla_model(case, attention_backend="mla_fp8_reference")
    inputs, options = models.padded(11, 6, 2), {"max_new_tokens": 9, "do_sample": False}
    together = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, cache_implementation="static", **options), together)
    for row, length in enumerate((11, 6, 2)):
        alone = model.generate(inputs["input_ids"][row : row + 1, 11 - length :], **options)
        assert torch.equal(alone[0, length:], together[row, 11:])
    beams = {"num_beams": 3, "num_return_sequences": 2, **options}
    expected = model.generate(**inputs, **beams)
    assert torch.equal(model.generate(**inputs, cache_implementation="static", **beams), expected)

    ids, pages = inputs["input_ids"][:1], model.paged_cache(num_pages=2, page_size=16)
    sequence = pages.open()
    for _ in range(9):
        batch = pages.extend({sequence: ids.shape[1] - pages.allocator.length(sequence)})
        new = ids[0, -batch.num_tokens :]
        ids = torch.cat((ids, model.forward_batch(new, pages.step(batch)).argmax(-1)[None]), dim=1)
    assert torch.equal(ids[0], together[0])


def test_generate_makes_a_latent_cache():
    model = models.mla_model()
    for kind, static in ((None, False), ("dynamic", False), ("static", True)):
        out = model.generate(
            **models.padded(5),
            max_new_tokens=3,
            do_sample=False,
            cache_implementation=kind,
            return_dict_in_generate=True,
        )
        assert isinstance(out.past_key_values, LatentCache)
        assert out.past_key_values.is_compileable is static
        assert int(out.past_key_values.get_seq_length()) == 7
    out = model.generate(**models.padded(5), max_new_tokens=3, use_cache=False, return_dict_in_generate=True)
    assert out.past_key_values is None


def test_an_offloaded_cache_is_left_to_transformers():
    model = models.mla_model()
    arguments: dict = {}
    model._prepare_cache_for_generation(GenerationConfig(cache_implementation="offloaded"), arguments, None, 1, 8)
    assert type(arguments["past_key_values"]) is DynamicCache


MODES = {
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 0.8},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", LAYOUTS)
def test_sampling_and_beams_over_every_cache(case, mode):
    """Beams reorder a cache; samples depend on the seed."""
    model, inputs = models.mla_model(case), models.padded(9, 4)

    def generate(seed: int = 3, **options) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(**inputs, max_new_tokens=12, **MODES[mode], **options)

    expected = generate(use_cache=False)
    assert torch.equal(generate(4, use_cache=False), expected) == (mode == "beams")
    for kind in ("dynamic", "static"):
        assert torch.equal(generate(cache_implementation=kind), expected)
    assert torch.equal(generate(past_key_values=DynamicCache(config=model.config)), expected)


@pytest.mark.parametrize("case", LAYOUTS)
def test_assisted_generation_crops_the_cache(case):
    """Drafts of an assistant that is often wrong, and of prompt lookup; 2 to 8 queries at a time are absorbed."""
    model, assistant = models.mla_model(case), models.mla_model(case)
    ids = models.tokens(1, 12).repeat(1, 2)
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), expected)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=4, **options), expected)


@pytest.mark.parametrize("case", LAYOUTS)
def test_continuing_from_a_cache(case):
    """A second turn over what the first one cached."""
    model = models.mla_model(case)
    ids = models.tokens(1, 10)
    cache = LatentCache(model.config)
    first = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    prompt = torch.cat((first, models.tokens(1, 7)), dim=1)
    # Else generate takes a token that it made itself, if that is the padding token, for padding.
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(prompt, **options)
    assert cache.get_seq_length() == 14
    assert torch.equal(model.generate(prompt, past_key_values=cache, **options), expected)


@pytest.mark.parametrize("case", LAYOUTS)
def test_embeddings_as_prompt(case):
    model = models.mla_model(case)
    ids = models.tokens(2, 8)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)[:, 8:]
    embeddings = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeddings, max_new_tokens=5, do_sample=False), expected)


@pytest.mark.parametrize(("case", "shape"), [("latent", "2 key heads of 14"), ("odd groups", "6 key heads of 8")])
def test_continuous_batching_of_other_widths_is_refused(case, shape):
    model = models.mla_model(case)
    with pytest.raises(ValueError, match=f"layer 0 expands to {shape}; expected 2 of 8 .*: use mha2mla.loop.Loop"):
        model.generate_batch([[5, 6, 7]])
    models.mla_model("per-group").init_continuous_batching()
