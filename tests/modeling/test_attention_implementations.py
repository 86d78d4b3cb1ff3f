"""What computes the expanded form: the implementations that transformers offers, where keys and values differ."""

import pytest
import torch
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mha2mla.modeling import LatentCache, modeling_mha2mla
from tests.modeling import models
from tests.ops import Calls

# Keys as wide as values, wider, narrower; under a window; one layer of each.
CASES = ("per-group", "shared", "some sliding", "per layer", "latent some sliding", "kept per layer")


@torch.no_grad()
def check(model):
    """Without a cache, and over both kinds of one, against what ``model`` says with sdpa."""
    ids, mask = models.padded(16, 12).values()
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    model.config._attn_implementation = model.model.config._attn_implementation = implementation
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    assert models.relative_error(logits[:, 4:], expected[:, 4:]) < models.TOLERANCE
    model.config.attention_backend = "mla_expanded"
    for max_cache_len in (None, 32):
        cache = LatentCache(model.config, max_cache_len=max_cache_len)
        logits = models.logits_of_calls(model, cache, ids, (11, 12, 16), mask)
        assert models.relative_error(logits[:, 4:], expected[:, 4:]) < models.TOLERANCE, max_cache_len
        cache.crop(-3)
        logits = model(ids[:1].expand(2, -1)[:, 13:], past_key_values=cache).logits
        cache.crop(-3)
        model.config._attn_implementation = model.model.config._attn_implementation = "sdpa"
        again = model(ids[:1].expand(2, -1)[:, 13:], past_key_values=cache).logits
        model.config._attn_implementation = model.model.config._attn_implementation = implementation
        assert models.relative_error(logits, again) < models.TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_flex_attention(case):
    """As transformers calls it, but not compiled, which takes a minute on a CPU; test_gpu.py has it compiled."""
    with torch.compiler.set_stance("force_eager"):
        model = models.mla_model(case)
        model.set_attn_implementation("flex_attention")
        check(model)


@pytest.mark.parametrize("padded", [False, True])
def test_long_windows_take_a_fused_kernel_on_a_cpu(padded, monkeypatch):
    model = models.mla_model("shared")
    ids, mask = models.padded(16, 12).values()
    given = {"attention_mask": mask} if padded else {}
    expected = model(ids, use_cache=False, **given).logits
    monkeypatch.setattr(modeling_mha2mla, "_LONG", 16)
    with torch.no_grad(), Calls() as calls:
        logits = model(ids, use_cache=False, **given).logits
    fused = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert calls.names.count(fused) == model.config.num_hidden_layers
    assert models.relative_error(logits[:, 4:], expected[:, 4:]) < models.TOLERANCE


def flash(module, query, key, value, attention_mask, scaling, sliding_window=None, **kwargs):
    """Does what FlashAttention does with transformers' arguments: heads equally wide, keys where the mask [B, T] is 1
    only, causal from the last of them on."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    batch, _, length, _ = query.shape
    if attention_mask is None:
        attention_mask = torch.ones(batch, key.shape[2])
    assert attention_mask.dim() == 2
    out = torch.zeros_like(query)
    for row, seen in enumerate(attention_mask.bool()):
        keys, values = key[row][:, : len(seen)][:, seen], value[row][:, : len(seen)][:, seen]
        # Queries are the last tokens; of those, the ones that are shown.
        shown = seen[: seen.nonzero().max() + 1][-length:]
        count = int(shown.sum())
        distance = torch.arange(len(keys[0]))[None] - torch.arange(len(keys[0]) - count, len(keys[0]))[:, None]
        allowed = (distance <= 0) & (distance > -(sliding_window or len(seen) + 1))
        attended = F.scaled_dot_product_attention(
            query[row][:, -len(shown) :][:, shown], keys, values, attn_mask=allowed, scale=scaling
        )
        out[row, :, length - len(shown) :][:, shown] = attended
    return out.transpose(1, 2), None


@pytest.mark.parametrize("case", CASES)
def test_flash_attention(case, monkeypatch):
    """By a stand-in for the kernels: what they are given is what they take, over a static cache too."""
    model = models.mla_model(case)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", flash)
    model.config._attn_implementation = model.model.config._attn_implementation = "flash_attention_2"
    check(model)


@pytest.mark.parametrize("case", CASES)
def test_own_ops(case):
    model = models.mla_model(case)
    model.set_attn_implementation("mha2mla")
    check(model)


@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention_refusal_is_the_sources(version):
    """For want of a package or a GPU, not for want of support."""
    messages = []
    for model in (models.source_model("llama"), models.mla_model()):
        with pytest.raises((ImportError, ValueError)) as error:
            model.set_attn_implementation(f"flash_attention_{version}")
        messages.append(str(error.value).replace(type(model).__name__, ""))
    assert messages[0] == messages[1] and "discussions/new" not in messages[1]
