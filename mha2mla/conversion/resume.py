"""Finished layers of a conversion under way, on disk: a run that was cut off goes on from them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mha2mla.conversion.destination import DestinationError, ResumeError, remove, save_tensors
from mha2mla.environment import cache_folder
from mha2mla.files import atomic_write
from mha2mla.modeling.stored_tensors import is_finite

REQUEST_FILE = "request.json"
_SUFFIX = ".safetensors"
_LAYER = re.compile(r"layer-(\d{5})")
_CODE = ("conversion", "modeling", "data", "geometry.py", "pipeline")
# The beginnings of documents and how these go on; not how a step is computed, which changes samples by rounding alone.
_TEXT_CODE = (
    "conversion/calibration/generated_text.py",
    "conversion/calibration/windows.py",
    "data",
    "conversion/calibration/texts.py",
)


def tensor_hash(tensor: torch.Tensor) -> str:
    """sha256 of shape, dtype and values."""
    return _tensors_hash("", {"": tensor})


def text_code_hash() -> str:
    """:func:`code_hash` of the code and texts that decide the text which a model generates."""
    return code_hash(parts=_TEXT_CODE)


def code_hash(*more: str, parts: Sequence[str] = _CODE) -> str:
    """sha256 of the package's own code and texts that decide what a converted layer is, and of ``more`` files and
    folders below the package: a version may stand still while they change."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    found = (package / part for part in (*parts, *more))
    paths = (path for part in found for path in (part.rglob("*") if part.is_dir() else [part]))
    for path in sorted(path for path in paths if path.suffix in (".py", ".txt")):
        total.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def write_piece(path: Path, header: str, tensors: Mapping[str, torch.Tensor], about: Any = None) -> None:
    """Atomic write of tensors to a safetensors file, with a hash of ``header`` and contents.

    Args:
        about: JSON values that belong to the tensors.

    Raises:
        DestinationError, OSError: the file system does not take the file.
    """
    # safetensors takes no two views of one storage.
    copies = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    text = json.dumps(about)
    metadata = {"about": text, "sha256": _tensors_hash(f"{header}\0{text}", copies)}
    atomic_write(path, lambda temporary: save_tensors(copies, temporary, metadata))


def kept_text(request: Any) -> Path:
    """File in the cache folder for text that a source writes, named by a hash of ``request``, JSON values of all that
    decides it."""
    text = json.dumps(request, sort_keys=True)
    return cache_folder() / "texts" / f"{hashlib.sha256(text.encode()).hexdigest()}.safetensors"


def keep_text(path: Path, tensors: Mapping[str, torch.Tensor], about: Any = None) -> str | None:
    """Writes :func:`kept_text`'s file; why it could not be written, or None. The next run then writes its text anew."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_piece(path, path.stem, tensors, about)
    except (DestinationError, OSError) as error:
        return str(error)
    return None


def read_piece(path: Path, header: str) -> tuple[dict[str, torch.Tensor], Any] | None:
    """Tensors and values of :func:`write_piece` under the same ``header``; None: no file, or a damaged one."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies have the allocator's alignment, so that arithmetic on them is that of the run which made them.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        if metadata["sha256"] == _tensors_hash(f"{header}\0{metadata['about']}", tensors):
            return tensors, json.loads(metadata["about"])
    except (SafetensorError, OSError, KeyError, ValueError):
        pass
    return None


class WorkFolder:
    """Finished pieces of one conversion by name, each a file that is written atomically.

    A file holds a hash of its name, its contents and its request: one that was damaged, swapped or brought from
    elsewhere does not count.

    Args:
        folder: made with the first piece. Pieces of another request are removed with the first one of this.
        request: JSON values that say what is converted to what, and how.

    Attributes:
        damaged: names of files that were no pieces of this request and are gone.

    Raises:
        ResumeError: the folder has finished layers of another request, and ``resume``.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any], *, resume: bool = True) -> None:
        self.folder = folder
        self._text = json.dumps(request, sort_keys=True)
        self._known: set[str] = set()
        self.damaged: list[str] = []
        there = sorted(folder.iterdir()) if folder.is_dir() else []
        theirs = read_request(folder / REQUEST_FILE)
        layers = [path for path in there if _LAYER.fullmatch(path.stem) and path.suffix == _SUFFIX]
        same = theirs == json.loads(self._text)
        if resume and layers and not same:
            raise ResumeError(
                f"{folder} holds {len(layers)} finished layers of an interrupted conversion that differs in"
                f" {', '.join(differences(theirs, json.loads(self._text)))}"
            )
        for path in there:
            ours = resume and same and path.is_file() and not path.is_symlink()
            if ours and path.name == REQUEST_FILE:
                continue
            if ours and path.suffix == _SUFFIX and not path.name.startswith("."):
                if self._read(path.stem) is not None:
                    self._known.add(path.stem)
                    continue
                self.damaged.append(path.name)
            remove(path)

    def names(self) -> list[str]:
        return sorted(self._known)

    def get(self, name: str) -> tuple[dict[str, torch.Tensor], Any] | None:
        """A piece as it was put, or None; tensors are copies on the CPU.

        Raises:
            ResumeError: the piece was there and is damaged now.
        """
        if name not in self._known:
            return None
        found = self._read(name)
        if found is None:
            raise ResumeError(f"{self._path(name)} was damaged during the conversion")
        return found

    def put(self, name: str, tensors: Mapping[str, torch.Tensor], about: Any = None) -> None:
        """Writes a piece and syncs it to the disk.

        Raises:
            DestinationError: the file system does not take the file.
        """
        path = self.folder / REQUEST_FILE
        if not path.exists():
            self.folder.mkdir(exist_ok=True)
            atomic_write(path, lambda temporary: temporary.write_text(self._text, encoding="utf-8"))
        write_piece(self._path(name), self._header(name), tensors, about)
        self._known.add(name)

    def discard(self, prefix: str = "") -> None:
        for name in self.names():
            if name.startswith(prefix):
                self._path(name).unlink(missing_ok=True)
                self._known.remove(name)

    def _path(self, name: str) -> Path:
        return self.folder / (name + _SUFFIX)

    def _read(self, name: str) -> tuple[dict[str, torch.Tensor], Any] | None:
        return read_piece(self._path(name), self._header(name))

    def _header(self, name: str) -> str:
        return f"{self._text}\0{name}"


class FinishedLayers(Mapping[int, dict[str, torch.Tensor]]):
    """Converted layers by index, as pieces of a :class:`WorkFolder`.

    Args:
        inputs: JSON values: what the layers depend on beside the request, found out on the way (the calibration
            windows, the ranks). Layers that depend on something else do not count.
    """

    def __init__(self, work: WorkFolder, inputs: Any = None) -> None:
        self.work = work
        self._inputs = json.loads(json.dumps(inputs))
        self._records: dict[int, dict[str, Any]] = {}
        for name in work.names():
            if match := _LAYER.fullmatch(name):
                _, about = work.get(name)
                if about["inputs"] == self._inputs:
                    self._records[int(match[1])] = about["record"]

    def __getitem__(self, layer: int) -> dict[str, torch.Tensor]:
        if layer not in self._records:
            raise KeyError(layer)
        return self.work.get(_name(layer))[0]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def record(self, layer: int) -> dict[str, Any]:
        return self._records[layer]

    def add(self, layer: int, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        """Writes a layer and syncs it to the disk.

        Raises:
            ValueError: a value is NaN or infinite.
            DestinationError: the file system does not take the file.
        """
        for name, tensor in tensors.items():
            if not is_finite(tensor):
                raise ValueError(f"tensor {name} of layer {layer} became NaN or infinite in the conversion")
        record = json.loads(json.dumps(dict(record)))
        self.work.put(_name(layer), tensors, {"inputs": self._inputs, "record": record})
        self._records[layer] = record


def has_pieces(folder: Path) -> bool:
    """True if a work folder holds anything that a :class:`WorkFolder` has put there."""
    return any(folder.glob(f"[!.]*{_SUFFIX}"))


def _name(layer: int) -> str:
    return f"layer-{layer:05d}"


def _tensors_hash(header: str, tensors: Mapping[str, torch.Tensor]) -> str:
    total = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        total.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())  # numpy knows no bfloat16
    return total.hexdigest()


def read_request(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], inside: str = "") -> list[str]:
    """Keys with other values, ``inside`` in front of them, and the values where they are short."""
    found = []
    for key in sorted({*theirs, *ours}):
        there, now, name = theirs.get(key), ours.get(key), f"{inside}{key}"
        if there != now and isinstance(there, dict) and isinstance(now, dict):
            found += differences(there, now, f"{name}.")
        elif there != now:
            short = max(len(str(there)), len(str(now))) < 40
            found.append(f"{name} ({there} there, {now} now)" if short else name)
    return found
