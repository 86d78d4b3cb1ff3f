"""The decode op on a GPU against float64: all shapes, windows and starts over poisoned caches, strides, far pages."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from mha2mla.kernels import mla_decode
from tests.kernels.mla_decode.problems import check, name
from tests.kernels.problems import Problem, errors, exact

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPES = [
    Problem(32, 32, 512, 16, (0, 1, 63, 64, 65, 700)),
    Problem(32, 32, 512, 16, (0, 1, 15, 16, 17, 700), page_size=16),
    Problem(32, 8, 512, 16, (129, 4096), page_size=128),
    Problem(32, 1, 512, 64, (1, 64, 2000), combined=True),
    Problem(9, 3, 192, 64, (5, 300)),
    Problem(9, 9, 256, 16, (5, 300)),
    Problem(9, 3, 216, 24, (5, 300)),
    Problem(14, 2, 80, 8, (65, 300), page_size=32),
    Problem(14, 14, 88, 24, (65, 300)),
    Problem(12, 12, 144, 32, (65, 300), combined=True),
    Problem(24, 8, 320, 24, (65, 300)),
    Problem(24, 24, 384, 40, (65, 300)),
    Problem(40, 40, 448, 16, (65, 300)),
    Problem(40, 8, 512, 48, (65, 300)),
    Problem(3, 1, 512, 256, (65, 300)),
    Problem(1, 1, 8, 8, (1, 300)),
    Problem(63, 63, 128, 8, (65, 300)),
    Problem(126, 2, 512, 128, (65, 300)),
    Problem(128, 128, 512, 16, (65, 300)),
    Problem(128, 1, 512, 64, (65, 300)),
    Problem(64, 16, 192, 128, (65, 300)),
    Problem(63, 7, 304, 32, (65, 300), page_size=16),  # two warpgroups, more chunks of rope columns than the ring holds
    Problem(14, 1, 256, 216, (65, 300), seqlen_q=4),
    Problem(32, 1, 1024, 64, (0, 1, 63, 64, 65, 2000), combined=True),
    Problem(32, 8, 896, 16, (0, 1, 15, 16, 17, 700), page_size=16),
    Problem(64, 1, 960, 64, (65, 300)),
    Problem(64, 8, 1024, 32, (65, 300), page_size=128),
    Problem(16, 16, 768, 24, (65, 300), page_size=32),
    Problem(9, 3, 520, 40, (5, 300)),
    Problem(40, 8, 576, 32, (65, 300)),
    Problem(128, 1, 1024, 64, (65, 300)),
    Problem(12, 1, 1000, 96, (65, 300), seqlen_q=4),
    Problem(3, 1, 1024, 256, (65, 300)),
]


@pytest.mark.parametrize("problem", SHAPES, ids=name)
def test_no_shape_reads_poison_or_drops_heads(problem):
    """Odd heads and widths over poisoned pages, in both dtypes of the cache, bit-equal when run again."""
    out = check(problem)
    for _ in range(5):
        again = mla_decode(**problem.inputs(torch.bfloat16, "cuda"), backend="tilelang")
        assert torch.equal(out, again)


@pytest.mark.parametrize("problem", [SHAPES[0], SHAPES[4], SHAPES[9], *SHAPES[23:26]], ids=name)
def test_float16(problem):
    check(problem, torch.float16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q", [2, 3, 4, 8])
def test_several_new_tokens_are_aligned_bottom_right(seqlen_q, causal):
    # 65, 130 and 195 end in a tile that the earlier queries do not see at all
    lengths = (0, 1, seqlen_q, 64 + seqlen_q, 200, 65, 130, 195)
    check(Problem(16, 16, 512, 16, lengths, seqlen_q=seqlen_q, causal=causal))
    check(Problem(6, 2, 64, 16, lengths, seqlen_q=seqlen_q, causal=causal, starts=(0, 1, 0, 70, 190, 64, 7, 195)))
    check(Problem(9, 3, 192, 64, lengths, seqlen_q=seqlen_q, causal=causal))
    check(Problem(64, 1, 512, 64, lengths, seqlen_q=seqlen_q, causal=causal))  # rows for heads_on_m
    check(Problem(24, 1, 960, 64, lengths, seqlen_q=seqlen_q, causal=causal))


def test_left_padding():
    check(Problem(32, 8, 512, 16, (70, 140, 64, 2000, 90), starts=(1, 64, 63, 1900, 90)))


WINDOWED = (0, 1, 63, 64, 65, 100, 321, 470, 3000)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 1), (20, 4), (64, 64), (65, 100), (200, 5), (5000, 4)])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(32, 32, 512, 16, WINDOWED),
        Problem(9, 3, 216, 24, WINDOWED, page_size=16),
        Problem(128, 1, 512, 64, WINDOWED, page_size=128),
        Problem(32, 8, 128, 16, WINDOWED, page_size=32, seqlen_q=2),
        Problem(16, 1, 256, 64, WINDOWED, page_size=16, seqlen_q=4, causal=False),
        Problem(32, 1, 1024, 64, WINDOWED),
        Problem(64, 8, 648, 16, WINDOWED, page_size=16),
    ],
    ids=name,
)
def test_windows_and_sinks_over_poisoned_pages(problem, window, sinks):
    """Windows begin and sinks end in the middle of tiles, whose other pages have no table entry."""
    problem = dataclasses.replace(problem, window=window, sinks=sinks)
    check(problem)
    check(dataclasses.replace(problem, starts=(0, 1, 60, 0, 65, 30, 130, 17, 2900)))


@pytest.mark.parametrize("batch", [2, 40, 131, 300])
def test_mixed_lengths(batch):
    """Many CTAs, more sequences than CTAs, short and empty sequences beside long ones."""
    draw = random.Random(batch)
    lengths = tuple(draw.choice([0, 1, draw.randint(1, 200), draw.randint(1, 4000)]) for _ in range(batch))
    for problem in (Problem(32, 8, 128, 16, lengths), Problem(128, 1, 128, 64, lengths, page_size=128)):
        check(problem, planned=True)
        check(dataclasses.replace(problem, window=100, sinks=4))


def test_large_scores_are_not_taken_for_masked_ones():
    problem = Problem(32, 32, 512, 16, (65, 1000), scale=3e5)
    inputs = problem.inputs(torch.bfloat16, "cuda")
    out, lse = mla_decode(**inputs, return_lse=True, backend="tilelang")
    expected, expected_lse = exact(inputs)
    assert float(expected_lse.abs().max()) > 3e5
    assert not torch.isnan(out).any()
    assert errors(out, expected)[0] < 2e-2
    assert float(((lse - expected_lse) / expected_lse).abs().max()) < 1e-4


def test_strided_queries_are_not_misread():
    problem = SHAPES[2]
    inputs = problem.inputs(torch.bfloat16, "cuda")
    plain = mla_decode(**inputs, backend="tilelang")
    q = inputs["q_latent"].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = torch.cat([inputs["q_pe"], inputs["q_pe"]], -1)[..., : problem.qk_rope_head_dim]
    assert torch.equal(mla_decode(**(inputs | {"q_latent": q, "q_pe": wide}), backend="tilelang"), plain)
    assert q.stride() != inputs["q_latent"].stride()


def test_addresses_do_not_overflow_32_bits():
    """Pages more than 2^31 elements into the cache."""
    page, d_c, d_r = 64, 512, 16
    pages = 2**31 // (page * d_c) + 8
    latent = torch.empty(pages, page, d_c, dtype=torch.bfloat16, device="cuda")
    rope = torch.empty(pages, page, 1, d_r, dtype=torch.bfloat16, device="cuda")
    few = Problem(32, 1, d_c, d_r, (130,)).inputs(torch.bfloat16, "cuda")
    used = few["block_table"][0, :3].long()
    far = torch.arange(pages - 3, pages, device="cuda")
    latent[far], rope[far] = few["latent_cache"][used], few["rope_cache"][used]
    table = far.int()[None].contiguous()
    far_away = mla_decode(
        **(few | {"latent_cache": latent, "rope_cache": rope, "block_table": table}), backend="tilelang"
    )
    near = mla_decode(**(few | {"block_table": used.int()[None].contiguous()}), backend="tilelang")
    assert torch.equal(far_away, near)


@pytest.mark.parametrize("seed", range(24))
def test_random_dynamic_arguments(seed):
    """One geometry, random batch, lengths, starts, table width and new tokens."""
    make = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=make))

    lengths = tuple(draw(0, 900) for _ in range(draw(1, 40)))
    starts = tuple(draw(0, length) for length in lengths) if seed % 2 else None
    window = draw(1, 300) if seed % 3 == 0 else None
    check(
        Problem(
            12,
            4,
            128,
            16,
            lengths,
            page_size=32,
            seqlen_q=draw(1, 2),
            starts=starts,
            window=window,
            sinks=draw(0, 90) if window else 0,
            slack=draw(0, 9),
            seed=seed,
        ),
        planned=bool(seed % 4),
    )


def draw_geometry(seed: int) -> Problem:
    """A random geometry within the contract, over short sequences."""
    make = torch.Generator().manual_seed(seed)

    def one_of(options):
        return options[int(torch.randint(len(options), (), generator=make))]

    groups = one_of((1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 32, 48, 96, 128))
    per_group = one_of([n for n in (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 40, 64, 128) if n * groups <= 128])
    widest = min(256 if groups == 1 else 128, 2048 // groups)
    seqlen_q = one_of((1, 1, 1, 2, 4, 8))
    return Problem(
        heads=groups * per_group,
        num_rope_heads=groups,
        kv_lora_rank=8 * one_of(range(1, 65)),
        qk_rope_head_dim=8 * one_of(range(1, widest // 8 + 1)),
        lengths=tuple(one_of((0, 1, 17, 63, 64, 65, 127, 130, 321)) for _ in range(4)),
        page_size=one_of((16, 32, 64, 128)),
        seqlen_q=seqlen_q,
        combined=bool(one_of((0, 1))),
        window=one_of((None, None, 1, 50, 100)),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(28))
def test_random_geometries(seed):
    """Any H, G, d_c, d_r, page and S_q of the contract."""
    check(draw_geometry(seed), torch.float16 if seed % 4 == 3 else torch.bfloat16)
