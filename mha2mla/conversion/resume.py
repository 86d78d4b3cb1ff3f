"""Finished layers of a conversion under way, on disk, so that a killed one can go on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mha2mla.conversion.source import CheckpointReader
from mha2mla.conversion.writer import save_tensors

FINGERPRINT_FILE = "fingerprint.json"
_LAYER_FILE = re.compile(r"layer-(\d{5})\.safetensors")


class ResumeError(ValueError):
    """What an interrupted conversion left belongs to another conversion; the message says what differs."""


def source_identity(reader: CheckpointReader) -> dict[str, Any]:
    """What tells one source from another without reading its weights.

    Returns:
        sha256 of config.json, and [size in bytes, modification time in ns] of every weight file.
    """
    config = (reader.folder / "config.json").read_bytes()
    files = {path.name: path.stat() for path in reader.files()}
    return {
        "config": hashlib.sha256(config).hexdigest(),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()},
    }


def tensor_hash(tensor: torch.Tensor | None) -> str | None:
    """sha256 of shape, dtype and values."""
    if tensor is None:
        return None
    header = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    numbers = tensor.cpu().contiguous().flatten().view(torch.uint8)  # numpy knows no bfloat16
    return hashlib.sha256(header + numbers.numpy().tobytes()).hexdigest()


def code_hash() -> str:
    """sha256 of the package's own code that decides what a converted layer is: a version may stand still while it
    changes."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for path in sorted(path for part in ("conversion", "modeling") for path in (package / part).rglob("*.py")):
        total.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


class FinishedLayers(Mapping[int, dict[str, torch.Tensor]]):
    """Converted layers by index, one safetensors file each; reading one maps nothing and hands out copies.

    A file has its name only when it is whole: it is written under another one, flushed to the disk and renamed.

    Args:
        folder: made with the first layer. What is in it and unreadable is removed.
        fingerprint: JSON values that say what the layers depend on.

    Raises:
        ResumeError: the folder's layers were made under another fingerprint.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any]) -> None:
        self.folder = folder
        self._fingerprint = fingerprint = json.loads(json.dumps(fingerprint))
        path = folder / FINGERPRINT_FILE
        left = finished_layers(folder)
        theirs = _read_fingerprint(path)
        if left and theirs != fingerprint:
            names = sorted(key for key in {**fingerprint, **theirs} if fingerprint.get(key) != theirs.get(key))
            raise ResumeError(
                f"{folder} holds {len(left)} finished layers of an interrupted conversion that differs in"
                f" {', '.join(_difference(key, theirs.get(key), fingerprint.get(key)) for key in names)}"
            )
        for other in list(folder.iterdir()) if folder.is_dir() else ():
            if other.name not in left.values() and other != path:
                other.unlink()
        self._files = left

    def __getitem__(self, layer: int) -> dict[str, torch.Tensor]:
        with safe_open(self.folder / self._files[layer], framework="pt") as file:
            # Copies have the allocator's alignment, so that arithmetic on them is that of the run which made them.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._files))

    def __len__(self) -> int:
        return len(self._files)

    def record(self, layer: int) -> dict[str, Any]:
        """What was recorded with a layer."""
        with safe_open(self.folder / self._files[layer], framework="pt") as file:
            return json.loads(file.metadata()["record"])

    def add(self, layer: int, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        """Puts a layer on disk; when this returns, it survives whatever happens to the process.

        Raises:
            ValueError: a value is NaN or infinite.
            DestinationError: the file system does not take the file.
        """
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise ValueError(f"tensor {name} of layer {layer} became NaN or infinite in the conversion")
        if not self._files:
            self.folder.mkdir(exist_ok=True)
            text = json.dumps(self._fingerprint)
            path = self.folder / FINGERPRINT_FILE
            _write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        # safetensors takes no two views of one storage.
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        metadata = {"record": json.dumps(dict(record))}
        name = f"layer-{layer:05d}.safetensors"
        _write_whole(self.folder / name, lambda temporary: save_tensors(copies, temporary, metadata))
        self._files[layer] = name


def finished_layers(folder: Path) -> dict[int, str]:
    """Layer -> name of its file, of those in ``folder`` that can be read."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _LAYER_FILE.fullmatch(path.name)
        if match is None:
            continue
        try:
            with safe_open(path, framework="pt") as file:
                json.loads(file.metadata()["record"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            continue
        found[int(match[1])] = path.name
    return found


def _read_fingerprint(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _difference(key: str, theirs: Any, ours: Any) -> str:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        inner = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        return ", ".join(_difference(f"{key}.{name}", theirs.get(name), ours.get(name)) for name in inner)
    return f"{key} ({theirs} there, {ours} now)" if max(len(str(theirs)), len(str(ours))) < 40 else key


def _write_whole(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.part")
    write(temporary)
    for part in (temporary, None):
        if part is None:
            os.replace(temporary, path)
            part = path.parent
        handle = os.open(part, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
