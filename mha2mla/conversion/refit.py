"""Closed-form fits of one layer to the source's attention on a sample of its inputs: no gradient steps, no labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mha2mla.conversion.adapters import AttentionWeights, SourceSpec
from mha2mla.conversion.calibration import AttentionSample
from mha2mla.conversion.rotary_basis import RotaryBasis, rotate

_QUERY_STRIDE = 8  # neighbouring queries are alike
_STEPS = 2  # of conjugate gradients; more fit the sample and not the next text
_RIDGE = 0.3  # keeps to the start, relative to the energy of a direction
_OUTPUT_STRIDE = 2
_OUTPUT_RIDGES = (0.003, 0.03, 0.3, 3.0)  # relative to the mean energy of a feature


def refit_queries(
    spec: SourceSpec, weights: AttentionWeights, sample: AttentionSample, basis: RotaryBasis, key_map: torch.Tensor
) -> torch.Tensor:
    """What un-rotated queries should be for given un-rotated keys: [H, d_n, d], float64, in place of ``query_nope``.

    Least squares on what rotary keys leave of the source's scores, e[s, t] = score − score of the rotary part. A query
    s sees its errors under its own attention p, and softmax drops what is the same for all tokens, so the loss is
    Σ_s Σ_t p[s,t] (q_s · M k_t − e[s,t])², both centred under p: twice the KL divergence of the attention to second
    order. A mean phase is the solution in which queries, keys and distances are independent; this one knows how they
    go together.

    The normal equations of M are too large to form. Conjugate gradients start at ``basis.query_nope``, preconditioned
    by the second moment of the queries times the within-attention covariance of the keys.

    Args:
        weights: of the source layer.
        sample: of its inputs.
        key_map: [h_kv, d_n, E], un-rotated keys as linear functions of u (``LayerStatistics``); a constant may be left
            out.
    """
    dtype, scale = sample.hidden.dtype, spec.softmax_scale
    windows = [
        _score_window(spec, weights, sample, index, basis, key_map, _QUERY_STRIDE)
        for index in range(len(sample.hidden))
    ]
    start = basis.query_nope.to(dtype)
    count = sum(window.query.shape[1] for window in windows)
    query_moment = sum(window.query.mT @ window.query for window in windows) / count
    key_moment = sum(window.key_covariance() for window in windows) / count
    query_inverse, query_metric = _regularised(query_moment)
    key_inverse, key_metric = _regularised(key_moment)

    def gradient(errors: list[torch.Tensor]) -> torch.Tensor:
        return sum(w.pull(error) for w, error in zip(windows, errors, strict=True)) * scale / count

    def normal(step: torch.Tensor) -> torch.Tensor:
        return gradient([window.scores(step) * scale for window in windows]) + _RIDGE * scale**2 * (
            key_metric @ step @ query_metric
        )

    def precondition(vector: torch.Tensor) -> torch.Tensor:
        return key_inverse @ vector @ query_inverse / scale**2

    residual = gradient([window.target - window.scores(start) * scale for window in windows])
    step, conjugate = torch.zeros_like(start), precondition(residual)
    product = _inner(residual, conjugate)
    for _ in range(_STEPS):
        image = normal(conjugate)
        length = product / _inner(conjugate, image).clamp_min(torch.finfo(dtype).tiny)
        step, residual = step + length * conjugate, residual - length * image
        turned = precondition(residual)
        following = _inner(residual, turned)
        conjugate = turned + following / product.clamp_min(torch.finfo(dtype).tiny) * conjugate
        product = following
    return (start + step).double()


def refit_output(
    spec: SourceSpec,
    weights: AttentionWeights,
    sample: AttentionSample,
    basis: RotaryBasis,
    key_map: torch.Tensor,
    value_map: torch.Tensor,
    value_offset: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Changes to W_O, and to the bias where there is a ``value_offset``, that bring the output back to the source's.

    Ridge regression of the source attention's output, less the converted one's, on the converted heads' outputs; the
    ridge is chosen by the last quarter of the sample.

    Args:
        key_map, value_map: [h_kv, d_n, E] and [h_kv, d_v, E], un-rotated keys and values after the latent.
        value_offset: [H, d_v] of ``LatentFactors``.

    Returns:
        [hidden, H * d_v] and [hidden] or None, float64.
    """
    dtype = sample.hidden.dtype
    out = weights.o_weight.to(dtype)
    offset = 0 if value_offset is None else value_offset.to(dtype)
    heads, errors = [], []
    for index in range(len(sample.hidden)):
        window = _score_window(spec, weights, sample, index, basis, key_map, _OUTPUT_STRIDE)
        features = _features(spec, weights, sample.hidden[index])
        value = torch.einsum(
            "ade,te->atd", weights.v_weight.to(dtype).view(*value_map.shape[:2], -1), sample.hidden[index]
        )
        approximate = torch.einsum("ade,te->atd", value_map.to(dtype), features)
        converted = window.converted(basis.query_nope.to(dtype), spec)
        source = _attend(window.weight, value, spec).flatten(1)
        found = _attend(converted, approximate, spec)
        heads.append(found.flatten(1))
        errors.append((source - (found + offset).flatten(1)) @ out.T)
    features, error = torch.cat(heads).double(), torch.cat(errors).double()
    centred = value_offset is not None
    kept = len(features) * 3 // 4
    # A ridge that does not help the last quarter of the sample is no ridge to use; without any nothing changes.
    losses = {None: float(_centred(error[kept:], error[:kept], centred).square().sum())}
    for ridge in _OUTPUT_RIDGES:
        change, mean, error_mean = _ridge_regression(features[:kept], error[:kept], ridge, centred)
        left = error[kept:] - error_mean - (features[kept:] - mean) @ change.T
        losses[ridge] = float(left.square().sum())
    best = min(losses, key=losses.__getitem__)
    if best is None:
        error_mean = error.mean(0)
        return torch.zeros_like(weights.o_weight, dtype=torch.float64), error_mean if centred else None
    change, mean, error_mean = _ridge_regression(features, error, best, centred)
    return change, error_mean - change @ mean if centred else None


def _centred(values: torch.Tensor, reference: torch.Tensor, centred: bool) -> torch.Tensor:
    return values - reference.mean(0) if centred else values


def _ridge_regression(
    features: torch.Tensor, target: torch.Tensor, ridge: float, centred: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients [targets, features] and both means (zero unless ``centred``)."""
    mean = features.mean(0) if centred else torch.zeros_like(features[0])
    target_mean = target.mean(0) if centred else torch.zeros_like(target[0])
    features, target = features - mean, target - target_mean
    gram = features.T @ features
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    return torch.linalg.solve(gram, features.T @ target).T, mean, target_mean


@dataclass(frozen=True)
class _ScoreWindow:
    """Some queries of one window and all its keys.

    query [H, queries, d] before RoPE; key [H, length, d_n] un-rotated; weight [H, queries, length] of the source's
    attention; target [H, queries, length], its scaled scores less the rotary part, centred under ``weight``.
    """

    query: torch.Tensor
    key: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    rotary: torch.Tensor
    hidden: torch.Tensor

    def centre(self, scores: torch.Tensor) -> torch.Tensor:
        return scores - (self.weight * scores).sum(-1, keepdim=True)

    def scores(self, query_map: torch.Tensor) -> torch.Tensor:
        """Centred scores without their scale of query maps [H, d_n, d]."""
        return self.centre(self.query @ query_map.mT @ self.key.mT)

    def pull(self, errors: torch.Tensor) -> torch.Tensor:
        """The adjoint of :meth:`scores` under the weights: [H, d_n, d]."""
        return ((self.weight * errors) @ self.key).mT @ self.query

    def key_covariance(self) -> torch.Tensor:
        """[H, d_n, d_n] of the keys under a query's attention, summed over queries."""
        mean = self.weight @ self.key
        return (self.key * self.weight.sum(1)[..., None]).mT @ self.key - mean.mT @ mean

    def converted(self, query_map: torch.Tensor, spec: SourceSpec) -> torch.Tensor:
        """The converted layer's attention, [H, queries, length]."""
        scores = self.rotary + self.query @ query_map.mT @ self.key.mT * spec.softmax_scale
        return scores.masked_fill(self.hidden, float("-inf")).softmax(-1)


def _score_window(
    spec: SourceSpec,
    weights: AttentionWeights,
    sample: AttentionSample,
    index: int,
    basis: RotaryBasis,
    key_map: torch.Tensor,
    stride: int,
) -> _ScoreWindow:
    hidden = sample.hidden[index]
    dtype, device, length = hidden.dtype, hidden.device, hidden.shape[0]
    chosen = torch.arange(length - 1, -1, -stride, device=device).flip(0)
    query = _project(spec, hidden[chosen], weights.q_weight, weights.q_bias, weights.q_norm)  # [H, queries, d]
    key = _project(spec, hidden, weights.k_weight, weights.k_bias, weights.k_norm)  # [h_kv, length, d]
    position = torch.arange(length, device=device)
    turned, turned_key = (
        rotate(x, spec.inv_freq[None], at, spec.attention_factor) for x, at in ((query, chosen), (key, position))
    )
    score = turned @ turned_key.repeat_interleave(spec.group_size, 0).mT * spec.softmax_scale
    ahead = position[None] - chosen[:, None]
    unseen = ahead > 0
    if sample.window is not None:
        unseen |= ahead <= -sample.window
    weight = score.masked_fill(unseen, float("-inf")).softmax(-1)

    groups = basis.inv_freq.shape[0]
    stacked = key.transpose(0, 1).flatten(1)
    k_pe = rotate((basis.key_rope.to(dtype) @ stacked.T).mT, basis.inv_freq, position, spec.attention_factor)
    q_pe = query @ basis.query_rope.to(dtype).mT
    q_pe = rotate(q_pe, basis.inv_freq.repeat_interleave(q_pe.shape[0] // groups, 0), chosen, spec.attention_factor)
    rotary = q_pe @ k_pe.repeat_interleave(q_pe.shape[0] // groups, 0).mT * spec.softmax_scale
    un_rotated = torch.einsum("ane,te->atn", key_map.to(dtype), _features(spec, weights, hidden))
    window = _ScoreWindow(
        query=query,
        key=un_rotated.repeat_interleave(spec.group_size, 0),
        weight=weight,
        target=score - rotary,
        rotary=rotary,
        hidden=unseen,
    )
    return _ScoreWindow(**{**vars(window), "target": window.centre(window.target)})


def _project(
    spec: SourceSpec,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
) -> torch.Tensor:
    """hidden [length, hidden] -> queries or keys before RoPE, [heads, length, d]."""
    dtype = hidden.dtype
    projected = torch.nn.functional.linear(hidden, weight.to(dtype), None if bias is None else bias.to(dtype))
    return spec.split_heads(projected, None if norm is None else norm.to(dtype)).transpose(0, 1)


def _features(spec: SourceSpec, weights: AttentionWeights, hidden: torch.Tensor) -> torch.Tensor:
    """u [length, E] of ``LayerStatistics``."""
    if not spec.qk_norm:
        return hidden
    key = _project(spec, hidden, weights.k_weight, weights.k_bias, weights.k_norm)
    return torch.cat([key.transpose(0, 1).flatten(1), hidden], -1)


def _attend(weight: torch.Tensor, value: torch.Tensor, spec: SourceSpec) -> torch.Tensor:
    """weight [H, queries, length], value [h_kv, length, d_v] -> [queries, H, d_v]."""
    return (weight @ value.repeat_interleave(spec.group_size, 0)).transpose(0, 1)


def _inner(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Per head: heads are separate problems."""
    return (first * second).sum((-2, -1), keepdim=True)


def _regularised(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse and matrix of a positive semi-definite [H, n, n], its small eigenvalues lifted."""
    energy, vectors = torch.linalg.eigh((moment + moment.mT).double() / 2)
    energy = energy.clamp_min(0) + 1e-3 * energy[..., -1:] + torch.finfo(torch.float32).tiny
    inverse, matrix = ((vectors * part[..., None, :]) @ vectors.mT for part in (1 / energy, energy))
    return inverse.to(moment.dtype), matrix.to(moment.dtype)
