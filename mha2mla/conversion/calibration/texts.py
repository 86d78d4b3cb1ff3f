"""Texts for calibration and evaluation, and the windows of tokens that are cut from them.

Checks of names import no torch.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import random
import re
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mha2mla.checkpoints import did_you_mean

if TYPE_CHECKING:
    import torch

BUILTIN = "builtin:"
DATASET = "hf:"
GENERATED = "generated"
DIVERSE = "generated-diverse"
BUILTINS = ("builtin:pydoc", "builtin:stdlib", "builtin:prose", "builtin:opticks", "builtin:licences")
_EXPECTED = f"a file, {', '.join(BUILTINS)} or hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]]"
_DATASET_SEPARATOR = "\n\n"
# Not prose, not part of every installation, or another text of this module.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"})
_SKIPPED |= {"encodings", "lib2to3", "turtledemo", "config", "__phello__"}
_COMMENTS = re.compile(r"(?:^[ \t]*#[^\n]*\n){3,}", re.MULTILINE)
_LEAST_PROSE = 60  # characters
_LARGE = 1 << 24  # characters: of a larger text only as much is tokenized as is drawn
_PIECE = 1 << 17  # characters
_AT_ONCE = 16  # pieces, by all cores
_SHUFFLED = 10_000  # rows that are read ahead, of which the next is drawn
_USUALLY_PER_TOKEN = 8  # characters; English has some 4.5
CHARACTERS_PER_TOKEN = 16  # more than texts have: what lies beyond them is not tokenized only to be thrown away
# Test file of libbacktrace in Apache TVM FFI, which TileLang requires: some 140k tokens.
_OPTICKS = Path("3rdparty/libbacktrace/Isaac.Newton-Opticks.txt")
_OPTICKS_SHA256 = "d4a9ac22462b35e7821a4f2706c211093da678620a8f9997989ee7cf8d507bbd"
# Between them GPL-3, Apache-2.0, MPL-2.0, PSF and many short ones; torch last, whose list changes most often.
_LICENSED = ("numpy", "ml_dtypes", "typing_extensions", "sympy", "networkx", "tqdm", "regex", "setuptools", "torch")
_LICENCE_FILE = re.compile(r"\.dist-info/.*(licen[cs]e|copying|notice)[^/]*$", re.IGNORECASE)
_PARAGRAPH = re.compile(r"\n\s*\n")
_LEAST_PARAGRAPH = 60  # letters and blanks


def load_text(name: str | Path, characters: int | None = None, *, seed: int | None = None) -> str:
    """A text by name.

    Args:
        name: ``"builtin:pydoc"``, the help topics of the running Python (a technical manual of some 700 kB:
            calibration); ``"builtin:stdlib"``, docstrings and comments of its standard library (technical prose, 2 MB:
            evaluation); ``"builtin:prose"``, short prose of several kinds written for this package (16 kB:
            evaluation); ``"builtin:opticks"`` (Newton's, 570 kB) and ``"builtin:licences"`` (130 kB), found in packages
            that this one requires (evaluation in long windows);
            ``"hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]]"``, a Hugging Face dataset (split ``train`` and column ``text``
            unless given; needs the ``datasets`` package); anything else is the path of a UTF-8 file.
        characters: that are enough: the text may end behind them where that saves time (``builtin:stdlib``, a dataset).
        seed: of a dataset, draws rows from files in a drawn order, some thousands ahead; None takes the first. Only
            what is read is downloaded.

    Raises:
        ValueError: unknown builtin, no such file, not UTF-8, empty, or a dataset without a column of texts.
        ImportError: a dataset was asked for and ``datasets`` is not installed.
    """
    name = str(name)
    check_single_text(name)
    if name.startswith(BUILTIN):
        text = _builtin(name.removeprefix(BUILTIN), characters)
    elif name.startswith(DATASET):
        text = _dataset(name.removeprefix(DATASET), characters, seed)
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"text {name!r} is not UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"text {name!r} is empty")
    return text


def check_single_text(name: str | Path) -> None:
    """Refuses a text that :func:`load_text` does not take, without reading it.

    Raises:
        ValueError: unknown builtin, no such file, texts joined by ``+``, or text that a model is to make up.
    """
    name = str(name)
    if name in (GENERATED, DIVERSE) and not Path(name).is_file():
        raise ValueError(f"text {name!r} is made up by a model, for calibration; expected {_EXPECTED}")
    if not name.startswith(DATASET) and len(parts := text_parts(name)) > 1:
        raise ValueError(f"text {name!r} is {len(parts)} texts joined by '+'; expected one: {_EXPECTED}")
    _check_part(name)


def check_text(name: str | Path) -> None:
    """Refuses what neither :func:`load_text` nor a recipe (:func:`text_shares`) takes, without reading it.

    Raises:
        ValueError: a part is neither a name nor a file.
    """
    for part in text_parts(name):
        _check_part(part, f"{_EXPECTED}, {GENERATED} or {DIVERSE}")


def _check_part(name: str, expected: str = _EXPECTED) -> None:
    if name.startswith(BUILTIN):
        if name not in BUILTINS:
            raise ValueError(f"text {name!r} is unknown; expected {expected}{did_you_mean(name, BUILTINS)}")
    elif name not in (GENERATED, DIVERSE) and not name.startswith(DATASET):
        _file(name, expected)


def text_identity(name: str | Path) -> str:
    """Identity of the text ``name`` for :func:`text_shares`: the name, and for files a hash of what is in them.

    Raises:
        ValueError: a part is neither a file nor a name of :func:`load_text`.
    """
    parts = text_parts(name)
    said = {part: part for part in parts}  # one that is named several times is read once
    for part in said:
        if part not in (GENERATED, DIVERSE) and not part.startswith((BUILTIN, DATASET)):
            said[part] = f"{part} (sha256 {hashlib.sha256(_file(part).read_bytes()).hexdigest()})"
    return "+".join(said[part] for part in parts)


def recorded_name(name: str) -> str:
    """``name`` with files by their names alone: records name no folders of this machine."""
    return "+".join(part.rpartition("/")[2] if part[:1] in "/~" else part for part in name.split("+"))


def text_parts(name: str | Path) -> list[str]:
    """The texts that ``name`` joins by ``+``; a file whose path has one is itself."""
    return [str(name)] if Path(name).is_file() else str(name).split("+")


def _file(name: str, expected: str = _EXPECTED) -> Path:
    if not Path(name).is_file():
        close = did_you_mean(name, (*BUILTINS, GENERATED, DIVERSE))
        raise ValueError(f"text {name!r} is no file; expected {expected}{close}")
    return Path(name)


def _builtin(name: str, characters: int | None) -> str:
    if name == "pydoc":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[key] for key in sorted(topics))
    if name == "prose":
        return _data("prose.txt")
    if name == "stdlib":
        return _stdlib_prose(characters)
    return _opticks() if name == "opticks" else _licences()


def _data(name: str) -> str:
    return (resources.files("mha2mla") / "data" / name).read_text(encoding="utf-8")


def _opticks() -> str:
    """Newton's Opticks (fourth edition, 1730): 567 kB of reasoning prose in older English.

    Raises:
        ValueError: the file is not there, or is another one.
    """
    found = importlib.util.find_spec("tvm_ffi")  # finds, does not import
    paths = [Path(folder) / _OPTICKS for folder in (found.submodule_search_locations or ())] if found else []
    content = next((path.read_bytes() for path in paths if path.is_file()), None)
    if content is None:
        raise ValueError(
            f"text 'builtin:opticks' needs {_OPTICKS} of the package apache-tvm-ffi (tilelang 0.1.15 requires it), and"
            " it is not installed; expected another text"
        )
    if (digest := hashlib.sha256(content).hexdigest()) != _OPTICKS_SHA256:
        raise ValueError(f"text 'builtin:opticks' has SHA-256 {digest}; expected {_OPTICKS_SHA256}")
    return content.decode("utf-8")


def _licences() -> str:
    """Licences of packages that this one requires, joined, each paragraph once: some 130 kB of legal prose.

    Raises:
        ValueError: no such package came with a licence file.
    """
    found: dict[str, str] = {}  # a paragraph by its words: packages quote the same licences over and over
    for name in _LICENSED:
        with suppress(metadata.PackageNotFoundError):
            for file in sorted(metadata.distribution(name).files or [], key=str):
                if _LICENCE_FILE.search(file.as_posix()):
                    with suppress(OSError, UnicodeDecodeError):
                        for paragraph in _PARAGRAPH.split(Path(file.locate()).read_text(encoding="utf-8")):
                            words = " ".join(re.findall(r"\w+", paragraph.lower()))
                            if len(words) >= _LEAST_PARAGRAPH:
                                found.setdefault(words, paragraph.strip("\n"))
    if not found:
        raise ValueError(f"text 'builtin:licences' found no licence file of {', '.join(_LICENSED)}")
    return "\n\n".join(found.values())


@cache
def _stdlib_prose(characters: int | None) -> str:
    """Docstrings and blocks of comments of the standard library's modules, tests aside: six seconds for them all."""
    texts, size = [], 0
    for text in _stdlib_texts():
        texts.append(text)
        size += len(text)
        if characters is not None and size >= characters:
            break
    return "\n\n".join(texts)


def _stdlib_texts() -> Iterator[str]:
    for source, tree in _modules(Path(sysconfig.get_path("stdlib"))):
        found = list(_docstrings(tree))
        for block in _COMMENTS.finditer(source):
            text = "\n".join(line.strip().lstrip("#").removeprefix(" ") for line in block.group().splitlines())
            found.append((source.count("\n", 0, block.start()) + 1, text.strip()))
        yield from (text for _, text in sorted(found) if len(text) >= _LEAST_PROSE)


def _modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Text and syntax of every module below ``root``, by path."""
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        if not _SKIPPED.isdisjoint(path.relative_to(root).parts):
            continue
        try:
            with tokenize.open(path) as file:
                source = file.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes in other people's strings
                yield source, ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each."""
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def _dataset(name: str, characters: int | None, seed: int | None) -> str:
    parts = name.split(":")
    if not parts[0] or len(parts) > 4:
        raise ValueError(f"text 'hf:{name}' is malformed; expected hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]]")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"text 'hf:{name}' needs the datasets package: pip install -e '.[eval]' in the clone"
        ) from error
    path, config, split, column = (parts + [""] * 3)[:4]
    column = column or "text"
    rows = load_dataset(path, config or None, split=split or "train", streaming=True)
    if seed is not None:
        rows = rows.shuffle(seed=seed, buffer_size=_SHUFFLED)
    texts, size = [], 0
    for row in rows:
        if column not in row:
            raise ValueError(f"text 'hf:{name}' has no column {column!r}; expected one of {', '.join(row)}")
        if (text := row[column]) is None:
            continue
        if not isinstance(text, str):
            raise ValueError(f"text 'hf:{name}' has column {column!r} of {type(text).__name__}; expected texts")
        texts.append(text)
        size += len(text)
        if characters is not None and size >= characters:
            break
    return _DATASET_SEPARATOR.join(texts)


@dataclass(frozen=True)
class OwnText:
    """Windows that the source model is to write: ``count`` of ``length`` tokens of the text ``name``."""

    name: str
    length: int
    count: int


def text_shares(
    tokenizer: Any, name: str | Path, length: int, count: int, *, seed: int
) -> list[torch.Tensor | OwnText]:
    """Windows of several texts, the same number of each as far as they reach, n times as many of one that is named n
    times; what the source makes up counts as one text, named as often as the most frequent of it.

    Args:
        name: texts of :func:`load_text` joined by ``+``, and ``"generated"`` or ``"generated-diverse"`` for text that
            the source model makes up.
        length, count: tokens of a window, and most windows of all texts.

    Returns:
        int64 [windows, length] of each text; of those that the source makes up, last, what is wanted.

    Raises:
        ValueError: a text is unusable (``load_text``, ``token_windows``).
    """
    named = Counter(text_parts(name))
    # The generated text is as long as it must be: it makes up for texts that are too short for their share.
    own = [part for part in named if part in (GENERATED, DIVERSE)]
    read = [part for part in named if part not in own]
    sharing = sum(named[part] for part in read) + max((named[part] for part in own), default=0)
    parts: list[torch.Tensor | OwnText] = []
    for place, part in enumerate(read + own):
        if place == len(read):
            sharing = sum(named[part] for part in own)
        share = -(-count * named[part] // sharing)
        sharing -= named[part]
        if share < 1:
            break
        if part in own:
            parts.append(OwnText(part, length, share))
            count -= share
        else:
            enough = _USUALLY_PER_TOKEN * length * share if part.startswith(DATASET) else None
            text = load_text(part, enough, seed=seed)
            parts.append(token_windows(tokenizer, text, length, share, seed=seed))
            count -= len(parts[-1])
    return parts


def in_turns(parts: list[torch.Tensor]) -> torch.Tensor:
    """Windows [n, length] of several texts as one: window i of each, then window i + 1, each text at its own pace, so
    that any part of the windows is mixed."""
    import torch

    place = torch.cat([torch.arange(len(part), dtype=torch.float64) / len(part) for part in parts])
    return torch.cat(parts)[place.sort(stable=True).indices]


def prompts() -> tuple[list[str], list[str], list[str], list[str]]:
    """Instructions and openings of plain text, both with ``{}`` for a topic, topics, and openings of documents in many
    languages and formats (``data/prompts.txt``)."""
    parts = re.split(r"^\[\w+\]\n", _data("prompts.txt"), flags=re.MULTILINE)[1:]
    instructions, openings, topics, documents = ([line for line in part.splitlines() if line] for part in parts)
    escapes = {"n": "\n", "t": "\t", "\\": "\\"}
    unescaped = [re.sub(r"\\([nt\\])", lambda found: escapes[found[1]], line) for line in documents]
    return instructions, openings, topics, unescaped


def token_windows(tokenizer: Any, text: str, length: int, count: int, *, seed: int | None = None) -> torch.Tensor:
    """Non-overlapping windows of tokens.

    A tokenizer that puts a start token before a text puts it before every window, inside its ``length``: models trained
    with one lean on it.

    Args:
        seed: None takes the first windows; a number draws ``count`` of them from the whole text, in text order; of a
            text above 16 million characters from pieces that are drawn, at whose edges a word may be cut.

    Returns:
        int64 [windows, length], at least one window and at most ``count``.

    Raises:
        ValueError: a bad argument, or a text shorter than one window.
    """
    import torch

    for name, value, least in (("length", length, 2), ("count", count, 1)):
        if value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")
    start = start_tokens(tokenizer)
    body = length - len(start)
    if body < 1:
        raise ValueError(f"length is {length}; expected more than the {len(start)} start tokens of a window")
    # A text longer than the model's maximum is cut into windows right here: the tokenizer's warning would mislead.
    if seed is not None and len(text) > _LARGE:
        tokens = _drawn_tokens(tokenizer, text, body * count, seed)
    else:
        wanted = body * count if seed is None else len(text)
        for part in dict.fromkeys((text[: CHARACTERS_PER_TOKEN * wanted], text)):
            tokens = plain_tokens(tokenizer, part)
            if len(tokens) >= wanted:
                break
    whole = len(tokens) // body
    if whole == 0:
        raise ValueError(f"text has {len(tokens)} tokens; expected at least one window of {body}")
    windows = torch.tensor(tokens[: whole * body], dtype=torch.int64).view(whole, body)
    if seed is None:
        windows = windows[:count]
    else:
        order = torch.randperm(whole, generator=torch.Generator().manual_seed(seed))[:count]
        windows = windows[order.sort().values]
    return torch.cat([torch.tensor([start], dtype=torch.int64).expand(windows.shape[0], -1), windows], 1)


def _drawn_tokens(tokenizer: Any, text: str, wanted: int, seed: int) -> list[int]:
    """Tokens of pieces of ``text`` that are drawn until they have as many as ``wanted``, in text order."""
    starts = list(range(0, len(text), _PIECE))
    random.Random(seed).shuffle(starts)
    read: dict[int, list[int]] = {}
    while starts and sum(map(len, read.values())) < wanted:
        drawn, starts = starts[:_AT_ONCE], starts[_AT_ONCE:]
        pieces = [text[start : start + _PIECE] for start in drawn]
        read.update(zip(drawn, tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"], strict=True))
    return [token for start in sorted(read) for token in read[start]]


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text without special ones, of any length."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def end_tokens(model: torch.nn.Module) -> list[int]:
    """Tokens after which ``generate`` stops."""
    ends = model.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())


def start_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that ``tokenizer`` puts before a text (``[bos]`` for Llama, none for Qwen and SmolLM)."""
    whole, plain = tokenizer("a")["input_ids"], plain_tokens(tokenizer, "a")
    places = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[: next(places, 0)]
