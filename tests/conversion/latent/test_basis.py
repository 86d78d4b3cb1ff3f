"""Bases are what they are computed to be, and folding one changes no prediction."""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from mha2mla import BasisRule
from mha2mla.conversion.latent.basis import Importance, LatentStatistics, LatentTap, latent_statistics
from mha2mla.kernels import RowQuantizer
from mha2mla.terminal import Span, StagedBar
from tests.modeling import models
from tests.ops import FunctionCalls


def statistics(width=32, rows=4096, scale=1.0):
    """Latents whose large directions are not the ones that predictions feel."""
    spread = torch.logspace(0, -2, width, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0]
    latents = scale * ((torch.randn(rows, width, dtype=torch.float64) * spread.sqrt()) @ turn.mT + 1)
    mean = latents.mean(0)
    importance = turn @ torch.diag(spread.flip(0).roll(5) ** 2) @ turn.mT
    covariance = (latents - mean).mT @ (latents - mean) / rows
    return LatentStatistics(latents.float(), 5 * latents[:7].float(), mean, covariance, importance, latents[:0].float())


@pytest.mark.parametrize("name", BasisRule.names())
def test_a_basis_is_undone_and_bounded(name):
    found = statistics()
    basis = BasisRule.find(name).basis(found)
    assert models.relative_error(basis.decode(basis.encode(found.rows)), found.rows) < 1e-5
    assert torch.linalg.cond(basis.encoder) <= 64 * 1.001
    means = torch.stack([basis.encode(each.double()).mean(0) for each in (found.rows, found.first)])
    assert models.relative_error(basis.centers, means) < 1e-5


@dataclass(frozen=True)
class Spoilt(BasisRule):
    """A rule that breaks its contract."""

    found: Any

    def encoder(self, statistics):
        return self.found


EYE = torch.eye(32, dtype=torch.float64)
SPOILT = {
    "torch.float64 (31, 32) on cpu; expected torch.float64 (32, 32) on cpu": EYE[1:],
    "torch.float32 (32, 32) on cpu": EYE.float(),
    "torch.float64 (32, 32) on meta": EYE.to("meta"),
    "None": None,
    "a matrix of condition nan; expected an invertible one": EYE * torch.nan,
    "a matrix of condition": EYE * 0,
    "a matrix of condition 5.57e+100": torch.diag(1 - EYE[0] + 1e-100 * EYE[0]),
}


@pytest.mark.parametrize("named", SPOILT)
def test_what_a_rule_gives_is_checked(named):
    with pytest.raises(ValueError, match=f"Spoilt.encoder gave {re.escape(named)}"):
        Spoilt(SPOILT[named]).basis(statistics())


def test_layers_of_one_width_share_a_rotation():
    calls, (first, second) = FunctionCalls(torch.linalg.qr), (statistics(width=40), statistics(width=40))
    with calls:
        bases = [Importance(seed=4321).basis(each) for each in (first, second)]
    assert calls.made == [("linalg_qr", 40)] and not torch.equal(bases[0].encoder, bases[1].encoder)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_elements_are_of_about_one_and_fit_float16(scale):
    """The power of two that does it is exact: bases of scaled latents are the same but for it."""
    found = statistics(scale=scale)
    basis = BasisRule.find("importance").basis(found)
    size = (basis.encode(found.rows) - basis.centers[0]).square().mean().sqrt().item()
    assert 0.7 < size < 1.42
    for name in ("first", "outlying"):
        outlier = replace(found, **{name: found.first * 1e5})
        basis = BasisRule.find("importance").basis(outlier)
        assert 2**11 < basis.encode(found.first * 1e5).abs().max() <= 2**13


def test_rounding_loses_what_the_basis_predicts():
    """tr(F e eᵀ) of rounded latents is tr(F S⁻¹) tr(C S) relative to the rotation's; ``balanced`` has the least."""
    found, quantizer = statistics(256), RowQuantizer(4)  # of few elements, errors across a row are not all directions
    predicted, lost = {}, {}
    for name in ("rotation", "importance", "balanced"):
        basis = BasisRule.find(name).basis(found)
        rounded = quantizer.round(basis.encode(found.rows), basis.centers)
        error = (basis.decode(rounded) - found.rows).double()
        lost[name] = ((error @ found.importance) * error).sum().item()
        energy = (basis.encoder @ found.covariance @ basis.encoder.mT).trace()
        predicted[name] = (energy * (basis.decoder.mT @ found.importance @ basis.decoder).trace()).item()
    for name in predicted:
        assert lost[name] / lost["rotation"] == pytest.approx(predicted[name] / predicted["rotation"], rel=0.1)
    assert predicted["balanced"] < predicted["importance"] < predicted["rotation"]
    assert predicted["balanced"] < 0.7 * predicted["rotation"]


def test_statistics_move_their_part_of_a_bar():
    with StagedBar(total=100, file=io.StringIO()) as bar:
        latent_statistics(models.mla_model("latent"), models.tokens(2, 6), progress=Span(bar, 10, 60))
        assert bar.n == 60 and "basis of the codes, window 2 of 2" in str(bar)


def test_importance_is_of_the_gradient_of_what_the_model_draws():
    """The sum of squared gradients, from differences of the log-likelihood of the same drawn tokens."""
    model, ids = models.mla_model("latent").double(), models.tokens(1, 6)
    (first, _) = latent_statistics(model, ids, seed=3)

    class Shifted(LatentTap):
        shift = torch.zeros(6, 24, dtype=torch.float64)

        def seen(self, latent, layer_idx):
            return latent + self.shift if layer_idx == 0 else latent

    @torch.no_grad()
    def likelihood(shift=None):
        tap = Shifted(2, has_rope_cache=False)
        tap.shift = tap.shift if shift is None else shift
        log_p = model(ids, past_key_values=tap, use_cache=True).logits[0].float().log_softmax(-1)
        drawn = torch.multinomial(log_p.exp(), 1, generator=torch.Generator().manual_seed(3))
        if shift is None:
            likelihood.drawn = drawn
        return log_p.double().gather(1, likelihood.drawn).sum().item()

    likelihood()
    squares = torch.zeros(24, dtype=torch.float64)
    for token in range(1, 6):
        for channel in range(24):
            step = torch.zeros(6, 24, dtype=torch.float64)
            step[token, channel] = 1e-3
            squares[channel] += ((likelihood(step) - likelihood(-step)) / 2e-3) ** 2 / len(first.rows)
    assert len(first.rows) == 5
    assert models.relative_error(first.importance.diagonal(), squares) < 1e-2


@torch.no_grad()
def test_first_rows_are_of_tokens_that_begin_a_text():
    model, ids = models.mla_model("latent").double(), models.tokens(2, 12)
    (_, second) = latent_statistics(model, ids)
    assert len(second.first) == ids.numel()
    hidden = model.model(input_ids=ids.flatten()[:, None], output_hidden_states=True).hidden_states[1]
    attention = model.model.layers[1]
    latent = attention.self_attn.kv_a_proj(attention.input_layernorm(hidden))[:, 0]
    assert models.relative_error(second.first, latent) < 1e-6


@pytest.mark.parametrize("name", ["importance", "plain"])
@pytest.mark.parametrize("case", ["latent", "latent qk-norm", "latent no nope", "latent per layer", "latent sliding"])
@torch.no_grad()
def test_folding_a_basis_changes_no_prediction(case, name):
    model, ids = models.mla_model(case).double(), models.tokens(2, 40)
    expected = model(ids, use_cache=False).logits
    state = model.state_dict()
    for index, layer in enumerate(latent_statistics(model, ids)):
        prefix = f"model.layers.{index}.self_attn."
        own = {key.removeprefix(prefix): each for key, each in state.items() if key.startswith(prefix)}
        folded = BasisRule.find(name).basis(layer).fold(own)
        assert folded.pop("latent_centers").shape == (2, model.config.layer_geometry(index).kv_lora_rank)
        assert folded.keys() == own.keys()
        changed = {key for key in own if not torch.equal(folded[key], own[key])}
        assert changed == own.keys() & {
            "kv_a_proj.weight", "k_a_proj.weight", "v_a_proj.weight", "k_b_proj", "v_b_proj", "k_rope_proj.weight",
            "kv_a_proj.bias",
        }  # fmt: skip
        state |= {prefix + key: each for key, each in folded.items()}
    model.load_state_dict(state)
    assert models.relative_error(model(ids, use_cache=False).logits, expected) < 1e-10
    assert math.isfinite(expected.sum())
