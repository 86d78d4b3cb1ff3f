"""The portable decode kernels and the combine, executed on TileLang's CPU target against float64.

Checks algebra, masks, paging, tiling and fragments; layouts and barriers need a GPU (test_decode_gpu.py).
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from mha2mla.kernels.gqa_decode.api import GQA
from mha2mla.kernels.split_kv.choice import MAX_SPLITS, tile_rows
from mha2mla.testing.problems import GQAProblem, KeyCodesProblem, LatentProblem, Problem, RowCodesProblem
from tests.few import few
from tests.kernels.compiled import for_cpu
from tests.kernels.mla_decode.test_mla_decode_codes import SHAPES as CODES
from tests.kernels.problems import (
    assert_right,
    kernels_of,
    name,
    poison_unseen_pages,
    random_work,
    run_kernels,
    with_holes,
)

pytest.importorskip("tilelang", reason="TileLang is not installed")

from mha2mla.kernels.machine import Machine
from mha2mla.kernels.split_kv.combine import SIZES, make_combine


@cache
def compiled_split(op, shape, max_rows: int, max_groups: int, block_tokens: int, variant: str):
    portable = ("portable", "swap_ab", "latent_portable", "int8_keys_portable", "codes_portable")
    choice = next(c for c in kernels_of(op, shape, 80 if op is GQA else 90) if c.kernel in portable)
    groups = shape.num_kv_heads if op is GQA else shape.num_rope_heads
    tiling = tile_rows(shape.heads, groups, shape.seqlen_q, max_rows, 1 if op is GQA else max_groups, packed=op is GQA)
    choice = replace(choice, tiling=tiling, block_tokens=block_tokens, threads=1, variant=variant)
    return for_cpu(op.make_split(replace(shape, dtype="float32"), choice, Machine(True)))


@cache
def compiled_combine(heads: int, width: int, splits: int):
    return for_cpu(make_combine(heads, width, "float32", splits, 2 - heads % 2, on_cpu=True))


def compiled(problem, max_rows=32, max_groups=8, block_tokens=64, splits=64, compiled_q=None, variant="resident"):
    shape = problem.shape("float32", compiled_q)
    split = compiled_split(problem.op, shape, max_rows, max_groups, block_tokens, variant)
    width = problem.v_head_dim if problem.op is GQA else problem.kv_lora_rank
    return split, compiled_combine(problem.heads, width, splits)


def run(problem, num_ctas: int, work=None, **how):
    inputs = poison_unseen_pages(problem, problem.inputs(torch.float32))
    out, lse = run_kernels(problem, *compiled(problem, **how), inputs, num_ctas, work)
    assert_right(inputs, out, lse, **problem.visibility)
    return out


SHAPES = [
    Problem(9, 3, 64, 16, (1, 63, 64, 65, 200)),
    Problem(9, 1, 192, 128, (77, 130)),  # rotary keys kept beside a latent
    Problem(14, 2, 88, 16, (5, 70), page_size=16),
    Problem(40, 40, 64, 8, (70,)),
    Problem(24, 8, 64, 24, (129,), page_size=128),
    Problem(1, 1, 8, 8, (64, 1)),
    Problem(14, 1, 80, 8, (130,)),
    Problem(16, 16, 144, 8, (100, 64), page_size=32),
    Problem(3, 1, 192, 64, (77,)),
    Problem(126, 2, 64, 8, (65,)),
    Problem(5, 1, 1000, 16, (70, 1)),
]
GQA_SHAPES = [
    GQAProblem(9, 3, 64, 64, (1, 63, 64, 65, 200)),
    GQAProblem(14, 2, 80, 80, (130,)),
    GQAProblem(7, 1, 24, 88, (5, 70), page_size=16),
    GQAProblem(5, 5, 96, 64, (100, 64), page_size=32),
    GQAProblem(40, 2, 8, 8, (70,), page_size=128),
    GQAProblem(3, 1, 192, 128, (77,)),
    GQAProblem(1, 1, 8, 8, (64, 1)),
]
LATENT_SHAPES = [
    LatentProblem(9, 1, 72, 24, (1, 63, 64, 65, 200), scaling=1.2),
    LatentProblem(14, 1, 88, 96, (5, 70), page_size=16, shuffled=True),
    LatentProblem(6, 1, 64, 128, (129,), page_size=128, shuffled=True),
    LatentProblem(1, 1, 8, 8, (64, 1)),
    LatentProblem(33, 1, 144, 64, (100, 64), page_size=32, first_position=131072),
]
KEY_CODES = [
    KeyCodesProblem(9, 1, 72, 32, (1, 63, 64, 65, 200), scaling=1.2),
    KeyCodesProblem(14, 1, 88, 128, (5, 70), page_size=16, seqlen_q=2, starts=(0, 66), bias=600.0),
    KeyCodesProblem(6, 1, 64, 96, (200,), page_size=128, shuffled=True, window=70, sinks=3),
]


EVERY_RUN = [*SHAPES[:6], *GQA_SHAPES, *LATENT_SHAPES[:3], *KEY_CODES, *CODES[:4]]
STREAMED = [(problem, "streamed") for problem in LATENT_SHAPES]  # W_KR; else, where there is one, it is resident
CASES = [*((problem, "resident") for problem in EVERY_RUN), *STREAMED[:3]]
OTHERS = [*((problem, "resident") for problem in (*SHAPES[6:], *LATENT_SHAPES[3:], *CODES[4:])), *STREAMED[3:]]


@few("problem, variant", [*CASES, *OTHERS], len(CASES), ids=lambda x: x if isinstance(x, str) else name(x))
def test_no_shape_reads_poison_or_drops_heads(problem, variant):
    """Head counts that fill no tile, odd widths, shuffled poisoned pages, one CTA and more CTAs than tiles."""
    for num_ctas in (1, 2, 12):
        run(problem, num_ctas, variant=variant)


LENGTHS = [(0, 1, 64, 200, 321), (0, 0, 0, 0, 0), (0, 0, 900, 0, 0), (1, 1, 1, 1, 1), (700, 0, 65, 0, 64)]


@pytest.mark.parametrize("num_ctas", [1, 2, 3, 7, 17, 132])
def test_any_number_of_ctas_serves_any_lengths(num_ctas):
    for lengths in LENGTHS:
        run(Problem(4, 2, 64, 8, lengths), num_ctas, splits=sorted(SIZES)[num_ctas % len(SIZES)])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q", [2, 4, 8])
@pytest.mark.parametrize("problem", [Problem(6, 3, 64, 8, ()), GQAProblem(6, 2, 16, 8, ())], ids=name)
def test_causal_alignment_is_bottom_right(problem, seqlen_q, causal):
    """Sequences shorter than the query leave rows that see nothing."""
    lengths = (0, 1, seqlen_q, 66, 129, 64 + seqlen_q - 1)
    problem = replace(problem, lengths=lengths, seqlen_q=seqlen_q, causal=causal)
    max_rows = {2: 64, 4: 16, 8: 8}[seqlen_q] if problem.op is GQA else 64
    for num_ctas in (1, 4, 9):
        run(problem, num_ctas, max_rows=max_rows)
        for window, sinks in ((1, 0), (3, 70), (64, 4), (70, 0)):
            run(replace(problem, window=window, sinks=sinks), num_ctas, max_rows=max_rows)


@pytest.mark.parametrize("seqlen_q", [2, 8])
def test_latent_alone_with_several_new_tokens_and_windows(seqlen_q):
    lengths = (0, 1, seqlen_q, 66, 129, 64 + seqlen_q - 1)
    problem = LatentProblem(6, 1, 64, 16, lengths, seqlen_q=seqlen_q)
    for change in ({}, {"causal": False}, {"starts": (0, 1, 0, 65, 64, 3)}):
        for window, sinks in ((None, 0), (3, 70), (70, 4)):
            run(replace(problem, window=window, sinks=sinks, **change), 5, max_rows=64)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 1), (20, 4), (64, 64), (65, 100), (200, 5), (1000, 4)])
@pytest.mark.parametrize("page_size", [16, 128])
def test_windows_and_sinks_over_poisoned_pages(page_size, window, sinks):
    """Windows begin and sinks end in the middle of tiles, whose other pages have no table entry."""
    lengths = (0, 1, 63, 64, 65, 100, 321, 470)
    problem = Problem(4, 2, 64, 8, lengths, page_size=page_size, window=window, sinks=sinks)
    for starts in (None, (0, 1, 60, 0, 65, 30, 130, 17)):
        for num_ctas in (1, 5, 40):
            run(replace(problem, starts=starts), num_ctas)


@pytest.mark.parametrize("block_tokens", [32, 64])
@pytest.mark.parametrize(
    ("problem", "seeds"),
    [(Problem(5, 5, 72, 8, ()), 40), (LatentProblem(5, 1, 72, 8, ()), 12), (GQAProblem(3, 1, 24, 8, ()), 20)],
)
def test_random_plans(problem, seeds, block_tokens):
    """Cuts at any tile, fragments on any CTA in any order: what a kernel may not take for granted. With left padding,
    and fewer new tokens than compiled for."""
    for seed in range(seeds):
        draw = random.Random(seed)
        lengths = tuple(draw.choice([0, draw.randint(1, 500)]) for _ in range(draw.randint(1, 9)))
        window = draw.choice([None, draw.randint(1, 300)])
        own = {"shuffled": draw.random() < 0.5, "first_position": draw.choice([0, 131072])}
        case = replace(
            problem, lengths=lengths, page_size=16, window=window,
            starts=tuple(draw.randint(0, length) for length in lengths) if draw.random() < 0.4 else None,
            sinks=draw.choice([0, 3, 90]) if window else 0, seqlen_q=draw.choice([1, 2]), causal=draw.random() < 0.7,
            seed=seed, **(own if isinstance(problem, LatentProblem) else {}),
        )  # fmt: skip
        work = random_work([span.tiles for span in case.spans()], draw.choice([1, 2, 5, 16, 33]), draw)
        splits = sorted(SIZES)[seed % len(SIZES)]
        run(case, len(work), work, block_tokens=block_tokens, splits=splits, compiled_q=2)


def test_as_many_partials_as_the_combine_holds():
    for splits in SIZES:
        run(Problem(2, 1, 8, 8, (64 * MAX_SPLITS,)), MAX_SPLITS, splits=splits)


def test_tokens_tile_when_rows_do_not_fit():
    run(Problem(5, 1, 64, 8, (3, 70, 140), seqlen_q=8), 2, max_rows=16)
    run(Problem(5, 1, 64, 8, (3, 70, 140), seqlen_q=8, window=66, sinks=2), 5, max_rows=16)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    "problem",
    [kind(6, 1, 64, 8, (70, 200)) for kind in (Problem, LatentProblem, RowCodesProblem)] + [KEY_CODES[0]],
    ids=lambda problem: problem.op.name,
)
def test_no_page_inside_a_length_is_zeros(problem, page_size):
    """Whatever lies on the page that stands in for theirs."""
    problem = replace(problem, page_size=page_size)
    places = {(0, 0): -1, (1, 1): 10**6, (1, 64 // page_size + 1): -(2**31)}
    holes, zeros = with_holes(problem.inputs(torch.float32), places)
    for num_ctas in (1, 3):
        assert_right(zeros, *run_kernels(problem, *compiled(problem), holes, num_ctas))


def test_large_scores_are_not_taken_for_masked_ones():
    """A finite stand-in for -inf must lose against real scores of -3e5."""
    run(Problem(4, 2, 64, 8, (65, 130), scale=4e5), 2)
    run(Problem(4, 2, 64, 8, (65, 130), scale=4e5, window=20, sinks=3), 2)
