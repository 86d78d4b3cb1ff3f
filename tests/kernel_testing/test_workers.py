"""Worker processes and a Ctrl-C, which a terminal sends to all of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys, time
sys.path.insert(0, {folder!r})
from jobs import work

def run():
    from mha2mla.kernel_testing.workers import run_in_workers
    for _ in run_in_workers(work, [1, 2], workers=2):
        pass

if __name__ == "__main__":
    import types
    fake = types.ModuleType("mha2mla.cli")
    fake.main = run
    sys.modules["mha2mla.cli"] = fake
    from mha2mla.__main__ import main
    sys.exit(main())
"""
JOBS = """
import os, signal

def work(job):
    masked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    print("masked" if masked else "open", os.getpid(), flush=True)
    while True:
        signal.pause()
"""


def test_a_ctrl_c_showed_the_traceback_of_every_worker(tmp_path):
    (tmp_path / "jobs.py").write_text(JOBS)
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=str(tmp_path)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, before)
    masks, workers = zip(*(process.stdout.readline().split() for _ in range(2)), strict=True)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert masks == ("masked", "masked")
    assert process.returncode == 130 and output == "mha2mla: interrupted\n"
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
