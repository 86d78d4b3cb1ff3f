"""The GQA kernels without a GPU: which is chosen, the portable body on the CPU target, and the compile gate."""

from __future__ import annotations

import dataclasses
import random
import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from mha2mla.kernels.gqa_decode.selection import (
    GQAShape,
    list_kernels,
    portable_shared_memory,
    select_kernel,
    streamed_shared_memory,
)
from mha2mla.kernels.split_kv.choice import MAX_SPLITS, SEQLENS_Q, SHARED_MEMORY, shared_memory_limit, tile_rows
from mha2mla.testing.problems import GQAProblem
from tests.few import few
from tests.kernels import compiled
from tests.kernels.compiled import for_cpu
from tests.kernels.problems import assert_right, name, poison_unseen_pages, random_work, run_kernels


def test_every_shape_of_the_contract_is_served():
    draw = random.Random(0)
    for _ in range(400):
        heads = draw.choice([1, 7, 9, 14, 28, 32, 63, 126, 128, draw.randint(1, 128)])
        groups = draw.choice([g for g in range(1, heads + 1) if heads % g == 0])
        widths = [8 * draw.randint(1, 32) for _ in range(2)]
        shape = GQAShape(heads, groups, *widths, draw.choice([16, 64, 256]), draw.choice(SEQLENS_Q), "bfloat16")
        for capability in SHARED_MEMORY:
            choice = select_kernel(shape, capability)
            assert choice.kernel == ("streamed" if capability == 90 else "portable")
            used = int(re.search(r"(\d+) bytes of shared memory", choice.reason).group(1))
            assert used <= shared_memory_limit(capability)
            assert 1 <= choice.num_ctas(132) <= MAX_SPLITS


def test_packed_tiles_hold_every_row_once():
    for heads, groups, seqlen_q, max_rows in [
        (7, 1, 8, 64),
        (9, 3, 2, 8),
        (128, 1, 8, 16),
        (32, 32, 4, 32),
        (63, 1, 1, 64),
    ]:
        tiling = tile_rows(heads, groups, seqlen_q, max_rows, 1, packed=True)
        assert tiling.groups_per_tile == 1 and tiling.rows <= max_rows and tiling.rows >= 8
        assert tiling.head_rows >= tiling.heads_per_tile and tiling.head_rows & (tiling.head_rows - 1) == 0
        rows = {
            (tiling.token(row), tiling.head(row))
            for row in range(tiling.rows)
            if tiling.head(row) < tiling.heads_per_tile and tiling.token(row) < tiling.tokens_per_tile
        }
        assert len(rows) == tiling.heads_per_tile * tiling.tokens_per_tile
        per_group = tiling.tiles_per_group * tiling.heads_per_tile
        assert per_group >= heads // groups and tiling.token_tiles * tiling.tokens_per_tile >= seqlen_q


@cache
def compiled_for_cpu(shape: GQAShape, max_rows: int, block_tokens: int, splits: int):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.gqa_decode.api import GQA
    from mha2mla.kernels.machine import Machine
    from mha2mla.kernels.split_kv.combine import make_combine

    tiling = tile_rows(shape.heads, shape.num_kv_heads, shape.seqlen_q, max_rows, 1, packed=True)
    choice = next(choice for choice in list_kernels(shape, 80) if choice.kernel == "portable")
    choice = dataclasses.replace(choice, tiling=tiling, block_tokens=block_tokens)
    merge = make_combine(shape.heads, shape.v_head_dim, "float32", splits, on_cpu=True)
    return for_cpu(GQA.make_split(replace(shape, dtype="float32"), choice, Machine(True))), for_cpu(merge)


def run_on_cpu(problem: GQAProblem, num_ctas: int, work=None, max_rows=32, block_tokens=64, splits=64, compiled_q=None):
    shape = problem.shape("float32", compiled_q)
    split, merge = compiled_for_cpu(shape, max_rows, block_tokens, splits)
    inputs = poison_unseen_pages(problem, problem.inputs(torch.float32))
    out, lse = run_kernels(problem, split, merge, inputs, num_ctas, work)
    assert_right(inputs, out, lse, **problem.visibility)
    return out


CPU_SHAPES = [
    GQAProblem(9, 3, 64, 64, (1, 63, 64, 65, 200)),
    GQAProblem(14, 2, 80, 80, (130,)),
    GQAProblem(7, 1, 24, 88, (5, 70), page_size=16),
    GQAProblem(5, 5, 96, 64, (100, 64), page_size=32),
    GQAProblem(40, 2, 8, 8, (70,), page_size=128),
    GQAProblem(3, 1, 192, 128, (77,)),
    GQAProblem(1, 1, 8, 8, (64, 1)),
]


@pytest.mark.parametrize("problem", CPU_SHAPES, ids=name)
def test_no_shape_reads_poison_or_drops_heads(problem):
    """Group ratios that are no power of two, odd widths, poisoned pages, one CTA and more CTAs than tiles."""
    for num_ctas in (1, 2, 12):
        run_on_cpu(problem, num_ctas)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seqlen_q", "max_rows"), [(2, 64), (4, 16), (8, 8)])
def test_causal_alignment_is_bottom_right(seqlen_q, max_rows, causal):
    """Bottom-right aligned; sequences shorter than the query leave rows that see nothing; windows and sinks too."""
    lengths = (0, 1, seqlen_q, 66, 129, 64 + seqlen_q - 1)
    problem = GQAProblem(6, 2, 16, 8, lengths, seqlen_q=seqlen_q, causal=causal)
    for num_ctas in (1, 9):
        run_on_cpu(problem, num_ctas, max_rows=max_rows)
        for window, sinks in ((1, 0), (3, 70), (64, 4)):
            run_on_cpu(dataclasses.replace(problem, window=window, sinks=sinks), num_ctas, max_rows=max_rows)


@pytest.mark.parametrize("block_tokens", [32, 64])
def test_random_plans(block_tokens):
    """Cuts at any tile, fragments on any CTA in any order, windows, starts: what a kernel may not take for granted."""
    for seed in range(20):
        draw = random.Random(seed)
        lengths = tuple(draw.choice([0, draw.randint(1, 500)]) for _ in range(draw.randint(1, 9)))
        window = draw.choice([None, draw.randint(1, 300)])
        problem = GQAProblem(
            3,
            1,
            24,
            8,
            lengths,
            page_size=16,
            starts=tuple(draw.randint(0, length) for length in lengths) if draw.random() < 0.4 else None,
            window=window,
            sinks=draw.choice([0, 3, 90]) if window else 0,
            seqlen_q=draw.choice([1, 2]),
            causal=draw.random() < 0.7,
            seed=seed,
        )
        num_ctas = draw.choice([1, 2, 5, 16, 33])
        work = random_work([span.tiles for span in problem.spans()], num_ctas, draw)
        run_on_cpu(problem, num_ctas, work, block_tokens=block_tokens, compiled_q=2)


GATED = [
    GQAShape(28, 4, 192, 128, 16, 8, "float16"),
    GQAShape(32, 32, 128, 128, 64, 1, "bfloat16"),
    GQAShape(64, 1, 256, 256, 64, 1, "bfloat16"),
]


def gate(shape: GQAShape, choice, capability: int):
    from mha2mla.kernels.gqa_decode.api import GQA
    from mha2mla.kernels.machine import PASS_CONFIGS

    arch = "sm_90a" if capability == 90 else f"sm_{capability}"
    report = compiled.gate(GQA.make_split(shape, choice), PASS_CONFIGS, arch, shared_memory_limit(capability))
    memory = streamed_shared_memory if choice.kernel == "streamed" else portable_shared_memory
    depth = choice.num_stages if choice.kernel == "streamed" else choice.block_tokens
    promised = memory(choice.tiling, shape.qk_head_dim, shape.v_head_dim, depth)
    assert promised - 4096 <= report.shared_bytes <= promised, choice.reason
    assert report.registers * 160 * choice.ctas_per_sm <= 65536, choice.reason
    return report


@few("shape", GATED, count=1, ids=str)
def test_kernels_fit_a_hopper(shape):
    """The rule's choice: no spills, memory as computed, registers for so many CTAs on a multiprocessor."""
    report = gate(shape, select_kernel(shape, 90), 90)
    if report.instructions is not None:
        assert report.instructions.get("HGMMA", 0) and report.instructions.get("UTMALDG", 0), report.instructions


# Several new tokens of few heads: 24, 40 and 56 rows in tiles of 32 and 64. With 32 cached tokens a step, the warps
# that hold a row's scores are not those that hold its output.
ODD_ROWS = [
    GQAShape(40, 8, 96, 96, 32, 8, "float16"),
    GQAShape(9, 3, 64, 64, 64, 8, "bfloat16"),
    GQAShape(28, 4, 128, 128, 64, 8, "bfloat16"),
]


@pytest.mark.exhaustive  # the GPU runs both
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("shape", ODD_ROWS, ids=str)
def test_portable_kernel_of_odd_rows(shape, capability):
    choice = next(choice for choice in list_kernels(shape, capability) if choice.kernel == "portable")
    assert choice.tiling.rows > shape.heads // shape.num_kv_heads * shape.seqlen_q
    gate(shape, choice, capability)


@few("capability", [80, 89], count=1)
def test_before_hopper(capability):
    shape = GQAShape(14, 2, 80, 64, 16, 2, "bfloat16")
    report = gate(shape, select_kernel(shape, capability), capability)
    if report.instructions is not None:
        assert report.instructions.get("HMMA", 0), report.instructions
