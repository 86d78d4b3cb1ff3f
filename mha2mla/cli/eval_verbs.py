"""Verbs that measure, inspect, predict and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from mha2mla.checkpoints import find_checkpoint, find_converted, find_pair
from mha2mla.cli.flags import SEVERAL, Device, Dtype, Json, Numbers, Ratios, RotaryKeyCache, Texts, flag
from mha2mla.conversion.calibration.texts import check_single_text
from mha2mla.conversion.card import RECORD_FILE
from mha2mla.conversion.target import DEFAULT_LAYOUT, LayoutName
from mha2mla.environment import collect_environment, compute_device, describe_environment, thread_hint, usual_dtype
from mha2mla.files import output_file, page, report_file
from mha2mla.terminal import announce
from mha2mla.trial_models import ShapeName, random_pair

evaluation = App(name="eval", help="Measures a converted checkpoint against its source.")
checks = App(name="check", help="Checks this machine's kernels against float64.")


@evaluation.command(name="quality")
def eval_quality(
    source: str,
    converted: str,
    /,
    *,
    text: Texts = None,
    lengths: str = "512,2048,longest",
    max_tokens: int = 24576,
    kv_bits: str = "",
    latent_bits: str = "",
    rotary_key_cache: str = "",
    probes: bool = False,
    probe_items: int | None = None,
    generation: bool = False,
    device: Device = None,
    dtype: Dtype = "float32",
    json: Json = None,
) -> None:
    """Perplexity of source and converted by window length and by position, and the distance of their predictions.

        mha2mla eval quality path/to/llama path/to/llama-mla --lengths 512,2048,longest --json quality.json

    Args:
        source: folder or hub id of the source checkpoint.
        converted: folder or hub id of the converted checkpoint.
        text: one or several of builtin:stdlib, builtin:licences, builtin:opticks (all three by default), builtin:prose,
            hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]], or a file.
        lengths: tokens per window, joined by commas; "longest" is the most that both models take.
        max_tokens: tokens of each text to read at most, but a window of each length.
        kv_bits: also measure the source over a quantised KV cache, keys by channel and by token: bits of a code, joined
            by commas, such as 8,4,3,2.
        latent_bits: also measure the converted model over quantised latents, in a basis computed from builtin:pydoc:
            bits of a code, joined by commas, such as 8,4,3.
        rotary_key_cache: also measure the converted model over rotary keys that its cache keeps, and their KL to
            computed ones: modes joined by commas, such as bfloat16,int8.
        probes: also ask what needs far context: keys, variable tracking, arithmetic, a span that occurs again; of every
            cache that is compared, each in as much time again.
        probe_items: questions or spans of each probe at each length; default 20.
        generation: also compare greedy continuations.
        dtype: the models compute in it.
    """
    record = report_file(json, "quality", source, converted, *(text or ()))
    for name in text or ():
        check_single_text(name)
    if probe_items is not None and (probe_items < 1 or not probes):
        raise ValueError(f"--probe-items is {probe_items}; expected at least 1, beside --probes")
    find_pair(source, converted)
    announce(f"loading {source} and {converted}", thread_hint(device))
    from mha2mla.eval import evaluate_quality, quality
    from mha2mla.eval import generation as generating
    from mha2mla.eval import probes as probing
    from mha2mla.eval.report import print_table

    measured = evaluate_quality(
        source,
        converted,
        texts=text or quality.TEXTS,
        lengths=quality.parse_lengths(lengths),
        max_tokens=max_tokens,
        caches=quality.parse_caches(kv_bits, latent_bits, rotary_key_cache),
        probes=probes and (probe_items or True),
        generation=generation,
        device=device,
        dtype=dtype,
    )
    found = measured.to_dict()
    fields = {"source": source, "converted": converted, **found}
    note = f"{quality.NOTE}\n{measured.dtype}; "
    title, rows = f"{source} → {converted}", fields.pop("rows")
    _show(rows, measured.columns, title=title, kind="quality", json=record, note=note, **fields)
    print_table(
        found["by_position"], title="by position in the longest window", columns=quality.POSITION_COLUMNS,
        caption=quality.POSITION_NOTE,
    )  # fmt: skip
    for rows, title, columns in (
        (found["probes"], "probes of far context", probing.COLUMNS),
        (found["generation"], "greedy continuations", generating.COLUMNS),
    ):
        if rows:
            print_table(rows, title=title, columns=columns)
    for reason in measured.skipped:
        print(f"not measured: {reason}")


@evaluation.command(name="tasks")
def eval_tasks(
    source: str,
    converted: str,
    /,
    *,
    task: Texts = None,
    folder: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: Device = None,
    dtype: Dtype | None = None,
    json: Json = None,
) -> None:
    """Tasks of lm-eval on source and converted, and the share of each score that is kept.

        mha2mla eval tasks path/to/llama path/to/llama-mla --task arc_easy --limit 100

    Args:
        source: folder or hub id of the source checkpoint.
        converted: folder or hub id of the converted checkpoint.
        task: one or several names of lm-eval or of the folder; default every task of the folder.
        folder: YAML files that describe further tasks, such as ones with local data.
        num_fewshot: examples before each question; default the task's own.
        limit: documents of each task at most.
        batch_size: requests at a time.
        dtype: the models compute in it; default that of the checkpoints.
    """
    record = report_file(json, "tasks", source, converted)
    find_pair(source, converted)
    announce(f"loading {source} and {converted}", thread_hint(device))
    from mha2mla.eval import tasks

    options = {"num_fewshot": num_fewshot, "limit": limit, "batch_size": batch_size, "device": device}
    found = tasks.evaluate_tasks(source, converted, task, folder=folder, dtype=dtype, **options)
    rows, fields = [row.to_dict() for row in found], {"source": source, "converted": converted}
    _show(rows, tasks.COLUMNS, title=f"{source} → {converted}", kind="tasks", json=record, **fields)


@evaluation.command(name="latency")
def eval_latency(
    source: str | None = None,
    converted: str | None = None,
    /,
    *,
    level: Annotated[list[Literal["op", "step", "prefill", "e2e"]] | None, SEVERAL] = None,
    batch_sizes: Numbers = None,
    seqlens: Numbers = None,
    new_tokens: int | None = None,
    random_weights: ShapeName | None = None,
    layout: LayoutName | None = None,
    cache_ratio: float | None = None,
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    layers: int | None = None,
    preset: Literal["llama-2-7b-decode"] | None = None,
    no_check: bool = False,
    device: Device = None,
    dtype: Dtype | None = None,
    page_size: int | None = None,
    layer: int | None = None,
    backend: Literal["tilelang", "reference"] | None = None,
    rotary_key_cache: RotaryKeyCache = None,
    min_run_time: float = 0.5,
    json: Json = None,
) -> int:
    """Time of attention, steps, prompts and generate, source against converted; exit code 1 if any is wrong.

    A speed is printed only after the same inputs passed a check against float64, or says that it was not checked. One
    model is in memory at a time; a case that does not fit is a row that says so.

        mha2mla eval latency path/to/llama path/to/llama-mla --batch-sizes 1,8 --seqlens 512,2048
        mha2mla eval latency --random-weights llama-3-8b --level step e2e --seqlens 8192
        mha2mla eval latency --preset llama-2-7b-decode

    Args:
        source: folder or hub id of the source checkpoint.
        converted: folder or hub id of the converted checkpoint.
        level: one or several of op (attention of one layer), step (a whole decode step), prefill (a prompt) and e2e
            (generate: first token, further tokens, memory, largest batch); default op and step.
        batch_sizes: sequences per call, such as 1,8; default those of 1, 8, 64 and 256 that fit.
        seqlens: cached tokens, such as 512,2048 (the default).
        new_tokens: tokens that generate makes; default 64.
        random_weights: a well-known shape with random weights in place of checkpoints, and its conversion by layout,
            cache_ratio and widths.
        layout: layout of the converted random model; default latent.
        cache_ratio: cache ratio of the converted random model; default 0.5.
        kv_lora_rank: its latent width d_c, in place of a ratio; needs qk_rope_head_dim.
        qk_rope_head_dim: its rotary width d_r; needs kv_lora_rank.
        layers: number of layers of both random models; default the shape's.
        preset: attention at shapes with published times, beside these times; takes no models.
        no_check: compare nothing with float64, and say so in every row.
        dtype: dtype of the computation; default bfloat16 on CUDA, float32 on a CPU.
        page_size: tokens per page in the attention op; default 64.
        layer: layer whose geometry the attention op has; default 0.
        backend: backend of the decode op; by default it chooses itself.
        min_run_time: seconds of measurement per row.
    """
    record = report_file(json, "latency", source, converted)
    target = {"layout": layout, "cache_ratio": cache_ratio}
    target |= {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    asked = {"level": level, "batch_sizes": batch_sizes, "seqlens": seqlens, "backend": backend}
    asked |= {"rotary_key_cache": rotary_key_cache, "new_tokens": new_tokens, "page_size": page_size, "layer": layer}
    _check_models(source, converted, random_weights, preset, target | {"layers": layers}, asked)
    if source is not None:
        find_checkpoint(source, "source")
        find_converted(converted, "converted")
    announce(f"loading {random_weights or preset or f'{source} and {converted}'}", thread_hint(device))
    from mha2mla.eval.measurement import wrong_rows
    from mha2mla.eval.report import print_table, write_json

    environment, place = collect_environment(), compute_device(device)
    weights_dtype = usual_dtype(place, dtype)
    fields, title = {"source": source, "converted": converted}, f"{source} → {converted}"
    if preset is not None:
        fields, title = {"preset": preset}, preset
    elif random_weights is not None:
        pair = random_pair(random_weights, target, layers, place, weights_dtype)
        source, converted = pair.source, pair.converted
        fields = {"random_weights": random_weights, "geometry": str(pair.geometry), "layers": pair.layers}
        title = f"{random_weights}, random weights, {pair.layers} layers → {pair.geometry}"

    def save(rows: Sequence[Mapping[str, Any]]) -> None:
        write_json(record, kind="latency", rows=rows, environment=environment, **fields)

    options = {"device": place, "dtype": weights_dtype, "min_run_time": min_run_time, "check": not no_check}
    if preset is not None:
        from mha2mla.eval.op_latency import PRESET_COLUMNS, preset_latency

        rows = []
        for row in preset_latency(preset, progress=True, **options):
            rows.append(row)
            save(rows)
        _show(rows, PRESET_COLUMNS, title=title, kind="latency", json=record, **fields)
    else:
        from mha2mla.eval.latency import model_latency

        asked["levels"] = asked.pop("level")
        options |= {name: value for name, value in asked.items() if value is not None}
        rows = model_latency(source, converted, progress=True, save=save, **options)
        print(title)
        for op, shown, columns in rows.tables():
            print_table(shown, title=op, columns=columns, longest=24)
        print(describe_environment(environment))
    return int(bool(wrong_rows(rows)))


@checks.command(name="kernels")
def check_kernels(
    *,
    count: int = 200,
    seed: int = 0,
    device: Device = None,
    calls: int = 4,
    timeout: float = 60.0,
    budget: float | None = None,
    json: Json = None,
) -> int:
    """The decode kernels against float64 on random geometries and random plans; exit code 1 if any is wrong.

    The exit code is also 1 where the budget ended before anything was checked.

        mha2mla check kernels --count 200 --budget 600 --json kernel-check.json

    Args:
        count: geometries, each of them one compilation.
        seed: random seed; the same seed checks the same calls.
        device: cuda or cuda:1, the default being CUDA; cpu checks the reference backend on smaller calls.
        calls: random calls and plans per geometry.
        timeout: seconds after which a launch counts as hung.
        budget: seconds for compiling and checking; calls that are not reached are rows "not checked: …".
    """
    record = report_file(json, "kernel-check")
    announce("loading kernels", thread_hint(device))
    from mha2mla.eval.report import print_table
    from mha2mla.testing import kernel_check

    rows = kernel_check.check_kernels(count, seed, device, calls=calls, timeout=timeout, budget=budget)
    wrong, checked = kernel_check.not_right(rows), [row for row in rows if "error" in row]
    title = f"{count} random geometries, {len(rows)} calls, {len(wrong)} not right (seed {seed})"
    summary = kernel_check.summarize(rows)
    _show(summary, kernel_check.COLUMNS, title=title, kind="kernel-check", json=record, all_rows=rows, seed=seed)
    if wrong:
        shown = ("H", "G", "d_c", "d_r", "page", "S_q", "dtype", "kernel", "batch", "window", "num_ctas", "status")
        print_table(wrong[:20], title="not right", columns=shown)
    return int(bool(wrong) or not checked)


def inspect_checkpoint(
    checkpoint: str,
    /,
    *,
    batch: Numbers = None,
    length: Numbers = None,
    dtype: Dtype = "bfloat16",
    verify: bool = False,
    json: Json = None,
) -> None:
    """Geometry, recipe, cache bytes, weights and measured losses of a converted checkpoint.

        mha2mla inspect path/to/llama-mla --batch 1,64 --length 4096,32768

    Args:
        checkpoint: folder or hub id of a converted checkpoint.
        batch: sequences that are cached together, such as 1,64; default 1.
        length: cached tokens of each, such as 4096,32768; default 4096 and as many as the model takes.
        dtype: dtype of model and cache, for bytes and for the choice of kernels.
        verify: also read all weights and compare them with the digests that the conversion recorded.
    """
    record = report_file(json, "inspection", checkpoint)
    for name, values in (("batch", batch), ("length", length)):
        if values and min(values) < 1:
            raise ValueError(f"{flag(name)} has {min(values)}; expected at least 1")
    find_converted(checkpoint, "checkpoint")
    announce(f"reading {checkpoint}")
    from mha2mla.eval import inspection
    from mha2mla.eval.report import print_table, print_values, write_json

    found = inspection.inspect_checkpoint(checkpoint, dtype, batches=batch or (1,), lengths=length)
    print_values(found.summary, checkpoint)
    print_table(found.geometries, title="geometry of the layers", columns=inspection.GEOMETRY_COLUMNS)
    print_table(found.cache, title=f"cache in {dtype}, all layers", columns=inspection.CACHE_COLUMNS)
    if found.measured:
        print_table(found.measured, title="measured by the conversion", columns=inspection.LOSS_COLUMNS)
        print_values(found.run)
        print_table(found.layers, title="relative errors by layer")
    else:
        print(f"no {RECORD_FILE}: what the conversion lost is not recorded")
    fields = dict(vars(found))
    if verify:
        fields["verified"] = inspection.verify_weights(checkpoint)
        print(f"weights and code are what the conversion wrote: {len(fields['verified'])} files")
    write_json(record, kind="inspection", rows=fields.pop("geometries"), **fields)


def plan(
    source: str,
    /,
    *,
    gpu: str | None = None,
    tp: int = 1,
    context: int = 8192,
    cache_ratio: Ratios = None,
    layout: Annotated[list[LayoutName] | None, SEVERAL] = None,
    latent_bits: Literal[16, 8, 4, 3, 2, "auto"] | None = None,
    json: Json = None,
) -> None:
    """Cache, capacity, speed and cost of converting a model, from its config alone.

    Steps are predicted from bytes and products; losses are those measured on small models, never extrapolated.

        mha2mla plan path/to/llama --gpu h100-80gb --tp 2

    Args:
        source: folder, config.json, hub id, or a known shape such as llama-3-70b; of an MHA/GQA model.
        gpu: such as h100-80gb, h200-141gb or a100-80gb; default this machine's.
        tp: GPUs that the model is split over; bytes and batches are then of each.
        context: tokens of a sequence.
        cache_ratio: one or several shares of the source's cache; default 0.5 0.3125 0.25 0.1875 0.125.
        layout: one or several; default latent.
        latent_bits: bits of a cached element: 16, or in the layout latent 8, 4, 3, 2 or auto, by layer; default auto
            and 16.
    """
    record = report_file(json, "plan", source)
    announce(f"reading {source}")
    from mha2mla.eval.report import filled, print_table, print_values, write_json
    from mha2mla.pipeline import plan as sizing

    options = {"cache_ratios": cache_ratio, "layouts": layout or (DEFAULT_LAYOUT,), "latent_bits": latent_bits}
    found = sizing.plan(source, gpu=gpu, tp=tp, context=context, **options)
    print_values(found.summary)
    columns = filled(sizing.CAPACITY_COLUMNS, found.rows)
    print_table(found.rows, title="each GPU", columns=columns, caption=f"{sizing.STEP_NOTE}\n")
    converted = found.rows[1:]
    print_table(converted, title="perplexity relative to the source model", columns=sizing.LOSS_COLUMNS)
    print_table(converted, title="conversion", columns=sizing.COST_COLUMNS, caption=f"{sizing.COST_NOTE}\n")
    print("\n".join(found.commands))
    write_json(record, kind="plan", rows=found.rows, summary=found.summary, commands=found.commands)


def write_report(
    *inputs: Annotated[str, Parameter(name="FOLDER|JSON", negative=())],
    output: Annotated[str, Parameter(name=("--output", "-o"))] = "report.html",
) -> None:
    """Writes one page about a conversion: what was lost and gained, with a table beside every plot.

    The page needs no network and is light or dark as the reader's system is.

        mha2mla report path/to/llama-mla quality.json latency.json -o report.html

    Args:
        inputs: folders of converted checkpoints, JSON files of convert, eval and generate, and its answers (JSON
            Lines), of the converted model and of the source.
        output: HTML file to write, or Markdown (.md) with the tables alone.
    """
    if not inputs:
        raise ValueError("FOLDER|JSON is not given; expected one or several")
    target = output_file(output, page(output), *inputs, name="output")
    if missing := [each for each in inputs if not Path(each).expanduser().exists()]:
        raise FileNotFoundError(f"FOLDER|JSON is {missing[0]!r:.300}; expected an existing folder or file")
    from mha2mla.eval.page import write_page

    print(f"written: {write_page(inputs, target)}")


def env(*, json: Json = None) -> None:
    """Prints the machine, driver, clocks, library versions and commit that measurements carry.

    mha2mla env --json environment.json
    """
    record = report_file(json, "environment")
    from mha2mla.eval.report import print_values, write_json

    environment = collect_environment()
    print_values(environment)
    write_json(record, kind="environment", rows=[environment])


def _show(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    *,
    title: str,
    kind: str,
    json: Path | None,
    all_rows: Sequence[Mapping[str, Any]] | None = None,
    note: str = "",
    **fields: Any,
) -> None:
    """Prints rows above the environment, and writes them, or ``all_rows`` that they summarise, to ``json``."""
    from mha2mla.eval.report import print_table, write_json

    environment = collect_environment()
    print_table(rows, title=title, columns=columns, caption=note + describe_environment(environment))
    write_json(json, kind=kind, rows=rows if all_rows is None else all_rows, environment=environment, **fields)


def _check_models(
    source: str | None,
    converted: str | None,
    random_weights: str | None,
    preset: str | None,
    target: Mapping[str, Any],
    shapes: Mapping[str, Any],
) -> None:
    """Raises ValueError unless models are given in one way, and no option that would change nothing beside them."""
    models = {"SOURCE and CONVERTED": source, "--random-weights": random_weights, "--preset": preset}
    given = [name for name, value in models.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"models are given by {', '.join(given) or 'nothing'}; expected one of {'; '.join(models)}")
    if source is not None and converted is None:
        raise ValueError(f"CONVERTED is not given beside SOURCE {source!r}; expected the converted checkpoint")
    unused = ({} if random_weights else target) | (shapes if preset else {})
    if extra := [flag(name) for name, value in unused.items() if value is not None]:
        raise ValueError(
            f"{', '.join(extra)} is given beside {given[0]}; expected without, since it would change nothing"
        )
