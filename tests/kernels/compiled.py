"""Kernels compiled for TileLang's C target, and for GPUs that are not there."""

from __future__ import annotations

import pytest

from mha2mla.testing.compile_gate import GateReport, compile_only, find_tool


def for_cpu(function):
    """The compiled TileLang function, callable with CPU tensors."""
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    return tilelang.compile(
        function, target="c", target_host="c", execution_backend="cython",
        pass_configs={"tirx.disable_vectorize": True},
    )  # fmt: skip


def gate(function, configs: dict, arch: str = "sm_90a", limit: int = 232_448) -> GateReport:
    """The report of a kernel that neither spills nor serialises wgmma and whose shared memory is at most ``limit``."""
    if find_tool("nvcc") is None:
        pytest.skip("nvcc is neither on PATH nor installed by pip")
    (report,) = compile_only(function, arch, configs)
    assert report.complaints(limit) == []
    return report
