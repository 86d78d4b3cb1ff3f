"""Every kind of kernel that dispatch may choose, compiled for GPUs that are not here: no spills, memory as computed."""

from __future__ import annotations

import re

import pytest

from tests.few import few

pytest.importorskip("tilelang", reason="TileLang is not installed")

from mha2mla.kernels.machine import PASS_CONFIGS, SMALL_PASS_CONFIGS
from mha2mla.kernels.mla_decode.api import MLA
from mha2mla.kernels.mla_decode.selection import DecodeShape, list_kernels, select_kernel
from mha2mla.kernels.split_kv.choice import KernelChoice, shared_memory_limit
from mha2mla.kernels.split_kv.combine import SIZES, combine_rows, make_combine
from mha2mla.kernels.split_kv.plan_kernel import make_plan
from mha2mla.testing.compile_gate import compile_only, find_tool

pytestmark = pytest.mark.skipif(find_tool("nvcc") is None, reason="nvcc is neither on PATH nor installed by pip")

CHOSEN = [
    DecodeShape(32, 32, 512, 16, 64, 1, "bfloat16"),
    DecodeShape(128, 1, 512, 64, 64, 1, "bfloat16"),
    DecodeShape(32, 1, 1024, 64, 64, 1, "bfloat16"),
    DecodeShape(14, 2, 80, 8, 64, 1, "float16"),
    DecodeShape(9, 3, 216, 24, 64, 1, "bfloat16"),  # rope columns that fill no chunk
    DecodeShape(32, 1, 512, 64, 16, 1, "bfloat16"),
    DecodeShape(40, 40, 256, 32, 64, 1, "bfloat16"),  # rope scores by blocks of 8 rows
    DecodeShape(24, 8, 448, 24, 32, 8, "bfloat16"),
    DecodeShape(3, 1, 88, 256, 128, 2, "bfloat16"),
    DecodeShape(14, 1, 256, 216, 64, 4, "bfloat16"),  # more chunks of rope columns than the ring holds
    DecodeShape(9, 9, 64, 72, 16, 1, "bfloat16"),  # 9 chunks of rope columns a block: 2.8 kB of spills, once
    DecodeShape(64, 1, 960, 64, 16, 1, "float16"),
    DecodeShape(32, 8, 896, 16, 16, 1, "bfloat16"),  # pieces of 64 columns
    DecodeShape(16, 1, 1000, 256, 64, 4, "bfloat16"),
]
# Kernels that the rule ranks behind its choice: (kernel, computing warpgroups).
OTHERS = [
    ("swap_ab_ws", 2, DecodeShape(64, 64, 128, 32, 64, 1, "bfloat16")),
    ("swap_ab_ws", 2, DecodeShape(64, 1, 512, 64, 16, 1, "bfloat16")),
    ("heads_on_m", None, DecodeShape(64, 1, 200, 64, 16, 1, "bfloat16")),
    ("swap_ab", None, DecodeShape(32, 1, 512, 64, 64, 1, "bfloat16")),
    ("swap_ab", None, DecodeShape(32, 1, 1024, 64, 64, 1, "bfloat16")),
    ("swap_ab_ws", 1, DecodeShape(16, 1, 576, 64, 64, 1, "bfloat16")),
    ("swap_ab_cluster", 1, DecodeShape(64, 1, 768, 64, 64, 1, "bfloat16")),
]
BEFORE_HOPPER = [
    (80, DecodeShape(9, 3, 144, 16, 16, 2, "float16")),
    (80, DecodeShape(32, 1, 512, 64, 64, 1, "bfloat16")),
    (80, DecodeShape(32, 1, 1024, 64, 64, 1, "bfloat16")),
    (89, DecodeShape(32, 32, 256, 16, 64, 1, "bfloat16")),
]


def name(value) -> str:
    if not isinstance(value, DecodeShape):
        return str(value)
    return (
        f"H{value.heads}-G{value.num_rope_heads}-c{value.kv_lora_rank}-r{value.qk_rope_head_dim}"
        f"-p{value.page_size}-q{value.seqlen_q}"
    )


def gate(shape: DecodeShape, choice: KernelChoice, capability: int):
    """Compiles a choice. The bytes of shared memory by which dispatch decides are an upper bound of what the compiler
    allocates, and not a loose one."""
    (report,) = compile_only(
        MLA.make_split(shape, choice), "sm_90a" if capability == 90 else f"sm_{capability}", PASS_CONFIGS
    )
    assert report.complaints(shared_memory_limit(capability)) == [], choice.reason
    promised = int(re.search(r"(\d+) bytes of shared memory", choice.reason).group(1))
    assert promised - 4096 <= report.shared_bytes <= promised, choice.reason
    if choice.kernel != "swap_ab":  # registers of all threads at launch, for so many CTAs on a multiprocessor
        assert report.registers * choice.threads * choice.ctas_per_sm <= 65536, choice.reason
    return report


@few("shape", CHOSEN, count=3, ids=name)
def test_kernels_fit_a_hopper(shape):
    report = gate(shape, select_kernel(shape, 90), 90)
    if report.instructions is not None:
        assert report.instructions.get("HGMMA", 0) and report.instructions.get("UTMALDG", 0), report.instructions


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kernel", "warpgroups", "shape"), OTHERS, ids=name)
def test_hopper_kernels_that_the_rule_does_not_choose(kernel, warpgroups, shape):
    choices = [c for c in list_kernels(shape, 90) if c.kernel == kernel and warpgroups in (None, c.warpgroups)]
    report = gate(shape, choices[0], 90)
    if report.instructions is not None:
        assert report.instructions.get("HGMMA", 0), report.instructions


@few("capability, shape", BEFORE_HOPPER, count=1, ids=name)
def test_before_hopper(capability, shape):
    choice = select_kernel(shape, capability)
    assert choice.kernel == "swap_ab"
    report = gate(shape, choice, capability)
    if report.instructions is not None:
        assert report.instructions.get("HMMA", 0), report.instructions


@few(
    "splits, kv_lora_rank",
    [(16, 448), *((splits, d_c) for d_c in (200, 512, 1024, 960) for splits in reversed(SIZES))],
    count=1,
)
def test_combine(splits, kv_lora_rank):
    function = make_combine(12, kv_lora_rank, "bfloat16", splits, combine_rows(12, 8, splits))
    (report,) = compile_only(function, "sm_90a", SMALL_PASS_CONFIGS)
    assert report.complaints(shared_memory_limit(90)) == []


@few("arch", ["sm_90a", "sm_80"], count=1)
def test_planner(arch):
    (report,) = compile_only(make_plan(), arch, SMALL_PASS_CONFIGS)
    assert report.complaints(shared_memory_limit(80 if arch == "sm_80" else 90)) == []
    assert report.shared_bytes <= shared_memory_limit(89), "the smallest of the GPUs that are served"


def test_combine_before_hopper():
    """There is no programmatic dependent launch before sm_90."""
    function = make_combine(CHOSEN[0].heads, CHOSEN[0].kv_lora_rank, CHOSEN[0].dtype, max(SIZES), dependent=False)
    (report,) = compile_only(function, "sm_80", SMALL_PASS_CONFIGS)
    assert report.complaints(shared_memory_limit(80)) == []
