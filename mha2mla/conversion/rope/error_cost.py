"""What errors of un-rotated and of rotary keys cost together: the second moment of the queries that read them."""

from __future__ import annotations

import torch

from mha2mla.conversion.families import SourceSpec
from mha2mla.conversion.families.spec import pair_factors
from mha2mla.conversion.rope.basis import RotaryBasis


def joint_key_metric(
    spec: SourceSpec, basis: RotaryBasis, query_moment: torch.Tensor, distances: torch.Tensor
) -> torch.Tensor:
    """[n, n] M, n = h_kv d_n + d_r: errors e of [un-rotated keys of all kv heads | the one rotary key] cost e^T M e.

    A query turned into its key's frame, q(Δ) = [q_nope | m² R(Δ) q_pe], reads an error as q(Δ) · e, since
    (R_s q_pe) · (R_t e) = (R_{s−t} q_pe) · e. M is E q(Δ) q(Δ)^T with queries and distances taken as independent: the
    second moment of queries, with E exp(iθΔ) between an un-rotated and a rotary number, and E exp(i(θ ∓ θ')Δ) between
    two rotary ones. What turns by much is free of everything but its own frequency; what hardly turns is not.

    Args:
        basis: of one rotary key for all heads.
        query_moment: [H, d, d] E[q q^T], before RoPE.
        distances: [H, L], each head's share of attention that goes so many tokens back.
    """
    nope, heads, kv_heads = basis.query_nope.shape[1], spec.num_attention_heads, spec.num_key_value_heads
    maps = torch.cat([basis.query_nope, basis.query_rope], 1)
    moment = maps @ query_moment @ maps.mT
    metric = moment.new_zeros(kv_heads * nope + basis.query_rope.shape[1], kv_heads * nope + basis.query_rope.shape[1])
    rope = slice(kv_heads * nope, None)
    turn = _turns(spec, basis, distances.shape[1]).to(moment.device)
    for head in range(heads):
        kv = head // spec.group_size
        own = slice(kv * nope, (kv + 1) * nope)
        mixed, rotary = _turned(moment[head], nope, turn, distances[head].to(moment))
        metric[own, own] += moment[head, :nope, :nope]
        metric[own, rope] += mixed
        metric[rope, own] += mixed.T
        metric[rope, rope] += rotary
    return metric


def _turns(spec: SourceSpec, basis: RotaryBasis, length: int) -> torch.Tensor:
    """[length, d_r / 2] complex: m² exp(iθΔ) of every pair, m only where the frequency is not zero."""
    inv_freq = basis.inv_freq[0].cpu()
    factor = pair_factors(inv_freq, spec.attention_factor**2)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * inv_freq
    return torch.polar(factor.expand_as(angle).contiguous(), angle)


def _turned(
    moment: torch.Tensor, nope: int, turn: torch.Tensor, share: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [d_n, d_r] and [d_r, d_r] of one head's E q(Δ) q(Δ)^T, of its ``moment`` at Δ = 0.

    Rotary pairs (a, b) as complex numbers z = a + ib: E z z^H and E z z^T turn elementwise, and give the moments of a
    and b back.
    """
    weighted = turn * share[:, None]
    a, b = moment[:, nope:].chunk(2, -1)
    mixed = torch.complex(a[:nope], b[:nope]) * weighted.sum(0)
    columns = torch.complex(a[nope:], b[nope:])  # E [a | b] z^T
    (a_z, b_z) = columns.chunk(2, 0)
    product = (a_z + 1j * b_z) * (weighted.T @ turn)  # E z z^T
    hermitian = (a_z - 1j * b_z).conj() * (weighted.T @ turn.conj())  # E z z^H
    cross = (product.imag - hermitian.imag) / 2  # E a b^T
    rotary = torch.cat(
        [
            torch.cat([(hermitian.real + product.real) / 2, cross], 1),
            torch.cat([cross.T, (hermitian.real - product.real) / 2], 1),
        ]
    )
    return torch.cat([mixed.real, mixed.imag], 1), rotary
