"""Latents rounded where they are made lose what an 8-bit cache of them loses."""

from __future__ import annotations

import copy
import json

import pytest
import torch

pytest.importorskip("jsonargparse")

from benchmarks import fp8_loss
from mha2mla.modeling.cache import LatentCache
from tests.conversion import tiny
from tests.modeling import models


@pytest.mark.parametrize("case", ["latent", "per-group"])
@torch.no_grad()
def test_rounded_latents_are_a_cache_of_eight_bits(case):
    model, ids = models.mla_model(case), models.tokens(2, 24)
    plain = model(ids, use_cache=False).logits
    with fp8_loss.eight_bit_latents(model):
        rounded = model(ids, use_cache=False).logits
    assert torch.equal(model(ids, use_cache=False).logits, plain)
    model.config.attention_backend = "mla_fp8_reference"
    cache = LatentCache(model.config, page_size=16)
    served = torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)], 1)
    assert models.relative_error(served, rounded) < models.TOLERANCE < 1e-4 < models.relative_error(rounded, plain)


def test_a_latent_of_two_projections_is_refused():
    with (
        pytest.raises(ValueError, match="model has QK-norm"),
        fp8_loss.eight_bit_latents(models.mla_model("latent qk-norm")),
    ):
        pass


def test_one_table_from_end_to_end(tmp_path, monkeypatch):
    model = models.mla_model("latent", vocab_size=264)
    monkeypatch.setattr(fp8_loss, "load_model", lambda *_, **__: copy.deepcopy(model))
    monkeypatch.setattr(fp8_loss, "load_tokenizer", lambda *_, **__: tiny.tokenizer())
    file = tmp_path / "loss.json"
    assert fp8_loss.loss("a", "b", texts=["builtin:prose"], lengths="16,64", max_tokens=128, json=str(file))
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["window"] for row in rows] == [16, 64]
    assert all(row["ratio"] == pytest.approx(1.0, abs=1e-6) and row["KL, 8 bits"] > 1e-6 > row["KL"] for row in rows)
