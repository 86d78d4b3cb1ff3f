"""Third stage: layers, converted one by one and kept until all are there; then the files of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mha2mla.checkpoints import CheckpointError, read_json
from mha2mla.conversion.destination import ShardedWriter
from mha2mla.conversion.resume import FinishedLayers
from mha2mla.conversion.source.files import copy_files
from mha2mla.conversion.source.opening import TOKENIZER_CONFIG, OpenedFolder, read_tokenizer
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.modeling import MHA2MLAConfig, MHA2MLAForCausalLM
from mha2mla.pipeline.check import Arguments
from mha2mla.pipeline.prepare import Prepared
from mha2mla.terminal import Span, progress_bar

# Words, digits, contractions, code and scripts: classes of tokenizers differ in how they split these.
_SAMPLE = "It's 1234 or 5.6e7;\n\n    if x_1 >= 2:\treturn 'naïve café'  # don't\r\n日本語 Привет 🙂 www.A-B.com "


def convert_layers(prepared: Prepared, layers: FinishedLayers, progress: bool | Span) -> None:
    """Converts the layers that are not in ``layers`` and puts them there, one by one."""
    plan, arguments = prepared.plan, prepared.plan.arguments
    count, done = plan.spec.num_layers, len(layers)
    if done:
        kept = layers.work.folder
        arguments.say(f"going on after {done} of {count} layers that an interrupted conversion left in {kept}")
    walk = replace(prepared.walk, done=layers)
    with progress_bar(desc="convert", unit="layer", total=count, initial=done, show=progress) as bar:
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
    """config.json, and everything that the source carries beside its weights.

    Raises:
        CheckpointError: the written tokenizer would not be the source's.
    """
    copy_files(opened.folder, opened.companions, folder)
    name = Path(config.source_config.get("_name_or_path") or "")
    config.source_config = {**config.source_config, "_name_or_path": name.name if name.is_absolute() else str(name)}
    config.dtype = arguments.written_dtype(opened)
    config.architectures = [MHA2MLAForCausalLM.__name__]
    config.save_pretrained(folder)
    try:
        tokenizer = read_tokenizer(str(opened.folder), "source")
    except CheckpointError:  # none: the texts were windows of tokens
        return
    if not _same(tokenizer, folder):  # AutoTokenizer chose its class by the source's model_type
        named = {"tokenizer_class": type(tokenizer).__name__}
        values = read_json(folder, TOKENIZER_CONFIG) if TOKENIZER_CONFIG in opened.companions else {}
        (folder / TOKENIZER_CONFIG).write_text(json.dumps({**values, **named}, indent=2) + "\n", encoding="utf-8")
        if not _same(tokenizer, folder):
            raise CheckpointError(
                f"tokenizer_class of {opened.folder / TOKENIZER_CONFIG} is {values.get('tokenizer_class')!r}, and under"
                f" model_type {opened.config.model_type!r} AutoTokenizer makes a {type(tokenizer).__name__}; expected"
                " a tokenizer that cuts text the same way under model_type 'mha2mla'"
            )


def _same(tokenizer: Any, folder: Path) -> bool:
    """True if the tokenizer written to ``folder`` has the class of ``tokenizer`` and cuts text as it does."""
    try:
        written = read_tokenizer(str(folder), "destination")
    except CheckpointError:
        return False
    return type(written) is type(tokenizer) and written(_SAMPLE).input_ids == tokenizer(_SAMPLE).input_ids
