import json
import math

import pytest

from mha2mla.cli import main
from mha2mla.eval import plots
from mha2mla.eval.plots import LAYER_CURVES, plot_layers, plot_quality

pytest.importorskip("matplotlib")
from PIL import Image


def _report(ratio=1.1):
    parts = [
        {"text": text, "seqlen": 8192, "first": 1024 * part, "stop": 1024 * (part + 1), "perplexity_ratio": ratio}
        for text in ("builtin:prose", "a/file.txt")
        for part in range(8)
    ]
    values = {"length": 512, "chance": 0.1, "source": 0.9, "converted": 0.5}
    kinds = (("one key", "accuracy", True), ("sums", "accuracy", False), ("span", "gain", True))
    probes = [values | {"probe": name, "measure": measure, "counts": counts} for name, measure, counts in kinds]
    return {"by_position": parts, "probes": probes}


def _size(path):
    with Image.open(path) as picture:
        return picture.size


def test_a_picture_has_positions_choices_and_gains(tmp_path):
    report = _report()
    plot_quality(report, tmp_path / "new" / "all.png")
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


def test_what_is_missing_is_said_before_anything_is_measured(tiny_source, monkeypatch, capsys):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert main(["eval", "quality", str(tiny_source), str(tiny_source), "--plot", "plot.png"]) == 2
    assert "a plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("layers", [1, 126])
def test_the_picture_of_layers_stays_small(layers, tmp_path):
    # Jagged curves, as a PNG likes least.
    rows = [
        {"layer": layer, **{key: 0.01 + (layer * (7 + 3 * i) % 11) / 10 for i, key in enumerate(LAYER_CURVES)}}
        for layer in range(layers)
    ]
    plot_layers(rows, tmp_path / "plot.png")
    assert 1000 < (tmp_path / "plot.png").stat().st_size < 100_000


def test_values_off_a_logarithmic_axis_are_left_out(tmp_path):
    values = [0.0, math.inf, math.nan, None]
    plot_layers([{"layer": layer, "score_error": value} for layer, value in enumerate(values)], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def _drawn(tmp_path, *reports) -> str:
    """The SVG that the verb makes of JSON files."""
    files = [tmp_path / f"{place}.json" for place in range(len(reports))]
    for file, report in zip(files, reports, strict=True):
        file.write_text(json.dumps(report))
    first, *more = map(str, files)
    assert main(["plot", str(tmp_path / "plot.svg"), first, *(["--more", *more] if more else [])]) == 0
    return (tmp_path / "plot.svg").read_text()


def test_a_quality_report_is_drawn_elsewhere(tmp_path):
    names = {"kind": "quality", "source": "/far/away/llama", "converted": "/far/away/llama-mla"}
    svg = _drawn(tmp_path, _report("inf") | names)
    for text in ("llama → llama-mla", "prose, window of 8,192", "one key"):
        assert text in svg


def test_losses_are_drawn_against_cached_bytes(tmp_path):
    rows = [
        {"name": f"{share} {name}", "cache_ratio": share, "status": "ok", "512": 1.1, "8192": 1 + lost / share}
        for name, lost in (("shared", 0.1), ("quick, per-group", 0.3))
        for share in (0.5, 0.25)
    ]
    rows += [{"name": "RoPE 64 quick", "cache_ratio": 1.0, "status": "ok", "8192": 1.1}]
    rows += [{"name": "0.5 failed", "cache_ratio": 0.5, "status": "failed: because"}]
    presets = plots._presets(rows)
    points = plots._bytes_and_losses(presets)
    assert points["shared"] == [(0.5, 1.2), (0.25, 1.4)] and len(points) == 2
    assert plots.lengths_and_losses(presets, 0.5)["shared 1.2"] == [(512, 1.1), (8192, 1.2)]
    svg = _drawn(tmp_path, {"kind": "conversion", "rows": rows})
    assert "quick, per-group 1.6" in svg and "0.5 of the source" in svg and "cached bytes" in svg and "RoPE" not in svg


def test_losses_are_drawn_against_time(tmp_path):
    def quality(name, ratio):
        rows = [{"seqlen": 512, "perplexity_ratio": 9.0}, {"seqlen": 2048, "perplexity_ratio": ratio}]
        return {"kind": "quality", "converted": f"x/{name}", "rows": [*rows, {**rows[1], "perplexity_ratio": 1.01}]}

    def latency(name, time):
        row = {"op": "decode step", "batch": 8, "seqlen": 2048, "status": "ok"}
        rows = [row | {"implementation": name, "us_p50": us} for name, us in (("source", 1.0), ("converted", time))]
        return {"kind": "latency", "converted": f"elsewhere/{name}", "rows": rows}

    reports = [quality("a", 1.2), quality("b", 1.1), latency("a", 20.0), latency("b", 30.0), latency("c", 40.0)]
    assert plots._times_and_losses(reports[:2], reports[2:]) == {
        "decode step, 8 × 2,048: µs; longest windows": {"a": [(20.0, 1.2)], "b": [(30.0, 1.1)]}
    }
    assert "decode step, 8 × 2,048: µs" in _drawn(tmp_path, *reports)


def _generate_row(implementation, batch, seqlen, tokens_per_s, largest_batch):
    row = {"op": "generate", "implementation": implementation, "batch": batch, "seqlen": seqlen, "status": "ok"}
    return row | {"tokens_per_s": tokens_per_s, "largest_batch": largest_batch}


def test_tokens_and_batches_are_drawn_against_the_context(tmp_path):
    rows = [
        _generate_row(name, batch, seqlen, speed * batch * 1000.0 / seqlen, int(speed * 1e5 / seqlen) - batch)
        for name, speed in (("converted", 8), ("source", 1))
        for batch in (8, 1)
        for seqlen in (4096, 1024)
    ]
    full = {"op": "generate", "implementation": "source", "batch": 64, "seqlen": 4096, "status": "out of memory: 9 GiB"}
    rows += [full, {"op": "decode step", "implementation": "source", "batch": 1, "seqlen": 512, "status": "ok"}]
    speeds, batches = plots.speeds_and_batches([row for row in rows if "tokens_per_s" in row])
    assert list(speeds) == ["source, batch 1", "source, batch 8", "converted, batch 1", "converted, batch 8"]
    assert speeds["converted, batch 8"] == [(1024, 62.5), (4096, 15.625)]
    assert batches["source"] == [(1024, 97 - 8), (4096, 24 - 8)], "of the largest batch measured there"
    report = {"kind": "latency", "random_weights": "llama-2-7b", "geometry": "H=32 G=32", "rows": rows}
    svg = _drawn(tmp_path, report, report | {"rows": rows[:1]}, {"kind": "latency", "preset": "x", "rows": rows[-1:]})
    for text in ("llama-2-7b, random weights → H=32 G=32", "tokens / s", "largest batch", "source, batch 8"):
        assert text in svg
    assert "4,096</text>" in svg and "512</text>" not in svg


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"kind": "latency", "random_weights": "tiny", "geometry": "H=4"}, "'latency' with rows of --level e2e"),
        ({"kind": "environment"}, "reports are of kind environment; expected one of"),
    ],
)
def test_reports_without_a_picture_are_refused(report, message, tmp_path, capsys):
    (tmp_path / "report.json").write_text(json.dumps(report | {"rows": []}))
    assert main(["plot", str(tmp_path / "plot.png"), str(tmp_path / "report.json")]) == 2
    assert message in capsys.readouterr().err


def test_the_record_of_a_conversion_is_drawn_by_layer(tiny_converted, tmp_path, capsys):
    """``convert --json`` gives it; its rows, which are layers, were taken for those of a benchmark (a KeyError)."""
    record = str(tiny_converted / "conversion.json")
    assert main(["plot", str(tmp_path / "plot.png"), record]) == 0
    assert _size(tmp_path / "plot.png") == _size(tiny_converted / "loss_per_layer.png")
    assert main(["plot", str(tmp_path / "two.png"), record, "--more", record]) == 2
    assert main(["plot", str(tmp_path / "no.png"), str(tiny_converted / "README.md")]) == 2
    assert "README.md is not JSON: " in capsys.readouterr().err
