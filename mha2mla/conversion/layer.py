"""Conversion of one layer: source weights and statistics in, the tensors of an MLA layer out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mha2mla.conversion.calibration.statistics import AttentionSample, LayerStatistics
from mha2mla.conversion.families import AttentionWeights, SourceSpec, pair_factors
from mha2mla.conversion.fit.closed_form import (
    KeyMaps,
    ScoreWindow,
    fitted_queries,
    refit_output,
    refit_queries,
    score_windows,
)
from mha2mla.conversion.latent.rules import LatentFactors, LatentProblem, LowRankRule, factorise
from mha2mla.conversion.rope import RopeRule, RotaryBasis, rotary_basis
from mha2mla.geometry import MLAGeometry

ROUNDING = 1e-10  # share of a source's keys below which un-rotated ones are zero, in float64


@dataclass(frozen=True)
class LayerRules:
    """The part of a recipe that decides a layer's tensors.

    Attributes:
        per_group: one rotary key per kv head; else one for all.
        centered: the values' mean, as far as the latent loses it, goes into ``o_proj.bias``.
        turn_queries: un-rotated queries are multiplied by half of their mean phase.
        refit_queries, refit_output: queries and ``o_proj`` are fitted on a sample of the inputs, where there is one.
    """

    rope: RopeRule
    low_rank: LowRankRule
    per_group: bool
    centered: bool
    turn_queries: bool
    refit_queries: bool
    refit_output: bool


def converted_biases(spec: SourceSpec, geometry: MLAGeometry, *, centered: bool) -> tuple[bool, bool, bool]:
    """Need of q, kv and o for a bias in exact conversion, as three bools; o's is another for layers of full rank.

    A query bias stays. A key bias stays on rotary dims only, and is one of ``k_rope_proj`` where these come from the
    latent. A value bias, and the mean that a ``centered`` latent loses, go through ``o_proj``. Under q/k-norm the key's
    bias stays with ``k_proj``.
    """
    return (
        spec.q_bias,
        spec.k_bias and (spec.qk_norm or geometry.has_rope_cache),
        spec.o_bias or spec.v_bias or (centered and not geometry.is_full_rank),
    )


@dataclass(frozen=True)
class PreparedLayer:
    """Conversion of a layer before a rank is chosen for its latent.

    Attributes:
        weights: of the source, float64.
        basis: its rotary part, with queries refitted to un-rotated keys that lose nothing.
        problem: what the latent must hold.
        sample: of the layer's inputs, or None.
        windows: of that sample, for queries that are refitted to what the latent keeps; None where they are not.
    """

    weights: AttentionWeights
    basis: RotaryBasis
    problem: LatentProblem
    sample: AttentionSample | None
    windows: list[ScoreWindow] | None


def prepare_layer(
    spec: SourceSpec,
    geometry: MLAGeometry,
    rules: LayerRules,
    weights: AttentionWeights,
    statistics: LayerStatistics | None,
) -> PreparedLayer:
    """The part of a layer's conversion that does not look at ``geometry.kv_lora_rank``; ``weights`` are float64."""
    basis = rotary_basis(
        spec, geometry, rules.rope, statistics, weights, per_group=rules.per_group, turn_queries=rules.turn_queries
    )
    basis = RotaryBasis(**{name: value.to(weights.q_weight.device) for name, value in vars(basis).items()})
    sample = None if statistics is None else statistics.sample
    windows, has_rope_cache = None, geometry.has_rope_cache
    if rules.refit_queries and sample is not None:
        windows = score_windows(spec, weights, sample, basis if has_rope_cache else None)
        if has_rope_cache:  # without one this changed nothing: what the latent loses is more
            basis = _refitted(spec, windows, basis, KeyMaps(un_rotated_keys(spec, weights, basis)))
    problem = latent_problem(
        *(spec, weights, basis, statistics),
        has_rope_cache=has_rope_cache,
        reads_attended=rules.low_rank.reads_attended,
    )
    return PreparedLayer(weights, basis, problem, sample, windows)


def _refitted(spec: SourceSpec, windows: list[ScoreWindow], basis: RotaryBasis, maps: KeyMaps) -> RotaryBasis:
    """The basis with queries that fit its keys."""
    found = refit_queries(spec, windows, fitted_queries(basis, maps), maps)
    if maps.rotary is None:
        return replace(basis, query_nope=found)
    nope, rope = found.split((basis.query_nope.shape[1], basis.query_rope.shape[1]), 1)
    return replace(basis, query_nope=nope, query_rope=rope)


def finish_layer(
    spec: SourceSpec, geometry: MLAGeometry, rules: LayerRules, prepared: PreparedLayer
) -> dict[str, torch.Tensor]:
    """The tensors of one MLA layer at the rank that ``geometry`` says, named as in the checkpoint below ``self_attn.``,
    float64 (``inv_freq`` float32)."""
    weights, basis, sample = prepared.weights, prepared.basis, prepared.sample
    factors = factorise(rules.low_rank, prepared.problem, geometry.kv_lora_rank, centered=rules.centered)
    maps = KeyMaps(factors.key_decoder @ factors.encoder)
    if factors.rope_decoder is not None:
        rotary = factors.rope_decoder @ factors.encoder
        maps = KeyMaps(maps.nope, rotary, factors.rope_offset, basis.inv_freq, spec.attention_factor)
    if prepared.windows is not None:
        basis = _refitted(spec, prepared.windows, basis, maps)
    tensors = assemble(spec, geometry, weights, basis, factors, centered=rules.centered)
    if rules.refit_output and sample is not None:
        value_map = factors.value_decoder @ factors.encoder
        offset = factors.value_offset
        weight, bias = refit_output(spec, weights, sample, basis, maps, value_map, offset)
        tensors["o_proj.weight"] = tensors["o_proj.weight"] + weight
        if bias is not None:
            tensors["o_proj.bias"] = tensors["o_proj.bias"] + bias
    return tensors


def un_rotated_keys(spec: SourceSpec, weights: AttentionWeights, basis: RotaryBasis) -> torch.Tensor:
    """[h_kv, d_n, E]: un-rotated keys as linear functions of the encoder's input u, without their bias."""
    keys = _of_inputs(spec, weights, basis.key_nope)
    source = basis.key_nope.norm() if spec.qk_norm else weights.k_weight.norm()
    # Where rotary keys hold all, what is left is rounding.
    return torch.where(keys.norm() > ROUNDING * source, keys, 0.0)


def rotary_keys(spec: SourceSpec, weights: AttentionWeights, basis: RotaryBasis) -> tuple[torch.Tensor, torch.Tensor]:
    """[d_r, E] and [d_r]: the one rotary key before RoPE as a function of u, and its bias."""
    key_rope = basis.key_rope[0]
    bias = None if spec.qk_norm else weights.k_bias
    return _of_inputs(spec, weights, key_rope), key_rope.new_zeros(len(key_rope)) if bias is None else key_rope @ bias


def _of_inputs(spec: SourceSpec, weights: AttentionWeights, key_map: torch.Tensor) -> torch.Tensor:
    """[..., h_kv * d], maps of keys, as [..., E], maps of the encoder's input u."""
    if not spec.qk_norm:
        return key_map @ weights.k_weight
    # u = [normed keys | hidden state]
    return torch.cat([key_map, key_map.new_zeros(*key_map.shape[:-1], spec.hidden_size)], -1)


def latent_problem(
    spec: SourceSpec,
    weights: AttentionWeights,
    basis: RotaryBasis,
    statistics: LayerStatistics | None,
    *,
    has_rope_cache: bool = True,
    reads_attended: bool = True,
) -> LatentProblem:
    """Content of this layer's latent, once the rotary part is chosen: that too without ``has_rope_cache``.

    Args:
        reads_attended: whether covariances are of what attention makes of the inputs, too, where that was measured.
    """
    heads, kv_heads, d = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    key = un_rotated_keys(spec, weights, basis)
    value = weights.v_weight.view(kv_heads, d, -1)
    if spec.qk_norm:  # u = [normed keys | hidden state]
        value = torch.cat([value.new_zeros(kv_heads, d, kv_heads * d), value], -1)
    rotary, rotary_bias = (None, None) if has_rope_cache else rotary_keys(spec, weights, basis)
    nope = basis.query_nope.shape[1]
    if not has_rope_cache and statistics is not None and statistics.distances is not None:
        metric = joint_key_metric(spec, basis, statistics.query_second_moment.to(key.device), statistics.distances)
    elif not has_rope_cache:
        metric = torch.eye(kv_heads * nope + len(rotary), dtype=key.dtype, device=key.device)
    elif statistics is None:
        metric = torch.eye(nope, dtype=key.dtype, device=key.device).expand(kv_heads, nope, nope)
    else:
        moment = statistics.query_second_moment.to(key.device)
        read = basis.query_nope @ moment @ basis.query_nope.mT
        metric = read.view(kv_heads, spec.group_size, nope, nope).sum(1)
    gain, seen = weights.output_gain, weights.o_weight
    if gain is not None and gain.any():  # an MLP that is given nothing tells no error from another
        seen = gain[:, None] * seen
    out = seen.view(-1, heads, d).transpose(0, 1)  # [H, hidden, d]
    value_metric = (out.mT @ out).view(kv_heads, spec.group_size, d, d).sum(1)
    moments = _input_moments(spec, statistics, key.device, reads_attended)
    share = _share_of_keys(spec, weights, key, moments["covariance"]) if has_rope_cache else 1.0
    keys = {"rotary": rotary, "rotary_bias": rotary_bias, "key_share": share}
    return LatentProblem(key, value, metric, value_metric, **moments, **keys)


def _share_of_keys(
    spec: SourceSpec, weights: AttentionWeights, key: torch.Tensor, covariance: torch.Tensor | None
) -> float:
    """Share of the variance of all keys that un-rotated ones [h_kv, d_n, E] have; 1 where either is unknown or zero."""
    if covariance is None:
        return 1.0
    whole = _of_inputs(spec, weights, torch.eye(spec.num_key_value_heads * spec.head_dim).to(key))
    found, most = (float(((part @ covariance) * part).sum()) for part in (key, whole))
    return found / most if found > 0 and most > 0 else 1.0


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


def _input_moments(
    spec: SourceSpec, statistics: LayerStatistics | None, device: torch.device, reads_attended: bool
) -> dict[str, torch.Tensor | None]:
    """Means and covariances of a ``LatentProblem``, under attention where that was measured. Values' means are then
    always under attention, since ``o_proj.bias`` makes up for what the latent loses of them."""
    if statistics is None:
        return dict.fromkeys(("covariance", "mean", "value_covariance", "value_mean"))
    attended = statistics.attended_mean is not None
    value_mean = statistics.attended_mean if attended else statistics.mean.expand(spec.num_attention_heads, -1)
    covariance = value_covariance = statistics.covariance
    if attended and reads_attended:
        # Average both covariances: attention-weighted alone lets unattended keys gain score.
        covariance = (statistics.covariance + statistics.attention_covariance) / 2
        value_covariance = statistics.attended_covariance
    return {
        "covariance": covariance.to(device),
        "mean": statistics.mean.to(device),
        "value_covariance": value_covariance.to(device),
        "value_mean": value_mean.to(device),
    }


def assemble(
    spec: SourceSpec,
    geometry: MLAGeometry,
    weights: AttentionWeights,
    basis: RotaryBasis,
    factors: LatentFactors,
    *,
    centered: bool,
) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors from the two choices of a layer (names and shapes: ``modeling.MLAAttention``)."""
    heads, kv_heads, d = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    q_bias, kv_bias, o_bias = converted_biases(spec, geometry, centered=centered)
    query_map = torch.cat([basis.query_nope, basis.query_rope], 1)  # [H, d_n + d_r, d]
    # [G d_r, h_kv d]: what is cached of them
    key_rope = basis.key_rope[:, : None if geometry.has_rope_cache else 0].flatten(0, 1)
    tensors: dict[str, torch.Tensor] = {}
    if spec.qk_norm:
        width = kv_heads * d
        tensors["q_proj.weight"], tensors["q_norm.weight"] = weights.q_weight, weights.q_norm
        tensors["k_proj.weight"], tensors["k_norm.weight"] = weights.k_weight, weights.k_norm
        tensors["q_b_proj"] = query_map
        tensors["k_a_proj.weight"] = torch.cat([factors.encoder[:, :width], key_rope])
        tensors["v_a_proj.weight"] = factors.encoder[:, width:]
        if q_bias:
            tensors["q_proj.bias"] = weights.q_bias
        if kv_bias:
            tensors["k_proj.bias"] = weights.k_bias
    else:
        tensors["q_proj.weight"] = (query_map @ weights.q_weight.view(heads, d, -1)).flatten(0, 1)
        tensors["kv_a_proj.weight"] = torch.cat([factors.encoder, key_rope @ weights.k_weight])
        if q_bias:
            tensors["q_proj.bias"] = (query_map @ weights.q_bias.view(heads, d, 1)).flatten()
        if kv_bias:  # the latent has no bias: what it would add to a score is the same for every token
            latent = weights.k_bias.new_zeros(geometry.kv_lora_rank)
            tensors["kv_a_proj.bias"] = torch.cat([latent, key_rope @ weights.k_bias])
    if not geometry.has_rope_cache:
        tensors["k_rope_proj.weight"], tensors["k_rope_proj.bias"] = factors.rope_decoder, factors.rope_offset
    copies = geometry.num_up_projection_heads // kv_heads
    if geometry.qk_nope_head_dim:
        tensors["k_b_proj"] = factors.key_decoder.repeat_interleave(copies, 0)
    tensors["v_b_proj"] = factors.value_decoder.repeat_interleave(copies, 0)
    tensors["o_proj.weight"] = weights.o_weight
    if o_bias:
        offset = weights.o_weight.new_zeros(heads, d) if factors.value_offset is None else factors.value_offset
        if weights.v_bias is not None:
            offset = offset + weights.v_bias.view(kv_heads, d).repeat_interleave(spec.group_size, 0)
        folded = weights.o_weight @ offset.flatten()
        tensors["o_proj.bias"] = folded if weights.o_bias is None else folded + weights.o_bias
    tensors["inv_freq"] = basis.inv_freq.float()
    return tensors
