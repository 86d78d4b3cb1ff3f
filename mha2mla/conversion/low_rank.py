"""One latent for the un-rotated keys and the values of a layer: the factorisations, and the metrics they minimise."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mha2mla.conversion.recipe import Recipe


@dataclass(frozen=True)
class LatentFactors:
    """c = ``encoder`` u; un-rotated keys ≈ ``key_decoder`` c; values ≈ ``value_decoder`` c + ``value_offset``.

    All float64; u is the encoder's input, E wide.

    Attributes:
        encoder: [d_c, E].
        key_decoder: [h_kv, d_n, d_c].
        value_decoder: [h_kv, d_v, d_c].
        value_offset: [h_kv, d_v]; zero unless centred.
    """

    encoder: torch.Tensor
    key_decoder: torch.Tensor
    value_decoder: torch.Tensor
    value_offset: torch.Tensor


@dataclass(frozen=True)
class LatentProblem:
    """What a latent must reproduce, and how errors count. All float64.

    Attributes:
        key: [h_kv, d_n, E], un-rotated keys as linear functions of u (without what is constant over tokens).
        value: [h_kv, d_v, E], values without their bias.
        key_metric: [h_kv, d_n, d_n], cost of a key error e is e^T M e: second moment of the queries that read it.
        value_metric: [h_kv, d_v, d_v], cost of a value error: W_O^T W_O of the heads that read it.
        mean: [E], mean of u; None when no statistics were taken.
        covariance: [E, E], centred covariance of u; None when no statistics were taken.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_metric: torch.Tensor
    value_metric: torch.Tensor
    mean: torch.Tensor | None
    covariance: torch.Tensor | None


def factorise(problem: LatentProblem, rank: int, recipe: Recipe) -> LatentFactors:
    """A latent of ``rank`` numbers by ``recipe.low_rank``; exact, with selections for decoders, when it holds everything."""
    key, value = problem.key.flatten(0, 1), problem.value.flatten(0, 1)
    rows = key.shape[0] + value.shape[0]
    if rank >= rows:
        encoder = torch.cat([key, value, key.new_zeros(rank - rows, key.shape[1])])
        decoder = torch.eye(rows, rank, dtype=key.dtype, device=key.device)
    elif recipe.low_rank == "svd-joint":
        decoder, encoder = _principal(torch.cat([key, value]), None, rank)
    elif recipe.low_rank == "svd-split":
        decoder, encoder = _split(key, value, rank)
    else:
        decoder, encoder = _whitened(problem, rank, recipe)
    key_decoder = decoder[: key.shape[0]].view(*problem.key.shape[:2], rank)
    value_decoder = decoder[key.shape[0] :].view(*problem.value.shape[:2], rank)
    offset = torch.zeros(problem.value.shape[:2], dtype=key.dtype, device=key.device)
    if recipe.centered and problem.mean is not None and rank < rows:
        offset = problem.value @ problem.mean - value_decoder @ (encoder @ problem.mean)
    return LatentFactors(encoder, key_decoder, value_decoder, offset)


def _principal(target: torch.Tensor, covariance: torch.Tensor | None, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Best rank-``rank`` ``decoder @ encoder`` ≈ ``target`` [m, E] in the norm E|(target − decoder encoder) u|².

    With C the covariance of u (None: identity, plain SVD) and U the leading eigenvectors of T C T^T, the optimum is
    U U^T T: the same matrix as the truncated SVD of T C^{1/2} times C^{-1/2}, without inverting C. The latent's channels
    are scaled to unit variance, so that no channel is lost in a narrow cache dtype.
    """
    energy, vectors = torch.linalg.eigh(target @ target.T if covariance is None else target @ covariance @ target.T)
    energy, vectors = energy.flip(0)[:rank], vectors.flip(1)[:, :rank]
    scale = energy.clamp_min(1e-12 * energy[0].clamp_min(torch.finfo(energy.dtype).tiny)).sqrt()
    return vectors * scale, (vectors / scale).T @ target


def _split(key: torch.Tensor, value: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values apart, the rank in proportion to their widths; nobody gets more than its width."""
    key_rank = min(round(rank * key.shape[0] / (key.shape[0] + value.shape[0])), key.shape[0])
    value_rank = min(rank - key_rank, value.shape[0])
    key_rank = rank - value_rank
    decoder = key.new_zeros(key.shape[0] + value.shape[0], rank)
    encoders = []
    if key_rank:
        decoder[: key.shape[0], :key_rank], encoder = _principal(key, None, key_rank)
        encoders.append(encoder)
    if value_rank:
        decoder[key.shape[0] :, key_rank:], encoder = _principal(value, None, value_rank)
        encoders.append(encoder)
    return decoder, torch.cat(encoders)


def _whitened(problem: LatentProblem, rank: int, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    covariance = problem.covariance
    if not recipe.centered:
        covariance = covariance + torch.outer(problem.mean, problem.mean)
    key_root, key_inverse = _roots(problem.key_metric, recipe.query_weighting)
    value_root, value_inverse = _roots(problem.value_metric, recipe.output_weighting)
    key, value = (key_root @ problem.key).flatten(0, 1), (value_root @ problem.value).flatten(0, 1)
    gain = 1.0
    if key.shape[0]:
        energy = [torch.einsum("me,ef,mf->", part, covariance, part).clamp_min(1e-300) for part in (key, value)]
        gain = float((recipe.key_weight * energy[1] / energy[0]).sqrt())
    decoder, encoder = _principal(torch.cat([gain * key, value]), covariance, rank)
    rows = key.shape[0]
    key_part = key_inverse @ decoder[:rows].view(*problem.key.shape[:2], rank) / gain
    value_part = value_inverse @ decoder[rows:].view(*problem.value.shape[:2], rank)
    return torch.cat([key_part.flatten(0, 1), value_part.flatten(0, 1)]), encoder


def _roots(metric: torch.Tensor, weighted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric square root and inverse root per head, [h, d, d]; identities when not ``weighted``."""
    if not weighted or metric.shape[-1] == 0:
        identity = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device).expand_as(metric)
        return identity, identity
    energy, vectors = torch.linalg.eigh((metric + metric.mT) / 2)
    # Directions that hardly anybody reads must stay invertible.
    energy = energy.clamp_min(1e-6 * energy.amax(-1, keepdim=True) + torch.finfo(energy.dtype).tiny).sqrt()
    return (vectors * energy[:, None]) @ vectors.mT, (vectors / energy[:, None]) @ vectors.mT
