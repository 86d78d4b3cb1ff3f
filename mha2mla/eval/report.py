"""The one place where measured rows become a table on the terminal or a file on disk."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

SCHEMA = "mha2mla.report/1"
_LONGEST_CELL = 56
_LONGEST_LIST = 6
_PIPE_WIDTH = 160
Row = Mapping[str, Any]


def print_table(
    rows: Sequence[Row],
    *,
    title: str | None = None,
    columns: Mapping[str, str] | Sequence[str] | None = None,
    caption: str | None = None,
    console: Console | None = None,
) -> None:
    """Prints rows as one table; a cell too long for a column (why something is missing) becomes a note below it.

    Args:
        rows: dicts of plain values; a row may lack a column (shown as a dash).
        title: printed above the table.
        columns: which keys, in which order; a mapping key → heading gives other headings. Default: every key
            that has a value somewhere, in the order of its first appearance.
        caption: printed below the table (the environment, usually).
        console: where to print; default standard output.
    """
    if columns is None:
        columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if value not in (None, "")))
    headings = dict(columns) if isinstance(columns, Mapping) else {key: key.replace("_", " ") for key in columns}
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.show_header = any(headings.values())
    for key, heading in headings.items():
        numeric = any(isinstance(row.get(key), int | float) for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric)
    notes: dict[str, int] = {}
    for row in rows:
        cells = [format_value(row.get(key)) for key in headings]
        for index, cell in enumerate(cells):
            if len(cell) > _LONGEST_CELL:
                kind, _, rest = cell.partition(": ")
                mark = f"[{notes.setdefault(cell, len(notes) + 1)}]"
                cells[index] = f"{kind} {mark}" if rest and len(kind) < _LONGEST_CELL else mark
        # Text, not str: a value such as "[missing]" is no markup.
        table.add_row(*map(Text, cells))
    # A pipe or a file has no width of its own; 80 columns would fold every heading.
    console = console or Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(table)
    for note, number in notes.items():
        console.print(Text(f"[{number}] {note}"))
    if caption:
        console.print(Text(caption, style="dim"))


def print_values(values: Mapping[str, Any], title: str | None = None) -> None:
    """Prints names beside their values, as a table of two columns without headings; dicts as :func:`flat` has them."""
    rows = [{"name": name.replace("_", " "), "value": value} for name, value in flat(values).items()]
    print_table(rows, title=title, columns={"name": "", "value": ""})


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dicts within ``values`` under dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def format_value(value: Any) -> str:
    """Text of one cell: four significant digits for a float, grouped digits for an int, a dash for nothing; of many
    numbers how many there are, and from where to where."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if value != 0 and not 1e-3 <= abs(value) < 1e6:
            return f"{value:.2e}"
        digits = 0 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:,.{digits}f}"
    if isinstance(value, list | tuple):
        if len(value) > _LONGEST_LIST and all(isinstance(each, int | float) for each in value):
            return f"{format_value(min(value))} to {format_value(max(value))} ({len(value)} values)"
        return ", ".join(map(format_value, value))
    return str(value)


def write_json(path: str | os.PathLike[str], *, kind: str, rows: Sequence[Row], **fields: Any) -> Path:
    """Writes rows, with what else belongs to them, as one JSON file. The file appears whole or not at all.

    Args:
        path: file to write; its folder is made when missing, a file already there is replaced.
        kind: what was measured, such as ``"quality"`` or ``"latency"``.
        rows: list of flat dicts, as for :func:`print_table`.
        fields: further keys at the top level (``environment=…``, ``settings=…``).

    Returns:
        The path written.

    Raises:
        ValueError: a value is no JSON value (a tensor, say).
    """
    path = Path(path)
    payload = {"schema": SCHEMA, "kind": kind, **fields, "rows": [dict(row) for row in rows]}
    try:
        text = json.dumps(_json_numbers(payload), indent=2, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"rows or fields hold a value that JSON cannot express: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _json_numbers(value: Any) -> Any:
    """JSON has no infinity and no NaN; the strings say which it was instead of turning into null."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _json_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_numbers(item) for item in value]
    return value
