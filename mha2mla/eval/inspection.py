"""Geometry, sizes and measured losses of a converted checkpoint, from its config and the record of its conversion."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from mha2mla.checkpoints import (
    CheckpointError,
    check_converted,
    check_numbers,
    damage_named,
    find_checkpoint,
    find_converted,
    read_json,
)
from mha2mla.conversion.card import RECORD_FILE
from mha2mla.conversion.source.files import identify
from mha2mla.conversion.source.opening import open_converted
from mha2mla.environment import named_dtype
from mha2mla.eval.loading import load_config
from mha2mla.eval.report import flat, format_value, html_table
from mha2mla.geometry import kept_keys_share
from mha2mla.modeling import MHA2MLAConfig, what_serves
from mha2mla.modeling.config import CODE_FILES, cache_bytes
from mha2mla.modeling.stored_tensors import num_parameters

CACHE_COLUMNS = {
    "batch": "batch",
    "length": "length",
    "source_mib": "source, MiB",
    "converted_mib": "converted, MiB",
    "reduction": "reduction",
}

GEOMETRY_COLUMNS = {
    "layers": "layers",
    "num_attention_heads": "H",
    "num_rope_heads": "G",
    "kv_lora_rank": "d_c",
    "latent_bits": "bits",
    "qk_rope_head_dim": "d_r",
    "rotary_keys": "rotary keys",
    "qk_nope_head_dim": "d_n",
    "num_up_projection_heads": "up-projections",
    "bytes_per_token_and_layer": "bytes per token",
    "decode_on_cuda": "decode on CUDA",
    "no_kernel_because": "no kernel because",
}
LOSS_COLUMNS = {
    "text": "text",
    "length": "window",
    "tokens": "tokens",
    "perplexity_source": "perplexity source",
    "perplexity_converted": "converted",
    "perplexity_ratio": "ratio",
    "kl": "KL (nats)",
    "top1_agreement": "top-1 agreement",
    "logits_relative_error": "logits' error",
}


@dataclass(frozen=True, repr=False)
class Inspection:
    """A converted checkpoint as rows and values of JSON.

    Attributes:
        summary: source, layers, bytes per token, parameters and bytes of weights, schema, healing if any, recipe.
        geometries: one row per run of layers with the same geometry, and what serves it on CUDA (a Hopper where this
            machine has no GPU).
        cache: a row per batch and length: ``source_cache_bytes``, ``cache_bytes`` (all sequences, all layers), the same
            in MiB, and the reduction.
        measured: a row per text that the conversion compared with its source: windows, perplexities and the like; empty
            without a record, as the two that follow.
        run: calibration, seconds, memory and environment of the conversion.
        layers: a row per layer, errors and seconds.
    """

    summary: dict[str, Any]
    geometries: list[dict[str, Any]]
    cache: list[dict[str, Any]]
    measured: list[dict[str, Any]]
    run: dict[str, Any]
    layers: list[dict[str, Any]]

    def __str__(self) -> str:
        left_out = ("recipe.", "bytes of weights")
        shown = {name: value for name, value in self.summary.items() if not name.startswith(left_out)}
        served = ((f"layers {row['layers']}", f"decode on CUDA {row['decode_on_cuda']}") for row in self.geometries)
        healed = " before healing" if "healed" in shown else ""
        lost = (
            (f"{row['text']}, {row['length']}", f"{row['perplexity_ratio']:.4f} x{healed}") for row in self.measured
        )
        return "\n".join(f"{name}: {format_value(value)}" for name, value in (*shown.items(), *served, *lost))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(
            html_table(rows, columns, title=title)
            for rows, columns, title in (
                (self.geometries, GEOMETRY_COLUMNS, str(self.summary["source"])),
                (self.cache, CACHE_COLUMNS, "cache, all layers"),
                (self.measured, LOSS_COLUMNS, "measured by the conversion"),
            )
            if rows
        )


def inspect_checkpoint(
    checkpoint: str | os.PathLike[str],
    dtype: str | torch.dtype = torch.bfloat16,
    *,
    batches: Sequence[int] = (1,),
    lengths: Sequence[int] | None = None,
) -> Inspection:
    """Geometry, recipe, cache bytes and measured losses of a converted checkpoint. Of weights, headers alone are read.

    Args:
        checkpoint: folder or hub id.
        dtype: of cache and model: what the cache bytes are counted for, and what kernels are asked for.
        batches: sequences that are cached together.
        lengths: cached tokens of each; default 4096 and as many as the model takes.

    Raises:
        CheckpointError: a file is damaged, or a tensor missing, unknown, of another shape or dtype; naming it.
        ValueError: the checkpoint is not a converted one, a batch or length is less than 1, or ``dtype`` is none of
            weights.
        FileNotFoundError: no such folder.
    """
    dtype, folder = named_dtype(dtype), find_checkpoint(checkpoint, "checkpoint")
    config = load_config(folder, "checkpoint")
    check_converted(config.model_type, "checkpoint")
    with damage_named(f"checkpoint {folder!r} makes no model"):
        stored = _stored_bytes(config, folder)
        before_parameters, parameters = num_parameters(config.build_source_config()), num_parameters(config)
    if lengths is None:
        lengths = sorted({4096, config.max_position_embeddings or 4096})
    for name, values in (("batches", batches), ("lengths", lengths)):
        check_numbers(values, name, 1)
    itemsize = dtype.itemsize
    before, after = config.source_cache_bytes_per_token(itemsize), config.cache_bytes_per_token(itemsize)
    with damage_named(f"{RECORD_FILE} of {folder!r} is no record of a conversion"):
        record = _record(folder)
        measured, run, layers = measured_rows(record), _run(record), [dict(row) for row in record.get("rows", [])]
        healed = {"healed": _healing(record["healing"])} if "healing" in record else {}
        against = "the conversion before its change of layout, not the source"
        moved = {"losses relative to": against} if record.get("model_type") == config.model_type else {}
    summary = {
        "source": record.get("source_name") or config.source_config.get("_name_or_path") or None,
        "source model_type": config.source_config.get("model_type"),
        "layers": config.num_hidden_layers,
        "cache bytes per token": after,
        "cache bytes per token of the source": before,
        "reduction": f"{1 - after / before:.1%}",
        "cache ratio": _cache_ratio(config),
        "parameters": parameters,
        "parameters of the source": before_parameters,
        "growth": f"{parameters / before_parameters - 1:+.1%}",
        f"bytes of weights in {str(dtype).removeprefix('torch.')}": parameters * itemsize,
        f"bytes of weights of the source in {str(dtype).removeprefix('torch.')}": before_parameters * itemsize,
        "bytes of weights, as stored": stored,
        "calibrated length": _calibrated_length(config, record),
        "schema version": config.schema_version,
        **moved,
        **healed,
        **flat({"recipe": config.recipe or {}}),
    }
    return Inspection(
        summary=summary,
        geometries=_geometries(config, dtype),
        cache=[_cache_row(config, itemsize, batch, length) for batch in batches for length in lengths],
        measured=measured,
        run=run,
        layers=layers,
    )


def verify_weights(checkpoint: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Compares the digests of a converted folder's weights and code with the record of its conversion.

    Returns:
        A row per file: ``file``, ``bytes``, ``sha256``.

    Raises:
        CheckpointError: a file differs from what was written, has no digest, or is missing; naming it.
    """
    folder = Path(find_converted(checkpoint, "checkpoint"))
    reader, record = open_converted(folder).reader, _record(str(folder))
    recorded = record.get("weights_sha256")
    if not isinstance(recorded, dict):
        raise CheckpointError(
            f"{folder / RECORD_FILE} has no weights_sha256; expected a digest of every file of weights"
        )
    files = reader.files()
    if missing := sorted(recorded.keys() ^ set(files)):
        raise CheckpointError(
            f"{missing[0]} is in one of {folder} and weights_sha256 of its {RECORD_FILE}; expected both"
        )
    code = record.get("code_sha256") or {}
    files += [name for name in CODE_FILES if name in code or os.path.lexists(folder / name)]
    found = {name: each.sha256 for name, each in identify(folder, files).items()}
    recorded = {**dict.fromkeys(files), **recorded, **code}
    for name in files:
        if found[name] != recorded[name]:
            raise CheckpointError(
                f"{folder / name} has SHA-256 {found[name]}, and had {recorded[name]!r:.80} when it was written"
            )
    return [{"file": name, "bytes": (folder / name).stat().st_size, "sha256": found[name]} for name in files]


def _stored_bytes(config: MHA2MLAConfig, folder: str) -> int | None:
    """Bytes of a folder's tensors, whose headers are checked against the config; None for a hub id."""
    if not Path(folder).is_dir() or config.to_dict().get("quantization_config"):
        return None
    opened = open_converted(Path(folder))
    opened.model(torch.device("cpu"), torch.float32)
    return sum(header.nbytes for header in opened.reader.headers().values())


def _calibrated_length(config: MHA2MLAConfig, record: dict[str, Any]) -> str:
    if config.calibrated_length is not None:
        return f"up to {config.calibrated_length} tokens"
    # Checkpoints of earlier versions have no such key, which is not the same as no bound.
    return "any that the source takes" if "calibrated_length" in record else "not recorded"


def _cache_ratio(config: MHA2MLAConfig) -> str:
    """Bytes cached per token relative to the source's 16-bit KV cache, also with rotary keys kept."""
    layers = [config.layer_geometry(index) for index in range(config.num_hidden_layers)]
    before = 2 * sum(layer.source_cache_numel_per_token for layer in layers)
    alone = f"{sum(layer.cache_bytes_per_token(2) for layer in layers) / before:.4g}"
    return ", ".join(filter(None, (alone, kept_keys_share(layers, before))))


def _healing(record: Mapping[str, Any]) -> str:
    """Training after the conversion, whose own figures are in ``measured``."""
    ratios = [f"{row['ratio_after']:.4f} on {row['text']}, {row['length']}" for row in record["rows"]]
    what, trained = record["settings"]["train"], record["trained"]
    return f"{what} on {trained['tokens']:,} tokens; perplexity ratio {'; '.join(ratios)}"


def _geometries(config: MHA2MLAConfig, dtype: torch.dtype) -> list[dict[str, Any]]:
    serving = what_serves(config, "cuda", dtype)
    rows: list[dict[str, Any]] = []
    for geometry, alike in groupby(range(config.num_hidden_layers), config.layer_geometry):
        index, *others = alike
        cached = config.cached_geometry(index)
        kept = f"kept beside the latent{' in 8 bits, which changes predictions' * cached.has_key_codes}"
        keys = (kept if cached.has_rope_cache else "from the latent", "cached")
        rows.append(
            {
                "layers": f"{index}–{others[-1]}" if others else str(index),
                **geometry.to_dict(),
                "rotary_keys": keys[geometry.has_rope_cache],
                "bytes_per_token_and_layer": cached.cache_bytes_per_token(dtype.itemsize),
                "decode_on_cuda": str(serving[index]),
                "no_kernel_because": serving[index].why or None,
            }
        )
    return rows


def _cache_row(config: MHA2MLAConfig, itemsize: int, batch: int, length: int) -> dict[str, Any]:
    source, converted = (batch * cache_bytes(each, length, itemsize) for each in (config.build_source_config(), config))
    return {
        "batch": batch,
        "length": length,
        "source_cache_bytes": source,
        "cache_bytes": converted,
        "source_mib": source / 2**20,
        "converted_mib": converted / 2**20,
        "reduction": f"{1 - converted / source:.1%}",
    }


def _record(checkpoint: str) -> dict[str, Any]:
    """conversion.json of a folder or hub id; empty when there is none."""
    path: str | Path | None = Path(checkpoint) / RECORD_FILE
    if not Path(checkpoint).is_dir():
        path = cached_file(checkpoint, RECORD_FILE, _raise_exceptions_for_missing_entries=False)
    if path is None or not Path(path).is_file():
        return {}
    return read_json(Path(path).parent, RECORD_FILE)


def measured_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row of :data:`LOSS_COLUMNS` per text in ``conversion.json``, or in ``ConversionReport.to_dict()``.

    Raises:
        KeyError, TypeError, ValueError: it is no such record.
    """
    rows = []
    for kind in ("", "long_"):
        if lost := record.get(f"{kind}parity"):
            where = {"text": record[f"{kind}evaluation_text"], "length": record[f"{kind}evaluation_length"]}
            numbers = {key: float(lost[key]) for key in LOSS_COLUMNS if key not in (*where, "tokens")}
            rows.append(where | lost | numbers)
    return rows


def _run(record: dict[str, Any]) -> dict[str, Any]:
    if not record:
        return {}
    own = ("calibration_tokens", "compute_dtype", "weights_dtype", "device", "seconds", "peak_rss_bytes")
    return {
        **flat({key: record[key] for key in own}),
        "mha2mla": record["mha2mla_version"],
        **{name: record["environment"][name] for name in ("torch", "transformers", "gpu", "commit", "date")},
    }
