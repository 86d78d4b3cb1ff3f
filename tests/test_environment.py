"""What is recorded beside a number."""

import json
import os
import subprocess
from importlib.metadata import version

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
    found = collect_environment() | {
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "sm_clock_mhz": 1980,
        "sm_clock_max_mhz": 1980,
        "power_cap_w": 700.0,
    }
    assert "NVIDIA H200 (driver 580.1, SM 1980 of 1980 MHz, cap 700 W)" in describe_environment(found)


def test_nvidia_smi_answer_is_read(tmp_path, monkeypatch):
    """Against a stand-in that answers in nvidia-smi's format."""
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.95.05, 345, 1980, 3201, 700.00, 143771'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert module._gpu_from_smi(0) == {
        "gpu": "NVIDIA H200",
        "driver": "580.95.05",
        "sm_clock_mhz": 345,
        "sm_clock_max_mhz": 1980,
        "memory_clock_mhz": 3201,
        "power_cap_w": 700.0,
        "memory_mib": 143771,
    }


def test_a_broken_nvidia_smi_is_no_gpu(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'No devices were found' >&2\nexit 6\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert module._gpu_from_smi(0) is None


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
