"""The absorbed form, the expanded form, and no cache at all: one model."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling import LatentCache, forms
from mha2mla.modeling.forms import choose_form
from tests.modeling import models
from tests.modeling.models import TOLERANCE


@torch.no_grad()
def decode(model, ids, steps, cache=None):
    """Logits of ``ids`` fed in pieces: up to steps[0], from there to steps[1], and so on."""
    logits, start = [], 0
    for stop in [*steps, ids.shape[1]]:
        out = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, stop
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def absorbed_calls(monkeypatch) -> list[int]:
    """Fills up with the query length of every call of the decode op."""
    from mha2mla.modeling import attention

    calls, op = [], attention.mla_decode

    def counted(q_latent, *args, **keys):
        calls.append(q_latent.shape[1])
        return op(q_latent, *args, **keys)

    monkeypatch.setattr(attention, "mla_decode", counted)
    return calls


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("case", models.GEOMETRIES)
@torch.no_grad()
def test_cached_equals_uncached_in_both_forms_failure_28(case, static, monkeypatch):
    """Prefill, single tokens, several, a chunk too long to absorb: each over what is cached, windows included."""
    calls = absorbed_calls(monkeypatch)
    model = models.mla_model(case)
    ids = models.tokens(3, 40)
    expected = model(ids, use_cache=False).logits
    assert not calls
    for form in ("absorbed", "expanded", "auto"):
        model.config.mla_form = form
        cache = LatentCache(model.config, max_cache_len=45 if static else None, page_size=16)
        logits = decode(model, ids, [11, 12, 13, 17, 20, 36, 37, 38], cache)
        assert models.relative_error(logits, expected) < TOLERANCE
    assert calls == 2 * [length for length in (1, 1, 4, 3, 1, 1, 2) for _ in range(2)]


@pytest.mark.parametrize("query_length", range(2, 9))
@pytest.mark.parametrize("case", ["sliding", "some sliding"])
@torch.no_grad()
def test_several_tokens_under_a_window_are_absorbed(case, query_length, monkeypatch):
    """Each query has its own first token, before the window is full and after; one sequence begins with padding."""
    calls = absorbed_calls(monkeypatch)
    model = models.mla_model(case)
    ids = models.tokens(2, 5 + 4 * query_length)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    logits = {}
    for form in ("expanded", "absorbed"):
        model.config.mla_form = form
        cache = LatentCache(model.config, page_size=16)
        pieces = []
        for stop in range(5, ids.shape[1] + 1, query_length):
            part = slice(0 if stop == 5 else stop - query_length, stop)
            pieces.append(model(ids[:, part], attention_mask=mask[:, :stop], past_key_values=cache).logits)
        logits[form] = torch.cat(pieces[1:], dim=1)
    assert calls == [query_length] * 2 * 4
    assert models.relative_error(logits["absorbed"], logits["expanded"]) < TOLERANCE


@pytest.mark.parametrize("case", ["per-group", "shared", "per-head"])
@torch.no_grad()
def test_eager_attention(case):
    model = models.mla_model(case)
    ids = models.tokens(2, 20)
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("eager")
    assert models.relative_error(model(ids, use_cache=False).logits, expected) < TOLERANCE
    model.config.mla_form = "expanded"
    assert models.relative_error(decode(model, ids, [9, 10, 14]), expected) < TOLERANCE


@pytest.mark.parametrize("case", models.GEOMETRIES)
@torch.no_grad()
def test_stock_caches_serve_the_expanded_form(case):
    model = models.mla_model(case)
    ids = models.tokens(2, 30)
    expected = model(ids, use_cache=False).logits
    caches = [DynamicCache(), DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)]
    for cache in caches:
        assert models.relative_error(decode(model, ids, [12, 13, 14, 18, 29], cache), expected) < TOLERANCE


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("case", ["per-group", "sliding", "some sliding"])
@torch.no_grad()
def test_left_padding(case, form, static):
    """A padded batch is its sequences, one by one; through prefill, single tokens and several."""
    model = models.mla_model(case, mla_form=form)
    lengths, total, tail = (15, 9, 2), 15, 14
    ids = models.tokens(3, total + tail)
    mask = torch.ones_like(ids)
    alone = []
    for row, length in enumerate(lengths):
        mask[row, : total - length] = 0
        alone.append(model(ids[row : row + 1, total - length :], use_cache=False).logits[0])
    cache = LatentCache(model.config, max_cache_len=total + tail if static else None, page_size=16)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    start = 0
    for stop in (total, 16, 17, 18, 22, 28, 29):
        part = slice(start, stop)
        logits = model(
            ids[:, part], attention_mask=mask[:, :stop], position_ids=position[:, part], past_key_values=cache
        ).logits
        for row, length in enumerate(lengths):
            first = max(total - length, start)
            expected = alone[row][first - (total - length) : stop - (total - length)]
            assert models.relative_error(logits[row, first - start :], expected) < TOLERANCE
        start = stop


@torch.no_grad()
def test_a_mask_with_holes_is_expanded_or_refused(monkeypatch):
    """The op takes one first token per sequence: right padding would be attended to."""
    calls = absorbed_calls(monkeypatch)
    model = models.mla_model()
    ids = models.tokens(2, 13)
    mask = torch.ones_like(ids)
    mask[1, 9:12] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
    cache = model(ids[:, :12], attention_mask=mask[:, :12]).past_key_values
    logits = model(ids[:, 12:], attention_mask=mask, past_key_values=cache).logits[:, -1]
    assert models.relative_error(logits, expected) < TOLERANCE and not calls
    cache.crop(-1)
    model.config.mla_form = "absorbed"
    with pytest.raises(ValueError, match="attention_mask .*left padding"):
        model(ids[:, 12:], attention_mask=mask, past_key_values=cache)
    cache.reset()
    model(ids[:, :12], past_key_values=cache)
    model(ids[:, 12:], past_key_values=cache)
    assert calls == [1, 1]


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


def test_another_cache_is_refused_when_absorbed_is_asked_for():
    model = models.mla_model(mla_form="absorbed")
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache; expected a LatentCache"):
        model(models.tokens(1, 3), past_key_values=DynamicCache())


@torch.no_grad()
def test_widths_that_the_op_refuses_are_expanded():
    """In 16 bits it takes rows of 16 bytes only, on a CPU too."""
    model = models.mla_model().to(torch.bfloat16)
    assert {line.form for line in model.attention_report()} == {"expanded"}
    ids = models.tokens(2, 9)
    cache = model(ids[:, :8]).past_key_values
    logits = model(ids[:, 8:], past_key_values=cache).logits
    assert models.relative_error(logits, model(ids, use_cache=False).logits[:, 8:]) < 0.05


class TestChoice:
    geometry = MLAGeometry(num_attention_heads=32, num_rope_heads=8, kv_lora_rank=512, qk_rope_head_dim=16)
    arguments = {  # noqa: RUF012
        "mla_form": "auto",
        "decode_backend": None,
        "attn_implementation": "sdpa",
        "query_length": 1,
        "page_size": 64,
        "dtype": torch.bfloat16,
        "device": torch.device("cuda"),
    }

    @pytest.fixture(autouse=True)
    def kernel(self, monkeypatch):
        """Stands in for a GPU: serves this geometry, refuses the rest by name."""

        def explain(geometry, page_size, dtype, device, seqlen_q):
            return None if geometry == self.geometry else "kv_lora_rank is 4096; expected at most 512"

        choose_form.cache_clear()
        monkeypatch.setattr(forms, "explain_mla_decode", explain)
        yield
        choose_form.cache_clear()

    def choose(self, geometry=None, **keys):
        shape = geometry or self.geometry
        numbers = (shape.num_attention_heads, shape.num_rope_heads, shape.kv_lora_rank, shape.qk_rope_head_dim)
        return choose_form(*numbers, **{**self.arguments, **keys})

    def test_decode_runs_the_kernel(self):
        choice = self.choose()
        assert (choice.form, choice.backend) == ("absorbed", "tilelang")
        assert self.choose(query_length=8).absorbed
        assert not self.choose(query_length=9).absorbed
        assert not self.choose(mla_form="expanded").absorbed

    def test_a_refusal_on_a_gpu_is_expanded_and_says_why(self):
        wide = MLAGeometry(num_attention_heads=32, num_rope_heads=8, kv_lora_rank=4096, qk_rope_head_dim=16)
        choice = self.choose(wide)
        assert (choice.form, choice.backend) == ("expanded", "sdpa")
        assert "kv_lora_rank is 4096" in choice.reason
        assert self.choose(wide, device=torch.device("cpu")).backend == "reference"
        assert self.choose(wide, mla_form="absorbed").backend == "reference"
        assert self.choose(wide, decode_backend="reference").backend == "reference"
        assert self.choose(wide, decode_backend="tilelang").backend == "tilelang"


def test_report():
    model = models.mla_model("some sliding", mla_form="auto")
    report = model.attention_report()
    assert [line.layer_idx for line in report] == [0, 1]
    assert [line.sliding_window for line in report] == [None, models.WINDOW]
    assert all(line.form == "absorbed" and line.backend == "reference" and line.reason for line in report)
    assert report[0].geometry == model.config.layer_geometry(0)
    assert {line.form for line in model.attention_report(query_length=100)} == {"expanded"}
    model.config.decode_backend = "tilelang"
    with pytest.raises(ValueError, match="tilelang"):
        cache = model(models.tokens(1, 4)).past_key_values
        model(models.tokens(1, 1), past_key_values=cache)
