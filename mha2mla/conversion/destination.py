"""The folder that a conversion makes: held by a lock, filled under another name shard by shard, renamed when whole."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mha2mla.checkpoints import CONFIG_FILE, CheckpointError, model_type, read_json
from mha2mla.conversion.card import CARD_FILE, PLOT_FILE, RECORD_FILE
from mha2mla.conversion.source.files import INDEX_FILE, SINGLE_FILE, is_companion
from mha2mla.files import sync, try_to_write
from mha2mla.modeling.config import CODE_FILES
from mha2mla.modeling.stored_tensors import is_finite

DEFAULT_SHARD_BYTES = 1 << 30
WORK_FOLDER = "work"
_SHARD = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
_FILES = frozenset({CONFIG_FILE, INDEX_FILE, CARD_FILE, PLOT_FILE, RECORD_FILE, *CODE_FILES})
_MOST_LISTED = 5


def check_destination(destination: str | os.PathLike[str], source: Path | None, *, overwrite: bool | None) -> None:
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


def check_replaceable(destination: Path, *, overwrite: bool | None) -> None:
    """Refuses what is there already, unless it may be replaced.

    Args:
        overwrite: None: the command has no such option.

    Raises:
        DestinationError: it is a file, exists without ``overwrite``, is neither empty nor a converted checkpoint, holds
            what no conversion writes, or is a mount point or read-only.
    """
    if not os.path.lexists(destination):
        return
    if not destination.is_dir():
        raise DestinationError(f"destination {str(destination)!r} is a file; expected a folder name")
    if not overwrite:
        other = "" if overwrite is None else ", or overwrite=True"
        raise DestinationError(f"destination {str(destination)!r} exists; expected a new folder{other}")
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
    """Names in a folder under which something lies that no conversion writes: a file, a link, an empty folder; and
    files that could have come with a source, but by the folder's record did not."""
    found, came = set(), _recorded_companions(folder)
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        ours = path.is_file() and not path.is_symlink() and is_written_by_conversion(name.as_posix())
        ours = ours and (came is None or not is_companion(name.as_posix()) or name.as_posix() in came)
        if not ours and not (is_folder(path) and any(path.iterdir())):
            found.add(name.parts[0])
    return sorted(found)


def _recorded_companions(folder: Path) -> list[str] | None:
    """Companions that the record of a converted folder names; None: it names none, as those of earlier versions."""
    try:
        found = read_json(folder, RECORD_FILE).get("companions")
    except (CheckpointError, OSError):
        return None
    return found if isinstance(found, list) else None


def is_converted(folder: Path) -> bool:
    try:
        return model_type(folder) == "mha2mla"
    except (OSError, ValueError, AttributeError, RecursionError):  # a config that is no JSON object
        return False


def _sibling(final: Path, what: str) -> Path:
    return final.parent / f".{final.name}.mha2mla-{what}"


@contextmanager
def temporary_folder(
    destination: Path,
    *,
    overwrite: bool | None,
    worth_keeping: Callable[[Path], bool] = lambda work: False,
    discard: bool = False,
) -> Iterator[Path]:
    """A folder beside ``destination`` that takes its name when the block ends without an exception.

    The name is fixed (``.NAME.mha2mla-tmp``) and held by a lock: the next run clears what a killed one left, and two
    runs cannot write the same destination, which is looked at once more under the lock. With ``overwrite`` the old
    folder is moved aside, and brought back if the process dies between the two renames.

    Its folder ``work``, which the block may make, never becomes part of the destination. It is there again for the next
    run, after whatever ended this one, a kill or an exception: all else that an unfinished run wrote is removed.

    Args:
        worth_keeping: whether what an exception or a kill leaves of ``work`` is of use to another run of this command.
        discard: files in ``work`` that are of no use to this command are removed; otherwise they are refused.

    Raises:
        ResumeError: an interrupted run of another command left files in ``work``.
        DestinationError: another process is writing the same destination, which cannot be written or may not be
            replaced.
    """
    final = destination.resolve()
    made = [folder for folder in (final.parent, *final.parent.parents) if not folder.exists()]
    try:
        with _named(destination):
            final.parent.mkdir(parents=True, exist_ok=True)
        with _lock(_sibling(final, "lock"), destination):
            yield from _worked_on(final, destination, overwrite, worth_keeping, discard)
    finally:
        for folder in made:  # innermost first; a folder that is not empty is of use
            try:
                folder.rmdir()
            except OSError:
                break


def _worked_on(
    final: Path, destination: Path, overwrite: bool | None, worth_keeping: Callable[[Path], bool], discard: bool
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
    if not discard and not worth_keeping(work):
        # JSON is what the files belong to; a hidden file was cut off.
        theirs = [path for path in work.rglob("[!.]*") if path.is_file() and path.suffix != ".json"]
        if theirs:
            raise ResumeError(
                f"{work} holds {len(theirs)} files such as {min(theirs).relative_to(work)}, which another interrupted"
                " command with this destination left: repeat that command, discard them with its resume='never',"
                " or take another destination"
            )
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


class DestinationError(ValueError):
    """The destination cannot be written; the message says why."""


class ResumeError(ValueError):
    """An interrupted run's files belong to another conversion or command; the message says which."""


def is_folder(path: Path) -> bool:
    """True if ``path`` is a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def remove(path: Path) -> None:
    """Removes a folder with all that is in it, a file, or a link (and not what it leads to), if it is there."""
    if is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def file_sha256(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of a safetensors file that was just written from ``tensors``; reads its header alone."""
    with open(path, "rb") as file:
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little"))
    digest = hashlib.sha256(size + header)
    entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    for name in sorted(entries, key=lambda name: (entries[name]["data_offsets"], name)):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file of tensors that share no memory.

    Raises:
        DestinationError: the file system does not take it (full, for one); the message names the file.
    """
    try:
        path.touch()  # with the mode that the umask leaves; safetensors' own is the owner's alone
        mode = path.stat().st_mode
        save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
        path.chmod(mode)
    except (SafetensorError, OSError) as error:
        raise DestinationError(f"{path} cannot be written: {error}") from error


class ShardedWriter:
    """Tensors into ``model.safetensors``, or into numbered shards with an index when they are larger than one shard.

    Args:
        max_shard_bytes: a shard is written when the next tensor would make it larger; also what waits in memory.
    """

    def __init__(self, folder: Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._shards: list[list[str]] = []
        self._seen: set[str] = set()
        self.total_bytes = 0
        self.sha256: dict[str, str] = {}  # file name -> digest; complete after finish()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor; it is on disk when its shard is full or at ``finish``.

        Raises:
            ValueError: the name was added before, or a value is NaN or infinite.
        """
        if name in self._seen:
            raise ValueError(f"tensor {name} is written twice")
        if tensor.is_floating_point() and not is_finite(tensor):
            raise ValueError(f"tensor {name} became NaN or infinite in the conversion")
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._waiting_bytes + size > self.max_shard_bytes:
            self._flush()
        tensor = tensor.detach().cpu().contiguous()
        # A slice must not keep the larger tensor behind it alive while it waits.
        self._waiting[name] = tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()
        self._waiting_bytes += size
        self.total_bytes += size
        self._seen.add(name)

    def _shard_path(self, index: int) -> Path:
        return self.folder / f"shard-{index:05d}.safetensors"

    def _flush(self) -> None:
        path = self._shard_path(len(self._shards))
        save_tensors(self._waiting, path)
        self.sha256[path.name] = file_sha256(path, self._waiting)
        self._shards.append(list(self._waiting))
        self._waiting, self._waiting_bytes = {}, 0

    def finish(self) -> None:
        """Writes what waits, gives the shards their final names and, for several, writes the index."""
        if self._waiting:
            self._flush()
        count, weight_map = len(self._shards), {}
        for index, names in enumerate(self._shards):
            final = SINGLE_FILE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            path = self._shard_path(index)
            path.rename(self.folder / final)
            self.sha256[final] = self.sha256.pop(path.name)
            weight_map |= dict.fromkeys(names, final)
        if count == 1:
            return
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
