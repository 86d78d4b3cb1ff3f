"""Converted checkpoints for programs that do not have this package: DeepSeek-V3's classes, or a file of remote code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from mha2mla.checkpoints import CONFIG_FILE, NamedError, find_converted, read_json
from mha2mla.conversion.result.card import RECORD_FILE
from mha2mla.conversion.result.destination import check_destination, temporary_folder
from mha2mla.conversion.result.writer import ShardedWriter
from mha2mla.conversion.source.checkpoint import INDEX_FILE, CheckpointReader
from mha2mla.conversion.source.files import copy_files
from mha2mla.conversion.source.opening import open_converted
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.serving import deepseek, remote_model
from mha2mla.stored_tensors import check_frequencies

FORMATS = ("deepseek-v3", "remote-code")
CODE_FILE = "modeling_mha2mla.py"


def export(folder: str | os.PathLike[str], destination: str | os.PathLike[str], format: str) -> Path:
    """Writes a converted checkpoint in another format; the result appears whole or not at all.

    Args:
        folder: of a converted checkpoint; never written to.
        destination: folder to make.
        format: "deepseek-v3", for transformers' own classes, where the logits are the same; or "remote-code": the same
            weights beside one file of code, for ``from_pretrained(…, trust_remote_code=True)``.

    Returns:
        ``destination``.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: there is no such format; the checkpoint was not converted, or cannot be expressed in it, with every
            reason; or the destination exists.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; expected one of {FORMATS}")
    source, destination = Path(find_converted(folder, "checkpoint")), Path(destination).expanduser()
    check_destination(destination, source, overwrite=False)
    opened = open_converted(source)
    config, reader = opened.config, opened.reader
    opened.model(torch.device("cpu"), torch.float32)
    if config.attention_window is not None:
        raise ValueError(
            f"attention_window is {config.attention_window}; expected None: neither format has a window of the user's"
        )
    frequencies = _frequencies(config, reader) if format == "deepseek-v3" else None
    with temporary_folder(destination, overwrite=False) as work:
        opened.check_weights()
        copy_files(source, opened.companions, work)
        if frequencies is None:
            _write_remote_code(source, work, reader)
        else:
            _write_deepseek(config, frequencies, reader, work)
    return destination


def _write_remote_code(source: Path, work: Path, reader: CheckpointReader) -> None:
    values = read_json(source, CONFIG_FILE)
    module = Path(CODE_FILE).stem
    values["auto_map"] = {
        "AutoConfig": f"{module}.MHA2MLAConfig",
        "AutoModelForCausalLM": f"{module}.MHA2MLAForCausalLM",
    }
    _write_json(work / CONFIG_FILE, values)
    shutil.copyfile(remote_model.__file__, work / CODE_FILE)
    # The record has the digests of the weights, which are copied as they are.
    others = [name for name in (INDEX_FILE, RECORD_FILE) if (source / name).is_file()]
    copy_files(source, [*reader.files(), *others], work)


def _frequencies(config: MHA2MLAConfig, reader: CheckpointReader) -> deepseek.Frequencies:
    reasons = deepseek.refusals(config)
    if not reasons:
        try:
            rope = config.source_config.get("rope_parameters") or config.source_config
            theta = float(rope.get("rope_theta") or 10000.0)
            names = [_attention(index) + "inv_freq" for index in range(config.num_hidden_layers)]
            tables = [reader.tensor(name) for name in names]
            for name, table in zip(names, tables, strict=True):
                check_frequencies(name, table)
            return deepseek.place_frequencies(tables, theta, config.head_dim)
        except NamedError:
            raise
        except ValueError as error:
            reasons = [str(error)]
    raise ValueError(f"DeepSeek-V3's classes cannot express this checkpoint: {'; '.join(reasons)}")


def _write_deepseek(
    config: MHA2MLAConfig, frequencies: deepseek.Frequencies, reader: CheckpointReader, work: Path
) -> None:
    values = deepseek.deepseek_config(config, frequencies)
    _write_json(work / "config.json", values)
    writer = ShardedWriter(work)
    for name in sorted(reader.names()):
        if ".self_attn." not in name:
            writer.add(name, reader.tensor(name))
    embeddings = reader.tensor("model.embed_tokens.weight")
    if "lm_head.weight" not in reader.names():
        writer.add("lm_head.weight", embeddings)
    for index in range(config.num_hidden_layers):
        prefix = _attention(index)
        tensors = deepseek.layer_tensors(config, index, frequencies, lambda name, at=prefix: reader.tensor(at + name))
        for name, tensor in tensors:
            writer.add(prefix + name, tensor)
    writer.add(deepseek.GUARD, torch.ones(1, dtype=embeddings.dtype))
    writer.finish()


def _attention(layer: int) -> str:
    return f"model.layers.{layer}.self_attn."


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
