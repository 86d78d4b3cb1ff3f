"""Closed-form fits of one layer to the source's attention on a sample of its inputs: no gradient steps, no labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mha2mla.conversion.calibration.statistics import GOLDEN, AttentionSample
from mha2mla.conversion.families import AttentionWeights, SourceSpec, visible
from mha2mla.conversion.rope import RotaryBasis, rotary_table, rotate
from mha2mla.modeling.modeling_mha2mla import apply_rope

_STEPS = 2  # conjugate-gradient steps; more overfit the sample
_RIDGE = 0.3  # keeps to the start, relative to the energy of a direction
_OUTPUT_STRIDE = 2
_OUTPUT_RIDGES = (0.003, 0.03, 0.3, 3.0)  # relative to the mean energy of a feature

Table = tuple[torch.Tensor, torch.Tensor]  # cos and sin


@dataclass(frozen=True)
class KeyMaps:
    """Keys as linear functions of u (``LayerStatistics``), for queries to be fitted to.

    Attributes:
        nope: [h_kv, d_n, E], un-rotated keys; a constant may be left out.
        rotary: [d_r, E], the one rotary key before RoPE; None where rotary scores are given.
        rotary_bias: [d_r], what it adds.
        inv_freq: [1, d_r / 2], its frequencies, and ``scaling`` of them (``basis.rotate``).
    """

    nope: torch.Tensor
    rotary: torch.Tensor | None = None
    rotary_bias: torch.Tensor | None = None
    inv_freq: torch.Tensor | None = None
    scaling: float = 1.0

    def table(self, position: torch.Tensor, dtype: torch.dtype) -> Table | None:
        """cos and sin at ``position`` [length]; None without a rotary key."""
        return None if self.rotary is None else rotary_table(self.inv_freq, position, self.scaling, dtype)

    def turned(self, x: torch.Tensor, table: Table | None) -> torch.Tensor:
        """x [H, length, d_n + d_r] with RoPE on its rotary part; with −sin: the adjoint of that."""
        if table is None:
            return x
        nope, rotary = x.split((self.nope.shape[1], self.rotary.shape[0]), -1)
        return torch.cat([nope, apply_rope(rotary, *table)], -1)


def fitted_queries(basis: RotaryBasis, maps: KeyMaps) -> torch.Tensor:
    """[H, d_n (+ d_r), d]: the queries that read the keys of ``maps``."""
    return basis.query_nope if maps.rotary is None else torch.cat([basis.query_nope, basis.query_rope], 1)


def refit_queries(
    spec: SourceSpec, windows: Sequence[ScoreWindow], query_map: torch.Tensor, maps: KeyMaps
) -> torch.Tensor:
    """Least-squares queries for given keys: [H, d_n (+ d_r), d], float64, in place of ``query_map``.

    Least squares on the source's scores, less rotary ones where these are given (``ScoreWindow.target``): e[s, t]. A
    query s sees its errors under its own attention p, and softmax drops what is the same for all tokens, so the loss is
    Σ_s Σ_t p[s,t] (q_s · M k_t − e[s,t])², both centred under p: twice the KL divergence of the attention to second
    order. A mean phase is the solution in which queries, keys and distances are independent; this one knows how they
    go together.

    The normal equations of M are too large to form. Conjugate gradients start at ``query_map``, preconditioned by the
    second moment of the queries times the within-attention covariance of the keys. M's rotary rows turn with the query,
    k_t's with the token. A head keeps its start unless the loss falls: where attention is all on one token, keys have
    no covariance beyond rounding, and no step means anything.

    Args:
        windows: of a sample of the layer's inputs (:func:`score_windows`).
        query_map: [H, d_n, d], where to start; with a rotary key among ``maps`` [H, d_n + d_r, d].
    """
    scale = spec.softmax_scale
    asked = [window.asked(maps) for window in windows]
    start = query_map.double()
    count = sum(window.query.shape[1] * window.share for window in windows)
    query_moment = sum((window.query.mT @ window.query).double() * window.share for window in windows) / count
    key_moment, key_energy = (
        sum(part) / count
        for part in zip(*(w.key_covariance(keys) for w, keys in zip(windows, asked, strict=True)), strict=True)
    )
    query_inverse, query_metric = _regularised(query_moment, 0.0)
    key_inverse, key_metric = _regularised(key_moment, torch.finfo(windows[0].query.dtype).eps * key_energy)

    def normal(step: torch.Tensor) -> torch.Tensor:
        image = sum(w.pull(w.scores(step, keys), keys) for w, keys in zip(windows, asked, strict=True))
        return scale**2 * (image / count + _RIDGE * (key_metric @ step @ query_metric))

    def precondition(vector: torch.Tensor) -> torch.Tensor:
        return key_inverse @ vector @ query_inverse / scale**2

    def errors(queries: torch.Tensor) -> Iterator[tuple[ScoreWindow, AskedKeys, torch.Tensor]]:
        for window, keys in zip(windows, asked, strict=True):
            yield window, keys, window.target - window.scores(queries, keys) * scale

    residual, before = torch.zeros_like(start), 0
    for window, keys, error in errors(start):
        residual += window.pull(error, keys) * scale / count
        before = before + window.loss(error)
    step, conjugate = torch.zeros_like(start), precondition(residual)
    product = _inner(residual, conjugate)
    for _ in range(_STEPS):
        image = normal(conjugate)
        length = _quotient(product, _inner(conjugate, image))
        step, residual = step + length * conjugate, residual - length * image
        turned = precondition(residual)
        following = _inner(residual, turned)
        conjugate = turned + _quotient(following, product) * conjugate
        product = following
    after = sum(window.loss(error) for window, _, error in errors(start + step))
    return torch.where((after < before)[:, None, None], start + step, start)


def refit_output(
    spec: SourceSpec,
    weights: AttentionWeights,
    sample: AttentionSample,
    basis: RotaryBasis,
    maps: KeyMaps,
    value_map: torch.Tensor,
    value_offset: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Changes to W_O, and to the bias where there is a ``value_offset``, that bring the output back to the source's.

    Ridge regression of the source attention's output, less the converted one's, on the converted heads' outputs; the
    ridge is chosen by the last quarter of the sample.

    Args:
        maps: keys after the latent. ``value_map``: [h_kv, d_v, E], values likewise.
        value_offset: [H, d_v] of ``LatentFactors``.

    Returns:
        [hidden, H * d_v] and [hidden] or None, float64.
    """
    dtype = sample.hidden[0].dtype
    out = weights.o_weight.to(dtype)
    offset = 0 if value_offset is None else value_offset.to(dtype)
    heads, errors, shares = [], [], []
    value_weight = weights.v_weight.to(dtype).view(*value_map.shape[:2], -1)
    for index, hidden in enumerate(sample.hidden):
        stride = max(_OUTPUT_STRIDE, math.ceil(len(hidden) ** 2 / sample.pairs))
        window, rotary = _score_window(
            spec, weights, hidden, sample.window, basis if maps.rotary is None else None, stride, index
        )
        value = torch.einsum("ade,te->atd", value_weight, hidden)
        approximate = torch.einsum("ade,te->atd", value_map.to(dtype), window.features)
        converted = _converted(spec, window, rotary, fitted_queries(basis, maps).to(dtype), maps)
        source = _attend(window.weight, value, spec).flatten(1)
        found = _attend(converted, approximate, spec)
        heads.append(found.flatten(1))
        errors.append((source - (found + offset).flatten(1)) @ out.T)
        shares.append(torch.full((len(found), 1), float(stride), dtype=torch.float64, device=found.device))
    features, error, share = torch.cat(heads).double(), torch.cat(errors).double(), torch.cat(shares)
    centred = value_offset is not None
    kept = max(1, len(features) * 3 // 4)
    # A ridge that does not help the last quarter of the sample is no ridge to use; without any nothing changes.
    fitted, judged = slice(None, kept), slice(kept, None)
    plain = error[judged] - _mean(error[fitted], share[fitted], centred)
    losses = {None: float((plain.square() * share[judged]).sum())}
    moments = _moments(features[fitted], error[fitted], share[fitted], centred)
    for ridge in _OUTPUT_RIDGES:
        change = _ridge_regression(moments, ridge)
        left = error[judged] - moments.target_mean - (features[judged] - moments.mean) @ change.T
        losses[ridge] = float((left.square() * share[judged]).sum())
    best = min(losses, key=losses.__getitem__)
    if best is None:
        error_mean = _mean(error, share, centred)
        return torch.zeros_like(weights.o_weight, dtype=torch.float64), error_mean if centred else None
    moments = _moments(features, error, share, centred)
    change = _ridge_regression(moments, best)
    return change, moments.target_mean - change @ moments.mean if centred else None


def _mean(rows: torch.Tensor, share: torch.Tensor, centred: bool) -> torch.Tensor:
    """Mean of rows [n, width] with weights ``share`` [n, 1]; zero unless ``centred``."""
    return (rows * share).sum(0) / share.sum() if centred else torch.zeros_like(rows[0])


@dataclass(frozen=True)
class _Moments:
    """Moments of a regression about the means of both: ``gram`` [features, features], ``cross`` [features, targets]."""

    gram: torch.Tensor
    cross: torch.Tensor
    mean: torch.Tensor
    target_mean: torch.Tensor


def _moments(features: torch.Tensor, target: torch.Tensor, share: torch.Tensor, centred: bool) -> _Moments:
    """Moments of rows with weights ``share`` [n, 1]; the means are zero unless ``centred``."""
    mean, target_mean = (_mean(rows, share, centred) for rows in (features, target))
    features = features - mean
    counted = features * share
    return _Moments(counted.T @ features, counted.T @ (target - target_mean), mean, target_mean)


def _ridge_regression(moments: _Moments, ridge: float) -> torch.Tensor:
    """Coefficients [targets, features]; ``ridge`` is relative to the mean energy of a feature."""
    gram = moments.gram.clone()
    energy = gram.diagonal().mean()
    gram.diagonal().add_(torch.where(energy > 0, ridge * energy, 1))  # a target of zeros gets a map of zeros
    return torch.linalg.solve(gram, moments.cross).T


@dataclass(frozen=True)
class ScoreWindow:
    """Some queries of one window with their scores, and the rest that a rotary part leaves.

    Attributes:
        query: [H, queries, d], before RoPE.
        features: [length, E], what un-rotated keys are linear functions of.
        weight: [H, queries, length], the source's attention.
        lost: [H, queries, length], the source's scaled scores less a given rotary part.
        position: [queries], theirs.
        share: how much a query counts: those of a window that has fewer stand for their neighbours.
    """

    query: torch.Tensor
    features: torch.Tensor
    weight: torch.Tensor
    lost: torch.Tensor
    position: torch.Tensor
    share: float

    @property
    def target(self) -> torch.Tensor:
        """``lost``, centred under ``weight``."""
        return self.lost - (self.weight * self.lost).sum(-1, keepdim=True)

    def keys(self, maps: KeyMaps) -> torch.Tensor:
        """Keys [H, length, d_n (+ d_r)], rotary ones turned to their places."""
        heads, dtype = self.query.shape[0], self.features.dtype
        keys = torch.einsum("ane,te->atn", maps.nope.to(dtype), self.features)
        keys = keys.repeat_interleave(heads // keys.shape[0], 0)
        if maps.rotary is None:
            return keys
        rotary = torch.nn.functional.linear(self.features, maps.rotary.to(dtype), maps.rotary_bias.to(dtype))
        table = maps.table(torch.arange(len(rotary), device=rotary.device), dtype)
        return maps.turned(torch.cat([keys, rotary.expand(heads, -1, -1)], -1), table)

    def asked(self, maps: KeyMaps) -> AskedKeys:
        """The keys with their means; both less what each head sees on average, which keeps rounding small."""
        keys = self.keys(maps)
        mass = self.weight.sum(1, keepdim=True)  # [H, 1, length]
        keys = keys - mass @ keys / mass.sum(-1, keepdim=True)
        return AskedKeys(keys, self.weight @ keys, maps, maps.table(self.position, self.query.dtype))

    def scores(self, query_map: torch.Tensor, asked: AskedKeys) -> torch.Tensor:
        """Scores without their scale, centred under ``weight``, of query maps [H, d_n (+ d_r), d]."""
        query = asked.maps.turned(self.query @ query_map.to(self.query.dtype).mT, asked.table)
        return torch.baddbmm((query * asked.mean).sum(-1, keepdim=True), query, asked.keys.mT, beta=-1)

    def pull(self, errors: torch.Tensor, asked: AskedKeys) -> torch.Tensor:
        """The adjoint of :meth:`scores` under the weights: [H, d_n (+ d_r), d], float64."""
        weighted = self.weight * errors
        pulled = torch.baddbmm(weighted.sum(-1, keepdim=True) * asked.mean, weighted, asked.keys, beta=-1)
        back = None if asked.table is None else (asked.table[0], -asked.table[1])
        return (asked.maps.turned(pulled, back).mT @ self.query).double() * self.share

    def loss(self, errors: torch.Tensor) -> torch.Tensor:
        """[H], squared errors of scores under the weights."""
        return (self.weight * errors.square()).sum((1, 2), dtype=torch.float64) * self.share

    def key_covariance(self, asked: AskedKeys) -> tuple[torch.Tensor, torch.Tensor]:
        """[H, n, n] of the keys under a query's attention, summed over queries, and [H] the largest energy that was
        subtracted in it, both float64; of rotary keys, which every query sees turned otherwise, what no turn changes:
        the energy of each pair."""
        keys, mean, nope = asked.keys, asked.mean, asked.maps.nope.shape[1]
        moment = ((keys * self.weight.sum(1)[..., None]).mT @ keys).double() * self.share
        covariance = moment - (mean.mT @ mean).double() * self.share
        if asked.maps.rotary is not None:
            first, second = covariance.diagonal(dim1=-2, dim2=-1)[:, nope:].chunk(2, -1)
            rotary = torch.diag_embed(((first + second) / 2).repeat(1, 2))
            un_rotated = covariance[:, :nope, :nope]
            covariance = torch.zeros_like(covariance)
            covariance[:, :nope, :nope], covariance[:, nope:, nope:] = un_rotated, rotary
        return covariance, moment.diagonal(dim1=-2, dim2=-1).amax(-1)


@dataclass(frozen=True)
class AskedKeys:
    """``keys`` [H, length, d_n (+ d_r)] of a window by some ``maps``, and their ``mean`` under each query's attention
    [H, queries, d_n (+ d_r)]; ``table``: cos and sin of the queries.

    Scores are linear in keys, so that the mean score of a query is its score with the mean key.
    """

    keys: torch.Tensor
    mean: torch.Tensor
    maps: KeyMaps
    table: Table | None


def score_windows(
    spec: SourceSpec, weights: AttentionWeights, sample: AttentionSample, basis: RotaryBasis | None
) -> list[ScoreWindow]:
    """Every window of a sample as :func:`refit_queries` sees it: the rotary part is ``basis``'s, if one is given, and
    the rest is free.

    All queries, as long as there is room for their scores. Leaving out neighbours costs more than leaving out windows
    (docs/notes/closed-form.md).
    """
    windows = Counter(map(len, sample.hidden))
    strides = {length: math.ceil(count * length**2 / sample.pairs) for length, count in windows.items()}
    return [
        _score_window(spec, weights, hidden, sample.window, basis, strides[len(hidden)], index)[0]
        for index, hidden in enumerate(sample.hidden)
    ]


def _score_window(
    spec: SourceSpec,
    weights: AttentionWeights,
    hidden: torch.Tensor,
    window: int | None,
    basis: RotaryBasis | None,
    stride: int,
    index: int,
) -> tuple[ScoreWindow, torch.Tensor]:
    """Every ``stride``-th query of the inputs [length, hidden] of window number ``index``; and the rotary part of its
    scores [H, queries, length] ([1, queries, length] where there is none), minus infinity for what it does not see.

    Windows begin at different queries, spread evenly: at the same positions in all of them, the turn of a pair between
    a query and the first token, which many heads look at most, would be seen at a few angles only.
    """
    dtype, device, length = hidden.dtype, hidden.device, hidden.shape[0]
    first = min(int(index * GOLDEN % 1 * stride), length - 1)
    chosen = torch.arange(first, length, stride, device=device)
    query = spec.heads(hidden[chosen], weights, "q").transpose(0, 1)  # [H, queries, d]
    key = spec.heads(hidden, weights, "k").transpose(0, 1)  # [h_kv, length, d]
    position = torch.arange(length, device=device)
    turned, turned_key = (
        rotate(x, spec.inv_freq[None], at, spec.attention_factor) for x, at in ((query, chosen), (key, position))
    )
    score = turned @ turned_key.repeat_interleave(spec.group_size, 0).mT * spec.softmax_scale
    unseen = ~visible(chosen, position, window)
    weight = score.masked_fill(unseen, float("-inf")).softmax(-1)

    stacked = key.transpose(0, 1).flatten(1)
    rotary = torch.zeros_like(score[:1])
    if basis is not None:
        groups = basis.inv_freq.shape[0]
        k_pe = rotate((basis.key_rope.to(dtype) @ stacked.T).mT, basis.inv_freq, position, spec.attention_factor)
        q_pe = query @ basis.query_rope.to(dtype).mT
        q_pe = rotate(q_pe, basis.inv_freq.repeat_interleave(q_pe.shape[0] // groups, 0), chosen, spec.attention_factor)
        rotary = q_pe @ k_pe.repeat_interleave(q_pe.shape[0] // groups, 0).mT * spec.softmax_scale
    scores = ScoreWindow(
        query=query,
        features=torch.cat([stacked, hidden], -1) if spec.qk_norm else hidden,
        weight=weight,
        lost=score if basis is None else score - rotary,
        position=chosen,
        share=float(stride),
    )
    return scores, rotary.masked_fill(unseen, float("-inf"))


def _converted(
    spec: SourceSpec, window: ScoreWindow, rotary: torch.Tensor, query_map: torch.Tensor, maps: KeyMaps
) -> torch.Tensor:
    """The converted layer's attention [H, queries, length], of both results of :func:`_score_window`."""
    query = maps.turned(window.query @ query_map.mT, maps.table(window.position, window.query.dtype))
    scores = query @ window.keys(maps).mT
    return (rotary + scores * spec.softmax_scale).softmax(-1)


def _attend(weight: torch.Tensor, value: torch.Tensor, spec: SourceSpec) -> torch.Tensor:
    """weight [H, queries, length], value [h_kv, length, d_v] -> [queries, H, d_v]."""
    return (weight @ value.repeat_interleave(spec.group_size, 0)).transpose(0, 1)


def _inner(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Per head: heads are separate problems."""
    return (first * second).sum((-2, -1), keepdim=True)


def _quotient(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``first / second``, 0 where rounding has left nothing positive to divide by."""
    return torch.where(second > 0, first / second, 0)


def _regularised(moment: torch.Tensor, rounding: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse and matrix of a positive semi-definite [H, n, n], float64, its small eigenvalues lifted: to a thousandth
    of the largest, and above ``rounding`` [H]. Both are zero where it is."""
    energy, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
    energy = energy.clamp_min(0)
    energy = energy + (1e-3 * energy[..., -1] + rounding)[..., None]
    inverse = _quotient(torch.ones_like(energy), energy)
    return tuple((vectors * part[..., None, :]) @ vectors.mT for part in (inverse, energy))
