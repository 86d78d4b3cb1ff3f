"""The benchmark of prompts on a CPU: what is wrong gets no time, and nothing is compared with it."""

import json
from dataclasses import replace

from benchmarks import prompts


def test_what_is_wrong_gets_no_time(tmp_path, monkeypatch):
    shape, attention, steps_of = prompts.source_config, prompts.source_attention, prompts.steps_of

    def spoilt_source(*arguments):
        found = attention(*arguments)
        return replace(found, expected=2 * found.expected)

    def spoilt_kept(model, rotary_key_cache, *arguments):
        calls = steps_of(model, rotary_key_cache, *arguments)
        factor = 1.5 if rotary_key_cache == "bfloat16" else 1
        return {way: lambda call=call: factor * call() for way, call in calls.items()}

    monkeypatch.setattr(prompts, "source_config", lambda *name, **keys: shape(*name, **keys, vocab_size=512))
    monkeypatch.setattr(prompts, "source_attention", spoilt_source)
    monkeypatch.setattr(prompts, "steps_of", spoilt_kept)
    assert not prompts.prompts(("1x64",), layers=1, device="cpu", json=str(tmp_path / "rows.json"))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    wrong = {(row["what"].partition(",")[0], row["case"]) for row in rows if row["status"] != "ok"}
    assert wrong == {("attention", "source"), ("step", "128 kept")}
    assert all(("ms" in row) == (row["status"] == "ok") for row in rows)
    compared = [row for row in rows if "of_source" in row]
    assert {(row["what"], row["length"]) for row in compared} == {("step, paged", 64), ("step, forward, sdpa", 64)}
    assert [row["of_source"] for row in compared if row["case"] == "source"] == [1.0]
