"""Perplexity of conversions: our presets beside the peers', and the effect of each key of a recipe.

    python benchmarks/conversion.py compare --json benchmarks/results/h200-conversion.json
    python benchmarks/conversion.py compare --only "0.5 quick" --device cpu
    python benchmarks/conversion.py ablation --json benchmarks/results/h200-conversion-ablation.json

Every row is one call of ``mha2mla.convert``, whose checkpoint is read back and compared with the source on texts
that no row calibrates on; a perplexity is given as its ratio to the source's. The peers are re-implementations (the
presets ``published-mha2mla`` and ``published-transmla``), so that they share precision and evaluation with everything
else; their published code differs in details. A row that fails says why and the others go on; the file is written after
every row, and rows that it already holds for the same commit, model and texts are not measured again.
"""

from __future__ import annotations

import json as json_format
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mha2mla
from benchmarks.recording import Recording, command
from mha2mla.conversion.calibration.blocks import calibration_lengths
from mha2mla.conversion.calibration.windows import calibration_windows
from mha2mla.conversion.recipe import Recipe
from mha2mla.conversion.source.opening import open_source
from mha2mla.eval.loading import load_model, load_tokenizer
from mha2mla.eval.quality import TEXTS as LONG_TEXTS
from mha2mla.eval.quality import QualityReport, evaluate_quality, parse_lengths
from mha2mla.trial_models import fetch_smollm2

RATIOS = (0.5, 0.3125, 0.1875)
# None of them is what a row calibrates on. The first is too short for long windows.
TEXTS = ("builtin:prose", *LONG_TEXTS)
LENGTHS = "512,2048,longest"
_CHECK_TOKENS = 512  # convert's own comparison, which these rows do not read

# Keys whose other value an ablation tries, one at a time, from the preset that it starts from.
ABLATIONS: dict[str, tuple[Any, ...]] = {
    "rope.selection": ("2-norm", "high", "low", "uniform", "rorope"),
    "rope.share": (0.17, 0.21, 0.25, 0.34),
    "latent.rule": ("svd-joint", "svd-split", "balanced-pca"),
    "latent.centered": (False,),
    "latent.ranks": ("measured",),
    "fit.queries": (False,),
    "fit.output": (False, True),
    "calibration.tokens": (24576, 98304),
    "calibration.text": (
        "builtin:pydoc",
        "generated",
        "generated-diverse",
        "generated+builtin:pydoc",
        "generated-diverse+builtin:pydoc",
    ),
    "calibration.lengths": (512, 4096, 8192, [512, 8192]),
}
FIT_ABLATIONS: dict[str, tuple[Any, ...]] = {
    "fit.steps": (0, 150),
    "fit.tokens": (4096, 16384),
    "latent.up_projections": ("kv-head", "query-head"),
}


@dataclass(frozen=True)
class Case:
    """One row: a name of its own, the recipe that it measures, and whether other rows are compared with it."""

    name: str
    recipe: Recipe
    is_base: bool = False


def comparison(ratios: Sequence[float] = RATIOS, *, kv_width: int = 192, seed: int = 0) -> list[Case]:
    """The rows of the comparison table: per ratio the peers, then ours.

    Args:
        kv_width: kv heads times head width of the source. Peers get the widths of their own papers' splits.
    """
    cases = []
    for ratio in ratios:
        budget = round(ratio * 2 * kv_width)
        rope = 8 * max(1, round((budget / 3 if ratio >= 0.5 else budget * 0.27) / 8))
        split = {"qk_rope_head_dim": rope, "kv_lora_rank": (budget - rope) // 8 * 8}
        # TransMLA's FreqFold: the best of 1, 2, 4 and 8 for SmolLM2 at 64 and at 32 rotary dims.
        split["rope.selection"] = "rorope-2" if rope >= 64 else "rorope-4"
        for preset, keys in (
            ("published-mha2mla", {"cache_ratio": ratio}),
            ("published-transmla", split),
            ("quick", {"cache_ratio": ratio, "layout": "shared"}),
            ("quick", {"cache_ratio": ratio, "layout": "per-group"}),
            ("quick", {"cache_ratio": ratio, "layout": "latent"}),
            ("shared", {"cache_ratio": ratio}),
            ("per-group", {"cache_ratio": ratio}),
            ("latent", {"cache_ratio": ratio}),
        ):
            recipe = Recipe.from_preset(preset, **keys, **{"calibration.seed": seed, "latent.bits": 16})
            name = f"quick, {recipe.target.layout}" if preset == "quick" else preset
            cases.append(Case(f"{ratio:g} {name}", recipe))
    return cases


def ablations(
    preset: str, ratios: Sequence[float] = (0.5, 0.3125), *, layout: str | None = None, seed: int = 0
) -> list[Case]:
    """A preset in 16 bits, in another layout than its own where one is given, then every key that it may change by
    itself."""
    given = {"latent.bits": 16} | ({} if layout is None else {"layout": layout})
    base = Recipe.from_preset(preset, **given)
    keys, usual = ABLATIONS | (FIT_ABLATIONS if base.fit.steps else {}), base.flat()
    cases = []
    for ratio in ratios:
        common = {**given, "cache_ratio": ratio, "calibration.seed": seed}
        cases.append(Case(f"{ratio:g} {preset}", Recipe.from_preset(preset, **common), is_base=True))
        for key, values in keys.items():
            for value in values:
                if value == usual[key]:
                    continue
                try:
                    recipe = Recipe.from_preset(preset, **common, **{key: value})
                except ValueError:  # two keys that exclude one another
                    continue
                cases.append(Case(f"{ratio:g} {preset} {key}={value}", recipe))
    return cases


@dataclass(frozen=True)
class Evaluation:
    """Rows to measure, and how.

    Args:
        only: measure rows whose name contains this; several: joined by commas, no spaces.
        json: file to write after every row; rows that are there already are kept.
        device: cpu, cuda, cuda:1, …; default CUDA when there is one.
        texts: evaluation texts.
        lengths: tokens of a window, joined by commas; "longest" is what the source takes.
        max_tokens: of each text.
    """

    only: str | None = None
    json: str | None = None
    device: str | None = None
    texts: list[str] | None = None
    lengths: str = LENGTHS
    max_tokens: int = 24576


Flags = Annotated[Evaluation, Parameter(name="*")]
DEFAULTS = Evaluation()


def compare(
    ratios: list[float] | None = None, seed: int = 0, model: str | None = None, evaluation: Flags = DEFAULTS
) -> bool:
    """Peers and presets at several cache ratios.

    Args:
        ratios: cached numbers after / before.
        seed: of every recipe.
        model: folder or hub id; default SmolLM2-135M-Instruct.
    """
    source = model or str(fetch_smollm2())
    cases = comparison(ratios or RATIOS, kv_width=kv_width_of(source), seed=seed)
    return measure_cases(cases, source, "conversion", "Conversions", evaluation)


def ablation(
    preset: str = "quick",
    layout: str | None = None,
    ratios: list[float] | None = None,
    seed: int = 0,
    model: str | None = None,
    evaluation: Flags = DEFAULTS,
) -> bool:
    """A preset with one key changed at a time; its own rows are always measured.

    Args:
        preset: what the changes start from; presets with reconstruction also try its keys.
        layout: of all rows; default the preset's own.
        ratios: cached numbers after / before.
        seed: of every recipe.
        model: folder or hub id; default SmolLM2-135M-Instruct.
    """
    cases = ablations(preset, ratios or (0.5, 0.3125), layout=layout, seed=seed)
    source = model or str(fetch_smollm2())
    return measure_cases(cases, source, "conversion-ablation", f"Ablation of {preset}", evaluation)


def kv_width_of(source: str) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return (getattr(config, "num_key_value_heads", None) or heads) * width


class Calibration:
    """The windows that a recipe calibrates on, drawn once for all recipes that ask for the same ones.

    Sampling text from the source takes longer than most rows.
    """

    def __init__(self, source: str, device: torch.device) -> None:
        self.source, self.device = open_source(Path(source)), device
        self._drawn: dict[tuple[Any, ...], tuple[list[torch.Tensor], float]] = {}

    def windows(self, recipe: Recipe) -> tuple[list[torch.Tensor], float]:
        """int64 [windows, length] of every length, as ``mha2mla.convert`` would draw them, and the seconds it took."""
        context = getattr(self.source.config, "max_position_embeddings", None)
        lengths = calibration_lengths(self.source.spec, recipe.calibration.lengths, context)
        key = (recipe.calibration.text, recipe.calibration.tokens, lengths, recipe.calibration.seed)
        if key not in self._drawn:
            started = time.perf_counter()
            blocks = calibration_windows(
                self.source,
                recipe.calibration.text,
                lengths=lengths,
                tokens=recipe.calibration.tokens,
                seed=recipe.calibration.seed,
                device=self.device,
            )
            windows = [blocks.tokens[list(blocks.of_length(length))].view(-1, length) for length in lengths]
            self._drawn[key] = windows, time.perf_counter() - started
        return self._drawn[key]


def measure_cases(cases: Sequence[Case], source: str, kind: str, title: str, evaluation: Evaluation) -> bool:
    """Measures rows, and returns whether all could be.

    Args:
        cases: of the table.
        source: folder or hub id.
        kind: of the file.
        title: of the table.
    """
    only, json, device, lengths = evaluation.only, evaluation.json, evaluation.device, evaluation.lengths
    parts = [""] if only is None else re.split(",(?! )", only)
    named = [case for case in cases if any(part in case.name for part in parts)]
    chosen = [case for case in cases if case.is_base or case in named]
    if not named:
        raise ValueError(f"only is {only!r}; expected parts of {', '.join(case.name for case in cases)}")
    texts, max_tokens = evaluation.texts or list(TEXTS), evaluation.max_tokens
    measured = {"model": Path(source).name, "texts": texts, "lengths": lengths, "max_tokens": max_tokens}
    table = Recording(kind, json, measured=measured)
    measured["commit"] = table.environment.get("commit")
    rows = _rows_of(json, measured)
    loaded = load_model(source, "source", device=device, dtype=torch.float32)
    tokenizer = load_tokenizer(source, "source")
    drawn = Calibration(source, loaded.device)
    how = {"texts": texts, "lengths": parse_lengths(lengths), "max_tokens": max_tokens, "device": device}
    for case in chosen:
        if rows.get(case.name, {}).get("recipe") == case.recipe.to_dict() and rows[case.name]["status"] == "ok":
            continue
        row = rows[case.name] = measure_case(case, source, loaded, tokenizer, drawn, **how)
        found = {key: round(value, 4) for key, value in row.items() if key.isdecimal()}
        print(f"{case.name}: {found or row['status']} ({row['seconds']:.0f} s)", file=sys.stderr, flush=True)
        table.rows = list(rows.values())
        table.write()
    table.rows = [rows[case.name] for case in chosen]
    lengths_measured = dict.fromkeys(key for row in table.rows for key in row if key.isdecimal())
    seconds = ("calibration_seconds", "convert_seconds")
    columns = ("name", "geometry", "cache_ratio", *lengths_measured, "kl", *seconds, "status")
    return table.show(f"{title}: perplexity relative to the source model, {measured['model']}, float32", columns)


def _rows_of(json: str | None, measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run with the same settings, by name."""
    if json is None or not Path(json).is_file():
        return {}
    written = json_format.loads(Path(json).read_text(encoding="utf-8"))
    return {row["name"]: row for row in written["rows"]} if written.get("measured") == measured else {}


def measure_case(
    case: Case,
    source: str,
    loaded: torch.nn.Module,
    tokenizer: Any,
    calibration: Calibration,
    *,
    texts: Sequence[str],
    lengths: Sequence[int | None],
    max_tokens: int,
    device: str | None,
) -> dict[str, Any]:
    """One row: converts into a temporary folder, evaluates what lies there, and removes it.

    Args:
        source: folder or hub id that is converted.
        loaded: the same, as the model that the result is compared with.
        calibration: where its windows come from.
        texts, lengths: what :func:`evaluate_quality` measures; a column of a length is the text that loses most, of
            :data:`LONG_TEXTS`.
    """
    row: dict[str, Any] = {"name": case.name, "recipe": case.recipe.to_dict(), "status": "ok"}
    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="mha2mla-benchmark-"))
    try:
        windows, drawing_seconds = calibration.windows(case.recipe)
        report = mha2mla.convert(
            source,
            folder / "converted",
            case.recipe,
            calibration=windows,
            device=device,
            dtype=torch.float32,
            evaluation_tokens=_CHECK_TOKENS,
            progress=False,
        )
        row |= {
            "geometry": f"{report.geometry.num_rope_heads} x {report.geometry.qk_rope_head_dim}"
            f" + {report.geometry.kv_lora_rank}",
            "cache_ratio": report.cache_ratio,
            "calibration_tokens": report.calibration_tokens,
            "calibration_seconds": drawing_seconds,
            "convert_seconds": report.seconds["total"],
            "latent_ranks": [layer["kv_lora_rank"] for layer in report.layers],
            "device": report.device,
        }
        quality = evaluate_quality(
            loaded,
            load_model(folder / "converted", "converted", device=device, dtype=torch.float32),
            texts=texts,
            lengths=lengths,
            max_tokens=max_tokens,
            tokenizer=tokenizer,
            progress=False,
        )
        row |= _ratios(quality, texts)
    except (ValueError, RuntimeError, OSError) as error:
        row["status"] = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return row | {"seconds": time.perf_counter() - started}


def _ratios(quality: QualityReport, texts: Sequence[str]) -> dict[str, Any]:
    """All that was measured; by text; and by length the text that loses most."""
    row: dict[str, Any] = {"quality": quality.to_dict()}
    for text in texts:
        row[text] = [measured.perplexity_ratio for measured in quality.rows if measured.text == text]
    long = [measured for measured in quality.rows if measured.text in LONG_TEXTS]
    for length in sorted({measured.seqlen for measured in long}):
        row[str(length)] = max(measured.perplexity_ratio for measured in long if measured.seqlen == length)
    return row | {"kl": max(measured.kl for measured in quality.rows)}


if __name__ == "__main__":
    sys.exit(command(compare, ablation, cpu=True))
