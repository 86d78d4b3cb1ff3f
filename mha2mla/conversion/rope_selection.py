"""Which rotary pairs of a layer stay rotary: rules, and the linear maps of keys and queries that carry them out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mha2mla.conversion.adapters import SourceSpec
from mha2mla.conversion.calibration import LayerStatistics
from mha2mla.conversion.recipe import Recipe
from mha2mla.geometry import MLAGeometry


@dataclass(frozen=True)
class RotaryBasis:
    """What one layer's RoPE becomes: a table of frequencies and linear maps, all float64, acting on post-norm vectors.

    With k the layer's keys of all kv heads, stacked (before RoPE), and q_h the query of head h:
    k_pe[g] = ``key_rope[g]`` k, q_pe[h] = ``query_rope[h]`` q_h (both then rotated by ``inv_freq[g]``),
    k_nope[a] = ``key_nope[a]`` k, q_nope[h] = ``query_nope[h]`` q_h. Every selection rule ends in this form.

    Attributes:
        inv_freq: [G, d_r // 2].
        key_rope: [G, d_r, h_kv * head_dim].
        query_rope: [H, d_r, head_dim].
        key_nope: [h_kv, d_n, h_kv * head_dim].
        query_nope: [H, d_n, head_dim]; holds the mean phase and the squared attention factor.
        frequencies: [G, d_r // 2] int64, index of each kept pair's frequency in the source's table.
    """

    inv_freq: torch.Tensor
    key_rope: torch.Tensor
    query_rope: torch.Tensor
    key_nope: torch.Tensor
    query_nope: torch.Tensor
    frequencies: torch.Tensor


def select_rotary_basis(
    spec: SourceSpec, geometry: MLAGeometry, recipe: Recipe, statistics: LayerStatistics | None
) -> RotaryBasis:
    """The rotary basis of one layer by ``recipe.rope_selection`` (rules in ``Recipe``).

    Args:
        statistics: of this layer; may be None when the rule needs none (``Recipe.needs_calibration``).
    """
    kv_heads, half = spec.num_key_value_heads, spec.head_dim // 2
    if geometry.qk_nope_head_dim == 0:
        scores = torch.ones(half, kv_heads, dtype=torch.float64)
        basis, scale = _axes(half, kv_heads), torch.ones(half, kv_heads, dtype=torch.float64)
    elif recipe.rope_selection == "rotation":
        scores, basis, scale = _rotation_scores(spec, recipe, statistics)
    else:
        scores = _axis_scores(spec, recipe, statistics)
        basis, scale = _axes(half, kv_heads), torch.ones(half, kv_heads, dtype=torch.float64)
    if recipe.rope_selection == "uniform" and geometry.qk_nope_head_dim > 0:
        kept = _keep_uniform(half, kv_heads, geometry, recipe)
    else:
        kept = _keep_top(scores, geometry, recipe)
    phase = _query_phase(spec, recipe, statistics)
    build = _per_group_maps if recipe.layout == "per-group" else _shared_maps
    return build(spec, geometry, kept, basis, scale, phase)


def rotation_cost(phase: torch.Tensor) -> torch.Tensor:
    """1 − |g|²: per unit of E|q|² E|k|², what leaving a pair un-rotated loses even under its best constant factor.

    E_Δ|exp(iθΔ) − f|² is least, and this, for f = g = E_Δ exp(iθΔ); the variance of the turn.
    """
    return (1 - phase.abs().square()).clamp_min(0)


def pair_energy(second_moment: torch.Tensor) -> torch.Tensor:
    """E|x_j|² of every rotary pair (x_j, x_{j + half}): [..., d, d] second moments -> [..., d // 2]."""
    diagonal = second_moment.diagonal(dim1=-2, dim2=-1)
    half = diagonal.shape[-1] // 2
    return diagonal[..., :half] + diagonal[..., half:]


def _axes(half: int, kv_heads: int) -> torch.Tensor:
    return torch.eye(kv_heads, dtype=torch.complex128).expand(half, kv_heads, kv_heads)


def _axis_scores(spec: SourceSpec, recipe: Recipe, statistics: LayerStatistics | None) -> torch.Tensor:
    """[half, h_kv]: larger is kept first; ties go to the lower frequency index, then the lower head."""
    half, kv_heads = spec.head_dim // 2, spec.num_key_value_heads
    rank = torch.arange(half, dtype=torch.float64)[:, None].expand(half, kv_heads)
    if recipe.rope_selection in ("high", "uniform"):  # inv_freq falls with its index
        return -rank
    if recipe.rope_selection == "low":
        return rank
    query = pair_energy(statistics.query_second_moment).sqrt().view(kv_heads, spec.group_size, half).sum(1)
    key = statistics.key_covariance.diagonal(dim1=1, dim2=2).real.clamp_min(0).sqrt()
    return query.T.cpu() * key.cpu()


def _rotation_scores(
    spec: SourceSpec, recipe: Recipe, statistics: LayerStatistics
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores [half, components], basis U [half, h_kv, components] and key scale D [half, h_kv].

    Component n of frequency j is Σ_a conj(U[j,a,n]) D[j,a] k_{a,j}: a principal component of the keys, each head
    weighted by what its queries lose when the pair is not rotated. The unitary U commutes with RoPE; D is undone in
    the queries.
    """
    half, kv_heads = spec.head_dim // 2, spec.num_key_value_heads
    cost = rotation_cost(statistics.mean_phase)
    weight = (pair_energy(statistics.query_second_moment) * cost).view(kv_heads, spec.group_size, half).sum(1).T.cpu()
    covariance = statistics.key_covariance.cpu()
    if recipe.layout == "per-group":
        scores = weight * covariance.diagonal(dim1=1, dim2=2).real
        return scores, _axes(half, kv_heads), torch.ones(half, kv_heads, dtype=torch.float64)
    # A head that nobody asks at this frequency must stay invertible; its share of the component is then negligible.
    floor = 1e-4 * weight.amax(1, keepdim=True) + torch.finfo(torch.float64).tiny
    scale = weight.clamp_min(floor).sqrt()
    energy, basis = torch.linalg.eigh(scale[:, :, None] * covariance * scale[:, None, :])
    # Only the ratios within a frequency matter; keeping D near one keeps the cached keys in the source's range.
    return energy, basis, scale / scale.square().mean(1, keepdim=True).sqrt()


def _keep_top(scores: torch.Tensor, geometry: MLAGeometry, recipe: Recipe) -> torch.Tensor:
    """Kept (frequency, component) pairs: bool [half, components]."""
    pairs = geometry.qk_rope_head_dim // 2
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    if recipe.layout == "per-group":
        return kept.scatter_(0, scores.sort(dim=0, descending=True, stable=True).indices[:pairs], True)
    order = scores.flatten().sort(descending=True, stable=True).indices[:pairs]
    kept.view(-1)[order] = True
    return kept


def _keep_uniform(half: int, kv_heads: int, geometry: MLAGeometry, recipe: Recipe) -> torch.Tensor:
    pairs = geometry.qk_rope_head_dim // 2
    kept = torch.zeros(half, kv_heads, dtype=torch.bool)
    candidates = half if recipe.layout == "per-group" else half * kv_heads
    chosen = torch.div(torch.arange(pairs) * candidates, pairs, rounding_mode="floor")
    if recipe.layout == "per-group":
        kept[chosen] = True
    else:
        kept.view(-1)[chosen] = True
    return kept


def _query_phase(spec: SourceSpec, recipe: Recipe, statistics: LayerStatistics | None) -> torch.Tensor:
    """[H, half] complex: what an un-rotated pair's query is multiplied by. cos and sin carry the attention factor on
    both sides of a score, so a pair that loses them loses its square."""
    phase = torch.ones(spec.num_attention_heads, spec.head_dim // 2, dtype=torch.complex128)
    if recipe.mean_phase > 0 and statistics is not None and statistics.mean_phase is not None:
        phase = phase + recipe.mean_phase * (statistics.mean_phase.cpu() - phase)
    return phase * spec.attention_factor**2


def _real_rows(coefficients: torch.Tensor) -> torch.Tensor:
    """Real matrix of the complex map z -> C z on vectors in the halves layout: [..., m, n] -> [..., 2m, 2n]."""
    real, imag = coefficients.real, coefficients.imag
    return torch.cat([torch.cat([real, -imag], -1), torch.cat([imag, real], -1)], -2)


def _per_group_maps(spec, geometry, kept, basis, scale, phase) -> RotaryBasis:
    kv_heads, d, half, group = spec.num_key_value_heads, spec.head_dim, spec.head_dim // 2, spec.group_size
    rope, nope = geometry.qk_rope_head_dim, geometry.qk_nope_head_dim
    frequencies = torch.stack([kept[:, a].nonzero().flatten() for a in range(kv_heads)])
    rest = torch.stack([(~kept[:, a]).nonzero().flatten() for a in range(kv_heads)])
    identity = torch.eye(half, dtype=torch.complex128)
    key_rope = torch.zeros(kv_heads, rope, kv_heads, d, dtype=torch.float64)
    key_nope = torch.zeros(kv_heads, nope, kv_heads, d, dtype=torch.float64)
    query_rope, query_nope = [], []
    for a in range(kv_heads):
        key_rope[a, :, a] = _real_rows(identity[frequencies[a]])
        key_nope[a, :, a] = _real_rows(identity[rest[a]])
        for h in range(a * group, (a + 1) * group):
            query_rope.append(_real_rows(identity[frequencies[a]]))
            query_nope.append(_real_rows(identity[rest[a]] * phase[h]))
    return RotaryBasis(
        inv_freq=spec.inv_freq.double()[frequencies],
        key_rope=key_rope.flatten(2),
        query_rope=torch.stack(query_rope),
        key_nope=key_nope.flatten(2),
        query_nope=torch.stack(query_nope),
        frequencies=frequencies,
    )


def _shared_maps(spec, geometry, kept, basis, scale, phase) -> RotaryBasis:
    heads, kv_heads, d, half = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.head_dim // 2
    frequency, component = kept.nonzero(as_tuple=True)
    pairs = frequency.numel()
    encode = basis.mH * scale[:, None, :]  # [half, components, h_kv]: keys -> components
    decode = basis / scale[:, :, None]  # [half, h_kv, components]: its inverse
    order = torch.arange(pairs)
    # Key side: rows are kept pairs, columns (head, frequency).
    rows = torch.zeros(pairs, kv_heads, half, dtype=torch.complex128)
    rows[order, :, frequency] = encode[frequency, component]
    key_rope = _real_rows(rows.transpose(0, 1)).permute(1, 0, 2).reshape(1, 2 * pairs, kv_heads * d)
    # Query side: score = Re(conj(q) k e^{-iθΔ}) and k = Σ_n decode[n] κ_n, so the query is multiplied by conj(decode).
    head_of = torch.arange(heads) // spec.group_size
    columns = torch.zeros(heads, pairs, half, dtype=torch.complex128)
    columns[:, order, frequency] = decode.conj()[frequency, :, component].T[head_of]
    query_rope = _real_rows(columns)
    if geometry.qk_nope_head_dim == 0:
        key_nope = torch.zeros(kv_heads, 0, kv_heads * d, dtype=torch.float64)
        query_nope = torch.zeros(heads, 0, d, dtype=torch.float64)
    else:
        dropped = torch.where(kept[:, None, :], 0, decode) @ encode  # [half, h_kv, h_kv]: what stays un-rotated
        full = torch.zeros(kv_heads, half, kv_heads, half, dtype=torch.complex128)
        index = torch.arange(half)
        full[:, index, :, index] = dropped
        key_nope = _real_rows(full.transpose(1, 2)).permute(0, 2, 1, 3).reshape(kv_heads, d, kv_heads * d)
        query_nope = _real_rows(torch.diag_embed(phase))
    return RotaryBasis(
        inv_freq=spec.inv_freq.double()[frequency][None],
        key_rope=key_rope,
        query_rope=query_rope,
        key_nope=key_nope,
        query_nope=query_nope,
        frequencies=frequency[None],
    )
