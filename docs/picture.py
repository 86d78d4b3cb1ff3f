"""Draws ``docs/quality.svg``: what a conversion loses against the length of the window, presets and published methods.

    python docs/picture.py

Reads the rows of ``benchmarks/conversion.py compare`` and writes nothing that is not in them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROWS = DOCS.parent / "benchmarks" / "results" / "h200-conversion.json"
PICTURE = DOCS / "quality.svg"
LENGTHS = ("512", "2048", "8192")  # a column of a length is the text that loses most
# Row → what it is called, its colour (told apart without colour vision too), and points that its label is moved up.
SERIES = {
    "0.5 published-mha2mla": ("MHA2MLA, no fine-tuning", "#999999", 0),
    "0.5 published-transmla": ("TransMLA, no fine-tuning", "#555555", 0),
    "0.5 quick, shared": ("quick, 49,152 tokens", "#56b4e9", 0),
    "0.5 per-group": ("per-group", "#e69f00", 3),
    "0.5 shared": ("shared", "#0072b2", -4),
}
TICKS = (1.02, 1.05, 1.1, 1.2, 1.5, 2, 4, 10, 100)


def series(report: dict[str, Any]) -> dict[str, list[float]]:
    """Ratios at :data:`LENGTHS` of each row of :data:`SERIES`."""
    rows = {row["name"]: row for row in report["rows"]}
    return {name: [rows[name][length] for length in LENGTHS] for name in SERIES}


def label(name: str, ratio: float) -> str:
    """What stands at the right end of a line."""
    return f"{SERIES[name][0]} {ratio:.0f}" if ratio >= 10 else f"{SERIES[name][0]} {ratio:.2f}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes the picture; the same bytes for the same rows and version of matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = {"svg.fonttype": "none", "svg.hashsalt": "mha2mla", "font.family": "sans-serif", "font.size": 11}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(7.6, 3.6))
        for name, ratios in series(report).items():
            _, colour, up = SERIES[name]
            # What is lost is the distance from 1: it gets the logarithm, the marks say the ratio.
            axes.plot(range(len(LENGTHS)), [ratio - 1 for ratio in ratios], color=colour, marker="o", linewidth=2)
            axes.annotate(
                label(name, ratios[-1]),
                (len(LENGTHS) - 1, ratios[-1] - 1),
                xytext=(8, up),
                textcoords="offset points",
                va="center",
                color=colour,
            )
        axes.set_yscale("log")
        axes.set_yticks([tick - 1 for tick in TICKS], [f"{tick:g}" for tick in TICKS])
        axes.minorticks_off()
        axes.set_xticks(range(len(LENGTHS)), LENGTHS)
        axes.set_xlabel("tokens in a window")
        axes.set_ylabel("perplexity ÷ source's")
        axes.set_title("SmolLM2-135M-Instruct at half its cache, the worst of three texts", loc="left", fontsize=11)
        axes.grid(axis="y", color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
        figure.subplots_adjust(left=0.1, right=0.64, top=0.9, bottom=0.16)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    draw(json.loads(ROWS.read_text(encoding="utf-8")), PICTURE)
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")
