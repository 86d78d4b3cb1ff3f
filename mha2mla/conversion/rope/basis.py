"""Rotary basis of a layer: a table of frequencies, linear maps of keys and queries, and the cost of key errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mha2mla.conversion.families import SourceSpec, pair_factors
from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.modeling_mha2mla import apply_rope


@dataclass(frozen=True)
class RotaryBasis:
    """RoPE of one converted layer: a table of frequencies and linear maps, all float64, acting on post-norm vectors.

    With k the layer's keys of all kv heads, stacked (before RoPE), and q_h the query of head h:
    k_pe[g] = ``key_rope[g]`` k, q_pe[h] = ``query_rope[h]`` q_h (both then rotated by ``inv_freq[g]``),
    k_nope[a] = ``key_nope[a]`` k, q_nope[h] = ``query_nope[h]`` q_h. Every selection rule ends in this form.

    Attributes:
        inv_freq: [G, d_r // 2].
        key_rope: [G, d_r, h_kv * head_dim].
        query_rope: [H, d_r, head_dim].
        key_nope: [h_kv, d_n, h_kv * head_dim].
        query_nope: [H, d_n, head_dim]; holds the mean phase and the squared attention factor.
    """

    inv_freq: torch.Tensor
    key_rope: torch.Tensor
    query_rope: torch.Tensor
    key_nope: torch.Tensor
    query_nope: torch.Tensor


@dataclass(frozen=True)
class SharedComponents:
    """The rotary pairs that a shared k_pe keeps, as complex functionals of the keys of all heads and frequencies.

    Component n is κ_n = Σ_{a,j} ``encode[n, a, j]`` z_{a,j}, z the source's pairs as complex numbers, rotated by the
    frequency ``frequency[n]``. ``encode`` · ``decode`` is the identity, so that z = decode κ + (1 − decode · encode) z:
    a rotary part, and one that stays un-rotated.

    Attributes:
        encode: [pairs, h_kv, half] complex128.
        decode: [h_kv, half, pairs] complex128.
        frequency: [pairs] int64, indices of the source's table.
    """

    encode: torch.Tensor
    decode: torch.Tensor
    frequency: torch.Tensor


def axis_components(kept: torch.Tensor) -> SharedComponents:
    """Pairs of single heads: ``kept`` [half, h_kv] bool."""
    half, kv_heads = kept.shape
    frequency, head = kept.nonzero(as_tuple=True)
    order = torch.arange(frequency.numel())
    encode = torch.zeros(frequency.numel(), kv_heads, half, dtype=torch.complex128)
    encode[order, head, frequency] = 1
    return SharedComponents(encode, encode.permute(1, 2, 0).clone(), frequency)


def per_group_basis(spec: SourceSpec, kept: torch.Tensor, phase: torch.Tensor) -> RotaryBasis:
    """One rotary key per kv head.

    Args:
        kept: [half, h_kv] bool, as many pairs of every head.
        phase: [H, half] complex, what the query of an un-rotated pair is multiplied by.
    """
    kv_heads, d, half, group = spec.num_key_value_heads, spec.head_dim, spec.head_dim // 2, spec.group_size
    frequencies = torch.stack([kept[:, a].nonzero().flatten() for a in range(kv_heads)])
    rest = torch.stack([(~kept[:, a]).nonzero().flatten() for a in range(kv_heads)])
    identity = torch.eye(half, dtype=torch.complex128)
    key_rope = torch.zeros(kv_heads, 2 * frequencies.shape[1], kv_heads, d, dtype=torch.float64)
    key_nope = torch.zeros(kv_heads, 2 * rest.shape[1], kv_heads, d, dtype=torch.float64)
    query_rope, query_nope = [], []
    for a in range(kv_heads):
        key_rope[a, :, a] = real_map(identity[frequencies[a]])
        key_nope[a, :, a] = real_map(identity[rest[a]])
        for h in range(a * group, (a + 1) * group):
            query_rope.append(real_map(identity[frequencies[a]]))
            query_nope.append(real_map(identity[rest[a]] * phase[h]))
    return RotaryBasis(
        inv_freq=spec.inv_freq.double()[frequencies],
        key_rope=key_rope.flatten(2),
        query_rope=torch.stack(query_rope),
        key_nope=key_nope.flatten(2),
        query_nope=torch.stack(query_nope),
    )


def shared_basis(
    spec: SourceSpec, geometry: MLAGeometry, components: SharedComponents, phase: torch.Tensor
) -> RotaryBasis:
    """One rotary key for all heads; un-rotated queries keep all their dims.

    Args:
        phase: [H, half] complex, as for :func:`per_group_basis`.
    """
    heads, kv_heads, d, half = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.head_dim // 2
    pairs = components.frequency.numel()
    # Rows are kept pairs, columns (head, frequency); real and imaginary halves lie side by side within a head.
    key_rope = real_map(components.encode.transpose(0, 1)).permute(1, 0, 2).reshape(1, 2 * pairs, kv_heads * d)
    # score = Re(conj(q) k e^{-iθΔ}) and k = Σ_n decode[n] κ_n, so the query is multiplied by conj(decode).
    query_rope = real_map(components.decode.mH).repeat_interleave(spec.group_size, 0)
    if geometry.qk_nope_head_dim == 0:
        key_nope = torch.zeros(kv_heads, 0, kv_heads * d, dtype=torch.float64)
        query_nope = torch.zeros(heads, 0, d, dtype=torch.float64)
    else:
        rotated = torch.einsum("ajn,nbl->ajbl", components.decode, components.encode)
        rest = torch.eye(kv_heads * half, dtype=torch.complex128).view_as(rotated) - rotated
        # real_map wants [head, head, row, column]
        key_nope = real_map(rest.permute(0, 2, 1, 3)).permute(0, 2, 1, 3).reshape(kv_heads, d, kv_heads * d)
        query_nope = real_map(torch.diag_embed(phase))
    return RotaryBasis(
        inv_freq=spec.inv_freq.double()[components.frequency][None],
        key_rope=key_rope,
        query_rope=query_rope,
        key_nope=key_nope,
        query_nope=query_nope,
    )


def real_map(coefficients: torch.Tensor) -> torch.Tensor:
    """Real matrix of the complex map z -> C z on vectors in the halves layout: [..., m, n] -> [..., 2m, 2n]."""
    real, imag = coefficients.real, coefficients.imag
    return torch.cat([torch.cat([real, -imag], -1), torch.cat([imag, real], -1)], -2)


def rotate(x: torch.Tensor, inv_freq: torch.Tensor, position: torch.Tensor, scaling: float) -> torch.Tensor:
    """RoPE in the halves layout: x [heads, length, d_r], inv_freq [1 or heads, d_r / 2], position [length].

    A frequency of zero stands for dims that the source does not rotate: ``scaling`` leaves those alone.
    """
    return apply_rope(x, *rotary_table(inv_freq, position, scaling, x.dtype))


def rotary_table(
    inv_freq: torch.Tensor, position: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [1 or heads, length, d_r / 2] of :func:`rotate`."""
    angle = position.double()[:, None] * inv_freq.to(position.device, torch.float64)[:, None]
    factor = pair_factors(inv_freq, scaling).to(position.device)[:, None]
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


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
    size, rope = kv_heads * nope + basis.query_rope.shape[1], slice(kv_heads * nope, None)
    metric = moment.new_zeros(size, size)
    inv_freq = basis.inv_freq[0].cpu()
    angle = torch.arange(distances.shape[1], dtype=torch.float64)[:, None] * inv_freq
    factor = pair_factors(inv_freq, spec.attention_factor**2)  # m², where anything rotates
    turn = torch.polar(factor.expand_as(angle).contiguous(), angle).to(moment.device)  # [length, d_r / 2] m² exp(iθΔ)
    for head in range(heads):
        kv = head // spec.group_size
        own = slice(kv * nope, (kv + 1) * nope)
        mixed, rotary = _turned(moment[head], nope, turn, distances[head].to(moment))
        metric[own, own] += moment[head, :nope, :nope]
        metric[own, rope] += mixed
        metric[rope, own] += mixed.T
        metric[rope, rope] += rotary
    return metric


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
