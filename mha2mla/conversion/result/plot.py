"""The errors of a converted model by layer, as a picture for its model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_COLORS = 64
CURVES = {
    "score_error": "attention scores, on the source's inputs",
    "output_error": "attention output, on the source's inputs",
    "stream_output_error": "attention output, after the converted layers before",
    "hidden_error": "hidden states after the layer",
}


def plot_layers(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws relative errors by layer on a logarithmic axis.

    Args:
        rows: one per layer, with ``layer`` and the keys of ``CURVES``; a curve whose values are absent, zero or not
            finite is left out there.
        path: PNG file to write, well below 100 kB.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'mha2mla[plots]'") from error
    # Not pyplot: it would choose a display for the whole process.
    figure = Figure(figsize=(7.5, 3.8), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, label in CURVES.items():
        points = [(row["layer"], row.get(key)) for row in rows]
        points = [(layer, value) for layer, value in points if value is not None and 0 < value < float("inf")]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, label=label)
    axes.set(xlabel="layer", ylabel="relative error", yscale="log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(which="both", alpha=0.25)
    if axes.lines:
        figure.legend(loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    canvas.draw()
    # A palette takes a third of the bytes; Pillow comes with matplotlib.
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    picture.quantize(_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
