"""Third stage: layers, converted one by one and kept until all are there; then the files of the checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from mha2mla.conversion.layer_walk import LayerRecord, LayerWalk
from mha2mla.conversion.result.writer import ShardedWriter
from mha2mla.conversion.resume import FinishedLayers, WorkFolder
from mha2mla.conversion.source.checkpoint import CheckpointReader
from mha2mla.conversion.source.files import regular_file
from mha2mla.conversion.source.opening import OpenedFolder
from mha2mla.pipeline.check import Plan
from mha2mla.pipeline.prepare import Prepared, layer_inputs

if TYPE_CHECKING:
    from mha2mla.modeling.config import MHA2MLAConfig


def finished_layers(prepared: Prepared, work: WorkFolder) -> FinishedLayers:
    """The layers of this conversion that ``work`` has."""
    return FinishedLayers(work, layer_inputs(prepared))


def convert_layers(prepared: Prepared, folder: Path, layers: FinishedLayers) -> None:
    """Converts the layers that are not in ``layers`` and puts them there, one by one."""
    plan, arguments = prepared.plan, prepared.plan.arguments
    count, done = plan.spec.num_layers, len(layers)
    if done:
        kept = layers.work.folder
        arguments.say(f"going on after {done} of {count} layers that an interrupted conversion left in {kept}")
    walk = LayerWalk(
        plan.model,
        plan.opened.adapter,
        plan.spec,
        prepared.geometries,
        plan.recipe,
        prepared.calibration,
        folder,
        weights_dtype=arguments.dtype,
        spill_bytes=arguments.spill_bytes,
        done=layers,
    )
    with tqdm(desc="convert", unit="layer", total=count, initial=done, disable=not arguments.progress) as bar:
        for converted in walk if done < count else ():
            record = {name: value for name, value in asdict(converted.record).items() if name != "layer"}
            layers.add(converted.layer, converted.tensors, record)
            bar.set_postfix({"s": f"{converted.record.seconds:.1f}"} | _losses(converted.record), refresh=False)
            bar.update()
    plan.opened.reader.release()


def _losses(record: LayerRecord) -> dict[str, str]:
    if record.loss_after is None:
        return {}
    return {"loss": f"{record.loss_before:.3g} -> {record.loss_after:.3g}"}


def write_weights(plan: Plan, folder: Path, layers: FinishedLayers) -> int:
    """Streams every tensor to ``folder``: attention converted, all others copied. Returns their bytes."""
    adapter, reader = plan.opened.adapter, plan.opened.reader
    writer = ShardedWriter(folder, max_shard_bytes=plan.arguments.max_shard_bytes)
    attention: set[str] = set()
    for layer in range(plan.spec.num_layers):
        attention |= set(adapter.attention_names(plan.spec, layer).values())
    copied = sorted(plan.model.expected_names() - attention)
    dtype = plan.arguments.dtype
    for name in copied:
        if not name.startswith("model.layers."):
            copy_tensor(reader, writer, name, dtype)
    for layer in range(plan.spec.num_layers):
        prefix = adapter.layer_prefix(layer)
        for name in copied:
            if name.startswith(prefix):
                copy_tensor(reader, writer, name, dtype)
        for name, tensor in layers[layer].items():
            writer.add(f"{prefix}self_attn.{name}", tensor)
        reader.release()
    writer.finish()
    return writer.total_bytes


def copy_tensor(reader: CheckpointReader, writer: ShardedWriter, name: str, dtype: torch.dtype | None) -> None:
    """A tensor of the source as it is, or in another floating-point ``dtype``."""
    tensor = reader.tensor(name)
    writer.add(name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor)


def write_companions(prepared: Prepared, folder: Path) -> None:
    """config.json, and everything that the source carries beside its weights."""
    config = prepared.config()
    config.recipe = prepared.plan.recipe.to_dict()
    config.calibrated_length = prepared.calibrated_length
    write_config(prepared.plan.opened, config, prepared.plan.stored_dtype, folder)


def write_config(opened: OpenedFolder, config: MHA2MLAConfig, dtype: torch.dtype, folder: Path) -> None:
    """config.json of weights of ``dtype``, and everything that the source carries beside its own."""
    from mha2mla.modeling import MHA2MLAForCausalLM

    for name in opened.companions:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(regular_file(opened.folder, name), folder / name)
    config.dtype = dtype
    config.architectures = [MHA2MLAForCausalLM.__name__]
    config.save_pretrained(folder)
