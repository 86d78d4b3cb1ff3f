"""The portable body over a cache of the latent alone, executed on TileLang's CPU target against float64."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from mha2mla.testing.problems import LatentProblem
from tests.few import few
from tests.kernels.problems import assert_right, poison_unseen_pages, random_work, run_kernels

pytest.importorskip("tilelang", reason="TileLang is not installed")

from mha2mla.kernels.machine import Machine
from mha2mla.kernels.mla_decode.selection import DecodeShape, list_kernels
from mha2mla.kernels.mla_decode.swap_ab import make_latent_portable
from mha2mla.kernels.split_kv.choice import tile_rows
from mha2mla.kernels.split_kv.combine import SIZES
from tests.kernels.mla_decode.test_swap_ab_cpu import compile_for_cpu, compiled_merge


@cache
def compiled_split(shape: DecodeShape, max_rows: int, block_tokens: int, variant: str):
    choice = next(choice for choice in list_kernels(shape, 90, latent_alone=True) if choice.kernel == "latent_portable")
    tiling = tile_rows(shape.heads, 1, shape.seqlen_q, max_rows, 1)
    choice = dataclasses.replace(choice, tiling=tiling, block_tokens=block_tokens, threads=1, variant=variant)
    return compile_for_cpu(make_latent_portable(replace(shape, dtype="float32"), choice, Machine(True)))


def run(
    problem: LatentProblem,
    num_ctas: int,
    work=None,
    max_rows: int = 32,
    block_tokens: int = 64,
    variant: str = "resident",
    compiled_seqlen_q: int | None = None,
):
    split = compiled_split(problem.shape("float32", compiled_seqlen_q), max_rows, block_tokens, variant)
    merge = compiled_merge(problem.heads, problem.kv_lora_rank, max(SIZES))
    inputs = poison_unseen_pages(problem, problem.inputs(torch.float32))
    out, lse = run_kernels(split, merge, inputs, num_ctas, work, **problem.visibility)
    assert_right(inputs, out, lse, torch.float32, **problem.visibility)
    return out


SHAPES = [
    LatentProblem(9, 1, 72, 24, (1, 63, 64, 65, 200), scaling=1.2),
    LatentProblem(14, 1, 88, 96, (5, 70), page_size=16, shuffled=True),
    LatentProblem(6, 1, 64, 128, (129,), page_size=128, shuffled=True),
    LatentProblem(1, 1, 8, 8, (64, 1)),
    LatentProblem(33, 1, 144, 64, (100, 64), page_size=32, first_position=131072),
]


def name(problem: LatentProblem) -> str:
    return f"H{problem.heads}-c{problem.kv_lora_rank}-r{problem.qk_rope_head_dim}-p{problem.page_size}"


@pytest.mark.parametrize("variant", ["resident", "streamed"])
@few("problem", SHAPES, count=3, ids=name)
def test_shapes(problem, variant):
    """Widths that fill no tile, shuffled poisoned pages with offsets of their own, one CTA and more CTAs than tiles."""
    for num_ctas in (1, 12):
        run(problem, num_ctas, variant=variant)


@pytest.mark.parametrize("seqlen_q", [2, 8])
def test_several_new_tokens_windows_and_sinks(seqlen_q):
    lengths = (0, 1, seqlen_q, 66, 129, 64 + seqlen_q - 1)
    problem = LatentProblem(6, 1, 64, 16, lengths, seqlen_q=seqlen_q)
    for change in ({}, {"causal": False}, {"starts": (0, 1, 0, 65, 64, 3)}):
        for window, sinks in ((None, 0), (3, 70), (70, 4)):
            run(dataclasses.replace(problem, window=window, sinks=sinks, **change), 5, max_rows=64)


@pytest.mark.parametrize("block_tokens", [32, 64])
def test_random_plans_at_far_positions(block_tokens):
    for seed in range(12):
        draw = random.Random(seed)
        lengths = tuple(draw.choice([0, draw.randint(1, 500)]) for _ in range(draw.randint(1, 6)))
        window = draw.choice([None, draw.randint(1, 300)])
        problem = LatentProblem(
            5,
            1,
            72,
            8,
            lengths,
            page_size=16,
            window=window,
            sinks=draw.choice([0, 3, 90]) if window else 0,
            seqlen_q=draw.choice([1, 2]),
            shuffled=draw.random() < 0.5,
            first_position=draw.choice([0, 131072]),
            seed=seed,
        )
        work = random_work([span.tiles for span in problem.spans()], draw.choice([1, 5, 16]), draw)
        run(problem, len(work), work, block_tokens=block_tokens, compiled_seqlen_q=2)


@pytest.mark.parametrize("page_size", [16, 64])
def test_no_page_is_zeros(page_size):
    problem = LatentProblem(6, 1, 64, 8, (70, 200), page_size=page_size)
    inputs = problem.inputs(torch.float32)
    split = compiled_split(problem.shape("float32"), 32, 64, "resident")
    filled, holes = inputs["block_table"].clone(), inputs["block_table"].clone()
    for (row, entry), hole in {(0, 0): -1, (1, 1): 10**6, (1, 64 // page_size + 1): -(2**31)}.items():
        holes[row, entry], filled[row, entry] = hole, len(inputs["latent_cache"])
    zeros = torch.cat([inputs["latent_cache"], *[torch.zeros_like(inputs["latent_cache"][:1])] * 3])
    for number, (row, entry) in enumerate(((0, 0), (1, 1), (1, 64 // page_size + 1))):
        filled[row, entry] += number  # a page of zeros each: a page belongs to one place
    out, lse = run_kernels(split, compiled_merge(6, 64, max(SIZES)), inputs | {"block_table": holes}, 3)
    assert_right(inputs | {"latent_cache": zeros, "block_table": filled}, out, lse, torch.float32)
