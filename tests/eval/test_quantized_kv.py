"""One forward pass over a quantised KV cache is decoding token by token over it."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import Cache, DynamicLayer, QuantizedLayer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from mha2mla.eval.quantized_kv import KVCodes, QuantizedKV
from tests.modeling import models

LENGTH = 41


def rounded(row: torch.Tensor, bits: int) -> torch.Tensor:
    """What codes of one group [n] give back, by the definition."""
    least, levels = row.float().min().half().float(), 2**bits - 1
    scale = ((row.float().max() - least) / levels).half().float()
    return (((row.float() - least) / scale).round().clamp(0, levels) * scale + least).to(row.dtype)


class LoopLayer(DynamicLayer):
    """Keeps keys before and after RoPE, and quantises anew at each step what is old enough by then."""

    def __init__(self, codes: KVCodes, plain: list[torch.Tensor], cos_sin: list[tuple[torch.Tensor, torch.Tensor]]):
        super().__init__()
        self.codes, self.plain, self.cos_sin = codes, plain, cos_sin

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = (each.clone() for each in super().update(key_states, value_states))
        codes, length = self.codes, keys.shape[2]
        by_channel = codes.keys == "channel"
        step = codes.group if by_channel else 1
        old = max(0, length - codes.residual) // step * step
        plain = torch.cat(self.plain, 1).view(1, length, keys.shape[1], -1).transpose(1, 2)
        for head in range(keys.shape[1]):
            for token in range(old):
                for start in range(0, keys.shape[3], codes.group):
                    group = slice(start, start + codes.group)
                    values[0, head, token, group] = rounded(values[0, head, token, group], codes.bits)
                    if not by_channel:
                        keys[0, head, token, group] = rounded(keys[0, head, token, group], codes.bits)
            for start in range(0, old, codes.group) if by_channel else ():
                tokens = slice(start, start + codes.group)
                group = torch.stack([rounded(channel, codes.bits) for channel in plain[0, head, tokens].T], 1)
                cos, sin = (torch.cat(each, 1)[:, tokens] for each in zip(*self.cos_sin, strict=True))
                keys[0, head, tokens] = apply_rotary_pos_emb(group[None, None], group[None, None], cos, sin)[1][0, 0]
        return keys, values


@torch.no_grad()
def by_loop(model, codes, ids):
    layers = []
    for layer in model.model.layers:
        attention, plain, cos_sin = layer.self_attn, [], []
        before_rope = getattr(attention, "k_norm", attention.k_proj)
        before_rope.register_forward_hook(lambda module, args, out, plain=plain: plain.append(out.flatten(2)))
        attention.register_forward_pre_hook(
            lambda module, args, kwargs, cos_sin=cos_sin: cos_sin.append(kwargs["position_embeddings"]),
            with_kwargs=True,
        )
        layers.append(LoopLayer(codes, plain, cos_sin))
    cache = Cache(layers=layers)
    return torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)], 1)


def source(name):
    """float64, so that no rounding of another order of sums moves a code."""
    return models.source_model(name).double()


@pytest.mark.parametrize("keys", ["channel", "token"])
@pytest.mark.parametrize("name", ["llama", "llama-yarn-tied", "qwen2-sliding", "qwen3", "gemma3"])
@torch.no_grad()
def test_one_pass_is_decoding_token_by_token(name, keys):
    model, ids = source(name), models.tokens(1, LENGTH)
    codes = KVCodes(bits=3, keys=keys, group=8, residual=5)
    plain = model(ids, use_cache=False).logits
    found = QuantizedKV(model, codes).run(model, ids).logits
    assert torch.equal(model(ids, use_cache=False).logits, plain), "the model is left as it was"
    assert models.relative_error(found, by_loop(model, codes, ids)) < 1e-6 < 1e-3 < models.relative_error(found, plain)


class InPairs(KVCodes):
    """Tokens become codes two at a time, as transformers' residual of two makes them."""

    def coded_tokens(self, length):
        return super().coded_tokens(length) // 2 * 2


@torch.no_grad()
def test_one_pass_is_transformers_quantized_layer():
    """Called token by token after two, since its first update returns what it was given."""
    model, ids = source("llama"), models.tokens(1, LENGTH)
    quantized = QuantizedKV(model, InPairs(bits=4, keys="token", group=8, residual=1))

    class Layer(QuantizedLayer):
        def _quantize(self, tensor, axis):
            return quantized._quantizer.round(tensor)

        def _dequantize(self, q_tensor):
            return q_tensor

    cache = Cache(layers=[Layer(residual_length=2) for _ in model.model.layers])
    parts = ids[:, :2], *ids[:, 2:].split(1, dim=1)
    expected = torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)
    assert models.relative_error(quantized.run(model, ids).logits, expected) < 1e-6


@torch.no_grad()
def test_windows_of_a_batch_do_not_see_one_another():
    model, ids = source("llama"), models.tokens(3, LENGTH)
    quantized = QuantizedKV(model, KVCodes(bits=3, group=8, residual=5))
    alone = torch.cat([quantized.run(model, window).logits for window in ids.split(1)])
    assert models.relative_error(quantized.run(model, ids).logits, alone) < 1e-12


@pytest.mark.parametrize(
    ("codes", "length", "share"),
    [
        (KVCodes(4, residual=0), 512, 5 / 16),  # 4 bits and 32 / 32 of scale and offset
        (KVCodes(8, "token", residual=0), 512, 9 / 16),
        (KVCodes(4), 512, (480 * 5 / 16 + 32) / 512),
        (KVCodes(4), 511, (448 * 5 / 16 + 63) / 511),
        (KVCodes(4, "token"), 511, (479 * 5 / 16 + 32) / 511),
        (KVCodes(2, "token", group=64), 32, 1.0),
        (KVCodes(3, group=64, residual=0), 64, 3.5 / 16),
    ],
)
def test_bytes_are_codes_scales_offsets_and_newest_tokens(codes, length, share):
    assert codes.share(length, head_dim=64) == pytest.approx(share)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bits": 9}, "bits is 9; expected 1 to 8"),
        ({"bits": 4, "keys": "head"}, "keys is 'head'; expected one of"),
        ({"bits": 4, "residual": -1}, "residual is -1; expected at least 0"),
        ({"bits": 4, "group": 1}, "group is 1; expected at least 2"),
    ],
)
def test_bad_codes_are_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        KVCodes(**wrong)
