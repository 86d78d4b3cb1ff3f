"""The step benchmark on a CPU: what is wrong gets no time."""

import torch

from benchmarks import step_timeline
from benchmarks.step_timeline import build, fill, in_parts, judge, measure, prepared, products, summary


@torch.no_grad()
def test_a_way_that_is_wrong_is_said_to_be():
    model = build("per head 512+16", 1, True, torch.device("cpu"), torch.float32)
    cache = model.paged_cache(8, 16)
    fill(cache)
    (step, sequences), ids = prepared(cache, 1, 40), torch.zeros(1, dtype=torch.long)
    assert cache.allocator.length(sequences[0]) == 40
    found = judge(model, cache, step, ids)
    assert found["status"] == "ok" and found["error"] < 1e-5
    hidden = model.model.norm.weight
    with in_parts(model):
        assert model.model.norm._forward_hooks and model.lm_head._forward_hooks
    assert not model.model.norm._forward_hooks and hidden is model.model.norm.weight


@torch.no_grad()
def test_a_wrong_step_gets_no_time(monkeypatch):
    model = build("latent 512", 1, True, torch.device("cpu"), torch.float32)
    cache = model.paged_cache(8, 16)
    fill(cache)
    right = step_timeline.distances
    monkeypatch.setattr(step_timeline, "distances", lambda exact, new, *rest: right(exact, new + 1, *rest))
    (row,) = measure(model, cache, 1, 40, 4e12, 0.0, ["parts", "fewer"])
    assert row["status"].startswith("wrong: ") and "ms" not in row and cache.allocator.num_free == 8


def test_what_products_read():
    model = build("shared 448+64", 1, True, torch.device("cpu"), torch.float32)
    read = {row["product"]: row for row in products(model, 1e9)}
    assert read["query and latent"]["MB"] * 1e6 == 4 * 128 * (8 * (16 + 8) + 32 + 8)
    assert read["W_UK"]["MB"] * 1e6 == 4 * 2 * 16 * 32 and read["down"]["limit_us"] == 4 * 96 * 128 / 1e9 * 1e6


def test_what_is_said_of_a_timeline():
    timeline = [{"kernel": str(index), "us": 3.0, "gap_us": -1.0 if index % 2 else 2.0} for index in range(40)]
    found = summary(timeline, 4)
    assert [each["kernel"] for each in found.pop("layer")] == [str(index) for index in range(20, 30)]
    assert found == {"kernels": 40, "busy_ms": 0.12, "gap_ms": 0.04}
