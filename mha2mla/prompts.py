"""Prompts from a JSON Lines file, and answers into one: line by line, so that what was written stays."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha2mla.checkpoints import CONFIG_FILE, find_checkpoint, read_json, regular_file
from mha2mla.conversion.card import RECORD_FILE
from mha2mla.files import Kind, output_file

KEYS = ("id", "prompt", "messages")  # equal in two lines that ask for the same
ANSWER_KEYS = ("answer", "finished", "prompt_tokens", "new_tokens")  # added by an answer to its prompt
_MARKS = ("answer", "finished", "model", "sampling")  # keys by which a line is known for one of :class:`Answers`
ANSWERS = Kind("answers file", lambda head: head.lstrip().startswith(b"{"))  # every line is checked by Answers


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """A dict per line, with ``prompt`` (a text) or ``messages`` (dicts with ``role`` and ``content``), and other keys.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not UTF-8, a line is something else, with its number; or there is none.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"file is {str(path)!r}, which is not there; expected JSON Lines with prompts")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    found = []
    # JSON leaves U+0085, U+2028 and U+2029 in texts, which str.splitlines takes for ends of lines.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is no JSON: {error}") from error
        given = [key for key in ("prompt", "messages") if isinstance(task, dict) and key in task]
        if len(given) != 1 or not isinstance(task[given[0]], str if given == ["prompt"] else list):
            raise ValueError(
                f"{path} line {number} is {line[:60]!r}; expected an object with a text as 'prompt' or a list as"
                " 'messages'"
            )
        found.append(task)
    if not found:
        raise ValueError(f"{path} has no prompts; expected one in a line")
    return found


class Answers:
    """A JSON Lines file of answers that a run goes on with. It changes with the first answer that is written.

    Args:
        path: of the file; None: nothing is written.
        made_by: what answers depend on beside their prompt, with the keys ``model`` and ``sampling``; in every line.
        overwrite: replace the answers that are there.
        key_prefix: put before the keys of :data:`ANSWER_KEYS` and ``made_by``.

    Attributes:
        done: what has an answer already.

    Raises:
        ValueError: the file cannot be written, has lines that something else wrote, or, without ``overwrite``, answers
            that were made by something else.
    """

    def __init__(
        self, path: str | Path | None, made_by: Mapping[str, Any], overwrite: bool = False, key_prefix: str = ""
    ) -> None:
        self._prefix, self.done = key_prefix, Counter()
        self._made_by = json.loads(json.dumps({key_prefix + key: value for key, value in made_by.items()}))
        self._path = output_file(path, ANSWERS, name="output")
        self._file, self._kept = None, 0  # bytes of whole lines that stay
        if self._path is not None and self._path.exists():
            self._take_up(overwrite)

    def remaining(self, tasks: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
        """Numbers and tasks that have no answer yet; of equal tasks the first ones have.

        Raises:
            ValueError: a task has a key of an answer.
        """
        ours = {self._prefix + key for key in ANSWER_KEYS} | self._made_by.keys()
        for number, task in enumerate(tasks if self._path is not None else (), 1):
            if taken := sorted(ours & task.keys()):
                raise ValueError(
                    f"prompt {number} has the key {taken[0]!r}, which its answer has, too; expected other keys, or a"
                    " key_prefix for those of answers (--key-prefix)"
                )
        done, left = self.done.copy(), []
        for number, task in enumerate(tasks):
            if done[_key(task)]:
                done[_key(task)] -= 1
            else:
                left.append((number, task))
        return left

    def write(self, task: Mapping[str, Any], **answer: Any) -> None:
        """One line, at once."""
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
            self._file.truncate(self._kept)
        own = {self._prefix + key: value for key, value in answer.items()}
        self._file.write(json.dumps({**task, **own, **self._made_by}, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _take_up(self, overwrite: bool) -> None:
        """Counts the answers of the file, or with ``overwrite`` only sees that there is nothing else in it."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                row = self._row(line)
                if number > 1 and not line.endswith(b"\n") and (row or (row is None and line.startswith(b'{"'))):
                    break  # a line that a kill cut short
                if not row:
                    raise ValueError(
                        f"output is {str(self._path)!r}, whose line {number} is no answer of mha2mla generate"
                        f"{self._prefix and f' with the key_prefix {self._prefix!r}'}; expected another file"
                    )
                if overwrite:
                    continue
                other = {key: row.get(key) for key, value in self._made_by.items() if row.get(key) != value}
                if other:
                    raise ValueError(f"{self._path} has answers of {other}; expected another file, or overwrite=True")
                self.done[_key(row)] += 1
                self._kept += len(line)

    def _row(self, line: bytes) -> dict[str, Any] | None:
        """A line's answer; empty where it holds something else, None where it is no JSON."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return row if isinstance(row, dict) and all(self._prefix + key in row for key in _MARKS) else {}


def _key(task: Mapping[str, Any]) -> str:
    return json.dumps([task.get(key) for key in KEYS], sort_keys=True)


def checkpoint_digest(checkpoint: str) -> str:
    """Identity of a checkpoint among others at the same path: sha256 of config, tokenizer and weights, in hex.

    A converted checkpoint's shards are hashed here only where they are younger than the record with their digests; of a
    hub id it is the commit.

    Raises:
        FileNotFoundError, ValueError: there is none, or a file of it cannot be read.
    """
    from mha2mla.conversion.source.files import companions, identify

    folder = Path(find_checkpoint(checkpoint, "model"))
    if not folder.is_dir():
        from transformers.utils import cached_file

        return Path(cached_file(str(folder), CONFIG_FILE)).parent.name
    weights = [path.name for path in folder.glob("*.safetensors")] or [path.name for path in folder.glob("*.bin")]
    recorded: dict[str, str] = {}
    if (folder / RECORD_FILE).exists():
        written = regular_file(folder, RECORD_FILE).stat().st_mtime_ns
        digests = read_json(folder, RECORD_FILE).get("weights_sha256")
        known = [name for name in weights if isinstance(digests, dict) and name in digests]
        recorded = {name: digests[name] for name in known if (folder / name).stat().st_mtime_ns <= written}
    hashed = identify(folder, {CONFIG_FILE, *companions(folder), *weights} - recorded.keys())
    found = recorded | {name: identity.sha256 for name, identity in hashed.items()}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
