import math

import pytest

from mha2mla.cli import main
from mha2mla.eval import plots
from mha2mla.eval.plots import plot_quality

pytest.importorskip("matplotlib")
from PIL import Image


def _report(ratio=1.1):
    parts = [
        {"text": text, "seqlen": 8192, "first": 1024 * part, "stop": 1024 * (part + 1), "perplexity_ratio": ratio}
        for text in ("builtin:prose", "a/file.txt")
        for part in range(8)
    ]
    probes = [
        {
            "probe": name,
            "length": 512,
            "measure": measure,
            "chance": 0.1,
            "source": 0.9,
            "converted": 0.5,
            "counts": counts,
        }
        for name, measure, counts in (
            ("one key", "accuracy", True),
            ("sums", "accuracy", False),
            ("span", "gain", True),
        )
    ]
    return {"by_position": parts, "probes": probes}


def _size(path):
    with Image.open(path) as picture:
        return picture.size


def test_a_picture_has_a_part_for_positions_for_choices_and_for_gains(tmp_path):
    report = _report()
    plot_quality(report, tmp_path / "new" / "all.png", title="source → converted")
    plot_quality(report | {"probes": []}, tmp_path / "positions.png")
    plot_quality(report | {"by_position": []}, tmp_path / "probes.png")
    whole, positions, probes = (_size(tmp_path / name) for name in ("new/all.png", "positions.png", "probes.png"))
    assert whole[1] == positions[1] + probes[1] == 3 * positions[1]
    assert (tmp_path / "new" / "all.png").stat().st_size < 100_000


def test_a_broken_model_is_drawn_too(tmp_path):
    for ratio in (math.inf, math.nan, "inf"):  # "inf" is how JSON has it
        plot_quality(_report(ratio), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").is_file()


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="neither by_position nor probes"):
        plot_quality({"by_position": [], "probes": []}, tmp_path / "plot.png")


def test_what_is_missing_is_said_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert main(["eval", "quality", "/no/such/a", "/no/such/b", "--plot", "plot.png"]) == 2
    assert "a plot needs matplotlib" in capsys.readouterr().err
