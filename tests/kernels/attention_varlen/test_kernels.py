"""The prefill kernels without a GPU: their tilings, the portable body on the CPU target, and the compile gate."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from mha2mla.kernels.attention_varlen.tiling import (
    ROWS,
    VarlenShape,
    chunks,
    hopper_tiling,
    padded,
    portable_tiling,
    shared_bytes,
)
from mha2mla.testing.compile_gate import compile_only, find_tool
from mha2mla.testing.prefill_problems import PrefillProblem, judge
from tests.few import few
from tests.kernels.attention_varlen.problems import SMALL, name_of


@pytest.mark.parametrize(
    ("shape", "tokens", "batch", "expected"),
    [
        (VarlenShape(32, (128,), (32,), 32, 128, True, "bfloat16"), 8192, 1, 4),  # 4.2 MB a head
        (VarlenShape(32, (128, 64), (32, 1), 32, 128, True, "bfloat16"), 8192, 1, 4),  # k_pe counts once, for all
        (VarlenShape(32, (192,), (32,), 32, 128, True, "bfloat16"), 8192, 1, 3),
        (VarlenShape(32, (128,), (8,), 8, 128, True, "bfloat16"), 8192, 1, 16),  # four groups of four
        (VarlenShape(32, (128,), (8,), 8, 128, True, "bfloat16"), 10**6, 1, 4),  # never less than a group
        (VarlenShape(32, (128,), (32,), 32, 128, True, "bfloat16"), 8192, 4, 16),
        (VarlenShape(1, (8,), (1,), 1, 8, True, "bfloat16"), 1, 3, 2**19),
    ],
)
def test_heads_at_a_time_share_the_l2_cache(shape, tokens, batch, expected):
    launch = pytest.importorskip(
        "mha2mla.kernels.attention_varlen.warp_specialised", reason="TileLang is not installed"
    )
    k = torch.empty(tokens, shape.key_heads[0], shape.widths[0], dtype=torch.bfloat16, device="meta")
    assert launch.heads_at_a_time(shape, k, batch) == expected


def test_tilings_as_measured():
    """What was fastest on an H200 (docs/notes/prefill.md) is what the rule chooses."""
    chosen = {
        (width, d_v, causal): hopper_tiling(VarlenShape(32, (width,), (32,), 32, d_v, causal, "bfloat16"))
        for width, d_v in ((64, 64), (128, 128), (192, 128))
        for causal in (True, False)
    }
    assert {key: (tiling.warpgroups, tiling.block_keys) for key, tiling in chosen.items()} == {
        (64, 64, True): (3, 128),
        (64, 64, False): (3, 128),
        (128, 128, True): (2, 128),
        (128, 128, False): (2, 176),
        (192, 128, True): (2, 128),
        (192, 128, False): (2, 128),
    }


def test_chunks_cover_every_width():
    for width in range(8, 257, 8):
        pieces = chunks(width)
        assert [left for left, _ in pieces] == [sum(c for _, c in pieces[:i]) for i in range(len(pieces))]
        assert width <= padded(width) < width + 16
        assert all(columns % 64 == 0 or columns in (16, 32) for _, columns in pieces)


@pytest.mark.parametrize("width", [8, 64, 80, 128, 192, 256])
def test_every_width_has_a_tiling_that_fits(width):
    for d_v in range(8, 257, 8):
        shape = VarlenShape(8, (width,), (8,), 8, d_v, True, "bfloat16")
        tiling = hopper_tiling(shape)
        assert tiling.block_keys % 16 == 0
        assert shared_bytes(shape, tiling) <= 232448
        rows, keys = portable_tiling(shape)
        assert 2 * (rows * padded(width) + keys * (padded(width) + padded(d_v))) <= 101376


@cache
def compiled_for_cpu(shape: VarlenShape, rows: int, keys: int):
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.attention_varlen.tiled import make_tiled

    function = make_tiled(shape, block_rows=rows, block_keys=keys, on_cpu=True)
    configs = {"tirx.disable_vectorize": True}
    return tilelang.compile(function, target="c", target_host="c", execution_backend="cython", pass_configs=configs)


def run_on_cpu(problem: PrefillProblem, rows: int = 16, keys: int = 16, section: int = 3) -> torch.Tensor:
    inputs = problem.inputs(torch.float32)
    kernel = compiled_for_cpu(problem.shape("float32"), rows, keys)
    queries, parts = ((inputs[name] * 2)[:2] for name in ("queries", "keys"))
    tokens = queries[0].shape[0]
    out = torch.full((tokens, problem.heads, problem.v_head_dim), torch.nan)
    lse = torch.full((problem.heads, tokens), torch.nan)
    operands = [x.contiguous() for x in (*queries, *parts, inputs["v"])]
    kernel(
        *operands, inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], out, lse, problem.softmax_scale,
        -(-problem.longest // rows), section, problem.window or 0, problem.sinks,
    )  # fmt: skip
    judgement = judge(problem, inputs, out, lse)
    assert judgement.ok, judgement.reason
    assert out[sum(queries for queries, _ in problem.lengths) :].isnan().all(), "rows behind the last sequence"
    return out


class TestOnCPU:
    @pytest.mark.parametrize("problem", SMALL, ids=name_of)
    def test_no_shape_reads_poison_or_drops_heads(self, problem):
        run_on_cpu(problem)

    @pytest.mark.parametrize("section", [1, 2, 5, 1000])
    def test_any_order_of_heads(self, section):
        run_on_cpu(SMALL[0], section=section)

    def test_other_tiles(self):
        run_on_cpu(SMALL[1], rows=32, keys=48)

    def test_tiles_outside_window_and_sinks_are_not_read(self):
        """One compilation for all windows. NaN in tiles that no row sees stays there."""
        problem = PrefillProblem(2, (16,), (1,), 8, ((20, 150), (33, 90)), behind=0)
        for window, sinks in ((1, 0), (1, 1), (15, 17), (16, 0), (17, 16), (40, 4), (200, 0), (3, 200)):
            mine = dataclasses.replace(problem, window=window, sinks=sinks)
            run_on_cpu(mine)
        mine = dataclasses.replace(problem, window=9, sinks=4)
        clean, inputs = run_on_cpu(mine), mine.inputs(torch.float32)
        q, k, v, out = inputs["queries"][0], inputs["keys"][0], inputs["v"], torch.zeros(53, 2, 8)
        k[16:112] = v[16:112] = torch.nan  # the first row of the first sequence sees keys from 122 on
        compiled_for_cpu(mine.shape("float32"), 16, 16)(
            q, q, k, k, v, inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], out, torch.zeros(2, 53), 0.09, 3, 3, 9, 4
        )
        assert torch.equal(out[:20], clean[:20])

    @pytest.mark.parametrize("causal", [True, False])
    def test_large_scores_are_not_taken_for_masked_ones(self, causal):
        run_on_cpu(PrefillProblem(2, (16,), (1,), 8, ((40, 70), (33, 17)), causal=causal, scale=4e5))

    def test_nan_of_another_sequence(self):
        """A sequence full of NaN leaves its neighbours alone."""
        problem = PrefillProblem(2, (16,), (1,), 8, ((20, 20), (17, 23), (9, 30)), causal=False)
        clean = run_on_cpu(problem)
        inputs = problem.inputs(torch.float32)
        for x in (*inputs["queries"], *inputs["keys"], inputs["v"]):
            x[20 : 37 if x is inputs["queries"][0] else 43] = torch.nan
        out, lse = torch.empty_like(clean), torch.empty(2, clean.shape[0])
        q, k = inputs["queries"][0], inputs["keys"][0]
        compiled_for_cpu(problem.shape("float32"), 16, 16)(
            q, q, k, k, inputs["v"], inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], out, lse, 0.09, 2, 3, 0, 0
        )
        keep = torch.tensor([*range(20), *range(37, 46)])
        assert torch.equal(out[keep], clean[keep])


GATED = [
    VarlenShape(16, (128, 64), (16, 1), 16, 128, True, "bfloat16"),
    VarlenShape(9, (80,), (3,), 3, 80, True, "bfloat16"),
    VarlenShape(32, (128,), (32,), 32, 128, True, "bfloat16"),
    VarlenShape(32, (128,), (8,), 8, 128, False, "float16"),
    VarlenShape(12, (24, 8), (4, 12), 4, 72, False, "float16"),
    VarlenShape(8, (256,), (2,), 2, 256, True, "bfloat16"),
    VarlenShape(9, (48, 16), (3, 3), 3, 64, True, "bfloat16"),
    VarlenShape(8, (256,), (8,), 8, 256, False, "bfloat16"),
    VarlenShape(8, (112, 16), (2, 1), 8, 64, True, "float16"),
    VarlenShape(8, (192,), (8,), 8, 64, True, "bfloat16"),
]
GATED += [dataclasses.replace(shape, windowed=True) for shape in GATED if shape.causal]
GATED.insert(1, GATED.pop(GATED.index(dataclasses.replace(GATED[1], windowed=True))))  # one of each kind runs always


@pytest.mark.skipif(find_tool("nvcc") is None, reason="nvcc is neither on PATH nor installed by pip")
class TestGate:
    @few("shape", GATED, count=2, ids=lambda s: f"{s.widths}-{s.v_head_dim}-{s.causal}-{s.windowed}")
    def test_kernels_fit_a_hopper(self, shape):
        """No spills, no serialised wgmma, memory as computed."""
        pytest.importorskip("tilelang", reason="TileLang is not installed")
        from mha2mla.kernels.attention_varlen.warp_specialised import make_warp_specialised
        from mha2mla.kernels.machine import SMALL_PASS_CONFIGS

        tiling = hopper_tiling(shape)
        (report,) = compile_only(make_warp_specialised(shape, tiling), "sm_90a", SMALL_PASS_CONFIGS)
        assert report.complaints(232448) == []
        assert shared_bytes(shape, tiling) - 4096 <= report.shared_bytes <= shared_bytes(shape, tiling)
        assert report.registers * (tiling.block_rows // ROWS + 1) * 128 <= 65536
        if report.instructions is not None:
            assert report.instructions.get("HGMMA", 0), report.instructions
            assert report.instructions.get("UTMALDG", 0), report.instructions

    @few("shape", [GATED[5], GATED[6]], count=1, ids=lambda s: f"{s.widths}-{s.v_head_dim}")
    def test_before_hopper(self, shape):
        pytest.importorskip("tilelang", reason="TileLang is not installed")
        from mha2mla.kernels.attention_varlen.tiled import make_tiled
        from mha2mla.kernels.machine import SMALL_PASS_CONFIGS

        rows, keys = portable_tiling(shape)
        function = make_tiled(shape, block_rows=rows, block_keys=keys)
        (report,) = compile_only(function, "sm_80", SMALL_PASS_CONFIGS)
        assert report.complaints(101376) == []
