"""The model card of a converted checkpoint: geometry, recipe, measured numbers, how to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

PLOT_FILE = "loss_per_layer.png"

# Keys of a layer's row -> headings; other keys (losses of the reconstruction, seconds) follow under their own names.
_LAYER_HEADINGS = {
    "layer": "layer",
    "score_error": "scores",
    "output_error": "attention output",
    "stream_output_error": "attention output, in stream",
    "hidden_error": "hidden states",
    "kv_lora_rank": "`kv_lora_rank`",
}


def model_card(
    report: Mapping[str, Any],
    *,
    made: str,
    metadata: Mapping[str, Any],
    plot: str | None,
    record: str,
    environment: str,
) -> str:
    """README.md of a checkpoint.

    Args:
        report: ``ConversionReport.to_dict()``.
        made: what was done to the source.
        metadata: licence and hub id of the source, where it is known, for the hub.
        plot: name of the picture beside the card; None when there is none.
        record: name of the file that holds the numbers.
        environment: one line on machine and libraries.
    """
    lines = [
        *_front(report, made, metadata),
        *_gained(report),
        *_lost(report),
        *_lost_by_layer(report, plot, record),
        *_geometry(report),
        *_recipe(report, environment),
    ]
    return "\n".join(lines)


def _front(report: Mapping[str, Any], made: str, metadata: Mapping[str, Any]) -> list[str]:
    header = {
        **metadata,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["mha2mla", "mla"],
    }
    return [
        "---",
        yaml.safe_dump(header, sort_keys=False).strip(),
        "---",
        "",
        f"# {report['name']}",
        "",
        f"A `{report['model_type']}` checkpoint (`{report['source_name']}`) {made} by mha2mla"
        f" {report['mha2mla_version']}, without training.",
        "",
        "```bash",
        f"pip install -e .  # in a clone of the repository of mha2mla, {report['mha2mla_version']} or newer",
        "```",
        "",
        "```python",
        "import mha2mla  # registers the model type",
        "",
        f'model, tokenizer = mha2mla.load("{report["name"]}")',
        "```",
        "",
    ]


def _gained(report: Mapping[str, Any]) -> list[str]:
    cached, before = report["cache_numel_per_token"], report["source_cache_numel_per_token"]
    return [
        "## What was gained",
        "",
        "| | source | converted |",
        "|---|---|---|",
        f"| numbers cached per token, all layers | {before:,} | {cached:,} ({cached / before:.4f}) |",
        f"| bytes per token in bfloat16 | {2 * before:,} | {2 * cached:,} |",
        f"| tokens of a sequence that it was made for | | {_length(report['calibrated_length'])} |",
        "",
    ]


def _lost(report: Mapping[str, Any]) -> list[str]:
    parity = report["parity"]
    return [
        "## What was lost",
        "",
        f"Measured after writing, on the checkpoint read back from disk, in {report['compute_dtype']}, on"
        f" {parity['tokens']:,} tokens of `{report['evaluation_text']}` in windows of {report['evaluation_length']}.",
        *_long_loss(report),
        "",
        "| | source | converted |",
        "|---|---|---|",
        f"| perplexity | {parity['perplexity_source']:.4f} | {parity['perplexity_converted']:.4f}"
        f" ({parity['perplexity_ratio']:.4f} ×) |",
        f"| KL(source ‖ converted), nats per token | | {parity['kl']:.3g} |",
        f"| same most likely token | | {parity['top1_agreement']:.4f} |",
        f"| relative error of the logits | | {parity['logits_relative_error']:.3g} |",
        "",
    ]


def _lost_by_layer(report: Mapping[str, Any], plot: str | None, record: str) -> list[str]:
    return [
        "## Loss by layer",
        "",
        "Relative errors on the same text. Scores (less what is constant over the keys of a query, which softmax does"
        " not see) and attention output: the converted layer on the source's inputs. In stream, and hidden states: each"
        " model on its own inputs, so after all layers before.",
        "",
        *([f"![relative error by layer]({plot})", ""] if plot is not None else []),
        *_table(report["layers"]),
        "",
        f"The same numbers, and more, are in `{record}`.",
        "",
    ]


def _geometry(report: Mapping[str, Any]) -> list[str]:
    ranks = {layer.get("kv_lora_rank") for layer in report["layers"]}
    return [
        "## Geometry of a layer",
        "",
        *_table([report["geometry"]]),
        "",
        *(["`kv_lora_rank` is another by layer: see the table of layers.", ""] if len(ranks) > 1 else []),
        f"{report['num_layers']} layers. Decode: {report['decode_backend']}; elsewhere the reference.",
        *([f"Rotary positions: {report['rope_note']}."] if report["rope_note"] else []),
        "",
    ]


def _recipe(report: Mapping[str, Any], environment: str) -> list[str]:
    return [
        "## Recipe",
        "",
        f"Preset: {report['preset']}.",
        "",
        "```yaml",
        yaml.safe_dump(report["recipe"], sort_keys=False).strip(),
        "```",
        "",
        f"Converted with {report['calibration_tokens']:,} tokens of calibration text on `{report['device']}` in"
        f" {report['seconds']['total']:.0f} s; peak memory {report['peak_rss_bytes'] / 2**30:.2f} GiB.",
        f"{environment}.",
        "",
    ]


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of a Markdown table; columns without a value anywhere are left out."""
    keys = [
        key
        for key in dict.fromkeys(key for row in rows for key in row)
        if any(row.get(key) is not None for row in rows)
    ]
    known = [key for key in _LAYER_HEADINGS if key in keys]
    keys = known + [key for key in keys if key not in known]
    return [
        "| " + " | ".join(_LAYER_HEADINGS.get(key, key) for key in keys) + " |",
        "|" + "---|" * len(keys),
        *("| " + " | ".join(_cell(row.get(key)) for key in keys) + " |" for row in rows),
    ]


def _long_loss(report: Mapping[str, Any]) -> list[str]:
    if report["long_parity"] is None:
        return []
    lost = report["long_parity"]
    return [
        f"In a window of {report['long_evaluation_length']:,} tokens of `{report['long_evaluation_text']}`: perplexity"
        f" {lost['perplexity_source']:.4f} → {lost['perplexity_converted']:.4f} ({lost['perplexity_ratio']:.4f} ×), KL"
        f" {lost['kl']:.3g}, same most likely token {lost['top1_agreement']:.4f}.",
    ]


def _length(calibrated: int | None) -> str:
    return "as many as the source takes" if calibrated is None else f"up to {calibrated:,}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
