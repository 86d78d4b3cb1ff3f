"""The rate of a healing is measured by first steps, which leave the weights as they were."""

import math
from typing import get_args

import pytest
import torch

import mha2mla
from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.healing import run
from mha2mla.healing.distillation import Distillation
from mha2mla.healing.optimizer import make_optimizer
from mha2mla.healing.rate import HARM, RATES, SHARE, first_steps, measured_rate, said_of
from mha2mla.healing.settings import Optimizer, Settings
from mha2mla.healing.student import load_models
from tests.conversion import tiny

WHY = "half of the largest at which a first step adds at most a twentieth to the held-out KL"
WINDOWS = {"length": 32, "long_length": 32, "batch_tokens": 128, "tokens_at_once": 64, "tokens": 1280}


def blocks_of(seed, count=8):
    ids = torch.randint(2, 258, (count, 32), generator=torch.Generator().manual_seed(seed))
    return TokenBlocks(ids, (32,) * count)


@pytest.fixture
def distillation(folders):
    return Distillation(load_models(*folders, torch.device("cpu"), Settings.of("quick", **WINDOWS)), None)


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_a_step_is_the_optimizers_first_and_is_taken_back(optimizer, distillation):
    settings = Settings.of("quick", **WINDOWS, rate=3e-3, optimizer=optimizer)
    blocks, held_out = blocks_of(0, count=4), blocks_of(1)
    before = {name: each.clone() for name, each in distillation.student.state_dict().items()}
    rows = first_steps(distillation, blocks, held_out, settings, rates=[1.0, 3e-3, 1e-3], try_all=True)
    after = distillation.student.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(each.grad is None for each in distillation.parameters())
    assert [row["rate"] for row in rows] == [0.0, 1.0, 3e-3, 1e-3]

    def divergence():
        chosen = torch.full((4,), 32)  # as many tokens as a step has
        with torch.no_grad():
            return distillation.eval()(held_out.tokens[:4], chosen)["loss"].item()

    assert rows[0]["held_out_kl"] == pytest.approx(divergence(), rel=1e-5)
    distillation.train()(blocks.tokens, torch.full((4,), 32))["loss"].backward()
    make_optimizer(distillation.student, settings).step()
    assert rows[2]["held_out_kl"] == pytest.approx(divergence(), rel=1e-4)
    assert rows[2]["held_out_kl"] < rows[0]["held_out_kl"] < rows[1]["held_out_kl"]


def test_weights_are_restored_after_an_error(distillation, monkeypatch):
    before = {name: each.clone() for name, each in distillation.student.state_dict().items()}
    calls, forward = [], distillation.forward

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) > 8:  # 4 held-out blocks, 2 passes of the gradient, 2 blocks after the first step
            raise RuntimeError("out of memory")
        return forward(*arguments)

    monkeypatch.setattr(distillation, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        first_steps(distillation, blocks_of(0), blocks_of(1), Settings.of("quick", **WINDOWS))
    after = distillation.student.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_masked_tokens_move_nothing(distillation):
    settings, text = Settings.of("quick", **WINDOWS), blocks_of(0)
    masked = first_steps(distillation, text, blocks_of(1), settings, weights=torch.zeros(8, 32), rates=[1e-2])
    assert masked[1]["held_out_kl"] == masked[0]["held_out_kl"]


def test_masked_held_out_tokens_do_not_count(distillation):
    """Only the second halves of the last two blocks do, although a step has as many tokens as the first four."""
    settings, text, held_out = Settings.of("quick", **WINDOWS), blocks_of(0), blocks_of(1)
    weights = torch.zeros(8, 32)
    weights[6:, 16:] = 3
    (row,) = first_steps(distillation, text, held_out, settings, held_out_weights=weights, rates=[])
    with torch.no_grad():
        expected = distillation.eval()(held_out.tokens[6:], torch.full((2,), 32), weights[6:] / 1.5)["loss"].item()
    assert row["held_out_kl"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("harms", "expected"),
    [
        ([math.nan, math.inf, 0.3, 0.1, 0.0], 2.0**-3.5),  # half-way on the logarithm
        ([math.nan, -0.1], 2.0**-1),
        ([0.3, HARM - 1e-9], 2.0**-1),  # HARM itself may round to more than it is
        ([-0.2], 1.0),
        ([0.3, 0.2, 0.1], 2.0**-2),
    ],
)
def test_rate_between_the_steps(harms, expected):
    rows = [{"rate": 0.0, "held_out_kl": 0.5}]
    rows += [{"rate": 2.0**-index, "held_out_kl": 0.5 * (1 + harm)} for index, harm in enumerate(harms)]
    assert measured_rate(rows) == pytest.approx(SHARE * expected)
    why = "half of the largest at which" if harms[-1] <= HARM else "half of the smallest that was tried"
    assert said_of(rows).startswith(why)


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_heal_measures_its_rate_once(optimizer, folders, tmp_path, monkeypatch):
    """A run that goes on finds the rate; the record names it, so that its flags repeat the run."""
    calls, measure, train = [], run.first_steps, run.train

    def measuring(*arguments, **keys):
        calls.append(arguments)
        return measure(*arguments, **keys)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "first_steps", measuring)
    keys = {"text": tiny.some_tokens(48, 32), "device": "cpu", "progress": False, **WINDOWS, "tokens": 6400}
    keys["optimizer"] = optimizer
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "train", interrupted)
        mha2mla.heal(*folders, tmp_path / "out", **keys)
    monkeypatch.setattr(run, "train", train)
    report = mha2mla.heal(*folders, tmp_path / "out", **keys)
    assert len(calls) == 1
    rates = [row["rate"] for row in report.first_steps]
    assert rates == [0.0, *RATES[: len(rates) - 1]]
    assert report.settings.rate == measured_rate(report.first_steps)
    assert report.trained.held_out_best < report.trained.held_out_before
    why = f", {said_of(report.first_steps)}"
    assert report.lines()["rate"] == f"{report.settings.rate:.3g}, optimizer {optimizer}{why}" and WHY in why
    given = mha2mla.heal(*folders, tmp_path / "given", **keys, rate=report.settings.rate)
    assert given.first_steps == () and given.lines()["rate"] == f"{report.settings.rate:.3g}, optimizer {optimizer}"
    assert given.weights_sha256 == report.weights_sha256
