"""The files of a source folder: regular ones inside it, and at the end of a run what they were at its beginning."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

CONFIG_FILE = "config.json"
# What a checkpoint carries beside weights and config.
_COMPANIONS = (
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)
_CODE = (".py", ".pyc", ".so")  # code of the source's is neither run nor handed on
_RACY = 2.0  # seconds in which a file may change without its times showing it


class CheckpointError(ValueError):
    """A checkpoint is incomplete or damaged; the message names the file or the tensor."""


class SourceChangedError(CheckpointError):
    """A file of the source is not what it was when the conversion began."""


def regular_file(folder: Path, name: str) -> Path:
    """The path of a file of a checkpoint, once opening it can neither block nor lead out of the folder.

    A snapshot of the hub's cache is a folder of links into the ``blobs`` beside it; those are followed.

    Raises:
        CheckpointError: absent, no regular file (a pipe, a folder), or a path or link that leads out of ``folder``.
    """
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{name!r} leads out of {folder}; expected a file inside it")
    try:
        own, real = folder.resolve(), path.resolve(strict=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a name with a NUL in it
        raise CheckpointError(f"{path!s:.200} cannot be read: {error}") from error
    blobs = [own.parent.parent / "blobs"] if own.parent.name == "snapshots" else []
    if not any(root in real.parents for root in (own, *blobs)):
        raise CheckpointError(f"{path} is a link to {real}, which leads out of {folder}; expected a file inside it")
    if not stat.S_ISREG(real.stat().st_mode):
        raise CheckpointError(f"{path} is no regular file")
    return path


def check_folder(folder: Path) -> None:
    """Refuses a folder in which opening a file could block: other code opens files here by names of its own.

    Raises:
        CheckpointError: naming a pipe, socket or device.
    """
    for path in sorted(folder.iterdir()):
        try:
            mode = path.stat().st_mode
        except OSError:  # a link that leads nowhere cannot be opened, either
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise CheckpointError(f"{path} is no regular file")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a checkpoint.

    Raises:
        CheckpointError: as :func:`regular_file`, or the file is no JSON object.
    """
    path = regular_file(folder, name)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return values


def companions(folder: Path) -> list[str]:
    """Names of the files, relative to ``folder``, that belong to a checkpoint beside weights and config.

    Raises:
        CheckpointError: as :func:`regular_file`.
    """
    found = {path for pattern in _COMPANIONS for path in folder.glob(pattern)}
    names = sorted(path.relative_to(folder).as_posix() for path in found if path.suffix not in _CODE)
    return [name for name in names if not (folder / name).is_dir() and regular_file(folder, name)]


def is_companion(name: str) -> bool:
    """Whether a file of that name, relative to its folder, is copied with a checkpoint."""
    path = PurePath(name)
    patterns = [PurePath(pattern) for pattern in _COMPANIONS]
    return path.suffix not in _CODE and any(
        path.parent == pattern.parent and fnmatchcase(path.name, pattern.name) for pattern in patterns
    )


def copy_files(folder: Path, names: Iterable[str], destination: Path) -> None:
    """Copies files of a checkpoint.

    Raises:
        CheckpointError: as :func:`regular_file`.
    """
    for name in names:
        (destination / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(regular_file(folder, name), destination / name)


@dataclass(frozen=True)
class FileIdentity:
    """What tells a file from another one.

    Attributes:
        sha256: of its content.
        state: device, inode, size, modification and change times: while they stay, so does the content.
        settled: whether the times were old enough that a later change must show in them.
    """

    sha256: str
    state: tuple[int, ...]
    settled: bool


def identify(folder: Path, names: Iterable[str]) -> dict[str, FileIdentity]:
    """Name → identity of files of a checkpoint; reads them whole.

    Raises:
        CheckpointError: as :func:`regular_file`.
    """
    found = {}
    for name in sorted(set(names)):
        state = _state(regular_file(folder, name))
        settled = time.time_ns() - state[-1] > _RACY * 1e9
        found[name] = FileIdentity(_content_hash(folder / name), state, settled)
    return found


@contextmanager
def faults_of_the_source_named(
    folder: Path, before: dict[str, FileIdentity], discard: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Whatever a source that changes does to a conversion is said to be its doing, and nothing of that is kept.

    Args:
        discard: called where it changed.
    """
    try:
        yield
    except SourceChangedError:
        discard()
        raise
    except Exception as error:
        try:
            check_unchanged(folder, before)
        except SourceChangedError as changed:
            discard()
            raise changed from error
        raise


def check_unchanged(folder: Path, before: dict[str, FileIdentity]) -> None:
    """Compares files with what :func:`identify` found; content decides where anything else differs.

    Raises:
        SourceChangedError: naming the file.
    """
    for name, identity in before.items():
        try:
            path = regular_file(folder, name)
            if identity.settled and _state(path) == identity.state:
                continue
            same = _content_hash(path) == identity.sha256
        except (CheckpointError, OSError) as error:
            raise SourceChangedError(f"{folder / name} changed during the conversion: {error}") from error
        if not same:
            raise SourceChangedError(f"{folder / name} changed during the conversion; nothing of it can be used")


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _content_hash(path: Path) -> str:
    with open(os.path.realpath(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
