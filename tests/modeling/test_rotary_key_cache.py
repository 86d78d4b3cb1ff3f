"""Rotary keys kept beside the latent: the same logits as from computed keys, each key computed once."""

import pytest
import torch

from mha2mla.modeling import LatentCache
from mha2mla.modeling.config import cache_bytes, keeps_rotary_keys
from tests.modeling import models

EXACT = 1e-6  # in float64, but norms are float32


def kept(model, mode: str = "bfloat16"):
    """The model; its caches made from now on are of this mode."""
    model.config.rotary_key_cache = mode
    return model


def run(model, cache, ids, mask=None, stops=(15, 16, 17, 22, 29)):
    """Logits of a prompt, single tokens and chunks; ``mask`` [B, T]."""
    parts, start = [], 0
    for stop in stops:
        shown = None if mask is None else mask[:, :stop]
        parts.append(model(ids[:, start:stop], attention_mask=shown, past_key_values=cache).logits)
        start = stop
    return torch.cat(parts, 1)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("form", models.FORMS)
@pytest.mark.parametrize("case", models.LATENT_GEOMETRIES)
@torch.no_grad()
def test_kept_keys_give_computed_logits(case, form, static):
    """Left-padded beside unpadded rows, in float64; other factors on cos and sin per layer; biases of keys of 145."""
    model = models.mla_model(case, rope_attention_scaling=[1.3, 0.8], attention_backend=models.FORMS[form]).double()
    model.model.layers[0].self_attn.k_rope_proj.bias.normal_(std=145)
    ids, mask = models.tokens(3, 29), torch.ones(3, 29, dtype=torch.long)
    mask[1, :6], mask[2, :13] = 0, 0
    found = {}
    for mode in ("none", "bfloat16"):
        cache = LatentCache(kept(model, mode).config, max_cache_len=29 if static else None, page_size=16)
        found[mode] = run(model, cache, ids, mask)[mask.bool()]
        assert ("rope_cache" in cache.layers[0].tensors) == (mode == "bfloat16")
        assert cache.nbytes == 3 * 32 * model.config.cache_bytes_per_token(8)
    assert models.relative_error(found["bfloat16"], found["none"]) < EXACT


@torch.no_grad()
def test_each_kept_key_is_computed_once():
    """One call of W_KR a layer and step, with the step's new tokens alone."""
    model, counts = kept(models.mla_model("latent")), []
    hook = model.model.layers[1].self_attn.k_rope_proj.register_forward_hook(
        lambda module, given, out: counts.append(out.shape[1])
    )
    run(model, LatentCache(model.config), models.tokens(2, 29))
    hook.remove()
    assert counts == [15, 1, 1, 5, 7]


def test_rotary_key_cache_auto_rule():
    """Kept up to 13 % of the latents of all layers."""
    config = models.mla_config("latent", kv_lora_rank=[16, 84], qk_rope_head_dim=[4, 8], rotary_key_cache="auto")
    assert keeps_rotary_keys(config) and [config.cached_geometry(i).rope_width for i in range(2)] == [4, 8]
    config.kv_lora_rank = [16, 76]  # 12 of 92 are 0.1304
    assert not keeps_rotary_keys(config) and not config.cached_geometry(0).has_rope_cache
    for mode, bytes_per_token in (("none", 2 * 92), ("bfloat16", 2 * 104)):
        config.rotary_key_cache = mode
        assert config.cache_bytes_per_token(2) == bytes_per_token and cache_bytes(config, 5, 4) == 10 * bytes_per_token
        assert config.layer_geometry(1).cache_numel_per_token == 76  # the checkpoint's
    assert not keeps_rotary_keys(models.mla_config("shared", rotary_key_cache="auto"))


def test_rotary_key_cache_refusals():
    config = models.mla_config("latent")
    with pytest.raises(ValueError, match=r"rotary_key_cache is 'float8'; expected one of \('none', 'bfloat16', 'auto'"):
        config.rotary_key_cache = "float8"
    with pytest.raises(ValueError, match=r"rotary_key_cache is 'bfloat16'; expected one of \('none', 'auto'\): the la"):
        models.mla_config("shared", rotary_key_cache="bfloat16")
    assert config.rotary_key_cache == "none"
