"""Third stage: layers, converted one by one and kept until all are there; then the files of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mha2mla.conversion.result.writer import ShardedWriter
from mha2mla.conversion.resume import FinishedLayers
from mha2mla.conversion.source.files import copy_files
from mha2mla.conversion.source.opening import OpenedFolder
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.pipeline.check import Arguments
from mha2mla.pipeline.prepare import Prepared
from mha2mla.terminal import progress_bar

if TYPE_CHECKING:
    from mha2mla.modeling.config import MHA2MLAConfig


def convert_layers(prepared: Prepared, layers: FinishedLayers) -> None:
    """Converts the layers that are not in ``layers`` and puts them there, one by one."""
    plan, arguments = prepared.plan, prepared.plan.arguments
    count, done = plan.spec.num_layers, len(layers)
    if done:
        kept = layers.work.folder
        arguments.say(f"going on after {done} of {count} layers that an interrupted conversion left in {kept}")
    walk = replace(prepared.walk, done=layers)
    with progress_bar(desc="convert", unit="layer", total=count, initial=done, show=arguments.progress) as bar:
        for converted in walk if done < count else ():
            layers.add(converted.layer, converted.tensors, converted.record())
            if converted.fallback:
                arguments.say(f"layer {converted.layer}: {converted.fallback}")
            shown = {"s": f"{converted.seconds:.1f}"}
            if converted.loss_after is not None:
                shown["loss"] = f"{converted.loss_before:.3g} -> {converted.loss_after:.3g}"
            bar.set_postfix(shown, refresh=False)
            bar.update()
    plan.opened.reader.release()


def write_weights(
    arguments: Arguments,
    model: StreamedModel,
    folder: Path,
    attention: Callable[[int], Mapping[str, torch.Tensor]],
    replaced: Collection[str],
) -> ShardedWriter:
    """Streams every tensor of a source to ``folder``, those of attention replaced, all others copied.

    Args:
        model: the source.
        attention: layer → the tensors that its attention gets, by their names there.
        replaced: names of the source's own, which are not copied.

    Returns:
        What wrote them, which knows bytes and digests.
    """
    reader, dtype = model.source, arguments.dtype
    writer = ShardedWriter(folder, max_shard_bytes=arguments.max_shard_bytes)
    copied = sorted(model.expected_names() - set(replaced))

    def copy(names: Iterable[str]) -> None:
        for name in names:
            tensor = reader.tensor(name)
            writer.add(name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor)

    copy(name for name in copied if not name.startswith("model.layers."))
    for layer in progress_bar(range(model.num_layers), desc="write", unit="layer", show=arguments.progress):
        prefix = f"model.layers.{layer}."
        copy(name for name in copied if name.startswith(prefix))
        for name, tensor in attention(layer).items():
            writer.add(f"{prefix}self_attn.{name}", tensor)
        reader.release()
    writer.finish()
    return writer


def write_config(arguments: Arguments, opened: OpenedFolder, config: MHA2MLAConfig, folder: Path) -> None:
    """config.json, and everything that the source carries beside its weights."""
    from mha2mla.modeling import MHA2MLAForCausalLM

    copy_files(opened.folder, opened.companions, folder)
    name = Path(config.source_config.get("_name_or_path") or "")
    config.source_config = {**config.source_config, "_name_or_path": name.name if name.is_absolute() else str(name)}
    config.dtype = arguments.written_dtype(opened)
    config.architectures = [MHA2MLAForCausalLM.__name__]
    config.save_pretrained(folder)
