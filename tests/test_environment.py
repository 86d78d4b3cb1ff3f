"""The record beside a number, and memory that a process keeps."""

import json
import math
import os
import platform
import subprocess
import sys
from importlib.metadata import version

import pytest

from mha2mla import environment as module
from mha2mla.environment import collect_environment, describe_environment


def test_it_is_flat_json_with_versions():
    found = collect_environment()
    assert json.loads(json.dumps(found)) == found
    assert not any(isinstance(value, dict | list) for value in found.values())
    assert found["torch"] == version("torch")
    assert found["transformers"] == version("transformers")
    assert found["cpu_count"] >= 1 and found["cpu"]
    assert {"commit", "date", "gpu", "driver", "power_cap_w", "sm_clock_mhz"} <= set(found)


def test_one_line_names_device_versions_and_date():
    found = collect_environment()
    line = describe_environment(found)
    assert "\n" not in line and found["torch"] in line and found["date"] in line
    assert ("no GPU" in line) == (found["gpu"] is None)


def test_the_gpu_line_carries_driver_clocks_and_cap():
    gpu = {"gpu": "NVIDIA H200", "driver": "580.1", "power_cap_w": 700.0}
    clocks = dict.fromkeys(("sm_clock_mhz", "sm_clock_max_mhz"), 1980)
    line = describe_environment(collect_environment() | gpu | clocks)
    assert "NVIDIA H200 (driver 580.1, SM 1980 of 1980 MHz, cap 700 W)" in line


@pytest.mark.parametrize(
    ("script", "values"),
    [
        (
            "echo 'NVIDIA H200, 580.95.05, 345, 1980, 3201, 700.00, 143771'",
            ["NVIDIA H200", "580.95.05", 345, 1980, 3201, 700.0, 143771],
        ),
        ("echo 'No devices were found' >&2\nexit 6", None),
    ],
    ids=["answer", "broken"],
)
def test_nvidia_smi_is_read(script, values, tmp_path, monkeypatch):
    """Against a stand-in that answers in nvidia-smi's format."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    keys = ("gpu", "driver", "sm_clock_mhz", "sm_clock_max_mhz", "memory_clock_mhz", "power_cap_w", "memory_mib")
    assert module._gpu_from_smi(0) == (values and dict(zip(keys, values, strict=True)))


def test_commit_is_gits_own_or_what_the_variable_says(monkeypatch):
    here = os.path.dirname(module.__file__)
    tracked = subprocess.run(
        ["git", "ls-files", "--error-unmatch", module.__file__], cwd=here, capture_output=True, check=False
    )
    monkeypatch.setenv("MHA2MLA_COMMIT", "feedc0de")
    commit = collect_environment()["commit"]
    if tracked.returncode == 0:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True).stdout
        assert head.startswith(commit.removesuffix("+dirty"))
    else:
        assert commit == "feedc0de"


FAULTS = """
import resource, runpy, sys
if sys.argv[2] == "keep":  # of the file alone: importing the package takes seconds
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
def test_keep_freed_memory_avoids_page_faults():
    command = [sys.executable, "-c", FAULTS, module.__file__]
    found = [int(subprocess.check_output([*command, how])) for how in ("leave", "keep")]
    # Huge pages of 2 MiB would be as few as 128 faults; what is kept has none.
    assert found[0] > 64 and found[1] < found[0] / 8


@pytest.mark.parametrize(
    ("quota", "load", "device", "said"),
    [
        (2.5, 0.1, None, "may use 2.5 cores: set OMP_NUM_THREADS=2"),
        (math.inf, 5.0, "cpu", "beside other work (load 5.0 on 8 cores)"),
        (math.inf, 0.1, "cpu", ""),
        (2.5, 5.0, "cuda:0", ""),
    ],
)
def test_thread_hint(quota, load, device, said, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(module.os.path, "exists", lambda path: False)
    monkeypatch.setattr(module, "_cpu_quota", lambda: quota)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(module.os, "getloadavg", lambda: (load, 0.0, 0.0))
    hint = module.thread_hint(device)
    assert said in hint and bool(hint) == bool(said)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert module.thread_hint(device) == ""


@pytest.mark.parametrize("name", module.WEIGHT_DTYPES)
def test_named_dtype(name):
    dtype = module.named_dtype(name)
    assert str(dtype) == f"torch.{name}" and module.named_dtype(dtype) is dtype


@pytest.mark.parametrize("dtype", ["load", "int8", None, 16])
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(ValueError, match=f"weights is {dtype!r}; expected one of float32"):
        module.named_dtype(dtype, "weights")


def test_few_threads_compute_beside_a_gpu():
    import torch

    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(16)
        for device, expected in (("cuda", module.THREADS_BESIDE_GPU), ("cpu", 16)):
            with pytest.raises(KeyError), module.few_threads_beside(torch.device(device)):
                assert torch.get_num_threads() == expected
                raise KeyError
            assert torch.get_num_threads() == 16
        torch.set_num_threads(2)
        with module.few_threads_beside(torch.device("cuda")):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)
