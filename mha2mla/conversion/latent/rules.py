"""Low-rank rules: one latent for the keys and the values of a layer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from mha2mla.conversion.extension import RecipeObject, described, register

SHRINKAGE = 0.003  # share of the mean variance, in every direction of the inputs' covariances
# Of the source's keys: un-rotated keys with less of their variance count for less than the values, as scores see them.
LEAST_SHARE = 0.01
_ROUNDING = 1e-12  # share of the inputs' mean energy: variance below it is rounding, and may be negative
_SWEEPS = 6  # alternating solves; 20 were no better than 8 on held-out text

Factors = tuple[torch.Tensor, torch.Tensor]  # decoder [rows, rank] and encoder [rank, E]


@dataclass(frozen=True)
class LatentFactors:
    """c = ``encoder`` u; un-rotated keys ≈ ``key_decoder`` c; values ≈ ``value_decoder`` c, on average off by
    ``value_offset``.

    All float64; u is the encoder's input, E wide.

    Attributes:
        encoder: [d_c, E].
        key_decoder: [h_kv, d_n, d_c].
        value_decoder: [h_kv, d_v, d_c].
        value_offset: [H, d_v], by query head since each attends differently; None unless centred.
        rope_decoder: [d_r, d_c] and ``rope_offset`` [d_r]: the rotary key ≈ ``rope_decoder`` c +
            ``rope_offset``; None where it is cached.
    """

    encoder: torch.Tensor
    key_decoder: torch.Tensor
    value_decoder: torch.Tensor
    value_offset: torch.Tensor | None
    rope_decoder: torch.Tensor | None = None
    rope_offset: torch.Tensor | None = None


@dataclass(frozen=True)
class LatentProblem:
    """Keys and values that a latent must reproduce, and the cost of their errors. All float64.

    Attributes:
        key: [h_kv, d_n, E], un-rotated keys as linear functions of u (without what is constant over tokens).
        value: [h_kv, d_v, E], values without their bias.
        key_metric: [h_kv, d_n, d_n], cost of a key error e is e^T M e: second moment of the queries that read it. With
            a ``rotary`` key [n, n], n = h_kv d_n + d_r, of the errors of all keys (``joint_key_metric``).
        value_metric: [h_kv, d_v, d_v], cost of a value error: W_O^T g² W_O of the heads that read it, g the gains of
            the norms on the output's way to the MLP.
        covariance: [E, E], of the inputs that keys are fitted to, centred; None when no statistics were taken.
        mean: [E], their mean; None likewise.
        value_covariance: [E, E], of the inputs that values are fitted to (u itself, or its averages under attention).
        value_mean: [H, E], their mean per query head.
        rotary: [d_r, E], the one rotary key before RoPE, likewise linear in u, where the latent must hold it too; else
            None.
        rotary_bias: [d_r], what it adds to that; None likewise.
        key_share: share of the variance of the source's keys that ``key`` has; 1 without statistics, and where the
            latent holds all keys.
        known: for rules, what they computed of this problem that holds at every rank.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_metric: torch.Tensor
    value_metric: torch.Tensor
    covariance: torch.Tensor | None
    mean: torch.Tensor | None
    value_covariance: torch.Tensor | None
    value_mean: torch.Tensor | None
    rotary: torch.Tensor | None = None
    rotary_bias: torch.Tensor | None = None
    key_share: float = 1.0
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def keys(self) -> torch.Tensor:
        """[blocks, rows, E]: keys by what has a metric of its own: kv heads, or all keys together."""
        return self.key if self.rotary is None else torch.cat([self.key.flatten(0, 1), self.rotary])[None]


class LowRankRule(RecipeObject, ABC):
    """Low-rank factorisation of keys and values. A subclass is a frozen dataclass, passed as
    ``Recipe(low_rank=MyRule())``.

    The same problem must give the same factors: a conversion resumes to the bit. What is not finite, or a
    ``torch.linalg.LinAlgError``, has the layer converted by the plainest rules.

    Attributes:
        reads_statistics: whether it needs calibration text; else moments of the problem may be None.
        reads_attended: whether it needs moments of what attention makes of the inputs.
    """

    key: ClassVar[str] = "latent.rule"
    keyword: ClassVar[str] = "low_rank"

    reads_statistics: ClassVar[bool] = True
    reads_attended: ClassVar[bool] = False

    @abstractmethod
    def factors(self, problem: LatentProblem, rank: int, *, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoder [rows, rank] and encoder [rank, E], float64 on the problem's device: ``decoder @ encoder`` stands for
        the rows of ``problem.keys``, then of ``problem.value``, both flattened to [rows, E].

        Args:
            rank: width of the latent, less than rows and than E.
            centered: whether the values' mean need not go through the latent.
        """


@register("svd-joint")
@dataclass(frozen=True)
class SvdJoint(LowRankRule):
    """Truncated SVD of the stacked weights [W_K; W_V] (arXiv 2502.14837)."""

    reads_statistics: ClassVar[bool] = False

    def factors(self, problem: LatentProblem, rank: int, *, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return _principal(torch.cat([problem.keys.flatten(0, 1), problem.value.flatten(0, 1)]), None)(rank)


@register("svd-split")
@dataclass(frozen=True)
class SvdSplit(LowRankRule):
    """Keys and values apart, the rank in proportion to their widths; neither gets more than its width."""

    reads_statistics: ClassVar[bool] = False

    def factors(self, problem: LatentProblem, rank: int, *, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = problem.keys.flatten(0, 1), problem.value.flatten(0, 1)
        key_rank = min(round(rank * key.shape[0] / (key.shape[0] + value.shape[0])), key.shape[0])
        value_rank = min(rank - key_rank, value.shape[0])
        parts = [
            _principal(part, None)(each) if each else (part.new_zeros(len(part), 0), part.new_zeros(0, part.shape[1]))
            for part, each in ((key, rank - value_rank), (value, value_rank))
        ]
        return torch.block_diag(*(decoder for decoder, _ in parts)), torch.cat([encoder for _, encoder in parts])


@register("balanced-pca")
@register("covariance-joint", balanced=False)
@dataclass(frozen=True)
class BalancedPca(LowRankRule):
    """Principal components of keys and values on calibration text.

    Args:
        balanced: both are scaled to the same energy first (arXiv 2502.07864); else the truncated SVD of
            [W_K; W_V] C^½ with the inputs' second moment C, without C^½ (arXiv 2603.17946).
    """

    balanced: bool = True

    def factors(self, problem: LatentProblem, rank: int, *, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
        covariance, value_covariance = _moments(problem, 0.0, centered)
        key, value = problem.keys.flatten(0, 1), problem.value.flatten(0, 1)
        gain = _balance(key, covariance, value, value_covariance) if self.balanced else 1.0
        decoder, encoder = _principal(torch.cat([gain * key, value]), value_covariance)(rank)
        return torch.cat([decoder[: key.shape[0]] / gain, decoder[key.shape[0] :]]), encoder


@register("whitened-joint")
@dataclass(frozen=True)
class WhitenedJoint(LowRankRule):
    """The same with errors that count as they are seen: a key's by the second moment of the queries that read it, a
    value's after ``o_proj``; values on what attention makes of the inputs, keys half on how the inputs differ under one
    query's attention. Directions that the text hardly varies in would be free to be anything, and other text does vary
    in them: each gets a little of the mean variance."""

    reads_attended: ClassVar[bool] = True

    def factors(self, problem: LatentProblem, rank: int, *, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if (self, centered) not in problem.known:
            problem.known[self, centered] = self._solver(problem, centered)
        return problem.known[self, centered](rank)

    def _solver(self, problem: LatentProblem, centered: bool) -> Callable[[int], Factors]:
        covariance, value_covariance = _moments(problem, SHRINKAGE, centered)
        *heads, width, _ = problem.key_metric.shape
        key_root, key_inverse = _roots(problem.key_metric.reshape(math.prod(heads), width, width))  # width may be 0
        value_root, value_inverse = _roots(problem.value_metric)
        key, value = (key_root @ problem.keys).flatten(0, 1), (value_root @ problem.value).flatten(0, 1)
        gain = _balance(key, covariance, value, value_covariance) * min(1.0, problem.key_share / LEAST_SHARE) ** 0.5
        if key.any():  # un-rotated keys may all be those of a head that is zero
            solve = _alternate(gain * key, covariance, value, value_covariance)
        else:
            solve = _principal(torch.cat([gain * key, value]), value_covariance)
        rows, key_shape, value_shape = key.shape[0], problem.keys.shape[:2], problem.value.shape[:2]

        def factors(rank: int) -> Factors:
            decoder, encoder = solve(rank)
            key_part = key_inverse @ decoder[:rows].view(*key_shape, rank) / gain
            value_part = value_inverse @ decoder[rows:].view(*value_shape, rank)
            return torch.cat([key_part.flatten(0, 1), value_part.flatten(0, 1)]), encoder

        return factors


def factorise(rule: LowRankRule, problem: LatentProblem, rank: int, *, centered: bool) -> LatentFactors:
    """A latent of ``rank`` numbers; exact when wide enough.

    Args:
        centered: whether the values' mean, as far as the latent loses it, is handed over to ``o_proj``.

    Raises:
        ValueError: the rule's factors are no two floating-point tensors of these shapes on the problem's device.
    """
    key, value = problem.keys.flatten(0, 1), problem.value.flatten(0, 1)
    rows = key.shape[0] + value.shape[0]
    if rank >= rows:
        encoder = torch.cat([key, value, key.new_zeros(rank - rows, key.shape[1])])
        decoder = torch.eye(rows, rank, dtype=key.dtype, device=key.device)
    elif rank >= key.shape[1]:  # wide enough for the input itself
        encoder = torch.eye(rank, key.shape[1], dtype=key.dtype, device=key.device)
        decoder = torch.cat([key, value]) @ encoder.T
    else:
        found, shapes = rule.factors(problem, rank, centered=centered), ((rows, rank), (rank, key.shape[1]))
        parts = found if isinstance(found, tuple | list) and len(found) == 2 else (found, None)
        for part, name, shape in zip(parts, ("a decoder", "an encoder"), shapes, strict=True):
            is_right = isinstance(part, torch.Tensor) and part.shape == shape and part.device == key.device
            if not (is_right and part.is_floating_point()):
                raise ValueError(
                    f"{type(rule).__name__}.factors gave {name} {described(part)}; expected torch.float64 {shape} on"
                    f" {key.device}, of a decoder and an encoder"
                )
        decoder, encoder = parts
    un_rotated = problem.key.shape[0] * problem.key.shape[1]
    key_decoder = decoder[:un_rotated].view(*problem.key.shape[:2], rank)
    value_decoder = decoder[key.shape[0] :].view(*problem.value.shape[:2], rank)
    offset = None
    if centered and problem.value_mean is not None and rank < min(rows, key.shape[1]):
        heads = problem.value_mean.view(problem.value.shape[0], -1, problem.value.shape[2])  # [h_kv, group, E]
        lost = problem.value - value_decoder @ encoder
        offset = torch.einsum("ade,age->agd", lost, heads).flatten(0, 1)
    if problem.rotary is None:
        return LatentFactors(encoder, key_decoder, value_decoder, offset)
    rope_decoder, rope_offset = decoder[un_rotated : key.shape[0]], problem.rotary_bias
    if problem.mean is not None:  # unlike an un-rotated key's, its mean is seen
        rope_offset = rope_offset + (problem.rotary - rope_decoder @ encoder) @ problem.mean
    return LatentFactors(encoder, key_decoder, value_decoder, offset, rope_decoder, rope_offset)


def _principal(target: torch.Tensor, covariance: torch.Tensor | None) -> Callable[[int], Factors]:
    """Rank -> the best ``decoder @ encoder`` ≈ ``target`` [m, E] of that rank in the norm
    E|(target − decoder encoder) u|².

    With C the covariance of u (None: identity, plain SVD) and U the leading eigenvectors of T C T^T, the optimum is
    U U^T T: the same matrix as the truncated SVD of T C^{1/2} times C^{-1/2}, without inverting C. A target taller than
    wide is solved on its narrow side instead. The latent's channels are scaled to unit variance, so that no channel is
    lost in a narrow cache dtype.
    """
    rows, columns = target.shape
    if rows <= columns:
        energy, vectors = torch.linalg.eigh(target @ (target.T if covariance is None else covariance @ target.T))
        vectors, scale = vectors.flip(1), _lifted(energy).flip(0).sqrt()
        return lambda rank: (vectors[:, :rank] * scale[:rank], (vectors[:, :rank] / scale[:rank]).T @ target)
    factor = (
        torch.eye(columns, dtype=target.dtype, device=target.device) if covariance is None else _cholesky(covariance)
    )
    inner = target @ factor
    energy, vectors = torch.linalg.eigh(inner.T @ inner)
    vectors = vectors.flip(1)
    return lambda rank: (
        inner @ vectors[:, :rank],
        torch.linalg.solve_triangular(factor, vectors[:, :rank].T, upper=False, left=False),
    )


def _lifted(energy: torch.Tensor) -> torch.Tensor:
    """Ascending eigenvalues, those below 1e-12 of the largest lifted to that; all ones where none is positive."""
    return torch.where(energy[-1] > 0, energy.clamp_min(1e-12 * energy[-1]), torch.ones_like(energy))


def _cholesky(matrix: torch.Tensor, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """Lower factor of a positive semi-definite matrix, made invertible by a small ridge: relative to its own scale, to
    that of ``otherwise`` where it is zero, and to 1 where both are.

    A sum of float32 products is positive semi-definite up to its rounding only (few tokens, many dimensions): the ridge
    also covers the most negative eigenvalue.
    """
    scale = _mean_energy(matrix, 1.0 if otherwise is None else _mean_energy(otherwise, 1.0))
    ridge = 1e-7 * scale
    # Rounding moves no eigenvalue by more; where all are above it, none is computed to be negative.
    rounding = 4 * torch.finfo(matrix.dtype).eps * len(matrix) ** 2 * scale
    if torch.linalg.cholesky_ex(_ridged(matrix, -rounding)).info:
        ridge = ridge + 2 * (-torch.linalg.eigvalsh(matrix)[0]).clamp_min(0)
    return torch.linalg.cholesky(_ridged(matrix, ridge))


def _mean_energy(matrix: torch.Tensor, otherwise: torch.Tensor | float) -> torch.Tensor:
    """Mean of the diagonal; ``otherwise`` where it is not positive."""
    mean = matrix.diagonal().mean()
    return torch.where(mean > 0, mean, otherwise)


def _ridged(matrix: torch.Tensor, ridge: torch.Tensor) -> torch.Tensor:
    return matrix + ridge * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _moments(problem: LatentProblem, shrinkage: float, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Second moments of the inputs for keys and for values: plus ``shrinkage`` of the mean variance in every direction,
    and about zero unless ``centered``.

    Positive definite whatever the text: what does not vary counts alike in every direction.
    """
    rounding = _ROUNDING * (problem.mean.square().mean() + problem.covariance.diagonal().mean())
    covariance, value_covariance = (
        _ridged(metric, shrinkage * metric.diagonal().mean().clamp_min(0) + torch.where(rounding > 0, rounding, 1))
        for metric in (problem.covariance, problem.value_covariance)
    )
    if not centered:
        covariance = covariance + torch.outer(problem.mean, problem.mean)
        value_covariance = value_covariance + problem.value_mean.T @ problem.value_mean / problem.value_mean.shape[0]
    return covariance, value_covariance


def _balance(key: torch.Tensor, covariance: torch.Tensor, value: torch.Tensor, value_covariance: torch.Tensor) -> float:
    """Factor on keys that gives them the values' energy."""
    if not key.shape[0]:
        return 1.0
    key_energy, value_energy = (
        float(torch.einsum("me,ef,mf->", part, metric, part))
        for part, metric in ((key, covariance), (value, value_covariance))
    )
    return (value_energy / key_energy) ** 0.5 if key_energy > 0 and value_energy > 0 else 1.0


def _alternate(
    key: torch.Tensor, key_metric: torch.Tensor, value: torch.Tensor, value_metric: torch.Tensor
) -> Callable[[int], Factors]:
    """Rank -> one encoder A for two targets under two input covariances: least |K − B_K A|²_C + |V − B_V A|²_D.

    Alternating least squares from the principal components under the mean metric. For fixed decoders A solves
    B_K^T B_K A C + B_V^T B_V A D = B_K^T K C + B_V^T V D; with C = S S^T, D = S δ S^T and B_K^T B_K = Z Z^T,
    B_V^T B_V = Z γ Z^T that is elementwise: (Z^T A S)_ij = (Z^{-1} (B_K^T K S + B_V^T V S δ))_ij / (1 + γ_i δ_j).
    """
    start = _principal(torch.cat([key, value]), (key_metric + value_metric) / 2)
    basis, delta = _simultaneous(key_metric, value_metric)
    inverse = torch.linalg.inv(basis)
    key_basis, value_basis = key @ basis, value @ basis

    def factors(rank: int) -> Factors:
        _, encoder = start(rank)
        for _ in range(_SWEEPS):
            key_decoder = _decoder(key, key_metric, encoder)
            value_decoder = _decoder(value, value_metric, encoder)
            mixing, gamma = _simultaneous(key_decoder.T @ key_decoder, value_decoder.T @ value_decoder)
            right = key_decoder.T @ key_basis + value_decoder.T @ value_basis * delta
            right = torch.linalg.solve(mixing, right) / (1 + gamma[:, None] * delta)
            encoder = torch.linalg.solve(mixing.T, right) @ inverse
        # Channels of unit variance, un-correlated: a narrow cache dtype then loses none of them.
        energy, vectors = torch.linalg.eigh(encoder @ key_metric @ encoder.T)
        encoder = (vectors / _lifted(energy).sqrt()).T @ encoder
        decoder = torch.cat([_decoder(key, key_metric, encoder), _decoder(value, value_metric, encoder)])
        return decoder, encoder

    return factors


def _simultaneous(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """S and δ with first = S S^T and second = S diag(δ) S^T."""
    factor = _cholesky(first, second)
    inner = torch.linalg.solve_triangular(factor, second, upper=False)
    inner = torch.linalg.solve_triangular(factor, inner.mT, upper=False)
    delta, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    return factor @ vectors, delta.clamp_min(0)


def _decoder(target: torch.Tensor, metric: torch.Tensor, encoder: torch.Tensor) -> torch.Tensor:
    """Best B for a fixed encoder: T C A^T (A C A^T)^{-1}."""
    seen = metric @ encoder.T
    gram = encoder @ seen
    return torch.linalg.solve(_ridged(gram, 1e-9 * _mean_energy(gram, 1.0)), (target @ seen).T).T


def _roots(metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric square root and inverse root per head, [h, d, d]."""
    if metric.shape[-1] == 0:
        return metric, metric
    energy, vectors = torch.linalg.eigh((metric + metric.mT) / 2)
    # Directions that are hardly read must stay invertible, and so must heads that are not read at all.
    largest = energy.amax()
    least = (1e-6 * energy.amax(-1, keepdim=True)).clamp_min(torch.where(largest > 0, 1e-12 * largest, 1))
    energy = energy.clamp_min(least).sqrt()
    return (vectors * energy[:, None]) @ vectors.mT, (vectors / energy[:, None]) @ vectors.mT
