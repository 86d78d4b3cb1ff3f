"""A cache of the latent alone: rotary keys are computed from it, at the place where each row lies."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, QuantizedCache, StaticCache

from mha2mla.geometry import MLAGeometry
from mha2mla.modeling import modeling_mha2mla
from tests.folders import edit_config, read_json
from tests.modeling import models
from tests.modeling.models import TOLERANCE


def stock_cache(model, kind: str, length: int):
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=length)


def test_nothing_rotary_is_counted():
    geometry = MLAGeometry(8, 1, 96, 64, 0, 32, 2, rope_from_latent=True)
    assert (geometry.rope_width, geometry.cache_numel_per_token, geometry.cache_bytes_per_token(2)) == (0, 96, 192)
    assert geometry.full_kv_lora_rank == geometry.source_cache_numel_per_token == 2 * 2 * 32
    assert "d_r=64 from the latent" in str(geometry) and geometry.to_dict()["rope_from_latent"]
    stored = MLAGeometry(8, 1, 96, 64, 0, 32, 2)
    assert geometry.decode_flops_per_token() - stored.decode_flops_per_token() == 2 * 96 * 64
    with pytest.raises(ValueError, match="num_rope_heads is 2; expected 1 with rope_from_latent"):
        MLAGeometry(8, 2, 96, 64, rope_from_latent=True)
    with pytest.raises(ValueError, match="rope_from_latent is 1; expected a bool"):
        MLAGeometry(8, 1, 96, 64, rope_from_latent=1)


def test_schema_version_1_loads_without_latent_layout(tmp_path):
    model = models.mla_model("shared")
    model.save_pretrained(tmp_path)
    stored = read_json(tmp_path / "config.json")
    assert stored["schema_version"] == 2 and stored["rope_from_latent"] is False
    edit_config(tmp_path, schema_version=1, rope_from_latent=...)
    again, ids = AutoModelForCausalLM.from_pretrained(tmp_path), models.tokens(1, 5)
    assert again.config.schema_version == 1 and not again.config.rope_from_latent
    assert torch.equal(again(ids).logits, model(ids).logits)
    edit_config(tmp_path, rope_from_latent=True)
    with pytest.raises(ValueError, match="schema_version is 1; expected at least 2 with rope_from_latent"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("case", models.LATENT_GEOMETRIES)
@torch.no_grad()
def test_stock_caches_hold_the_latent_alone(case, kind):
    """Left-padded rows, positions that count padding or not, prompts, chunks and single tokens; windows are passed."""
    model, ids, lengths = models.mla_model(case), models.tokens(3, 29), (15, 9, 2)
    mask = models.left_mask(29, *(15 - length for length in lengths))
    alone = [model(ids[row : row + 1, 15 - length :], use_cache=False).logits[0] for row, length in enumerate(lengths)]
    for position in ((mask.cumsum(1) - 1).clamp(min=0), torch.arange(29)[None].expand(3, -1), None):
        cache = stock_cache(model, kind, 29)
        logits = models.logits_of_calls(model, cache, ids, (15, 16, 17, 22, 28, 29), mask, position)
        for row, length in enumerate(lengths):
            assert models.relative_error(logits[row, 15 - length :], alone[row]) < TOLERANCE
        for index, layer in enumerate(cache.layers):
            width = layer.keys.shape[-1] + layer.values.shape[-1]
            assert width == model.config.layer_geometry(index).cache_numel_per_token


@torch.no_grad()
def test_a_quantised_stock_cache():
    """transformers' own eight bits; the sink and all else have one scale there."""
    model, ids = models.mla_model("latent"), models.tokens(2, 20)
    expected, cache = model(ids, use_cache=False).logits, QuantizedCache("fp8", model.config)
    logits = torch.cat([model(part, past_key_values=cache).logits for part in ids.split((12, 1, 7), 1)], 1)
    assert models.relative_error(logits[:, :12], expected[:, :12]) < TOLERANCE
    assert 1e-4 < models.relative_error(logits, expected) < 0.2


@torch.no_grad()
def test_positions_that_are_no_places_are_refused():
    """Gaps, repeats, the numbering behind right padding; without a cache they are what they are."""
    model, ids = models.mla_model("latent"), models.tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[1, 3:5] = 0  # right padding, and a token behind it
    among_shown = (mask.cumsum(1) - 1).clamp(min=0)
    gap, depth = torch.tensor([[0, 1, 2, 3, 8, 9]]), torch.tensor([[0, 1, 2, 3, 3, 3]])
    for numbers in (gap, depth, gap.expand(2, -1)):
        with pytest.raises(ValueError, match="position_ids do not count on from each row's first visible token"):
            model(ids, position_ids=numbers, past_key_values=DynamicCache())
        assert model(ids, position_ids=numbers, use_cache=False).logits.isfinite().all()
    with pytest.raises(ValueError, match="position_ids do not count on"):
        model(ids, attention_mask=mask, position_ids=among_shown, past_key_values=DynamicCache())
    cache = DynamicCache()
    model(ids[:, :5], attention_mask=mask[:, :5], position_ids=among_shown[:, :5], past_key_values=cache)
    with pytest.raises(ValueError, match="position_ids do not count on"):  # single tokens, on a CPU
        model(ids[:, 5:], attention_mask=mask, position_ids=among_shown[:, 5:], past_key_values=cache)
    assert cache.get_seq_length() == 5
    expected = model(ids, attention_mask=mask, use_cache=False).logits[:, 5:]
    logits = model(ids[:, 5:], attention_mask=mask, past_key_values=cache).logits
    assert models.relative_error(logits, expected) < TOLERANCE


@torch.no_grad()
def test_device_asserts_where_the_host_does_not_look(monkeypatch):
    """As on a GPU: single tokens, right numbers and wrong ones, padding counted or not."""
    model, ids = models.mla_model("latent"), models.tokens(2, 9)
    mask = models.left_mask(9, 0, 3)
    among_shown = (mask.cumsum(1) - 1).clamp(min=0)
    monkeypatch.setattr(modeling_mha2mla, "host_may_look", lambda given, query_length: query_length > 1)
    cache = DynamicCache()
    model(ids[:, :8], attention_mask=mask[:, :8], position_ids=among_shown[:, :8], past_key_values=cache)
    for right in (among_shown[:, 8:], torch.tensor([[8], [8]]), torch.tensor([[8]])):
        model(ids[:, 8:], attention_mask=mask, position_ids=right, past_key_values=cache)
        cache.crop(-1)
    for wrong in (among_shown[:, 8:] + 1, torch.tensor([[5], [5]])):
        with pytest.raises(RuntimeError, match="position_ids do not count on"):
            model(ids[:, 8:], attention_mask=mask, position_ids=wrong, past_key_values=cache)
    assert cache.get_seq_length() == 8


@torch.no_grad()
def test_positions_under_a_4d_mask():
    """Tokens that see themselves count; a tree of drafts, several of them at one position, is refused."""
    model, ids = models.mla_model("latent"), models.tokens(1, 8)
    allowed = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    allowed[..., :2] = False
    padding = torch.tensor([[1, 1, 0, 1, 2, 3, 4, 5]])
    shown = ids.new_ones(1, 8).index_fill(1, torch.tensor([0, 1]), 0)
    expected = model(ids, attention_mask=shown, use_cache=False).logits[:, 2:]
    for mask in (allowed, torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)):
        cache = DynamicCache()
        logits = [
            model(
                ids[:, part],
                attention_mask=mask[:, :, part, :stop],
                position_ids=padding[:, part],
                past_key_values=cache,
            ).logits
            for stop, part in ((6, slice(0, 6)), (7, slice(6, 7)), (8, slice(7, 8)))
        ]
        assert models.relative_error(torch.cat(logits, 1)[:, 2:], expected) < TOLERANCE
        with pytest.raises(ValueError, match="position_ids do not count on"):
            model(ids, attention_mask=mask, position_ids=padding.clamp(max=4), past_key_values=DynamicCache())


def test_rotary_map_gradients_equal_differences():
    """Of one layer alone: norms are float32 whatever the model is."""
    attention = models.mla_model("latent").double().model.layers[1].self_attn
    hidden, seen = torch.randn(2, 2, 6, 48, dtype=torch.float64)
    position = torch.arange(6)[None]
    loss = (attention(hidden, position_ids=position)[0] * seen).sum()
    weights = [attention.k_rope_proj.weight, attention.k_rope_proj.bias]
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        direction, step = torch.randn_like(weight), 1e-6
        with torch.no_grad():
            ends = []
            for sign in (1, -1):
                weight += sign * step * direction
                ends.append((attention(hidden, position_ids=position)[0] * seen).sum())
                weight -= sign * step * direction
        torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), (gradient * direction).sum(), rtol=1e-5, atol=1e-9)
