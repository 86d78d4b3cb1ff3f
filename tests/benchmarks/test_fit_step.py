import json

import pytest

from benchmarks.fit_step import fit_step


def test_fit_step_times_a_layer_at_every_length(tiny_source, tmp_path):
    out = tmp_path / "rows.json"
    given = {"lengths": [64, 128], "tokens": 128, "blocks": 3, "device": "cpu"}
    assert fit_step(str(tiny_source), layer=1, steps=2, json=str(out), **given)
    found = json.loads(out.read_text())
    assert {row["length"]: row["windows"] for row in found["rows"]} == {64: 2, 128: 1}
    for row in found["rows"]:
        assert row["attention"] + row["products"] + row["rest"] == pytest.approx(1)
        assert min(row["attention"], row["products"], row["rest"]) > 0
        assert "scaled_dot_product_attention" in row["kernels"]
        assert min(row["ms"], row["step_ms"], row["forward_ms"], row["optimiser_ms"]) > 0
    assert {"text", "source", "statistics", "closed form", "compiling"} <= set(found["seconds"])
