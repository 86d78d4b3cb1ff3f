"""The benchmark of generate on a CPU."""

import torch

from benchmarks import generate
from tests.modeling import models


def test_other_tokens_get_no_time(monkeypatch):
    monkeypatch.setattr(generate, "greedy", lambda model, ids, count, *, capture: torch.full((1, count), int(capture)))
    row = generate.measure(models.mla_model("latent"), None, 1, 8, 4)
    assert row["status"] == "wrong: other tokens than uncaptured" and not [key for key in row if key.endswith("_ms")]
