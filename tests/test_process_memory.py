"""Pages of large blocks that were freed serve the next ones, without the system."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "mha2mla" / "process_memory.py"
FAULTS = """
import resource, runpy, sys
if sys.argv[2] == "keep":  # of the file alone: the package takes seconds
    runpy.run_path(sys.argv[1])["keep_freed_memory"]()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        block = b"x" * (64 << 20)
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own")
def test_a_freed_block_is_not_cleared_by_the_system_again():
    found = [
        int(subprocess.run([sys.executable, "-c", FAULTS, FILE, how], capture_output=True, check=True).stdout)
        for how in ("leave", "keep")
    ]
    # Huge pages of 2 MiB would be as few as 128 faults; what is kept has none.
    assert found[0] > 64 and found[1] < found[0] / 8
