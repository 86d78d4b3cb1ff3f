"""``convert`` of a checkpoint that this package wrote: the same model in the layout that caches the latent alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mha2mla.conversion.calibration.windows import evaluation_windows
from mha2mla.conversion.families import UnsupportedSourceError
from mha2mla.conversion.parity import ParityReport, compare
from mha2mla.conversion.presets import AUTO
from mha2mla.conversion.recipe import asked_keys
from mha2mla.conversion.relayout import latent_config, latent_tensors
from mha2mla.conversion.result.destination import check_destination, temporary_folder
from mha2mla.conversion.source.checkpoint import CheckpointReader
from mha2mla.conversion.source.files import check_unchanged, faults_of_the_source_named
from mha2mla.conversion.source.opening import ConvertedSource, open_converted
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.environment import compute_device
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.pipeline.check import Arguments
from mha2mla.pipeline.report import (
    ConversionReport,
    serving_on_cuda,
    warn_of_slow_layers,
    write_report,
)
from mha2mla.pipeline.verify import check_exact, parity_tolerance, read_back
from mha2mla.pipeline.write import write_config, write_weights

EVALUATION_LENGTH = 512
MADE = "moved, exactly, into the layout that caches the latent alone"
_FULL = ("inv_freq", "o_proj.bias")  # float32 whatever the other weights are


def change_layout(arguments: Arguments, folder: Path, started: float) -> ConversionReport:
    """What ``convert`` does with a converted checkpoint in ``folder``: streams it into ``{"layout": "latent"}``.

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
    if opened.config.rope_from_latent:
        raise UnsupportedSourceError(f"source {str(folder)!r} is in the layout 'latent' already; nothing is to be done")
    model = opened.model(device, arguments.compute_dtype)
    tokens = _held_out(arguments, opened)
    config, written = latent_config(opened.config), arguments.dtype or _dtype(opened.reader)
    config.recipe = {**(opened.config.recipe or {}), "layout_changed_to": "latent"}
    warn_of_slow_layers(serving_on_cuda(config, written, device))
    with temporary_folder(Path(arguments.destination), overwrite=arguments.overwrite) as made:
        opened.check_weights(progress=arguments.progress)
        weights, others = opened.identity()
        files = {**weights, **others}
        with faults_of_the_source_named(folder, files):
            weight_bytes = _write(arguments, opened, model, made)
            write_config(opened, config, written, made)
            check_unchanged(folder, files)
            parity = _verify(arguments, opened, model, made, tokens)
            seconds = {"total": time.perf_counter() - started}
            report = _report(arguments, opened, config, parity, tokens, weight_bytes, seconds, written, device)
            write_report(arguments, device, made, report, MADE)
            check_unchanged(folder, files)
    return report


def _check_recipe(arguments: Arguments) -> None:
    """Refuses whatever is not the change of layout."""
    recipe = arguments.recipe
    why = (
        f"source {str(arguments.source)!r} is a checkpoint of this package, which is changed without loss or not at all"
    )
    if arguments.preset not in (None, AUTO):
        raise ValueError(f"preset is {arguments.preset!r}; expected none: {why}")
    if recipe is not None and not isinstance(recipe, Mapping):
        raise ValueError(f"recipe is a {type(recipe).__name__}; expected the mapping {{'layout': 'latent'}}: {why}")
    keys = asked_keys(recipe or {})
    if keys.get("preset") == AUTO:
        del keys["preset"]
    if keys.get("layout") != "latent":
        raise ValueError(f"layout is {keys.get('layout')!r}; expected 'latent': {why}")
    if others := {key: value for key, value in keys.items() if key != "layout"}:
        key, value = next(iter(others.items()))
        raise ValueError(f"{key} is {value!r}; expected nothing beside layout='latent': {why}")


def _held_out(arguments: Arguments, opened: ConvertedSource) -> torch.Tensor:
    context = opened.config.max_position_embeddings or EVALUATION_LENGTH
    length = min(EVALUATION_LENGTH, context, arguments.evaluation_tokens)
    return evaluation_windows(opened, arguments.evaluation, length=length, tokens=arguments.evaluation_tokens)


def _dtype(reader: CheckpointReader) -> torch.dtype:
    return reader.tensor("model.layers.0.self_attn.o_proj.weight").dtype


def _write(arguments: Arguments, opened: ConvertedSource, model: StreamedModel, folder: Path) -> int:
    """Streams every tensor to ``folder``, those of attention moved, all others copied. Returns their bytes."""
    names, dtype = {name for name in model.expected_names() if ".self_attn." in name}, arguments.dtype

    def attention(layer: int) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{layer}.self_attn."
        own = {name.removeprefix(prefix): opened.reader.tensor(name) for name in names if name.startswith(prefix)}
        moved = latent_tensors(opened.config.layer_geometry(layer), own)
        return {name: tensor if dtype is None or name in _FULL else tensor.to(dtype) for name, tensor in moved.items()}

    return write_weights(arguments, model, folder, attention, names)


def _verify(
    arguments: Arguments, opened: ConvertedSource, model: StreamedModel, folder: Path, tokens: torch.Tensor
) -> ParityReport:
    """Reads ``folder`` back and compares it with the source."""
    converted = read_back(folder, model)
    parity = compare(
        model, converted, tokens, folder=folder, spill_bytes=arguments.spill_bytes, progress=arguments.progress
    )
    converted.source.release()
    source = _dtype(opened.reader)
    tolerance = parity_tolerance(arguments.compute_dtype, arguments.dtype or source, source)
    check_exact(parity, tolerance, "the layout 'latent'")
    return parity


def _report(
    arguments: Arguments,
    opened: ConvertedSource,
    config: MHA2MLAConfig,
    parity: ParityReport,
    tokens: torch.Tensor,
    weight_bytes: int,
    seconds: dict[str, float],
    written: torch.dtype,
    device: torch.device,
) -> ConversionReport:
    from mha2mla.modeling.served import describe

    layers, evaluation = range(config.num_hidden_layers), arguments.evaluation
    geometries = [config.layer_geometry(index) for index in layers]
    rows: list[dict[str, Any]] = [
        {**vars(row), "kv_lora_rank": geometry.kv_lora_rank}
        for row, geometry in zip(parity.layers, geometries, strict=True)
    ]
    return ConversionReport(
        name=Path(arguments.destination).resolve().name,
        source=str(opened.folder),
        source_name=arguments.source_name(opened.folder),
        destination=str(arguments.destination),
        model_type=opened.config.model_type,
        num_layers=config.num_hidden_layers,
        geometry=geometries[0],
        cache_numel_per_token=sum(each.cache_numel_per_token for each in geometries),
        source_cache_numel_per_token=sum(opened.config.layer_geometry(index).cache_numel_per_token for index in layers),
        recipe=config.recipe,
        preset="none: no number was changed by more than its place",
        better="nothing: no number was lost",
        calibrated_length=config.calibrated_length,
        evaluation_text=evaluation if isinstance(evaluation, str) else "token windows of the caller",
        evaluation_length=tokens.shape[1],
        compute_dtype=str(arguments.compute_dtype).removeprefix("torch."),
        weights_dtype=str(written).removeprefix("torch."),
        device=str(device),
        parity=parity,
        layers=tuple(rows),
        decode_backend=f"on CUDA {describe(serving_on_cuda(config, written, device))}",
        seconds=seconds,
        weight_bytes=weight_bytes,
    )
