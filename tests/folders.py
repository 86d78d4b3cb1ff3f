"""Checkpoint folders that tests change: configs and other JSON files, tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def edit_json(path: Path, **values: Any) -> None:
    """Sets keys of a JSON file; a value of ``...`` removes its key."""
    kept = {key: value for key, value in {**read_json(path), **values}.items() if value is not ...}
    path.unlink()  # where the file is a link, the other one stays
    path.write_text(json.dumps(kept))


def edit_config(folder: Path, **values: Any) -> None:
    edit_json(folder / "config.json", **values)


def edit_weights(
    folder: Path, changes: Mapping[str, Tensor | Callable[[Tensor], Tensor] | EllipsisType], file: str = WEIGHTS
) -> None:
    """Sets tensors by name, to a tensor, or to a function of the old one; ``...`` removes them."""
    path = folder / file
    tensors: dict[str, Any] = load_file(path)
    tensors |= {name: change(tensors[name]) if callable(change) else change for name, change in changes.items()}
    path.unlink()
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not ...}
    save_file(kept, path, {"format": "pt"})


def flip_bit(path: Path) -> None:
    """Changes a bit near the end of a file in place; twice brings it back."""
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-4, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def contents(folder: Path) -> dict[str, bytes | None]:
    """Bytes of every file below a folder by its path there; None for what is no file."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else None for name, path in found.items()}


def listing(folder: Path) -> list[str]:
    """Names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def interrupted_layer(destination: Path) -> Path:
    """A finished layer as an interrupted ``convert`` to ``destination`` leaves it."""
    path = destination.parent / f".{destination.name}.mha2mla-tmp" / "work" / "layer-00000.safetensors"
    path.parent.mkdir(parents=True)
    path.touch()
    return path
