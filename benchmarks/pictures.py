"""Draws the pictures of README and docs, ``docs/*.svg``, from the recorded rows.

    python benchmarks/pictures.py

Losses are perplexity relative to the source model on the text that loses most; tests/test_docs.py holds each file
against its rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mha2mla.eval.plots import RATIO, largest_batches, latencies, loss_by_position
from mha2mla.eval.plotting import Curve, Panel, Picture

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = {"latent": ("ours", "line"), "shared": ("other", "line"), "per-group": ("other", "dashed")}
SHARE = "share of the source's 16-bit KV cache bytes"
SMOLLM2 = "SmolLM2-135M-Instruct, worst of three texts."


def recorded(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"h200-{name}.json").read_text(encoding="utf-8"))


def conversions() -> list[dict[str, Any]]:
    """Fitted conversions of SmolLM2: rows with ``layout``, ``cache_ratio`` and a loss by length."""
    rows = [row for name in ("conversion", "conversion-latent") for row in recorded(name)["rows"]]
    split = [(*row["name"].split(" ", 1), row) for row in rows]
    return [row | {"layout": layout} for _, layout, row in split if layout in LAYOUTS]


def coded() -> list[tuple[float, float]]:
    """Share of the bytes, and the largest loss, of conversions with rank and bits by layer: SmolLM2, an H200."""
    rows = recorded("row-codes")["rows"]
    chosen = [row for row in rows if row["cache"].startswith("quick, auto") and row["model"].startswith("SmolLM2")]
    return sorted((row["bytes"], row["ratio 512"]) for row in chosen if row["bytes"] >= 0.1)


def quantised() -> list[tuple[float, float]]:
    """The same of the source over KV caches of 2 to 4 bits, keys by channel: an H100."""
    path = ROOT / "benchmarks" / "results" / "h100-healing-study.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    points = [(row["bytes"], row["ratio 512"]) for row in rows if row["name"].startswith("source, KV")]
    return [*sorted(points), (1.0, 1.0)]


def healed() -> list[tuple[float, float]]:
    """The same of conversions with rank and bits by layer that were trained by default, SmolLM2."""
    rows = [*recorded("healing-quarter")["rows"], *recorded("healing-passes")["rows"]]
    coded = [row for row in rows if row["model"] in SMOLLM2 and "16 bits" not in row["name"]]
    measured = {row["bytes"]: row for row in coded if row.get("rate_is_measured")}
    return sorted((row["bytes"], row["ratio 512"]) for row in measured.values())


def loss_and_bytes() -> Picture:
    points = [(row["cache_ratio"], row["512"]) for row in conversions() if row["layout"] == "latent"]
    curves = [
        Curve("source, quantised KV cache", quantised(), "source", "dashed"),
        Curve("converted, 16 bits", points),
        Curve("converted, rank and bits", coded(), "ours", "dashed"),
        Curve("healed", healed(), "other", "points"),
    ]
    panel = Panel("", SHARE, RATIO, curves, ("log2", "ratio"), labels="left")
    note = (
        f"{SMOLLM2} Windows of 512 tokens. Bits by layer: 2, 3, 4 or 8; healed: 1,000 steps a layer,"
        " then training on 34M tokens (0.125) or 56M."
    )
    return Picture("Loss by size of the KV cache: lower is better", [panel], 1, note)


def loss_by_length() -> Picture:
    panels = []
    for share in (0.5, 0.3125, 0.1875):
        rows = [row for row in conversions() if row["cache_ratio"] == share]
        curves = [Curve("source", [(512, 1.0), (8192, 1.0)], "source")]
        for row in rows:
            points = [(length, row[str(length)]) for length in (512, 2048, 8192)]
            curves.append(Curve(row["layout"], points, *LAYOUTS[row["layout"]]))
        panels.append(Panel(f"{share:g} of the source's cache", "tokens in a window", RATIO, curves, ("log2", "ratio")))
    return Picture("The layout latent loses least at every length and size", panels, 3, SMOLLM2)


def positions() -> Picture:
    rows = recorded("quality-latent")["by_position"]
    (picture,) = loss_by_position({"latent": rows})
    note = f"{SMOLLM2.partition(',')[0]}, layout latent, half the cache, windows of 8192 tokens."
    return Picture("Inside long windows the loss stays even", picture.panels, 3, note)


def generate() -> Picture:
    rows = [row for name in ("latency-e2e", "latency-e2e-contexts") for row in recorded(name)["rows"]]
    (speeds,), _ = latencies([row for row in rows if row["batch"] == 8], "generate")
    note = "Llama-2-7B's shape, random weights, layout per-group 512 + 16: an eighth of the cache. One H200."
    panels = [*speeds.panels[:1], *largest_batches(rows).panels]
    return Picture("3 to 5 times the tokens at batch 8, 3 to 4 times the batch", panels, 2, note)


def loss_and_time() -> Picture:
    rows = [row for row in recorded("loss-and-time")["rows"] if row["status"] == "ok"]
    looks = {"source": ("source", "points"), **LAYOUTS}
    curves = [
        Curve(layout, [(row["us"], row["loss"]) for row in rows if row["preset"] == layout], *look)
        for layout, look in looks.items()
    ]
    panel = Panel("", "µs of a decode call of one layer", RATIO, curves, ("linear", "ratio"), labels="left")
    note = f"{SMOLLM2} Windows of 8192 tokens; 64 sequences of 8192 tokens on one H200."
    return Picture("At nine heads latents lose less and take longer", [panel], 1, note)


PICTURES = {
    "loss-and-bytes": loss_and_bytes,
    "quality": loss_by_length,
    "positions": positions,
    "generate": generate,
    "loss-and-time": loss_and_time,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw().save(ROOT / "docs" / f"{name}.svg")
