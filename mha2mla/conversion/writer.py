"""Writing a checkpoint: a locked temporary sibling of the destination, shards as they fill, one rename at the end."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mha2mla.conversion.source import INDEX_FILE, SINGLE_FILE

DEFAULT_SHARD_BYTES = 1 << 30
WORK_FOLDER = "work"


class DestinationError(ValueError):
    """The destination cannot be written; the message says why."""


def check_destination(destination: Path, source: Path, *, overwrite: bool) -> None:
    """Refuses a destination before any work.

    Raises:
        DestinationError: it is the source or lies in it (or the other way round), exists without ``overwrite``, is a
            file, or its parent folder cannot be created or written.
    """
    here, there = destination.resolve(), source.resolve()
    if here == there or there in here.parents or here in there.parents:
        raise DestinationError(
            f"destination {str(destination)!r} and source {str(source)!r} overlap; expected another folder"
        )
    if destination.exists():
        if not destination.is_dir():
            raise DestinationError(f"destination {str(destination)!r} is a file; expected a folder name")
        if not overwrite:
            raise DestinationError(f"destination {str(destination)!r} exists; expected a new folder, or overwrite=True")
    parent = here.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        probe = parent / f".{here.name}.mha2mla-probe-{os.getpid()}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise DestinationError(f"destination {str(destination)!r} cannot be written: {error}") from error


def temporary_path(destination: Path) -> Path:
    """Where ``temporary_folder`` works for ``destination``."""
    final = destination.resolve()
    return final.parent / f".{final.name}.mha2mla-tmp"


@contextmanager
def temporary_folder(
    destination: Path, *, overwrite: bool, admit: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """A folder beside ``destination`` that takes its name when the block ends without an exception.

    The name is fixed (``.NAME.mha2mla-tmp``) and held by a lock: the next run clears what a killed one left, and two
    runs cannot write the same destination. With ``overwrite`` the old folder is moved aside, and brought back if the
    process dies between the two renames.

    An error removes the folder. An interrupt (Ctrl-C) and a kill leave it; of what they leave the next run keeps the
    folder ``work``, if ``admit`` says so. It never becomes part of the destination.

    Args:
        admit: called with a ``work`` folder that is there; whether to keep it. May raise: then nothing is touched.

    Raises:
        DestinationError: another process is writing the same destination.
    """
    final = destination.resolve()
    temporary = temporary_path(destination)
    old = final.parent / f".{final.name}.mha2mla-old"
    with _lock(final.parent / f".{final.name}.mha2mla-lock", destination):
        if old.exists():
            if final.exists():
                shutil.rmtree(old)
            else:
                old.rename(final)
        work, done = temporary / WORK_FOLDER, final.parent / f".{final.name}.mha2mla-done"
        if done.exists():
            shutil.rmtree(done)
        kept = admit is not None and work.is_dir() and admit(work)
        for path in list(temporary.iterdir()) if temporary.exists() else ():
            if path == work and kept:
                continue
            if path.is_dir() and not path.is_symlink():
                path.rename(done)  # never half of it under its name
                shutil.rmtree(done)
            else:
                path.unlink()
        temporary.mkdir(exist_ok=True)
        try:
            yield temporary
            for path in temporary.rglob("*"):
                if path.is_file() and work not in path.parents:
                    _sync(path)
            if final.exists():
                if not overwrite:
                    raise DestinationError(f"destination {str(destination)!r} appeared during the conversion")
                final.rename(old)
            if work.exists():
                work.rename(done)
            temporary.rename(final)
            _sync(final.parent)
        except Exception:
            for path in (temporary, done):
                shutil.rmtree(path, ignore_errors=True)
            if old.exists() and not final.exists():
                old.rename(final)
            raise
        except BaseException:  # an interrupt: whoever wants to go on finds the work
            if not work.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        for path in (old, done):
            if path.exists():
                shutil.rmtree(path)


@contextmanager
def _lock(path: Path, destination: Path) -> Iterator[None]:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise DestinationError(f"another process is writing destination {str(destination)!r}") from error
        # The holder unlinks the file: a lock on an unlinked file would exclude nobody.
        if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
            break
        os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file of tensors that share no memory.

    Raises:
        DestinationError: the file system does not take it (full, for one); the message names the file.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    except (SafetensorError, OSError) as error:
        raise DestinationError(f"{path} cannot be written: {error}") from error


class ShardedWriter:
    """Tensors into ``model.safetensors``, or into numbered shards with an index when they are larger than one shard.

    Args:
        folder: existing folder.
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

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor; it is on disk when its shard is full or at ``finish``.

        Raises:
            ValueError: the name was added before, or a value is NaN or infinite.
        """
        if name in self._seen:
            raise ValueError(f"tensor {name} is written twice")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
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
        save_tensors(self._waiting, self._shard_path(len(self._shards)))
        self._shards.append(list(self._waiting))
        self._waiting, self._waiting_bytes = {}, 0

    def finish(self) -> None:
        """Writes what waits, gives the shards their final names and, for several, writes the index."""
        if self._waiting:
            self._flush()
        if len(self._shards) == 1:
            self._shard_path(0).rename(self.folder / SINGLE_FILE)
            return
        weight_map = {}
        for index, names in enumerate(self._shards):
            final = f"model-{index + 1:05d}-of-{len(self._shards):05d}.safetensors"
            self._shard_path(index).rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
