"""The command line as tests call it, in this process or in one of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mha2mla.cli.verbs import app, main

# Words of every verb: its parser is app[words[0]][words[1]]….
VERBS = [
    (*group, name)
    for group, parent in (((), app), (("eval",), app["eval"]), (("check",), app["check"]))
    for name in parent
    if not name.startswith("-") and name not in ("eval", "check")
]
ROOT = Path(__file__).parents[1]


def run(*argv) -> int:
    return main([str(argument) for argument in argv])


def parse(*argv: str) -> dict[str, Any]:
    """Arguments that a command line gives its verb. Raises CycloptsError."""
    return app.parse_args(argv, exit_on_error=False, print_error=False)[1].arguments


def python(code: str, *argv: str) -> subprocess.CompletedProcess:
    """``python -c`` at the root of the repository, in a process of its own."""
    command = [sys.executable, "-c", code, *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def command(*argv: str, **environment: str) -> subprocess.CompletedProcess:
    """``python -m mha2mla`` in a process of its own, which imports nothing that takes seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1", **environment}
    code = [sys.executable, "-m", "mha2mla", *argv]
    done = subprocess.run(code, env=environment, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines(keepends=True)
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "mha2mla.cli.verbs" in imported and not imported & {"torch", "transformers", "tilelang"}, argv
    done.stderr = "".join(line for line in lines if not line.startswith("import time:"))
    return done
