"""Every kind of kernel that dispatch chooses, compiled for GPUs that are not here: no spills, memory as computed."""

from __future__ import annotations

import pytest

pytest.importorskip("tilelang", reason="TileLang is not installed")

from mha2mla.kernels.compile_gate import compile_only, find_tool
from mha2mla.kernels.mla_decode.build import PASS_CONFIGS, make_merge, make_split
from mha2mla.kernels.mla_decode.selection import (
    DecodeShape,
    rope_blocks,
    select_kernel,
    shared_memory_limit,
    swap_ab_ws_shared_memory,
)

pytestmark = pytest.mark.skipif(find_tool("nvcc") is None, reason="nvcc is neither on PATH nor installed by pip")

HOPPER = [
    DecodeShape(32, 32, 512, 16, 64, 1, "bfloat16"),
    DecodeShape(32, 1, 512, 64, 16, 1, "bfloat16"),
    DecodeShape(9, 3, 192, 64, 64, 1, "bfloat16"),
    DecodeShape(9, 3, 216, 24, 64, 1, "bfloat16"),  # rope columns that fill no chunk
    DecodeShape(14, 2, 80, 8, 64, 1, "float16"),
    DecodeShape(40, 40, 512, 32, 64, 1, "bfloat16"),
    DecodeShape(24, 8, 448, 24, 32, 8, "bfloat16"),
    DecodeShape(128, 1, 512, 64, 64, 1, "bfloat16"),
    DecodeShape(3, 1, 88, 256, 128, 2, "bfloat16"),
]
AMPERE = [
    (80, DecodeShape(32, 1, 512, 64, 64, 1, "bfloat16")),
    (80, DecodeShape(9, 3, 144, 16, 16, 2, "float16")),
    (89, DecodeShape(32, 32, 512, 16, 64, 1, "bfloat16")),
]


def name(shape: DecodeShape) -> str:
    return f"H{shape.heads}-G{shape.num_rope_heads}-c{shape.kv_lora_rank}-r{shape.qk_rope_head_dim}-q{shape.seqlen_q}"


@pytest.mark.parametrize("shape", HOPPER, ids=name)
def test_hopper(shape):
    choice = select_kernel(shape, 90)
    (report,) = compile_only(make_split(shape, choice), "sm_90a", PASS_CONFIGS)
    assert report.complaints(shared_memory_limit(90)) == [], choice.reason
    if report.instructions is not None:
        assert report.instructions.get("HGMMA", 0) and report.instructions.get("UTMALDG", 0), report.instructions


@pytest.mark.parametrize(
    ("capability", "shape"), AMPERE, ids=lambda x: name(x) if isinstance(x, DecodeShape) else str(x)
)
def test_before_hopper(capability, shape):
    choice = select_kernel(shape, capability)
    (report,) = compile_only(make_split(shape, choice), f"sm_{capability}", PASS_CONFIGS)
    assert report.complaints(shared_memory_limit(capability)) == [], choice.reason
    if report.instructions is not None:
        assert report.instructions.get("HMMA", 0), report.instructions


def test_combine():
    (report,) = compile_only(make_merge(DecodeShape(9, 3, 200, 16, 64, 1, "bfloat16")), "sm_90a", PASS_CONFIGS)
    assert report.complaints(shared_memory_limit(90)) == []


def test_shared_memory_is_computed_beforehand_failure_9():
    """The number dispatch decides by is an upper bound of what the compiler allocates, within its slack."""
    shape = HOPPER[0]
    choice = select_kernel(shape, 90)
    promised = swap_ab_ws_shared_memory(
        choice.tiling,
        rope_blocks(choice.tiling, shape.qk_rope_head_dim),
        shape.kv_lora_rank,
        choice.num_stages,
        choice.rope_stages,
    )
    (report,) = compile_only(make_split(shape, choice), "sm_90a", PASS_CONFIGS)
    assert promised - 4096 <= report.shared_bytes <= promised
