"""Plan of a conversion from a config alone, as rows: cache, capacity, kernel, step time, losses on record, cost."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mha2mla.checkpoints import CONFIG_FILE, check_path, did_you_mean, find_checkpoint
from mha2mla.conversion.families import SourceSpec, adapter_for
from mha2mla.conversion.latent.ranks import reach_of_codes
from mha2mla.conversion.layer_walk import converted_config
from mha2mla.conversion.recipe import Recipe, normalize_keys
from mha2mla.conversion.source.opening import read_source_config
from mha2mla.conversion.target import DEFAULT_LAYOUT, LayoutName
from mha2mla.geometry import CODE_BLOCK, LATENT_BITS, coded_width
from mha2mla.modeling.cache_layout import PAGE_SIZE, fp8_layout
from mha2mla.modeling.tensor_parallel import HeadShard
from mha2mla.pipeline.sizing import (
    ATTENTION_OVER_PREDICTED,
    AUTO_LOSSES,
    CODES_OVER_PREDICTED,
    GPU,
    HEALED_LOSSES,
    ITEMSIZE,
    MEASURED_LOSSES,
    MEASURED_OVER_PREDICTED,
    NOT_MEASURED,
    Footprint,
    conversion_cost,
    decode_kernel,
    find_gpu,
    footprint,
    mean_bits,
    steps_by_rotary_width,
)
from mha2mla.trial_models import SHAPES, source_config

CACHE_RATIOS = (0.5, 0.3125, 0.25, 0.1875, 0.125)
PORTABLE = "latent_portable"  # 2.1 ms for 268 MB of latents on an H200 (docs/limits.md): bound by neither limit
STEP_NOTE = (
    "Largest batch and context: weights and cache in nine tenths of the memory, bfloat16. Step times are predicted from"
    " bytes read and products, without gaps and communication. On one H200 steps took"
    f" {MEASURED_OVER_PREDICTED[0]} to {MEASURED_OVER_PREDICTED[1]} times their prediction, attention alone over"
    f" computed rotary keys {ATTENTION_OVER_PREDICTED[0]:.2f} to {ATTENTION_OVER_PREDICTED[1]:.2f} times. Other GPUs:"
    " not measured. Codes are predicted as 16 bits of the same rank; attention over them alone took"
    f" {CODES_OVER_PREDICTED[0]:.2f} to {CODES_OVER_PREDICTED[1]:.2f} times that. The source's row is a lower bound"
    " on the time of any implementation."
)
COST_NOTE = (
    "Estimates from measured conversions of up to 8B parameters; larger layers are extrapolated, and memory of smaller"
    " ones is that of 8B. Text that the source writes is counted for small models alone. Preset quick where gradient"
    " steps would not fit into the GPU. Choosing rank and bits by layer is not counted."
)
CAPACITY_COLUMNS = {
    "target": "target",
    "d_c": "d_c",
    "bits": "bits",
    "G": "G",
    "d_r": "d_r",
    "bytes_per_token": "cache, B/token",
    "bytes_per_token_8_bit": "with 8-bit latent",
    "bytes_per_token_kept": "with rotary keys kept",
    "bytes_per_token_kept_8_bit": "kept, 8-bit",
    "weights_gb": "weights, GB",
    "largest_batch": "largest batch",
    "largest_context": "largest context, batch 1",
    "kernel": "decode kernel",
    "step_ms_1": "step, ms, batch 1",
    "step_ms_largest": "step, ms, largest batch",
    "step_ms_by_d_r": "the same by d_r",
    "tokens_per_s": "tokens/s, largest batch",
    "note": "note",
}
LOSS_COLUMNS = {"target": "target", "loss": "this checkpoint"} | {
    model: f"{model}: {texts}" for model, (texts, _) in MEASURED_LOSSES.items()
}
COST_COLUMNS = {
    "target": "target",
    "preset": "preset",
    "growth": "growth of weights, %",
    "minutes": "minutes, one H200",
    "gpu_gib": "GPU memory, GiB",
    "host_gib": "host memory, GiB",
    "disk_gb": "disk, GB",
}


def read_source(source: str | os.PathLike[str]) -> tuple[PreTrainedConfig, SourceSpec]:
    """Config and attention of a source, without its weights: a folder, a ``config.json``, a shape's name or a hub id.

    Raises:
        UnsupportedSourceError, CheckpointError: as ``convert`` refuses the config.
        FileNotFoundError: it is not there.
        ValueError: the name is empty.
    """
    check_path(source, "source")
    path = Path(source).expanduser()
    if path.name == CONFIG_FILE and path.is_file():
        path = path.parent
    elif not path.is_dir():
        if str(source) in SHAPES:
            config = source_config(str(source))
            return config, adapter_for(config.to_dict()).specify(config)
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(find_checkpoint(source, "source"), CONFIG_FILE)).parent
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}{did_you_mean(source, SHAPES)}") from error
    find_checkpoint(path, "source")
    config, _, spec = read_source_config(path)
    return config, spec


@dataclass(frozen=True)
class SizingPlan:
    """Plan of a source's conversions.

    Attributes:
        summary: source, GPU, tp, context, and how a GPU that was not named was chosen.
        rows: one for the source, then one by layout and cache ratio; bytes, batches and times are of each GPU.
        commands: the command line of each conversion that fits the source.
    """

    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    commands: list[str]


def plan(
    source: str | os.PathLike[str],
    *,
    gpu: str | None = None,
    tp: int = 1,
    context: int = 8192,
    cache_ratios: Sequence[float] | None = None,
    layouts: Sequence[LayoutName] = (DEFAULT_LAYOUT,),
    latent_bits: int | str | None = None,
) -> SizingPlan:
    """Cache, capacity, kernel, predicted step and conversion cost of a source's conversions, by cache ratio.

    Args:
        gpu: one of :data:`GPUS`; default this machine's.
        tp: GPUs that a model is split over.
        cache_ratios: bytes cached after / before conversion, each in (0, 1]; default :data:`CACHE_RATIOS`.
        latent_bits: recipe key ``latent.bits``. Of "auto", by which a conversion measures rank and bits of each layer,
            the cache is the budget; weights and steps are those of one rank. By default "auto", and 16 beside it.

    Raises:
        ValueError: an argument out of range, by name, or a source that cannot be converted.
        FileNotFoundError: there is no such source.
    """
    for name, value in (("tp", tp), ("context", context)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected 1 or more")
    targets = [
        (layout, ratio, bits)
        for layout in layouts
        for bits in ([latent_bits] if latent_bits else ["auto"] * (layout == DEFAULT_LAYOUT) + [16])
        for ratio in cache_ratios or CACHE_RATIOS
        if latent_bits or not (bits == "auto" and ratio == 1)  # which is 16 bits
    ]
    for _, ratio, _ in targets:
        if not 0 < ratio <= 1:
            raise ValueError(f"cache_ratio is {ratio}; expected a number above 0, at most 1")
    machine, chosen = find_gpu(gpu)
    config, spec = read_source(source)
    if spec.num_attention_heads % tp:
        raise ValueError(f"tp is {tp}; expected a divisor of the source's {spec.num_attention_heads} query heads")
    before = footprint(config, None, spec, tp)
    rows = [{"target": "source", **_capacity(before, machine, context, before)}]
    commands = []
    path = Path(source).expanduser()
    path = path.parent if path.name == CONFIG_FILE else path
    name = path.resolve().name
    typed = f"path/to/{name}" if source in SHAPES and not path.is_dir() else os.fspath(path)
    for layout, ratio, bits in targets:
        coded = bits != 16
        says_bits = coded or (layout == DEFAULT_LAYOUT and ratio != 1)
        named = f"{layout} {ratio:g}" + (f", {bits} bits" if says_bits else "")
        row: dict[str, Any] = {"target": named, "layout": layout, "cache_ratio": ratio}
        rows.append(row)
        try:
            target = {"cache_ratio": ratio, "layout": layout, "latent.bits": bits}
            row |= _converted_row(config, spec, before, machine, tp, context, target)
        except ValueError as error:
            row["note"] = f"no conversion: {error}"
            continue
        for model, (_, figures) in MEASURED_LOSSES.items():
            losses = {} if coded else figures.get((row["preset"], layout), {})
            losses = AUTO_LOSSES.get(model, {}) if bits == "auto" else losses
            row[model] = losses.get(ratio, NOT_MEASURED) + (" (quick)" if coded and ratio in losses else "")
            healed = HEALED_LOSSES[model].get((bits, ratio)) if layout == DEFAULT_LAYOUT else None
            row[model] += f", healed {healed}" if healed else ""
        row["loss"] = "1" if ratio == 1 and not coded else row.get(name, NOT_MEASURED)
        words = ["mha2mla", "convert", typed, f"{name}-{named.replace(' ', '-').replace(',', '')}"]
        words += ["--cache-ratio", f"{ratio:g}", *(["--layout", layout] if layout != DEFAULT_LAYOUT else [])]
        words += ["--latent.bits", str(bits)] if says_bits and bits != "auto" else []
        commands.append(shlex.join(words + (["--preset", "quick"] if row["preset"] == "quick" else [])))
    summary = {"source": os.fspath(source), "parameters": before.parameters, "gpu": machine.name}
    summary |= {"chosen": chosen} if gpu is None else {}
    summary |= {"tp": tp, "context": context, "longest_context_of_the_model": config.max_position_embeddings}
    return SizingPlan(summary, rows, commands)


def _converted_row(
    config: PreTrainedConfig,
    spec: SourceSpec,
    before: Footprint,
    machine: GPU,
    tp: int,
    context: int,
    target: dict[str, Any],
) -> dict[str, Any]:
    recipe, _ = Recipe.choose(normalize_keys(target), "cuda")
    cost = conversion_cost(before.layer_parameters, spec.num_layers, fitted=recipe.fit.steps > 0)
    if cost["gpu_gib"] > machine.memory / 2**30:
        recipe = Recipe.from_preset("quick", **target)
        cost = conversion_cost(before.layer_parameters, spec.num_layers, fitted=False)
    whole = recipe.geometry(spec)
    by_layer = recipe.latent.bits == "auto" and not whole.is_full_rank
    budget = int(target["cache_ratio"] * 2 * whole.source_cache_numel_per_token)
    if by_layer:
        bits = mean_bits(target["cache_ratio"])
        most = min(reach_of_codes(whole, budget)[1], whole.full_kv_lora_rank - CODE_BLOCK)  # some layers stay below
        nearest = coded_width(int(budget + CODE_BLOCK * bits / 16), bits)  # half a block more, rounded down
        rank = max(CODE_BLOCK, min(most, nearest))
        whole = replace(whole, kv_lora_rank=rank, latent_bits=min(LATENT_BITS, key=lambda each: abs(each - bits)))
    geometry = HeadShard.of(whole, 0, tp).geometry
    after = footprint(converted_config(config, spec, (whole,) * spec.num_layers, recipe), geometry, spec, tp)
    if by_layer:  # the layers spend the budget together
        after = replace(after, token_bytes=budget)
    kernel, why = decode_kernel(geometry, machine.capability)
    eight_bits = None if geometry.has_codes else decode_kernel(geometry, machine.capability, codes=True)[0]
    row: dict[str, Any] = {"d_c": whole.kv_lora_rank, **({"bits": whole.latent_bits} if whole.has_codes else {})}
    row |= {"G": whole.num_rope_heads, "d_r": whole.qk_rope_head_dim, "kernel": kernel}
    why = "no prediction: this kernel is slower than its bytes" if kernel == PORTABLE else why
    if geometry.has_codes and kernel and not kernel.startswith("codes_"):
        why = "decode copies codes in 16 bits first"
    row |= {"note": why, "kernel_8_bit": eight_bits}
    if by_layer:
        notes = (why, f"the conversion measures rank and bits of each layer; weights as of rank {row.pop('d_c')}")
        row |= {"bits": "auto", "note": "; ".join(filter(None, notes))}
    if tp > 1 and spec.qk_norm and not spec.norm_per_head:
        refused = f"serving refuses tp={tp}: {config.model_type} normalises the queries of all heads together"
        row["note"] = "; ".join(filter(None, (row["note"], refused)))
    # Predicted as 16 bits of the same rank, to which kernels widen codes; STEP_NOTE says how far that is off.
    read = replace(after, token_bytes=replace(geometry, latent_bits=16).cache_bytes_per_token(ITEMSIZE))
    row |= _capacity(after, machine, context, None if why else read)
    if "step_ms_largest" in row:
        steps = steps_by_rotary_width(read, geometry, spec, machine, row["largest_batch"], context)
        row["step_ms_by_d_r"] = ", ".join(f"{width}: {1e3 * step:.4g}" for width, step in steps.items()) or None
    codes = fp8_layout(geometry, PAGE_SIZE).bytes_per_token * spec.num_layers
    row |= {"bytes_per_token_8_bit": codes if eight_bits else None}
    if not geometry.has_rope_cache:
        row["bytes_per_token_kept"] = (
            after.cache_bytes_per_token + ITEMSIZE * geometry.qk_rope_head_dim * spec.num_layers
        )
        coded = None if geometry.has_codes else geometry.with_key_codes.cache_bytes_per_token(ITEMSIZE)
        row["bytes_per_token_kept_8_bit"] = coded and coded * spec.num_layers
    row |= {"preset": recipe.preset, "growth": 100 * (after.parameters / before.parameters - 1), **cost}
    # Two streams of activations in float32, and the checkpoint with its finished layers, which a resume would read.
    streams = 2 * 4 * recipe.calibration.tokens * spec.hidden_size
    layers = ITEMSIZE * after.layer_parameters * spec.num_layers
    return row | {"disk_gb": (ITEMSIZE * after.parameters + layers + streams) / 1e9}


def _capacity(model: Footprint, machine: GPU, context: int, read: Footprint | None) -> dict[str, Any]:
    """Cache, largest batch and context, and predicted steps at batch 1 and at the largest: of what ``read`` says that
    they read; None: no kernel decodes them."""
    batch = model.largest_batch(machine, context)
    found: dict[str, Any] = {"weights_gb": model.weights / 1e9, "bytes_per_token": model.cache_bytes_per_token}
    found |= {"largest_batch": batch, "largest_context": model.largest_context(machine)}
    if batch and read is not None:
        step = read.step_seconds(machine, batch, context)
        found |= {"step_ms_1": 1e3 * read.step_seconds(machine, 1, context), "step_ms_largest": 1e3 * step}
        found |= {"tokens_per_s": batch / step}
    return found
