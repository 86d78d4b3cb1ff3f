"""Check that the tests can fail: deliberate faults (``benchmarks/faults.py``), one at a time, and who must notice.

    python benchmarks/mutations.py
    python benchmarks/mutations.py --only "fsync" --timeout 120
    python benchmarks/mutations.py --workers 16 --json mutations.json
    python benchmarks/mutations.py --seed 1 --budget 1200 --json mutations.json

Works on a copy of the tree in a temporary folder. The tests of each fault are run on the copy as it is, then with the
fault. Exit code 1 if one survives, or if its tests fail without it.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.faults import FAULTS, Fault
from benchmarks.recording import Recording, command

ROOT = Path(__file__).resolve().parents[1]
TREE = ("mha2mla", "tests", "benchmarks", "notebooks", "docs", "README.md", "LICENSE", "Makefile", "pyproject.toml")
CAUGHT, SURVIVED = "caught", "survived"


def copy_tree(root: Path, folder: Path) -> None:
    """The parts of a tree that tests look at, without what Python or a test run leaves in it."""
    for name in TREE:
        path = root / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        elif path.exists():
            shutil.copyfile(path, folder / name)


def run_tests(tree: Path, fault: Fault, timeout: float) -> tuple[str, str, float]:
    """Result of a fault's tests on a tree: "pass", "fail", "hang" or "error"; their last lines; their seconds."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *fault.tests]
    command += ["-k", fault.only] if fault.only else []
    # A copy whose bytecode was cached a moment ago may be taken for the file that was changed since.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return "hang", f"no end within {timeout:g} s", timeout
    last = " | ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
    return {0: "pass", 1: "fail"}.get(done.returncode, "error"), last, time.perf_counter() - started


def try_fault(tree: Path, fault: Fault, timeout: float, sound: dict[tuple, tuple[str, str, float]]) -> dict[str, Any]:
    """Puts a fault into a tree, runs its tests, and takes it out again.

    Args:
        sound: what the tests say without a fault, by their arguments; added to.
    """
    started = time.perf_counter()
    key = (fault.tests, fault.only)
    if key not in sound:
        sound[key] = run_tests(tree, fault, timeout)
    result, last, usual = sound[key]
    if result != "pass":
        status = f"unsound: without the fault its tests {result}: {last}"
    else:
        path = tree / fault.file
        right = path.read_text(encoding="utf-8")
        try:
            path.write_text(put_in(fault, right), encoding="utf-8")
            result, last, _ = run_tests(tree, fault, timeout)
        finally:
            path.write_text(right, encoding="utf-8")
        if result == "hang" and usual > timeout / 3:
            status = f"unsound: {last}, and {usual:.0f} s without the fault"
        elif result == "error":
            status = f"unsound: pytest did not run: {last}"
        else:
            status = {"pass": SURVIVED, "fail": CAUGHT, "hang": f"{CAUGHT}: the tests hang"}[result]
    return {
        "fault": fault.name,
        "file": fault.file,
        "tests": [*fault.tests, *(["-k", fault.only] if fault.only else [])],
        "status": status,
        "seconds": round(time.perf_counter() - started, 1),
    }


def put_in(fault: Fault, text: str) -> str:
    """A file's text with the fault.

    Raises:
        ValueError: the snippet does not occur exactly once.
    """
    if text.count(fault.right) != 1:
        raise ValueError(f"fault {fault.name!r}: its snippet occurs {text.count(fault.right)} times in {fault.file}; 1")
    return text.replace(fault.right, fault.wrong)


def run_faults(
    faults: Sequence[Fault],
    root: Path,
    timeout: float,
    budget: float | None = None,
    save: Any = None,
    workers: int = 1,
) -> list[dict[str, Any]]:
    """A row per fault that was tried before the budget, in seconds, ended; ``save(rows)`` after each.

    Each of the ``workers`` has a tree of its own.
    """
    started, rows, sound, waiting = time.perf_counter(), [], {}, iter(faults)

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="mha2mla-mutations-") as folder:
            copy_tree(root, Path(folder))
            for fault in waiting:
                if budget is not None and time.perf_counter() - started > budget:
                    break
                row = try_fault(Path(folder), fault, timeout, sound)
                rows.append(row)
                print(f"{row['status'][:80]}: {fault.name} ({row['seconds']:.0f} s)", file=sys.stderr, flush=True)
                if save is not None:
                    save(list(rows))

    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(work) for _ in range(workers)]:
            done.result()
    return rows


def run(
    only: str = "",
    seed: int | None = None,
    timeout: float = 600.0,
    budget: float | None = None,
    json: str | None = None,
    workers: int = 1,
) -> bool:
    """Tries the faults and prints the outcome of each; False if one survived or could not be tried.

    Args:
        only: faults whose name or file contains this text.
        seed: of their order, so that runs with a budget see different ones; default as they are listed.
        timeout: seconds after which the tests of a fault count as hung.
        budget: seconds after which no further fault is tried.
        json: also write the rows to this file, while they come in.
        workers: faults that are tried at a time, each in a tree of its own.
    """
    faults = [fault for fault in FAULTS if only in fault.name or only in fault.file]
    if not faults:
        raise ValueError(f"only is {only!r}; expected a part of a fault's name or file")
    if seed is not None:
        random.Random(seed).shuffle(faults)
    table = Recording("mutations", json, seed=seed, listed=len(faults))

    def save(rows: list[dict[str, Any]]) -> None:
        table.rows = rows
        table.write()

    rows = run_faults(faults, ROOT, timeout, budget, save, workers)
    bad = [row for row in rows if not row["status"].startswith(CAUGHT)]
    title = f"{len(rows)} of {len(faults)} faults tried, {len(bad)} not caught"
    table.show(title, ("fault", "file", "status", "seconds"))
    return bool(rows) and not bad


if __name__ == "__main__":
    sys.exit(command(run, cpu=True))
