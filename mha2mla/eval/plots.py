"""Quality by position and probes by length, as one picture."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLORS = 64


def check_installed() -> None:
    """Raises ImportError, which says what to install, where nothing can be drawn: before a measurement, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("a plot needs matplotlib: pip install 'mha2mla[plots]'")


def plot_quality(report: Mapping[str, Any], path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """Draws the perplexity ratio by position in the window, and below it the probes, source beside converted.

    Args:
        report: what ``QualityReport.to_dict`` gives, or the JSON that ``mha2mla eval quality`` wrote: its keys
            ``by_position`` and ``probes``, either of which may be empty.
        path: PNG file to write; its folder is made when missing.
        title: printed above.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the report has neither positions nor probes.
    """
    check_installed()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    choices = [row for row in report.get("probes", []) if row["measure"] == "accuracy"]
    gains = [row for row in report.get("probes", []) if row["measure"] == "gain"]
    drawings = [(_draw_positions, report.get("by_position", [])), (_draw_probes, choices), (_draw_probes, gains)]
    drawings = [(draw, rows) for draw, rows in drawings if rows]
    if not drawings:
        raise ValueError("report has neither by_position nor probes; expected at least one of them")
    # Not pyplot: it would choose a display for the whole process.
    figure = Figure(figsize=(7.5, 3.2 * len(drawings)), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for place, (draw, rows) in enumerate(drawings):
        draw(figure.add_subplot(len(drawings), 1, place + 1), rows)
    if title:
        figure.suptitle(title, fontsize=10)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.draw()
    # A palette takes a third of the bytes; Pillow comes with matplotlib.
    picture = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    picture.quantize(_COLORS, dither=Image.Dither.NONE).save(path, format="PNG", optimize=True)


def _draw_positions(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
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
    axes.set(xlabel="position in the window (tokens)", ylabel="perplexity ÷ source's")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def _draw_probes(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Two bars for each probe at each length; pale where the source is at chance, which a line marks."""
    for place, row in enumerate(rows):
        for side, color, shift in (("source", "0.45", -0.2), ("converted", "tab:blue", 0.2)):
            label = side if place == 0 else None
            axes.bar(place + shift, row[side], 0.38, color=color, alpha=1.0 if row["counts"] else 0.3, label=label)
        axes.hlines(row["chance"], place - 0.45, place + 0.45, color="black", linewidth=1.0, linestyle=":")
    axes.set_xticks(range(len(rows)), [f"{row['probe']}\n{row['length']:,}" for row in rows], fontsize=7)
    is_gain = rows[0]["measure"] == "gain"
    axes.set_ylabel("gain (nats a token)" if is_gain else "right choices (dotted: chance)")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
