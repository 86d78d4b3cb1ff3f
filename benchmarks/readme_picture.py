"""Draws the README's picture, ``docs/loss-and-bytes.svg``: perplexity ratio against KV cache bytes kept.

    python benchmarks/readme_picture.py

Points are the recorded rows of SmolLM2-135M-Instruct: windows of 512 tokens, the worst of three texts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "loss-and-bytes.svg"
ROWS = ("h200-conversion.json", "h200-conversion-latent.json")
LABELS = {  # preset → its label, where that stands (share, ratio), on which side of that point
    "latent": ("latent (default)", (0.19, 1.32), "end"),
    "shared": ("shared", (0.205, 1.62), "start"),
    "per-group": ("per-group", (0.325, 1.35), "start"),
}
# Source with 4-bit keys (by channel, before RoPE) and values: 4,088 tokens of English technical prose, windows of 512.
QUANTISED_SOURCE = (0.31, 1.018)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 430, 70, 30, 74, 64
LARGEST = 1.75  # perplexity ratio at the top of the plot
STYLE = """
    .page { fill: #ffffff } .ink { fill: #1f2328 } .soft { fill: #59636e } .grid { stroke: #d1d9e0 }
    .source { fill: #59636e } .latent { stroke: #0969da; fill: #0969da }
    .shared { stroke: #54a0ef; fill: #54a0ef } .per-group { stroke: #8250df; fill: #8250df }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } .ink { fill: #f0f6fc } .soft { fill: #9198a1 } .grid { stroke: #3d444d }
      .source { fill: #9198a1 } .latent { stroke: #4493f8; fill: #4493f8 }
      .shared { stroke: #79c0ff; fill: #79c0ff } .per-group { stroke: #ab7df8; fill: #ab7df8 }
    }
    text { font: 13px system-ui, sans-serif; stroke: none } .title { font-size: 17px; font-weight: 600 }
    path.latent, path.shared, path.per-group { fill: none; stroke-width: 2.5 }
"""


def points() -> dict[str, list[tuple[float, float]]]:
    """Preset → (share of the cache, perplexity ratio at 512 tokens), by growing share."""
    rows = [row for name in ROWS for row in json.loads((ROOT / "benchmarks/results" / name).read_text("utf-8"))["rows"]]
    found: dict[str, dict[float, float]] = {preset: {} for preset in LABELS}
    for row in rows:
        share, _, preset = row["name"].partition(" ")
        if preset in found:
            found[preset][float(share)] = row["512"]
    return {preset: sorted(curve.items()) for preset, curve in found.items()}


def place(share: float, ratio: float) -> tuple[float, float]:
    """Pixels of a point: the share on a logarithmic axis from 1/8 to 1, the ratio on a linear one."""
    x = LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(share) + 3) / 3
    return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (ratio - 1) / (LARGEST - 1), 1)


def text(x: float, y: float, words: str, kind: str = "ink", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def draw() -> str:
    """The picture as SVG."""
    parts = [f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="6"/>']
    parts.append(text(20, 28, "Perplexity ratio against KV cache bytes kept: lower is better", "ink title"))
    parts.append(
        text(20, 48, "SmolLM2-135M-Instruct, windows of 512 tokens, worst of three texts; 1.0 = no loss", "soft")
    )
    for ratio in (1.0, 1.2, 1.4, 1.6):
        _, y = place(1, ratio)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(text(LEFT - 10, y + 4, f"{ratio:.1f}", "soft", "end"))
    for share, name in ((1 / 8, "1/8"), (1 / 4, "1/4"), (1 / 2, "1/2"), (1, "all")):
        x, y = place(share, 1)
        parts.append(text(x, y + 22, name, "soft", "middle"))
    parts.append(
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 18, "share of the source's 16-bit KV cache bytes", "soft", "middle")
    )
    for preset, curve in points().items():
        pixels = [place(*point) for point in curve]
        path = " L ".join(f"{x} {y}" for x, y in pixels)
        parts.append(f'<path class="{preset}" d="M {path}"/>')
        for (x, y), (_, ratio) in zip(pixels, curve, strict=True):
            parts.append(f'<circle class="{preset}" cx="{x}" cy="{y}" r="4"><title>{ratio:.3f}</title></circle>')
    for preset, (words, point, anchor) in LABELS.items():
        parts.append(text(*place(*point), words, preset, anchor))
    (x, y), (full, bottom) = place(*QUANTISED_SOURCE), place(1, 1)
    parts.append(f'<circle class="source" cx="{x}" cy="{y}" r="5"/>')
    parts.append(text(x - 10, y - 2, "source, 4-bit KV cache: 1.018 (on prose)", "source", "end"))
    parts.append(f'<circle class="source" cx="{full}" cy="{bottom}" r="5"/>')
    parts.append(text(full, bottom - 10, "source", "source", "end"))
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n  '
        f"<style>{STYLE}  </style>\n  {body}\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
