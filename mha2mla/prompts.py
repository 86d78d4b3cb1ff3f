"""Prompts from a JSON Lines file, and answers into one: line by line, so that what was written stays."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KEYS = ("id", "prompt", "messages")  # which say whether two lines ask for the same


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """A dict per line, with ``prompt`` (a text) or ``messages`` (dicts with ``role`` and ``content``), and other keys.

    Raises:
        ValueError: a line is something else, with its number; or there is none.
    """
    found = []
    for number, line in enumerate(_lines(Path(path).read_text(encoding="utf-8-sig")), 1):
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
    """A JSON Lines file of answers that a run goes on with.

    Args:
        path: of the file; None: nothing is written.
        made_by: model and sampling, kept in every line.
        overwrite: begin anew.

    Attributes:
        done: what has an answer already.

    Raises:
        ValueError: the file has lines that something else wrote.
    """

    def __init__(self, path: str | Path | None, made_by: Mapping[str, Any], overwrite: bool = False) -> None:
        self._made_by, self.done = dict(made_by), Counter()
        self._file = None
        if path is None:
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not overwrite:
            self._take_up(path)
        self._file = path.open("w" if overwrite else "a", encoding="utf-8")

    def remaining(self, tasks: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
        """Numbers and tasks that have no answer yet; of equal tasks the first ones have."""
        done, left = self.done.copy(), []
        for number, task in enumerate(tasks):
            if done[_key(task)]:
                done[_key(task)] -= 1
            else:
                left.append((number, task))
        return left

    def write(self, task: Mapping[str, Any], **answer: Any) -> None:
        """One line, at once."""
        if self._file is not None:
            self._file.write(json.dumps({**task, **answer, **self._made_by}, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _take_up(self, path: Path) -> None:
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        for number, line in enumerate(_lines(whole.decode("utf-8")), 1):
            try:
                row = json.loads(line)
                made_by = {key: row[key] for key in self._made_by}
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path} line {number} is no answer; expected another file, or overwrite=True"
                ) from error
            if made_by != json.loads(json.dumps(self._made_by)):
                other = {key: value for key, value in made_by.items() if value != self._made_by[key]}
                raise ValueError(f"{path} has answers of {other}; expected another file, or overwrite=True")
            self.done[_key(row)] += 1
        if len(whole) < len(text):  # a line that a kill cut short
            with path.open("r+b") as file:
                file.truncate(len(whole))


def _lines(text: str) -> list[str]:
    """Without their ends. JSON leaves U+0085, U+2028 and U+2029 in texts, which str.splitlines takes for ends."""
    return text.removesuffix("\n").split("\n") if text else []


def _key(task: Mapping[str, Any]) -> str:
    return json.dumps([task.get(key) for key in KEYS], sort_keys=True)
