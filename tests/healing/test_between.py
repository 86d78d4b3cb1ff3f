"""Weights between those before training and those after it."""

import copy
import math

import pytest
import torch
from torch import nn

from mha2mla.healing.between import SHARES, least_between, trained_weights


class Bowl(nn.Module):
    """Its loss is the distance to ``least``; ``frozen`` is not trained."""

    def __init__(self, weight, least):
        super().__init__()
        self.weight, self.frozen = nn.Parameter(weight), nn.Parameter(torch.ones(2), requires_grad=False)
        self._least = least

    def forward(self):
        return (self.weight - self._least).norm().item()


def line(least, loss=None):
    """Of a module that training moved from zeros to ones."""
    module = Bowl(torch.zeros(3), torch.full((3,), least))
    start, before = trained_weights(module), module()
    with torch.no_grad():
        module.weight.fill_(1.0)
    after = module()
    return module, least_between(module, start, (before, after), loss or module)


@pytest.mark.parametrize(("least", "share"), [(-1.0, 0.0), (0.3, 0.25), (0.5, 0.5), (0.8, 0.75), (2.0, 1.0)])
def test_the_least_of_five_is_kept(least, share):
    module, rows = line(least)
    assert rows[-1]["share"] == share and module() == rows[-1]["held_out_kl"] == min(row["held_out_kl"] for row in rows)
    assert sorted(row["share"] for row in rows) == [0.0, *SHARES, 1.0]
    assert torch.equal(module.weight, torch.full((3,), share)) and torch.equal(module.frozen, torch.ones(2))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_not_kept(loss):
    module, rows = line(2.0, lambda: loss)
    assert rows[-1]["share"] == 1.0 and torch.equal(module.weight, torch.ones(3))


def test_of_equal_losses_the_nearest_to_the_start_is_kept():
    module, rows = line(2.0, lambda: (torch.ones(3) - 2).norm().item())
    assert rows[-1]["share"] == 0.25 and torch.equal(module.weight, torch.full((3,), 0.25))


def test_copies_are_of_what_is_trained_alone():
    module = Bowl(torch.zeros(3), torch.zeros(3))
    copies = trained_weights(module)
    before = copy.deepcopy(copies)
    with torch.no_grad():
        module.weight.fill_(1.0)
    assert list(copies) == ["weight"] and torch.equal(copies["weight"], before["weight"])
