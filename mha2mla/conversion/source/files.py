"""The files of a source folder: regular ones inside it, and at the end of a run what they were at its beginning."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from mha2mla.checkpoints import CheckpointError, regular_file

# Files of a checkpoint beside weights and config.
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


class SourceChangedError(CheckpointError):
    """A file of the source is not what it was when the conversion began."""


def companions(folder: Path) -> list[str]:
    """Names of the files, relative to ``folder``, that belong to a checkpoint beside weights and config.

    Raises:
        CheckpointError: as :func:`regular_file`.
    """
    found = {path for pattern in _COMPANIONS for path in folder.glob(pattern)}
    names = sorted(path.relative_to(folder).as_posix() for path in found if path.suffix not in _CODE)
    return [name for name in names if not (folder / name).is_dir() and regular_file(folder, name)]


def is_companion(name: str) -> bool:
    """True if a file of that name, relative to its folder, is copied with a checkpoint."""
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
    """Identity of a file.

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
    """Says of a source that changed meanwhile that it did, whatever else that led to; nothing of that is kept.

    Args:
        discard: called where it changed.

    Raises:
        SourceChangedError: naming the file.
    """
    failed = None
    try:
        yield
    except Exception as error:
        failed = error
    try:
        check_unchanged(folder, before)
    except SourceChangedError as changed:
        discard()
        raise changed from failed
    if failed is not None:
        raise failed


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
