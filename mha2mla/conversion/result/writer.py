"""Writing weights: shards as they fill."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mha2mla.conversion.source.checkpoint import INDEX_FILE, SINGLE_FILE
from mha2mla.modeling.stored_tensors import is_finite

DEFAULT_SHARD_BYTES = 1 << 30


class DestinationError(ValueError):
    """The destination cannot be written; the message says why."""


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
