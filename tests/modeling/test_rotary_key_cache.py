"""Rotary keys kept beside the latent: the same logits as from computed keys, each key computed once."""

import pytest
import torch
from transformers import DynamicCache

from mha2mla.loop import Loop, Sampling
from mha2mla.modeling import LatentCache
from mha2mla.modeling.config import cache_bytes, rotary_key_bits
from tests.few import each
from tests.modeling import models

EXACT = 1e-6  # in float64, but norms are float32
EIGHT_BITS = 0.03  # relative error of logits that keys in 8 bits make, whatever their biases


def kept(model, mode: str = "bfloat16"):
    """The model; its caches made from now on are of this mode."""
    model.config.rotary_key_cache = mode
    return model


@each("case, form, static", models.LATENT_GEOMETRIES, models.FORMS, [False, True])
@torch.no_grad()
def test_kept_keys_give_computed_logits(case, form, static):
    """In float64, of left-padded rows beside unpadded ones, with other factors on cos and sin per layer. Keys of 8 bits
    give them nearly, and biases near 600 cost the codes nothing: no more error than without biases."""
    model = models.mla_model(case, rope_attention_scaling=[1.3, 0.8], attention_backend=models.FORMS[form]).double()
    model.model.layers[0].self_attn.k_rope_proj.bias.normal_(std=300)
    ids, mask = models.tokens(3, 29), models.left_mask(29, 0, 6, 13)
    logits, tensors = [], []
    for mode in ("none", "bfloat16", "int8"):
        cache = LatentCache(kept(model, mode).config, max_cache_len=29 if static else None, page_size=16)
        logits.append(models.logits_of_calls(model, cache, ids, mask=mask)[mask.bool()])
        tensors.append(cache.layers[0].tensors)
        assert cache.nbytes == 3 * 32 * model.config.cache_bytes_per_token(8)
    assert ["rope_cache" in each for each in tensors] == [False, True, True]
    assert tensors[2]["rope_cache"].dtype == torch.int8 and tensors[2]["rope_scale"].shape == (6, 16)
    exact, nearly = (models.relative_error(found, logits[0]) for found in logits[1:])
    assert exact < EXACT < nearly < EIGHT_BITS


@torch.no_grad()
def test_each_kept_key_is_computed_once():
    """One call of W_KR a layer and step, with the step's new tokens alone."""
    model, counts = kept(models.mla_model("latent")), []
    hook = model.model.layers[1].self_attn.k_rope_proj.register_forward_hook(
        lambda module, given, out: counts.append(out.shape)
    )
    models.logits_of_calls(model, LatentCache(model.config), models.tokens(2, 29))
    hook.remove()
    assert counts == [(2 * new, 6) for new in (15, 1, 1, 5, 7)]


def test_rotary_key_cache_auto_rule():
    """Without a kernel kept up to 13 % of the latents of all layers, else where it takes less time."""
    config = models.mla_config("latent", kv_lora_rank=[16, 84], qk_rope_head_dim=[4, 8], rotary_key_cache="auto")
    assert rotary_key_bits(config) and [config.cached_geometry(i).rope_width for i in range(2)] == [4, 8]
    config.kv_lora_rank = [16, 76]  # 12 of 92 are 0.1304
    assert not rotary_key_bits(config) and not config.cached_geometry(0).has_rope_cache
    for mode, bytes_per_token in (("none", 2 * 92), ("bfloat16", 2 * 104)):
        config.rotary_key_cache = mode
        assert config.cache_bytes_per_token(2) == bytes_per_token and cache_bytes(config, 5, 4) == 10 * bytes_per_token
        assert config.layer_geometry(1).cache_numel_per_token == 76  # the checkpoint's
    assert not rotary_key_bits(models.mla_config("shared", rotary_key_cache="auto"))
    wide = models.mla_config("latent", kv_lora_rank=512, qk_rope_head_dim=64, rotary_key_cache="auto")
    assert rotary_key_bits(wide)
    wide.latent_bits = 4  # 128 bytes beside 320, but 1,024 in 16 bits: no kernel computes keys from codes
    assert rotary_key_bits(wide)
    slow = models.mla_config("latent", kv_lora_rank=512, qk_rope_head_dim=128, rotary_key_cache="auto")
    assert rotary_key_bits(slow) == 8 and slow.cached_geometry(1).has_key_codes
    slow.attention_backend = "mla_fp8"  # whose caches have no keys in 8 bits
    assert rotary_key_bits(slow) == 16


@pytest.mark.parametrize("kind", ["dynamic", "static", None])
def test_generate_keeps_keys_for_one_call(kind):
    """The tokens of computed keys; config and other calls stay as they are."""
    model, inputs = models.mla_model("latent some sliding"), models.padded(12, 7, 1)
    options = {"max_new_tokens": 14, "do_sample": False, "cache_implementation": kind, "return_dict_in_generate": True}
    beams = {"num_beams": 3, "num_return_sequences": 2}
    for further in ({}, beams, {"attention_window": 12, "num_sink_tokens": 3}, {"prefill_chunk_size": 5}):
        if "attention_window" in further:
            model = models.mla_model("latent qk-norm")
        found = {}
        for mode in ("none", "bfloat16", "int8", None):
            out = model.generate(**inputs, **options, **further, rotary_key_cache=mode)
            found[mode] = out.sequences
            tensors = out.past_key_values.layers[0].tensors
            assert ("rope_cache" in tensors) == (mode in ("bfloat16", "int8"))
            assert ("rope_scale" in tensors) == (mode == "int8")
        assert found["int8"].shape == found["none"].shape
        assert torch.equal(found["none"], found["bfloat16"]) and torch.equal(found["none"], found[None])
    assert model.config.rotary_key_cache == "none"


@torch.no_grad()
def test_batches_and_loops_take_a_rotary_key_cache():
    model, ids = models.mla_model("latent qk-norm"), models.tokens(1, 40)
    assert all("rope_cache" not in tensors for tensors in model.paged_cache(2).tensors)
    cache = model.paged_cache(4, 16, rotary_key_cache="bfloat16")
    assert cache.nbytes == 64 * kept(model).config.cache_bytes_per_token(4)
    batch = cache.extend({cache.open(): 40})
    logits = model.forward_batch(ids[0], cache.step(batch), all_logits=True)
    assert models.relative_error(logits, model(ids, use_cache=False).logits[0]) < models.TOLERANCE
    kept(model, "none")
    for mode, keys in (("bfloat16", 2 * 10 * 4), ("int8", 2 * (10 + 4)), (None, 0)):
        loop = Loop(model, num_pages=6, page_size=16, max_length=96, rotary_key_cache=mode)
        assert loop.cache_bytes_per_token == model.config.cache_bytes_per_token(4) + keys
        request = loop.add(ids[0].tolist(), Sampling(9))
        loop.run()
        expected = model.generate(ids, max_new_tokens=9, do_sample=False, rotary_key_cache=mode)
        assert request.tokens == expected[0].tolist()
    source = models.source_model("llama")
    source.set_attn_implementation("mha2mla")
    with pytest.raises(ValueError, match="rotary_key_cache is 'bfloat16'; expected None for a source"):
        Loop(source, num_pages=6, rotary_key_cache="bfloat16")


@torch.no_grad()
def test_a_cache_keeps_its_mode():
    """Whatever the config says afterwards; generate refuses to be asked for another."""
    model, ids = models.mla_model("latent"), models.tokens(2, 9)
    expected, cache = model(ids, use_cache=False).logits, LatentCache(kept(model).config)
    first = model(ids[:, :5], past_key_values=cache).logits
    logits = kept(model, "none")(ids[:, 5:], past_key_values=cache).logits
    assert models.relative_error(torch.cat((first, logits), 1), expected) < models.TOLERANCE
    assert cache.layers[0].tensors["rope_cache"].shape[2:] == (1, 6)
    others = (("bfloat16", LatentCache(model.config)), ("bfloat16", DynamicCache()), ("int8", cache))
    for mode, made in (("none", cache), *others):
        with pytest.raises(ValueError, match=f"rotary_key_cache is '{mode}' for {type(made).__name__}; expected a"):
            kept(model, "bfloat16" if mode == "none" else "none").generate(
                ids, past_key_values=made, max_new_tokens=2, rotary_key_cache=mode
            )


@torch.no_grad()
def test_crop_beams_and_batches_carry_scales():
    """Codes and scales of the tokens that stay, in their order."""
    model, ids = kept(models.mla_model("latent"), "int8"), models.tokens(3, 20)
    cache = LatentCache(model.config, page_size=16)
    model(ids, past_key_values=cache)
    before = [tensor.clone() for tensor in cache.layers[1].rows()]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    assert len(before) == 3
    for tensor, was in zip(cache.layers[1].rows(), before, strict=True):
        assert torch.equal(tensor[:, :20], was[[2, 0], :20])
    cache.crop(-7)
    new = models.tokens(2, 3)
    logits, other = model(new, past_key_values=cache).logits, LatentCache(model.config, page_size=16)
    model(ids[[2, 0], :13], past_key_values=other)
    torch.testing.assert_close(logits, model(new, past_key_values=other).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_prefix_in_8_bits_is_shared():
    """By a fork of a paged cache, at the same places; the fork's tokens are those of a sequence of its own."""
    model, ids, new = kept(models.mla_model("latent no nope"), "int8"), models.tokens(1, 37), models.tokens(1, 4)
    cache = model.paged_cache(8, 16)
    first = cache.open()
    model.forward_batch(ids[0], cache.step(cache.extend({first: 37})))
    second = cache.fork(first)
    found = model.forward_batch(new[0], cache.step(cache.extend({second: 4})), all_logits=True)
    alone = cache.open()
    model.forward_batch(ids[0], cache.step(cache.extend({alone: 37})))
    torch.testing.assert_close(
        found, model.forward_batch(new[0], cache.step(cache.extend({alone: 4})), all_logits=True)
    )


@torch.no_grad()
def test_a_layer_by_itself_keeps_keys_at_their_places():
    """Called without the model, over a cache that holds tokens, it appends through the cache's own ``update``."""
    model, hidden = models.mla_model("latent no nope").double(), torch.randn(2, 7, 48, dtype=torch.float64)
    attention, found = model.model.layers[0].self_attn, {}
    for mode in ("none", "int8", "bfloat16"):
        cache, places = LatentCache(kept(model, mode).config, page_size=16), torch.arange(7)[None]
        parts = [places[:, :4], places[:, 4:]]
        out = [attention(hidden[:, p[0]], position_ids=p, past_key_values=cache)[0] for p in parts]
        found[mode] = torch.cat(out, 1)
        stored = cache.layers[0].tensors.get("rope_cache")
        if mode == "int8":
            keys = stored.double() * cache.layers[0].tensors["rope_scale"][..., None, None]
    torch.testing.assert_close(found["int8"], found["none"], rtol=1e-12, atol=1e-12)  # latents are at hand
    torch.testing.assert_close(found["bfloat16"], found["none"], rtol=1e-12, atol=1e-12)
    latents = cache.layers[0].tensors["latent_cache"].view(2, 16, -1)[:, :7]
    expected = attention._rotary_keys(latents, torch.arange(7)[None])
    torch.testing.assert_close(stored.view(2, 16, 1, -1)[:, :7], expected, rtol=1e-12, atol=1e-12)
    attention.k_rope_proj.bias.zero_()
    expected = attention._rotary_keys(latents, torch.arange(7)[None])
    assert models.relative_error(keys.view(2, 16, 1, -1)[:, :7], expected) < 0.02


def test_gradients_pass_through_kept_keys():
    """Of a first call, whose keys are computed where their history is, and put into the cache."""
    model, ids = models.mla_model("latent no nope"), models.tokens(2, 9)
    weight = model.model.layers[1].self_attn.k_rope_proj.weight
    (expected,) = torch.autograd.grad(model(ids, use_cache=False).logits.square().sum(), weight)
    cache = LatentCache(kept(model).config)
    (found,) = torch.autograd.grad(model(ids, past_key_values=cache).logits.square().sum(), weight)
    assert models.relative_error(found, expected) < models.TOLERANCE
    new = models.tokens(2, 1)
    with torch.no_grad():
        logits = model(new, past_key_values=cache).logits
        expected = model(torch.cat((ids, new), 1), use_cache=False).logits[:, 9:]
    assert models.relative_error(logits, expected) < models.TOLERANCE


def test_rotary_key_cache_refusals():
    config = models.mla_config("latent")
    named = r"rotary_key_cache is 'float16'; expected one of \('none', 'bfloat16', 'int8', 'auto'"
    for mode, why in (("float16", "$"), ("float8", r": int8 replaced it, integers with a scale a token")):
        with pytest.raises(ValueError, match=named.replace("'float16", f"'{mode}") + r"\)" + why):
            config.rotary_key_cache = mode
    with pytest.raises(ValueError, match="rotary_key_cache is 'float8'.*: int8 replaced it"):  # saved before
        models.mla_config("latent", rotary_key_cache="float8")
    coded = models.mla_config("latent", latent_bits=4, kv_lora_rank=32, rotary_key_cache="int8")
    with pytest.raises(ValueError, match=r"rotary_key_cache is 'int8' with latent_bits=4; expected 'none', 'bfloat16'"):
        LatentCache(coded)
    for backend in ("mla_fp8", "mla_fp8_reference"):
        model = kept(models.mla_model("latent", attention_backend=backend), "int8")
        with pytest.raises(ValueError, match="rotary keys of rotary_key_cache 'int8' lie beside 16-bit latents"):
            model(models.tokens(1, 3), past_key_values=LatentCache(model.config))
    half = kept(models.mla_model("latent", attention_backend="mla_reference"), "int8").bfloat16()
    with pytest.raises(ValueError, match="qk_rope_head_dim 6; in 16 bits the op takes multiples of 8 and 16"):
        half(models.tokens(1, 3), past_key_values=LatentCache(half.config))
    with pytest.raises(ValueError, match=r"rotary_key_cache is 'bfloat16'; expected one of \('none', 'auto'\): the la"):
        models.mla_config("shared", rotary_key_cache="bfloat16")
    assert config.rotary_key_cache == "none"
