"""A report is taken from the cache folder for the kernel, the target and the settings that it was made of alone."""

import pytest

pytest.importorskip("tilelang", reason="TileLang is not installed")

import tilelang.language as T

from mha2mla.kernels.machine import PASS_CONFIGS, SMALL_PASS_CONFIGS, SPECIALISED_PASS_CONFIGS
from mha2mla.kernels.split_kv.combine import make_combine
from tests.kernels import compile_gate

pytestmark = pytest.mark.skipif(compile_gate.find_tool("nvcc") is None, reason="there is no nvcc")


def test_a_report_outlives_no_change_of_what_it_is_of(tmp_path, monkeypatch):
    compiled = []

    def compile(*arguments):
        compiled.append(arguments)
        return [compile_gate.GateReport("main", len(compiled), 0, 0, False, {"HGMMA": 1})]

    monkeypatch.setenv("MHA2MLA_CACHE", str(tmp_path))
    monkeypatch.setattr(compile_gate, "_compile", compile)
    calls = [
        (make_combine(12, columns, "bfloat16", 64, dependent=False), arch, configs)
        for columns, arch, configs in (
            (200, "sm_80", PASS_CONFIGS), (208, "sm_80", PASS_CONFIGS), (200, "sm_90a", PASS_CONFIGS),
            (200, "sm_80", SMALL_PASS_CONFIGS),
        )
    ]  # fmt: skip
    first = [compile_gate.compile_only(*call) for call in calls]
    assert [report.registers for (report,) in first] == [1, 2, 3, 4]
    assert [compile_gate.compile_only(*call) for call in calls] == first and len(compiled) == 4


@pytest.mark.parametrize("words", [1, 4])
def test_a_word_that_is_reinterpreted_again_is_refused(words):
    """So TileLang lowers it: what a word held when it was first reinterpreted; decode from codes was wrong by it."""

    @T.prim_func
    def widen(codes: T.Tensor([4], T.int32), out: T.Tensor([4], T.float32)):
        with T.Kernel(1, threads=1):
            word = T.alloc_local([4], T.int32)
            for i in list(range(4)):  # one behind the other in the source
                word[i % words] = T.bitwise_or(codes[i], 0x43004300)
                out[i] = T.reinterpret(T.shift_left(word[i % words], 16), T.float32)

    (report,) = compile_gate.compile_only(widen, "sm_80", SMALL_PASS_CONFIGS)
    found = report.complaints(1024)
    if words == 4:
        assert found == []
    else:
        assert found == ["1 temporaries are reinterpreted more than once; expected a word for each"]


@pytest.mark.parametrize("apart", [16, 32])
def test_a_load_that_starts_between_lines_is_refused(apart):
    """Two stages of 16 float32 numbers: the second starts 64 bytes behind the first. On an H200 that was a misaligned
    address."""
    columns = T.dynamic("columns")

    @T.prim_func
    def add(rows: T.Tensor([2, columns], T.float32), out: T.Tensor([2, 16], T.float32)):
        with T.Kernel(2, threads=128) as row:
            tile = T.alloc_shared([apart], T.float32)
            total = T.alloc_fragment([16], T.float32)
            T.fill(total, 0)
            for m in T.Pipelined(4, num_stages=2):
                T.copy(rows[row, m * 16 : m * 16 + 16], tile[0:16])
                for i in T.Parallel(16):
                    total[i] += tile[i]
            T.copy(total, out[row, 0:16])

    (report,) = compile_gate.compile_only(add, "sm_90a", SPECIALISED_PASS_CONFIGS)
    misaligned = ["loads by TMA to tile do not start at multiples of 128 bytes"]
    assert report.complaints(4096) == ([] if apart == 32 else misaligned)
