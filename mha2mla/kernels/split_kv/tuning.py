"""The tuning table: which configuration was fastest where it was measured. Files and arithmetic only, no GPU.

A table is a JSON file, ``{"version": 2, "rows": [...]}``, with one row per GPU name, decode shape and bucket of batch
sizes (:data:`BATCHES`). A row names a configuration that the op's selection lists, and the measurement that it comes
from. There are two: the user's own, which ``mha2mla tune`` writes, and ``tuning.json`` in the op's folder, which
the package brings; the user's comes first.

A row serves batches up to :data:`REACH` times larger or smaller than the one it was measured at: few sequences leave a
CTA so little to do that another configuration may be best (on an H200, 32 heads with a rope head each: two tiles of 16
rows take 5 % less time than one of 32 at 64 sequences, and 20 % more at 8). A row serves its own page size and dtype.
At pages of 64 tokens and more the kernels are the same (a tile is a part of one page), and bfloat16 and float16 differ
in nothing that takes time; so a row also serves other pages of at least 64 tokens and the other dtype, unless there is
a row that is closer: first by batch, then by page size, then by dtype.

Version 1 had neither buckets nor variants. Its rows are read as rows of the batch that they were measured at, and take
the first variant that fits.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from mha2mla.cache_folder import cache_folder
from mha2mla.kernels.split_kv.choice import CONFIGURATION
from mha2mla.whole_files import write_whole

VERSION = 2
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # upper ends of the buckets; the last has no end: every CTA has work enough
REACH = 4

Row = dict[str, Any]

_MEASUREMENT = {
    "us": float,
    "rule_us": float | None,  # of the configuration that the rule would have chosen; None: it did not run
    "batch": int,
    "seqlen": int,
    "tilelang": str | None,
    "date": str,
    "commit": str | None,
}


def batch_bucket(batch: int, ends: tuple[int, ...] = BATCHES) -> int:
    """The upper end of a batch's bucket. Comparisons only: Dynamo guards a range of batches, not every one."""
    for end in ends[:-1]:
        if batch <= end:
            return end
    return ends[-1] if ends else 0


@cache
def user_table() -> Path | None:
    """Where ``mha2mla tune`` writes by default: ``tuning.json`` in the cache folder. None where there is no home."""
    try:
        return cache_folder() / "tuning.json"
    except RuntimeError:  # no HOME and no entry in the password file
        return None


@dataclass(frozen=True, eq=False)
class TuningTable:
    """The columns that an op's rows have, and what is done with such rows. What a choice is named by
    (:data:`CONFIGURATION`) no two of a shape share.

    Attributes:
        shape: of what one compilation is for, by name with their types; ``page_size`` and ``dtype`` are among them.
        package: the file that the package brings.
    """

    shape: Mapping[str, Any]
    package: Path

    @property
    def fields(self) -> dict[str, Any]:
        """All columns of a row, in their order, with their types."""
        return {"gpu": str} | dict(self.shape) | CONFIGURATION | _MEASUREMENT

    def key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a table has one row for: GPU name, shape and bucket of batch sizes."""
        return (*(row[name] for name in ("gpu", *self.shape)), batch_bucket(row["batch"]))

    def read(self, path: Path) -> dict[tuple[Any, ...], Row]:
        """Rows of a table by :func:`key_of`; none if there is no such file. Read once per process.

        Raises:
            ValueError: naming the file: it is no table, has an unknown version, a malformed row, or two rows of one
                key.
            OSError: the file cannot be read.
        """
        return _read_once(self, path)

    def _read(self, path: Path) -> dict[tuple[Any, ...], Row]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except ValueError as error:
            raise ValueError(f"{path} is no tuning table: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
            raise ValueError(f'{path} is no tuning table; expected {{"version": {VERSION}, "rows": [...]}}')
        rows = content["rows"]
        if content.get("version") == 1:
            rows = [{"variant": ""} | row if isinstance(row, dict) else row for row in rows]
        elif content.get("version") != VERSION:
            raise ValueError(f"{path} is a tuning table of version {content.get('version')!r}; expected {VERSION}")
        return self._by_key(rows, str(path))

    def _by_key(self, rows: Iterable[Any], where: str) -> dict[tuple[Any, ...], Row]:
        table: dict[tuple[Any, ...], Row] = {}
        for number, row in enumerate(rows):
            self._check_row(row, f"{where}, row {number}")
            if self.key_of(row) in table:
                raise ValueError(
                    f"{where}, row {number} is for the same GPU, shape and batches as one before it: {self.key_of(row)}"
                )
            table[self.key_of(row)] = row
        return table

    def _check_row(self, row: Any, where: str) -> None:
        if not isinstance(row, dict) or row.keys() != self.fields.keys():
            differs = sorted(self.fields.keys() ^ row.keys()) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{where} has other keys than expected: {differs}")
        for name, kind in self.fields.items():
            value = row[name]
            fits = isinstance(value, kind) or (kind in (float, float | None) and isinstance(value, int))
            if not fits or isinstance(value, bool):
                raise ValueError(f"{where}: {name} is {value!r}; expected {getattr(kind, '__name__', kind)}")

    def write(self, path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> Path:
        """Puts rows into a table, in place of those for the same key. The file changes whole or not at all.

        Rows are sorted, one a line, so that a diff shows what was measured anew. Running processes keep their choices.

        Args:
            path: the table; made, with its folder, when missing.
            rows: with exactly the keys :attr:`fields`.

        Returns:
            The path written.

        Raises:
            ValueError: a row is malformed, or the file that is there is no table that can be read; it stays as it is.
        """
        path = Path(path).expanduser().resolve()
        ordered = [{name: row[name] for name in self.fields if name in row} | dict(row) for row in rows]
        table = self._read(path) | self._by_key(ordered, "the rows to write")
        lines = [
            json.dumps({name: table[key][name] for name in self.fields}, ensure_ascii=False, allow_nan=False)
            for key in sorted(table)
        ]
        body = "[\n  " + ",\n  ".join(lines) + "\n]" if lines else "[]"
        text = f'{{"version": {VERSION}, "rows": {body}}}\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        _read_once.cache_clear()
        return path

    def find(self, shape: Any, gpu: str, batch: int, table: Mapping[tuple[Any, ...], Row]) -> Row | None:
        """The row of ``table`` that serves ``batch`` sequences of ``shape`` on ``gpu`` best, or None; the module's text
        has the rule."""

        def octaves(row: Row) -> int:
            return abs(batch_bucket(batch).bit_length() - batch_bucket(row["batch"]).bit_length())

        others = [name for name in self.shape if name not in ("page_size", "dtype")]
        serving = [
            row
            for row in table.values()
            if row["gpu"] == gpu
            and all(row[name] == getattr(shape, name) for name in others)
            and min(row["page_size"], 64) == min(shape.page_size, 64)
            and 2 ** octaves(row) <= REACH
        ]

        def distance(row: Row) -> tuple[int, int, bool]:
            pages = abs(row["page_size"].bit_length() - shape.page_size.bit_length())
            return octaves(row), pages, row["dtype"] != shape.dtype

        return min(serving, key=distance, default=None)

    def match(self, row: Mapping[str, Any], choices: Iterable[Any]) -> Any | None:
        """The choice that a row names; None if it is no longer among them (the kernels have changed since)."""
        wanted = {name: row[name] for name in CONFIGURATION if row[name] != ""}
        return next((choice for choice in choices if choice.configuration() | wanted == choice.configuration()), None)

    def prefer(self, shape: Any, gpu: str, batch: int, choices: Sequence[Any]) -> tuple[Any, str]:
        """What the tables choose among ``choices`` for ``batch`` sequences on ``gpu``, or the first of them, the
        rule's; and why, in words.

        A table that cannot be read is warned of and left aside: decode must not fail because of a file in a cache.
        """
        ignored = ""
        for whose, path in (("user's", user_table()), ("package's", self.package)):
            if path is None:
                continue
            try:
                row = self.find(shape, gpu, batch, self.read(path))
            except (ValueError, OSError) as error:
                warnings.warn(f"the {whose} tuning table is not used: {error}", RuntimeWarning, stacklevel=2)
                ignored += f"; the {whose} table is not used: {error}"
                continue
            if row is None:
                continue
            choice = self.match(row, choices)
            if choice is not None:
                return choice, f"{whose} {_describe(row, shape)}{ignored}"
            ignored += f"; the {whose} table row of {row['date']} names a {row['kernel']} that is no longer offered"
        return choices[0], f"rule{ignored}"


@lru_cache(maxsize=16)
def _read_once(table: TuningTable, path: Path) -> dict[tuple[Any, ...], Row]:
    return table._read(path)


def _describe(row: Mapping[str, Any], shape: Any) -> str:
    """A row in words, for the shape that it serves."""
    rule = "did not run" if row["rule_us"] is None else f"{row['rule_us']:.1f} µs"
    text = f"table row of {row['date']}, batch {row['batch']}, {row['us']:.1f} µs; the rule's choice: {rule}"
    measured = [f"{name} {row[name]}" for name in ("page_size", "dtype") if row[name] != getattr(shape, name)]
    return text + (f" (measured at {' and '.join(measured)})" if measured else "")
