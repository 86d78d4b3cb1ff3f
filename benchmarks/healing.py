"""Healing of one conversion: what is trained × rates × tokens, beside controls that a user would ask for.

    python benchmarks/healing.py --json benchmarks/results/h200-healing.json

Rows, the most telling first: the conversion itself; the source over quantised KV caches; a conversion of full rank
trained alike, which must stay at 1.000; every arm at the fewest tokens; the best arm at more tokens; the conversion
with twice the steps of the layer fit. All arms train on one text that the source writes, and are read back and compared
with the source in float32 on texts that none of them saw. Conversions that lie in ``work`` are not made again: the
first run makes them. No row begins after ``minutes``; those left out are named. The file is written after every row.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mha2mla
from benchmarks.recording import Recording, command
from mha2mla.environment import cache_folder, compute_device
from mha2mla.eval.quality import TEXTS, evaluate_quality
from mha2mla.eval.quantized_caches import KVCodes
from mha2mla.trial_models import fetch_smollm2

COLUMNS = ("name", "bytes", "train", "rate", "tokens", "seconds", "tokens_per_second", "kl_held_out")


def study(
    model: str | None = None,
    work: str | None = None,
    cache_ratio: float = 0.1875,
    preset: str | None = None,
    train: list[str] | None = None,
    rates: list[float] | None = None,
    tokens: list[int] | None = None,
    text_tokens: int = 2_000_000,
    batch_tokens: int = 1 << 14,
    length: int | None = None,
    long_length: int | None = None,
    texts: list[str] | None = None,
    lengths: list[int] | None = None,
    max_tokens: int = 8192,
    minutes: float = 10.0,
    device: str | None = None,
    json: str | None = None,
) -> bool:
    """A row for each control and arm.

    Args:
        model: folder of a source; default SmolLM2-135M-Instruct.
        work: folder for conversions and healed models; what lies there is not made again.
        cache_ratio: of the conversion, in layout latent.
        preset: of the conversions; default latent on CUDA, quick elsewhere.
        train: arms; default attention, all and lora.
        rates: learning rates; default 3e-5, 1e-4 and 3e-4.
        tokens: to train on; default 2, 5 and 20 million.
        text_tokens: different ones that the source writes.
        batch_tokens: of a step.
        length, long_length: tokens of training windows; default those of the preset standard.
        texts: to compare on; default three builtin ones.
        lengths: of windows to compare in; default 512, 2048 and 8192.
        max_tokens: of each text and length.
        minutes: after which no row is begun.
        device: cpu, cuda, …; default CUDA when there is one.
        json: file to write after every row.
    """
    began, place = time.perf_counter(), compute_device(device)
    source = Path(model) if model else fetch_smollm2()
    folder = Path(work) if work else cache_folder() / "healing"
    preset = preset or ("latent" if place.type == "cuda" else "quick")
    compared = {"texts": texts or list(TEXTS), "lengths": lengths or [512, 2048, 8192], "max_tokens": max_tokens}
    settings = {"text_tokens": text_tokens, "batch_tokens": batch_tokens, "length": length, "long_length": long_length}
    table = Recording("healing-study", json, model=source.name, preset=preset, compared=compared, settings=settings)
    left_out: list[str] = []

    def has_time(name: str) -> bool:
        if time.perf_counter() - began < 60 * minutes:
            return True
        left_out.append(name)
        return False

    def convert(name: str, **keys: Any) -> Path:
        made = folder / f"{source.name}-{name}"
        if not (made / "config.json").is_file():
            recipe = {"preset": preset, "layout": "latent", **keys}
            mha2mla.convert(source, made, recipe, evaluation_tokens=512, device=place, progress=False)
        return made

    def add(name: str, checkpoint: Path, caches: tuple[KVCodes, ...] = (), **more: Any) -> None:
        found = evaluate_quality(source, checkpoint, **compared, caches=caches, device=place, progress=False).rows
        for cache in dict.fromkeys(row.cache for row in found):
            rows = [row for row in found if row.cache == cache]
            numbers = {"bytes": rows[0].cache_share}
            for size in sorted({row.seqlen for row in rows}):
                same = [row for row in rows if row.seqlen == size]
                numbers |= {f"ratio {size:,}": max(row.perplexity_ratio for row in same)}
                numbers |= {f"KL {size:,}": sum(row.kl for row in same) / len(same)}
            first = cache == found[0].cache
            own = {"texts": [row.to_dict() for row in rows]}
            table.add({"name": name if first else cache, **numbers, **(more if first else {}), **own})

    def heal(name: str, converted: Path, count: int, rate: float, **keys: Any) -> float:
        healed = folder / "healed"
        report = mha2mla.heal(
            source, converted, healed, preset="standard", tokens=count, rate=rate, device=place, progress=False,
            overwrite=True, resume="never", **settings, **keys,
        )  # fmt: skip
        trained = report.trained
        row = {"train": keys.get("train", "attention"), "rate": rate, "tokens": trained.tokens}
        row |= {"seconds": trained.seconds, "tokens_per_second": trained.tokens_per_second}
        row |= {"kl_held_out": trained.held_out_best, "kl_held_out_before": trained.held_out_before}
        row |= {"healing": report.to_dict() | {"rows": list(report.rows)}}
        add(name, healed, **row)
        return trained.held_out_best

    counts, arms = sorted(tokens or [2_000_000, 5_000_000, 20_000_000]), train or ["attention", "all", "lora"]
    chosen = rates or [1e-4, 3e-4, 3e-5]
    converted = convert(f"{cache_ratio:g}", cache_ratio=cache_ratio)
    add("converted", converted, tuple(KVCodes(bits) for bits in (4, 3, 2)))
    if has_time("full rank, healed"):
        heal("full rank, healed", convert("1.0", cache_ratio=1.0), counts[0], chosen[0], keep="last")
    losses: dict[tuple[str, float], float] = {}
    for rate, arm in itertools.product(chosen, arms):
        if has_time(f"{arm} {rate:g}"):
            try:
                losses[arm, rate] = heal(f"{arm} {rate:g}", converted, counts[0], rate, train=arm)
            except ImportError as error:
                left_out.append(f"{arm} ({error})")
    best = min(losses, key=losses.get, default=(arms[0], chosen[0]))
    for count in counts[1:]:
        if has_time(f"{best[0]} {best[1]:g}, {count:,} tokens"):
            heal(f"{best[0]} {best[1]:g}, {count:,} tokens", converted, count, best[1], train=best[0])
    steps = mha2mla.Recipe.from_preset(preset).fit.steps
    if steps and has_time("twice the steps of the fit"):
        fitted = convert(f"{cache_ratio:g}-fitted", cache_ratio=cache_ratio, **{"fit.steps": 2 * steps})
        add("twice the steps of the fit", fitted)
    if left_out:
        print(f"left out: {', '.join(left_out)}")
    shown = [key for row in table.rows for key in row if key.startswith("ratio ")]
    title = "Perplexity ratio of the worst text by window; held-out KL of the training text"
    return table.show(title, (*COLUMNS[:2], *dict.fromkeys(shown), *COLUMNS[2:]))


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    sys.exit(command(study, cpu=True))
