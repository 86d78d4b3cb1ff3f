"""The folder that a conversion makes: held by a lock, worked on under another name, and renamed when it is complete."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mha2mla.checkpoints import CONFIG_FILE, model_type
from mha2mla.conversion.result.card import CARD_FILE, PLOT_FILE, RECORD_FILE
from mha2mla.conversion.result.writer import DestinationError, is_folder, remove
from mha2mla.conversion.source.checkpoint import INDEX_FILE
from mha2mla.conversion.source.files import is_companion
from mha2mla.files import sync, try_to_write
from mha2mla.modeling.config import CODE_FILES

WORK_FOLDER = "work"
_SHARD = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
_FILES = frozenset({CONFIG_FILE, INDEX_FILE, CARD_FILE, PLOT_FILE, RECORD_FILE, *CODE_FILES})
_MOST_LISTED = 5


def check_destination(destination: str | os.PathLike[str], source: Path | None, *, overwrite: bool) -> None:
    """Refuses a destination before any work; changes nothing.

    Args:
        source: its folder; None: not fetched yet.

    Raises:
        DestinationError: it is the current folder or holds it, is the source or lies in it (or the other way round),
            may not be replaced (:func:`check_replaceable`), or cannot be written.
    """
    name, path = os.fspath(destination), Path(destination)
    here, there = path.resolve(), None if source is None else source.resolve()
    current = Path.cwd()
    if name in ("", ".") or here == current or here in current.parents:
        raise DestinationError(
            f"destination {name!r} is the current folder, or holds it; expected the name of a folder to make"
        )
    if there is not None and (here == there or there in here.parents or here in there.parents):
        raise DestinationError(f"destination {name!r} and source {str(source)!r} overlap; expected another folder")
    check_replaceable(path, overwrite=overwrite)
    with _named(path):
        try_to_write(here)


def check_replaceable(destination: Path, *, overwrite: bool) -> None:
    """Refuses what is there already, unless it may be replaced.

    Raises:
        DestinationError: it is a file, exists without ``overwrite``, is neither empty nor a converted checkpoint, holds
            what no conversion writes, or is a mount point or read-only.
    """
    if not os.path.lexists(destination):
        return
    if not destination.is_dir():
        raise DestinationError(f"destination {str(destination)!r} is a file; expected a folder name")
    if not overwrite:
        raise DestinationError(f"destination {str(destination)!r} exists; expected a new folder, or overwrite=True")
    if any(destination.iterdir()) and not is_converted(destination):
        raise DestinationError(
            f"destination {str(destination)!r} is neither empty nor a converted checkpoint; overwrite=True replaces"
            " nothing else: remove it yourself, or take another name"
        )
    if others := _foreign(destination):
        more = f" and {len(others) - _MOST_LISTED} more" if len(others) > _MOST_LISTED else ""
        raise DestinationError(
            f"destination {str(destination)!r} holds {', '.join(others[:_MOST_LISTED])}{more}, which no conversion"
            " writes and overwrite=True would remove: move them, or take another name"
        )
    if os.path.ismount(destination.resolve()) or not os.access(destination, os.R_OK | os.W_OK | os.X_OK):
        raise DestinationError(
            f"destination {str(destination)!r} is a mount point or read-only, which cannot be replaced; expected"
            " another folder, such as one inside it"
        )


def is_written_by_conversion(name: str) -> bool:
    """True if a conversion may write a file of that name, relative to its folder."""
    return name in _FILES or _SHARD.fullmatch(name) is not None or is_companion(name)


def _foreign(folder: Path) -> list[str]:
    """Names in a folder under which something lies that no conversion writes: a file, a link, an empty folder."""
    found = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        ours = path.is_file() and not path.is_symlink() and is_written_by_conversion(name.as_posix())
        if not ours and not (is_folder(path) and any(path.iterdir())):
            found.add(name.parts[0])
    return sorted(found)


def is_converted(folder: Path) -> bool:
    try:
        return model_type(folder) == "mha2mla"
    except (OSError, ValueError, AttributeError, RecursionError):  # a config that is no JSON object
        return False


def _sibling(final: Path, what: str) -> Path:
    return final.parent / f".{final.name}.mha2mla-{what}"


@contextmanager
def temporary_folder(
    destination: Path, *, overwrite: bool, worth_keeping: Callable[[Path], bool] = lambda work: False
) -> Iterator[Path]:
    """A folder beside ``destination`` that takes its name when the block ends without an exception.

    The name is fixed (``.NAME.mha2mla-tmp``) and held by a lock: the next run clears what a killed one left, and two
    runs cannot write the same destination, which is looked at once more under the lock. With ``overwrite`` the old
    folder is moved aside, and brought back if the process dies between the two renames.

    Its folder ``work``, which the block may make, never becomes part of the destination. It is there again for the next
    run, after whatever ended this one, a kill or an exception: all else that an unfinished run wrote is removed.

    Args:
        worth_keeping: whether what an exception leaves of ``work`` is of use to another run.

    Raises:
        DestinationError: another process is writing the same destination, which cannot be written or may not be
            replaced.
    """
    final = destination.resolve()
    made = [folder for folder in (final.parent, *final.parent.parents) if not folder.exists()]
    try:
        with _named(destination):
            final.parent.mkdir(parents=True, exist_ok=True)
        with _lock(_sibling(final, "lock"), destination):
            yield from _worked_on(final, destination, overwrite, worth_keeping)
    finally:
        for folder in made:  # innermost first; a folder that is not empty is of use
            try:
                folder.rmdir()
            except OSError:
                break


def _worked_on(
    final: Path, destination: Path, overwrite: bool, worth_keeping: Callable[[Path], bool]
) -> Iterator[Path]:
    temporary, old, done = (_sibling(final, what) for what in ("tmp", "old", "done"))
    work = temporary / WORK_FOLDER
    if is_folder(old) and not os.path.lexists(final):
        old.rename(final)  # its replacement never came
    check_replaceable(final, overwrite=overwrite)
    with _named(destination):
        remove(old)
        if is_folder(done) and is_folder(temporary) and not os.path.lexists(work):
            done.rename(work)  # killed between the two last renames
        remove(done)
        if not is_folder(temporary):
            remove(temporary)  # a planted link is not followed
        temporary.mkdir(exist_ok=True)
        _clear(temporary)
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            if path != work and work not in path.parents:
                sync(path)
        check_replaceable(final, overwrite=overwrite)
        if is_folder(work):
            work.rename(done)
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        sync(final.parent)
    except BaseException:
        if is_folder(old) and not os.path.lexists(final):
            old.rename(final)
        if is_folder(temporary) and is_folder(done):
            done.rename(work)
        if is_folder(work) and worth_keeping(work):
            _clear(temporary)
        else:
            remove(temporary)
        raise
    for path in (old, done):
        remove(path)


def _clear(temporary: Path) -> None:
    for path in list(temporary.iterdir()):
        if path.name != WORK_FOLDER or not is_folder(path):
            remove(path)


@contextmanager
def _named(destination: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DestinationError(f"destination {str(destination)!r} cannot be written: {error}") from error


@contextmanager
def _lock(path: Path, destination: Path) -> Iterator[None]:
    while True:
        with _named(destination):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise DestinationError(f"another process is writing destination {str(destination)!r}") from error
        # The holder unlinks the file: a lock on an unlinked file excludes no other process.
        if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
            break
        os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
