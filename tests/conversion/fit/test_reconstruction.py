"""Fitting one layer: what the steps promise, on tiny random layers."""

import math
from dataclasses import replace

import pytest
import torch

from mha2mla.conversion.calibration.blocks import ActivationStore, TokenBlocks
from mha2mla.conversion.fit import reconstruction
from mha2mla.conversion.fit.reconstruction import ReconstructionError, ReconstructionProblem, reconstruct
from mha2mla.conversion.stages import Fit
from tests.conversion import tiny
from tests.ops import noted

CPU = torch.device("cpu")
WIDTH = 12


def store(values, folder, **keys):
    blocks = TokenBlocks.of(torch.zeros(values.shape[:2], dtype=torch.int64))
    made = ActivationStore(blocks, values.shape[2], dtype=values.dtype, folder=folder, **keys)
    made.write(slice(None), values)
    return made


def linear(tensors, inputs):
    return torch.nn.functional.linear(inputs, tensors["o_proj.weight"] @ tensors["kv_a_proj.weight"])


def problem(folder, windows=40, dtype=torch.float32, **keys):
    """Two factors of rank 6 that should become a matrix of rank 12."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(windows, 8, WIDTH, generator=generator).to(dtype)
    wanted = torch.randn(WIDTH, WIDTH, generator=generator).to(dtype)
    targets = inputs @ wanted.T
    start = {
        "o_proj.weight": torch.randn(WIDTH, 6, generator=generator).double(),
        "kv_a_proj.weight": torch.randn(6, WIDTH, generator=generator).double(),
        "inv_freq": torch.ones(1, 3),
    }
    weights = torch.full((windows, 8), 1 / float(targets.double().square().mean()))
    stores = [store(values, folder, **keys) for values in (inputs, targets)]
    return ReconstructionProblem(*stores, weights, linear, CPU), start


def recipe(**keys):
    return Fit(**{"steps": 200, "tokens": 32, **keys})


@pytest.fixture(autouse=True)
def a_rate_for_few_steps(monkeypatch):
    monkeypatch.setattr(reconstruction, "_LEARNING_RATE", 0.01)


def test_the_loss_falls_and_the_start_is_left_alone(tmp_path):
    made, start = problem(tmp_path)
    before = {name: tensor.clone() for name, tensor in start.items()}
    result = reconstruct(made, start, recipe(), seed=0, layer=0)
    assert result.loss_after < 0.6 * result.loss_before
    assert all(torch.equal(start[name], before[name]) for name in start)
    assert result.tensors["inv_freq"] is start["inv_freq"]
    assert result.tensors["o_proj.weight"].dtype == torch.float32
    # What comes back is what was measured: the held-out loss of these tensors, on windows that no step saw.
    held = [0, 20]
    inputs, targets = (each.read(slice(0, 40), CPU)[held] for each in (made.inputs, made.targets))
    loss = ((linear(result.tensors, inputs) - targets).square().mean(-1) * made.weights[held]).mean()
    assert math.isclose(float(loss), result.loss_after, rel_tol=1e-5)


def test_held_out_windows_enter_no_step(tmp_path):
    made, start = problem(tmp_path)
    spoilt, _ = problem(tmp_path)
    for window in (0, 20):
        spoilt.targets.write(slice(window, window + 1), torch.full((1, 8, WIDTH), 7.0))
    kept, other = (reconstruct(each, start, recipe(), seed=0, layer=0) for each in (made, spoilt))
    assert other.loss_before > kept.loss_before
    # Only the scale of the loss differs, and Adam does not see it.
    assert torch.allclose(kept.tensors["o_proj.weight"], other.tensors["o_proj.weight"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rate", [0.01, 100.0])
def test_the_result_is_never_worse_than_the_start(rate, tmp_path, monkeypatch):
    monkeypatch.setattr(reconstruction, "_LEARNING_RATE", rate)
    made, start = problem(tmp_path)
    result = reconstruct(made, start, recipe(steps=24), seed=0, layer=0)
    assert result.loss_after <= result.loss_before
    if rate > 1:
        assert result.tensors == start and "no step helped" in result.note


@pytest.mark.parametrize(("bias", "expected"), [(0.0, 0.5), (2.0, 2.0), (145.0, 8.0)])
def test_a_bias_steps_within_bounds_of_its_weight(bias, expected):
    """Steps of a bias of hundreds, at a rate relative to itself, would drown all others."""
    tensors = {"k.weight": torch.full((3, 4), -0.5), "k.bias": torch.full((3,), bias)}
    assert float(reconstruction._rate("k.bias", tensors)) == pytest.approx(expected)
    assert float(reconstruction._rate("k.weight", tensors)) == pytest.approx(0.5)


def test_the_same_arguments_give_the_same_bits(tmp_path):
    made, start = problem(tmp_path)
    results = [reconstruct(made, start, recipe(), seed=0, layer=layer) for layer in (3, 3, 4)]
    first, second, other = (result.tensors["o_proj.weight"] for result in results)
    assert torch.equal(first, second) and not torch.equal(first, other)
    seeded = reconstruct(made, start, recipe(), seed=1, layer=3).tensors["o_proj.weight"]
    assert not torch.equal(first, seeded)


def test_a_start_that_is_not_a_number_is_named(tmp_path):
    made, start = problem(tmp_path)
    start["kv_a_proj.weight"][0, 0] = float("nan")
    with pytest.raises(ReconstructionError, match="layer 5: the loss before reconstruction is nan"):
        reconstruct(made, start, recipe(), seed=0, layer=5)


def test_an_infinite_gradient_is_a_step_left_out(tmp_path):
    made, start = problem(tmp_path)
    made.targets.write(slice(7, 8), torch.full((1, 8, WIDTH), float("inf")))
    result = reconstruct(made, start, recipe(), seed=0, layer=0)
    assert "steps without a finite gradient" in result.note
    assert all(torch.isfinite(tensor).all() for tensor in result.tensors.values())
    assert result.loss_after < 0.7 * result.loss_before


def test_a_perfect_start_stays(tmp_path):
    made, start = problem(tmp_path)
    everything = slice(0, 40)
    start_of = {name: tensor.float() for name, tensor in start.items()}
    made.targets.write(everything, linear(start_of, made.inputs.read(everything, CPU)))
    result = reconstruct(made, start, recipe(), seed=0, layer=0)
    assert result.loss_before == result.loss_after == 0 and result.tensors == start


def test_one_window_is_enough(tmp_path):
    made, start = problem(tmp_path, windows=1)
    result = reconstruct(made, start, recipe(), seed=0, layer=0)
    assert result.loss_after < 0.6 * result.loss_before


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 0.65), (torch.float64, 0.6)])
def test_other_dtypes_of_computation(dtype, factor, tmp_path):
    made, start = problem(tmp_path, dtype=dtype)
    result = reconstruct(made, start, recipe(), seed=0, layer=0)
    assert result.loss_after < factor * result.loss_before
    assert result.tensors["o_proj.weight"].dtype == torch.float32


def test_activations_on_disk_give_the_same_bits_and_only_batches_are_read(tmp_path, monkeypatch):
    made, start = problem(tmp_path)
    expected = reconstruct(made, start, recipe(), seed=0, layer=0)
    spilt, _ = problem(tmp_path, spill_bytes=0)
    assert tiny.spilt_files(tmp_path) == 2
    largest = noted(monkeypatch, ActivationStore, "gather", lambda store, blocks, *_: len(blocks))
    result = reconstruct(spilt, start, recipe(), seed=0, layer=0)
    assert torch.equal(result.tensors["o_proj.weight"], expected.tensors["o_proj.weight"])
    assert max(largest) == 4


def test_lengths_take_turns_and_each_is_held_out(tmp_path):
    made, start = problem(tmp_path)
    blocks = TokenBlocks(made.inputs.blocks.tokens, (4,) * 10 + (8,) * 30)
    stores = []
    for store_of in (made.inputs, made.targets):
        stores.append(ActivationStore(blocks, WIDTH, dtype=torch.float32, folder=tmp_path))
        stores[-1].write(slice(0, 40), store_of.read(slice(0, 40), CPU))
    made = replace(made, inputs=stores[0], targets=stores[1])
    fit = reconstruction._Fit(made, start, recipe(tokens=16), 0, 0)
    assert {length: held.tolist() for length, held in fit.held_out.items()} == {4: [0], 8: [10]}
    order = fit._order(200)
    counts = {length: sum(of == length for of, _ in order) for length in (4, 8)}
    assert 40 <= counts[4] <= 55 and counts[4] + counts[8] == 200  # 9 of 38 blocks
    for length, chosen in order:
        assert all(blocks.lengths[block] == length and block not in (0, 10) for block in chosen.tolist())
    once = torch.cat([chosen for length, chosen in order if length == 8][:14]).tolist()
    assert len(once) == 28 and len(set(once)) == 28
    result = reconstruct(made, start, recipe(tokens=16), seed=0, layer=0)
    assert result.loss_after < 0.7 * result.loss_before


def test_settings_of_torch_are_put_back(tmp_path):
    made, start = problem(tmp_path)
    precision = torch.get_float32_matmul_precision()
    with torch.inference_mode():
        reconstruct(made, start, recipe(steps=2), seed=0, layer=0)
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is True
    assert torch.get_float32_matmul_precision() == precision


def test_the_bases_of_the_gradients_are_orthogonal_and_undone(tmp_path):
    made, start = problem(tmp_path)
    fit = reconstruction._Fit(made, start, recipe(), 0, 0)
    with torch.enable_grad():
        fit._choose_bases(fit._order(4))
    vector = torch.randn(fit.vector.shape, generator=torch.Generator().manual_seed(1))
    turned = fit._rotated(vector)
    assert not torch.allclose(turned, vector, atol=0.1)
    assert torch.allclose(turned.norm(), vector.norm(), rtol=1e-5)
    assert torch.allclose(fit._rotated(turned, back=True), vector, atol=1e-4)


@pytest.mark.gpu
def test_a_captured_step_repeats_to_the_bit_and_does_what_the_eager_one_does(tmp_path):
    made, start = problem(tmp_path)
    device = torch.device("cuda")
    made = replace(made, weights=made.weights.to(device), device=device)
    start = {name: tensor.to(device) for name, tensor in start.items()}
    first, second = (reconstruct(made, start, recipe(), seed=0, layer=0) for _ in range(2))
    assert first.note == "CUDA graph"
    assert torch.equal(first.tensors["o_proj.weight"], second.tensors["o_proj.weight"])
    made, start = problem(tmp_path)
    eager = reconstruct(made, start, recipe(), seed=0, layer=0)
    assert first.loss_after == pytest.approx(eager.loss_after, rel=0.02)  # TF32 has ten bits
