"""Which rotary pairs of a layer stay rotary: the rules of ``Recipe.rope_selection``."""

from __future__ import annotations

import torch

from mha2mla.conversion.calibration.statistics import LayerStatistics
from mha2mla.conversion.families import AttentionWeights, SourceSpec
from mha2mla.conversion.recipe import Recipe
from mha2mla.conversion.rope.basis import (
    RotaryBasis,
    SharedComponents,
    axis_components,
    per_group_basis,
    shared_basis,
)
from mha2mla.geometry import MLAGeometry


def select_rotary_basis(
    spec: SourceSpec,
    geometry: MLAGeometry,
    recipe: Recipe,
    statistics: LayerStatistics | None,
    weights: AttentionWeights | None = None,
) -> RotaryBasis:
    """The rotary basis of one layer by ``recipe.rope_selection`` (rules in ``Recipe``).

    Args:
        statistics: of this layer; may be None when the rule needs none (``Recipe.needs_calibration``).
        weights: of this layer; only ``"rorope"`` reads them, for keys of different frequencies together.
    """
    phase = _query_phase(spec, recipe, statistics)
    if recipe.layout == "per-group":
        return per_group_basis(spec, _kept(spec, geometry, recipe, statistics), phase)
    pairs = geometry.qk_rope_head_dim // 2
    if geometry.qk_nope_head_dim == 0 or recipe.rope_selection not in ("rotation", "rorope"):
        components = axis_components(_kept(spec, geometry, recipe, statistics))
    elif recipe.rope_selection == "rotation":
        components = unitary_components(spec, statistics, pairs)
    else:
        components = folded_components(spec, key_second_moment(spec, statistics, weights), pairs, recipe.freq_fold)
    return shared_basis(spec, geometry, components, phase)


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


def unitary_components(spec: SourceSpec, statistics: LayerStatistics, pairs: int) -> SharedComponents:
    """The ``pairs`` costliest principal components of all heads' keys within a frequency, over all frequencies.

    Component n of frequency j is Σ_a conj(U[j,a,n]) D[j,a] k_{a,j}, each head weighted by D, what its queries lose when
    the pair is not rotated. The unitary U commutes with RoPE; D is undone in the queries.
    """
    half, kv_heads = spec.head_dim // 2, spec.num_key_value_heads
    weight = _turn_weight(spec, statistics)
    # A head that nobody asks at this frequency must stay invertible; its share of the component is then negligible.
    floor = 1e-4 * weight.amax(1, keepdim=True) + torch.finfo(torch.float64).tiny
    scale = weight.clamp_min(floor).sqrt()
    covariance = statistics.key_covariance.cpu()
    energy, basis = torch.linalg.eigh(scale[:, :, None] * covariance * scale[:, None, :])
    # Only the ratios within a frequency matter; keeping D near one keeps the cached keys in the source's range.
    scale = scale / scale.square().mean(1, keepdim=True).sqrt()
    frequency, component = _largest(energy, pairs).nonzero(as_tuple=True)
    order = torch.arange(pairs)
    encode = torch.zeros(pairs, kv_heads, half, dtype=torch.complex128)
    encode[order, :, frequency] = basis[frequency, :, component].conj() * scale[frequency]
    decode = torch.zeros(kv_heads, half, pairs, dtype=torch.complex128)
    decode[:, frequency, order] = (basis[frequency, :, component] / scale[frequency]).T
    return SharedComponents(encode, decode, frequency)


def folded_components(spec: SourceSpec, second_moment: torch.Tensor, pairs: int, fold: int) -> SharedComponents:
    """RoRoPE with FreqFold (arXiv 2502.07864): real principal components of keys, ``fold`` frequencies as if one.

    Neighbouring frequencies, ``fold`` at a time, make a group. Within a group the pairs of all heads are turned by one
    real orthogonal matrix, the same for both halves of a pair, which commutes with RoPE as far as the frequencies of
    the group are equal. All groups give equally many leading components (the first groups one more where ``pairs`` is
    no multiple), which take the frequencies of the group at even steps from its highest one.

    Args:
        second_moment: [h_kv * d, h_kv * d] of the keys of all heads before RoPE.
        fold: divides the number of frequencies.
    """
    half, kv_heads = spec.head_dim // 2, spec.num_key_value_heads
    groups = half // fold
    halves = second_moment.cpu().view(kv_heads, 2, half, kv_heads, 2, half)
    covariance = halves[:, 0, :, :, 0] + halves[:, 1, :, :, 1]  # [h_kv, half, h_kv, half]
    encode = torch.zeros(pairs, kv_heads, half, dtype=torch.complex128)
    frequency = torch.zeros(pairs, dtype=torch.int64)
    first = 0
    for group in range(groups):
        count = pairs // groups + (group < pairs % groups)
        members = slice(group * fold, (group + 1) * fold)
        block = covariance[:, members, :, members].reshape(kv_heads * fold, kv_heads * fold)
        vectors = torch.linalg.eigh((block + block.T) / 2).eigenvectors.flip(1)[:, :count]
        rows = slice(first, first + count)
        encode[rows, :, members] = vectors.T.reshape(count, kv_heads, fold).to(encode.dtype)
        frequency[rows] = group * fold + torch.arange(count) * fold // max(count, 1)
        first += count
    return SharedComponents(encode, encode.permute(1, 2, 0).clone(), frequency)


def key_second_moment(spec: SourceSpec, statistics: LayerStatistics, weights: AttentionWeights) -> torch.Tensor:
    """[h_kv * d, h_kv * d] E[k k^T] of the stacked keys before RoPE, biases and norms included."""
    covariance, mean = statistics.covariance, statistics.mean
    if spec.qk_norm:  # the inputs u = [normed keys | hidden state] hold them
        width = spec.num_key_value_heads * spec.head_dim
        covariance, mean = covariance[:width, :width], mean[:width]
    else:
        weight = weights.k_weight.to(covariance)
        covariance, mean = weight @ covariance @ weight.T, weight @ mean
        if weights.k_bias is not None:
            mean = mean + weights.k_bias.to(mean)
    return covariance + torch.outer(mean, mean)


def _turn_weight(spec: SourceSpec, statistics: LayerStatistics) -> torch.Tensor:
    """[half, h_kv] E|q|² (1 − |g|²), summed over the query heads of a kv head."""
    kv_heads, half = spec.num_key_value_heads, spec.head_dim // 2
    cost = rotation_cost(statistics.mean_phase)
    return (pair_energy(statistics.query_second_moment) * cost).view(kv_heads, spec.group_size, half).sum(1).T.cpu()


def _kept(spec: SourceSpec, geometry: MLAGeometry, recipe: Recipe, statistics: LayerStatistics | None) -> torch.Tensor:
    """[half, h_kv] bool: the (frequency, head) pairs that stay, by a rule that mixes no heads.

    In the per-group layout every head keeps its own best, in the shared layout the best of all heads stay. Ties go to
    the lower frequency index, then the lower head.
    """
    half, kv_heads = spec.head_dim // 2, spec.num_key_value_heads
    pairs = geometry.qk_rope_head_dim // 2
    grouped, rule = recipe.layout == "per-group", recipe.rope_selection
    if geometry.qk_nope_head_dim == 0:
        return torch.ones(half, kv_heads, dtype=torch.bool)
    if rule == "uniform":
        kept = torch.zeros(half, kv_heads, dtype=torch.bool)
        candidates = half if grouped else half * kv_heads
        chosen = torch.div(torch.arange(pairs) * candidates, pairs, rounding_mode="floor")
        if grouped:
            kept[chosen] = True
        else:
            kept.view(-1)[chosen] = True
        return kept
    if rule in ("high", "low"):  # inv_freq falls with its index
        rank = torch.arange(half, dtype=torch.float64)[:, None].expand(half, kv_heads)
        scores = -rank if rule == "high" else rank
    else:
        key = statistics.key_covariance.diagonal(dim1=1, dim2=2).real.clamp_min(0).cpu()
        if rule == "2-norm":
            query = pair_energy(statistics.query_second_moment).sqrt().view(kv_heads, spec.group_size, half).sum(1)
            scores = query.T.cpu() * key.sqrt()
        else:
            scores = _turn_weight(spec, statistics) * key
    if grouped:
        kept = torch.zeros(half, kv_heads, dtype=torch.bool)
        return kept.scatter_(0, scores.sort(dim=0, descending=True, stable=True).indices[:pairs], True)
    return _largest(scores, pairs)


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Where the ``count`` largest scores are: bool of their shape; ties go to the first."""
    kept = torch.zeros(scores.numel(), dtype=torch.bool)
    kept[scores.flatten().sort(descending=True, stable=True).indices[:count]] = True
    return kept.view(scores.shape)


def _query_phase(spec: SourceSpec, recipe: Recipe, statistics: LayerStatistics | None) -> torch.Tensor:
    """[H, half] complex: what an un-rotated pair's query is multiplied by. cos and sin carry the attention factor on
    both sides of a score, so a pair that loses them loses its square."""
    phase = torch.ones(spec.num_attention_heads, spec.head_dim // 2, dtype=torch.complex128)
    if recipe.mean_phase > 0 and statistics is not None and statistics.mean_phase is not None:
        phase = phase + recipe.mean_phase * (statistics.mean_phase.cpu() - phase)
    return phase * spec.pair_factors.cpu() ** 2
