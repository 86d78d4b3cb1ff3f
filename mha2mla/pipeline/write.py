"""Third stage: layers, converted one by one and kept until all are there; then, in the basis that latents are quantised
in, the files of the checkpoint."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mha2mla.checkpoints import CheckpointError, read_json
from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.fit.repeatable import REPEATABLE_ATTENTION
from mha2mla.conversion.latent.basis import LatentStatistics, latent_statistics
from mha2mla.conversion.result.writer import ShardedWriter
from mha2mla.conversion.resume import FinishedLayers
from mha2mla.conversion.source.files import copy_files
from mha2mla.conversion.source.opening import TOKENIZER_CONFIG, OpenedFolder, read_tokenizer
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.pipeline.check import Arguments
from mha2mla.pipeline.prepare import Prepared
from mha2mla.terminal import Span, progress_bar

if TYPE_CHECKING:
    from mha2mla.modeling.config import MHA2MLAConfig

# Words, digits, contractions, code and scripts: classes of tokenizers differ in how they split these.
_SAMPLE = "It's 1234 or 5.6e7;\n\n    if x_1 >= 2:\treturn 'naïve café'  # don't\r\n日本語 Привет 🙂 www.A-B.com "
BASIS_LENGTH, BASIS_TOKENS = 1024, 8192  # most of a calibration window, and of all, that a basis is computed from


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


def in_quantised_basis(
    prepared: Prepared, layers: FinishedLayers, config: MHA2MLAConfig, replaced: Collection[str]
) -> Callable[[int], Mapping[str, torch.Tensor]]:
    """Layer → its tensors: those of ``layers``, in the recipe's basis where latents are cached as codes.

    Args:
        config: of the result.
        replaced: names of the source's tensors that ``layers`` stand for.
    """
    plan, latent = prepared.plan, prepared.plan.recipe.latent
    if latent.bits == 16:
        return layers.__getitem__
    reader = plan.model.source
    tensors = {name: reader.tensor(name) for name in plan.model.expected_names() - set(replaced)}
    for layer in layers:
        tensors |= {f"model.layers.{layer}.self_attn.{name}": each for name, each in layers[layer].items()}
    statistics = statistics_of(config, tensors, prepared.walk.windows, plan.model.device)
    reader.release()
    bases = [plan.recipe.basis_rule.basis(layer, latent.group) for layer in statistics]
    return lambda layer: bases[layer].fold(layers[layer])


def statistics_of(
    config: MHA2MLAConfig, tensors: Mapping[str, torch.Tensor], windows: TokenBlocks, device: torch.device
) -> list[LatentStatistics]:
    """Statistics of every layer's latent, of the whole model in float32 over windows of at most :data:`BASIS_LENGTH`.

    Args:
        tensors: of the model, by their names in its checkpoint.
        windows: calibration text.
    """
    from mha2mla.modeling import MHA2MLAForCausalLM

    config = copy.deepcopy(config)
    config.latent_bits = 16
    model = MHA2MLAForCausalLM.from_pretrained(
        None, config=config, state_dict=dict(tensors), dtype=torch.float32, attn_implementation=REPEATABLE_ATTENTION
    )
    lengths = windows.window_lengths
    length = max((each for each in lengths if each <= BASIS_LENGTH), default=min(lengths))
    read = windows.tokens[list(windows.of_length(length))].view(-1, length)[:, :BASIS_LENGTH]
    model = model.to(device).eval().requires_grad_(False)
    return latent_statistics(model, read[: max(1, BASIS_TOKENS // read.shape[1])])


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
    """config.json, and everything that the source carries beside its weights.

    Raises:
        CheckpointError: the written tokenizer would not be the source's.
    """
    from mha2mla.modeling import MHA2MLAForCausalLM

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
