"""Ctrl-C: at any moment one line, exit code 130, no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def started(*argv: str) -> subprocess.Popen:
    """A process whose interpreter is up, however long that took: until main() sees to SIGINT it is ignored there."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            [sys.executable, *argv], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    while process.poll() is None and not _catches_interrupts(process.pid):
        time.sleep(0.01)
    return process


def _catches_interrupts(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGINT - 1) & 1)


def ended(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output and output.endswith("mha2mla: interrupted\n")
    return output


# Seconds into a conversion of some six: parsing, imports, the source's text, layers, the comparison.
@pytest.mark.parametrize("seconds", [0, 0.4, 0.8, 1.5, 2.5, 3.5, pytest.param(4.5, marks=pytest.mark.slow)])
def test_ctrl_c_showed_a_traceback_until_the_work_began(seconds, tiny_source, tmp_path):
    """For the first 4.5 s: importing torch was nobody's business."""
    argv = ["-m", "mha2mla", "convert", str(tiny_source), str(tmp_path / "out"), "--device", "cpu"]
    process = started(*argv, "--calibration.tokens", "65536", "--calibration.lengths", "64")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    ended(process)
    assert not (tmp_path / "out").exists()


# What stands in for the verbs; main() below it is the command's own.
FAKE = """
import signal, sys, time, types
fake = types.ModuleType("mha2mla.cli")
sys.modules["mha2mla.cli"] = fake
sys.argv = ["mha2mla"]
def interrupt():
    signal.raise_signal(signal.SIGINT)
{body}
fake.main = run
from mha2mla.__main__ import main
sys.exit(main())
"""
SWALLOWED = {
    "a library makes another error of it": """
def run():
    try:
        interrupt()
    except KeyboardInterrupt as error:
        raise RuntimeError("a callback failed") from error
""",
    "a verb takes it for a user's mistake": """
def run():
    try:
        interrupt()
    except KeyboardInterrupt:
        print("mha2mla: interrupted", flush=True)
        return 2
""",
    "it comes in code that was made by exec": """
def run():
    exec("interrupt()")
""",
    "a library drops it": """
def run():
    try:
        interrupt()
    except BaseException:
        pass
    time.sleep(30)
""",
    "it comes in a destructor": """
class Thing:
    def __del__(self):
        interrupt()
def run():
    thing = Thing()
    del thing
    time.sleep(30)
""",
}


@pytest.mark.parametrize("body", SWALLOWED.values(), ids=SWALLOWED)
def test_an_interrupt_is_not_lost(body):
    began = time.perf_counter()
    ended(started("-c", FAKE.format(body=body)))
    assert time.perf_counter() - began < 20


def test_clearing_up_after_an_interrupt_is_not_interrupted():
    """As long as it takes: an interrupt is repeated where it was lost, and nowhere else."""
    body = """
from contextlib import contextmanager
@contextmanager
def folder():
    try:
        yield
    finally:
        time.sleep(1.5)
        print("removed", flush=True)
def run():
    with folder():
        interrupt()
"""
    assert ended(started("-c", FAKE.format(body=body))).startswith("removed\n")


def test_an_interrupt_while_the_interpreter_ends_is_quiet():
    process = started("-c", FAKE.format(body="import atexit\natexit.register(interrupt)\ndef run():\n    return 0\n"))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in output


def test_a_fault_of_ours_keeps_its_traceback():
    process = started("-c", FAKE.format(body="def run():\n    raise RuntimeError('ours')\n"))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" in output and "ours" in output


def test_a_log_gets_few_states_of_bars_that_others_draw():
    """lm-eval's, a state every tenth of a second."""
    body = """
def run():
    from tqdm import tqdm
    for _ in tqdm(range(20)):
        time.sleep(0.05)
    return 0
"""
    process = started("-c", FAKE.format(body=body))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and 1 <= len(output.strip().split("\r")) <= 3
