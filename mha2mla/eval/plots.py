"""Pictures of losses and latencies, from rows as they were measured or from their JSON files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha2mla.eval.measurement import is_ours, scaled, time_of
from mha2mla.eval.plotting import MAX_LINES, Curve, Panel, Picture, Point, chunks

Row = Mapping[str, Any]
Named = Mapping[str, Sequence[Row]]  # conversion → its rows
UNQUANTISED = "16 bits"  # cache of rows that name none, as older records
# Curve of the picture of bytes → how the names of its caches begin, its role and style. The last one has all others:
# simulated codes and those of a checkpoint.
CACHES: Mapping[str, tuple[str, Any, Any]] = {
    "source, KV codes": ("source", "source", "dashed"),
    "converted": (UNQUANTISED, "ours", "line"),
    "rotary keys kept": ("rotary keys", "soft", "points"),
    "latent codes": ("", "other", "dashed"),
}
# How the names of caches begin that eval quality measures beside the model's own.
SIMULATED = ("source", "latent", "rotary keys")
RATIO = "perplexity ratio (1 = no loss)"
# Key of a layer's row → what it is an error of; curves are named by the part before the comma.
LAYER_COLUMNS = {
    "score_error": "scores",
    "output_error": "attention output",
    "stream_output_error": "attention output, in stream",
    "hidden_error": "hidden states",
}
# op → what is drawn of it, with its unit, from a row
OPS = {
    "decode step": ("A decode step", "ms a step", lambda row: scaled(time_of(row), 1e-3)),
    "generate": ("Generation", "tokens/s, all sequences", lambda row: row.get("tokens_per_s")),
    "prefill": ("A prompt", "ms a prompt", lambda row: scaled(time_of(row), 1e-3)),
    "attention": ("Attention of one layer", "µs a call", time_of),
}


def loss_by_length(conversions: Named) -> list[Picture]:
    """Perplexity ratio against the length of the window, a panel for each text."""

    def points(rows: Sequence[Row]) -> list[Point]:
        return [(row["seqlen"], _number(row["perplexity_ratio"])) for row in rows]

    worst = {name: worst_losses(rows) for name, rows in conversions.items() if rows}
    said = [f"{_change(loss)} at {length:,}" for found in worst.values() for length, loss in found.items()]
    said = ", ".join(dict.fromkeys(said[:1] + said[-1:])) + " tokens"
    if len(worst) > 1:
        last = sorted(((found[max(found)], name) for name, found in worst.items()), key=lambda end: _by_loss(end[0]))
        ends = (f"{_change(loss)} ({name})" for loss, name in (last[0], last[-1]))
        said = f"{' to '.join(ends)} in the longest windows"
    headline = f"Perplexity relative to the source, on the worst text: {said}"
    return _by_text(conversions, headline, "tokens in a window", points, "line", "log2")


def loss_by_position(conversions: Named) -> list[Picture]:
    """Perplexity ratio by position in the longest window, a panel for each text."""

    def points(rows: Sequence[Row]) -> list[Point]:
        found = [(row["first"], _number(row["perplexity_ratio"])) for row in rows]
        return [*found, (rows[-1]["stop"], found[-1][1])]

    parts: dict[tuple[str, str], list[float]] = {}  # conversion and text → ratios in the order of the window
    for name, rows in conversions.items():
        for row in rows:
            parts.setdefault((name, row["text"]), []).append(_number(row["perplexity_ratio"]))
    start, end = (
        max((ratios[place] for ratios in parts.values()), key=_by_loss, default=math.nan) for place in (0, -1)
    )
    said = f"{_change(start)} at its start, {_change(end)} at its end"
    headline = f"Perplexity relative to the source inside a window, on the worst text: {said}"
    return _by_text(conversions, headline, "position in the window (tokens)", points, "step", "linear")


def _by_text(conversions: Named, headline: str, x: str, points: Any, style: Any, scale: Any) -> list[Picture]:
    pictures = []
    for part in chunks(list(conversions.items()), MAX_LINES - 1):
        panels = []
        for text in dict.fromkeys(row["text"] for _, rows in part for row in rows):
            found = {name: [row for row in rows if row["text"] == text] for name, rows in part}
            drawn = {name: points(rows) for name, rows in found.items() if rows}
            xs = [x for each in drawn.values() for x, _ in each]
            source = Curve("source", [(min(xs), 1.0), (max(xs), 1.0)], "source")
            ours = [Curve(name, each, *look) for (name, each), look in zip(drawn.items(), _looks(style), strict=False)]
            panels.append(Panel(text.removeprefix("builtin:"), x, RATIO, [source, *ours], (scale, "ratio")))
        if panels:
            pictures.append(Picture(headline, panels))
    return pictures


def _looks(style: Any) -> list[tuple[Any, Any]]:
    """Role and style of the first, second and third conversion of a panel."""
    return [("ours", style), ("other", style), ("other", "dashed")]


def loss_by_bytes(conversions: Named, shares: Mapping[str, float]) -> list[Picture]:
    """Perplexity ratio against cache bytes: conversions, their quantised latents, the source's quantised cache.

    Args:
        shares: conversion → cache over the source's, for rows that do not say it.
    """
    worst: dict[tuple[int, str], dict[Any, Point]] = {}  # window length and curve → conversion and cache → point
    for name, rows in conversions.items():
        for row in rows:
            cache, share = row.get("cache", UNQUANTISED), row.get("cache_share", shares.get(name))
            curve = next(curve for curve, (start, *_) in CACHES.items() if cache.startswith(start))
            points = worst.setdefault((row["seqlen"], curve), {})
            loss = max(_number(row["perplexity_ratio"]), points.get((name, cache), (0, -math.inf))[1], key=_by_loss)
            if share is not None:
                points[name, cache] = (share, loss)
    lengths = sorted({length for (length, _), points in worst.items() if points})
    panels = []
    for length in dict.fromkeys(lengths[:1] + lengths[-1:]):
        curves = []
        for curve, (_, *look) in CACHES.items():
            points = list(worst.get((length, curve), {}).values())
            if look[0] == "source":
                curves.append(Curve(curve if points else "source", _frontier([*points, (1.0, 1.0)]), *look))
            elif points:
                curves.append(Curve(curve, points, *look))
        title = f"windows of {length:,} tokens"
        scales = ("log2", "ratio")
        panels.append(Panel(title, "cache bytes ÷ source's, 16 bits", RATIO, curves, scales, labels="left"))
    headline = "What the same bytes cost: conversions beside quantised caches, on the worst text"
    return [Picture(headline, panels, columns=2)] if panels else []


def _frontier(points: Sequence[Point]) -> list[Point]:
    """Points that no other one beats in both bytes and loss."""
    return [a for a in set(points) if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in points)]


def own_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of the converted model over its own cache, of 16 bits or of codes; not of quantised ones beside it."""
    return [row for row in rows if not row.get("cache", UNQUANTISED).startswith(SIMULATED)]


def worst_losses(rows: Sequence[Row]) -> dict[int, float]:
    """Window length → perplexity ratio on the text that loses most, NaN if one is."""
    found: dict[int, float] = {}
    for row in rows:
        loss = _number(row["perplexity_ratio"])
        found[row["seqlen"]] = max(loss, found.get(row["seqlen"], -math.inf), key=_by_loss)
    return dict(sorted(found.items()))


def probes(rows: Sequence[Row]) -> list[Picture]:
    """Answers of source and converted model to far context: a picture for each measure, a panel for each probe.

    Rows of caches that are compared beside the converted model's own are left out.
    """
    pictures, own = [], own_rows(rows)
    for measure, subject, what in (
        ("accuracy", "answers", "right answers (share)"),
        ("gain", "repeated text", "gain (nats a token)"),
    ):
        part = [row for row in own if row["measure"] == measure]
        if not part:
            continue
        panels = []
        for probe in dict.fromkeys(row["probe"] for row in part):
            curves = [
                Curve(name, [(row["length"], row[name]) for row in part if row["probe"] == probe], *look)
                for name, *look in (("chance", "soft", "dashed"), ("source", "source"), ("converted", "ours"))
            ]
            panels.append(Panel(probe, "tokens of context", what, curves, ("log2", "linear")))
        kept = [_number(row["retained"]) for row in part if row.get("retained") is not None]
        said = "the source is at chance"
        if kept:
            least = min(kept, key=lambda share: (not math.isnan(share), share))
            said = f"at least {100 * least:.0f} % of the source's gain over chance is kept"
        headline = f"Far context, {len(part)} probes of {subject}: {said}"
        pictures.append(Picture(headline, panels, columns=2))
    return pictures


def loss_by_layer(rows: Sequence[Row]) -> Picture:
    """Relative errors by layer: of each converted layer on the source's inputs, and after the layers before it.

    Args:
        rows: one per layer, with ``layer`` and the keys of :data:`LAYER_COLUMNS`; a value that is absent, zero or not
            finite is left out.
    """

    def curve(key: str, look: tuple[Any, Any]) -> Curve:
        points = [(row["layer"], _number(row.get(key))) for row in rows]
        return Curve(LAYER_COLUMNS[key].partition(",")[0], [point for point in points if point[1] > 0], *look)

    pairs = {
        "each layer on the source's inputs": ("output_error", "score_error"),
        "after the converted layers before": ("hidden_error", "stream_output_error"),
    }
    panels = []
    for title, keys in pairs.items():
        curves = [curve(*each) for each in zip(keys, _looks("line"), strict=False)]
        panels.append(Panel(title, "layer", "relative error", curves, ("linear", "log2")))
    last = _number(rows[-1].get("hidden_error")) if rows else math.nan
    said = f"{100 * last:.3g} % in the hidden states after the last layer" if math.isfinite(last) else "not finite"
    return Picture(f"Error by layer: {said}", panels, columns=2)


def healing_curve(rows: Sequence[Row]) -> Picture:
    """KL of a healing on held-out windows of its text against the tokens seen, from its curve."""
    points = [(row["tokens"], row["held_out_kl"]) for row in rows if "held_out_kl" in row]
    best = min(kl for _, kl in points)
    headline = f"KL on held-out windows of its text: {points[0][1]:.3g} before, {best:.3g} at best"
    panel = Panel("", "tokens seen", "KL (nats)", [Curve("held out", points)], ("linear", "linear"))
    return Picture(headline, [panel], columns=1)


def latencies(rows: Sequence[Row], op: str) -> tuple[list[Picture], list[dict[str, Any]]]:
    """Source beside converted over length, a column of panels for each batch, speed-ups below; and their table.

    Args:
        rows: of ``eval latency``; those without a time are left out.
        op: key of :data:`OPS`. The source's fastest implementation counts.

    Returns:
        Pictures of at most four batches each, and rows with ``batch``, ``seqlen``, ``source``, ``converted`` (in the
        unit of the op) and ``speed_up``.
    """
    subject, unit, value_of = OPS[op]
    faster = max if op == "generate" else min
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        if row["op"] == op and (value := value_of(row) or 0) > 0:  # noise of a few tokens may be below 0
            sides = found.setdefault((row["batch"], row["seqlen"]), {})
            side = "converted" if is_ours(row) else "source"
            sides[side] = faster(value, sides.get(side, value))
    table = []
    for (batch, seqlen), sides in sorted(found.items()):
        line = {"batch": batch, "seqlen": seqlen, "source": sides.get("source"), "converted": sides.get("converted")}
        if len(sides) == 2:
            ratio = sides["source"] / sides["converted"]
            line["speed_up"] = 1 / ratio if op == "generate" else ratio
        table.append(line)
    ups = [(line["speed_up"], line["batch"], line["seqlen"]) for line in table if "speed_up" in line]
    said = "is timed without a source beside it"
    if ups:
        (least, *_), (most, batch, seqlen) = min(ups), max(ups)
        said = f"runs at {_span(least, most)} times the source's speed, most at batch {batch:,} × {seqlen:,} tokens"
    by, x = ("batch", "seqlen")
    if len({line["seqlen"] for line in table}) == 1 < len(table):
        by, x = x, by  # one length: over the batch
    pictures = []
    for values in chunks(sorted({line[by] for line in table}), 4):
        parts = [[line for line in table if line[by] == value] for value in values]
        panels = [_over(part, by, x, ("source", "converted"), unit) for part in parts]
        if ups:
            panels += [_over(part, by, x, ("speed_up",), "source's time ÷ ours") for part in parts]
        pictures.append(Picture(f"{subject} {said}", panels, columns=len(values)))
    return pictures, table


def _over(part: Sequence[Row], by: str, x: str, keys: Sequence[str], unit: str) -> Panel:
    """Lines of one batch over length, or of one length over batch."""
    names = {"batch": "sequences", "seqlen": "cached tokens"}
    looks = {"source": ("source", "source"), "converted": ("converted", "ours"), "speed_up": ("converted", "ours")}
    curves = [Curve(looks[key][0], [(line[x], line.get(key)) for line in part], looks[key][1]) for key in keys]
    if keys == ("speed_up",):
        curves.insert(0, Curve("source", [(line[x], 1.0) for line in part], "source"))
        return Panel("", names[x], unit, curves)
    title = f"batch {part[0]['batch']:,}" if by == "batch" else f"{part[0]['seqlen']:,} cached tokens"
    return Panel(title, names[x], unit, curves)


def largest_batches(rows: Sequence[Row]) -> Picture | None:
    """Largest batch that fits against context, estimated from the largest batch measured there."""
    found: dict[str, dict[int, tuple[int, int]]] = {"source": {}, "converted": {}}
    for row in rows:
        if row["op"] == "generate" and row.get("largest_batch"):
            side = found["converted" if is_ours(row) else "source"]
            side[row["seqlen"]] = max(side.get(row["seqlen"], (0, 0)), (row["batch"], row["largest_batch"]))
    points = {side: [(length, largest) for length, (_, largest) in each.items()] for side, each in found.items()}
    if not points["converted"]:
        return None
    curves = [Curve(side, points[side], "source" if side == "source" else "ours") for side in points]
    before = dict(points["source"])
    gains = [largest / before[length] for length, largest in points["converted"] if length in before]
    said = f": {_span(min(gains), max(gains))} times the source's" if gains else ""
    panel = Panel("largest batch (estimated)", "context (tokens)", "sequences", curves)
    return Picture(f"Largest batch that fits, estimated{said}", [panel], columns=1)


def model_name(report: Mapping[str, Any]) -> str:
    """Short name of the conversion that a report of ``eval quality`` or ``eval latency`` is about."""
    converted = report.get("converted") or report.get("geometry") or report.get("preset") or "converted"
    return Path(str(converted)).name


def _change(ratio: float) -> str:
    if not math.isfinite(ratio):
        return f"{ratio} ×"
    return f"{100 * (ratio - 1):+.1f} %" if ratio < 2 else f"{ratio:.3g} ×"


def _span(least: float, most: float) -> str:
    return f"{most:.2g}" if f"{least:.2g}" == f"{most:.2g}" else f"{least:.2g} to {most:.2g}"


def _by_loss(ratio: float) -> tuple[bool, float]:
    """Sort key of perplexity ratios: NaN is the worst."""
    return math.isnan(ratio), ratio


def _number(value: Any) -> float:
    """A number that JSON may hold as a string, such as "inf"; NaN for none."""
    return math.nan if value is None else float(value)
