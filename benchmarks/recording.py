"""Rows of a benchmark, printed and written to a file as they come, then shown as a table; its exit code.

A table's headings are the keys of its file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mha2mla.environment import collect_environment, describe_environment
from mha2mla.eval.report import format_value, print_table, write_json
from mha2mla.files import report_file


class Recording:
    """Rows of one kind, with the machine, versions and commit.

    Args:
        kind: of the file. json: where to write it, after every row: a run that is cut short keeps what it has.
        fields: what else stands in the file.
    """

    def __init__(self, kind: str, json: str | None = None, **fields: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self.environment = collect_environment()
        self._kind, self._json, self.fields = kind, report_file(json, kind), fields

    def add(self, row: dict[str, Any]) -> None:
        """Says its texts and numbers in a line, and writes all so far."""
        self.rows.append(row)
        said = {key: value for key, value in row.items() if not isinstance(value, list | dict)}
        print("; ".join(f"{key} {format_value(value)}" for key, value in said.items()), flush=True)
        self.write()

    def write(self) -> None:
        if self._json:
            write_json(self._json, kind=self._kind, rows=self.rows, environment=self.environment, **self.fields)

    def show(self, title: str, columns: Sequence[str] | None = None) -> bool:
        """Prints the table; whether all is right."""
        print_table(self.rows, title=title, columns=columns, caption=describe_environment(self.environment))
        return all(row.get("status", "ok") == "ok" for row in self.rows)


def asks_for_cpu() -> bool:
    """Whether the command line has ``--device cpu``."""
    return bool({"cpu", "--device=cpu"} & set(sys.argv))


def command(*verbs: Callable[..., bool], cpu: bool = False) -> int:
    """Exit status of a benchmark's command line: 1 where something is not right; ``cpu``: it runs without a GPU."""
    from cyclopts import App, Parameter

    app = App(default_parameter=Parameter(consume_multiple=True, negative_iterable=()), result_action="return_value")
    for verb in verbs:
        (app.default if len(verbs) == 1 else app.command)(verb)
    if not cpu and not torch.cuda.is_available() and not {"-h", "--help"} & set(sys.argv):
        sys.exit(f"{sys.argv[0]}: no CUDA device is available")
    return int(app(sys.argv[1:]) is False)  # None after --help
