"""The benchmark of the research loop on a CPU."""

import time
from types import SimpleNamespace

import pytest

from benchmarks import loop
from tests.modeling import models
from tests.modeling.tape import Tape

STEPS = 3


@pytest.fixture
def model():
    return models.mla_model("latent")


def test_the_clock_is_read_when_the_device_is_done(model, monkeypatch):
    events = []

    def clock():
        events.append("clock")
        return time.perf_counter()

    step = loop.Loop.step
    monkeypatch.setattr(loop.Loop, "step", lambda self: events.append("step") or step(self))
    monkeypatch.setattr(loop, "wait", lambda: events.append("wait"))
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=clock))
    row = loop.measure("mla", model, 2, 20, STEPS, Tape())
    assert row["status"] == "ok" and row["tokens_per_s"] > 0
    assert events[loop.WARM_UP :] == ["wait", "clock", *["step"] * STEPS, "wait", "clock"]


def test_a_wrong_step_gets_no_time(model, monkeypatch):
    right = loop.distances
    monkeypatch.setattr(loop, "distances", lambda exact, new, *rest: right(exact, new + 1, *rest))
    row = loop.measure("mla", model, 2, 20, STEPS, Tape())
    assert row["status"].startswith("wrong: ") and not {"tokens_per_s", "step_ms", "graph_ms"} & row.keys()
