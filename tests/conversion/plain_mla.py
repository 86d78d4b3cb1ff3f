"""MLA attention written out from the interface, for tests: no cache, no masks but causal, any dtype."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, inv_freq: torch.Tensor, position: torch.Tensor, scaling: float) -> torch.Tensor:
    """x [..., length, d_r] in the halves layout, inv_freq [d_r // 2]."""
    angle = position.double()[:, None] * inv_freq.double()
    scaling = torch.where(inv_freq == 0, 1.0, torch.tensor(scaling, dtype=torch.float64))
    cos, sin = (angle.cos() * scaling).to(x.dtype), (angle.sin() * scaling).to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def plain_mla_attention(hidden, tensors, geometry, spec, mask=None, first_position=0):
    """hidden [windows, length, hidden] -> [windows, length, hidden] with the tensors of one converted layer."""
    t = {name: value if name == "inv_freq" else value.to(hidden.dtype) for name, value in tensors.items()}
    heads, kv_heads = geometry.num_attention_heads, geometry.num_up_projection_heads
    groups, nope, rope, rank = (
        geometry.num_rope_heads,
        geometry.qk_nope_head_dim,
        geometry.qk_rope_head_dim,
        geometry.kv_lora_rank,
    )
    stored = 0 if geometry.rope_from_latent else groups * rope
    windows, length, _ = hidden.shape
    query = torch.nn.functional.linear(hidden, t["q_proj.weight"], t.get("q_proj.bias"))
    if spec.qk_norm:
        query = torch.einsum("hed,wlhd->wlhe", t["q_b_proj"], spec.split_heads(query, t["q_norm.weight"]))
        key = torch.nn.functional.linear(hidden, t["k_proj.weight"], t.get("k_proj.bias"))
        key = spec.split_heads(key, t["k_norm.weight"]).flatten(2)
        latent, k_pe = (key @ t["k_a_proj.weight"].T).split([rank, stored], -1)
        latent = latent + hidden @ t["v_a_proj.weight"].T
    else:
        query = query.view(windows, length, heads, -1)
        latent, k_pe = torch.nn.functional.linear(hidden, t["kv_a_proj.weight"], t.get("kv_a_proj.bias")).split(
            [rank, stored], -1
        )
    if geometry.rope_from_latent:
        k_pe = torch.nn.functional.linear(latent, t["k_rope_proj.weight"], t["k_rope_proj.bias"])
    position = torch.arange(first_position, first_position + length)
    query = query.transpose(1, 2)
    q_nope, q_pe = query.split([nope, rope], -1)
    k_pe = k_pe.view(windows, length, groups, rope).transpose(1, 2)
    table = t["inv_freq"]
    k_pe = torch.stack([rotate(k_pe[:, g], table[g], position, spec.attention_factor) for g in range(groups)], 1)
    q_pe = torch.stack(
        [rotate(q_pe[:, h], table[h // (heads // groups)], position, spec.attention_factor) for h in range(heads)], 1
    )
    k_pe = k_pe.repeat_interleave(heads // groups, 1)
    value = torch.einsum("adr,wlr->wald", t["v_b_proj"], latent).repeat_interleave(heads // kv_heads, 1)
    scores = q_pe @ k_pe.mT
    if nope:
        k_nope = torch.einsum("adr,wlr->wald", t["k_b_proj"], latent).repeat_interleave(heads // kv_heads, 1)
        scores = scores + q_nope @ k_nope.mT
    hidden_keys = torch.ones(length, length, dtype=torch.bool).triu(1) if mask is None else ~mask
    scores = (scores * spec.softmax_scale).masked_fill(hidden_keys, float("-inf"))
    out = (torch.softmax(scores, -1) @ value).transpose(1, 2).flatten(2)
    return torch.nn.functional.linear(out, t["o_proj.weight"], t.get("o_proj.bias"))
