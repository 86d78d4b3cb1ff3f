"""The model card of a converted checkpoint: geometry, recipe, measured numbers, how to load it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mha2mla.checkpoints import CONFIG_FILE, CheckpointError, read_json, regular_file
from mha2mla.conversion.recipe import PlainLoader

CARD_FILE = "README.md"
PLOT_FILE = "loss_per_layer.png"
RECORD_FILE = "conversion.json"  # record of the measurements
_LARGEST = 1 << 16  # characters of a card that are looked at
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_SHORT = re.compile(r"[^\n]{1,200}")


_CARD = """---
{header}
---

# {name}

A `{model_type}` checkpoint (`{source_name}`) {made} by mha2mla {mha2mla_version}, without training.
{origin}

```bash
pip install -e .  # in a clone of the repository of mha2mla, {mha2mla_version} or newer
```

```python
import mha2mla  # registers the model type

model, tokenizer = mha2mla.load("{name}")
```

Without the package, `trust_remote_code=True` runs `modeling_mha2mla.py`, the same model in plain torch, which lies \
beside the weights{remote}.

## Cache and weights

| | source | converted |
|---|---|---|
| elements cached per token, all layers | {before:,} | {cached:,} |
| bytes per token in bfloat16{codes} | {before_bytes:,} | {cached_bytes:,} ({cache_ratio:.4f}{kept}) |
| parameters | {source_parameters:,} | {parameters:,} ({weight_growth:.4f}) |
| bytes of weights, as stored | {source_weight_bytes:,} | {weight_bytes:,} |
| tokens of a sequence that it was made for | | {length} |

## What was lost

Measured after writing, on the checkpoint read back from disk, in {compute_dtype}, on {parity[tokens]:,} tokens of \
`{evaluation_text}` in windows of {evaluation_length}.
{long_loss}
| | source | converted |
|---|---|---|
| perplexity | {parity[perplexity_source]:.4f} | {parity[perplexity_converted]:.4f} ({parity[perplexity_ratio]:.4f} ×) |
| KL(source ‖ converted), nats per token | | {parity[kl]:.3g} |
| same most likely token | | {parity[top1_agreement]:.4f} |
| relative error of the logits | | {parity[logits_relative_error]:.3g} |

## Loss by layer

Relative errors on the same text. Scores (less what is constant over the keys of a query, which softmax does not see) \
and attention output: the converted layer on the source's inputs. In stream, and hidden states: each model on its own \
inputs, so after all layers before.

{picture}{layer_table}

The same numbers, and more, are in `{record}`.

## Geometry of a layer

{geometry_table}

{ranks}{num_layers} layers. Decode: {decode_backend}; elsewhere the reference.{prompts}
{rotary}
## Recipe

Preset: {preset}.

```yaml
{recipe_yaml}
```

Converted with {calibration_tokens:,} tokens of calibration text on `{device}` in {seconds[total]:.0f} s; peak memory \
{peak_gib:.2f} GiB.
{environment}.
"""
_LONG_LOSS = """\
In a window of {long_evaluation_length:,} tokens of `{long_evaluation_text}`: perplexity \
{long_parity[perplexity_source]:.4f} → {long_parity[perplexity_converted]:.4f} \
({long_parity[perplexity_ratio]:.4f} ×), KL {long_parity[kl]:.3g}, same most likely token \
{long_parity[top1_agreement]:.4f}.
"""


def model_card(
    report: Mapping[str, Any],
    *,
    made: str,
    metadata: Mapping[str, Any],
    plot: str | None,
    layers: str,
    geometry: str,
    environment: str,
) -> str:
    """README.md of a checkpoint.

    Args:
        report: ``ConversionReport.to_dict()``.
        metadata: licence and hub id of the source, where it is known, for the hub.
        plot: name of the picture beside the card; None when there is none.
        layers, geometry: tables of the losses by layer and of a layer's geometry.
    """
    header = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["mha2mla", "mla"]}
    cached, before = report["cache_numel_per_token"], report["source_cache_numel_per_token"]
    bits = sorted({layer["latent_bits"] for layer in report["layers"]})
    shown = ", ".join(map(str, bits))
    length = report["calibrated_length"]
    names = ("kv_lora_rank", "latent_bits")
    several = [f"`{name}`" for name in names if len({layer.get(name) for layer in report["layers"]}) > 1]
    return _CARD.format_map(
        {
            **report,
            "made": made,
            "record": RECORD_FILE,
            "environment": environment,
            "origin": _origin(metadata),
            "header": _yaml({**metadata, **header}),
            "recipe_yaml": _yaml(report["recipe"]),
            "cached": cached,
            "before": before,
            "cached_bytes": report["cache_bytes_per_token"],
            "codes": f"; latents as codes of {shown} bits, by the package alone" if bits[0] < 16 else "",
            "remote": " and caches latents in the model's dtype" if bits[0] < 16 else "",
            "before_bytes": 2 * before,
            "kept": f"; {report['kept']}" if report["kept"] else "",
            "length": "as many as the source takes" if length is None else f"up to {length:,}",
            "long_loss": "" if report["long_parity"] is None else _LONG_LOSS.format_map(report),
            "picture": "" if plot is None else f"![relative error by layer]({plot})\n\n",
            "layer_table": layers,
            "geometry_table": geometry,
            "ranks": f"{' and '.join(several)} differ by layer: see the table of layers.\n\n" if several else "",
            "prompts": f" Prompts: {report['prompt_note']}." if report["prompt_note"] else "",
            "rotary": f"Rotary positions: {report['rope_note']}.\n" if report["rope_note"] else "",
            "peak_gib": report["peak_rss_bytes"] / 2**30,
        }
    )


def _origin(metadata: Mapping[str, Any]) -> str:
    """Source and licence in a sentence each."""
    source, licence = metadata.get("base_model"), metadata.get("license", "unknown")
    name = metadata.get("license_name", licence)
    link = f"[{name}]({metadata['license_link']})" if "license_link" in metadata else f"`{name}`"
    given = "unknown; the source's card names none" if licence == "unknown" else f"{link}, the source's"
    return (f"Source: [{source}](https://huggingface.co/{source}). " if source else "") + f"Licence: {given}."


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False).strip()


def card_metadata(folder: Path, name: str) -> dict[str, Any]:
    """``license`` (with ``license_name`` and ``license_link`` where there are any) and ``base_model``, if it is known.

    The licence is that of the source's card; else the file LICENSE, which is copied; else it is unknown. The name is
    the hub id that the caller gave, of the hub's cache, of the source's config, or of its card.

    Raises:
        CheckpointError: its ``config.json`` cannot be read.
    """
    card, config = _front_matter(folder), read_json(folder, CONFIG_FILE)
    found = {key: card[key] for key in ("license", "license_name", "license_link") if _is(_SHORT, card.get(key))}
    if "license" not in found and (folder / "LICENSE").is_file():
        found = {"license": "other", "license_name": "see-license", "license_link": "LICENSE"}
    found.setdefault("license", "unknown")
    cached = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/", folder.resolve().as_posix())
    given = None if Path(name).exists() else name
    ids = (given, cached and f"{cached[1]}/{cached[2]}", config.get("_name_or_path"), card.get("base_model"))
    if known := [each for each in ids if _is(_HUB_ID, each)]:
        found["base_model"] = known[0]
    return found


def _is(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _front_matter(folder: Path) -> dict[str, Any]:
    """The YAML at the head of the source's card; empty where there is none that can be read."""
    try:
        with open(regular_file(folder, CARD_FILE), encoding="utf-8", errors="replace") as file:
            head = re.match(r"---\n(.*?)\n---\n", file.read(_LARGEST), re.S)
        values = yaml.load(head[1], PlainLoader) if head else {}
    except (CheckpointError, OSError, yaml.YAMLError, RecursionError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
