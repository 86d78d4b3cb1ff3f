"""Converted checkpoints for programs without this package: DeepSeek-V3's classes, or the folder's own code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from mha2mla.checkpoints import CONFIG_FILE, find_converted, read_json
from mha2mla.conversion.card import CARD_FILE, PLOT_FILE, RECORD_FILE
from mha2mla.conversion.destination import ShardedWriter, check_destination, temporary_folder
from mha2mla.conversion.source.files import INDEX_FILE, CheckpointReader, copy_files, identify
from mha2mla.conversion.source.opening import OpenedFolder, open_converted
from mha2mla.modeling.config import AUTO_MAP, CODE_FILES, copy_code
from mha2mla.modeling.stored_tensors import check_frequencies
from mha2mla.serving import deepseek

FORMATS = ("deepseek-v3", "remote-code")
_DEEPSEEK_CARD = """
## This export

Written by `mha2mla export --format deepseek-v3 --engine {engine}` for the `DeepseekV3ForCausalLM` of {engine}, which
loads this folder without the package and without code of its own. {others}. The numbers above were measured before the
export.
"""
_SCALED_CARD = """
The rows of `kv_a_proj_with_mqa` that make the latent are scaled by a power of two. **Do not run this folder in
float16**, which flushes them to zero, **and do not quantise it** (weights, or activations behind that product): a scale
that latent and rotary rows share flushes the latent to zero. Use bfloat16 or float32.

The engine rotates by 32 fixed frequencies, each once. Freely chosen rotary pairs lose less: SmolLM2-135M with d_c 256
and d_r 64 had 1.081 times its source's perplexity with `rorope`, 1.023 with free pairs, in windows of 512 tokens
(docs/serving.md).
"""


def export(
    folder: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    format: str,
    engine: deepseek.Engine | None = None,
) -> Path:
    """Writes a converted checkpoint in another format; the result appears whole or not at all.

    Args:
        folder: of a converted checkpoint; never written to.
        format: "deepseek-v3", for DeepSeek-V3's classes, where the logits are the same; or "remote-code": the same
            weights beside this version's code, for ``from_pretrained(…, trust_remote_code=True)``, where codes run as
            16 bits.
        engine: whose DeepSeek-V3 classes, with format "deepseek-v3" alone: "transformers" (None), "vllm" or "sglang".

    Returns:
        ``destination``.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: there is no such format or engine; the checkpoint was not converted, or cannot be expressed in it,
            with every reason; the destination exists; or an interrupted ``convert`` or ``heal`` left files for it.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; expected one of {FORMATS}")
    if engine is not None and format != "deepseek-v3":
        raise ValueError(f"engine is {engine!r} with format {format!r}; expected an engine with 'deepseek-v3' alone")
    engine = engine or "transformers"
    if engine not in deepseek.ENGINES:
        raise ValueError(f"engine is {engine!r}; expected one of {deepseek.ENGINES}")
    source, destination = Path(find_converted(folder, "checkpoint")), Path(destination).expanduser()
    check_destination(destination, source, overwrite=None)
    opened = open_converted(source)
    opened.model(torch.device("cpu"), torch.float32)
    frequencies = _frequencies(opened, engine) if format == "deepseek-v3" else None
    with temporary_folder(destination, overwrite=None) as work:
        opened.check_weights()
        copy_files(source, opened.companions, work)
        if frequencies is None:
            _write_remote_code(source, work, opened.reader)
        else:
            _write_deepseek(opened, frequencies, engine, work)
        _copy_card_and_record(source, work, format, engine)
    return destination


def _write_remote_code(source: Path, work: Path, reader: CheckpointReader) -> None:
    _write_json(work / CONFIG_FILE, {**read_json(source, CONFIG_FILE), "auto_map": AUTO_MAP})
    copy_code(work)
    index = [INDEX_FILE] if (source / INDEX_FILE).is_file() else []
    copy_files(source, [*reader.files(), *index], work)


def _copy_card_and_record(source: Path, work: Path, format: str, engine: deepseek.Engine) -> None:
    """The model card with its plot, and conversion.json with the digests of the weights and code of the export."""
    copy_files(source, [name for name in (CARD_FILE, PLOT_FILE) if (source / name).is_file()], work)
    if format == "deepseek-v3" and (work / CARD_FILE).is_file():
        with open(work / CARD_FILE, "a", encoding="utf-8") as card:
            is_scaled = engine != "transformers"
            others = "transformers refuses it" if is_scaled else "vLLM and SGLang refuse it"
            card.write(_DEEPSEEK_CARD.format(engine=engine, others=others) + _SCALED_CARD * is_scaled)
    if (source / RECORD_FILE).is_file():
        weights = identify(work, CheckpointReader(work).files())
        code = identify(work, [name for name in CODE_FILES if (work / name).is_file()])
        digests = {
            f"{kind}_sha256": {name: each.sha256 for name, each in files.items()}
            for kind, files in (("weights", weights), ("code", code))
        }
        exported = {"exported_as": format} | ({"exported_for": engine} if format == "deepseek-v3" else {})
        _write_json(work / RECORD_FILE, {**read_json(source, RECORD_FILE), **digests, **exported})


def _frequencies(opened: OpenedFolder, engine: deepseek.Engine) -> deepseek.Frequencies:
    config, reader = opened.config, opened.reader
    reasons = deepseek.refusals(config, engine, opened.dtype)
    layers = range(config.num_hidden_layers)
    if config.has_rope_cache and all(config.layer_geometry(index).num_rope_heads == 1 for index in layers):
        rope = config.source_config.get("rope_parameters") or config.source_config
        theta = float(rope.get("rope_theta") or 10000.0)
        names = [f"model.layers.{index}.self_attn.inv_freq" for index in layers]
        tables = [reader.tensor(name) for name in names]
        for name, table in zip(names, tables, strict=True):
            check_frequencies(name, table)
        try:
            frequencies = deepseek.place_frequencies(tables, theta, config.head_dim, engine)
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        raise ValueError(f"DeepSeek-V3's classes cannot express this checkpoint: {'; '.join(reasons)}")
    return frequencies


def _write_deepseek(
    opened: OpenedFolder, frequencies: deepseek.Frequencies, engine: deepseek.Engine, work: Path
) -> None:
    config, reader = opened.config, opened.reader
    values = deepseek.deepseek_config(config, frequencies, engine, opened.dtype)
    _write_json(work / "config.json", values)
    writer = ShardedWriter(work)
    for name in sorted(reader.names()):
        if ".self_attn." not in name:
            writer.add(name, reader.tensor(name))
    embeddings = reader.tensor("model.embed_tokens.weight")
    if "lm_head.weight" not in reader.names():
        writer.add("lm_head.weight", embeddings)
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        tensors = deepseek.layer_tensors(
            config, index, frequencies, engine, lambda name, at=prefix: reader.tensor(at + name)
        )
        for name, tensor in tensors:
            writer.add(prefix + name, tensor)
    if engine == "transformers":
        writer.add(deepseek.GUARD, torch.ones(1, dtype=embeddings.dtype))
    writer.finish()


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
