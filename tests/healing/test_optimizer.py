"""Averages of orthogonalised gradients, by matrices, and AdamW's steps for what is no matrix."""

import pytest
import torch

from mha2mla.healing import optimizer as optimizer_module
from mha2mla.healing.optimizer import (
    MOMENTUM,
    Orthogonal,
    make_optimizer,
    matrices_of,
    orthogonal_direction,
    orthogonalise,
)
from mha2mla.healing.settings import Settings
from mha2mla.healing.student import load_models
from tests.ops import Calls

SETTINGS = {"tokens": 128, "length": 32, "long_length": 32, "rate": 1e-3}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (3, 8, 24), (5, 1)])
def test_directions_stay_and_sizes_become_one(shape, device):
    given = random(*shape, device=device)
    left, sizes, right = torch.linalg.svd(given, full_matrices=False)
    found = left.mT @ orthogonalise(given) @ right.mH
    diagonal = found.diagonal(dim1=-2, dim2=-1)
    assert ((diagonal > 0.65) & (diagonal < 1.25)).all() and (sizes.amax() > 1.3 * sizes.amin() or 1 in shape)
    aside = found - torch.diag_embed(diagonal)
    # On a GPU fifteen products in bfloat16, of which each rounds by up to 2⁻⁸: .05 at most of 60 (in torch, on a CPU).
    assert aside.abs().max() < (15 * 2**-8 if device == "cuda" else 1e-5)


@pytest.mark.parametrize("factor", [1e-30, 1e-15, 1.0, 1e15, 1e30])
def test_the_gradients_size_does_not_count(factor):
    given = random(12, 20)
    found = orthogonal_direction(given * factor)
    torch.testing.assert_close(found, orthogonal_direction(given))
    assert 0.8 < found.square().mean().sqrt() < 1.2
    assert not orthogonal_direction(torch.zeros(3, 4)).any()
    assert orthogonal_direction(given * 1e-44).isfinite().all()


@pytest.mark.parametrize("muon", [False, True])
def test_a_step_of_each_kind_is_the_plain_one(muon):
    matrix, vector = (torch.nn.Parameter(random(*shape)) for shape in ((6, 4), (5,)))
    beside = torch.nn.Parameter(vector.detach().clone())
    optimizer = Orthogonal([
        {"params": [matrix], "lr": 1e-2, "matrices": True},
        {"params": [vector], "lr": 1e-3, "matrices": False},
    ], muon=muon)  # fmt: skip
    adamw = torch.optim.AdamW([beside], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    average, expected = torch.zeros(6, 4), matrix.detach().clone()
    for step in range(3):
        matrix.grad, vector.grad = random(6, 4, seed=step), random(5, seed=step)
        beside.grad = vector.grad.clone()
        new = matrix.grad if muon else orthogonal_direction(matrix.grad)
        average = MOMENTUM * average + (1 - MOMENTUM) * new
        if muon:
            expected -= 1e-2 * orthogonal_direction(MOMENTUM * average + (1 - MOMENTUM) * new)
        else:
            expected -= 1e-2 * average / (1 - MOMENTUM ** (step + 1))
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(matrix.detach(), expected)
    torch.testing.assert_close(vector, beside)


def test_steps_are_as_large_as_gradients_agree():
    """Noise alone moves a weight a sixth as far as a gradient that stays; Muon's as far."""

    def moved(gradients, **options):
        weight = torch.nn.Parameter(torch.zeros(16, 16))
        optimizer = Orthogonal([{"params": [weight], "lr": 1.0, "matrices": True}], **options)
        for weight.grad in gradients:
            before = weight.detach().clone()
            optimizer.step()
        return (weight.detach() - before).square().mean().sqrt().item()

    noise, muons = (moved((random(16, 16, seed=step) for step in range(200)), muon=muon) for muon in (False, True))
    agreed = moved(random(16, 16).clone() for _ in range(200))
    assert 0.8 < agreed < 1.2 and 0.8 < muons < 1.2
    assert noise / agreed == pytest.approx(((1 - MOMENTUM) / (1 + MOMENTUM)) ** 0.5, rel=0.15)


@pytest.mark.parametrize("at_once", [1, 2 * 24, 1 << 26])
def test_matrices_of_one_shape_at_once_are_each_by_itself(at_once, monkeypatch):
    monkeypatch.setattr(optimizer_module, "_AT_ONCE", at_once)
    shapes = [(6, 4), (2, 3, 8), (6, 4), (4, 6), (6, 4), (6, 4)]
    weights = [torch.nn.Parameter(random(*shape)) for shape in shapes]
    optimizer = Orthogonal([{"params": weights, "lr": 1.0, "matrices": True}])
    for seed, weight in enumerate(weights[:-1]):  # the last has no gradient
        weight.grad = random(*weight.shape, seed=seed)
    with Calls() as called:
        optimizer.step()
    assert called.names.count("aten::baddbmm") == 10 * {1: 5, 48: 4, 1 << 26: 3}[at_once]
    for weight, shape in zip(weights[:-1], shapes[:-1], strict=True):
        torch.testing.assert_close(random(*shape) - weight.detach(), orthogonal_direction(weight.grad))
    assert torch.equal(weights[-1].detach(), random(6, 4))


def test_a_state_is_taken_up():
    def steps(optimizer, weights, seeds):
        for seed in seeds:
            for weight in weights:
                weight.grad = random(*weight.shape, seed=seed)
            optimizer.step()

    def made():
        weights = [torch.nn.Parameter(random(6, 4)), torch.nn.Parameter(random(5))]
        groups = [{"params": [each], "lr": 1e-2, "matrices": each.ndim > 1} for each in weights]
        return weights, Orthogonal(groups)

    weights, optimizer = made()
    steps(optimizer, weights, range(4))
    others, first = made()
    steps(first, others, range(2))
    again, second = made()
    second.load_state_dict(first.state_dict())
    for weight, other in zip(again, others, strict=True):
        weight.data.copy_(other.data)
    steps(second, again, range(2, 4))
    assert all(torch.equal(weight, other) for weight, other in zip(weights, again, strict=True))


@pytest.mark.parametrize("train", ["attention", "all"])
def test_which_weights_are_matrices(train, folders):
    settings = Settings.of("quick", train=train, **SETTINGS)
    student = load_models(*folders, torch.device("cpu"), settings).student
    names = {id(each): name for name, each in student.named_parameters()}
    optimizer = make_optimizer(student, settings)
    found = {group["matrices"]: {names[id(each)] for each in group["params"]} for group in optimizer.param_groups}
    trained = {name for name, each in student.named_parameters() if each.requires_grad}
    assert found[True] | found.get(False, set()) == trained
    assert found[True] == {names[each] for each in matrices_of(student)} & trained
    aside = {name for name in trained if "embed" in name or "lm_head" in name or "norm" in name or "bias" in name}
    assert found.get(False, set()) == aside
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}


def test_adamw_is_torchs(folders):
    settings = Settings.of("quick", optimizer="adamw", **SETTINGS)
    student = load_models(*folders, torch.device("cpu"), settings).student
    optimizer = make_optimizer(student, settings)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["betas"] == (0.9, 0.95) and optimizer.defaults["weight_decay"] == 0.0
