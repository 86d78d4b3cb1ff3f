"""Tables and JSON files of measured rows."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

from mha2mla.eval.report import SCHEMA, flat, format_value, html_table, print_table, write_json


def printed(rows, **arguments) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_table(rows, console=console, **arguments)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (49152, "49,152"),
        (0.0, "0"),
        (1.5, "1.500"),
        (12.3456, "12.35"),
        (1234.56, "1,235"),
        (-1234.56, "-1,235"),
        (999.96, "1,000.0"),
        (0.0123456, "0.01235"),
        (0.00123456, "0.001235"),
        (2.5e-7, "2.50e-07"),
        (3e8, "3.00e+08"),
        (math.inf, "inf"),
        ("[x]", "[x]"),
        ([512, 2048.5], "512, 2,048"),
        ([0.25] * 30 + [1.5], "0.2500 to 1.500 (31 values)"),
    ],
)
def test_format_value(value, text):
    assert format_value(value) == text


def test_nested_values_have_dotted_names():
    assert flat({"a": 1, "b": {"c": {"d": [2]}, "e": None}}) == {"a": 1, "b.c.d": [2], "b.e": None}


def test_table_shows_every_key_or_the_columns_asked():
    text = printed([{"a": 1, "b": 2}], columns={"b": "second"})
    assert "second" in text and "1" not in text
    text = printed([{"a": 1, "b_c": 2.0}, {"a": 3, "d": "[bold]x"}], title="rows", caption="below")
    for piece in ("rows", "b c", "2.000", "[bold]x", "–", "below"):
        assert piece in text


def test_long_cells_become_numbered_notes():
    reason = "missing: " + "a long reason " * 10
    lines = printed([{"x": 1, "status": reason}, {"x": 2, "status": reason}, {"x": 3, "status": "ok"}])
    assert lines.count("missing [1]") == 2
    assert "[1] missing: a long reason" in lines
    assert "[2]" not in lines


@pytest.mark.parametrize("width", [12, 40, 80, 4000])
def test_a_narrow_terminal_has_all_columns(width):
    row = {f"a column with a name {i}": 123456789 + i for i in range(9)} | {"why": "a reason of some words"}
    console = Console(file=io.StringIO(), width=width)
    print_table([row, row], title="rows", console=console)
    shown = console.file.getvalue()
    assert "…" not in shown and all(len(line) <= width for line in shown.splitlines())
    together = "".join(shown.split())  # what is folded, too
    for key, value in row.items():
        assert all(word in shown for word in key.split()) and format_value(value).split()[0] in together
    if width == 4000:
        assert shown.count("rows") == 1 and len(shown.splitlines()) == 7


def test_a_pipe_takes_lines_of_any_length(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    print_table([{f"column {i}": "x" * 30 for i in range(20)}])
    assert max(map(len, capsys.readouterr().out.splitlines())) > 20 * 30


def test_html_for_notebooks_is_escaped():
    shown = html_table([{"a": 1.5, "b": "<b>"}], {"a": "first", "b": "second"}, title="x & y")
    assert "<caption>x &amp; y</caption>" in shown and "<th>first</th>" in shown
    assert "<td>1.500</td><td>&lt;b&gt;</td>" in shown


def test_json_holds_rows_fields_and_schema(tmp_path):
    row, environment = {"x": 1.5, "y": None}, {"gpu": None}
    rows = [row | {"z": math.inf}]
    path = write_json(tmp_path / "new" / "r.json", kind="quality", rows=rows, environment=environment)
    written = {"schema": SCHEMA, "kind": "quality", "environment": environment, "rows": [row | {"z": "inf"}]}
    assert json.loads(path.read_text()) == written


def test_json_failure_leaves_the_old_file_and_no_other(tmp_path):
    path = write_json(tmp_path / "r.json", kind="k", rows=[{"x": 1}])
    before = path.read_text()
    with pytest.raises(ValueError, match="JSON cannot express"):
        write_json(path, kind="k", rows=[{"x": torch.zeros(1)}])
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]
