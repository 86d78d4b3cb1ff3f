import itertools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mha2mla.conversion.latent import rules
from mha2mla.conversion.latent.rules import LatentProblem, LowRankRule, _alternate, _principal, factorise
from mha2mla.pipeline import ParityError
from tests.conversion import tiny
from tests.ops import FunctionCalls


def covariance(size, seed):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, size).double()
    return root @ root.T


def loss(decoder, encoder, target, metric):
    error = target - decoder @ encoder
    return float(torch.einsum("me,ef,mf->", error, metric, error))


@pytest.mark.parametrize(("rows", "columns"), [(12, 20), (30, 20)])
@pytest.mark.parametrize("whitened", [False, True])
def test_principal_components_are_the_whitened_svd_on_either_side(rows, columns, whitened):
    target = torch.randn(rows, columns, dtype=torch.float64)
    metric = covariance(columns, 1) if whitened else torch.eye(columns, dtype=torch.float64)
    decoder, encoder = _principal(target, metric if whitened else None)(5)
    root = torch.linalg.cholesky(metric)
    u, s, v = torch.linalg.svd(target @ root, full_matrices=False)
    best = (u[:, :5] * s[:5]) @ v[:5] @ torch.linalg.inv(root)
    assert torch.allclose(decoder @ encoder, best, atol=1e-4 if whitened and rows > columns else 1e-8)
    latent = encoder @ metric @ encoder.T
    assert torch.allclose(latent, torch.eye(5, dtype=torch.float64), atol=1e-5)


def test_covariance_joint_is_the_svd_in_the_inputs_metric():
    """Whatever the scale of keys; about zero, whatever the text's mean."""
    key, value = 3 * torch.randn(2, 4, 16, dtype=torch.float64), torch.randn(2, 4, 16, dtype=torch.float64)
    metric, mean = covariance(16, 7), torch.randn(16, dtype=torch.float64)
    eye, unused = torch.eye(4, dtype=torch.float64).expand(2, 4, 4), mean.expand(2, 16)
    problem = LatentProblem(key, value, eye, eye, metric, mean, metric, unused)
    decoder, encoder = LowRankRule.find("covariance-joint").factors(problem, 5, centered=False)
    target, moment = torch.cat([key, value]).flatten(0, 1), metric + torch.outer(mean, mean)
    singular = torch.linalg.svdvals(target @ torch.linalg.cholesky(moment))
    assert loss(decoder, encoder, target, moment) == pytest.approx(float(singular[5:].square().sum()), rel=1e-6)
    balanced = loss(*LowRankRule.find("balanced-pca").factors(problem, 5, centered=False), target, moment)
    assert balanced > 1.05 * float(singular[5:].square().sum())


def test_the_alternating_solve_is_principal_components_when_both_metrics_agree():
    key, value, metric = (*torch.randn(2, 10, 16, dtype=torch.float64), covariance(16, 2))
    both = torch.cat([key, value])
    alternating = loss(*_alternate(key, metric, value, metric)(6), both, metric)
    assert alternating == pytest.approx(loss(*_principal(both, metric)(6), both, metric), rel=1e-4)


def test_the_alternating_solve_beats_either_metric_alone():
    key, value = torch.randn(2, 10, 16, dtype=torch.float64)
    first, second = covariance(16, 3), covariance(16, 4)

    def total(decoder, encoder):
        return loss(decoder[:10], encoder, key, first) + loss(decoder[10:], encoder, value, second)

    solved = total(*_alternate(key, first, value, second)(6))
    for metric in (first, second, (first + second) / 2):
        assert solved < total(*_principal(torch.cat([key, value]), metric)(6))
    # A stationary point: no small step from it is better.
    decoder, encoder = _alternate(key, first, value, second)(6)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        step = 1e-2 * torch.randn(encoder.shape, generator=generator, dtype=torch.float64) * encoder.norm() / 10
        assert total(decoder, encoder + step) > solved * 0.999


def problem(kv_heads=2, nope=6, width=8, features=24):
    values = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=values, dtype=torch.float64)

    def metric(size):
        root = draw(kv_heads, size, size)
        return root @ root.mT

    return LatentProblem(
        key=draw(kv_heads, nope, features),
        value=draw(kv_heads, width, features),
        key_metric=metric(nope),
        value_metric=metric(width),
        covariance=covariance(features, 5),
        mean=draw(features),
        value_covariance=covariance(features, 6),
        value_mean=draw(4, features),
    )


def test_another_rank_decomposes_the_latent_alone():
    rule, given = LowRankRule.find("whitened-joint"), problem(features=40)
    first, second = (FunctionCalls(torch.linalg.eigh, torch.linalg.eigvalsh) for _ in range(2))
    with first:
        rule.factors(given, 8, centered=True)
    assert first.made.count(("linalg_eigh", 40)) == 1 and "linalg_eigvalsh" not in dict(first.made)
    with second:
        found = rule.factors(given, 10, centered=True)
    assert second.made == [("linalg_eigh", 10)] * (rules._SWEEPS + 1)
    for each, expected in zip(found, rule.factors(problem(features=40), 10, centered=True), strict=True):
        assert torch.equal(each, expected)


@pytest.mark.parametrize("low_rank", LowRankRule.names())
def test_the_own_objective_falls_with_the_rank_to_nothing(low_rank):
    given = problem(features=40)
    losses = []
    for rank in (2, 8, 16, 24, 28):
        factors = factorise(LowRankRule.find(low_rank), given, rank, centered=True)
        assert factors.encoder.shape == (rank, 40) and factors.key_decoder.shape == (2, 6, rank)
        identity = torch.eye(40, dtype=torch.float64)
        losses.append(
            loss(
                torch.cat([factors.key_decoder.flatten(0, 1), factors.value_decoder.flatten(0, 1)]),
                factors.encoder,
                torch.cat([given.key.flatten(0, 1), given.value.flatten(0, 1)]),
                identity,
            )
        )
    assert losses[-1] < 1e-18
    if low_rank == "svd-joint":
        assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    assert losses[-2] < 0.5 * losses[0]


def test_more_rank_than_there_is_makes_empty_channels():
    factors = factorise(LowRankRule.find("whitened-joint"), problem(), 40, centered=True)
    assert factors.encoder.shape == (40, 24) and float(factors.encoder[28:].abs().max()) == 0.0
    assert torch.equal(factors.value_decoder[0], torch.eye(28, 40, dtype=torch.float64)[12:20])


def test_a_latent_as_wide_as_the_input_holds_it():
    given = problem(nope=8, features=20)  # 32 rows
    for rule in map(LowRankRule.find, LowRankRule.names()):
        factors = factorise(rule, given, 21, centered=True)
        assert torch.allclose(factors.value_decoder @ factors.encoder, given.value)
        assert factors.value_offset is None


@dataclass(frozen=True)
class Spoilt(LowRankRule):
    """A rule that breaks its contract."""

    found: Any

    def factors(self, problem, rank, *, centered):
        return self.found


DECODER, ENCODER = torch.zeros(28, 8).double(), torch.zeros(8, 24).double()
SPOILT = {
    "a decoder None; expected torch.float64 (28, 8) on cpu": None,
    "a decoder torch.float64 (8, 24) on cpu": (ENCODER, DECODER),
    "a decoder torch.int64 (28, 8) on cpu": (DECODER.long(), ENCODER),
    "an encoder torch.float64 (8, 24) on meta": (DECODER, ENCODER.to("meta")),
    "an encoder torch.complex128 (8, 24) on cpu": (DECODER, ENCODER + 0j),
}


@pytest.mark.parametrize("named", SPOILT)
def test_what_a_rule_gives_is_checked(named):
    with pytest.raises(ValueError, match=f"Spoilt.factors gave {re.escape(named)}"):
        factorise(Spoilt(SPOILT[named]), problem(), 8, centered=True)


def test_a_rule_may_give_a_list():
    factors = factorise(Spoilt([DECODER, ENCODER]), problem(), 8, centered=True)
    assert torch.equal(factors.encoder, ENCODER)


def test_a_split_rank_goes_to_keys_and_values_by_width():
    factors = factorise(LowRankRule.find("svd-split"), problem(), 14, centered=True)
    assert (factors.key_decoder[..., 6:] == 0).all() and (factors.value_decoder[..., :6] == 0).all()
    assert (factors.key_decoder[..., :6] != 0).any(1).all()


def test_directions_that_few_tokens_leave_open_do_no_harm_on_other_text(source, tmp_path, monkeypatch):
    """32 tokens for a width of 48: without shrinkage the rest is noise, multiplied by what inverts it."""

    def convert(shrinkage):
        monkeypatch.setattr(rules, "SHRINKAGE", shrinkage)
        recipe = tiny.Recipe(fit_queries=False, calibration_tokens=32, calibration_lengths=32)
        return tiny.convert(source, tmp_path / str(shrinkage), recipe, evaluation=tiny.some_tokens(4, 32))

    with pytest.raises(ParityError, match="nats a token from the source's"):
        convert(0.0)
    assert max(layer.output_error for layer in convert(0.003).parity.layers) < 2
