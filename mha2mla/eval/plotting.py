"""One style for every picture: the source grey, ours one colour, labels on the lines, one panel a thought.

A :class:`Picture` says what is drawn and knows nothing of matplotlib, which is imported when it is drawn.
"""

from __future__ import annotations

import importlib.util
import io
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from mha2mla.files import picture, write_output

MAX_LINES = 4  # curves of a panel, the source among them
# Role → colour on light and on dark paper. Each colour is one role's: an SVG is darkened by its light colours.
COLORS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "paper": ("#ffffff", "#0d1117"),
        "ink": ("#1f2328", "#f0f6fc"),
        "soft": ("#59636e", "#9198a1"),
        "grid": ("#dde2e7", "#2b313a"),
        "source": ("#7a828b", "#8d96a0"),
        "ours": ("#0550ae", "#58a6ff"),
        "other": ("#4a94e6", "#3b7dc4"),  # a further conversion beside ours: the same hue
    }
)
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif"
_LINES = {"line": "-", "dashed": (0, (4, 2)), "points": "none"}
_RATIO_IS_LOG = 3.0  # perplexity ratios above it need a logarithmic axis
_PALETTE = 64
LABEL_MARGIN = 4  # pixels between the y axis and a label
Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One line of a panel.

    Attributes:
        name: its label, beside its last point.
        points: (x, y), in any order; values that are not finite are left out.
        role: key of :data:`COLORS`.
        style: ``"step"`` holds each y until the next x.
    """

    name: str
    points: Sequence[Point]
    role: Literal["source", "ours", "other", "soft"] = "ours"
    style: Literal["line", "dashed", "points", "step"] = "line"

    def drawn(self) -> list[Point]:
        found = [(float(x), float(y)) for x, y in self.points if x is not None and y is not None]
        return sorted((x, y) for x, y in found if math.isfinite(x) and math.isfinite(y))


@dataclass(frozen=True)
class Panel:
    """Axes with at most :data:`MAX_LINES` curves.

    Attributes:
        title: what tells this panel from its neighbours; x, y: what the axes show, with the unit.
        scales: of x and y. ``"log2"`` has ticks at powers of two; ``"ratio"`` is linear near 1, where the source lies,
            and log2 where a value is far from it.
        labels: side of the curves' names, beside their last or first points.
    """

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    scales: tuple[Literal["linear", "log2", "ratio"], Literal["linear", "log2", "ratio"]] = ("log2", "log2")
    labels: Literal["right", "left"] = "right"

    def __post_init__(self) -> None:
        if len(self.curves) > MAX_LINES:
            raise ValueError(f"panel {self.title!r} has {len(self.curves)} curves; expected at most {MAX_LINES}")

    def drawn(self, curve: Curve) -> list[Point]:
        """Points of a curve that these scales can show."""
        logarithmic = [scale == "log2" for scale in self.scales]
        return [
            point for point in curve.drawn() if all(v > 0 for v, log in zip(point, logarithmic, strict=True) if log)
        ]


@dataclass(frozen=True)
class Picture:
    """Panels in rows of ``columns`` under a headline that says what to see; in a row, panels of one unit share y."""

    headline: str
    panels: Sequence[Panel]
    columns: int = 3
    note: str = ""

    def description(self) -> str:
        """Every point in words, for readers who do not see the picture."""
        return "\n".join(
            f"{panel.title or panel.y}, {curve.name}: " + ", ".join(f"{x:.6g} {y:.4g}" for x, y in curve.drawn())
            for panel in self.panels
            for curve in panel.curves
        )

    def svg(self, *, headline: bool = True) -> str:
        """An ``<svg>`` element, darkened by :func:`dark_style`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        buffer = io.StringIO()
        _save(_draw(self if headline else replace(self, headline="", note="")), buffer, "svg")
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        used = set(re.findall(r'#([\w-]+)(?=[")])', text))
        text = re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else "", text)
        text = re.sub(r"\n\s*<!--.*?-->", "", text)  # matplotlib repeats every text as a comment
        return text.replace("<svg ", f'<svg role="img" aria-label="{escape(self.headline)}" ', 1)

    def _repr_png_(self) -> bytes:
        check_installed()
        buffer = io.BytesIO()
        _save(_draw(self), buffer, "png")
        return buffer.getvalue()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a PNG, SVG or PDF file, as the name says; its folder is made when missing.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the name ends otherwise, or the file there is no such picture.
        """
        kind, suffix = picture(path), Path(path).suffix.lower()
        check_installed()

        def write(temporary: Path) -> None:
            if suffix == ".svg":
                head = f"<desc>{escape(self.description())}</desc>\n<style>\n{dark_style()}</style>\n"
                svg = re.sub(r"(<svg [^>]*>\n)", lambda found: found[1] + head, self.svg(), count=1)
                temporary.write_text(svg, encoding="utf-8")
            else:
                _save(_draw(self), temporary, suffix[1:])

        return write_output(path, kind, write)


def check_installed() -> None:
    """Raises ImportError, which says what to install, where nothing can be drawn: before a measurement, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("a plot needs matplotlib: pip install -e '.[plots]' in the clone")


def dark_style() -> str:
    """Style sheet that gives SVGs of this module the reader's dark colours, and the reader's font."""
    rules = [
        f'    [style*="{way}: {light}"] {{ {way}: {dark} !important }}'
        for light, dark in COLORS.values()
        for way in ("fill", "stroke")
    ]
    inside = "\n".join(rules)
    return (
        f"  svg text {{ font-family: {_FONT} !important }}\n  @media (prefers-color-scheme: dark) {{\n{inside}\n  }}\n"
    )


def chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def powers_of_two(low: float, high: float, most: int = 7) -> list[float]:
    """Powers of two that enclose ``low`` to ``high``, at most about ``most``: all, or every so many-th."""
    first, last = math.floor(math.log2(low) + 1e-9), math.ceil(math.log2(high) - 1e-9)
    step = max(1, -(-(last - first) // most))
    return [2.0**power for power in range(first, max(last, first + 1) + step, step)]


def tick_label(value: float) -> str:
    """Text of a tick: grouped digits, and a fraction for a power of two below one."""
    if 0 < value < 1 and math.log2(value).is_integer():
        return f"1/{round(1 / value):,}"
    return f"{value:,.10g}"


def light(role: str) -> str:
    return COLORS[role][0]


def style() -> dict[str, Any]:
    return {
        "font.size": 9,
        "font.family": "DejaVu Sans",  # its widths are those of the layout; a reader's font is narrower
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.titlecolor": light("ink"),
        "axes.labelcolor": light("soft"),
        "axes.labelsize": 8.5,
        "axes.edgecolor": light("grid"),
        "axes.facecolor": light("paper"),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.formatter.useoffset": False,
        "figure.facecolor": light("paper"),
        "savefig.facecolor": light("paper"),
        "grid.color": light("grid"),
        "grid.linewidth": 0.8,
        "xtick.color": light("grid"),
        "ytick.color": light("grid"),
        "xtick.labelcolor": light("soft"),
        "ytick.labelcolor": light("soft"),
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "text.color": light("ink"),
        "text.parse_math": False,  # a model's name may hold a dollar
        "lines.linewidth": 1.8,
        "lines.markersize": 4.5,
        "svg.fonttype": "none",
        "svg.hashsalt": "mha2mla",
    }


def _draw(picture: Picture) -> Any:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(1, min(picture.columns, len(picture.panels)))
    rows = chunks(picture.panels, columns)
    with matplotlib.rc_context(style()):
        # Not pyplot: it would choose a display for the whole process.
        size = ({1: 6.2, 2: 7.4}.get(columns, 2.7 * columns), 2.5 * len(rows) + (0.5 if picture.headline else 0.1))
        figure = Figure(figsize=size, dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        labels = []
        for row, panels in enumerate(rows):
            firsts: dict[str, Any] = {}  # unit → axes that show it
            for column, panel in enumerate(panels):
                first = firsts.get(panel.y)
                axes = figure.add_subplot(len(rows), columns, row * columns + column + 1, sharey=first)
                firsts.setdefault(panel.y, axes)
                alike = [each for each in panels if each.y == panel.y]
                labels.append((axes, _draw_panel(axes, panel, alike, first is None)))
        if picture.headline:
            letters = int(size[0] * 9.5)  # a line in bold
            figure.suptitle(
                textwrap.fill(picture.headline, letters), x=0.01, ha="left", fontsize=11.5, fontweight="bold"
            )
        if picture.note:
            figure.supxlabel(
                textwrap.fill(picture.note, int(size[0] * 17)), x=0.01, ha="left", fontsize=7.5, color=light("soft")
            )
        figure.draw_without_rendering()  # now pixels are known
        for axes, found in labels:
            if _place_left_labels(axes, found):
                figure.draw_without_rendering()  # they leave the axes more room
        for axes, found in labels:
            _spread(axes, found)
    return figure


def _draw_panel(axes: Any, panel: Panel, row: Sequence[Panel], shows_unit: bool) -> list[Any]:
    """Draws curves and axes. Returns the labels."""
    labels = []
    for curve in panel.curves:
        points = panel.drawn(curve)
        if not points:
            continue
        color, order = light(curve.role), ("soft", "source", "other", "ours").index(curve.role) + 2
        xs, ys = zip(*points, strict=True)
        if curve.style == "step":
            axes.step(xs, ys, where="post", color=color, zorder=order)
        else:
            marker = "o" if len(points) <= 12 or curve.style == "points" else None
            axes.plot(xs, ys, linestyle=_LINES[curve.style], marker=marker, color=color, zorder=order)
        point, side, shift = (points[-1], "left", 6) if panel.labels == "right" else (points[0], "right", -6)
        place = {"xytext": (shift, 0), "textcoords": "offset points", "ha": side, "va": "center", "fontsize": 8.5}
        place["bbox"] = {"facecolor": light("paper"), "edgecolor": "none", "pad": 0.5}
        labels.append(axes.annotate(curve.name, point, color=color, annotation_clip=False, **place))
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x)
    if shows_unit:
        axes.set_ylabel(panel.y)
    else:
        axes.tick_params(labelleft=False)
    for axis, which, scale, panels in zip("xy", (0, 1), panel.scales, ([panel], row), strict=True):
        values = [point[which] for each in panels for curve in each.curves for point in each.drawn(curve)]
        if values:
            _set_scale(axes, axis, scale, values)
    return labels


def _set_scale(axes: Any, axis: str, scale: str, values: Sequence[float]) -> None:
    if scale == "ratio":
        scale = "log2" if max(values) > _RATIO_IS_LOG and min(values) > 0 else "near one"
    part = getattr(axes, f"{axis}axis")
    if scale == "log2":
        # Times and sizes get whole powers of two; lengths, whose labels are wider, keep the range that was measured.
        low, high = min(values), max(values)
        ticks = powers_of_two(low, high, 7 if axis == "y" else 3)
        if axis == "y":
            low, high = ticks[0], next(tick for tick in ticks[1:] if tick >= high)
        low, high = low / 1.12, max(high, low * 1.5) * 1.12
        getattr(axes, f"set_{axis}scale")("log", base=2)
        getattr(axes, f"set_{axis}lim")(low, high)
        inside = [tick for tick in ticks if low <= tick <= high]
        inside = inside if len(inside) > 1 else sorted({min(values), max(values)})
        part.set_ticks(inside, [tick_label(tick) for tick in inside])
        part.minorticks_off()
    elif scale == "near one":
        spare = 0.12 * max(max(values) - min(values), 0.01)
        getattr(axes, f"set_{axis}lim")(min(values) - spare, max(values) + spare)
        part.get_major_locator().set_params(nbins=5)
    elif axis == "x":
        part.get_major_locator().set_params(integer=all(float(value).is_integer() for value in values), nbins=4)
        part.set_major_formatter(lambda value, _: tick_label(value))


def _place_left_labels(axes: Any, labels: Sequence[Any]) -> bool:
    """Makes room between the y axis and labels to the left of their points. Returns whether one was there.

    A label that then covers another curve moves to the right of its point.
    """
    start, left = axes.get_xlim()[0], [label for label in labels if label.get_ha() == "right"]
    if not left:
        return False
    _make_room(axes, left)
    for line, label in zip(axes.lines, labels, strict=True):
        box = label.get_window_extent()
        others = [other.get_path().transformed(other.get_transform()) for other in axes.lines if other is not line]
        if label in left and any(path.intersects_bbox(box, filled=False) for path in others):
            label.set(ha="left", va="bottom")
            label.xyann = (-label.xyann[0], 0)
            left.remove(label)
    axes.set_xlim(left=start)
    _make_room(axes, left)
    return True


def _make_room(axes: Any, labels: Sequence[Any]) -> None:
    """Lowers the start of x until these labels, which end at their points, are inside the axes."""
    low, high = axes.transScale.transform([(x, 1.0) for x in axes.get_xlim()])[:, 0]
    starts = [low]
    for label in labels:
        x = axes.transScale.transform(label.xy)[0]
        width = axes.transData.transform(label.xy)[0] - label.get_window_extent().x0 + LABEL_MARGIN
        share = width / axes.bbox.width  # of the axes, that must lie to the left of the point
        starts.append((x - share * high) / (1 - share))
    axes.set_xlim(left=axes.transScale.inverted().transform((min(starts), 0.0))[0])


def _spread(axes: Any, labels: Sequence[Any]) -> None:
    """Moves labels apart, upwards and downwards, until none covers another."""
    figure = axes.figure
    height = 1.25 * 8.5 * figure.dpi / 72
    ends = sorted(((axes.transData.transform(label.xy)[1], label) for label in labels), key=lambda found: found[0])
    places = _apart([y for y, _ in ends], height)
    for (y, label), place in zip(ends, places, strict=True):
        label.xyann = (label.xyann[0], (place - y) * 72 / figure.dpi)


def _apart(values: Sequence[float], least: float) -> list[float]:
    """Sorted values, moved as little as it takes for neighbours to be ``least`` apart: groups keep their mean."""
    groups = [[value] for value in values]

    def span(group: Sequence[float]) -> tuple[float, float]:
        middle = sum(group) / len(group)
        return middle - least * (len(group) - 1) / 2, middle + least * (len(group) - 1) / 2

    index = 0
    while index + 1 < len(groups):
        if span(groups[index + 1])[0] - span(groups[index])[1] < least:
            groups[index] += groups.pop(index + 1)
            index = max(0, index - 1)
        else:
            index += 1
    return [span(group)[0] + least * place for group in groups for place in range(len(group))]


def _save(figure: Any, target: Any, suffix: str) -> None:
    import matplotlib

    with matplotlib.rc_context(style()):
        if suffix != "png":
            undated = {"svg": dict.fromkeys(("Date", "Creator", "Format", "Type")), "pdf": {"CreationDate": None}}
            figure.savefig(target, format=suffix, metadata=undated[suffix])
            return
        from PIL import Image

        canvas = figure.canvas
        canvas.draw()
        # A palette takes a third of the bytes; Pillow comes with matplotlib.
        pixels = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
        pixels.quantize(_PALETTE, dither=Image.Dither.NONE).save(target, format="PNG", optimize=True)
