"""Reading a checkpoint: read-only, one tensor at a time, single file or sharded; every defect named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint is incomplete or damaged; the message names the file or the tensor."""


class CheckpointReader:
    """Tensors of a safetensors checkpoint by name.

    Every shard's header is read at construction, so that a missing or truncated shard shows before any work. Files are
    mapped read-only, stay open until ``release``, and what is handed out is a copy.

    Args:
        folder: local Hugging Face folder.

    Raises:
        CheckpointError: no folder, no safetensors weights, an index that is no index, a missing or truncated shard,
            or a tensor that the index promises and its shard lacks.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"source {str(self.folder)!r} is not a folder")
        self._files: dict[str, Any] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._shard_of: dict[str, str] = {}
        index = self.folder / INDEX_FILE
        if index.exists():
            promised = _read_index(index)
            for shard in sorted(set(promised.values())):
                self._names[shard] = frozenset(self._open(shard).keys())
            for name, shard in promised.items():
                if name not in self._names[shard]:
                    raise CheckpointError(f"{index} says that {name} is in {shard}, which does not hold it")
            self._shard_of = promised
        elif (self.folder / SINGLE_FILE).exists():
            self._names[SINGLE_FILE] = frozenset(self._open(SINGLE_FILE).keys())
            self._shard_of = dict.fromkeys(self._names[SINGLE_FILE], SINGLE_FILE)
        else:
            found = sorted(
                path.name for path in self.folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf")
            )
            hint = f" ({found[0]} is not read: save it as safetensors first)" if found else ""
            raise CheckpointError(f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")

    def _open(self, shard: str) -> Any:
        if shard not in self._files:
            path = self.folder / shard
            if not path.exists():
                raise CheckpointError(f"shard {path} is missing, though {INDEX_FILE} names it")
            try:
                self._files[shard] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"shard {path} is truncated or damaged: {error}") from error
        return self._files[shard]

    def release(self) -> None:
        """Unmaps the files, so that what was read leaves this process's memory; reading opens them again."""
        self._files.clear()

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._shard_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor without reading it."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """safetensors' name of a tensor's dtype, such as ``"BF16"``, without reading it."""
        return self._slice(name).get_dtype()

    def files(self) -> list[Path]:
        """The weight files."""
        return [self.folder / shard for shard in sorted(self._names)]

    def nbytes(self) -> int:
        """Bytes of all weight files."""
        return sum(os.path.getsize(path) for path in self.files())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor by name, on the CPU in its stored dtype.

        Raises:
            CheckpointError: absent, or a value is NaN or infinite.
        """
        self._slice(name)
        return self._finite(name, self._open(self._shard_of[name]).get_tensor(name).clone())

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start:stop`` of a tensor, on the CPU in its stored dtype; the others are not read.

        Raises:
            CheckpointError: absent, or a value among them is NaN or infinite.
        """
        return self._finite(name, self._slice(name)[start:stop].clone())

    def _finite(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(f"tensor {name} in {self._shard_of[name]} has {bad} NaN or infinite values")
        return tensor

    def _slice(self, name: str) -> Any:
        if name not in self._shard_of:
            raise CheckpointError(f"tensor {name} is absent from {self.folder}")
        return self._open(self._shard_of[name]).get_slice(name)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("weight_map is empty or not a mapping to file names")
        return dict(weight_map)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors index: {error}") from error
