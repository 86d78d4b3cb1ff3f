"""Rank against bits: conversions at several ranks and bits, beside the source with a quantised KV cache.

    python benchmarks/rank_and_bits.py MODEL,MODEL conversions --json benchmarks/results/h200-rank-and-bits.json \
        --picture rank-and-bits.svg

Steps go from the most telling to the least (:data:`STEPS`), each for all models in turn; the file is written after
every row. ``auto`` measures a model's losses once, at the first ratio, and spends other ratios by the same losses,
those of an earlier run in ``work`` included.
Rows of ``auto``, ``fitted`` and ``care`` are checkpoints that read their own codes. Quantisation of the others is
simulated in one forward pass (``mha2mla/eval/quantized_caches.py``); bytes count codes, scales, offsets, padding and
what stays in 16 bits.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mha2mla
from benchmarks.conversion import Calibration, kv_width_of
from benchmarks.recording import Recording, command
from mha2mla import files
from mha2mla.checkpoints import read_json
from mha2mla.conversion.calibration.texts import load_text, token_windows
from mha2mla.conversion.card import RECORD_FILE
from mha2mla.conversion.latent.basis import Importance
from mha2mla.conversion.latent.ranks import Choice, allocate, candidates
from mha2mla.conversion.predictions import Predictor
from mha2mla.conversion.recipe import Recipe
from mha2mla.environment import compute_device, describe_environment
from mha2mla.eval.loading import load_model, load_tokenizer
from mha2mla.eval.plots import loss_by_bytes
from mha2mla.eval.plotting import Picture
from mha2mla.eval.quality import TEXTS, QualityRow, basis_tokens, compare_caches, quantized_caches
from mha2mla.eval.quantized_caches import ComparedCache, KVCodes, LatentCodes
from mha2mla.eval.report import print_table
from mha2mla.files import output_file
from mha2mla.geometry import CODE_BLOCK

LENGTHS = (512, 8192)
ABLATIONS = [
    *(LatentCodes(bits) for bits in (4, 3, 2)),
    *(LatentCodes(bits, basis) for basis in ("balanced", "rotation") for bits in (4, 3)),
    LatentCodes(4, "plain"),
    LatentCodes(4, Importance(power=1.0)),
    LatentCodes(4, sinks=False),
    LatentCodes(4, "rotation", sinks=False),
]
# Kind of step, and its argument: caches of the source, a share of its bytes, or rank over its elements and codes.
STEPS: tuple[tuple[Any, ...], ...] = (
    ("source", [KVCodes(bits, "channel") for bits in (4, 3, 2)]),
    ("auto", 0.125),
    ("auto", 0.0625),
    ("auto", 0.16),
    ("auto", 0.25),
    ("auto", 0.5),
    ("auto", 0.1875),
    ("auto", 0.3125),
    ("rank", 0.584, [LatentCodes(bits) for bits in (3, 4, 2, 8)]),
    ("fitted", 0.125),
    ("care", 0.5),
    ("rank", 0.75, [LatentCodes(bits) for bits in (4, 3)]),
    ("fitted", 0.25),
    ("fitted", 0.16),
    ("rank", 0.3125, []),
    ("rank", 0.1875, []),
    ("source", [KVCodes(bits, "token") for bits in (4, 3, 2)]),
    ("rank", 1.0, [LatentCodes(bits) for bits in (4, 3)]),
    ("rank", 0.5, ABLATIONS),
)


def study(
    models: str,
    work: str,
    only: list[str] | None = None,
    texts: list[str] | None = None,
    lengths: list[int] | None = None,
    max_tokens: int = 8192,
    calibration_tokens: int | None = None,
    minutes: float = 8.0,
    device: str | None = None,
    json: str | None = None,
    picture: str | None = None,
) -> bool:
    """Perplexity and KL of rank times bits, sorted by bytes.

    Args:
        models: folders of source checkpoints, joined by commas.
        work: folder for conversions; those that lie there are not made again.
        only: kinds of steps: source, auto, rank, fitted, care, or KIND:SHARE, as auto:0.125; default all.
        texts: what is read; none of it calibrates.
        lengths: tokens of a window.
        max_tokens: of each text and length.
        calibration_tokens: of a conversion; default the preset's.
        minutes: for all. A step that has not begun by then is left out, and named.
        device: cpu, cuda, …; default CUDA when there is one.
        json: file to write after every row.
        picture: SVG, PNG or PDF file to write in the end: the worst text's ratio by bytes, two panels a model.
    """
    if picture is not None:
        output_file(picture, files.picture(picture), name="picture")
    lengths = lengths or list(LENGTHS)
    measured = {"lengths": lengths, "texts": list(texts or TEXTS), "max_tokens": max_tokens}
    table = Recording("rank-and-bits", json, measured=measured)
    deadline = time.monotonic() + 60 * minutes
    studied: dict[str, StudiedModel] = {}
    failed: list[str] = []
    for kind, *arguments in STEPS:
        for model in models.split(","):
            if only is not None and not {kind, f"{kind}:{arguments[0]}"} & set(only):
                continue
            if time.monotonic() > deadline:
                print(f"{Path(model).name}: no time for {kind} {arguments[0]}", file=sys.stderr)
                continue
            try:
                if model not in studied:
                    studied[model] = StudiedModel(model, Path(work), table, calibration_tokens, compute_device(device))
                getattr(studied[model], f"add_{kind}")(*arguments)
            except Exception:  # the others go on: the machine may not be had again
                traceback.print_exc()
                failed.append(f"{Path(model).name}: {kind} {arguments[0]}")
    columns = (
        "model",
        "cache",
        "bytes",
        *(f"{what} {length:,}" for length in lengths for what in ("ratio", "KL", "±")),
        "seconds",
    )
    print_table(
        sorted(table.rows, key=lambda row: (row["model"], row["bytes"])),
        title="Bytes of the source's 16-bit cache; perplexity ratio of the worst text; mean KL to the source;"
        " seconds of the conversion",
        columns=columns,
        caption="; ".join((describe_environment(table.environment), *(f"failed: {each}" for each in failed))),
    )
    if picture is not None and table.rows:
        by_bytes(table.rows).save(picture)
    return not failed


def by_bytes(rows: Sequence[dict[str, Any]]) -> Picture:
    """Perplexity ratio of the worst text against bytes, a panel for each model and the shortest and longest windows."""
    panels = []
    for model in dict.fromkeys(row["model"] for row in rows):
        (found,) = loss_by_bytes({row["cache"]: row["texts"] for row in rows if row["model"] == model}, {})
        panels += [replace(panel, title=f"{model}, {panel.title}") for panel in found.panels]
    return replace(found, panels=panels)


class StudiedModel:
    """A source, its windows, and the rows of its caches and conversions.

    Args:
        model: folder.
        work: folder for conversions.
        table: gets the rows; its ``measured`` says on what.
        tokens: of calibration text; None: the preset's.
    """

    def __init__(self, model: str, work: Path, table: Recording, tokens: int | None, device: torch.device) -> None:
        self.model, self.name, self.work, self.table, self.device = model, Path(model).name, work, table, device
        self.source = load_model(model, "model", device=device, dtype=torch.float32)
        self.predictor, self.full = Predictor(self.source), 2 * kv_width_of(model)
        tokenizer, measured = load_tokenizer(model, "model"), table.fields["measured"]
        self.windows = {
            (text, length): token_windows(tokenizer, load_text(text), length, max(1, measured["max_tokens"] // length))
            for text in measured["texts"]
            for length in measured["lengths"]
        }
        self.drawn, self.of_bases = Calibration(model, device), basis_tokens(tokenizer)
        self.tokens = {} if tokens is None else {"calibration.tokens": tokens, "calibration.lengths": [512, 1024]}
        self.losses: dict[str, Any] = {}  # of an auto conversion
        for record in sorted(self.work.glob(f"{self.name}-auto-*/{RECORD_FILE}")):
            self.losses = read_json(record.parent, RECORD_FILE).get("searches") or self.losses

    def add(self, caches: Sequence[tuple[dict[str, Any], Callable[[], ComparedCache]]]) -> None:
        """Measures caches that no row has, each with what its row says of it; the source runs once for all of them."""
        known = {(row["model"], row["cache"]) for row in self.table.rows}
        caches = [each for each in caches if (self.name, each[0]["cache"]) not in known]
        by_text = [
            compare_caches(self.predictor, [make for _, make in caches], text, "", part)
            for (text, _), part in self.windows.items()
        ]
        for (row, _), *found in zip(caches, *by_text, strict=True):
            self.table.add({"model": self.name, **row, **_numbers([each.row() for each in found])})

    def add_source(self, caches: Sequence[KVCodes]) -> None:
        """The source over quantised KV caches."""
        made = quantized_caches(self.source, None, caches, None)
        self.add([({"cache": codes.name, **vars(codes)}, make) for codes, make in zip(caches, made, strict=True)])

    def add_rank(self, ratio: float, caches: Sequence[LatentCodes]) -> None:
        """One rank for all layers in 16 bits, by ``quick``, and the same checkpoint over simulated codes."""
        rank = max(CODE_BLOCK, int(ratio * self.full) // CODE_BLOCK * CODE_BLOCK)
        converted, seconds = self.converted(f"{rank}", "quick", cache_ratio=rank / self.full, **{"latent.bits": 16})
        same = {"rank": rank, "seconds": seconds}
        rows = [({"cache": f"latent of {rank}, 16 bits", "bits": 16, **same}, partial(ComparedCache, converted))]
        made = quantized_caches(self.source, converted, caches, self.of_bases) if caches else ()
        for codes, make in zip(caches, made, strict=True):
            rows.append(({"cache": _name(rank, codes), **vars(codes), "basis": str(codes.basis), **same}, make))
        self.add(rows)

    def add_auto(self, ratio: float) -> None:
        """Rank and bits by layer, by ``quick``."""
        if self.losses:
            self.add_by_layer(ratio, "quick", "auto")
            return
        converted, seconds = self.converted(f"auto-{ratio}", "quick", cache_ratio=ratio)
        self.losses = read_json(self.work / f"{self.name}-auto-{ratio}", RECORD_FILE)["searches"]
        chosen = list(zip(self.losses["layer_ranks"], self.losses["layer_bits"], strict=True))
        self.add([(_row(f"quick, auto {ratio}", chosen, seconds), partial(ComparedCache, converted))])

    def add_fitted(self, ratio: float) -> None:
        """The same choice with gradient steps: preset ``cpu``, which a GPU runs in a minute."""
        if not self.losses:
            self.add_auto(ratio)
        self.add_by_layer(ratio, "cpu", "fitted")

    def add_by_layer(self, ratio: float, preset: str, kind: str) -> None:
        """Rank and bits by layer, from the losses that are known."""
        chosen = self.choice(ratio)
        ranks, bits = ([each[index] for each in chosen] for index in range(2))
        keys = {"latent.ranks": ranks, "latent.bits": bits}
        converted, seconds = self.converted(f"{kind}-{ratio}", preset, cache_ratio=ratio, **keys)
        self.add([(_row(f"{preset}, auto {ratio}", chosen, seconds), partial(ComparedCache, converted))])

    def choice(self, ratio: float) -> list[Choice]:
        geometry = Recipe.from_preset("quick", cache_ratio=ratio).geometry(self.drawn.source.spec)
        by_rank, by_bits = (self.losses[f"layer_{name}_losses"] for name in ("rank", "code"))
        ranks = range(min(map(int, by_rank)), geometry.full_kv_lora_rank + 1, CODE_BLOCK)
        layers = [
            candidates(
                geometry, ranks, *({int(key): each[layer] for key, each in by.items()} for by in (by_rank, by_bits))
            )
            for layer in range(self.source.config.num_hidden_layers)
        ]
        return allocate(layers, math.floor(ratio * 2 * self.full) * len(layers))

    def add_care(self, ratio: float) -> None:
        """CARE as we read it, in 16 bits."""
        converted, seconds = self.converted(f"care-{ratio}", "care", cache_ratio=ratio)
        self.add([({"cache": f"care {ratio}", "bits": 16, "seconds": seconds}, partial(ComparedCache, converted))])

    def converted(self, name: str, preset: str, **keys: Any) -> tuple[torch.nn.Module, float]:
        """A conversion, and the seconds that it took, without those of text that the source writes."""
        folder = self.work / f"{self.name}-{name}"
        if not (folder / "config.json").is_file():
            recipe = Recipe.from_preset(preset, **keys, **self.tokens)
            calibration, _ = self.drawn.windows(recipe)
            options = {"device": self.device, "dtype": torch.float32, "progress": False}
            mha2mla.convert(self.model, folder, recipe, calibration=calibration, evaluation_tokens=512, **options)
        seconds = read_json(folder, RECORD_FILE)["seconds"]["total"]
        return load_model(folder, "converted", device=self.device, dtype=torch.float32), seconds


def _row(name: str, chosen: Sequence[Choice], seconds: float) -> dict[str, Any]:
    mean_rank, mean_bits = (sum(each[index] for each in chosen) / len(chosen) for index in range(2))
    ranks, bits = ([each[index] for each in chosen] for index in range(2))
    return {"cache": name, "rank": mean_rank, "bits": mean_bits, "ranks": ranks, "by_layer": bits, "seconds": seconds}


def _name(rank: int, codes: LatentCodes) -> str:
    """Name of a row: settings that differ from the defaults."""
    usual = LatentCodes(codes.bits, codes.basis)
    others = {name: value for name, value in vars(codes).items() if value != getattr(usual, name)}
    return ", ".join((f"latent of {rank}, {codes.bits} bits, {codes.basis}", *(f"{k} {v}" for k, v in others.items())))


def _numbers(rows: Sequence[QualityRow]) -> dict[str, Any]:
    """Bytes in the longest windows, and by length the worst text's ratio and the mean KL with its standard error."""
    found: dict[str, Any] = {"bytes": max(rows, key=lambda row: row.seqlen).cache_share}
    for length in sorted({row.seqlen for row in rows}):
        chosen = [row for row in rows if row.seqlen == length]
        found[f"ratio {length:,}"] = max(row.perplexity_ratio for row in chosen)
        found[f"KL {length:,}"] = sum(row.kl for row in chosen) / len(chosen)
        errors = [row.kl_stderr for row in chosen]
        known = None not in errors
        found[f"± {length:,}"] = sum(error**2 for error in errors) ** 0.5 / len(chosen) if known else None
    return found | {"texts": [row.to_dict() for row in rows]}


if __name__ == "__main__":
    sys.exit(command(study, cpu=True))
