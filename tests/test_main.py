"""Ctrl-C: at any moment one line, exit code 130, no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.few import few

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


def output_of(process: subprocess.Popen) -> str:
    try:
        return process.communicate(timeout=240)[0]  # seconds; nothing takes as long but what hangs
    finally:
        process.kill()


def ended(process: subprocess.Popen) -> None:
    output = output_of(process)
    assert process.returncode == 130, output
    assert "Traceback" not in output and output.endswith("mha2mla: interrupted\n")


AT_A_MOMENT = """
import signal, sys
event, name = sys.argv[1:3]
def hook(this, args):
    global event
    if this == event and any(str(each).endswith(name) for each in args):
        event = None
        signal.raise_signal(signal.SIGINT)
sys.addaudithook(hook)
sys.argv = ["mha2mla", *sys.argv[3:]]
from mha2mla.__main__ import main
sys.exit(main())
"""


@few(
    "event, name",
    [
        ("import", "mha2mla.cli.verbs"),
        ("import", "torch"),
        ("open", "tokenizer.json"),
        ("os.rename", "layer-00001.safetensors"),
        ("os.rename", "conversion.json"),
        *(("import", "torch.nn"), ("import", "transformers")),
        *(("os.rename", "text.safetensors"), ("os.rename", "model.safetensors")),
    ],
    5,
)
def test_an_interrupt_at_any_moment_is_one_line(event, name, tiny_source, tmp_path):
    """While parsing, importing, reading the source, writing its text, layers, weights and the record."""
    argv = ["convert", str(tiny_source), str(tmp_path / "out"), "--device", "cpu", "--preset", "minimal"]
    argv += ["--calibration.text", "builtin:prose", "--calibration.tokens", "512", "--calibration.lengths", "64"]
    ended(started("-c", AT_A_MOMENT, event, name, *argv))
    assert not (tmp_path / "out").exists()


# Stand-in for the verbs; main() below it is the command's own.
FAKE = """
import signal, sys, types
fake = types.ModuleType("mha2mla.cli.verbs")
sys.modules["mha2mla.cli.verbs"] = fake
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
    while True:
        signal.pause()
""",
    "it comes in a destructor": """
class Thing:
    def __del__(self):
        interrupt()
def run():
    thing = Thing()
    del thing
    while True:
        signal.pause()
""",
}


@pytest.mark.parametrize("body", SWALLOWED.values(), ids=SWALLOWED)
def test_an_interrupt_is_not_lost(body):
    ended(started("-c", FAKE.format(body=body)))


def test_cleanup_after_interrupt_is_not_interrupted():
    """An interrupt is repeated where it was lost, and nowhere else."""
    body = """
from contextlib import contextmanager
@contextmanager
def folder():
    try:
        yield
    finally:
        for _ in range(3):
            signal.pause()  # until the moment of a repetition
        print("removed", flush=True)
def run():
    with folder():
        interrupt()
"""
    process = started("-c", FAKE.format(body=body))
    assert output_of(process) == "removed\nmha2mla: interrupted\n" and process.returncode == 130


def test_interrupt_at_interpreter_exit_is_quiet():
    process = started("-c", FAKE.format(body="import atexit\natexit.register(interrupt)\ndef run():\n    return 0\n"))
    output = output_of(process)
    assert process.returncode == 130 and "Traceback" not in output


def test_a_fault_of_ours_keeps_its_traceback():
    process = started("-c", FAKE.format(body="def run():\n    raise RuntimeError('ours')\n"))
    output = output_of(process)
    assert process.returncode == 1 and "Traceback" in output and "ours" in output


def test_log_gets_few_lines_of_foreign_bars():
    """lm-eval's; by default a bar has a state every tenth of a second."""
    body = """
def run():
    from tqdm import tqdm
    print(tqdm(range(20)).mininterval)
    return 0
"""
    process = started("-c", FAKE.format(body=body))
    assert "30.0" in output_of(process).splitlines() and process.returncode == 0
