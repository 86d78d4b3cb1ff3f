"""The benchmark of kept rotary keys on a CPU: shapes have kernels, and all ways are judged before they are timed."""

import pytest
import torch

from benchmarks import rotary_keys
from benchmarks.rotary_keys import HEADS, ROWS, STEPS, WIDTHS, check_step, op_problem, op_row, step_config, step_rows
from mha2mla.kernels.split_kv.op import compiled_shape
from mha2mla.trial_models import converted_config, source_config

RATE = 4e9


def tiny():
    return converted_config(source_config("tiny"), layout="latent", kv_lora_rank=32, qk_rope_head_dim=16)


@pytest.mark.parametrize("widths", WIDTHS)
def test_every_call_has_a_kernel_and_its_bytes(widths):
    for heads in HEADS:
        problem = op_problem(heads, *widths)
        kept, kept8 = (rotary_keys.with_kept_keys(problem, way) for way in rotary_keys.KEPT)
        for each in (problem, kept, kept8):
            assert each.op.refusal(each.shape()) is None and each.op.select(compiled_shape(each.shape()), 90)
        assert 0.96 * rotary_keys.OP_BYTES < kept.cache_bytes() <= rotary_keys.OP_BYTES
        assert kept.cache_bytes() * widths[0] == problem.cache_bytes() * sum(widths)
        assert kept8.cache_bytes() * 2 * widths[0] == problem.cache_bytes() * (2 * widths[0] + widths[1] + 4)
    assert set(STEPS.values()) <= set(WIDTHS) and len(ROWS) == 5


@pytest.mark.parametrize("name", STEPS)
def test_steps_have_the_shapes_widths(name):
    layer = step_config(name, num_hidden_layers=1).layer_geometry(0)
    assert (layer.kv_lora_rank, layer.qk_rope_head_dim, layer.rope_from_latent) == (*STEPS[name], True)


def test_an_op_row_has_all_ways(monkeypatch):
    problem = op_problem(9, 48, 16, 2, 20_000)
    row = op_row(problem, RATE, 0.01, "cpu")
    assert row["status"] == "ok" and row["kept_MB"] == row["computed_MB"] * 64 / 48
    assert row["kept8_MB"] == row["computed_MB"] * (96 + 20) / 96
    for way in ("computed", "kept", "kept8"):
        assert row[f"{way}_limit_us"] == pytest.approx(row[f"{way}_MB"] * 1e12 / RATE)
        assert row[f"{way}_share"] == row[f"{way}_limit_us"] / row[f"{way}_us"]
    right = rotary_keys.judge
    monkeypatch.setattr(rotary_keys, "judge", lambda inputs, out, lse: right(inputs, out * 1.1, lse))
    row = op_row(problem, RATE, 0.01, "cpu")
    assert row["status"].startswith("kept: wrong: ") and "kept_us" not in row


@torch.no_grad()
def test_steps_are_checked_and_their_bytes_counted(monkeypatch):
    config = tiny()
    checked = check_step(config, (2, 40), "cpu")
    assert checked["status"] == "ok" and 0 < checked["kept_error"] < 1e-5
    rows = list(step_rows("tiny", config, [(1, 64), (3, 200)], RATE, 0.01, "cpu"))
    for row, tokens in zip(rows, (64, 600), strict=True):
        assert row["computed_MB"] == tokens * 2 * 32 * 4 / 1e6 and row["kept_MB"] == tokens * 2 * 48 * 4 / 1e6
        assert row["kept_limit_us"] > row["computed_limit_us"] > 0 and row["kept_us"] > 0 < row["computed_us"]

    def spoilt(config, device, dtype):
        model = made(config, device, dtype)
        model.model.layers[0].self_attn.k_rope_proj.register_forward_hook(
            lambda module, given, out: out * (1.5 if len(out) == 2 else 1)
        )
        return model

    made = rotary_keys.random_model
    monkeypatch.setattr(rotary_keys, "random_model", spoilt)  # of single tokens, whose keys are kept, alone
    assert check_step(config, (2, 40), "cpu")["status"].startswith("kept: wrong")
