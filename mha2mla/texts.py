"""Texts for calibration and evaluation, and the windows of tokens that are cut from them."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import torch

BUILTIN = "builtin:"
DATASET = "hf:"
_DATASET_SEPARATOR = "\n\n"


def load_text(name: str | Path) -> str:
    """A text by name.

    Args:
        name: ``"builtin:pydoc"``, the help topics of the running Python (a technical manual of some 700 kB:
            calibration); ``"builtin:prose"``, short prose of several kinds written for this package (16 kB:
            evaluation); ``"hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]]"``, a Hugging Face dataset (split ``train`` and
            column ``text`` unless given; needs the ``datasets`` package); anything else is the path of a UTF-8 file.

    Raises:
        ValueError: unknown builtin, no such file, not UTF-8, empty, or a dataset without the column.
        ImportError: a dataset was asked for and ``datasets`` is not installed.
    """
    name = str(name)
    if name.startswith(BUILTIN):
        text = _builtin(name.removeprefix(BUILTIN))
    elif name.startswith(DATASET):
        text = _dataset(name.removeprefix(DATASET))
    else:
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"text {name!r} is no file; expected a file, builtin:pydoc, builtin:prose or hf:DATASET")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"text {name!r} is not UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"text {name!r} is empty")
    return text


def _builtin(name: str) -> str:
    if name == "pydoc":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[key] for key in sorted(topics))
    if name == "prose":
        return (resources.files("mha2mla") / "data" / "prose.txt").read_text(encoding="utf-8")
    raise ValueError(f"text 'builtin:{name}' is unknown; expected builtin:pydoc or builtin:prose")


def _dataset(name: str) -> str:
    parts = name.split(":")
    if not parts[0] or len(parts) > 4:
        raise ValueError(f"text 'hf:{name}' is malformed; expected hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]]")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"text 'hf:{name}' needs the datasets package: pip install 'mha2mla[eval]'") from error
    path, config, split, column = (parts + [""] * 3)[:4]
    rows = load_dataset(path, config or None, split=split or "train")
    column = column or "text"
    if column not in rows.column_names:
        raise ValueError(f"text 'hf:{name}' has no column {column!r}; expected one of {', '.join(rows.column_names)}")
    return _DATASET_SEPARATOR.join(rows[column])


def token_windows(
    tokenizer: Any, text: str, length: int, count: int | None = None, offset: int = 0, *, seed: int | None = None
) -> torch.Tensor:
    """Non-overlapping windows of tokens.

    A tokenizer that puts a start token before a text puts it before every window, inside its ``length``: models trained
    with one lean on it.

    Args:
        tokenizer: of transformers.
        length: tokens of a window.
        count: most windows to return; None for all.
        offset: tokens of the text to skip.
        seed: None takes the first windows; a number draws ``count`` of them from the whole text, in text order.

    Returns:
        int64 [windows, length], at least one window and at most ``count``.

    Raises:
        ValueError: a bad argument, or a text shorter than one window.
    """
    for name, value, least in (("length", length, 2), ("count", count, 1), ("offset", offset, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")
    start = start_tokens(tokenizer)
    body = length - len(start)
    if body < 1:
        raise ValueError(f"length is {length}; expected more than the {len(start)} start tokens of a window")
    # A text longer than the model's maximum is cut into windows right here: the tokenizer's warning would mislead.
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][offset:]
    whole = len(tokens) // body
    if whole == 0:
        raise ValueError(f"text has {len(tokens)} tokens after offset {offset}; expected at least one window of {body}")
    windows = torch.tensor(tokens[: whole * body], dtype=torch.int64).view(whole, body)
    if count is not None and seed is None:
        windows = windows[:count]
    elif count is not None:
        order = torch.randperm(whole, generator=torch.Generator().manual_seed(seed))[:count]
        windows = windows[order.sort().values]
    return torch.cat([torch.tensor([start], dtype=torch.int64).expand(windows.shape[0], -1), windows], 1)


def start_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that ``tokenizer`` puts before a text (``[bos]`` for Llama, none for Qwen and SmolLM)."""
    bos = getattr(tokenizer, "bos_token_id", None)
    first = tokenizer("a")["input_ids"][:1]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"][:1]
    return [bos] if bos is not None and first == [bos] and plain != [bos] else []
