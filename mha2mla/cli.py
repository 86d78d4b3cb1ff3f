"""The command line: parsers made from the signatures and docstrings of the verbs. Imports no torch: --help is quick."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal, NoReturn

import yaml

from mha2mla import kernel_verbs, latency_verb, loop_verbs, verbs
from mha2mla.checkpoints import shorten
from mha2mla.conversion import presets, recipe
from mha2mla.environment import installed_version
from mha2mla.terminal import forgiving_streams

# What a user can put right: bad arguments, missing files, an extra that is not installed. Anything else is a fault of
# ours and keeps its traceback.
USER_ERRORS = (ValueError, OSError, ImportError)

VERBS: dict[str, Callable[..., int | None]] = {
    "convert": verbs.convert,
    "eval quality": verbs.eval_quality,
    "eval tasks": verbs.eval_tasks,
    "eval latency": latency_verb.eval_latency,
    "check kernels": kernel_verbs.check_kernels,
    "generate": loop_verbs.generate,
    "chat": loop_verbs.chat,
    "demo": verbs.demo,
    "inspect": verbs.inspect_checkpoint,
    "plot": verbs.plot,
    "export": verbs.export,
    "env": verbs.env,
}
_DEBUG = "show the traceback of an error"
GROUPS = {
    "eval": "Measures a converted checkpoint against its source.",
    "check": "Checks this machine's kernels against float64.",
}


class _Formatter(argparse.HelpFormatter):
    """Wraps paragraphs, but for those with indented lines: commands, to be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(part if "\n  " in part else fill(part, width, indent) for part in text.split("\n\n"))


class _Parser(argparse.ArgumentParser):
    """Says a mistake in one line."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"mha2mla: error: {message} ({self.prog} --help lists what there is)\n")


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of ``mha2mla``, by the empty text, and that of every verb, by the verb's words."""
    root = _Parser(prog="mha2mla", description="Turns MHA/GQA checkpoints into MLA ones, and measures them.")
    version = f"mha2mla {installed_version() or '(not installed)'}"
    root.add_argument("--version", action="version", version=version, help="show the version and exit")
    root.add_argument("--debug", action="store_true", help=_DEBUG)
    found = {"": root}
    below = {"": root.add_subparsers(required=True, dest="verb", metavar="VERB")}
    for name, function in VERBS.items():
        group, _, kind = name.rpartition(" ")
        if group not in below:
            inner = below[""].add_parser(group, description=GROUPS[group], help=GROUPS[group])
            below[group] = inner.add_subparsers(required=True, dest="kind", metavar="KIND")
        text = inspect.getdoc(function)
        parser = below[group].add_parser(kind, help=text.splitlines()[0], **_description(text))
        _add_arguments(parser, function)
        found[name] = parser
    return found


def _description(text: str) -> dict[str, str]:
    """What stands above and below the arguments: the docstring before ``Args:``, and its ``Example:``."""
    example = textwrap.dedent(text.partition("Example:\n")[2])
    return {"description": text.partition("\n\nArgs:")[0], "epilog": "example:\n" + textwrap.indent(example, "  ")}


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


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _add_arguments(parser: argparse.ArgumentParser, function: Callable[..., int | None]) -> None:
    """An argument per parameter: positional without a default, a ``--flag`` with one, recipe keys for ``**keys``.
    Those before a slash that have a default are positional and may be left out.

    Lists of texts follow their flag, which may be given several times; lists of numbers are joined by commas.
    """
    texts, hints = _argument_help(function), typing.get_type_hints(function)
    positional = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            _add_recipe_keys(parser)
        elif parameter.default is parameter.empty:
            positional.append(name.upper())
            parser.add_argument(name, metavar=name.upper(), help=_with_default(texts[name], None))
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(f"[{name.upper()}]")
            parser.add_argument(name, metavar=name.upper(), nargs="?", help=_with_default(texts[name], None))
        elif hints[name] is bool:
            parser.add_argument(_flag(name), action="store_true", help=_with_default(texts[name], None))
        else:
            text = _with_default(texts[name], parameter.default)
            parser.add_argument(_flag(name), default=parameter.default, help=text, **_kind(name, hints[name]))
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=_DEBUG)
    parser.usage = " ".join([parser.prog, *positional, "[options]"])


def _add_recipe_keys(parser: argparse.ArgumentParser) -> None:
    """A flag per key of a recipe, which refuses bad values itself, in the words that it has for YAML and Python."""
    order = "flags win over --recipe, the file over the preset; in brackets what auto takes on any machine"
    keys = parser.add_argument_group("recipe", order)
    text = _with_default("where all other keys come from", presets.AUTO)
    keys.add_argument("--preset", default=None, metavar=_shown("preset", presets.PresetName), help=text)
    for stage in recipe.STAGES.values():
        texts, hints = _argument_help(stage), typing.get_type_hints(stage)
        for field in fields(stage):
            # None stands for "not given", so that only what was given overrides the file.
            key, hint = stage.prefix + field.name, hints[field.name]
            text = _with_default(texts[field.name], None if presets.sets(key) else field.default)
            read = str if hint is str else _number_or_word
            keys.add_argument(
                _flag(key), dest=key, type=read, default=None, metavar=_shown(field.name, hint), help=text
            )


def _kinds(hint: Any) -> list[Any]:
    """The members of a union but None."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [each for each in typing.get_args(hint) if each is not type(None)] if union else [hint]


def _shown(name: str, hint: Any) -> str:
    """What values look like: those that there are, or their kind."""
    kinds = {int: "N", float: "NUMBER", list[int]: "N,N,…", bool: "{true,false}"}
    return "|".join(
        "{" + ",".join(map(str, typing.get_args(kind))) + "}"
        if typing.get_origin(kind) is Literal
        else kinds.get(kind, name.upper())
        for kind in _kinds(hint)
    )


def _kind(name: str, hint: Any) -> dict[str, Any]:
    """How argparse reads a value of that type."""
    kinds = _kinds(hint)
    shown = {"metavar": _shown(name, hint)}
    if typing.get_origin(kinds[0]) is list and kinds != [list[int]]:
        words = typing.get_args(kinds[0])[0]
        choices = {} if words is str else {"choices": typing.get_args(words)}
        return {"nargs": "+", "action": "extend", "metavar": _shown(name, words)} | choices
    if typing.get_origin(kinds[0]) is Literal:
        return {"choices": typing.get_args(kinds[0])} | shown
    return {"type": _whole_numbers if list[int] in kinds else kinds[0]} | shown


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.strip("[]").split(",")]
    except ValueError as error:
        message = f"expected whole numbers joined by commas, such as 1,8, and not {text!r}"
        raise argparse.ArgumentTypeError(message) from error


def _number_or_word(text: str) -> Any:
    """A value as YAML has it; lists need no brackets."""
    if re.fullmatch(r"\d+e[+-]?\d+", text):  # which YAML takes for a word
        return float(text)
    try:
        return yaml.safe_load(f"[{text}]" if "," in text and not text.startswith("[") else text)
    except yaml.YAMLError:
        return text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb. Returns 0; 1 after a check that failed; 2 after a user's mistake, said in one line on stderr.

    What a verb did does not fail because nobody reads what it prints, or because the terminal has no such letters.
    """
    with forgiving_streams():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    by_verb = parsers()
    found, unknown = by_verb[""].parse_known_args(None if argv is None else list(argv))
    arguments = vars(found)
    verb = " ".join(filter(None, (arguments.pop("verb"), arguments.pop("kind", None))))
    if unknown:
        by_verb[verb].error(f"unrecognized arguments: {' '.join(unknown)}")
    debug = arguments.pop("debug")
    try:
        function = VERBS[verb]
        parameters = inspect.signature(function).parameters.values()
        places = [arguments.pop(each.name) for each in parameters if each.kind is each.POSITIONAL_ONLY]
        return function(*places, **arguments) or 0
    except USER_ERRORS as error:
        if debug:
            raise
        message = _in_flags(shorten(str(error))) or type(error).__name__
        print(f"mha2mla: error: {message} (--debug shows where)", file=sys.stderr)
        return 2


def _in_flags(message: str) -> str:
    """A message of the Python functions as somebody needs it who typed flags: ``--overwrite``, not overwrite=True."""
    message = re.sub(r"\b([a-z_]+)=True\b", lambda found: _flag(found[1]), message)
    return re.sub(r"\b([a-z_]+)='([\w-]+)'", lambda found: f"{_flag(found[1])} {found[2]}", message)


if __name__ == "__main__":
    sys.exit(main())
