"""The order of blocks, the budget in minutes, checkpoints that were not finished."""

import json
import math

import pytest
import torch
from transformers import TrainerState

from mha2mla.healing import training
from mha2mla.healing.distillation import Distillation
from mha2mla.healing.settings import PRESETS, Settings
from mha2mla.healing.student import load_models
from mha2mla.healing.training import last_checkpoint, passes, tokens_in


def test_a_pass_has_every_block_once():
    order = passes([8] * 7, 1, 20, seed=3)
    assert sorted(order[:7]) == sorted(order[7:14]) == list(range(7)) and len(set(order[14:])) == 6
    assert order[:7] != order[7:14] and order == passes([8] * 7, 1, 20, seed=3) != passes([8] * 7, 1, 20, seed=4)


def test_blocks_of_a_pass_have_one_length():
    lengths = [8] * 13 + [64] * 3
    order = passes(lengths, 4, 160, seed=0)
    assert all(len({lengths[block] for block in order[start : start + 4]}) == 1 for start in range(0, 160, 4))
    assert all(abs(order.count(block) - 10) <= 1 for block in range(16))


@pytest.mark.parametrize(("compiled", "passes"), [(True, 3), (False, 1)], ids=["after a first pass", "plain, once"])
def test_minutes_become_tokens_by_the_clock(compiled, passes, folders, monkeypatch):
    windows = {"length": 32, "long_length": 64, "long_share": 0.2}
    settings = Settings.of("quick", minutes=2.0, **windows, batch_tokens=64, tokens_at_once=64)
    distillation = Distillation(load_models(*folders, torch.device("cpu"), settings), None)
    distillation.compiled = compiled
    # The passes of 64 tokens in six seconds, of long windows in twelve; a step of as many tokens in three.
    clock = iter([10.0, 16.0, 20.0, 32.0, 40.0, 43.0])
    monkeypatch.setattr(training, "_now", lambda _: next(clock))
    before = {name: each.clone() for name, each in distillation.state_dict().items()}
    assert tokens_in(2.0, distillation, settings, 258) == int(120 / ((0.8 * 6 + 0.2 * 12 + 3) / passes) * 64)
    assert all(torch.equal(before[name], each) for name, each in distillation.state_dict().items())
    assert all(each.grad is None for each in distillation.parameters())


def test_a_loss_without_a_number_says_what_to_do():
    """The same command would go on at the same rate; a smaller one is refused beside that rate's checkpoints."""
    bar = training._Bar(False, 64)
    with pytest.raises(ValueError, match="loss became nan at step 7; expected a smaller rate, beside resume='never'"):
        bar.on_log(None, TrainerState(global_step=7), None, {"loss": math.nan})


def test_a_checkpoint_without_its_end_is_none(tmp_path):
    for step, sizes in ((1, {"a": 1}), (2, {"a": 1}), (3, {"a": 2}), (4, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "a").write_text("x")
        if sizes is not None:
            (folder / "complete.json").write_text(json.dumps(sizes))
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    assert last_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_whole_passes(preset):
    settings = Settings.of(preset)
    assert settings.step_tokens == settings.batch_tokens
    assert settings.pass_tokens % settings.long_length == 0 == settings.batch_tokens % settings.pass_tokens
    short = Settings.of(preset, context=256)
    assert (short.length, short.long_length) == (256, 256) and short.step_tokens == short.batch_tokens
