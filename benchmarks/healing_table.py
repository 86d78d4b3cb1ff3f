"""Table of docs/healing.md, "How far to compress", from the files of benchmarks/healing.py.

    python benchmarks/healing_table.py benchmarks/results/h200-healing.json

Of each conversion the arm with the smallest loss on held-out windows of the training text; the texts that are compared
choose nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import command

_TRAINED = {"attention": "attention", "all": "all weights", "lora": "LoRA of attention"}


def ratios(row: dict[str, Any]) -> str:
    """Perplexity ratio of the worst text, by window."""
    return " / ".join(f"{value:.3f}" for key, value in row.items() if key.startswith("ratio "))


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line of the table for each conversion of which an arm finished, the most bytes first."""
    before = {row["name"].removesuffix(" converted"): row for row in rows if row["name"].endswith(" converted")}
    found = []
    for conversion, old in before.items():
        arms = [row for row in rows if row.get("conversion") == conversion and "kl_held_out" in row]
        if not arms:
            continue
        new = min(arms, key=lambda row: row["kl_held_out"])
        what = f"{_TRAINED[new['train']]}, {new['rate']:.0e}, {new['tokens'] / 1e6:.1f}M tokens"
        kl = f"{new['kl_held_out_before']:.3f} → {new['kl_held_out']:.3f}"
        bits = conversion.partition("x")[2] or "16"
        cells = [f"{old['bytes']:.4g}, {bits} bits", ratios(old), ratios(new), kl, what, f"{new['seconds']:.0f} s"]
        found.append((old["bytes"], f"| {' | '.join(cells)} |"))
    return [line for _, line in sorted(found, reverse=True)]


def table(files: list[str]) -> bool:
    """Prints the table.

    Args:
        files: of ``benchmarks/healing.py``.
    """
    for file in files:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
        windows = " / ".join(f"{length:,}" for length in values["compared"]["lengths"])
        print(f"| bytes kept | before, {windows} | after | held-out KL | trained | time |", "|---" * 6 + "|", sep="\n")
        print(*lines(values["rows"]), sep="\n")
    return True


if __name__ == "__main__":
    sys.exit(command(table, cpu=True))
