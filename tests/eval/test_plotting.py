"""Pictures: what is drawn, at which places, in which colours."""

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from mha2mla.eval import plotting
from mha2mla.eval.plotting import COLORS, MAX_LINES, Curve, Panel, Picture, powers_of_two, tick_label

pytest.importorskip("matplotlib")
from PIL import Image

SVG = "{http://www.w3.org/2000/svg}"


def _picture(**changes):
    curves = [Curve("source", [(512, 1.0), (2048, 1.0)], "source"), Curve("$a_b", [(512, 1.1), (2048, math.inf)])]
    panel = {"title": "prose", "x": "tokens", "y": "ratio", "curves": curves, "scales": ("log2", "ratio")} | changes
    return Picture('Lost <10 %> & "more"', [Panel(**panel)])


def _texts(svg):
    return ["".join(each.itertext()) for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_panel_refuses_more_than_four_lines():
    curves = [Curve(str(place), [(1, 1)]) for place in range(MAX_LINES + 1)]
    with pytest.raises(ValueError, match="panel 'prose' has 5 curves; expected at most 4"):
        _picture(curves=curves)


def test_picture_names_its_lines_without_a_legend():
    svg = _picture().svg()
    texts = _texts(svg)
    assert {"source", "$a_b", "prose", "tokens", "ratio", "512", "1,024", "2,048"} <= set(texts)
    assert "legend" not in svg and "http" not in svg.replace("http://www.w3.org", "")
    assert 'aria-label="Lost &lt;10 %&gt; &amp; &quot;more&quot;"' in svg


def test_picture_leaves_out_what_is_not_finite():
    assert Curve("a", [(2, 1.0), (1, math.nan), (3, "inf"), (4, None), (0, 2.0)]).drawn() == [(0, 2.0), (2, 1.0)]


def test_logarithmic_panels_leave_out_zero_and_less():
    curve = Curve("a", [(1, 0.0), (2, -1.0), (4, 2.0)])
    panel = Panel("", "x", "y", [curve])
    assert panel.drawn(curve) == [(4, 2.0)]
    (axes,) = plotting._draw(Picture("", [panel])).axes
    assert axes.get_ylim()[0] > 1


def test_left_labels_are_inside_the_axes_and_cover_no_other_curve():
    near = [Curve("latent codes", [(0.16, 1.113), (0.28, 1.108)]), Curve("converted", [(0.5, 1.11)])]
    far = Curve("source, quantised KV cache", [(0.49, 1.0), (1.0, 1.0)])
    for scales in (("log2", "ratio"), ("linear", "ratio")):
        figure = plotting._draw(Picture("", [Panel("", "bytes", "ratio", [*near, far], scales, labels="left")]))
        (axes,), (codes, converted, source) = figure.axes, figure.axes[0].texts
        assert all(label.get_window_extent().x0 > axes.bbox.x0 for label in (codes, converted, source))
        assert codes.get_ha() == source.get_ha() == "right"
        points = [axes.transData.transform(point) for curve in (*near, far) for point in curve.points]
        assert not any(label.get_window_extent().contains(*point) for label in axes.texts for point in points)


def test_svg_has_a_dark_rule_for_every_colour_drawn():
    rules = plotting.dark_style()
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", _picture().svg()))
    lights = [light for light, _ in COLORS.values()]
    assert drawn <= set(lights) and len(set(lights)) == len(lights)
    for light, dark in COLORS.values():
        assert f'[style*="fill: {light}"] {{ fill: {dark} !important }}' in rules


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (512, 8192, [512, 1024, 2048, 4096, 8192]),
        (0.3, 0.9, [0.25, 0.5, 1]),
        (4, 4, [4, 8]),
        (1, 1024, [1, 4, 16, 64, 256, 1024]),
    ],
)
def test_ticks_are_powers_of_two_around_the_values(low, high, ticks):
    assert powers_of_two(low, high)[: len(ticks)] == ticks


def test_axis_without_two_powers_of_two_shows_its_ends():
    curves = [Curve("source", [(160, 1.0), (384, 1.0)], "source")]
    assert {"160", "384"} <= set(_texts(_picture(curves=curves).svg()))


def test_tick_labels_are_fractions_below_one():
    assert [tick_label(value) for value in (0.125, 1, 2048, 0.3, 0)] == ["1/8", "1", "2,048", "0.3", "0"]


def test_labels_are_moved_apart_by_the_least():
    assert plotting._apart([0, 1, 50], 10) == [-4.5, 5.5, 50]
    assert plotting._apart([0, 11], 10) == [0, 11]
    moved = plotting._apart([0, 1, 2, 12], 10)
    assert all(b - a >= 10 - 1e-9 for a, b in itertools.pairwise(moved)) and sum(moved) == 15


def test_axes_of_a_row_are_shared_by_unit():
    panels = [
        Panel(name, "x", y, [Curve("a", [(1, top), (2, 1)])])
        for name, y, top in (("a", "ms", 2), ("b", "ms", 64), ("c", "GB", 8))
    ]
    axes = plotting._draw(Picture("", panels)).axes
    assert axes[0].get_ylim() == axes[1].get_ylim() != axes[2].get_ylim()


def test_pictures_are_the_same_bytes_each_time(tmp_path):
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        _picture().save(tmp_path / name)
    for suffix in ("svg", "png"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    svg, png = (tmp_path / "a.svg").read_text(), (tmp_path / "a.png").read_bytes()
    assert "<desc>" in svg and "prose, source: 512 1, 2048 1" in svg
    assert _picture()._repr_png_() == png and len(png) < 20_000
    with Image.open(tmp_path / "a.png") as image:
        assert image.size[0] > 400
