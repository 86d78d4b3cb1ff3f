"""The command line as tests call it, in this process or in one of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mha2mla.cli import main

ROOT = Path(__file__).parents[1]


def run(*argv) -> int:
    return main([str(argument) for argument in argv])


def command(*argv: str, within: float, **environment: str) -> subprocess.CompletedProcess:
    """``python -m mha2mla`` in a process of its own, which takes less than ``within`` seconds, at least once in three
    times: others use this machine, too."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    for _ in range(3):
        started = time.perf_counter()
        code = [sys.executable, "-m", "mha2mla", *argv]
        done = subprocess.run(code, env=environment, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        if seconds < within:
            return done
    pytest.fail(f"{' '.join(argv)} took {seconds:.1f} s")
