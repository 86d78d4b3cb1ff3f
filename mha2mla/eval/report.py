"""Tables of measured rows, for terminals and notebooks, and their JSON files."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mha2mla.files import SCHEMA, report, write_output

_LONGEST_CELL = 56
_LONGEST_LIST = 6
_PIPE_WIDTH = 4096
Row = Mapping[str, Any]
VALUE_COLUMNS = {"name": "", "value": ""}  # without headings


def print_table(
    rows: Sequence[Row],
    *,
    title: str | None = None,
    columns: Mapping[str, str] | Sequence[str] | None = None,
    caption: str | None = None,
    console: Console | None = None,
    longest: int = _LONGEST_CELL,
) -> None:
    """Prints rows as a table, or several below one another where the terminal is too narrow for all columns.

    A cell too long for a column (why something is missing) becomes a note below it.

    Args:
        rows: dicts of plain values; a row may lack a column (shown as a dash).
        columns: which keys, in which order; a mapping key → heading gives other headings. Default: every key
            that has a value somewhere, in the order of its first appearance.
        caption: printed below the table (the environment, usually).
        longest: characters of a cell; more become a note.
    """
    headings = _headings(rows, columns)
    notes: dict[str, int] = {}
    cells = [{key: _cell(row.get(key), notes, longest) for key in headings} for row in rows]
    numeric = {key for key in headings if any(isinstance(row.get(key), int | float) for row in rows)}
    # A pipe or a file has no width: its reader needs whole lines, not lines folded at 80 columns.
    console = console or Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    for part in _parts(list(headings), lambda keys: _table(cells, headings, keys, numeric), console):
        table = _table(cells, headings, part, numeric)
        table.title, title = title, None
        console.print(table)
    for note, number in notes.items():
        console.print(Text(f"[{number}] {note}"))
    if caption:
        console.print(Text(caption, style="dim"))


def _cell(value: Any, notes: dict[str, int], longest: int) -> str:
    """Text of a cell, or the mark of a note that ``notes`` then has."""
    cell = format_value(value)
    if len(cell) <= longest:
        return cell
    kind, _, rest = cell.partition(": ")
    mark = f"[{notes.setdefault(cell, len(notes) + 1)}]"
    return f"{kind} {mark}" if rest and len(kind) < longest else mark


def _table(cells: Sequence[Row], headings: Mapping[str, str], keys: Sequence[str], numeric: set[str]) -> Table:
    table = Table(title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.show_header = any(headings.values())
    for key in keys:
        table.add_column(headings[key], justify="right" if key in numeric else "left", overflow="fold")
    for row in cells:
        # Text, not str: a value such as "[missing]" is no markup.
        table.add_row(*(Text(row[key]) for key in keys))
    return table


def _parts(keys: list[str], table: Callable[[list[str]], Table], console: Console) -> list[list[str]]:
    """The columns in as many tables as they need to fit, each with the first column, if there is
    room, by which rows are told apart."""
    parts: list[list[str]] = [keys[:1]]
    unbounded = console.options.update(width=_PIPE_WIDTH)

    def fits(chosen: list[str]) -> bool:
        return console.measure(table(chosen), options=unbounded).maximum <= console.width

    for key in keys[1:]:
        if fits([*parts[-1], key]):
            parts[-1].append(key)
        else:
            parts.append([keys[0], key] if fits([keys[0], key]) else [key])
    return parts


def html_table(rows: Sequence[Row], columns: Mapping[str, str] | None = None, *, title: str = "") -> str:
    """Rows as an HTML table, for notebooks; arguments as of :func:`print_table`."""
    headings = _headings(rows, columns)
    cells = [[format_value(row.get(key)) for key in headings] for row in rows]
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings.values())
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    head = f"<thead><tr>{head}</tr></thead>" if any(headings.values()) else ""
    return f"<table><caption>{escape(title)}</caption>{head}<tbody>{body}</tbody></table>"


def markdown_table(rows: Sequence[Row], columns: Mapping[str, str] | None = None) -> str:
    """Rows as a Markdown table; arguments as of :func:`print_table`."""
    headings = _headings(rows, columns)
    lines = [list(headings.values()), ["---"] * len(headings)]
    lines += [[format_value(row.get(key)) for key in headings] for row in rows]
    return "\n".join(f"| {' | '.join(map(markdown_text, line))} |" for line in lines)


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", escape(text, quote=False)).replace("\r", "").replace("\n", "<br>")


def filled(columns: Mapping[str, str], rows: Sequence[Row]) -> dict[str, str]:
    """Key → heading of the columns that have a value somewhere."""
    return {key: head for key, head in columns.items() if any(row.get(key) not in (None, "") for row in rows)}


def _headings(rows: Sequence[Row], columns: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
    if columns is None:
        columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if value not in (None, "")))
    return dict(columns) if isinstance(columns, Mapping) else {key: key.replace("_", " ") for key in columns}


def print_values(values: Mapping[str, Any], title: str | None = None) -> None:
    """Prints names beside their values, as a table of two columns without headings; dicts as :func:`flat` has them."""
    print_table(value_rows(values), title=title, columns=VALUE_COLUMNS)


def value_rows(values: Mapping[str, Any]) -> list[Row]:
    """Rows of :data:`VALUE_COLUMNS`, of names beside their values."""
    return [{"name": name.replace("_", " "), "value": value} for name, value in flat(values).items()]


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
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    if isinstance(value, float) and math.isfinite(value):
        if not 1e-3 <= abs(value) < 1e6:
            return f"{value:.2e}"
        return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"
    if isinstance(value, list | tuple):
        if len(value) > _LONGEST_LIST and all(isinstance(each, int | float) for each in value):
            return f"{format_value(min(value))} to {format_value(max(value))} ({len(value)} values)"
        return ", ".join(map(format_value, value))
    return str(value)


def write_json(path: str | os.PathLike[str] | None, *, kind: str, rows: Sequence[Row], **fields: Any) -> Path | None:
    """Writes rows, with what else belongs to them, as one JSON file. The file appears whole or not at all.

    Args:
        path: file to write; its folder is made when missing, a report of this kind is replaced. None: nothing is done.
        kind: what was measured, such as ``"quality"`` or ``"latency"``.
        rows: list of flat dicts, as for :func:`print_table`.
        fields: further keys at the top level (``environment=…``, ``settings=…``).

    Returns:
        The path written.

    Raises:
        ValueError: a value is no JSON value (a tensor, say), or the file there is no report of this kind.
    """
    if path is None:
        return None
    payload = {"schema": SCHEMA, "kind": kind, **fields, "rows": [dict(row) for row in rows]}
    try:
        text = json.dumps(_json_numbers(payload), indent=2, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"rows or fields hold a value that JSON cannot express: {error}") from error
    return write_output(path, report(kind), lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def _json_numbers(value: Any) -> Any:
    """JSON has no infinity and no NaN: strings keep them apart."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _json_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_numbers(item) for item in value]
    return value
