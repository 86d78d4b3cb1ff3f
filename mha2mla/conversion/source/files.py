"""The files of a source folder, read-only: tensors one at a time, companions, and whether any changed during a run."""

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
from typing import Any

import torch

from mha2mla.checkpoints import CheckpointError, read_json, regular_file
from mha2mla.modeling.stored_tensors import StoredTensor, is_finite, open_shard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Files of a checkpoint beside weights and config.
TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*")
_COMPANIONS = (*TOKENIZER_FILES, "merges.txt", "special_tokens_map.json", "added_tokens.json")
_COMPANIONS += ("chat_template*", "additional_chat_templates/*", "generation_config.json", "LICENSE*", "NOTICE*")
_CODE = (".py", ".pyc", ".so")  # code of the source's is neither run nor handed on
_RACY = 2.0  # seconds in which a file may change without its times showing it


class CheckpointReader:
    """Tensors of a safetensors checkpoint by name.

    Of a folder with both a single file and an index, transformers reads the single file, and so does this. Every
    shard's header is read at construction, so that a missing or truncated shard shows before any work. Files are
    mapped read-only, stay open until ``release``, and what is handed out is a copy.

    Raises:
        CheckpointError: no folder, no safetensors weights, an index that is no index, a shard that is missing,
            truncated or outside the folder, or a tensor that the index promises and its shard lacks.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"source {str(self.folder)!r} is not a folder")
        self._files: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        self._kept_prefix, self._kept = None, {}
        single, index = (os.path.lexists(self.folder / name) for name in (SINGLE_FILE, INDEX_FILE))
        if not single and not index:
            others = (".bin", ".pt", ".pth", ".gguf")
            found = sorted(path.name for path in self.folder.iterdir() if path.suffix in others)
            hint = f" ({found[0]} is not read: save it as safetensors first)" if found else ""
            raise CheckpointError(f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
        promised = {} if single else _read_index(self.folder)
        self._shards = [SINGLE_FILE] if single else sorted(set(promised.values()))
        held = {shard: set(self._open(shard).keys()) for shard in self._shards}
        for shard, names in held.items():
            self._shard_of |= dict.fromkeys(names, shard)
        for name, shard in promised.items():
            if name not in held[shard]:
                raise CheckpointError(
                    f"{self.folder / INDEX_FILE} says that {name} is in {shard}, which does not hold it"
                )
        self._shard_of |= promised

    def _open(self, shard: str) -> Any:
        if shard not in self._files:
            self._files[shard] = open_shard(regular_file(self.folder, shard))
        return self._files[shard]

    def release(self) -> None:
        """Forgets kept tensors and unmaps the files, so that these leave memory; reading opens them again."""
        self.keep(None)
        self.unmap()

    def unmap(self) -> None:
        self._files.clear()

    def keep(self, prefix: str | None) -> None:
        """Reads tensors whose names begin with ``prefix`` once until ``release`` or another prefix.

        :meth:`tensor` then hands out the same memory again: nothing may be written to it.
        """
        self._kept_prefix, self._kept = prefix, {}

    def names(self) -> frozenset[str]:
        return frozenset(self._shard_of)

    def header(self, name: str) -> StoredTensor:
        """Shape, dtype and file of a tensor without reading it."""
        return StoredTensor.of(self._slice(name), self._shard_of[name])

    def headers(self) -> dict[str, StoredTensor]:
        """:meth:`header` of every tensor by name."""
        return {name: self.header(name) for name in self._shard_of}

    def files(self) -> list[str]:
        """Names of the weight files, relative to the folder."""
        return list(self._shards)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor by name, on the CPU in its stored dtype.

        Raises:
            CheckpointError: absent, not of floating-point numbers, or a value is NaN or infinite.
        """
        if name in self._kept:
            return self._kept[name]
        self.header(name).check_dtype(name)
        tensor = self._finite(name, self._open(self._shard_of[name]).get_tensor(name).clone())
        if self._kept_prefix is not None and name.startswith(self._kept_prefix):
            self._kept[name] = tensor
        return tensor

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start:stop`` of a tensor, on the CPU in its stored dtype; the others are not read.

        Raises:
            CheckpointError: absent, or a value among them is NaN or infinite.
        """
        return self._finite(name, self._slice(name)[start:stop].clone())

    def _finite(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and not is_finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(f"tensor {name} in {self._shard_of[name]} has {bad} NaN or infinite values")
        return tensor

    def _slice(self, name: str) -> Any:
        if name not in self._shard_of:
            raise CheckpointError(f"tensor {name} is absent from {self.folder}")
        return self._open(self._shard_of[name]).get_slice(name)


def _read_index(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_FILE} is not a safetensors index: weight_map is empty or absent")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{folder / INDEX_FILE} is not a safetensors index: {name} is in {shard!r:.100}")
    return weight_map


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
    """Raises SourceChangedError at the end if the source changed meanwhile, in place of any other error.

    Args:
        discard: called in that case, to drop what was made of the source.

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
