"""Kernels compiled for TileLang's C target, and for GPUs that are not there."""

from __future__ import annotations

import re

import pytest

from mha2mla.kernels.split_kv.choice import shared_memory_limit
from tests.kernels.compile_gate import GateReport, compile_only, find_tool


def for_cpu(function):
    """The compiled TileLang function, callable with CPU tensors."""
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    return tilelang.compile(
        function, target="c", target_host="c", execution_backend="cython",
        pass_configs={"tirx.disable_vectorize": True},
    )  # fmt: skip


def gate(function, configs: dict, capability: int = 90, limit: int | None = None) -> GateReport:
    """The report of a kernel that neither spills nor serialises wgmma and whose shared memory is at most ``limit``."""
    if find_tool("nvcc") is None:
        pytest.skip("nvcc is neither on PATH nor installed by pip")
    (report,) = compile_only(function, "sm_90a" if capability == 90 else f"sm_{capability}", configs)
    assert report.complaints(shared_memory_limit(capability) if limit is None else limit) == []
    return report


def gate_choice(op, shape, choice, capability: int, slack: int) -> None:
    """Compiles a choice of a decode op. The bytes of shared memory by which dispatch decides are an upper bound of what
    the compiler allocates, at most ``slack`` more; registers serve all threads of so many CTAs."""
    from mha2mla.kernels.machine import PASS_CONFIGS, SMALL_PASS_CONFIGS

    configs = SMALL_PASS_CONFIGS if op.guards_indices else PASS_CONFIGS
    report = gate(op.make_split(shape, choice), configs, capability)
    promised = int(re.search(r"(\d+) bytes of shared memory", choice.reason).group(1))
    assert promised - slack <= report.shared_bytes <= promised, choice.reason
    streams = choice.kernel not in ("swap_ab", "latent_portable", "int8_keys_portable", "codes_portable", "portable")
    assert not streams or report.registers * choice.threads * choice.ctas_per_sm <= 65536, choice.reason
    if report.instructions is not None:
        tensor_core = "HGMMA" if capability == 90 else "HMMA"
        wanted = {tensor_core, "UTMALDG"} if streams else {tensor_core} if choice.kernel == "swap_ab" else set()
        assert wanted <= set(report.instructions), report.instructions
