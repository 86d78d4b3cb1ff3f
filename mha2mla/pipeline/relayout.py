"""``convert`` of a checkpoint that this package wrote: the same model in the layout that caches the latent alone."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from mha2mla.checkpoints import read_json
from mha2mla.conversion.families import UnsupportedSourceError
from mha2mla.conversion.layer_walk import stored
from mha2mla.conversion.presets import AUTO
from mha2mla.conversion.recipe import Recipe
from mha2mla.conversion.relayout import latent_config, latent_tensors
from mha2mla.conversion.result.card import RECORD_FILE
from mha2mla.conversion.result.destination import check_destination, temporary_folder
from mha2mla.conversion.result.writer import ShardedWriter
from mha2mla.conversion.source.files import check_unchanged, faults_of_the_source_named
from mha2mla.conversion.source.opening import OpenedFolder, open_converted
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.environment import compute_device
from mha2mla.pipeline.check import Arguments, HeldOut
from mha2mla.pipeline.report import ConversionReport, make_report, serving_on_cuda, write_report
from mha2mla.pipeline.verify import verify
from mha2mla.pipeline.write import write_config, write_weights

EVALUATION_LENGTH = 512
MADE = "moved, exactly, into the layout that caches the latent alone"


def change_layout(arguments: Arguments, folder: Path, started: float) -> ConversionReport:
    """Streams a converted checkpoint in ``folder`` into ``{"layout": "latent"}``.

    There is nothing to go on from after an interrupt, which leaves nothing: a layer takes as long as its bytes.

    Raises:
        ValueError: the recipe asks for anything else, by name: what was lost once is not to be lost again.
        UnsupportedSourceError: nothing rotary is cached as it is.
        CheckpointError, SourceChangedError, DestinationError, ParityError: as ``convert``.
    """
    _check_recipe(arguments)
    device = compute_device(arguments.device)
    check_destination(arguments.destination, folder, overwrite=arguments.overwrite)
    opened = open_converted(folder)
    if not opened.config.has_rope_cache:
        raise UnsupportedSourceError(f"source {str(folder)!r} is in the layout 'latent' already; nothing is to be done")
    model = opened.model(device, arguments.compute_dtype)
    before, config = opened.config, latent_config(opened.config)
    config.recipe = {**(before.recipe or {}), "layout_changed_to": "latent"}
    serving = serving_on_cuda(config, arguments.written_dtype(opened), device)
    length = min(EVALUATION_LENGTH, before.max_position_embeddings or EVALUATION_LENGTH, arguments.evaluation_tokens)
    held_out = [HeldOut.of(opened, arguments.evaluation, length, arguments.evaluation_tokens)]
    with temporary_folder(Path(arguments.destination), overwrite=arguments.overwrite) as made:
        opened.check_weights(progress=arguments.progress)
        weights, others = opened.identity()
        files = {**weights, **others}
        with faults_of_the_source_named(folder, files):
            written = _write(arguments, opened, model, made)
            write_config(arguments, opened, config, made)
            check_unchanged(folder, files)
            parities = verify(arguments, opened, model, made, held_out, exact="the layout 'latent'")
            record = read_json(folder, RECORD_FILE) if (folder / RECORD_FILE).is_file() else {}
            report = make_report(
                *(arguments, opened, model, config, serving, held_out, parities, written),
                geometry=serving[0].geometry,
                source_cache_numel_per_token=sum(
                    before.layer_geometry(index).cache_numel_per_token for index in range(len(serving))
                ),
                preset="none: no number was changed by more than its place",
                better="nothing: no number was lost",
                seconds={"total": time.perf_counter() - started},
                source_sha256=record.get("source_sha256", {}),  # the unconverted source
            )
            write_report(arguments, device, made, report, MADE)
    return report


def _check_recipe(arguments: Arguments) -> None:
    """Refuses whatever is not the change of layout."""
    recipe = arguments.recipe
    why = (
        f"source {str(arguments.source)!r} is a checkpoint of this package, which is changed without loss or not at all"
    )
    if isinstance(recipe, Recipe):
        raise ValueError(f"recipe is a {type(recipe).__name__}; expected the mapping {{'layout': 'latent'}}: {why}")
    if recipe["preset"] != AUTO:
        raise ValueError(f"preset is {recipe['preset']!r}; expected none: {why}")
    if recipe.get("layout") != "latent":
        raise ValueError(f"layout is {recipe.get('layout')!r}; expected 'latent': {why}")
    if others := {key: value for key, value in recipe.items() if key not in ("layout", "preset")}:
        key, value = next(iter(others.items()))
        raise ValueError(f"{key} is {value!r}; expected nothing beside layout='latent': {why}")


def _write(arguments: Arguments, opened: OpenedFolder, model: StreamedModel, folder: Path) -> ShardedWriter:
    """Streams every tensor to ``folder``, those of attention moved, all others copied."""
    names, dtype = {name for name in model.expected_names() if ".self_attn." in name}, arguments.dtype

    def attention(layer: int) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{layer}.self_attn."
        own = {name.removeprefix(prefix): opened.reader.tensor(name) for name in names if name.startswith(prefix)}
        moved = latent_tensors(opened.config.layer_geometry(layer), own)
        return moved if dtype is None else stored(moved, dtype)

    return write_weights(arguments, model, folder, attention, names)
