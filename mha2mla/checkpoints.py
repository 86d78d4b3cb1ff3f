"""A checkpoint by folder or hub id: is it there? Asked without torch, so that a typing mistake is said at once."""

from __future__ import annotations

import json
import os
from pathlib import Path

HUB_TIMEOUT = 5.0  # seconds: one short question, no file


def find_checkpoint(checkpoint: str | os.PathLike[str], name: str) -> str:
    """The folder or hub id as a string, once it is there: with a ``config.json``, in the hub's cache, or on the hub.

    The hub is asked once, without retries.

    Args:
        checkpoint: folder, or hub id with or without an owner.
        name: what the caller calls it, for error messages.

    Raises:
        FileNotFoundError: it is not there, or the hub does not answer.
    """
    text = os.fspath(checkpoint)
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{name} is {text!r}, a folder without config.json; expected a checkpoint")
        return str(path)
    if path.exists() or text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") > 1:
        raise FileNotFoundError(f"{name} is {text!r}; expected an existing checkpoint folder, or a hub id")
    _ask_the_hub(text, f"{name} is {text!r}, which is no folder here")
    return text


def model_type(checkpoint: str | os.PathLike[str]) -> str | None:
    """What the ``config.json`` of a folder says; None: it is no folder here, or its config does not say."""
    config = Path(checkpoint).expanduser() / "config.json"
    found = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return found.get("model_type")


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
        raise ValueError(f"{name} has model_type {kind!r}; expected 'mha2mla', a converted checkpoint")


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
            f"source is a converted checkpoint and converted has model_type {kind!r}; expected the source first"
        )


def _ask_the_hub(hub_id: str, not_here: str) -> None:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
            HfApi().model_info(hub_id, timeout=HUB_TIMEOUT)
    except HFValidationError as error:
        raise FileNotFoundError(f"{not_here} and no hub id; expected a checkpoint folder, or OWNER/NAME") from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{not_here}, and the hub shows no such model (private ones need a login)") from error
    except Exception as error:  # whatever a network does
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise FileNotFoundError(f"{not_here}, and the hub cannot be asked for such a model: {reason}") from error
