"""Attention masks: every one is obeyed or refused, in every form and mode. The uncached forward pass is the oracle."""

import itertools
import random

import pytest
import torch

from mha2mla.modeling import LatentCache
from mha2mla.modeling import cache as cache_module
from tests.few import few
from tests.modeling import models
from tests.modeling.models import TOLERANCE

CASES = ("per-group", "shared", "some sliding", "per layer", "latent", "kept some sliding")
REFUSED = "attention_mask hides tokens between visible ones"


def uncached(model, ids, mask):
    return model(ids, attention_mask=mask, use_cache=False).logits


def assert_same(logits, expected, mask):
    """At the tokens that are no padding themselves; [B, S, ...] each."""
    shown = mask.bool()
    if shown.any():
        assert models.relative_error(logits[shown], expected[shown]) < TOLERANCE


def random_mask(rng: random.Random, batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in mask:
        kind = rng.choice(["full", "left", "right", "hole", "holes", "both", "nothing"])
        if kind in ("left", "both"):
            row[: rng.randrange(length)] = 0
        if kind in ("right", "both"):
            row[rng.randrange(length) :] = 0
        if kind == "hole":
            first = rng.randrange(length)
            row[first : first + rng.randint(1, 4)] = 0
        if kind == "holes":
            row.copy_(torch.tensor([rng.random() < 0.7 for _ in range(length)]))
        if kind == "nothing":
            row.zero_()
    return mask


def has_hole(mask) -> bool:
    """Some row has a zero between ones."""
    return any("0" in "".join(str(int(shown)) for shown in row).strip("0") for row in mask.tolist())


def pieces(rng: random.Random, length: int) -> list[tuple[int, int]]:
    """Where the parts begin and end that a sequence is fed in."""
    stops = [0]
    while stops[-1] < length:
        stops.append(min(length, stops[-1] + rng.choice([1, 1, 1, 1, 2, 3, 8, 9, 12])))
    return list(itertools.pairwise(stops))


def as_given(rng: random.Random, mask, stop: int, cache):
    """As callers hand it over: as long as the tokens are, or longer, by whatever numbers and type."""
    seen = mask[:, :stop]
    longer = rng.choice([0, 0, 3, cache.capacity - stop])
    if longer > 0:
        seen = torch.nn.functional.pad(seen, (0, longer), value=rng.choice([0, 1]))
    return seen.to(rng.choice([torch.long, torch.bool, torch.float32]))


@few("seed", range(40), count=16)
@torch.no_grad()
def test_fuzz_against_the_uncached_forward(seed, monkeypatch):
    """Left and right padding, holes in the prefill and in one-token steps, nothing shown at all; dynamic and static
    caches, eager attention and sdpa; with the host looking at masks, and as on an accelerator, where it does not."""
    rng = random.Random(seed)
    model = models.mla_model(rng.choice(CASES))
    model.set_attn_implementation(rng.choice(["sdpa", "eager"]))
    batch, length = rng.randint(1, 3), rng.randint(4, 26)
    ids, mask = models.tokens(batch, length), random_mask(rng, batch, length)
    expected = uncached(model, ids, mask)
    host_looks = rng.random() < 0.7
    if not host_looks:
        monkeypatch.setattr(cache_module, "host_may_look", lambda mask, query_length: False)
    form = rng.choice(["auto", "auto", "absorbed", "expanded"])
    cache = LatentCache(model.config, max_cache_len=rng.choice([None, 32]), page_size=16)
    for start, stop in pieces(rng, length):
        model.config.attention_backend = models.FORMS[form]
        inputs = {"input_ids": ids[:, start:stop], "attention_mask": as_given(rng, mask, stop, cache)}
        absorbed = form != "expanded" and (start > 0 or form == "absorbed") and stop - start <= 8
        if absorbed and has_hole(mask[:, :stop]) and not host_looks:
            with pytest.raises(RuntimeError, match=REFUSED):
                model(**inputs, past_key_values=cache)
            model.config.attention_backend = "mla_expanded"
        logits = model(**inputs, past_key_values=cache).logits
        assert_same(logits, expected[:, start:stop], mask[:, start:stop])


@pytest.mark.parametrize("max_cache_len", [None, 32])
@torch.no_grad()
def test_a_hole_that_appears_in_a_one_token_step(max_cache_len):
    model = models.mla_model()
    ids, mask = models.tokens(2, 14), torch.ones(2, 14, dtype=torch.long)
    mask[1, 3:6] = 0
    cache = LatentCache(model.config, max_cache_len=max_cache_len)
    model(ids[:, :13], past_key_values=cache)
    expected = LatentCache(model.config)
    model.config.attention_backend = "mla_expanded"
    model(ids[:, :13], past_key_values=expected)
    expected = model(ids[:, 13:], attention_mask=mask, past_key_values=expected).logits
    assert models.relative_error(uncached(model, ids, None)[:, 13:], expected) > 0.05
    model.config.attention_backend = None
    logits = model(ids[:, 13:], attention_mask=mask, past_key_values=cache).logits
    assert models.relative_error(logits, expected) < TOLERANCE
    cache.crop(-1)
    model.config.attention_backend = "mla_reference"
    logits = model(ids[:, 13:], attention_mask=mask, past_key_values=cache).logits
    assert models.relative_error(logits, expected) < TOLERANCE


@torch.no_grad()
def test_prompt_mask_findings_serve_later_steps(monkeypatch):
    """As on an accelerator: the prompt is looked at, single tokens are not, and yet a right-padded prompt goes on."""
    model = models.mla_model()
    ids, mask = models.tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, 5:9] = 0
    expected = uncached(model, ids, mask)
    monkeypatch.setattr(cache_module, "host_may_look", lambda mask, query_length: query_length > 1)
    cache = LatentCache(model.config)
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 12)):
        logits = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
        assert_same(logits, expected[:, start:stop], mask[:, start:stop])


@pytest.mark.parametrize("form", ["auto", "expanded"])
@torch.no_grad()
def test_compiled_with_a_hole(form, fresh_dynamo):
    """Prefill and step: the expanded form obeys; the absorbed form asserts, and leaves the cache as it was."""
    model = models.mla_model(attention_backend=models.FORMS[form], num_hidden_layers=1)
    ids, mask = models.tokens(2, 14), torch.ones(2, 14, dtype=torch.long)
    mask[0, :2], mask[1, 3:5] = 0, 0
    expected = uncached(model, ids, mask)
    cache = LatentCache(model.config, max_cache_len=16, page_size=16)
    cache.early_initialization(2, 1, 1, dtype=torch.float32, device=torch.device("cpu"))
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    whole = torch.nn.functional.pad(mask, (0, 2))
    logits = step(input_ids=ids[:, :12], attention_mask=whole, past_key_values=cache).logits
    assert_same(logits, expected[:, :12], mask[:, :12])
    inputs = {"input_ids": ids[:, 12:13], "attention_mask": whole, "past_key_values": cache}
    if form == "auto":
        with pytest.raises(RuntimeError, match=REFUSED):
            step(**inputs)
        logits = model(**inputs).logits
    else:
        logits = step(**inputs).logits
    assert_same(logits, expected[:, 12:13], mask[:, 12:13])


def test_generate_from_right_padded_prompts():
    """Tokens of every backend, cache and no cache agree."""
    model = models.mla_model()
    ids, mask = models.tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    ids[1, 5:], mask[1, 5:] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    for form in models.FORMS:
        model.config.attention_backend = models.FORMS[form]
        for kind in ("dynamic", "static"):
            assert torch.equal(model.generate(ids, cache_implementation=kind, **options), expected)


@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
@torch.no_grad()
def test_a_mask_that_is_too_short_is_refused(form):
    """transformers would pad it with zeros: the newest tokens would see nothing of themselves."""
    model = models.mla_model(attention_backend=models.FORMS[form])
    ids = models.tokens(2, 10)
    message = r"attention_mask.shape is \(2, 1\); expected at least {} tokens"
    with pytest.raises(ValueError, match=message.format(10)):
        model(ids, attention_mask=torch.ones(2, 1), use_cache=False)
    cache, static = LatentCache(model.config), LatentCache(model.config, max_cache_len=16, page_size=16)
    model(ids[:, :9], past_key_values=cache)
    model(ids[:, :9], past_key_values=static)
    with pytest.raises(ValueError, match=message.format(10)):
        model(ids[:, 9:], attention_mask=torch.ones(2, 1), past_key_values=cache)
    with pytest.raises(RuntimeError, match="attention_mask has 1 tokens; expected as many as are cached and new"):
        model(ids[:, 9:], attention_mask=torch.ones(2, 1), past_key_values=static)
    with pytest.raises(ValueError, match=r"attention_mask.shape is \(3, 10\); expected 2 sequences"):
        model(ids[:, 9:], attention_mask=torch.ones(3, 10), past_key_values=cache)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("behind", [0, 1])
@torch.no_grad()
def test_a_longer_mask_is_cut(behind, use_cache):
    model, ids, mask = models.mla_model(), models.tokens(2, 10), models.left_mask(10, 0, 3)
    longer = torch.nn.functional.pad(mask, (0, 6), value=behind)
    logits = model(ids, attention_mask=longer, use_cache=use_cache).logits
    assert_same(logits, uncached(model, ids, mask), mask)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@torch.no_grad()
def test_one_mask_for_all_sequences(form):
    model = models.mla_model(attention_backend=models.FORMS[form])
    ids, mask = models.tokens(2, 10), torch.ones(1, 10, dtype=torch.long)
    mask[:, :3] = 0
    expected = uncached(model, ids, mask.expand(2, -1))
    assert_same(uncached(model, ids, mask), expected, mask.expand(2, -1))
    cache = LatentCache(model.config)
    model(ids[:, :9], attention_mask=mask[:, :9], past_key_values=cache)
    logits = model(ids[:, 9:], attention_mask=mask, past_key_values=cache).logits
    assert models.relative_error(logits, expected[:, 9:]) < TOLERANCE
