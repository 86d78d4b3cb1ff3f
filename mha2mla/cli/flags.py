"""Flags of the command line, by cyclopts: shared types, and a recipe's keys. Imports no torch."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Annotated, Any, Literal

import yaml
from cyclopts import Group, Parameter, Token
from docstring_parser import parse

from mha2mla.conversion import presets, recipe
from mha2mla.conversion.calibration.texts import check_text
from mha2mla.healing import settings as healing


def _whole_numbers(hint: Any, tokens: Sequence[Token]) -> list[int]:
    """Reads ``1,8``, ``1, 8`` and ``[1,8]``."""
    text = tokens[-1].value  # the last one, if the flag is repeated
    try:
        return [int(part) for part in text.strip("[]").split(",")]
    except ValueError as error:
        raise ValueError(f"expected whole numbers joined by commas, such as 1,8, and not {text!r}") from error


def _numbers(hint: Any, tokens: Sequence[Token]) -> list[float]:
    """Reads ``0.5 0.25`` and ``0.5,0.25``."""
    return [float(part) for token in tokens for part in token.value.split(",")]


SEVERAL = Parameter(consume_multiple=1)  # --text A B, or --text A --text B
Texts = Annotated[list[str] | None, SEVERAL]
Ratios = Annotated[list[float] | None, Parameter(converter=_numbers, consume_multiple=1, json_list=False)]
Numbers = Annotated[list[int] | None, Parameter(converter=_whole_numbers, n_tokens=1, json_list=False, metavar="N,N,…")]
Device = Annotated[
    str | None, Parameter(metavar="DEVICE", help="cpu, cuda, cuda:1, …; default CUDA when there is one.")
]
TrainingDevice = Annotated[
    str | None,
    Parameter(metavar="DEVICE", help="cpu, or cuda for the first GPU that is visible; default CUDA when there is one."),
]
Dtype = Literal["float32", "bfloat16", "float16"]
LoadedDtype = Annotated[
    Dtype | None, Parameter(help="of the weights; default the checkpoint's, but on CUDA bfloat16 for float32.")
]
RotaryKeyCache = Annotated[
    Literal["none", "bfloat16", "int8", "auto"] | None,
    Parameter(
        help="of a converted model in layout latent: rotary keys computed when they are read (none), kept beside the"
        " latent (bfloat16; int8, which changes predictions), or by the rule of docs/layouts-and-presets.md (auto: any"
        " of these); default its config's."
    ),
]
Json = Annotated[str | None, Parameter(metavar="FILE", help="also write what is printed to this JSON file.")]


def flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _shown(name: str, hint: Any) -> str:
    """Placeholder of a value: the allowed words, or its kind."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = {int: "N", float: "NUMBER", list[int]: "N,N,…", bool: "{true,false}"}
    return "|".join(
        "{" + ",".join(map(str, typing.get_args(kind))) + "}"
        if typing.get_origin(kind) is Literal
        else kinds.get(kind, name.upper())
        for kind in (typing.get_args(hint) if is_union else [hint])
        if kind is not type(None)
    )


def _number_or_word(hint: Any, tokens: Sequence[Token]) -> Any:
    """Reads a value as YAML does; lists need no brackets."""
    text = tokens[-1].value  # the last one, if the flag is repeated
    if re.fullmatch(r"\d+e[+-]?\d+", text):  # a word in YAML
        return float(text)
    try:
        return yaml.safe_load(f"[{text}]" if "," in text and not text.startswith("[") else text)
    except yaml.YAMLError:
        return text


def _described(settings: type) -> dict[str, str]:
    """Field of a dataclass → what its docstring says of it."""
    found = parse(settings.__doc__).params
    return {name: each.description for each in found for name in each.arg_name.split(", ")}


def _optional_flag(key: str, hint: Any, text: str, default: Any, **how: Any) -> tuple[str, Any, Any]:
    # None stands for "not given", so that only given flags override a file or a preset.
    text = re.sub(r" \(``[a-z]\w*(\.\w+)+``\)", "", " ".join(text.split()))  # modules, which a shell has not
    sentence = re.split(r"(?<=[.)])\s+(?=[A-Z*])", text.replace("``", ""))[0]
    shown = sentence + ("" if default is None else f" [default: {default}]")
    parameter = Parameter(name=flag(key), help=shown, **how)
    return key.replace(".", "__"), Annotated[hint | None, parameter], field(default=None)


def _recipe_flags() -> list[tuple[str, Any, Any]]:
    how = {"metavar": _shown("preset", presets.PresetName), "n_tokens": 1}
    found = [_optional_flag("preset", str, "gives all other keys", presets.AUTO, **how)]
    for stage in recipe.STAGES.values():
        texts, hints = _described(stage), typing.get_type_hints(stage)
        for each in fields(stage):
            key, hint = stage.prefix + each.name, hints[each.name]
            how = {"metavar": _shown(each.name, hint), "n_tokens": 1}
            how |= {} if hint is str else {"converter": _number_or_word}
            default = None if presets.is_device_dependent(key) else each.default
            found.append(_optional_flag(key, str, texts[each.name], default, **how))
    return found


def _healing_flags() -> list[tuple[str, Any, Any]]:
    texts, hints = _described(healing.Settings), typing.get_type_hints(healing.Settings)
    return [
        _optional_flag(each.name, hints[each.name], texts[each.name], None if each.default is MISSING else each.default)
        for each in fields(healing.Settings)
        if each.name != "preset"
    ]


# One field for each key of a recipe. Without __module__ cyclopts takes it for a class of the standard library.
RecipeFlags = make_dataclass("RecipeFlags", _recipe_flags(), namespace={"__module__": __name__})
# The settings of a healing beside its preset.
HealingFlags = make_dataclass("HealingFlags", _healing_flags(), namespace={"__module__": __name__})
HEALING = Group("Settings", help="Flags override the preset, which has minutes, text, windows and batches.")
RECIPE = Group(
    "Recipe",
    help="Flags override --recipe, which overrides the preset. Defaults that depend on the machine are not shown.",
)


def load_recipe(file: str | None, flags: Any) -> dict[str, Any]:
    """The keys of a YAML file and of :class:`RecipeFlags`, as ``mha2mla.convert`` takes them.

    Raises:
        ValueError: a bad key or value, no such preset, or no such calibration text.
    """
    given = {key.replace("__", "."): value for key, value in vars(flags).items() if value is not None}
    asked = presets.with_keys(recipe.recipe_file(file) if file else {}, given)
    preset = asked.get("preset", presets.AUTO)
    keys = {key: value for key, value in asked.items() if key != "preset"}
    stages = recipe.stages_of(presets.NO_PRESET if preset == presets.AUTO else preset, keys)
    if isinstance(text := stages["calibration"].text, str):
        check_text(text)
    return asked
