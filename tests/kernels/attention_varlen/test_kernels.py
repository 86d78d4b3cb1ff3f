"""The prefill kernels: tilings, the portable body on the CPU target, the compile gate; on a GPU against float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("tilelang", reason="TileLang is not installed")

from mha2mla.kernels import attention_varlen
from mha2mla.kernels.attention_varlen.tiled import VarlenShape, make_tiled, portable_tiling
from mha2mla.kernels.attention_varlen.warp_specialised import (
    ROWS,
    chunks,
    compile_attention_varlen,
    heads_at_a_time,
    hopper_tiling,
    make_warp_specialised,
    padded,
    shared_bytes,
)
from mha2mla.kernels.machine import SMALL_PASS_CONFIGS, compile_for
from mha2mla.kernels.ops import capability
from mha2mla.testing.prefill_problems import PrefillProblem
from tests.few import few
from tests.gpu import graph_of
from tests.kernels.attention_varlen.problems import MIXED, SMALL, assert_right, call, check, launch, name_of
from tests.kernels.compiled import for_cpu, gate

SHAPE = VarlenShape(32, (128,), (32,), 32, 128, True, "bfloat16")


@pytest.mark.parametrize(
    ("shape", "tokens", "batch", "expected"),
    [
        (SHAPE, 8192, 1, 4),  # 4.2 MB a head
        (replace(SHAPE, widths=(128, 64), key_heads=(32, 1)), 8192, 1, 4),  # k_pe counts once, for all
        (replace(SHAPE, widths=(192,)), 8192, 1, 3),
        (replace(SHAPE, key_heads=(8,), value_heads=8), 8192, 1, 16),  # four groups of four
        (replace(SHAPE, key_heads=(8,), value_heads=8), 10**6, 1, 4),  # never less than a group
        (SHAPE, 8192, 4, 16),
        (VarlenShape(1, (8,), (1,), 1, 8, True, "bfloat16"), 1, 3, 3),  # never more than there are
    ],
)
def test_heads_at_a_time_share_the_l2_cache(shape, tokens, batch, expected):
    k = torch.empty(tokens, shape.key_heads[0], shape.widths[0], dtype=torch.bfloat16, device="meta")
    assert heads_at_a_time(shape, k, batch) == expected


@pytest.mark.parametrize(
    ("width", "d_v", "causal", "expected"),
    [(64, 64, True, (3, 128)), (64, 64, False, (3, 128)), (128, 128, True, (2, 128)), (128, 128, False, (2, 176))]
    + [(192, 128, True, (2, 128)), (192, 128, False, (2, 128))],
)
def test_hopper_tiling_as_measured(width, d_v, causal, expected):
    """The tiling that was fastest on an H200 (docs/notes/prefill.md)."""
    assert hopper_tiling(replace(SHAPE, widths=(width,), v_head_dim=d_v, causal=causal)) == expected


def test_chunks_cover_every_width():
    for width in range(8, 257, 8):
        pieces = chunks(width)
        assert [left for left, _ in pieces] == [sum(c for _, c in pieces[:i]) for i in range(len(pieces))]
        assert width <= padded(width) < width + 16
        assert all(columns % 64 == 0 or columns in (16, 32) for _, columns in pieces)


@pytest.mark.parametrize("width", [8, 64, 80, 128, 192, 256])
def test_every_width_has_a_tiling_that_fits(width):
    for d_v in range(8, 257, 8):
        shape = replace(SHAPE, widths=(width,), v_head_dim=d_v)
        assert hopper_tiling(shape).block_keys % 16 == 0
        assert shared_bytes(shape, hopper_tiling(shape)) <= 232448
        rows, keys = portable_tiling(shape)
        assert 2 * (rows * padded(width) + keys * (padded(width) + padded(d_v))) <= 101376


@cache
def compiled_for_cpu(shape: VarlenShape, rows: int, keys: int):
    return for_cpu(make_tiled(shape, block_rows=rows, block_keys=keys, on_cpu=True))


def run_on_cpu(problem, rows=16, keys=16, section=3, inputs=None, judged=True) -> torch.Tensor:
    inputs = inputs or problem.inputs(torch.float32)
    names = ("queries", "keys")  # the C target takes dense tensors
    dense = inputs | {name: [x.contiguous() for x in inputs[name]] for name in names} | {"v": inputs["v"].contiguous()}
    out, lse = launch(compiled_for_cpu(problem.shape("float32"), rows, keys), problem, dense, rows, section)
    if judged:
        assert_right(problem, inputs, out, lse)
        assert out[sum(q for q, _ in problem.lengths) :].isnan().all(), "rows behind the last sequence are written"
    return out


class TestOnCPU:
    @pytest.mark.parametrize("problem", SMALL, ids=name_of)
    def test_every_shape_is_right_over_poison(self, problem):
        run_on_cpu(problem)

    @pytest.mark.parametrize("section", [1, 2, 5, 1000])
    def test_any_order_of_heads(self, section):
        run_on_cpu(SMALL[0], section=section)

    def test_other_tiles(self):
        run_on_cpu(SMALL[1], rows=32, keys=48)

    def test_unseen_tiles_are_not_read(self):
        """One compilation for all windows. NaN in tiles that no row sees stays there."""
        problem = PrefillProblem(2, (16,), (1,), 8, ((20, 150), (33, 90)), behind=0)
        for window, sinks in ((1, 0), (1, 1), (15, 17), (16, 0), (17, 16), (40, 4), (200, 0), (3, 200)):
            run_on_cpu(replace(problem, window=window, sinks=sinks))
        windowed = replace(problem, window=9, sinks=4)
        clean, inputs = run_on_cpu(windowed), windowed.inputs(torch.float32)
        # The first row of the first sequence sees keys from 122 on.
        inputs["keys"][0][16:112] = inputs["v"][16:112] = torch.nan
        assert torch.equal(run_on_cpu(windowed, inputs=inputs, judged=False)[:20], clean[:20])

    @pytest.mark.parametrize("causal", [True, False])
    def test_large_scores_are_not_masked(self, causal):
        run_on_cpu(PrefillProblem(2, (16,), (1,), 8, ((40, 70), (33, 17)), causal=causal, scale=4e5))

    def test_nan_stays_in_its_sequence(self):
        problem = PrefillProblem(2, (16,), (1,), 8, ((20, 20), (17, 23), (9, 30)), causal=False)
        clean, inputs = run_on_cpu(problem), problem.inputs(torch.float32)
        inputs["queries"][0][20:37] = inputs["keys"][0][20:43] = inputs["v"][20:43] = torch.nan
        out = run_on_cpu(problem, inputs=inputs, judged=False)
        assert torch.equal(out[:20], clean[:20]) and torch.equal(out[37:46], clean[37:46])


GATED = [
    VarlenShape(16, (128, 64), (16, 1), 16, 128, True, "bfloat16"),
    VarlenShape(9, (80,), (3,), 3, 80, True, "bfloat16"),
    SHAPE,
    VarlenShape(32, (128,), (8,), 8, 128, False, "float16"),
    VarlenShape(12, (24, 8), (4, 12), 4, 72, False, "float16"),
    VarlenShape(8, (256,), (2,), 2, 256, True, "bfloat16"),
    VarlenShape(9, (48, 16), (3, 3), 3, 64, True, "bfloat16"),
    VarlenShape(8, (256,), (8,), 8, 256, False, "bfloat16"),
    VarlenShape(8, (112, 16), (2, 1), 8, 64, True, "float16"),
    VarlenShape(8, (192,), (8,), 8, 64, True, "bfloat16"),
]
GATED += [replace(shape, windowed=True) for shape in GATED if shape.causal]
GATED.insert(1, GATED.pop(GATED.index(replace(GATED[1], windowed=True))))  # one of each kind runs always


@few("shape", GATED, count=2, ids=lambda s: f"{s.widths}-{s.v_head_dim}-{s.causal}-{s.windowed}")
def test_kernels_fit_a_hopper(shape):
    """Shared memory as computed, registers for all warpgroups, TMA and wgmma."""
    tiling = hopper_tiling(shape)
    report = gate(make_warp_specialised(shape, tiling), SMALL_PASS_CONFIGS)
    assert shared_bytes(shape, tiling) - 4096 <= report.shared_bytes <= shared_bytes(shape, tiling)
    assert report.registers * (tiling.block_rows // ROWS + 1) * 128 <= 65536
    assert report.instructions is None or {"HGMMA", "UTMALDG"} <= set(report.instructions), report.instructions


@few("shape", [GATED[5], GATED[6]], count=1, ids=lambda s: f"{s.widths}-{s.v_head_dim}")
def test_kernels_fit_before_hopper(shape):
    rows, keys = portable_tiling(shape)
    gate(make_tiled(shape, block_rows=rows, block_keys=keys), SMALL_PASS_CONFIGS, 80, 101376)


LONG = (*MIXED, (700, 700), (300, 1000), (257, 129), (1, 900), (128, 128), (384, 256))
ON_GPU = [
    PrefillProblem(32, (128,), (32,), 128, LONG),
    PrefillProblem(32, (128,), (8,), 128, LONG, causal=False, combined=True),
    PrefillProblem(16, (128, 64), (16, 1), 128, LONG),
    PrefillProblem(16, (128, 64), (16, 1), 128, LONG, causal=False, combined=True),
    PrefillProblem(9, (80,), (3,), 80, LONG),
    PrefillProblem(9, (64, 16), (9, 9), 64, LONG),
    PrefillProblem(8, (64, 16), (2, 4), 64, LONG, value_heads=8, combined=True),
    PrefillProblem(12, (96,), (4,), 72, LONG, causal=False),
    PrefillProblem(8, (256,), (2,), 256, LONG),
    PrefillProblem(3, (192,), (1,), 128, LONG),
    PrefillProblem(1, (8,), (1,), 8, LONG),
    PrefillProblem(6, (40,), (6,), 200, LONG, causal=False),
    PrefillProblem(32, (128,), (8,), 128, LONG, window=200, sinks=4),
    PrefillProblem(16, (128, 64), (16, 1), 128, LONG, window=64, sinks=0, combined=True),
    PrefillProblem(9, (64, 16), (9, 9), 64, LONG, window=33, sinks=150),
    PrefillProblem(8, (256,), (2,), 256, LONG, window=300, sinks=1),
]


def check_gpu(problem, dtype=torch.bfloat16, **further) -> torch.Tensor:
    return check(problem, dtype, "cuda", backend="tilelang", **further)


@pytest.mark.gpu
@pytest.mark.timeout(300)
class TestOnGPU:
    @pytest.mark.parametrize("problem", ON_GPU, ids=name_of)
    def test_every_shape_is_right_over_poison(self, problem):
        """Lengths around every boundary, NaN behind the tensors' last sequence, bit-equal when run again."""
        out, inputs = check_gpu(problem), problem.inputs(torch.bfloat16, "cuda")
        tokens = sum(queries for queries, _ in problem.lengths)
        for _ in range(5):
            assert torch.equal(out[:tokens], call(problem, inputs, backend="tilelang")[0][:tokens])

    @pytest.mark.parametrize("problem", [ON_GPU[0], ON_GPU[3]], ids=name_of)
    def test_float16(self, problem):
        check_gpu(problem, torch.float16)

    def test_nan_stays_in_its_sequence(self):
        """In the last tile too."""
        problem = PrefillProblem(32, (128,), (8,), 128, ((200, 200), (170, 230), (90, 300)), causal=False)
        clean, inputs = check_gpu(problem), problem.inputs(torch.bfloat16, "cuda")
        inputs["queries"][0][200:370] = inputs["keys"][0][200:430] = inputs["v"][200:430] = torch.nan
        out, _ = call(problem, inputs, backend="tilelang")
        assert torch.equal(out[:200], clean[:200]) and torch.equal(out[370:460], clean[370:460])

    def test_unseen_tiles_are_not_read(self):
        """NaN there stays there; windows of all lengths share a compilation."""
        problem = PrefillProblem(32, (128,), (8,), 128, ((130, 3000), (70, 900)), window=500, sinks=4)
        clean, inputs = check_gpu(problem), problem.inputs(torch.bfloat16, "cuda")
        inputs["keys"][0][128:2048] = inputs["v"][128:2048] = torch.nan
        assert torch.equal(call(problem, inputs, backend="tilelang")[0][:130], clean[:130])
        for window, sinks in ((1, 0), (128, 128), (129, 127), (700, 300), (5000, 0), (2, 5000)):
            check_gpu(replace(problem, window=window, sinks=sinks))

    @pytest.mark.parametrize("causal", [True, False])
    def test_large_scores_are_not_masked(self, causal):
        problem = PrefillProblem(32, (128,), (32 if causal else 8,), 128, ((200, 300), (150, 100)), causal=causal)
        check_gpu(replace(problem, scale=1e5))

    def test_one_compilation_serves_all_lengths(self):
        check_gpu(ON_GPU[0])
        before = compile_attention_varlen.cache_info().misses
        for lengths in (((7, 7),), ((100, 3), (0, 5)), ((1, 1),) * 9, ()):
            check_gpu(replace(ON_GPU[0], lengths=lengths))
        assert compile_attention_varlen.cache_info().misses == before

    def test_a_captured_graph_serves_other_lengths(self):
        problem = replace(ON_GPU[0], lengths=((128, 128), (300, 300)), behind=0)
        inputs = problem.inputs(torch.bfloat16, "cuda")
        call(problem, inputs)
        graph, (out, lse) = graph_of(lambda: call(problem, inputs))
        other = replace(problem, lengths=((228, 228), (200, 200)))
        drawn = other.inputs(torch.bfloat16, "cuda")
        for name, tensors in drawn.items():
            for old, new in zip(*(x if isinstance(x, list) else [x] for x in (inputs[name], tensors)), strict=True):
                old.copy_(new)
        graph.replay()
        assert_right(other, drawn, out, lse)

    def test_offsets_do_not_overflow_32_bits(self):
        """Tokens whose elements lie more than 2^31 from the first."""
        problem = PrefillProblem(1, (64,), (1,), 64, ((300, 300),), behind=0)
        inputs = problem.inputs(torch.bfloat16, "cuda")
        wide = torch.empty(300, 8_000_000, dtype=torch.bfloat16, device="cuda")  # 2.4e9 elements
        far = [wide[:, 64 * i : 64 * i + 64][:, None] for i in range(3)]
        for target, source in zip(far, (inputs["queries"][0], inputs["keys"][0], inputs["v"]), strict=True):
            target.copy_(source)
        check_gpu(problem, inputs=inputs | {"queries": [far[0]], "keys": [far[1]], "v": far[2]}, of=inputs)

    @pytest.mark.parametrize("problem", [ON_GPU[i] for i in (2, 4, 11, 12)], ids=name_of)
    def test_portable_kernel(self, problem):
        """The kernel of other GPUs, compiled for this one (whose matrix instructions are others)."""
        here = capability(torch.device("cuda", torch.cuda.current_device()))
        rows, keys = portable_tiling(problem.shape())
        kernel = compile_for(make_tiled(problem.shape(), block_rows=rows, block_keys=keys), here, SMALL_PASS_CONFIGS)
        inputs = problem.inputs(torch.bfloat16, "cuda")
        section = heads_at_a_time(problem.shape(), inputs["keys"][0], 14)
        assert_right(problem, inputs, *launch(kernel, problem, inputs, rows, section))

    def test_unaligned_inputs_are_refused(self):
        x = torch.zeros(5, 4, 20, dtype=torch.bfloat16, device="cuda")[..., 4:]
        bounds = torch.tensor([0, 5], dtype=torch.int32, device="cuda")
        with pytest.raises(ValueError, match=r"q.stride\(1\) is 20; expected a positive multiple of 8"):
            attention_varlen(x, x, x, bounds, bounds, 5, softmax_scale=1.0)
