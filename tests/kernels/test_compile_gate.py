"""Every kind of decode kernel that dispatch may choose, compiled for GPUs that are not here."""

from __future__ import annotations

import pytest

pytest.importorskip("tilelang", reason="TileLang is not installed")

import tilelang.language as T

from mha2mla.kernels.gqa_decode.api import GQA
from mha2mla.kernels.machine import SMALL_PASS_CONFIGS, check_arguments
from mha2mla.kernels.mla_decode.api import FP8, INT8_KEYS, LATENT, LATENT_FP8, MLA
from mha2mla.kernels.split_kv.choice import shared_memory_limit
from mha2mla.kernels.split_kv.combine import SIZES, combine_rows, make_combine
from mha2mla.kernels.split_kv.plan_kernel import make_plan
from tests.few import few
from tests.kernels.compiled import gate, gate_choice
from tests.kernels.problems import kernels_of

# Op, compute capability, static sizes (dtype float16 where it ends in "half").
CHOSEN = [
    (MLA, 90, 32, 32, 512, 16, 64, 1),
    (MLA, 90, 128, 1, 512, 64, 64, 1),
    (MLA, 90, 32, 1, 1024, 64, 64, 1),
    (MLA, 80, 9, 3, 144, 16, 16, 2, "half"),
    (FP8, 90, 32, 1, 512, 64, 64, 1),
    (LATENT, 90, 32, 512, 64, 64, 1),
    (LATENT_FP8, 90, 32, 512, 64, 64, 1),
    (INT8_KEYS, 90, 28, 1, 512, 128, 64, 1),
    (INT8_KEYS, 90, 32, 1, 1024, 64, 64, 1),
    (GQA, 90, 28, 4, 192, 128, 16, 8, "half"),
    (GQA, 80, 14, 2, 80, 64, 16, 2),
]
MORE = [
    (MLA, 90, 14, 2, 80, 8, 64, 1, "half"),
    (MLA, 90, 9, 3, 216, 24, 64, 1),  # rope columns that fill no chunk
    (MLA, 90, 32, 1, 512, 64, 16, 1),
    (MLA, 90, 40, 40, 256, 32, 64, 1),  # rope scores by blocks of 8 rows
    (MLA, 90, 24, 8, 448, 24, 32, 8),
    (MLA, 90, 3, 1, 88, 256, 128, 2),
    (MLA, 90, 14, 1, 256, 216, 64, 4),  # more chunks of rope columns than the ring holds
    (MLA, 90, 9, 9, 64, 72, 16, 1),  # 9 chunks of rope columns a block: 2.8 kB of spills, once
    (MLA, 90, 64, 1, 960, 64, 16, 1, "half"),
    (MLA, 90, 32, 8, 896, 16, 16, 1),  # pieces of 64 columns
    (MLA, 90, 7, 7, 960, 72, 64, 1),  # two chunks of rope columns a CTA of a cluster
    (MLA, 90, 16, 1, 1000, 256, 64, 4),
    (MLA, 80, 32, 1, 512, 64, 64, 1),
    (MLA, 80, 32, 1, 1024, 64, 64, 1),
    (MLA, 89, 32, 32, 256, 16, 64, 1),
    (FP8, 90, 32, 8, 512, 16, 16, 1),
    (FP8, 90, 9, 3, 80, 24, 64, 1, "half"),
    (LATENT, 90, 16, 192, 64, 64, 1),  # two CTAs on a multiprocessor
    (LATENT, 90, 16, 72, 32, 64, 1),
    (LATENT, 90, 9, 192, 96, 64, 1, "half"),  # two warpgroups make keys
    (LATENT, 90, 64, 256, 64, 16, 2),
    (LATENT, 90, 9, 192, 128, 64, 4),  # threads that make keys give registers
    (LATENT, 90, 32, 1024, 32, 64, 1),  # halves of the columns
    (LATENT, 90, 32, 512, 128, 64, 1),
    (LATENT, 90, 9, 640, 96, 16, 2, "half"),  # pieces of 320 columns: 68 bytes of spills with 40 streaming registers
    (LATENT, 90, 32, 1024, 128, 64, 1),  # W_KR streamed through shared memory
    (LATENT, 80, 32, 512, 64, 64, 1),
    (LATENT, 80, 32, 1024, 64, 64, 1),
    (LATENT, 89, 16, 192, 96, 64, 1),
    (LATENT_FP8, 90, 9, 192, 128, 16, 1, "half"),
    (LATENT_FP8, 90, 28, 320, 128, 64, 1),
    (LATENT_FP8, 90, 64, 256, 96, 16, 2),
    (LATENT_FP8, 90, 16, 80, 32, 64, 1),
    (INT8_KEYS, 90, 40, 1, 448, 128, 16, 1, "half"),
    (INT8_KEYS, 90, 64, 1, 256, 64, 32, 2),  # two warpgroups compute
    (INT8_KEYS, 90, 9, 1, 192, 96, 128, 1),
    (INT8_KEYS, 80, 32, 1, 512, 64, 64, 1),
    (INT8_KEYS, 90, 16, 1, 72, 16, 64, 1),  # two CTAs on a multiprocessor
    (GQA, 90, 32, 32, 128, 128, 64, 1),
    (GQA, 90, 64, 1, 256, 256, 64, 1),
    (GQA, 89, 14, 2, 80, 64, 16, 2),
]
# Kernels that the rule ranks behind its choice: kernel, computing warpgroups. Portable GQA kernels of several new
# tokens of few heads have 24, 40 and 56 rows in tiles of 32 and 64. With 32 cached tokens a step, the warps that hold a
# row's scores are not those that hold its output.
OTHERS = [
    ("swap_ab_ws", 2, (MLA, 90, 64, 64, 128, 32, 64, 1)),
    ("swap_ab_ws", 2, (MLA, 90, 64, 1, 512, 64, 16, 1)),
    ("heads_on_m", None, (MLA, 90, 64, 1, 200, 64, 16, 1)),
    ("swap_ab", None, (MLA, 90, 32, 1, 512, 64, 64, 1)),
    ("swap_ab", None, (MLA, 90, 32, 1, 1024, 64, 64, 1)),
    ("swap_ab_ws", 1, (MLA, 90, 16, 1, 576, 64, 64, 1)),
    ("swap_ab_cluster", 1, (MLA, 90, 64, 1, 768, 64, 64, 1)),
    ("int8_keys_portable", None, (INT8_KEYS, 90, 32, 1, 512, 64, 64, 1)),
    *(
        ("portable", None, (GQA, capability, *sizes))
        for sizes in ((40, 8, 96, 96, 32, 8, "half"), (9, 3, 64, 64, 64, 8), (28, 4, 128, 128, 64, 8))
        for capability in (80, 90)
    ),
]


def name(case) -> str:
    op, *sizes = case
    return "-".join(map(str, (op.name, *sizes)))


def check(case, kernel: str | None = None, warpgroups: int | None = None) -> None:
    op, capability, *sizes = case
    half = sizes[-1] == "half"
    shape = op.shape(*sizes[: -1 if half else None], "float16" if half else "bfloat16")
    choice = op.select(shape, capability)
    if kernel is not None:
        listed = kernels_of(op, shape, capability)
        choice = next(c for c in listed if c.kernel == kernel and warpgroups in (None, c.warpgroups))
    gate_choice(op, shape, choice, capability, slack=1024 if op is FP8 else 4096)


@few("case", [*CHOSEN, *MORE], count=len(CHOSEN), ids=name)
def test_the_rules_choice_fits(case):
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kernel", "warpgroups", "case"), OTHERS, ids=lambda x: name(x) if isinstance(x, tuple) else None
)
def test_kernels_behind_the_rules_choice_fit(kernel, warpgroups, case):
    check(case, kernel, warpgroups)


@few(
    "splits, kv_lora_rank",
    [(16, 448), *((splits, d_c) for d_c in (200, 512, 1024, 960) for splits in reversed(SIZES))],
    count=1,
)
def test_combine_fits(splits, kv_lora_rank):
    gate(make_combine(12, kv_lora_rank, "bfloat16", splits, combine_rows(12, 8, splits)), SMALL_PASS_CONFIGS)


def test_combine_fits_before_hopper():
    """There is no programmatic dependent launch before sm_90."""
    gate(make_combine(32, 512, "bfloat16", max(SIZES), dependent=False), SMALL_PASS_CONFIGS, 80)


@few("capability", [90, 80], count=1)
def test_planner_fits(capability):
    smallest = shared_memory_limit(89)  # of the GPUs that are served
    gate(make_plan(), SMALL_PASS_CONFIGS, capability, min(smallest, shared_memory_limit(capability)))


def test_two_arguments_of_one_name_are_refused():
    """On an H200 every append was refused by its own wrapper, which no compilation and no CPU target had noticed."""

    @T.prim_func
    def copies(first: T.Tensor([8], T.float32), second: T.Tensor([8], T.float32), out: T.Tensor([8], T.float32)):
        with T.Kernel(1, threads=8):
            for tensor in (first, second):
                for i in T.Parallel(8):
                    out[i] = tensor[i]

    with pytest.raises(ValueError, match="arguments of copies are named tensor, tensor, out; expected distinct names"):
        check_arguments(copies)
