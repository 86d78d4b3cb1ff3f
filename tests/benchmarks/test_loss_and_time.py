"""Loss beside time: which conversions are timed, that bytes are those on record, and one from end to end."""

from __future__ import annotations

import pytest

from benchmarks import loss_and_time
from mha2mla.eval import plots


def test_every_fitted_conversion_on_record_is_timed_at_the_bytes_that_it_caches():
    found = loss_and_time.conversions()
    names = [(row["preset"], row["cache_ratio"]) for row in found.values()]
    assert len(set(names)) == len(names) and {("latent", 0.5), ("shared", 0.1875), ("source", 1.0)} <= set(names)
    source = next(case for case, row in found.items() if row["preset"] == "source").problem.cache_bytes()
    for case, row in found.items():
        assert 0.97 * row["cache_ratio"] <= case.problem.cache_bytes() / source <= row["cache_ratio"], case.name
        assert row["loss"] >= 1


@pytest.mark.parametrize("preset", ["source", "latent", "shared"])
def test_a_conversion_from_end_to_end_and_its_place_in_the_picture(preset, monkeypatch):
    monkeypatch.setattr(loss_and_time, "LENGTHS", (70, 9))
    case = next(case for case, row in loss_and_time.conversions().items() if row["preset"] == preset)
    row = loss_and_time.measure(case, False, 0.03, "cpu")
    assert row["status"] == "ok" and row["preset"] == preset
    points = plots._times_and_losses([], [], [row])
    assert list(points.values()) == [{preset: [(row["us"], row["loss"])]}]
