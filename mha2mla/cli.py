"""The command line: each verb is a thin call of a public function."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from mha2mla.environment import installed_version
from mha2mla.streams import forgiving_streams
from mha2mla.verbs import (
    Device,
    Dtype,
    check_kernels,
    demo,
    env,
    eval_latency,
    eval_quality,
    eval_tasks,
    inspect_checkpoint,
    plot,
    tune,
)

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

    mha2mla.convert(
        source,
        destination,
        recipe,
        device=device,
        dtype=None if dtype is None else getattr(torch, dtype),
        overwrite=overwrite,
        resume=resume,
    )
    inspect_checkpoint(destination)


VERBS: dict[str, Callable[..., int | None]] = {
    "eval quality": eval_quality,
    "eval tasks": eval_tasks,
    "eval latency": eval_latency,
    "check kernels": check_kernels,
    "tune": tune,
    "demo": demo,
    "inspect": inspect_checkpoint,
    "plot": plot,
    "env": env,
}
GROUPS = {
    "eval": "Measures a converted checkpoint against its source.",
    "check": "Checks this machine's kernels against float64.",
}


def build_parser() -> ArgumentParser:
    """The parser of ``mha2mla``; ``eval`` and ``check`` have verbs of their own."""
    parser = _parser("Turns MHA/GQA checkpoints into MLA ones, and measures them.", prog="mha2mla")
    parser.add_argument("--version", action="version", version=f"mha2mla {installed_version() or '(not installed)'}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subcommands(required=True, dest="verb")
    verbs.add_subcommand("convert", _convert_parser(), help=_first_line(convert))
    kinds = {}
    for name, function in VERBS.items():
        group, _, kind = name.rpartition(" ")
        if group and group not in kinds:
            inner = _parser(GROUPS[group])
            verbs.add_subcommand(group, inner, help=GROUPS[group])
            kinds[group] = inner.add_subcommands(required=True, dest="kind")
        kinds.get(group, verbs).add_subcommand(kind, _function_parser(function), help=_first_line(function))
    return parser


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


def _function_parser(function: Callable[..., int | None]) -> ArgumentParser:
    """A parser with an argument per parameter: positional without a default, a ``--flag`` with one.

    Lists of texts follow their flag, which may be given several times.
    """
    parser = _parser(inspect.getdoc(function).partition("\n\nArgs:")[0])
    texts, hints = _argument_help(function), typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        flag, text = "--" + name.replace("_", "-"), texts[name]
        if parameter.default is inspect.Parameter.empty:
            parser.add_argument(name, type=hints[name], help=text)
        elif hints[name] is bool:
            parser.add_argument(flag, action="store_true", help=text)
        elif hints[name] == list[str] | None:
            parser.add_argument(flag, type=str, nargs="+", action="extend", help=_with_default(text, None))
        else:
            text = _with_default(text, parameter.default)
            parser.add_argument(flag, type=hints[name], default=parameter.default, help=text)
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
    names = (presets.AUTO, *presets.PRESETS)
    text = _with_default(f"where all other keys come from: one of {', '.join(names)}", presets.AUTO)
    keys.add_argument("--preset", type=Literal[names] | None, default=None, help=text)
    for stage in recipe.STAGES.values():
        texts, hints = _argument_help(stage), typing.get_type_hints(stage)
        for field in fields(stage):
            # None stands for "not given", so that only what was given overrides the file.
            key = stage.prefix + field.name
            text = _with_default(texts[field.name], None if presets.sets(key) else field.default)
            keys.add_argument(_flag(key), type=hints[field.name] | None, default=None, help=text)
    return parser


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _recipe(arguments: Namespace) -> dict[str, Any]:
    """The keys of the file and of the flags, as ``mha2mla.convert`` takes them."""
    from mha2mla.conversion.presets import with_keys
    from mha2mla.conversion.recipe import KEYS, recipe_file

    given = {key: arguments[key] for key in ("preset", *KEYS)}
    given = {key: value for key, value in given.items() if value is not None}
    return with_keys(recipe_file(arguments.recipe) if arguments.recipe else {}, given)


def _run(arguments: Namespace) -> int:
    verb, chosen = arguments.verb, arguments[arguments.verb]
    if verb == "convert":
        recipe = _recipe(chosen)
        convert(chosen.source, chosen.destination, recipe, chosen.device, chosen.dtype, chosen.overwrite, chosen.resume)
        return 0
    if verb in GROUPS:
        verb, chosen = f"{verb} {chosen.kind}", chosen[chosen.kind]
    return VERBS[verb](**chosen.as_dict()) or 0


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


if __name__ == "__main__":
    sys.exit(main())
