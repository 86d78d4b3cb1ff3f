"""Atomic writes: files that are whole and on the disk before they have their names; and whether one can be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def sync(path: Path) -> None:
    """Returns when a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def try_to_write(target: Path) -> None:
    """Makes, and removes again, a file beside ``target``, in the nearest folder above it that exists.

    Raises:
        OSError: that failed.
    """
    folder = next(each for each in target.parents if each.exists())
    with tempfile.NamedTemporaryFile(prefix=f".{target.name}.", suffix=".part", dir=folder):
        pass


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """A file that has its name only when it is whole and on the disk; ``write`` is given another name for it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)  # mkstemp's is for its owner only
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
