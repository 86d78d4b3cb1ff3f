"""What ``eval latency`` does on the command line: checkpoints, random models or a published preset, timed and saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from mha2mla.checkpoints import find_checkpoint, find_converted
from mha2mla.conversion.target import LayoutName
from mha2mla.files import report_file
from mha2mla.trial_models import ShapeName, random_pair
from mha2mla.verbs import Device, Dtype, save, show

Level = Literal["op", "step", "prefill", "e2e"]
PresetName = Literal["llama-2-7b-decode"]


def eval_latency(
    source: str | None = None,
    converted: str | None = None,
    /,
    level: list[Level] | None = None,
    batch_sizes: list[int] | None = None,
    seqlens: list[int] | None = None,
    new_tokens: int = 64,
    random_weights: ShapeName | None = None,
    layout: LayoutName | None = None,
    cache_ratio: float | None = None,
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    layers: int | None = None,
    preset: PresetName | None = None,
    no_check: bool = False,
    device: Device = None,
    dtype: Dtype | None = None,
    page_size: int = 64,
    layer: int = 0,
    backend: Literal["tilelang", "reference"] | None = None,
    min_run_time: float = 0.5,
    json: str | None = None,
) -> int:
    """Time of attention, steps, prompts and generate, source against converted; exit code 1 if any is wrong.

    A speed is printed only after the same inputs passed a check against float64, or says that it was not checked. One
    model is in memory at a time; what does not fit is a row that says so.

    Args:
        source: folder or hub id of the source checkpoint.
        converted: folder or hub id of the converted checkpoint.
        level: one or several of op (attention of one layer), step (a whole decode step), prefill (a prompt) and e2e
            (generate: first token, further tokens, memory, largest batch); default op and step.
        batch_sizes: sequences per call, such as 1,8; default those of 1, 8, 64 and 256 that fit.
        seqlens: cached tokens, such as 512,2048 (the default).
        new_tokens: that generate makes.
        random_weights: in place of checkpoints: a well-known shape with random weights, and what converting it as
            layout, cache_ratio and widths say would give.
        layout: of the converted random model; default latent.
        cache_ratio: of the converted random model; default 0.5.
        kv_lora_rank: of the converted random model, in place of a ratio; needs qk_rope_head_dim.
        qk_rope_head_dim: of the converted random model; needs kv_lora_rank.
        layers: of both random models; default the shape's.
        preset: in place of models: the attention op at shapes for which times were published, beside these.
        no_check: compare nothing with float64, and say so in every row.
        device: cpu, cuda, cuda:1, …; default CUDA when there is one.
        dtype: what is computed in; default bfloat16 on CUDA, float32 on a CPU.
        page_size: tokens per page in the attention op.
        layer: whose geometry the attention op has.
        backend: of the decode op; by default it chooses itself.
        min_run_time: seconds of measurement per row.
        json: also write the rows to this file, after each.

    Example:
        mha2mla eval latency path/to/llama path/to/llama-mla --batch-sizes 1,8 --seqlens 512,2048
        mha2mla eval latency --random-weights llama-3-8b --level step e2e --seqlens 8192
        mha2mla eval latency --preset llama-2-7b-decode
    """
    record = report_file(json, "latency", source, converted)
    given = _given(source, converted, random_weights, preset)
    target = {"layout": layout, "cache_ratio": cache_ratio}
    target |= {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    if random_weights is None:
        _refuse(given, **target, layers=layers)
    if preset is not None:
        _refuse("--preset", level=level, batch_sizes=batch_sizes, seqlens=seqlens, backend=backend)
    if source is not None:
        find_checkpoint(source, "source")
        find_converted(converted, "converted")
    from mha2mla.environment import collect_environment, compute_device, usual_dtype
    from mha2mla.eval.measurement import wrong_rows

    environment, device = collect_environment(), compute_device(device)
    dtype = usual_dtype(device, dtype)
    fields, title = {"source": source, "converted": converted}, f"{source} → {converted}"
    if preset is not None:
        fields, title = {"preset": preset}, preset
    elif random_weights is not None:
        pair = random_pair(random_weights, target, layers, device, dtype)
        source, converted = pair.source, pair.converted
        fields = {"random_weights": random_weights, "geometry": str(pair.geometry), "layers": pair.layers}
        title = f"{random_weights}, random weights, {pair.layers} layers → {pair.geometry}"
    write = partial(save, record, "latency", environment=environment, **fields)
    options = {"device": device, "dtype": dtype, "min_run_time": min_run_time, "check": not no_check, "save": write}
    if preset is not None:
        rows, columns = _preset(preset, **options)
    else:
        asked = {"levels": level, "batch_sizes": batch_sizes, "seqlens": seqlens, "backend": backend}
        options |= {name: value for name, value in asked.items() if value is not None}
        options |= {"new_tokens": new_tokens, "page_size": page_size, "layer": layer}
        from mha2mla.eval.latency import model_latency

        rows = model_latency(source, converted, progress=True, **options)
        columns = rows.columns()
    show(rows, columns, title=title, kind="latency", json=record, **fields)
    return int(bool(wrong_rows(rows)))


def _given(source: str | None, converted: str | None, random_weights: str | None, preset: str | None) -> str:
    """By what the models are given; raises ValueError where that is not one thing."""
    models = {"SOURCE and CONVERTED": source, "--random-weights": random_weights, "--preset": preset}
    given = [name for name, value in models.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"models are given by {', '.join(given) or 'nothing'}; expected one of {'; '.join(models)}")
    if source is not None and converted is None:
        raise ValueError(f"CONVERTED is not given beside SOURCE {source!r}; expected the converted checkpoint")
    return given[0]


def _refuse(models: str, **options: Any) -> None:
    """Raises ValueError for options that say nothing about models that are given in this way, and have a value."""
    if said := [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]:
        raise ValueError(f"{', '.join(said)} is given beside {models}; expected without, since it would change nothing")


def _preset(
    name: PresetName, *, save: Callable[[list[dict[str, Any]]], None], **options: Any
) -> tuple[list[dict[str, Any]], Mapping[str, str]]:
    """Rows, and the columns of their table."""
    from mha2mla.eval import op_latency
    from mha2mla.terminal import progress_bar

    rows, total = [], len(op_latency.PRESETS[name].published) * (len(op_latency.PRESET_BASELINES) + 1)
    for row in progress_bar(op_latency.preset_latency(name, **options), show=True, total=total, desc=name, unit="row"):
        rows.append(row)
        save(rows)
    return rows, op_latency.PRESET_COLUMNS
