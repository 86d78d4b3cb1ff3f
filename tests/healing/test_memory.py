"""How many tokens a pass has, and whether it recomputes activations."""

import gc
import json

import pytest
import torch

import mha2mla
from mha2mla.healing import memory
from mha2mla.healing.distillation import Distillation
from mha2mla.healing.memory import fit_memory, why_not
from mha2mla.healing.settings import Settings
from mha2mla.healing.student import load_models

SIZES = {"length": 32, "long_length": 64, "batch_tokens": 512, "tokens_at_once": 256}


def pair(folders, **settings):
    settings = Settings.of("quick", tokens=512, **SIZES, **settings)
    models = load_models(*folders, torch.device("cpu"), settings)
    return settings, models, Distillation(models, None)


def room_for(tokens, recomputed, models, tried):
    """What is said where a pass of so many tokens does not fit, with recomputed activations or without."""

    def refusal(distillation, settings):
        tried.append(settings.pass_tokens)
        return None if settings.pass_tokens <= (recomputed if models.recomputes else tokens) else "full"

    return refusal


@pytest.mark.parametrize(
    ("room", "expected", "tried"),
    [
        ((300, 600), (256, False), [256]),
        ((255, 600), (128, False), [256, 128]),
        ((64, 600), (64, False), [256, 128, 64]),
        ((32, 600), (64, True), [256, 128, 64, 64]),
    ],
)
def test_fewer_tokens_then_recomputed_activations(room, expected, tried, folders):
    settings, models, distillation = pair(folders)
    passes = []
    found = fit_memory(settings, models, distillation, room_for(*room, models, passes))
    assert (found.pass_tokens, models.recomputes) == expected and passes == tried
    assert found.step_tokens == settings.step_tokens == 512
    assert models.student.model.layers[0].gradient_checkpointing is models.recomputes


@pytest.mark.parametrize("checkpointing", ["auto", "never", "always"])
def test_a_window_that_does_not_fit_is_refused(checkpointing, folders):
    settings, models, distillation = pair(folders, checkpointing=checkpointing)
    refusal = "long_length is 64 and train 'attention'; expected a shorter window.* memory: full of others"
    with pytest.raises(ValueError, match=refusal):
        fit_memory(settings, models, distillation, lambda *_: "full of others")
    assert models.recomputes is (checkpointing != "never")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(), "OutOfMemoryError"),
        (RuntimeError("CUDA error: out of memory\nmore"), "CUDA error: out of memory"),
        (None, None),
    ],
)
def test_a_pass_that_is_tried_leaves_nothing_behind(error, said, folders, monkeypatch):
    settings, _, distillation = pair(folders)
    before = {name: each.clone() for name, each in distillation.state_dict().items()}
    state, seen, run_pass = torch.get_rng_state(), [], memory.run_pass

    def run(distillation, ids, length):
        seen.append((tuple(ids.shape), length))
        run_pass(distillation, ids, length)
        if len(seen) == 2 and error is not None:
            raise error

    monkeypatch.setattr(memory, "run_pass", run)
    assert why_not(distillation, settings) == said
    assert sorted(seen) == [((4, 64), 32), ((4, 64), 64)]
    assert all(torch.equal(before[name], each) for name, each in distillation.state_dict().items())
    assert all(each.grad is None for each in distillation.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_a_pass_is_tried_where_the_models_are(folders, monkeypatch):
    """And another error than of memory is raised."""
    settings, models, distillation = pair(folders)
    models.teacher.to("meta")
    models.student.to("meta")
    seen = []
    monkeypatch.setattr(memory, "run_pass", lambda _, ids, length: seen.append(ids.device.type))
    assert why_not(distillation, settings) is None and seen == ["meta"] * 2
    monkeypatch.setattr(memory, "run_pass", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        why_not(distillation, settings)


@pytest.mark.gpu
def test_a_small_gpu_trains_fewer_tokens_at_once(tmp_path, folders, capsys):
    """As many as fit: a pass of 2M tokens of this model takes some 40 GB of activations and logits."""
    settings = {"tokens": 2**22, "length": 512, "long_length": 512, "batch_tokens": 2**21, "tokens_at_once": 2**21}
    windows = torch.randint(2, 258, (2**12, 512))
    gc.collect()
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory  # by tests before this one
    torch.cuda.set_per_process_memory_fraction(0.05 + kept)
    try:
        report = mha2mla.heal(
            *folders,
            tmp_path / "healed",
            text=windows,
            rate=1e-5,
            evaluations=1,
            compile="never",
            device="cuda",
            **settings,
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 512 <= report.settings.tokens_at_once < 2**21 and report.trained.steps == 2
    recorded = json.loads((tmp_path / "healed" / "conversion.json").read_text())["healing"]["settings"]
    assert recorded["tokens_at_once"] == report.settings.tokens_at_once
    assert "do not fit the GPU's memory" in capsys.readouterr().err
