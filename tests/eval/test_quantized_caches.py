"""One forward pass over a quantised cache is decoding token by token."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from mha2mla.conversion.latent.basis import latent_statistics
from mha2mla.eval.quantized_caches import KVCodes, LatentCodes, QuantizedKV, QuantizedLatent
from tests.few import each
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
        turn = float(getattr(attention, "use_rope", True))  # 0: cos and sin that rotate by nothing

        def keep(module, args, kwargs, cos_sin=cos_sin, turn=turn):
            cos, sin = kwargs["position_embeddings"]
            cos_sin.append((cos**turn, sin * turn))

        attention.register_forward_pre_hook(keep, with_kwargs=True)
        layers.append(LoopLayer(codes, plain, cos_sin))
    cache = Cache(layers=layers)
    return torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)], 1)


def source(name):
    """float64, so that no rounding of another order of sums moves a code."""
    return models.source_model(name).double()


@each("name, keys", ["llama", "llama-yarn-tied", "qwen2-sliding", "qwen3", "gemma3", "smollm3"], ["channel", "token"])
@torch.no_grad()
def test_a_pass_over_a_coded_kv_cache_is_decoding(name, keys):
    model, ids = source(name), models.tokens(1, LENGTH)
    codes = KVCodes(bits=3, keys=keys, group=8, residual=5)
    plain = model(ids, use_cache=False).logits
    found = QuantizedKV(model, codes).run(model, ids).logits
    assert torch.equal(model(ids, use_cache=False).logits, plain), "the model is left as it was"
    assert models.relative_error(found, by_loop(model, codes, ids)) < 1e-6 < 1e-3 < models.relative_error(found, plain)


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


CODES = LatentCodes(bits=4)


def quantized_latent(case, codes=CODES):
    model = models.mla_model(case).double()
    return QuantizedLatent(model, codes, codes.bases(latent_statistics(model, models.tokens(2, 64))))


@pytest.mark.parametrize("case", ["latent", "latent qk-norm", "latent per layer", "per-group"])
@torch.no_grad()
def test_a_pass_over_coded_latents_is_decoding(case):
    found, ids = quantized_latent(case), models.tokens(2, 24)
    model, cache = found.model, found.cache()
    served = torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)], 1)
    once = found.run(model, ids).logits
    plain = model(ids, use_cache=False).logits
    assert models.relative_error(once, served) < 1e-6 < 1e-3 < models.relative_error(once, plain)


@torch.no_grad()
def test_rows_are_coded_from_the_nearer_center():
    found = quantized_latent("latent")
    basis = found.bases[0]
    near = basis.decode(basis.centers[:, None] + 1e-3 * torch.randn(2, 5, 24, dtype=torch.float64))
    alone = QuantizedLatent(found.model, LatentCodes(bits=4, sinks=False), found.bases)
    lost = [(each.round(near, 0) - near).square().sum((-1, -2)) for each in (found, alone)]
    assert lost[0][1] < 0.1 * lost[1][1] and torch.equal(lost[0][0], lost[1][0])


@torch.no_grad()
def test_bytes_are_codes_and_scales():
    found = quantized_latent("latent per layer")
    config = found.model.config
    coded = sum(-(-width // 32) * 32 * 4 // 8 + 4 for width in config.kv_lora_rank)
    assert found.share(24) == pytest.approx(coded / config.source_cache_bytes_per_token(2))


@torch.no_grad()
def test_rotary_keys_beside_a_latent_count_as_16_bits():
    found = quantized_latent("per-group", LatentCodes(bits=8))
    geometry = found.model.config.layer_geometry(0)
    coded = -(-geometry.kv_lora_rank // 32) * 32 + 4 + 2 * geometry.rope_width
    assert found.share(24) == pytest.approx(coded / (2 * geometry.source_cache_numel_per_token))


@pytest.mark.parametrize(
    ("codes", "wrong", "message"),
    [
        (KVCodes, {"bits": 9}, "bits is 9; expected 1 to 8"),
        (KVCodes, {"bits": 4, "keys": "head"}, "keys is 'head'; expected one of"),
        (KVCodes, {"bits": 4, "residual": -1}, "residual is -1; expected at least 0"),
        (KVCodes, {"bits": 4, "group": 1}, "group is 1; expected at least 2"),
        (LatentCodes, {"bits": 0}, "bits is 0"),
        (LatentCodes, {"bits": 4, "basis": "fourier"}, "basis is 'fourier'; expected one of"),
    ],
)
def test_bad_codes_are_refused_by_name(codes, wrong, message):
    with pytest.raises(ValueError, match=message):
        codes(**wrong)
