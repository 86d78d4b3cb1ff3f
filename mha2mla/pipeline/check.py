"""First stage: everything about a conversion that can be refused before any work. Fast; writes nothing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mha2mla.checkpoints import CheckpointError, check_path, find_checkpoint
from mha2mla.conversion.calibration.blocks import Windows, calibration_lengths, check_length, listed, nearest_length
from mha2mla.conversion.calibration.texts import check_text
from mha2mla.conversion.calibration.windows import checked_windows, evaluation_windows, named_in_errors
from mha2mla.conversion.destination import check_destination
from mha2mla.conversion.extension import CalibrationSource
from mha2mla.conversion.families import SourceSpec
from mha2mla.conversion.presets import AUTO
from mha2mla.conversion.recipe import Recipe, normalize_keys
from mha2mla.conversion.source.opening import OpenedFolder, Source, open_source
from mha2mla.conversion.source.streaming import StreamedModel
from mha2mla.environment import compute_device, named_dtype
from mha2mla.terminal import Span

EVALUATION_TEXT = "builtin:prose"
EVALUATION_TOKENS = 2048
LONG_EVALUATION_TEXT = "builtin:stdlib"  # where windows must be longer than those tokens
RESUME = ("auto", "never")
_PATH, _FLAG = ((str, os.PathLike), "a path"), (bool, "True or False")
_TEXT = "the name of a text or token windows"
_KINDS: Mapping[str, tuple[Any, str]] = {
    "source": _PATH,
    "destination": _PATH,
    "evaluation": ((str, os.PathLike, torch.Tensor), _TEXT),
    "calibration": ((str, os.PathLike, torch.Tensor, list, tuple, type(None)), _TEXT),
    "overwrite": _FLAG,
    "progress": ((bool, Span), "True or False"),
}
_LEAST = {"spill_bytes": 0, "max_shard_bytes": 0, "evaluation_tokens": 2}


@dataclass(frozen=True)
class Arguments:
    """Arguments of ``convert``, under the names that it documents.

    Attributes:
        recipe: as it was given, or its keys in one flat dict, the preset among them.

    Raises:
        ValueError: one of them is of a wrong kind, by name.
    """

    source: str | os.PathLike[str]
    destination: str | os.PathLike[str]
    recipe: Recipe | Mapping[str, Any]
    calibration: str | Windows | None
    evaluation: str | torch.Tensor
    evaluation_tokens: int
    device: str | torch.device | None
    dtype: torch.dtype | None
    compute_dtype: torch.dtype
    overwrite: bool
    resume: str
    progress: bool | Span
    spill_bytes: int
    max_shard_bytes: int

    def __post_init__(self) -> None:
        if self.resume not in RESUME:
            raise ValueError(f"resume is {self.resume!r}; expected one of {', '.join(map(repr, RESUME))}")
        for name in ("dtype", "compute_dtype"):
            value = getattr(self, name)
            if value is not None or name != "dtype":
                object.__setattr__(self, name, named_dtype(value, name))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r:.80}; expected an int of at least {least}")
        for name, (kinds, expected) in _KINDS.items():
            if not isinstance(getattr(self, name), kinds):
                raise ValueError(f"{name} is {getattr(self, name)!r:.80}; expected {expected}")
        for name in ("source", "destination"):  # else a folder named "~" is made here
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))

    @classmethod
    def with_keys(cls, recipe_keys: Mapping[str, Any], **given: Any) -> Arguments:
        """The arguments ``given``, with ``recipe_keys`` in the recipe.

        Raises:
            ValueError: as :func:`merge_keys`; or as above.
        """
        if isinstance(given["calibration"], Mapping | CalibrationSource):  # the recipe's stage of that name
            recipe_keys, given["calibration"] = {**recipe_keys, "calibration": given["calibration"]}, None
        recipe = merge_keys(given["recipe"], given["preset"], recipe_keys, others=given)
        return cls(**{name: value for name, value in given.items() if name != "preset"} | {"recipe": recipe})

    def written_dtype(self, opened: OpenedFolder) -> torch.dtype:
        """Dtype of the converted projections: the one that was asked for, else the source's."""
        return self.dtype or opened.dtype

    def source_name(self, folder: Path) -> str:
        """Name that the caller gave the source, which is in ``folder``: a hub id, or a folder's last part."""
        return folder.name if Path(self.source).exists() else str(self.source)

    def say(self, text: str) -> None:
        """Writes to standard error, where there is one: a closed stream is no reason to lose a conversion."""
        if self.progress:
            with suppress(OSError, ValueError, AttributeError):
                tqdm.write(text, file=sys.stderr)


@dataclass(frozen=True)
class HeldOut:
    """Text that source and result are compared on.

    Attributes:
        text: its name, of a file without its folder.
        tokens: int64 [windows, length].
    """

    text: str
    tokens: torch.Tensor

    @property
    def work(self) -> int:
        """Relative time of a comparison: attention takes half of it in windows of 4,096 tokens (SmolLM2-135M, CPU)."""
        return self.tokens.numel() * (4096 + self.tokens.shape[1])

    @classmethod
    def of(cls, opened: OpenedFolder, text: str | torch.Tensor, length: int, tokens: int) -> HeldOut:
        name = text.rpartition("/")[2] if isinstance(text, str) else "token windows of the caller"
        return cls(name, evaluation_windows(opened, text, length=length, tokens=tokens))


@dataclass(frozen=True)
class Plan:
    """A conversion after all refusals and before any work.

    Attributes:
        recipe: with its preset named.
        preset: which one, why, and the keys that were changed from it.
        model: the source, streamed.
        calibration: text by name or token windows; None where nothing depends on them.
        held_out: in short windows, and in one of the longest length where any text was calibrated on.
        notes: for people, once.
    """

    arguments: Arguments
    opened: Source
    recipe: Recipe
    preset: str
    model: StreamedModel
    calibration: str | CalibrationSource | Windows | None
    lengths: tuple[int, ...]
    held_out: tuple[HeldOut, ...]
    notes: tuple[str, ...]

    @property
    def spec(self) -> SourceSpec:
        return self.opened.spec

    @property
    def destination(self) -> Path:
        return Path(self.arguments.destination)


def check(arguments: Arguments, folder: Path, recipe: Recipe, why: str) -> Plan:
    """Refuses what cannot be converted as it was asked for.

    Raises:
        UnsupportedSourceError, CheckpointError, DestinationError, ValueError: as ``convert``.
    """
    device = compute_device(arguments.device)
    changed = ", ".join(f"{name}={value!r}" for name, value in recipe.for_records().changes().items())
    check_destination(arguments.destination, folder, overwrite=arguments.overwrite)
    opened = open_source(folder, longrope_table=recipe.rope.longrope_table)
    calibration = _calibration(arguments, recipe, opened)
    model = opened.model(device, arguments.compute_dtype)
    lengths = _lengths(opened, recipe, calibration)
    for name, given in (("calibration", calibration), ("evaluation", arguments.evaluation)):
        for windows in () if given is None or isinstance(given, str | CalibrationSource) else listed(given):
            if windows.ndim == 2:  # others are refused where they are read
                check_length(opened.spec, windows.shape[1], f"{name} has windows of {windows.shape[1]} tokens")
    held_out, notes = _held_out(arguments, opened, lengths, with_long=calibration is not None)
    return Plan(
        arguments=arguments,
        opened=opened,
        recipe=recipe,
        preset=why + (f"; with {changed}" if changed else ""),
        model=model,
        calibration=calibration,
        lengths=lengths,
        held_out=held_out,
        notes=(f"preset: {why}", *notes, *_disk_note(model, Path(arguments.destination))),
    )


def _disk_note(source: StreamedModel, destination: Path) -> list[str]:
    """A note where fewer bytes are free than the source's weights take: a full disk may end a run after hours."""
    there = destination.resolve()
    free = shutil.disk_usage(next(place for place in (there, *there.parents) if place.exists())).free
    size = sum(source.source.header(name).nbytes for name in source.expected_names())
    if free >= size:
        return []
    few, many = f"{free / 1e9:.3g} GB are free at the destination", f"the source's weights take {size / 1e9:.3g} GB"
    return [f"disk: {few}, {many}; mha2mla plan predicts what a conversion takes"]


def merge_keys(
    recipe: Recipe | Mapping[str, Any] | None, preset: str | None, keys: Mapping[str, Any], others: Iterable[str] = ()
) -> Recipe | dict[str, Any]:
    """The recipe of ``convert``'s arguments: as it was given, or its keys in one flat dict, the preset among them.

    Args:
        others: names that are valid beside keys, for messages.

    Raises:
        ValueError: no recipe, two presets, an unknown key, or one that is given twice.
    """
    if not isinstance(recipe, Recipe | Mapping | None):
        raise ValueError(f"recipe is a {type(recipe).__name__}; expected a Recipe or a mapping of its keys")
    if isinstance(recipe, Recipe):
        if given := normalize_keys(keys, others=others):
            raise ValueError(f"{', '.join(given)} is given beside a Recipe; expected it in the recipe, or a mapping")
        merged, named = recipe, recipe.preset
    else:
        merged = normalize_keys(recipe or {}, keys, others=others)
        named = merged.get("preset", AUTO)
        merged["preset"] = named if preset is None else preset
    if preset not in (None, named) and named != AUTO:
        raise ValueError(f"preset is {preset!r} beside a recipe of preset {named!r}; expected one of them")
    return merged


def _calibration(arguments: Arguments, recipe: Recipe, opened: Source) -> str | CalibrationSource | Windows | None:
    """The text of the recipe's statistics, where there are any; refuses a target that does not fit the source."""
    spec = opened.spec
    if recipe.searches_layer_ranks:
        recipe.geometry(spec)
    elif not any(map(recipe.needs_calibration, recipe.geometries(spec))):
        return None
    text = recipe.calibration_text if arguments.calibration is None else arguments.calibration
    if isinstance(text, str):
        with named_in_errors("calibration", text):
            check_text(text)  # before the source writes text of its own
    elif not isinstance(text, CalibrationSource):
        if not listed(text):
            raise ValueError(f"calibration is {text!r}; expected {_TEXT}")
        for windows in listed(text):
            checked_windows(windows, "calibration", opened)
    return text


def _lengths(opened: Source, recipe: Recipe, calibration: str | CalibrationSource | Windows | None) -> tuple[int, ...]:
    if calibration is None or isinstance(calibration, str | CalibrationSource):
        asked = "auto" if calibration is None else recipe.calibration.lengths
        return calibration_lengths(opened.spec, asked, getattr(opened.config, "max_position_embeddings", None))
    return tuple(sorted({windows.shape[-1] for windows in listed(calibration)}))


def _held_out(
    arguments: Arguments, opened: Source, lengths: tuple[int, ...], *, with_long: bool
) -> tuple[tuple[HeldOut, ...], list[str]]:
    """Text in short windows, in one long one where any was calibrated on, and why there is none."""
    text, tokens = arguments.evaluation, arguments.evaluation_tokens
    length = nearest_length(opened.spec, min(lengths[0], tokens))
    if text == EVALUATION_TEXT and length > EVALUATION_TOKENS:
        text = LONG_EVALUATION_TEXT
    short = HeldOut.of(opened, text, length, tokens)
    long_text = LONG_EVALUATION_TEXT if text == EVALUATION_TEXT else text
    if not with_long or not isinstance(long_text, str) or lengths[-1] <= length:
        return (short,), []
    try:
        return (short, HeldOut.of(opened, long_text, lengths[-1], lengths[-1])), []
    except ValueError as error:  # long enough for short windows, and no reason to refuse a conversion
        return (short,), [f"not compared with the source in a window of {lengths[-1]} tokens: {error}"]


def source_folder(source: str | os.PathLike[str]) -> Path:
    """The folder of that path, or of a hub id, which is downloaded.

    Raises:
        CheckpointError: there is none.
        ValueError: the path is empty.
    """
    check_path(source, "source")
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    try:
        name = find_checkpoint(source, "source")
    except FileNotFoundError as error:
        raise CheckpointError(str(error)) from error
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Mistral's repositories hold the weights a second time, under names of another library.
        unread = ["*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.h5", "consolidated*"]
        return Path(snapshot_download(name, ignore_patterns=unread))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise CheckpointError(f"source {name!r} is no folder and cannot be fetched from the hub: {error}") from error
