"""Checkpoints by folder or hub id, and safe access to their files. Imports no torch: mistakes are found at once."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
LONGEST_MESSAGE = 500  # characters
HUB_TIMEOUT = 5.0  # seconds: one short question, no file


def shorten(message: str) -> str:
    """``message`` in one line of at most :data:`LONGEST_MESSAGE` characters, cut in the middle."""
    head, tail = LONGEST_MESSAGE * 7 // 10, LONGEST_MESSAGE * 3 // 10 - 5
    line = " ".join(message.split()) if len(message) < 1 << 16 else message
    line = line if len(line) <= LONGEST_MESSAGE else f"{line[:head]} ... {line[-tail:]}"
    return " ".join(line.split())


def did_you_mean(word: object, words: Iterable[str]) -> str:
    """``; did you mean 'latent'?`` for a misspelt word; empty where none of ``words`` is close."""
    return "".join(f"; did you mean {close!r}?" for close in get_close_matches(str(word), list(words), 1))


def check_path(path: object, name: str, expected: str = "a folder or hub id") -> None:
    """Raises ValueError for what is no path at all, or an empty one, which pathlib takes for the current folder."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f"{name} is {path!r:.80}; expected {expected}")


def check_numbers(values: object, name: str, least: int) -> None:
    """Raises ValueError for what is no collection of whole numbers, or has none of them or a smaller one."""
    is_list = isinstance(values, Collection) and len(values) > 0
    if not is_list or not all(isinstance(value, Integral) and value >= least for value in values):
        raise ValueError(f"{name} is {values!r:.80}; expected one or more whole numbers, at least {least}")


class NamedError(ValueError):
    """An error whose message is one short line that names the file, field or tensor."""

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message))


class CheckpointError(NamedError):
    """A checkpoint is incomplete or damaged; the message names the file or the tensor."""


@contextmanager
def damage_named(what: str) -> Iterator[None]:
    """Names the input of other code that fails on damaged files.

    Raises:
        CheckpointError: ``what``, and the error in short. Other errors pass: those that name something already, too
            little memory, a package that is not installed.
    """
    try:
        yield
    except (NamedError, MemoryError, ImportError):
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {shorten(str(error)):.300}") from error


def regular_file(folder: Path, name: str) -> Path:
    """The path of a file of a checkpoint, once opening it can neither block nor lead out of the folder.

    A snapshot of the hub's cache is a folder of links into the ``blobs`` beside it; those are followed.

    Raises:
        CheckpointError: absent, no regular file (a pipe, a folder), or a path or link that leads out of ``folder``.
    """
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{name!r} leads out of {folder}; expected a file inside it")
    try:
        own, real = folder.resolve(), path.resolve(strict=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a name with a NUL in it
        raise CheckpointError(f"{path!s:.200} cannot be read: {error}") from error
    blobs = [own.parent.parent / "blobs"] if own.parent.name == "snapshots" else []
    if not any(root in real.parents for root in (own, *blobs)):
        raise CheckpointError(f"{path} is a link to {real}, which leads out of {folder}; expected a file inside it")
    if not stat.S_ISREG(real.stat().st_mode):
        raise CheckpointError(f"{path} is no regular file")
    return path


def check_folder(folder: Path) -> None:
    """Refuses a folder in which opening a file could block: other code opens files here by names of its own.

    Raises:
        CheckpointError: naming a pipe, socket or device.
    """
    for path in sorted(folder.iterdir()):
        try:
            mode = path.stat().st_mode
        except OSError:  # a link that leads nowhere cannot be opened, either
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise CheckpointError(f"{path} is no regular file")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a checkpoint.

    Raises:
        CheckpointError: as :func:`regular_file`, or the file is no JSON object.
    """
    return read_object(regular_file(folder, name))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, of a regular file: a pipe or a device is not opened.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is no JSON object.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is no regular file")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return values


def find_checkpoint(checkpoint: str | os.PathLike[str], name: str) -> str:
    """The folder or hub id as a string, once it is there: with a ``config.json``, in the hub's cache, or on the hub.

    The hub is asked once, without retries.

    Args:
        name: what the caller calls it, for error messages.

    Raises:
        FileNotFoundError: it is not there, or the hub does not answer.
        ValueError: it is no path at all, or empty.
    """
    check_path(checkpoint, name)
    text = os.fspath(checkpoint)
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file():
            raise FileNotFoundError(f"{name} is {text!r:.200}, a folder without config.json; {_what_is_there(path)}")
        return str(path)
    if path.exists() or text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") > 1:
        raise FileNotFoundError(f"{name} is {text!r:.200}; expected an existing checkpoint folder, or a hub id")
    _ask_the_hub(text, f"{name} is {text!r:.200}, which is no folder here")
    return text


def model_type(checkpoint: str | os.PathLike[str]) -> str | None:
    """``model_type`` in the ``config.json`` of a folder; None: no folder here, or none in its config.

    Raises:
        CheckpointError: the file is damaged.
    """
    folder = Path(checkpoint).expanduser()
    found = read_json(folder, CONFIG_FILE).get("model_type") if (folder / CONFIG_FILE).is_file() else None
    if found is not None and not isinstance(found, str):
        raise CheckpointError(f"model_type is {found!r:.80} in {folder / CONFIG_FILE}; expected a string")
    return found


def find_converted(checkpoint: str | os.PathLike[str], name: str) -> str:
    """:func:`find_checkpoint` of one that was converted, as far as a folder's ``config.json`` can tell.

    Raises:
        FileNotFoundError: as there.
        ValueError: its model type is another.
    """
    found = find_checkpoint(checkpoint, name)
    if Path(found).is_dir():
        check_converted(model_type(found), name)
    return found


def check_converted(kind: str | None, name: str) -> None:
    """Raises ValueError for a model type that is no converted checkpoint's."""
    if kind != "mha2mla":
        raise ValueError(f"{name} has model_type {kind!r:.80}; expected 'mha2mla', a converted checkpoint")


def find_pair(source: str | os.PathLike[str], converted: str | os.PathLike[str]) -> None:
    """:func:`find_checkpoint` of two that are compared.

    Raises:
        FileNotFoundError: as there.
        ValueError: the first one was converted and the second was not: losses would be read as gains.
    """
    find_checkpoint(source, "source")
    find_checkpoint(converted, "converted")
    kind = model_type(converted)
    if model_type(source) == "mha2mla" and kind not in ("mha2mla", None):
        raise ValueError(
            f"source is a converted checkpoint and converted has model_type {kind!r:.80}; expected the source first"
        )


def _what_is_there(folder: Path) -> str:
    """Advice for a folder without a config, by the files in it."""
    if found := sorted(path.name for path in folder.glob("*.gguf")):
        return f"{found[0]} is not read: expected the safetensors checkpoint that it was made from"
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter: expected a whole checkpoint (merge_and_unload, then save_pretrained)"
    below = [path.parent for pattern in ("*/", "snapshots/*/") for path in folder.glob(pattern + CONFIG_FILE)]
    return "expected a checkpoint" + "".join(f"; did you mean {str(path)!r:.200}?" for path in below[:1])


def _ask_the_hub(hub_id: str, not_here: str) -> None:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(hub_id, CONFIG_FILE), str):
            info = HfApi().model_info(hub_id, timeout=HUB_TIMEOUT)
            if getattr(info, "gated", False):  # everyone sees that it is there; its files need access
                HfApi().auth_check(hub_id)
    except GatedRepoError as error:
        page = f"{HfApi().endpoint}/{hub_id}"
        raise FileNotFoundError(
            f"{not_here}, and the hub gates it: accept its terms at {page}, then log in (hf auth login, or HF_TOKEN)"
        ) from error
    except HFValidationError as error:
        raise FileNotFoundError(f"{not_here} and no hub id; expected a checkpoint folder, or OWNER/NAME") from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{not_here}, and the hub shows no such model (private ones need a login)") from error
    except Exception as error:  # whatever a network does
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise FileNotFoundError(f"{not_here}, and the hub cannot be asked for such a model: {reason}") from error
