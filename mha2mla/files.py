"""Files that commands write: each atomically, and to a path that was checked before any work.

An output path counts as the file that it names: ``~``, ``..`` and links are followed. It is refused where it names an
input, lies in a checkpoint (but for :data:`INSIDE`), would replace a file of another kind, or cannot be written.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SCHEMA = "mha2mla.report/1"
# Reports about a checkpoint that may lie beside its weights; none is a name that a checkpoint itself has.
INSIDE = frozenset(
    stem + suffix
    for stem in ("quality", "tasks", "latency", "inspection", "generate", "answers")
    for suffix in (".json", ".jsonl")
) | {"report.html", "report.md"}
_HEAD = 4096  # bytes of a file that tell its kind
_REPORT = re.compile(rb'\s*\{\s*"schema": "mha2mla\.report/\d+",\s*"kind": "([^"]*)"')
_PICTURES: dict[str, Callable[[bytes], bool]] = {
    ".png": lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"),
    ".svg": lambda head: head.lstrip().startswith((b"<?xml", b"<svg")) and b"<svg" in head,
    ".pdf": lambda head: head.startswith(b"%PDF-"),
}
MARKDOWN_HEAD = "<!-- mha2mla report/1 -->"
_PAGES: dict[str, Callable[[bytes], bool]] = {
    ".html": lambda head: head.startswith(b'<!doctype html>\n<html lang="en" data-mha2mla="report/'),
    ".md": lambda head: head.startswith(b"<!-- mha2mla report/"),
}
OutputPath = str | os.PathLike[str]


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


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file under a temporary name, syncs it to the disk, then renames it.

    Args:
        write: writes to the temporary path that it is given.
    """
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


@dataclass(frozen=True)
class Kind:
    """A kind of output: its name in messages, and a test of a file's first bytes."""

    name: str
    matches: Callable[[bytes], bool]


CURVE = Kind("curve of heal", lambda head: head.startswith(b'[{"step": 0, "tokens": 0, "held_out_kl": '))


def report(kind: str) -> Kind:
    """JSON reports of this package with that ``kind``."""

    def matches(head: bytes) -> bool:
        found = _REPORT.match(head)
        return found is not None and found[1].decode(errors="replace") == kind

    return Kind(f"report of kind {kind!r}", matches)


def picture(path: OutputPath) -> Kind:
    """Pictures of the format that a path's extension names.

    Raises:
        ValueError: the extension is unknown.
    """
    return _of_suffix(path, "path", _PICTURES, "picture")


def page(path: OutputPath) -> Kind:
    """Pages of ``mha2mla report``, of the format that a path's extension names.

    Raises:
        ValueError: the extension is unknown.
    """
    return _of_suffix(path, "output", _PAGES, "page of mha2mla report")


def _of_suffix(path: OutputPath, name: str, formats: dict[str, Callable[[bytes], bool]], what: str) -> Kind:
    suffix = Path(path).suffix.lower()
    if suffix not in formats:
        *others, last = formats
        raise ValueError(f"{_shown(name, path)}; expected a name that ends in {', '.join(others)} or {last}")
    return Kind(f"{suffix[1:].upper()} {what}", formats[suffix])


def report_file(
    path: OutputPath | None, kind: str, *inputs: OutputPath | None, made: OutputPath | None = None
) -> Path | None:
    """:func:`output_file` of a JSON report of ``kind``, which the argument ``json`` names."""
    return output_file(path, report(kind), *inputs, name="json", made=made)


def output_file(
    path: OutputPath | None, kind: Kind, *inputs: OutputPath | None, name: str, made: OutputPath | None = None
) -> Path | None:
    """Checks that a file may be written at a path, and changes nothing.

    Args:
        kind: of a file that may be replaced.
        inputs: files, checkpoint folders and other outputs of the same command; None and hub ids are left aside.
        made: folder that the command makes; no output lies in it.

    Returns:
        The file that the path names.

    Raises:
        ValueError: the path may not or cannot be written, with the reason.
    """
    if path is None:
        return None
    try:
        target = resolved(path)
        reason = _misplaced(path, target, inputs, made) or _irreplaceable(target, kind)
        if reason is None:
            try_to_write(target)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ValueError(f"{_shown(name, path)}, which cannot be written: {error}") from error
    if reason is not None:
        raise ValueError(f"{_shown(name, path)}, {reason}")
    return target


def write_output(path: OutputPath, kind: Kind, write: Callable[[Path], None], name: str = "path") -> Path:
    """Writes a file atomically, in place of none or of one of its ``kind``; its folder is made when missing.

    Args:
        write: writes to the temporary path that it is given.

    Returns:
        The path written.

    Raises:
        ValueError: the file there is of another kind.
    """
    target = resolved(path)
    if reason := _irreplaceable(target, kind):
        raise ValueError(f"{_shown(name, path)}, {reason}")
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, write)
    return target


def resolved(path: OutputPath) -> Path:
    """The file or folder that a path names."""
    return Path(os.path.expanduser(path)).resolve()


def _shown(name: str, path: OutputPath) -> str:
    return f"{name} is {os.fspath(path)!r:.300}"


def _misplaced(
    path: OutputPath, target: Path, inputs: tuple[OutputPath | None, ...], made: OutputPath | None
) -> str | None:
    """Reason against writing under this name, whatever file is there."""
    if os.fspath(path).endswith(("/", os.sep)) or target.is_dir():
        return "which names a folder; expected a file name"
    others = [resolved(each) for each in inputs if each is not None]
    if any(_is_same(target, each) for each in others):
        return "which another argument names; expected another file"
    if made is not None and resolved(made) in (target, *target.parents):
        return f"which lies in {os.fspath(made)!r:.300}, a folder that is made; expected a file outside it"
    checkpoint = next((each for each in target.parents if each in others or _is_checkpoint(each)), None)
    if checkpoint is not None and target.name not in INSIDE:
        names = ", ".join(sorted(each for each in INSIDE if each.endswith(target.suffix or ".json"))) or "quality.json"
        return f"which lies in the checkpoint {str(checkpoint)!r:.300}; expected a file outside it, or one of {names}"
    return None


def _is_same(one: Path, other: Path) -> bool:
    """Paths of one file, by links or hard links too."""
    return one == other or (one.exists() and other.exists() and os.path.samefile(one, other))


def _is_checkpoint(folder: Path) -> bool:
    weights = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
    return (folder / "config.json").exists() and any(any(folder.glob(pattern)) for pattern in weights)


def _irreplaceable(target: Path, kind: Kind) -> str | None:
    """Reason against replacing the file that is there. An empty one may be replaced."""
    if not target.exists():
        return None
    if not target.is_file():
        return "which is no regular file; expected a file name"
    if not os.access(target, os.W_OK):
        return "which is read-only; expected a file that may be replaced"
    with target.open("rb") as file:
        head = file.read(_HEAD)
    if head and not kind.matches(head):
        return f"which is there and no {kind.name}; expected a new file, or such a one, which is replaced"
    return None
