import math

import pytest

from mha2mla.conversion.result.plot import CURVES, plot_layers

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("layers", [1, 126])
def test_the_picture_stays_small(layers, tmp_path):
    # Jagged curves, as a PNG likes least.
    rows = [
        {"layer": layer, **{key: 0.01 + (layer * (7 + 3 * i) % 11) / 10 for i, key in enumerate(CURVES)}}
        for layer in range(layers)
    ]
    plot_layers(rows, tmp_path / "plot.png")
    assert 1000 < (tmp_path / "plot.png").stat().st_size < 100_000


def test_what_has_no_place_on_a_logarithmic_axis_is_left_out(tmp_path):
    values = [0.0, math.inf, math.nan, None]
    plot_layers([{"layer": layer, "score_error": value} for layer, value in enumerate(values)], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
