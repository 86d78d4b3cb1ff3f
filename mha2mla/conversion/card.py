"""The model card of a converted checkpoint: geometry, recipe, measured numbers, how to load it."""

from __future__ import annotations

from typing import Any

import yaml


def model_card(report: dict[str, Any], *, base_model: str | None) -> str:
    """README.md of a checkpoint.

    Args:
        report: ``ConversionReport.to_dict()``.
        base_model: hub id of the source, for the hub's metadata; None for a local folder.
    """
    header: dict[str, Any] = {"library_name": "transformers", "tags": ["mha2mla", "mla"]}
    if base_model is not None:
        header["base_model"] = base_model
    geometry, parity = report["geometry"], report["parity"]
    cached, before = report["cache_numel_per_token"], report["source_cache_numel_per_token"]
    lines = [
        "---",
        yaml.safe_dump(header, sort_keys=False).strip(),
        "---",
        "",
        f"# {report['name']}",
        "",
        f"A `{report['model_type']}` checkpoint (`{report['source_name']}`) converted to Multi-head Latent Attention by"
        f" mha2mla {report['mha2mla_version']}, without training.",
        "",
        "```python",
        "import mha2mla  # registers the model type",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{report["name"]}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{report["name"]}")',
        "```",
        "",
        "## What was gained",
        "",
        "| | source | converted |",
        "|---|---|---|",
        f"| numbers cached per token, all layers | {before:,} | {cached:,} ({cached / before:.4f}) |",
        f"| bytes per token in bfloat16 | {2 * before:,} | {2 * cached:,} |",
        "",
        "## What was lost",
        "",
        f"Measured after writing, on the checkpoint read back from disk, in {report['compute_dtype']}, on"
        f" {parity['tokens']:,} tokens of `{report['evaluation_text']}` in windows of {report['evaluation_length']}.",
        "",
        "| | source | converted |",
        "|---|---|---|",
        f"| perplexity | {parity['perplexity_source']:.4f} | {parity['perplexity_converted']:.4f}"
        f" ({parity['perplexity_ratio']:.4f} ×) |",
        f"| KL(source ‖ converted), nats per token | | {parity['kl']:.3g} |",
        f"| same most likely token | | {parity['top1_agreement']:.4f} |",
        f"| relative error of the logits | | {parity['logits_relative_error']:.3g} |",
        "",
        "Relative error of the hidden states after each layer: "
        + ", ".join(f"{layer['hidden_error']:.2g}" for layer in parity["layers"])
        + ".",
        "",
        "## Geometry of a layer",
        "",
        "| " + " | ".join(geometry) + " |",
        "|" + "---|" * len(geometry),
        "| " + " | ".join(str(value) for value in geometry.values()) + " |",
        "",
        f"{report['num_layers']} layers. Decode backend: {report['decode_backend']}.",
        *([f"Rotary positions: {report['rope_note']}."] if report["rope_note"] else []),
        "",
        "## Recipe",
        "",
        "```yaml",
        yaml.safe_dump(report["recipe"], sort_keys=False).strip(),
        "```",
        "",
        f"Converted with {report['calibration_tokens']:,} tokens of calibration text.",
        "",
    ]
    return "\n".join(lines)
