"""All decode ops on a GPU against float64: shapes, windows, every kernel and plan, addresses, graphs, streams."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from mha2mla.kernels import dequantize_latent, plan_mla_decode, quantize_latent, rotary_keys
from mha2mla.kernels.mla_decode.api import MLA
from mha2mla.kernels.ops import capability
from mha2mla.testing.kernel_check import draw_cases
from mha2mla.testing.numeric_check import errors
from mha2mla.testing.problems import (
    GQAProblem,
    KeyCodesProblem,
    LatentCodesProblem,
    LatentProblem,
    PagedProblem,
    Problem,
    RowCodesProblem,
    exact,
    with_keys,
)
from tests.few import few
from tests.gpu import graph_of, no_waits
from tests.kernels.problems import (
    assert_right,
    decode,
    empty_out,
    kernels_of,
    name,
    poison_unseen_pages,
    random_work,
    run_kernels,
    with_holes,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CUDA = torch.device("cuda")
EDGES = (0, 1, 63, 64, 65, 700)
FIVE = (300, 5, 64, 129, 63)
# A static shape costs half a minute of compiling; most other tests take shapes of these lists.
STORED = [
    Problem(32, 32, 512, 16, EDGES),
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
GQA = [
    GQAProblem(32, 32, 128, 128, (0, 1, 65, 300, 64)),
    GQAProblem(9, 3, 64, 64, (1, 63, 64, 65, 1000)),
    GQAProblem(14, 2, 64, 64, (130, 4, 700, 0, 64), page_size=16, seqlen_q=2),
    GQAProblem(28, 4, 128, 128, (77, 500, 3, 64, 0), seqlen_q=8),
    GQAProblem(24, 8, 96, 96, FIVE),
    GQAProblem(16, 16, 192, 128, FIVE),
    GQAProblem(8, 1, 256, 256, FIVE, page_size=128),
    GQAProblem(63, 1, 8, 88, FIVE, seqlen_q=4),
    GQAProblem(1, 1, 80, 80, FIVE, page_size=32, combined=True),
]
WS, WIDE, NARROW = (32, 1, 512, 64), (9, 1, 192, 128), (16, 1, 120, 64)  # 1 and 2 warpgroups make keys; 2 CTAs an SM
HALVES = (32, 1, 1024, 32)  # two CTAs share the columns
LATENT = [
    LatentProblem(*WS, (*EDGES, 4096)),
    LatentProblem(*WIDE, (65, 3000, 1), scaling=1.3),
    LatentProblem(*NARROW, (1, 64, 2000), combined=True, shuffled=True),
    LatentProblem(*HALVES, (*EDGES, 4096), scaling=1.3),
    LatentProblem(32, 1, 512, 128, (65, 3000, 1), page_size=16, shuffled=True),
    LatentProblem(64, 1, 1024, 64, (65, 3000), first_position=131072),
    LatentProblem(9, 1, 640, 96, (1, 64, 2000), combined=True),
    LatentProblem(16, 1, 1024, 128, (65, 300)),
    LatentProblem(*WS, (0, 1, 15, 16, 17, 700), page_size=16, shuffled=True, scaling=1.3),
    LatentProblem(64, 1, 512, 64, (65, 3000)),
    LatentProblem(16, 1, 256, 64, (65, 300), first_position=131072),
    LatentProblem(16, 1, 384, 96, (65, 300), scaling=0.8),
    LatentProblem(16, 1, 72, 32, (1, 64, 2000), combined=True),
    LatentProblem(16, 1, 120, 96, (65, 300), page_size=32, shuffled=True),
    LatentProblem(40, 1, 384, 32, (65, 300), page_size=128, shuffled=True),
    LatentProblem(64, 1, 256, 64, (65, 300)),
    LatentProblem(3, 1, 504, 128, (65, 300)),
    LatentProblem(1, 1, 8, 8, (1, 300)),
    LatentProblem(128, 1, 504, 24, (65, 300)),
]
LATENT_CODES = [
    LatentProblem(*WS, (*EDGES, 4096), codes=True),
    LatentProblem(*WIDE, (65, 3000, 1), scaling=1.3, codes=True),
    LatentProblem(*WS, (0, 1, 15, 16, 17, 700), page_size=16, shuffled=True, codes=True),
    LatentProblem(64, 1, 256, 64, (65, 300), page_size=128, codes=True),
    LatentProblem(16, 1, 80, 32, (1, 64, 2000), page_size=32, codes=True),
    LatentProblem(16, 1, 384, 64, (65, 300), first_position=131072, codes=True),
    LatentProblem(1, 1, 16, 8, (1, 300), codes=True),
    LatentProblem(128, 1, 496, 24, (65, 300), codes=True),
]
STORED_CODES = [
    Problem(32, 1, 512, 64, (*EDGES, 127, 128, 129, 2000), codes=True),
    Problem(32, 1, 512, 64, (0, 1, 15, 16, 17, 700), page_size=16, codes=True),
    Problem(16, 1, 512, 64, (5, 300, 1000), codes=True),
    Problem(32, 8, 512, 16, (1, 4000), codes=True),
    Problem(9, 3, 80, 24, (5, 300), page_size=128, codes=True),
    Problem(40, 40, 192, 8, (65, 300), codes=True),
    Problem(128, 1, 512, 64, (65, 300), codes=True),
    Problem(1, 1, 16, 8, (1, 300), codes=True),
    Problem(24, 24, 320, 16, (3, 190), codes=True),
]
ROW_CODES = [
    RowCodesProblem(32, 1, 512, 64, (*EDGES, 127, 128, 129, 2000)),
    RowCodesProblem(32, 1, 512, 64, (0, 1, 15, 16, 17, 700), page_size=16, bits=8),
    RowCodesProblem(28, 1, 512, 128, (65, 3000), bits=8),
    RowCodesProblem(28, 1, 512, 128, (65, 300), bits=3),
    RowCodesProblem(9, 1, 192, 64, (5, 300, 4000)),
    RowCodesProblem(9, 1, 192, 64, (5, 300), page_size=128, bits=8),
    RowCodesProblem(14, 2, 96, 16, (65, 300), page_size=32, bits=3),
    RowCodesProblem(64, 1, 448, 64, (65, 300), bits=2),
    RowCodesProblem(1, 1, 32, 8, (1, 300)),
    RowCodesProblem(32, 1, 1024, 64, (*EDGES, 4096)),
    RowCodesProblem(32, 1, 1024, 64, (65, 2000), page_size=16, bits=8),
    RowCodesProblem(16, 1, 640, 32, (65, 300), bits=3),
]
COMPUTED_CODES = [
    LatentCodesProblem(*WS, (*EDGES, 4096)),
    LatentCodesProblem(*WIDE, (65, 3000, 1), scaling=1.3, bits=3),
    LatentCodesProblem(*WS, (0, 1, 15, 16, 17, 700), page_size=16, shuffled=True, bits=8),
    LatentCodesProblem(32, 1, 1024, 64, (*EDGES, 4096), shuffled=True),
    LatentCodesProblem(28, 1, 512, 128, (65, 3000), bits=8),
    LatentCodesProblem(28, 1, 448, 128, (65, 300), bits=3),
    LatentCodesProblem(9, 1, 192, 64, (5, 300, 4000), first_position=131072, bits=2),
    LatentCodesProblem(14, 1, 320, 96, (65, 300), page_size=32, bits=3),
    LatentCodesProblem(1, 1, 32, 8, (1, 300), page_size=128, bits=8),
]
KEY_CODES = [
    KeyCodesProblem(28, 1, 512, 128, (*EDGES, 4096), scaling=1.3),
    KeyCodesProblem(28, 1, 512, 128, (0, 1, 15, 16, 17, 700), page_size=16, shuffled=True, bias=600.0),
    KeyCodesProblem(32, 1, 1024, 64, (*EDGES, 4096), first_position=131072),
    KeyCodesProblem(40, 1, 448, 128, (65, 3000, 1), combined=True),
    KeyCodesProblem(64, 1, 256, 64, (65, 300), page_size=32),  # two warpgroups compute
    KeyCodesProblem(9, 1, 192, 96, (5, 300, 4000), page_size=128),
    KeyCodesProblem(16, 1, 1000, 112, (65, 300), page_size=16),
    KeyCodesProblem(1, 1, 8, 16, (1, 300)),
    KeyCodesProblem(128, 1, 512, 64, (65, 300)),
]
EVERY_RUN = [*STORED, *GQA, *LATENT[:11], *LATENT_CODES[:4], *STORED_CODES, *ROW_CODES, *COMPUTED_CODES, *KEY_CODES]
# One problem an op.
OPS = [STORED[2], GQA[1], LATENT[0], LATENT_CODES[0], STORED_CODES[0], ROW_CODES[0], COMPUTED_CODES[0], KEY_CODES[0]]


def check(problem: PagedProblem, dtype=torch.bfloat16, planned: bool = False) -> torch.Tensor:
    """Runs the op on a problem, by a plan or (without a window) by one made for the call, and judges the output."""
    inputs = poison_unseen_pages(problem, problem.inputs(dtype, CUDA))
    plan = problem.plan(inputs, "tilelang") if planned or problem.window is not None else None
    if plan is not None:
        plan.partial_out.fill_(torch.nan)
        plan.partial_lse.fill_(torch.nan)
    out = empty_out(problem, inputs)
    _, lse = decode(problem, inputs, plan=plan, out=out, return_lse=True, backend="tilelang")
    assert_right(inputs, out, lse, **problem.visibility)
    return out


@few("problem", [*EVERY_RUN, *LATENT[11:], *LATENT_CODES[4:]], count=len(EVERY_RUN), ids=name)
def test_no_shape_reads_poison_or_drops_heads(problem):
    """Odd heads and widths over poisoned pages, bit-equal when run again, with a plan and without."""
    out, inputs = check(problem), problem.inputs(torch.bfloat16, CUDA)
    for plan in (problem.plan(inputs, "tilelang"), *[None] * 4):
        assert torch.equal(out, decode(problem, inputs, plan=plan, backend="tilelang"))
    check(replace(problem, causal=False, lengths=(0,) * len(problem.lengths)))


FLOAT16 = [
    *(STORED[0], STORED[4], STORED[9], *STORED[23:26], *GQA[1:3], LATENT[1], STORED_CODES[0]),
    *(ROW_CODES[0], ROW_CODES[5], COMPUTED_CODES[1], COMPUTED_CODES[3], KEY_CODES[0], KEY_CODES[2]),
]


@few("problem", [*FLOAT16, LATENT[0], LATENT[3]], count=len(FLOAT16), ids=name)
def test_float16(problem):
    check(problem, torch.float16)


NEW_TOKENS = [
    Problem(16, 16, 512, 16, ()),
    Problem(6, 2, 64, 16, ()),
    Problem(9, 3, 192, 64, ()),
    Problem(64, 1, 512, 64, ()),  # rows for heads_on_m
    Problem(24, 1, 960, 64, ()),
    LatentProblem(*WS, ()),
    LatentProblem(*WIDE, (), codes=True),
    Problem(16, 1, 512, 64, (), codes=True),
    Problem(6, 2, 64, 16, (), codes=True),
    RowCodesProblem(32, 1, 512, 64, ()),
    RowCodesProblem(32, 1, 1024, 64, ()),
    RowCodesProblem(6, 2, 64, 16, (), bits=8),
    LatentCodesProblem(*WS, ()),
    LatentCodesProblem(*WIDE, (), bits=8),
    LatentCodesProblem(32, 1, 1024, 64, (), bits=3),
    KeyCodesProblem(14, 1, 512, 128, ()),
    KeyCodesProblem(40, 1, 640, 64, ()),
    GQAProblem(14, 2, 64, 64, (), page_size=16),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q", [2, 3, 4, 8])
@pytest.mark.parametrize("problem", NEW_TOKENS, ids=name)
def test_several_new_tokens_are_aligned_bottom_right(problem, seqlen_q, causal):
    # 65, 130 and 195 end in a tile that the earlier queries do not see at all
    lengths = (0, 1, seqlen_q, 64 + seqlen_q, 200, 65, 130, 195)
    for starts in (None, (0, 1, 0, 70 if seqlen_q > 5 else 60, 190, 64, 7, 195)):
        check(replace(problem, lengths=lengths, seqlen_q=seqlen_q, causal=causal, starts=starts))


WINDOWED = [
    Problem(32, 32, 512, 16, ()),
    Problem(9, 3, 216, 24, (), page_size=16),
    Problem(128, 1, 512, 64, (), page_size=128),
    Problem(32, 8, 128, 16, (), page_size=32, seqlen_q=2),
    Problem(16, 1, 256, 64, (), page_size=16, seqlen_q=4, causal=False),
    Problem(32, 1, 1024, 64, ()),
    Problem(64, 8, 648, 16, (), page_size=16),
    *GQA[:3],
    LatentProblem(*WS, (), page_size=16),
    LatentProblem(*WIDE, ()),
    LatentProblem(*HALVES, ()),
    *LATENT_CODES[:2],
    STORED_CODES[0],
    ROW_CODES[0],
    ROW_CODES[1],
    RowCodesProblem(32, 1, 1024, 64, ()),
    COMPUTED_CODES[0],
    COMPUTED_CODES[2],
    KEY_CODES[0],
    # Of a bias of 600 a key's rounding alone decides between a window's two tokens: float64 over keys rounded once is
    # more than twice as far off as torch for three of forty seeds.
    replace(KEY_CODES[1], bias=10.0),
    KEY_CODES[2],
]


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 1), (20, 4), (64, 64), (65, 100), (200, 5), (5000, 4)])
@pytest.mark.parametrize("problem", WINDOWED, ids=name)
def test_windows_and_sinks_over_poisoned_pages(problem, window, sinks):
    """Windows begin and sinks end in the middle of tiles, whose other pages have no table entry."""
    problem = replace(problem, lengths=(0, 1, 63, 64, 65, 100, 321, 470, 3000), window=window, sinks=sinks)
    check(problem)
    check(replace(problem, starts=(0, 1, 60, 0, 65, 30, 130, 17, 2900)))


@pytest.mark.parametrize("problem", OPS, ids=name)
def test_left_padding(problem):
    check(replace(problem, lengths=(70, 140, 64, 2000, 90), starts=(1, 64, 63, 1900, 90)))


@pytest.mark.parametrize("batch", [2, 40, 131, 300])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(32, 8, 128, 16, ()),
        Problem(128, 1, 128, 64, (), page_size=128),
        KeyCodesProblem(32, 1, 512, 64, (), seqlen_q=8),
        GQA[1],
    ],
    ids=name,
)
def test_mixed_lengths(problem, batch):
    """Many CTAs, more sequences than CTAs, short and empty sequences beside long ones."""
    draw = random.Random(batch)
    lengths = tuple(draw.choice([0, 1, draw.randint(1, 200), draw.randint(1, 4000)]) for _ in range(batch))
    check(replace(problem, lengths=lengths), planned=True)
    check(replace(problem, lengths=lengths, window=100, sinks=4))


@pytest.mark.parametrize(
    ("problem", "scale"), [(STORED[0], 3e5), (GQA[0], 1e5), (STORED_CODES[0], 4e5)], ids=["mla", "gqa", "codes"]
)
def test_large_scores_are_not_taken_for_masked_ones(problem, scale):
    inputs = replace(problem, lengths=(65, 1000), scale=scale).inputs(torch.bfloat16, CUDA)
    out, lse = decode(problem, inputs, return_lse=True, backend="tilelang")
    expected, expected_lse = exact(inputs)
    assert float(expected_lse.abs().max()) > 3e5 and errors(out, expected)[0] < 2e-2
    assert float(((lse - expected_lse) / expected_lse).abs().max()) < 1e-4


@pytest.mark.parametrize("problem", [STORED_CODES[0], *LATENT_CODES[:2]], ids=name)
@pytest.mark.parametrize("scale", [1e-4, 100.0])
def test_e4m3_latents_and_scaled_queries(problem, scale):
    check(replace(problem, scale=scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_e4m3_latents_whose_scales_lie_far_apart(dtype):
    """Weights contain the scales, so that none of them is lost in 16 bits."""
    inputs = replace(LATENT_CODES[1], lengths=(300, 70)).inputs(dtype, CUDA)
    exponent = torch.randint(-12, 3, inputs["latent_scale"].shape, device=CUDA)
    exponent[:, ::2] = 0
    inputs["latent_scale"] *= torch.exp2(exponent.float())
    assert_right(inputs, *decode(LATENT_CODES[1], inputs, return_lse=True, backend="tilelang"))


def test_scales_far_apart_and_strided_codes():
    """Scales from 2^-30 to 2^20 in one sequence; codes and scales as views of larger pages."""
    problem = Problem(32, 1, 512, 64, (300, 70))
    inputs = problem.inputs(torch.bfloat16, CUDA)
    exponent = torch.randint(-30, 20, inputs["latent_cache"].shape[:2], device=CUDA)
    exponent[:, ::2] = -3
    codes, scale = quantize_latent(inputs["latent_cache"].float() * torch.exp2(exponent.float())[..., None])
    held = inputs | {"latent_cache": dequantize_latent(codes, scale, torch.float64)}
    wide = torch.zeros(*codes.shape[:2], 640, dtype=torch.uint8, device=CUDA).view(torch.float8_e4m3fn)[..., 64:576]
    wide.view(torch.uint8).copy_(codes.view(torch.uint8))
    scales = torch.full((len(scale), 128), torch.nan, device=CUDA)[:, 64:]
    scales.copy_(scale)
    arguments = inputs | {"latent_cache": wide, "latent_scale": scales}
    assert_right(held, *decode(problem, arguments, return_lse=True, backend="tilelang"))


@pytest.mark.parametrize("problem", KEY_CODES[:4], ids=name)
def test_int8_keys_are_their_dequantised_selves(problem):
    """As the kernel of stored keys attends over the same keys in 16 bits."""
    inputs = replace(problem, lengths=(300, 70, 2000)).inputs(torch.bfloat16, CUDA)
    out, lse = decode(problem, inputs, return_lse=True, backend="tilelang")
    expected, expected_lse = decode(problem, with_keys(inputs, torch.bfloat16), return_lse=True, backend="tilelang")
    assert errors(out, expected.double())[0] < 4e-3
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=2e-2)


def test_strided_inputs_are_not_misread():
    for problem in (STORED[2], GQA[1]):
        inputs = problem.inputs(torch.bfloat16, CUDA)
        plain, (query, *_) = decode(problem, inputs, backend="tilelang"), problem.op.names
        moved = {query: inputs[query].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)}
        wide = "q_pe" if problem.op is MLA else "k_cache"
        moved[wide] = torch.cat([inputs[wide]] * 2, -1)[..., : inputs[wide].shape[-1]]
        if problem.op is not MLA:
            moved["v_cache"] = inputs["v_cache"].transpose(1, 2).contiguous().transpose(1, 2)  # [P, G, page, d]
        out = plain.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).fill_(torch.nan)
        decode(problem, inputs | moved, out=out, backend="tilelang")
        assert torch.equal(out, plain)


@pytest.mark.parametrize("problem", OPS[:3], ids=name)
def test_addresses_do_not_overflow_32_bits(problem):
    """Pages more than 2^31 elements into the cache."""
    problem = replace(problem, lengths=(130,), page_size=64, slack=0)
    inputs = problem.inputs(torch.bfloat16, CUDA)
    caches = [argument.name for argument in problem.op.arguments if argument.names[0] == "P"]
    pages = 2**31 // min(inputs[cache][0].numel() for cache in caches[: 1 + (problem.op is not MLA)]) + 8
    used = inputs["block_table"][0].long()
    far = torch.arange(pages - 3, pages, device=CUDA)
    moved = {cache: inputs[cache].new_empty(pages, *inputs[cache].shape[1:]) for cache in caches}
    for cache in caches:
        moved[cache][far] = inputs[cache][used]
    far_away = decode(problem, inputs | moved | {"block_table": far.int()[None]}, backend="tilelang")
    assert torch.equal(far_away, decode(problem, inputs, backend="tilelang"))


@pytest.mark.parametrize("problem", [STORED[0], STORED[4], GQA[1]], ids=name)
def test_one_long_sequence_has_a_piece_for_each_cta(problem):
    """The combine must hold a weight for each."""
    problem = replace(problem, lengths=(1,))
    num_ctas = problem.plan(problem.inputs(torch.bfloat16, CUDA), "tilelang").num_ctas
    problem = replace(problem, lengths=(128 * num_ctas,))
    plan = problem.plan(problem.inputs(torch.bfloat16, CUDA), "tilelang")
    assert plan.splits.tolist() == [[num_ctas, 0]]
    check(problem, planned=True)
    check(replace(problem, lengths=(0, 64 * 900 + 1, 3)), planned=True)


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (70, 3)])
@pytest.mark.parametrize("problem", [*OPS, Problem(128, 1, 512, 64, ())], ids=name)
def test_a_graph_captured_at_one_length_serves_others(problem, window, sinks):
    """The plan is made inside the graph, so it follows the lengths."""
    capacity = 22 * 64
    full = replace(problem, lengths=(capacity,) * 3, starts=(0, 0, 0), page_size=64, slack=0)
    inputs = full.inputs(torch.bfloat16, CUDA)
    full = replace(full, window=window, sinks=sinks)
    plan, out = full.plan(inputs, "tilelang"), empty_out(full, inputs)

    def step():
        plan.refresh(inputs["cache_seqlens"], inputs["cache_starts"])
        return decode(full, inputs, plan=plan, out=out, return_lse=True, backend="tilelang")

    step()
    torch.cuda.synchronize()
    graph, (_, lse) = graph_of(step)
    for lengths, starts in (
        ((1, 0, 1400), (0, 0, 3)),
        ((64, 65, 0), (10, 0, 0)),
        ((0, 0, 0), (0, 0, 0)),
        ((1400, 1399, 2), (0, 1000, 1)),
        ((9999, 5, 7), (0, 5, 0)),  # more than the table holds, and one that sees nothing
    ):
        inputs["cache_seqlens"].copy_(torch.tensor(lengths))
        inputs["cache_starts"].copy_(torch.tensor(starts))
        for buffer in (plan.partial_out, plan.partial_lse, out, lse):
            buffer.fill_(torch.nan)
        plan.schedule.fill_(-(2**31))
        plan.splits.fill_(-7)
        graph.replay()
        held = inputs | {"cache_seqlens": inputs["cache_seqlens"].clamp(max=capacity)}
        assert_right(held, out, lse, window=window, sinks=sinks)


@pytest.mark.parametrize("problem", OPS, ids=name)
def test_it_runs_on_the_current_stream(problem):
    """The kernels wait for what their own stream does before them, and for nothing else; of a remembered call too."""
    inputs = problem.inputs(torch.bfloat16, CUDA)
    plan, query = problem.plan(inputs, "tilelang"), problem.op.names[0]
    expected = [decode(problem, inputs, plan=plan, backend="tilelang") for _ in range(2)][-1].clone()
    for planned in (None, plan):
        late = inputs | {query: torch.zeros_like(inputs[query])}
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late[query].copy_(inputs[query])
            out = decode(problem, late, plan=planned, backend="tilelang")
        stream.synchronize()
        assert torch.equal(out, expected)
    assert len(plan.memory.launches) == 1


@pytest.mark.parametrize("problem", OPS, ids=name)
def test_no_host_synchronisation(problem):
    inputs = problem.inputs(torch.bfloat16, CUDA)
    plan = problem.plan(inputs, "tilelang")
    decode(problem, inputs, plan=plan, backend="tilelang")
    with no_waits():
        plan.refresh(inputs["cache_seqlens"], inputs["cache_starts"])
        decode(problem, inputs, plan=plan, backend="tilelang")
        decode(problem, inputs, backend="tilelang")


SIX = (0, 1, 65, 700, 64)
CANDIDATES = [
    Problem(32, 32, 512, 16, SIX),
    Problem(64, 8, 512, 16, SIX, page_size=16),
    Problem(64, 64, 256, 32, SIX),
    Problem(128, 1, 512, 64, SIX),
    Problem(64, 1, 200, 64, SIX, page_size=16),
    Problem(32, 1, 512, 64, SIX, seqlen_q=2),
    Problem(9, 3, 72, 16, SIX, page_size=32, seqlen_q=8),
    Problem(32, 1, 1024, 64, SIX),
    Problem(64, 1, 576, 64, SIX, page_size=16),
    Problem(16, 8, 640, 16, SIX, page_size=32, seqlen_q=2),
    *GQA[:4],
    LATENT[1],
    LATENT[3],
    RowCodesProblem(32, 1, 512, 64, SIX),
    RowCodesProblem(9, 1, 192, 64, SIX, page_size=16, bits=8),
    RowCodesProblem(14, 2, 96, 16, SIX, bits=3, seqlen_q=2),
    RowCodesProblem(32, 1, 1024, 64, SIX),
]


def check_choice(problem: PagedProblem, choice) -> None:
    """A configuration by plans of the planner and by plans no planner makes, twice, with and without a window."""
    from mha2mla.kernels.split_kv.combine import SIZES, combine_rows, compile_combine
    from mha2mla.kernels.split_kv.launch import compile_choice

    here, width = capability(CUDA), empty_out(problem, problem.inputs(torch.bfloat16, CUDA)).shape[-1]
    split = compile_choice(problem.op, problem.shape(), choice, here)
    windowed = replace(problem, window=40, sinks=3, starts=tuple(min(n, 30) for n in problem.lengths))
    for case in (problem, windowed):
        inputs = poison_unseen_pages(case, case.inputs(torch.bfloat16, CUDA))
        tiles = [span.tiles for span in case.spans()]
        drawn = [(num_ctas, random_work(tiles, num_ctas, random.Random(num_ctas))) for num_ctas in (3, 9, 40)]
        for i, (num_ctas, work) in enumerate([(1, None), (2, None), (5, None), (132, None), *drawn]):
            splits = sorted(SIZES)[i % len(SIZES)]
            rows = combine_rows(problem.heads, problem.seqlen_q, splits)
            merge = compile_combine(problem.heads, width, "bfloat16", splits, here, rows)
            first, second = (run_kernels(case, split, merge, inputs, num_ctas, work) for _ in range(2))
            try:
                assert_right(inputs, *first, **case.visibility)
            except AssertionError as error:
                raise AssertionError(f"{choice.reason}; {num_ctas} CTAs, plan {i}: {error}") from error
            assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), choice.reason


@few("problem", [*CANDIDATES, LATENT[0], LATENT[2]], count=len(CANDIDATES), ids=name)
def test_every_kernel_that_could_be_chosen_is_right(problem):
    """Not only the rule's choice; by the planner's plans for any number of CTAs, and by plans no planner makes."""
    listed = reversed(kernels_of(problem.op, problem.shape(), capability(CUDA)))
    every = not isinstance(problem, GQAProblem) or problem is GQA[1]  # numbers of CTAs an SM: of one GQA shape
    choices = {(c.kernel, c.variant, c.warpgroups, every and c.ctas_per_sm): c for c in listed}
    for choice in choices.values():
        check_choice(problem, choice)


@pytest.mark.parametrize("scale", [30.0, 3e5])
def test_lazy_rescaling_is_right_for_large_scores(scale):
    """Rows whose maximum grows by little and by much."""
    problem = Problem(128, 1, 512, 64, SIX, scale=scale)
    choice = kernels_of(problem.op, problem.shape(), capability(CUDA))[0]
    assert choice.variant == "lazy"
    check_choice(problem, choice)


OLDER = [
    Problem(32, 8, 512, 16, (0, 1, 65, 300)),
    Problem(9, 3, 144, 64, (65, 300), page_size=16, seqlen_q=2),
    Problem(14, 14, 80, 24, (63, 130), page_size=32, starts=(3, 64)),
    *GQA[1:3],
]


@pytest.mark.parametrize("older_capability", [80, 89])
@pytest.mark.parametrize("problem", OLDER, ids=name)
def test_the_portable_kernel_as_older_gpus_run_it(problem, older_capability):
    """Code for sm_80 and sm_89 (mma.sync, their shared memory) on this GPU: no wgmma, no TMA."""
    import tilelang

    from mha2mla.kernels.machine import PASS_CONFIGS, target_of
    from mha2mla.kernels.split_kv.combine import SIZES, make_combine

    shape, width = problem.shape(), empty_out(problem, problem.inputs(torch.bfloat16, CUDA)).shape[-1]
    choice = problem.op.select(shape, older_capability)
    assert choice.kernel == ("portable" if isinstance(problem, GQAProblem) else "swap_ab")
    older = PASS_CONFIGS | {"tl.disable_wgmma": True, "tl.disable_tma_lower": True}
    made = problem.op.make_split(shape, choice), make_combine(shape.heads, width, shape.dtype, max(SIZES))
    split, merge = (
        tilelang.compile(function, target=target_of(capability(CUDA)), pass_configs=older) for function in made
    )
    assert "wgmma" not in split.get_kernel_source()
    for case in (problem, replace(problem, window=33, sinks=5)):
        inputs = poison_unseen_pages(case, case.inputs(torch.bfloat16, CUDA))
        work = random_work([span.tiles for span in case.spans()], 7, random.Random(0))
        for num_ctas, plan in ((1, None), (3, None), (40, None), (7, work)):
            assert_right(inputs, *run_kernels(case, split, merge, inputs, num_ctas, plan), **case.visibility)


def test_an_mla_plan_serves_a_gqa_call():
    """A plan says which CTA reads which tokens, not of which kernel."""
    inputs = GQA[0].inputs(torch.bfloat16, CUDA)
    keys, table, lengths = inputs["k_cache"][:, :, :1], inputs["block_table"], inputs["cache_seqlens"]
    plan = plan_mla_decode(inputs["q"], keys, table, lengths, qk_rope_head_dim=64)
    assert_right(inputs, *decode(GQA[0], inputs, plan=plan, return_lse=True, backend="tilelang"))


@pytest.mark.parametrize("first_position", [0, 131101])  # an angle in float32 is exact at a power of two
@pytest.mark.parametrize("problem", LATENT[:2], ids=name)
def test_keys_far_out_are_the_definitions(problem, first_position):
    """One token each, so the log-sum-exp is a score: that of the key that torch makes and rounds.

    A key that is off by e before it is rounded falls on the other side of a step u with the probability e / u, and is
    then off by u: a mean square of e u, summed over the squares of the query's numbers. e is 1e-5 here: float32 sums of
    512 products, and 1e-6 of a turn. (Noise of 3e-6 reaches 0.3 of the limit; float32 angles are seven times beyond.)
    """
    far = replace(problem, lengths=(1,) * 256, page_size=64, first_position=first_position, shuffled=False)
    inputs = far.inputs(torch.bfloat16, CUDA)
    inputs["q_latent"].zero_()
    _, lse = decode(far, inputs, return_lse=True, backend="tilelang")
    rows = inputs["latent_cache"][inputs["block_table"][:, 0].long(), 0]
    keys = rotary_keys(rows, inputs["rope"], torch.full((256,), first_position, device=CUDA))
    keys, queries = keys.double()[:, None], inputs["q_pe"][:, 0].double() * far.softmax_scale
    off = lse[..., 0].double() - (queries * keys).sum(-1)
    step = torch.finfo(torch.bfloat16).eps * torch.exp2(torch.floor(torch.log2(keys.abs())))
    turned_over = (queries.square() * step * 1e-5).sum(-1).mean()
    summed = (64 * torch.finfo(torch.float32).eps * (queries * keys).abs().sum(-1)).square().mean()
    assert off.square().mean() <= 4 * turned_over + summed


def test_a_sequence_that_reaches_position_131072():
    check(LatentProblem(*WIDE, (131136, 70), window=300, sinks=4))
    check(LatentProblem(*WS, (131136,)))


def test_a_latent_page_that_is_missing_counts_as_zeros():
    problem = LatentProblem(*WS, (70, 200))
    holes, zeros = with_holes(problem.inputs(torch.bfloat16, CUDA), {(1, 1): -1})
    assert_right(zeros, *decode(problem, holes, return_lse=True, backend="tilelang"))


def on_hopper(problem: PagedProblem, dtype: str) -> str | None:
    return problem.op.explain(problem.shape(dtype), "cuda:0")


# One call each of many geometries, and many of one.
DRAWN = draw_cases(28, 1, calls=1, longest=900, explain=on_hopper)
DRAWN += draw_cases(1, 2, calls=24, longest=900, explain=on_hopper)


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: f"{name(case.problem)}-{case.call}")
def test_random_geometries_and_calls(case):
    """Any H, G, d_c, d_r, page and S_q of the contract; random batch, lengths, starts, window and table width."""
    check(case.problem, getattr(torch, case.dtype), planned=bool((case.group + case.call) % 4))
