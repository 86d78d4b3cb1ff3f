"""The machine: its record beside numbers, the device to compute on, its memory and cache folder."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h
_LARGEST_INT = 2**31 - 1
THREADS_BESIDE_GPU = 4
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")
LIBRARIES = ("mha2mla", "torch", "triton", "transformers", "tilelang", "apache-tvm-ffi", "safetensors", "numpy", "vllm")
_SMI_FIELDS = {
    "gpu": "name",
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_cap_w": "power.limit",
    "memory_mib": "memory.total",
}


def collect_environment(device: int = 0) -> dict[str, Any]:
    """Everything that belongs beside a measured number, as a flat dict of JSON values.

    Nothing here initialises CUDA in this process: ``nvidia-smi`` is asked. What cannot be found out is ``None``, never
    left out. GPU ``device`` is counted as the driver does.

    Returns:
        ``date`` (UTC, ISO 8601); ``commit``, with ``+dirty`` when tracked files differ (where there is no git: what
        ``MHA2MLA_COMMIT`` says); ``python``, ``platform``, ``cpu``, ``cpu_count``; one version per library; ``cuda``,
        what torch was built for; ``gpu``, ``driver``, clocks in MHz, ``power_cap_w`` in W, ``memory_mib`` in MiB.
    """
    import torch

    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    report |= {name: installed_version(name) for name in LIBRARIES}
    report["cuda"] = torch.version.cuda
    report.update(_gpu_from_smi(device) or dict.fromkeys(_SMI_FIELDS))
    return report


def installed_version(name: str = "mha2mla") -> str | None:
    """Version of a package; None where it is not installed, such as this one run from a folder on PYTHONPATH."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def thread_hint(device: str | None) -> str:
    """A sentence for people where torch's threads compete for cores: a container's quota, or other work; else empty.

    Args:
        device: that was asked for; nothing is said of a GPU, or where OMP_NUM_THREADS is set.
    """
    on_gpu = device.startswith("cuda") if device else os.path.exists("/proc/driver/nvidia")
    if on_gpu or "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return ""
    cores, quota, load = len(os.sched_getaffinity(0)), _cpu_quota(), os.getloadavg()[0]
    if quota < cores:
        return (
            f"{cores} threads, but this container may use {quota:.3g} cores: set OMP_NUM_THREADS={max(1, int(quota))}"
        )
    if cores > 1 and load > cores / 2:
        return f"{cores} threads beside other work (load {load:.1f} on {cores} cores); OMP_NUM_THREADS=N uses fewer"
    return ""


@contextmanager
def few_threads_beside(device: torch.device) -> Iterator[None]:
    """While open, torch computes on at most :data:`THREADS_BESIDE_GPU` threads if ``device`` is no CPU.

    A GPU's host copies and checks weights in short bursts, whose threads wait for one another: beside other programs
    they use all cores and end later.
    """
    import torch

    usual = torch.get_num_threads()
    try:
        if device.type != "cpu":
            torch.set_num_threads(min(usual, THREADS_BESIDE_GPU))
        yield
    finally:
        torch.set_num_threads(usual)


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, _cpu_quota())))


def _cpu_quota() -> float:
    """Cores that the control group may use; infinite where it has no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):  # no control group of version 2, or "max"
        return float("inf")


def process_count() -> int:
    """Processes of this run, as torchrun tells each of them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def compute_device(device: str | torch.device | None) -> torch.device:
    """The device asked for; by default CUDA if available, else the CPU.

    Raises:
        ValueError: it cannot be used here.
    """
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {str(device)!r:.80}; expected cpu, cuda or a GPU by number, cuda:1") from error
    try:
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device is {str(device)!r:.80}, which cannot be used here: {error}") from error
    if target.type == "meta":
        raise ValueError("device is 'meta', which computes nothing; expected cpu or cuda")
    return target


def device_name(device: torch.device) -> str:
    """The GPU's name; of another device its type."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def named_dtype(dtype: str | torch.dtype, name: str = "dtype") -> torch.dtype:
    """A dtype of weights, by its name or as it is.

    Args:
        name: what the caller calls it, for error messages.

    Raises:
        ValueError: it is no such dtype.
    """
    import torch

    word = str(dtype).removeprefix("torch.") if isinstance(dtype, str | torch.dtype) else None
    if word not in WEIGHT_DTYPES:
        raise ValueError(f"{name} is {dtype!r:.80}; expected one of {', '.join(WEIGHT_DTYPES)}")
    return getattr(torch, word)


def usual_dtype(device: torch.device, name: str | None = None) -> torch.dtype:
    """The named dtype; by default bfloat16 on CUDA, which kernels take, else float32."""
    return named_dtype(name or ("bfloat16" if device.type == "cuda" else "float32"))


def describe_environment(environment: dict[str, Any]) -> str:
    """One line to stand under a table: device, driver and clocks where there are any, versions, commit, date."""
    machine = f"{environment['cpu']}, {environment['cpu_count']} cores, no GPU"
    if environment.get("gpu"):
        clock, top, cap = (_shown(environment[key]) for key in ("sm_clock_mhz", "sm_clock_max_mhz", "power_cap_w"))
        machine = f"{environment['gpu']} (driver {environment['driver']}, SM {clock} of {top} MHz, cap {cap} W)"
    versions = [
        f"{name} {environment[name]}" for name in ("torch", "transformers", "tilelang") if environment.get(name)
    ]
    return " · ".join([machine, *versions, f"commit {environment['commit'] or 'unknown'}", environment["date"]])


def cache_folder() -> Path:
    """Folder of downloads: ``MHA2MLA_CACHE``, else ``XDG_CACHE_HOME/mha2mla``, else ``~/.cache/mha2mla``."""
    if own := os.environ.get("MHA2MLA_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "mha2mla"


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory in place of returning it to the system. Without glibc it does nothing.

    Activations of a layer come and go with every batch. glibc maps each from 32 MiB on anew by default, and clearing
    their pages took a fifth of a conversion's CPU time. The setting holds for the whole process, whose memory never
    shrinks afterwards: call it only in a process that converts.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)


def _shown(value: Any) -> str:
    return "?" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _run(*command: str, cwd: Path | None = None) -> str | None:
    """Standard output of a command, or None when it is absent, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    # An installed copy may lie inside another repository: only a tracked file makes the commit ours.
    if _run("git", "ls-files", "--error-unmatch", Path(__file__).name, cwd=here) is not None:
        commit = _run("git", "rev-parse", "--short=12", "HEAD", cwd=here)
        if commit:
            return commit + ("+dirty" if _run("git", "status", "--porcelain", "-uno", cwd=here) else "")
    return os.environ.get("MHA2MLA_COMMIT") or None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.lower().startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpu_from_smi(index: int) -> dict[str, Any] | None:
    query = ",".join(_SMI_FIELDS.values())
    answer = _run("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={index}")
    if not answer:
        return None
    values = [value.strip() for value in answer.splitlines()[0].split(",")]
    if len(values) != len(_SMI_FIELDS):
        return None
    return {key: _number(value) for key, value in zip(_SMI_FIELDS, values, strict=True)}


def _number(value: str) -> Any:
    if value.startswith("[") or value in ("", "N/A"):
        return None
    try:
        return float(value) if "." in value and value.count(".") == 1 else int(value)
    except ValueError:
        return value
