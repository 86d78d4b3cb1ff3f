"""The absorbed form, the expanded form, and no cache at all: one model."""

from itertools import pairwise

import pytest
import torch

from mha2mla.kernels import absorbs_up_to
from mha2mla.modeling import LatentCache, backends
from tests.few import each
from tests.modeling import models
from tests.modeling.models import TOLERANCE
from tests.ops import noted


def absorbed_calls(monkeypatch) -> list[int]:
    """Fills up with the query length of every call of the absorbed form with a prepared plan."""
    return noted(monkeypatch, backends, "mla_absorbed", lambda q_nope, *_, **__: q_nope.shape[1])


@each("case, static", models.GEOMETRIES, [False, True])
@torch.no_grad()
def test_cached_equals_uncached_in_both_forms(case, static, monkeypatch):
    """Prefill, single tokens, several, a chunk too long to absorb: each over what is cached, windows included."""
    calls = absorbed_calls(monkeypatch)
    model = models.mla_model(case)
    ids = models.tokens(3, 40)
    expected = model(ids, use_cache=False).logits
    assert not calls
    for form in ("absorbed", "expanded", "auto"):
        model.config.attention_backend = models.FORMS[form]
        cache = LatentCache(model.config, max_cache_len=45 if static else None, page_size=16)
        logits = models.logits_of_calls(model, cache, ids, (11, 12, 13, 17, 20, 36, 37, 38, 40))
        assert models.relative_error(logits, expected) < TOLERANCE
    assert calls == 2 * [length for length in (1, 1, 4, 3, 1, 1, 2) for _ in range(2)]


@each("query_length, case", range(2, 9), ["sliding", "some sliding", "latent sliding"])
@torch.no_grad()
def test_several_tokens_under_a_window_are_absorbed(case, query_length, monkeypatch):
    """Each query has its own first token, before the window is full and after; one sequence begins with padding."""
    calls = absorbed_calls(monkeypatch)
    model = models.mla_model(case)
    ids = models.tokens(2, 5 + 4 * query_length)
    mask = models.left_mask(ids.shape[1], 0, 4)
    logits = {}
    for form in ("expanded", "absorbed"):
        model.config.attention_backend = models.FORMS[form]
        # How much a static cache holds is no host's business: up to 8 tokens that makes no difference.
        cache = LatentCache(model.config, max_cache_len=40 if query_length == 8 else None, page_size=16)
        stops = range(5, ids.shape[1] + 1, query_length)
        logits[form] = models.logits_of_calls(model, cache, ids, stops, mask)[:, 5:]
    assert calls == [5] * 2 + [query_length] * 2 * 4
    assert models.relative_error(logits["absorbed"], logits["expanded"]) < TOLERANCE


@torch.no_grad()
def test_a_4d_mask_is_expanded():
    model = models.mla_model()
    ids = models.tokens(1, 8)
    allowed = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    allowed[..., 3:, 1] = False
    expected = model(ids, attention_mask=allowed, use_cache=False).logits[:, 6:]
    cache = model(ids[:, :6], attention_mask=allowed[:, :, :6, :6]).past_key_values
    logits = model(ids[:, 6:], attention_mask=allowed[:, :, 6:], past_key_values=cache).logits
    assert models.relative_error(logits, expected) < TOLERANCE


@torch.no_grad()
def test_widths_that_the_op_refuses_are_expanded():
    """In 16 bits it takes rows of 16 bytes only, on a CPU too."""
    model = models.mla_model().to(torch.bfloat16)
    assert {line.form for line in model.attention_report()} == {"expanded"}
    ids = models.tokens(2, 9)
    cache = model(ids[:, :8]).past_key_values
    logits = model(ids[:, 8:], past_key_values=cache).logits
    assert models.relative_error(logits, model(ids, use_cache=False).logits[:, 8:]) < 0.05


@torch.no_grad()
def test_queries_are_absorbed_where_that_is_cheaper(monkeypatch):
    """The border is that of ragged batches: a count of operations, where the host knows how much is cached."""
    lengths = noted(monkeypatch, backends, "plan_mla_attention", lambda *args, **_: args[4][0].tolist())
    model = models.mla_model("maps per query head")
    border = absorbs_up_to(model.config.layer_geometry(0))
    assert border == 12
    ids = models.tokens(2, 3 * border + 2)
    expected = model(ids, use_cache=False).logits
    stops = [border, 2 * border, 3 * border + 1, 3 * border + 2]
    for static in (False, True):
        cache = LatentCache(model.config, max_cache_len=128 if static else None)
        assert models.relative_error(models.logits_of_calls(model, cache, ids, stops), expected) < TOLERANCE
        assert lengths == ([] if static else [[border] * 2])
        lengths.clear()


@pytest.mark.parametrize("case", models.GEOMETRIES)
@torch.no_grad()
def test_a_backend_by_name_serves_prompts_too(case, monkeypatch):
    """Padded prompts, and chunks of them over what is cached; nothing is left to the attention implementation."""
    model = models.mla_model(case)
    ids, mask = models.tokens(3, 40), models.left_mask(40, 0, 5, 14)
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    model.config.attention_backend = "mla_reference"
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "_expanded", None)
    cache, shown = LatentCache(model.config, page_size=16), mask.bool()
    logits = models.logits_of_calls(model, cache, ids, (12, 31, 32, 36, 40), mask)
    assert models.relative_error(logits[shown], expected[shown]) < TOLERANCE


@pytest.mark.parametrize("case", ["some sliding", "latent some sliding"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@torch.no_grad()
def test_eight_bit_latents_through_every_form(static, case):
    """Prompt, single tokens, several, a chunk, a mask with a hole: all over codes, near what 32 bits give."""
    model = models.mla_model(case)
    ids, mask = models.tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, :3], mask[1, 33:36] = 0, 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    model.config.attention_backend = "mla_fp8_reference"
    cache = LatentCache(model.config, max_cache_len=48 if static else None, page_size=16)
    logits = models.logits_of_calls(model, cache, ids, stops := (9, 10, 14, 30, 33, 38, 39, 40), mask)
    for start, stop in pairwise((0, *stops)):
        shown = mask[:, start:stop].bool()
        assert 1e-4 < models.relative_error(logits[:, start:stop][shown], expected[:, start:stop][shown]) < 0.2
    config, layer = model.config, cache.layers[0]
    assert layer.tensors["latent_cache"].dtype == torch.float8_e4m3fn and layer.dtype == torch.float32
    geometry = config.layer_geometry(0)
    per_token = geometry.kv_lora_rank + 4 + 4 * geometry.rope_width
    assert cache.nbytes == 2 * cache.capacity * config.num_hidden_layers * per_token
