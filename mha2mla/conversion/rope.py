"""The rotary part of a layer: rules that choose the pairs that stay rotary, and the linear maps that this makes.

The candidates are (frequency, kv head). In the per-group layout every head keeps its own best, in the shared one the
best of all heads together stay, or components of several heads' keys: RoPE commutes with a unitary map within a
frequency.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from mha2mla.conversion.calibration.statistics import LayerStatistics
from mha2mla.conversion.extension import RecipeObject, described, register
from mha2mla.conversion.families import AttentionWeights, SourceSpec, pair_factors
from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.modeling_mha2mla import apply_rope

# The query of an un-rotated pair is multiplied by 1 + MEAN_PHASE (g − 1), g its mean turn. g
# alone is the best constant for the tokens that are attended to and overfits them; of 0, 0.5 and 1 halfway was best.
MEAN_PHASE = 0.5


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
    inv_freq = spec.inv_freq.double()[components.frequency][None]
    return RotaryBasis(inv_freq, key_rope, query_rope, key_nope, query_nope)


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


@dataclass(frozen=True)
class RopeProblem:
    """One layer, as a rule looks at it.

    Attributes:
        spec: shapes and frequencies of the source layer: ``num_attention_heads`` H, ``num_key_value_heads`` h_kv,
            ``head_dim`` d, ``inv_freq`` [d // 2].
        pairs: number of pairs of a rope head that stay.
        statistics: of the layer; None where the rule reads none.
        weights: of the layer; None where they are not at hand (only RoRoPE reads them).
    """

    spec: SourceSpec
    pairs: int
    statistics: LayerStatistics | None
    weights: AttentionWeights | None


class RopeRule(RecipeObject, ABC):
    """Choice of the pairs that stay rotary. A subclass is a frozen dataclass, passed as ``Recipe(rope=MyRule())``.

    The same problem must give the same choice: a conversion resumes to the bit. Rules that score pairs derive from
    :class:`Scored`; those that mix the pairs of several heads define :meth:`components`.

    Attributes:
        layouts: those that it serves.
        reads_statistics: whether it needs calibration text.
        reads_phases: whether it needs attention-weighted distances.
    """

    key: ClassVar[str] = "rope.selection"
    keyword: ClassVar[str] = "rope"
    layouts: ClassVar[tuple[str, ...]] = ("per-group", "shared", "latent")
    reads_statistics: ClassVar[bool] = True
    reads_phases: ClassVar[bool] = False

    def check(self, spec: SourceSpec) -> None:
        """Refuses a source that the rule cannot serve.

        Raises:
            ValueError: by name of what it needs.
        """

    @abstractmethod
    def kept(self, problem: RopeProblem, *, per_head: bool) -> torch.Tensor:
        """Pairs that stay, bool [d // 2, h_kv] on the CPU: ``problem.pairs`` in each column with ``per_head``, else in
        all."""

    def components(self, problem: RopeProblem) -> SharedComponents:
        """The one rotary key of the shared and latent layouts, ``problem.pairs`` :class:`SharedComponents`.

        Default: the pairs of :meth:`kept`, each of one head.
        """
        return axis_components(_checked_kept(self, problem, per_head=False))


class Scored(RopeRule):
    """The pairs with the largest scores. Ties go to the lower frequency index, then the lower head."""

    @abstractmethod
    def scores(self, problem: RopeProblem) -> torch.Tensor:
        """Score of every pair, float64 [d // 2, h_kv] on the CPU."""

    def kept(self, problem: RopeProblem, *, per_head: bool) -> torch.Tensor:
        scores, shape = self.scores(problem), (problem.spec.head_dim // 2, problem.spec.num_key_value_heads)
        if not _is_given(scores, shape) or scores.is_complex():
            raise ValueError(
                f"{type(self).__name__}.scores gave {described(scores)}; expected a real tensor {shape} on the CPU:"
                " frequencies, kv heads"
            )
        if scores.isnan().any():  # a sort would take them for the largest
            raise torch.linalg.LinAlgError(f"{type(self).__name__}.scores gave NaN")
        if not per_head:
            return _largest(scores, problem.pairs)
        kept = torch.zeros(scores.shape, dtype=torch.bool)
        best = scores.sort(dim=0, descending=True, stable=True).indices[: problem.pairs]
        return kept.scatter_(0, best, True)


@register("low", sign=1)
@register("high", sign=-1)
@dataclass(frozen=True)
class ByFrequency(Scored):
    """Highest (``sign`` −1: ``inv_freq`` falls with its index) or lowest frequencies, the same for all heads."""

    reads_statistics: ClassVar[bool] = False
    sign: int

    def scores(self, problem: RopeProblem) -> torch.Tensor:
        half = problem.spec.head_dim // 2
        index = torch.arange(half, dtype=torch.float64)[:, None]
        return self.sign * index.expand(half, problem.spec.num_key_value_heads)


@register("uniform")
@dataclass(frozen=True)
class Uniform(RopeRule):
    """Evenly spaced over the frequencies."""

    reads_statistics: ClassVar[bool] = False

    def kept(self, problem: RopeProblem, *, per_head: bool) -> torch.Tensor:
        kept = torch.zeros(problem.spec.head_dim // 2, problem.spec.num_key_value_heads, dtype=torch.bool)
        rows = kept if per_head else kept.view(-1)
        rows[torch.div(torch.arange(problem.pairs) * len(rows), problem.pairs, rounding_mode="floor")] = True
        return kept


@register("2-norm")
@dataclass(frozen=True)
class TwoNorm(Scored):
    """Largest root mean square |q| · |k| (arXiv 2502.14837, S_2-norm)."""

    def scores(self, problem: RopeProblem) -> torch.Tensor:
        spec, statistics = problem.spec, problem.statistics
        query = pair_energy(statistics.query_second_moment).sqrt()
        query = query.view(spec.num_key_value_heads, spec.group_size, -1).sum(1)
        return query.T.cpu() * _key_energy(statistics).sqrt()


@register("rotation")
@dataclass(frozen=True)
class Rotation(Scored):
    """Largest E|q|² E|k|² (1 − |g|²), g = E exp(iθΔ) over attention-weighted distances Δ without the sink column:
    1 − |g|² is the variance of the turn, which no constant factor replaces. In the shared layout the candidates are the
    principal components of all kv heads' keys within one frequency."""

    reads_phases: ClassVar[bool] = True

    def scores(self, problem: RopeProblem) -> torch.Tensor:
        return _turn_weight(problem.spec, problem.statistics) * _key_energy(problem.statistics)

    def components(self, problem: RopeProblem) -> SharedComponents:
        return unitary_components(problem.spec, problem.statistics, problem.pairs)


@register("rorope-4", fold=4)
@register("rorope-2", fold=2)
@register("rorope")
@dataclass(frozen=True)
class RoRoPE(RopeRule):
    """RoRoPE with FreqFold (arXiv 2502.07864): real principal components of the keys of all heads within ``fold``
    neighbouring frequencies, equally many of every such group."""

    layouts: ClassVar[tuple[str, ...]] = ("shared", "latent")
    fold: int = 1

    def check(self, spec: SourceSpec) -> None:
        if self.fold < 1 or spec.head_dim // 2 % self.fold:
            raise ValueError(
                f"rope.selection folds {self.fold} frequencies; expected a divisor of a head's {spec.head_dim // 2}"
            )

    def kept(self, problem: RopeProblem, *, per_head: bool) -> torch.Tensor:
        raise NotImplementedError("RoRoPE mixes the pairs of all heads")

    def components(self, problem: RopeProblem) -> SharedComponents:
        moment = key_second_moment(problem.spec, problem.statistics, problem.weights)
        return folded_components(problem.spec, moment, problem.pairs, self.fold)


def rotary_basis(
    spec: SourceSpec,
    geometry: MLAGeometry,
    rule: RopeRule,
    statistics: LayerStatistics | None,
    weights: AttentionWeights | None = None,
    *,
    per_group: bool,
    turn_queries: bool,
) -> RotaryBasis:
    """The rotary basis that ``rule`` chooses for one layer, before its queries are refitted.

    Args:
        turn_queries: multiply un-rotated queries by half of their mean phase.

    Raises:
        ValueError: the rule's choice has another shape, dtype or number of pairs.
    """
    phase = torch.ones(spec.num_attention_heads, spec.head_dim // 2, dtype=torch.complex128)
    if turn_queries and statistics is not None and statistics.mean_phase is not None:
        phase = phase + MEAN_PHASE * (statistics.mean_phase.cpu() - phase)
    # cos and sin carry the attention factor on both sides of a score: a pair that loses them loses its square.
    phase = phase * spec.pair_factors.cpu() ** 2
    problem = RopeProblem(spec, geometry.qk_rope_head_dim // 2, statistics, weights)
    half, kv_heads = spec.head_dim // 2, spec.num_key_value_heads
    every = torch.ones(half, kv_heads, dtype=torch.bool) if geometry.qk_nope_head_dim == 0 else None
    if per_group:
        return per_group_basis(spec, _checked_kept(rule, problem, per_head=True) if every is None else every, phase)
    components = rule.components(problem) if every is None else axis_components(every)
    _check_components(rule, components, problem.pairs, kv_heads, half)
    return shared_basis(spec, geometry, components, phase)


def _is_given(value: object, shape: tuple[int, ...]) -> bool:
    """True for a tensor of that shape on the CPU."""
    return isinstance(value, torch.Tensor) and value.shape == shape and value.device.type == "cpu"


def _checked_kept(rule: RopeRule, problem: RopeProblem, *, per_head: bool) -> torch.Tensor:
    kept, shape = rule.kept(problem, per_head=per_head), (problem.spec.head_dim // 2, problem.spec.num_key_value_heads)
    counts = (kept.sum(0) if per_head else kept.sum()[None]).tolist() if _is_given(kept, shape) else []
    if not counts or kept.dtype != torch.bool or set(counts) != {problem.pairs}:
        raise ValueError(
            f"{type(rule).__name__}.kept gave {described(kept)} with {counts} pairs; expected torch.bool {shape} on the"
            f" CPU with {problem.pairs} {'of each head' if per_head else 'in all'}"
        )
    return kept


def _check_components(rule: RopeRule, found: SharedComponents, pairs: int, kv_heads: int, half: int) -> None:
    expected = {
        "encode": (torch.complex128, (pairs, kv_heads, half)),
        "decode": (torch.complex128, (kv_heads, half, pairs)),
        "frequency": (torch.int64, (pairs,)),
    }
    for name, (dtype, shape) in expected.items():
        value = getattr(found, name, None)
        if not _is_given(value, shape) or value.dtype != dtype:
            raise ValueError(
                f"{type(rule).__name__}.components gave {name} {described(value)}; expected {dtype} {shape} on the CPU"
            )
    if found.frequency.min() < 0 or found.frequency.max() >= half:
        raise ValueError(
            f"{type(rule).__name__}.components gave frequencies {found.frequency.min()} to {found.frequency.max()};"
            f" expected indices from 0 to {half - 1}"
        )
    product = torch.einsum("naj,ajm->nm", found.encode, found.decode)
    error = (product - torch.eye(pairs)).abs().max()
    if error > 1e-6:  # NaN passes: what is not finite has the layer converted by the plainest rules
        raise ValueError(
            f"{type(rule).__name__}.components gave encode · decode that is off the identity by {error:.3g}; expected"
            " at most 1e-6"
        )


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
    # A head without queries at this frequency must stay invertible; its share of the component is then negligible.
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


def _key_energy(statistics: LayerStatistics) -> torch.Tensor:
    """[half, h_kv] E|k|² of every pair."""
    return statistics.key_covariance.diagonal(dim1=1, dim2=2).real.clamp_min(0).cpu()


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Mask of the ``count`` largest scores, bool of their shape; of equal ones the first."""
    kept = torch.zeros(scores.numel(), dtype=torch.bool)
    kept[scores.flatten().sort(descending=True, stable=True).indices[:count]] = True
    return kept.view(scores.shape)
