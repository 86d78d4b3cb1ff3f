"""Rank against bits: conversions at several ranks with quantised latents, beside the source with a quantised KV cache.

    python benchmarks/rank_and_bits.py MODEL,MODEL conversions --json benchmarks/results/h200-rank-and-bits.json

Every rank is one conversion by the preset ``quick``, all of one calibration text. Quantisation is simulated in one
forward pass (``mha2mla/eval/quantized_caches.py``); bytes count codes, scales, offsets, padding
and what stays in 16 bits. The file is written after every row.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mha2mla
from benchmarks.conversion import Calibration, kv_width_of
from benchmarks.recording import Recording, command
from mha2mla.conversion.latent.basis import Importance
from mha2mla.conversion.recipe import Recipe
from mha2mla.environment import compute_device, describe_environment
from mha2mla.eval.loading import load_model, load_tokenizer
from mha2mla.eval.quality import TEXTS, QualityRow, basis_tokens, compare_caches, quantized_caches
from mha2mla.eval.quantized_caches import ComparedCache, KVCodes, LatentCodes
from mha2mla.eval.report import print_table
from mha2mla.predictions import Predictor
from mha2mla.texts import load_text, token_windows

RANKS = (0.5, 1.0, 0.75, 0.44, 0.625)  # relative to the elements that the source caches, the most telling ones first
LENGTHS = (512, 8192)
GROUP = 32  # ranks are multiples of it
KV_CACHES = [KVCodes(bits, keys) for bits in (8, 4, 3, 2) for keys in ("channel", "token")]
LATENT_CACHES = [LatentCodes(4), LatentCodes(3), LatentCodes(8), LatentCodes(4, "balanced"), LatentCodes(3, "balanced")]
# At half the rank alone.
ABLATIONS = [
    *(LatentCodes(bits, basis) for basis in ("rotation", "components") for bits in (4, 3)),
    LatentCodes(4, "plain"),
    *(LatentCodes(bits, group=group) for group in (64, None) for bits in (4, 3)),
    *(LatentCodes(bits, scale_bits=8) for bits in (4, 3)),
    LatentCodes(4, Importance(power=1.0)),
    LatentCodes(4, sinks=False),
    LatentCodes(4, "rotation", sinks=False),
]


def study(
    models: str,
    work: str,
    ranks: list[float] | None = None,
    texts: list[str] | None = None,
    lengths: list[int] | None = None,
    max_tokens: int = 8192,
    calibration_tokens: int | None = None,
    minutes: float = 8.0,
    device: str | None = None,
    json: str | None = None,
) -> bool:
    """Perplexity and KL of rank times bits, sorted by bytes.

    Args:
        models: folders of source checkpoints, joined by commas.
        work: folder for conversions; those that lie there are not made again.
        ranks: d_c over the numbers that the source caches; rounded down to a multiple of 32.
        texts: what is read; none of it calibrates.
        lengths: tokens of a window.
        max_tokens: of each text and length.
        calibration_tokens: of a conversion; default the preset's.
        minutes: for all models. What has not begun by then is left out, and named.
        device: cpu, cuda, …; default CUDA when there is one.
        json: file to write after every row.
    """
    lengths = lengths or list(LENGTHS)
    measured = {"lengths": lengths, "texts": list(texts or TEXTS), "max_tokens": max_tokens}
    table = Recording("rank-and-bits", json, measured=measured)
    names, started = models.split(","), time.monotonic()
    for index, model in enumerate(names):
        deadline = started + 60 * minutes * (index + 1) / len(names)
        settings = (ranks or RANKS, measured, calibration_tokens, compute_device(device), deadline)
        study_model(model, Path(work), table, *settings)
    columns = (
        "model",
        "cache",
        "bytes",
        *(f"{what} {length:,}" for length in lengths for what in ("ratio", "KL", "±")),
    )
    rows = sorted(table.rows, key=lambda row: (row["model"], row["bytes"]))
    print_table(
        rows,
        title="Bytes of the source's 16-bit cache; perplexity ratio of the worst text; mean KL to the source",
        columns=columns,
        caption=describe_environment(table.environment),
    )
    return True


def study_model(
    model: str,
    work: Path,
    table: Recording,
    ranks: Sequence[float],
    measured: dict[str, Any],
    tokens: int | None,
    device: torch.device,
    deadline: float,
) -> None:
    """The source's rows, then those of every rank that begins before the ``deadline`` of ``time.monotonic``."""
    source, tokenizer = load_model(model, "model", device=device, dtype=torch.float32), load_tokenizer(model, "model")
    predictor, full = Predictor(source), 2 * kv_width_of(model)
    windows = {
        (text, length): token_windows(tokenizer, load_text(text), length, max(1, measured["max_tokens"] // length))
        for text in measured["texts"]
        for length in measured["lengths"]
    }
    drawn, of_bases = Calibration(model, device), basis_tokens(tokenizer)

    def add(caches: Sequence[tuple[dict[str, Any], Callable]]) -> None:
        by_text = [
            compare_caches(predictor, [make for _, make in caches], text, "", part)
            for (text, _), part in windows.items()
        ]
        for (row, _), *found in zip(caches, *by_text, strict=True):
            table.add({"model": Path(model).name, **row, **_numbers([each.row() for each in found])})

    add([({"cache": make().name, **vars(codes)}, make) for codes, make in _paired(KV_CACHES, source, None, None)])
    for rank in dict.fromkeys(max(GROUP, int(ratio * full) // GROUP * GROUP) for ratio in ranks):
        if time.monotonic() > deadline:
            print(f"{Path(model).name}: no time for the latent of {rank}", file=sys.stderr)
            continue
        folder = work / f"{Path(model).name}-{rank}"
        if not (folder / "config.json").is_file():
            keys = {} if tokens is None else {"calibration.tokens": tokens, "calibration.lengths": [512, 1024]}
            recipe = Recipe.from_preset("quick", cache_ratio=rank / full, **keys)
            calibration, _ = drawn.windows(recipe)
            mha2mla.convert(
                model,
                folder,
                recipe,
                calibration=calibration,
                evaluation_tokens=512,
                device=device,
                dtype=torch.float32,
                progress=False,
            )
        converted = load_model(folder, "converted", device=device, dtype=torch.float32)
        caches = LATENT_CACHES + (ABLATIONS if rank == full // 2 // GROUP * GROUP else [])
        rows = [({"cache": f"latent of {rank}, 16 bits", "rank": rank, "bits": 16}, partial(ComparedCache, converted))]
        for codes, make in _paired(caches, source, converted, of_bases):
            settings = {**vars(codes), "basis": str(codes.basis)}
            rows.append(({"cache": _name(rank, codes), "rank": rank, **settings}, make))
        add(rows)


def _paired(caches: Sequence[Any], *models: Any) -> list[tuple[Any, Callable]]:
    source, converted, calibration = models
    return list(zip(caches, quantized_caches(source, converted, caches, calibration), strict=True))


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
