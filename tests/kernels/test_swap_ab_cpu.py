"""The portable kernel body and the combine, executed on TileLang's CPU target against float64.

Checks algebra, masks, paging, tiling and splits; layouts and barriers need a GPU (test_mla_decode_gpu.py).
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.kernels.problems import Problem, assert_right, run_kernels

pytest.importorskip("tilelang", reason="TileLang is not installed")

import tilelang

from mha2mla.kernels.mla_decode.build import make_merge, make_split
from mha2mla.kernels.mla_decode.selection import DecodeShape, KernelChoice
from mha2mla.kernels.mla_decode.tiling import tile_rows

PASS_CONFIGS = {"tirx.disable_vectorize": True}


@cache
def compiled(shape: DecodeShape, max_rows: int, max_groups: int):
    tiling = tile_rows(shape.heads, shape.num_rope_heads, shape.seqlen_q, max_rows, max_groups)
    choice = KernelChoice("swap_ab", tiling, 64, 1, 1, 0, "test")
    functions = (
        make_split(shape, choice, dtype="float32", on_cpu=True),
        make_merge(shape, dtype="float32", on_cpu=True),
    )
    return tuple(
        tilelang.compile(f, target="c", target_host="c", execution_backend="cython", pass_configs=PASS_CONFIGS)
        for f in functions
    )


def run(
    problem: Problem, num_splits: int, max_rows: int = 32, max_groups: int = 8, compiled_seqlen_q: int | None = None
):
    shape = problem.shape("float32", compiled_seqlen_q)
    split, merge = compiled(shape, max_rows, max_groups)
    inputs = problem.inputs(torch.float32)
    out, lse = run_kernels(split, merge, inputs, num_splits)
    assert_right(inputs, out, lse, torch.float32)
    return out


SHAPES = [
    Problem(9, 3, 64, 16, (1, 63, 64, 65, 200)),
    Problem(14, 1, 80, 8, (130,)),
    Problem(14, 2, 88, 16, (5, 70), page_size=16),
    Problem(16, 16, 144, 8, (100, 64), page_size=32),
    Problem(40, 40, 64, 8, (70,)),
    Problem(24, 8, 64, 24, (129,), page_size=128),
    Problem(3, 1, 192, 64, (77,)),
    Problem(12, 12, 64, 16, (90,)),
    Problem(126, 2, 64, 8, (65,)),
    Problem(1, 1, 8, 8, (64, 1)),
]


def name(problem: Problem) -> str:
    return (
        f"H{problem.heads}-G{problem.num_rope_heads}-c{problem.kv_lora_rank}-r{problem.qk_rope_head_dim}"
        f"-p{problem.page_size}-q{problem.seqlen_q}"
    )


@pytest.mark.parametrize("problem", SHAPES, ids=name)
def test_shapes_failures_2_3_6(problem):
    """Head counts that fill no tile, odd widths, shuffled poisoned pages, one split and more splits than tiles."""
    for num_splits in (1, 5):
        run(problem, num_splits)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 17, 128])
def test_any_number_of_splits_for_any_length_failure_1(num_splits):
    run(Problem(4, 2, 64, 8, (0, 1, 64, 200, 321)), num_splits)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q", [2, 4, 8])
def test_causal_alignment_failure_5(seqlen_q, causal):
    """Bottom-right aligned; sequences shorter than the query leave rows that see nothing."""
    run(Problem(6, 3, 64, 8, (0, 1, seqlen_q, 66, 129), seqlen_q=seqlen_q, causal=causal), 3, max_rows=64)


def test_fewer_new_tokens_than_compiled_for():
    run(Problem(5, 5, 64, 8, (3, 70), seqlen_q=3), 2, compiled_seqlen_q=4)


def test_tokens_tile_when_rows_do_not_fit():
    run(Problem(5, 1, 64, 8, (3, 70, 140), seqlen_q=8), 2, max_rows=16)


def test_left_padding_and_windows():
    run(Problem(6, 2, 64, 8, (70, 140, 64, 200, 90), starts=(1, 64, 63, 199, 90)), 3)


def test_large_scores_failure_12():
    """A finite stand-in for -inf must lose against real scores of -3e5."""
    run(Problem(4, 2, 64, 8, (65, 130), scale=4e5), 2)


def test_runs_are_bit_equal_failure_20():
    problem = Problem(9, 3, 64, 16, (200, 65))
    assert torch.equal(run(problem, 3), run(problem, 3))
