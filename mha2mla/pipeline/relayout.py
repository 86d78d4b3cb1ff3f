"""``convert`` of a checkpoint that this package wrote: the same model in the layout that caches the latent alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from mha2mla.checkpoints import read_json
from mha2mla.conversion.card import RECORD_FILE
from mha2mla.conversion.destination import ShardedWriter, check_destination, temporary_folder
from mha2mla.conversion.families import UnsupportedSourceError, adapter_for
from mha2mla.conversion.layer_walk import stored
from mha2mla.conversion.presets import AUTO
from mha2mla.conversion.recipe import Recipe
from mha2mla.conversion.source.files import check_unchanged, faults_of_the_source_named
from mha2mla.conversion.source.opening import OpenedFolder, open_converted
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.environment import compute_device
from mha2mla.geometry import MLAGeometry
from mha2mla.modeling.config import MHA2MLAConfig
from mha2mla.pipeline.check import Arguments, HeldOut
from mha2mla.pipeline.report import ConversionReport, make_report, note_on_prompts, serving_on_cuda, write_report
from mha2mla.pipeline.verify import verify
from mha2mla.pipeline.write import write_config, write_weights

SCHEMA_VERSION = 2  # the first that knows the layout
_PER_LAYER = ("num_rope_heads", "kv_lora_rank", "qk_rope_head_dim")


def latent_geometry(geometry: MLAGeometry) -> MLAGeometry:
    """Result for a layer that caches rotary keys."""
    width = geometry.rope_width
    return replace(
        geometry,
        num_rope_heads=1,
        kv_lora_rank=geometry.kv_lora_rank + width,
        qk_rope_head_dim=width,
        rope_from_latent=True,
    )


def latent_config(config: MHA2MLAConfig) -> MHA2MLAConfig:
    geometries = [latent_geometry(config.layer_geometry(index)) for index in range(config.num_hidden_layers)]
    values = {name: [getattr(each, name) for each in geometries] for name in _PER_LAYER}
    values = {name: each[0] if len(set(each)) == 1 else each for name, each in values.items()}
    kept = {name: value for name, value in config.to_dict().items() if name != "model_type"}
    run_time = {"attention_backend": None, "rotary_key_cache": "none"}
    return type(config)(**{**kept, **values, **run_time, "rope_from_latent": True, "schema_version": SCHEMA_VERSION})


def latent_tensors(geometry: MLAGeometry, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of one layer, by their names below ``self_attn.``, in their own dtypes.

    Args:
        tensors: all of it (``modeling.MLAAttention``).
    """
    heads, groups = geometry.num_attention_heads, geometry.num_rope_heads
    rank, nope, rope, width = (
        geometry.kv_lora_rank,
        geometry.qk_nope_head_dim,
        geometry.qk_rope_head_dim,
        geometry.rope_width,
    )
    order = torch.arange(width).view(groups, 2, rope // 2).transpose(0, 1).flatten()
    rows = torch.cat([torch.arange(rank), rank + order])  # row order of an encoder
    place = order.argsort().view(groups, rope).repeat_interleave(heads // groups, 0)  # [H, d_r], of a query's dims

    def spread(query: torch.Tensor) -> torch.Tensor:
        """[H, d_n + d_r, ...] -> [H, d_n + G d_r, ...]"""
        wide = query.new_zeros(heads, nope + width, *query.shape[2:])
        wide[:, :nope] = query[:, :nope]
        wide[torch.arange(heads)[:, None], nope + place] = query[:, nope:]
        return wide

    made = dict(tensors)
    for name in {"kv_a_proj.weight", "kv_a_proj.bias", "k_a_proj.weight"} & tensors.keys():
        made[name] = tensors[name][rows]
    for name in {"k_b_proj", "v_b_proj"} & tensors.keys():
        made[name] = torch.nn.functional.pad(tensors[name], (0, width))
    if "q_b_proj" in tensors:
        made["q_b_proj"] = spread(tensors["q_b_proj"])
        made["v_a_proj.weight"] = torch.nn.functional.pad(tensors["v_a_proj.weight"], (0, 0, 0, width))
    else:
        for name in {"q_proj.weight", "q_proj.bias"} & tensors.keys():
            made[name] = spread(tensors[name].unflatten(0, (heads, nope + rope))).flatten(0, 1)
    like = tensors["v_b_proj"]
    made["k_rope_proj.weight"] = torch.eye(rank + width, dtype=like.dtype, device=like.device)[rank:]
    made["k_rope_proj.bias"] = like.new_zeros(width)
    made["inv_freq"] = tensors["inv_freq"].reshape(1, -1)
    return made


EVALUATION_LENGTH = 512
ANOTHER_SIZE = "for another size convert the checkpoint that it was made from"
MADE = "moved, exactly, into the layout that caches the latent alone"


def change_layout(arguments: Arguments, folder: Path, started: float) -> ConversionReport:
    """Streams a converted checkpoint in ``folder`` into ``{"layout": "latent"}``.

    There is nothing to go on from after an interrupt, which leaves nothing: a layer takes as long as its bytes.

    Raises:
        ValueError: the recipe asks for anything else, by name: what was lost once is not to be lost again.
        UnsupportedSourceError: nothing rotary is cached as it is.
        CheckpointError, SourceChangedError, DestinationError, ResumeError, ParityError: as ``convert``.
    """
    opened = open_converted(folder)
    if not opened.config.has_rope_cache:
        raise UnsupportedSourceError(
            f"source {str(folder)!r} is converted already, to the layout 'latent'; {ANOTHER_SIZE}"
        )
    _check_recipe(arguments)
    device = compute_device(arguments.device)
    check_destination(arguments.destination, folder, overwrite=arguments.overwrite)
    model = opened.model(device, arguments.compute_dtype)
    before, config = opened.config, latent_config(opened.config)
    config.recipe = {**(before.recipe or {}), "layout_changed_to": "latent"}
    serving = serving_on_cuda(config, arguments.written_dtype(opened), device)
    origin, rope = before.build_source_config(), (before.recipe or {}).get("rope") or {}
    spec = adapter_for(origin.to_dict()).specify(origin, longrope_table=rope.get("longrope_table", "short"))
    length = min(EVALUATION_LENGTH, before.max_position_embeddings or EVALUATION_LENGTH, arguments.evaluation_tokens)
    held_out = [HeldOut.of(opened, arguments.evaluation, length, arguments.evaluation_tokens)]
    with temporary_folder(
        Path(arguments.destination), overwrite=arguments.overwrite, discard=arguments.resume == "never"
    ) as made:
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
                prompt_note=note_on_prompts(origin, config, serving[0].geometry, spec),
                better="nothing: no number was lost",
                seconds={"total": time.perf_counter() - started},
                source_sha256=record.get("source_sha256", {}),  # the unconverted source
            )
            write_report(arguments, device, made, report, MADE)
    return report


def _check_recipe(arguments: Arguments) -> None:
    recipe = arguments.recipe
    source = str(arguments.source)
    why = f"source {source!r} is converted already, and can only change to the layout latent; {ANOTHER_SIZE}"
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
        return moved if dtype is None else stored(moved, dict.fromkeys(moved, dtype))

    return write_weights(arguments, model, folder, attention, names)
