"""Plots of losses and latencies, from rows as they were measured or from their JSON files."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mha2mla.eval.measurement import is_ours
from mha2mla.files import picture, write_output

Row = Mapping[str, Any]
Points = dict[str, list[tuple[float, float]]]  # name of a curve → (x, ratio)
Draw = Callable[[Any], None]  # into axes of matplotlib

_COLORS = 64
LAYER_CURVES = {
    "score_error": "attention scores, on the source's inputs",
    "output_error": "attention output, on the source's inputs",
    "stream_output_error": "attention output, after the converted layers before",
    "hidden_error": "hidden states after the layer",
}
_RATIO = "perplexity ÷ source's"
_BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": 8, "frameon": False}  # legend beside the axes
_TICKS = (1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 4, 10, 100)


def check_installed() -> None:
    """Raises ImportError, which says what to install, where nothing can be drawn: before a measurement, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("a plot needs matplotlib: pip install -e '.[plots]' in the clone")


def plot_layers(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Draws relative errors by layer on a logarithmic axis.

    Args:
        rows: one per layer, with ``layer`` and the keys of :data:`LAYER_CURVES`; a curve whose values are absent, zero
            or not finite is left out there.
        path: PNG file to write, well below 100 kB, or SVG or PDF.

    Raises:
        ImportError: matplotlib is not installed.
    """
    _picture([partial(_draw_layers, rows)], path)


def plot_quality(report: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draws the perplexity ratio by position in the window, and below it the probes, source beside converted.

    Args:
        report: what ``QualityReport.to_dict`` gives, or the JSON that ``mha2mla eval quality`` wrote: its keys
            ``by_position`` and ``probes``, either of which may be empty.
        path: PNG, SVG or PDF file to write; its folder is made when missing.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the report has neither positions nor probes.
    """
    choices = [row for row in report.get("probes", []) if row["measure"] == "accuracy"]
    gains = [row for row in report.get("probes", []) if row["measure"] == "gain"]
    drawings = [(_draw_positions, report.get("by_position", [])), (_draw_probes, choices), (_draw_probes, gains)]
    panels = [partial(draw, rows) for draw, rows in drawings if rows]
    if not panels:
        raise ValueError("report has neither by_position nor probes; expected at least one of them")
    names = f"{Path(report['source']).name} → {_name(report)}" if "source" in report else None
    _picture(panels, path, title=names)


def plot_reports(reports: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draws what JSON files of this package say of conversions: which picture, their kinds decide.

    One of ``eval quality`` gives :func:`plot_quality`; those of several checkpoints beside those of ``eval latency`` of
    the same checkpoints, or of ``benchmarks/loss_and_time.py``, loss against the time of a decode call; those of
    ``benchmarks/conversion.py``, loss against the length of the window at the largest cache, and against cached bytes.
    Those of ``eval latency --level e2e`` without any losses: tokens per second and the largest batch against context.
    A folder's ``conversion.json`` alone gives :func:`plot_layers`.

    Args:
        reports: what the files hold.
        path: PNG, SVG or PDF file to write.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing of that can be drawn.
    """
    of_kind = {kind: [each for each in reports if each.get("kind") == kind] for kind in ("quality", "latency")}
    converted = [row for each in reports if str(each.get("kind")).startswith("conversion") for row in each["rows"]]
    if len(reports) == 1 and converted and LAYER_CURVES.keys() & converted[0].keys():
        return plot_layers(converted, path)
    panels: list[Draw] = []
    if rows := _presets([row for row in converted if "name" in row]):
        share = max(row["cache_ratio"] for row in rows)
        what = f"tokens in a window, {share:g} of the source's cache"
        panels.append(partial(_draw_losses, lengths_and_losses(rows, share), what))
        panels.append(partial(_draw_losses, _bytes_and_losses(rows), "cached bytes ÷ source's; longest windows"))
    timed = [row for each in reports if each.get("kind") == "loss-and-time" for row in each["rows"]]
    for what, points in _times_and_losses(**of_kind, timed=timed).items():
        panels.append(partial(_draw_losses, points, what))
    generated = [(each, rows) for each in of_kind["latency"] if (rows := _generated(each))]
    if generated and not panels and not of_kind["quality"]:
        speeds, batches = speeds_and_batches([row for _, rows in generated for row in rows])
        panels = [partial(_draw_contexts, speeds, "tokens / s, all sequences")]
        panels += [partial(_draw_contexts, batches, "largest batch (estimated)")] if batches else []
        _picture(panels, path, title="; ".join(dict.fromkeys(_timed_models(each) for each, _ in generated)))
    elif panels:
        models = dict.fromkeys(each["measured"]["model"] for each in reports if "measured" in each)
        _picture(panels, path, title="; ".join([*models, "the text that loses most"]))
    elif len(of_kind["quality"]) == 1:
        plot_quality(of_kind["quality"][0], path)
    else:
        kinds = ", ".join(str(each.get("kind")) for each in reports)
        raise ValueError(
            f"reports are of kind {kinds}; expected one of 'quality', 'quality' and 'latency' of the same checkpoints,"
            " 'latency' with rows of --level e2e, 'conversion', or 'loss-and-time'"
        )


def _name(report: Mapping[str, Any]) -> str:
    return Path(report["converted"]).name


def _timed_models(report: Mapping[str, Any]) -> str:
    """Models and device of a report of ``eval latency``."""
    gpu = report.get("environment", {}).get("gpu")
    what = f"{Path(report['source']).name} → {_name(report)}" if report.get("source") else None
    what = what or f"{report['random_weights']}, random weights → {report['geometry']}"
    return what if gpu is None else f"{what}, {gpu}"


def _generated(report: Mapping[str, Any]) -> list[Row]:
    return [row for row in report["rows"] if row["op"] == "generate" and row.get("tokens_per_s") is not None]


def speeds_and_batches(rows: Sequence[Row]) -> tuple[Points, Points]:
    """Implementation and batch → (context, tokens/s) of ``generate``; implementation → (context, largest batch), as
    estimated from the largest batch measured there."""
    speeds: Points = {}
    largest: dict[str, dict[float, tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: (row["implementation"] != "source", row["batch"], row["seqlen"])):
        point = (row["seqlen"], row["tokens_per_s"])
        speeds.setdefault(f"{row['implementation']}, batch {row['batch']}", []).append(point)
        if row.get("largest_batch"):
            found = largest.setdefault(row["implementation"], {})
            found[row["seqlen"]] = max(found.get(row["seqlen"], (0, 0)), (row["batch"], row["largest_batch"]))
    batches = {name: sorted((x, batch) for x, (_, batch) in found.items()) for name, found in largest.items()}
    return speeds, batches


def _presets(rows: Sequence[Row]) -> list[Row]:
    """Rows of a whole conversion, under the name of its preset and layout; those about something else (one step of
    one, other widths) are left out, and the last row stands for a conversion that was measured again."""
    found = {}
    for row in rows:
        share, _, name = row["name"].partition(" ")
        if share.replace(".", "").isdecimal() and "=" not in name and row["status"] == "ok" and _lengths(row):
            found[row["name"]] = {**row, "name": name}
    return list(found.values())


def _lengths(row: Row) -> list[int]:
    return sorted(int(key) for key in row if key.isdecimal())


def lengths_and_losses(rows: Sequence[Row], share: float) -> Points:
    """Preset and layout, with the ratio in the longest windows → (length, ratio) at one share of the cache."""
    points = {}
    for row in rows:
        if row["cache_ratio"] == share:
            found = [(float(length), float(row[str(length)])) for length in _lengths(row)]
            points[f"{row['name']} {found[-1][1]:.3g}"] = found
    return points


def _bytes_and_losses(rows: Sequence[Row]) -> Points:
    """Preset and layout → (share of the cache, ratio in the longest windows) for each share."""
    points: Points = {}
    for row in rows:
        points.setdefault(row["name"], []).append((row["cache_ratio"], float(row[str(_lengths(row)[-1])])))
    return points


def _times_and_losses(
    quality: Sequence[Mapping[str, Any]], latency: Sequence[Mapping[str, Any]], timed: Sequence[Row] = ()
) -> dict[str, Points]:
    """Timed op → checkpoint, or preset of ``timed`` rows → (µs, ratio in its longest windows, the text that loses
    most)."""
    losses: dict[str, float] = {}
    for report in quality if latency else ():
        longest = max(row["seqlen"] for row in report["rows"])
        losses[_name(report)] = max(
            float(row["perplexity_ratio"]) for row in report["rows"] if row["seqlen"] == longest
        )
    found: dict[str, Points] = {}
    for report in (each for each in latency if each.get("converted")):
        for row in filter(is_ours, report["rows"]) if _name(report) in losses else ():
            if row["status"] == "ok":
                what = f"{row['op']}, {row['batch']:,} × {row['seqlen']:,}: µs; longest windows"
                found.setdefault(what, {})[_name(report)] = [(row["us_p50"], losses[_name(report)])]
    for row in timed:
        if row["status"] == "ok":
            what = f"decode of a layer, {row['B']:,} × {row['longest']:,}: µs; longest windows"
            found.setdefault(what, {}).setdefault(row["preset"], []).append((row["us"], row["loss"]))
    return found


def _picture(panels: Sequence[Draw], path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """One panel below the other."""
    check_installed()
    kind = picture(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    # Not pyplot: it would choose a display for the whole process.
    figure = Figure(figsize=(7.5, 3.2 * len(panels)), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for place, draw in enumerate(panels):
        draw(figure.add_subplot(len(panels), 1, place + 1))
    if title:
        figure.suptitle(title, fontsize=10)

    def write(temporary: Path) -> None:
        suffix = Path(path).suffix.lower()
        if suffix != ".png":
            undated = {"Date": None} if suffix == ".svg" else {"CreationDate": None}
            with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mha2mla"}):
                figure.savefig(temporary, format=suffix[1:], metadata=undated)
            return
        canvas.draw()
        # A palette takes a third of the bytes; Pillow comes with matplotlib.
        pixels = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
        pixels.quantize(_COLORS, dither=Image.Dither.NONE).save(temporary, format="PNG", optimize=True)

    write_output(path, kind, write)


def _draw_layers(rows: Sequence[Row], axes: Any) -> None:
    for key, label in LAYER_CURVES.items():
        points = [(row["layer"], row.get(key)) for row in rows]
        points = [(layer, value) for layer, value in points if value is not None and 0 < value < math.inf]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, label=label)
    axes.set(xlabel="layer", ylabel="relative error", yscale="log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(which="both", alpha=0.25)
    if axes.lines:
        axes.figure.legend(loc="outside upper center", ncols=2, fontsize=8, frameon=False)


def _draw_positions(rows: Sequence[Row], axes: Any) -> None:
    """A step for each part of the window, a curve for each text."""
    for text in dict.fromkeys(row["text"] for row in rows):
        parts = [row for row in rows if row["text"] == text]
        label = f"{Path(text).name.removeprefix('builtin:')}, window of {parts[0]['seqlen']:,}"
        axes.stairs(
            [float(row["perplexity_ratio"]) for row in parts],
            [row["first"] for row in parts] + [parts[-1]["stop"]],
            baseline=None,
            linewidth=1.5,
            label=label,
        )
    axes.axhline(1.0, color="0.6", linewidth=0.8, linestyle=":")
    axes.set(xlabel="position in the window (tokens)", ylabel=_RATIO)
    axes.grid(alpha=0.25)
    axes.legend(**_BESIDE)


def _draw_probes(rows: Sequence[Row], axes: Any) -> None:
    """Two bars for each probe at each length; pale where the source is at chance, which a line marks."""
    for place, row in enumerate(rows):
        for side, color, shift in (("source", "0.45", -0.2), ("converted", "tab:blue", 0.2)):
            label = side if place == 0 else None
            axes.bar(place + shift, row[side], 0.38, color=color, alpha=1.0 if row["counts"] else 0.3, label=label)
        axes.hlines(row["chance"], place - 0.45, place + 0.45, color="black", linewidth=1.0, linestyle=":")
    names = [f"{row['probe']}, {row['length']:,}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=7, rotation=30, ha="right", rotation_mode="anchor")
    is_gain = rows[0]["measure"] == "gain"
    axes.set_ylabel("gain (nats a token)" if is_gain else "right choices (dotted: chance)")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def _draw_contexts(points: Points, what: str, axes: Any) -> None:
    """A curve for each name over the context, both axes logarithmic; the source's dashed, a colour for each batch."""
    lengths = sorted({x for found in points.values() for x, _ in found})
    batches = list(dict.fromkeys(name.partition(",")[2] for name in points))
    for name, found in points.items():
        implementation, _, batch = name.partition(",")
        style = "--" if implementation == "source" else "-"
        color = f"C{batches.index(batch)}"
        axes.plot(*zip(*found, strict=True), style, color=color, marker="o", markersize=4, linewidth=1.2, label=name)
    axes.set(xlabel="context (tokens)", ylabel=what, xscale="log", yscale="log")
    axes.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(**_BESIDE)


def _draw_losses(points: Points, what: str, axes: Any) -> None:
    """A curve for each name; what is lost is the distance from 1, which gets the logarithm."""
    lost = {name: sorted((x, y - 1) for x, y in found if 1 < y < math.inf) for name, found in points.items()}
    for name, found in lost.items():
        if found:
            axes.plot(*zip(*found, strict=True), marker="o", markersize=4, linewidth=1.2, label=name)
    axes.set(xlabel=what, ylabel=_RATIO, yscale="log")
    values = [y for found in lost.values() for _, y in found] or [1.0]
    ticks = [tick - 1 for tick in _TICKS if min(values) / 3 <= tick - 1 <= 3 * max(values)]
    axes.set_yticks(ticks, [f"{1 + tick:g}" for tick in ticks])
    if what.startswith("tokens"):
        axes.set_xscale("log", base=2)
        lengths = sorted({x for found in lost.values() for x, _ in found})
        axes.set_xticks(lengths, [f"{length:.0f}" for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(**_BESIDE)
