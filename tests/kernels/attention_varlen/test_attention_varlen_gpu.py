"""The prefill kernels on a GPU against float64: every width, poisoned tiles, graphs, far offsets."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mha2mla.kernels import attention_varlen
from mha2mla.kernels.attention_varlen.tiling import portable_tiling
from mha2mla.testing.prefill_problems import PrefillProblem, judge
from tests.kernels.attention_varlen.problems import MIXED, call, check, name_of

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


@pytest.mark.gpu
@pytest.mark.timeout(300)
class TestOnGPU:
    @pytest.mark.parametrize("problem", ON_GPU, ids=name_of)
    def test_no_shape_reads_poison_or_drops_heads(self, problem):
        """Lengths around every boundary, NaN behind the tensors' last sequence, bit-equal when run again."""
        out = check(problem, device="cuda", backend="tilelang")
        inputs = problem.inputs(torch.bfloat16, "cuda")
        tokens = sum(queries for queries, _ in problem.lengths)
        for _ in range(5):
            assert torch.equal(out[:tokens], call(problem, inputs, backend="tilelang")[0][:tokens])

    @pytest.mark.parametrize("problem", [ON_GPU[0], ON_GPU[3]], ids=name_of)
    def test_float16(self, problem):
        check(problem, torch.float16, "cuda", backend="tilelang")

    def test_nan_of_another_sequence(self):
        """A sequence full of NaN leaves its neighbours alone, in the last tile too."""
        problem = PrefillProblem(32, (128,), (8,), 128, ((200, 200), (170, 230), (90, 300)), causal=False)
        clean = check(problem, device="cuda", backend="tilelang")
        inputs = problem.inputs(torch.bfloat16, "cuda")
        inputs["queries"][0][200:370] = inputs["keys"][0][200:430] = inputs["v"][200:430] = torch.nan
        out, lse = call(problem, inputs, backend="tilelang")
        for rows in (slice(0, 200), slice(370, 460)):
            assert torch.equal(out[rows], clean[rows])
            assert lse[:, rows].isfinite().all()

    def test_tiles_outside_window_and_sinks_are_not_read(self):
        """NaN in tiles that no row sees stays there, and all windows share a compilation."""
        problem = PrefillProblem(32, (128,), (8,), 128, ((130, 3000), (70, 900)), window=500, sinks=4)
        clean = check(problem, device="cuda", backend="tilelang")
        inputs = problem.inputs(torch.bfloat16, "cuda")
        inputs["keys"][0][128:2048] = inputs["v"][128:2048] = torch.nan
        assert torch.equal(call(problem, inputs, backend="tilelang")[0][:130], clean[:130])
        for window, sinks in ((1, 0), (128, 128), (129, 127), (700, 300), (5000, 0), (2, 5000)):
            check(dataclasses.replace(problem, window=window, sinks=sinks), device="cuda", backend="tilelang")

    @pytest.mark.parametrize("causal", [True, False])
    def test_large_scores_are_not_taken_for_masked_ones(self, causal):
        problem = PrefillProblem(32, (128,), (32 if causal else 8,), 128, ((200, 300), (150, 100)), causal=causal)
        check(dataclasses.replace(problem, scale=1e5), device="cuda", backend="tilelang")

    def test_one_compilation_serves_all_lengths(self):
        from mha2mla.kernels.attention_varlen.warp_specialised import compile_attention_varlen

        check(ON_GPU[0], device="cuda", backend="tilelang")
        before = compile_attention_varlen.cache_info().misses
        for lengths in (((7, 7),), ((100, 3), (0, 5)), ((1, 1),) * 9, ()):
            check(dataclasses.replace(ON_GPU[0], lengths=lengths), device="cuda", backend="tilelang")
        assert compile_attention_varlen.cache_info().misses == before

    def test_graph_captured_at_one_batch_serves_others(self):
        problem = dataclasses.replace(ON_GPU[0], lengths=((128, 128), (300, 300)), behind=0)
        inputs = problem.inputs(torch.bfloat16, "cuda")
        call(problem, inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = call(problem, inputs)
        other = dataclasses.replace(problem, lengths=((228, 228), (200, 200)))
        drawn = other.inputs(torch.bfloat16, "cuda")
        for mine, theirs in zip(
            (*inputs["queries"], *inputs["keys"]), (*drawn["queries"], *drawn["keys"]), strict=True
        ):
            mine.copy_(theirs)
        for key in ("v", "cu_seqlens_q", "cu_seqlens_k"):
            inputs[key].copy_(drawn[key])
        graph.replay()
        judgement = judge(other, drawn, out, lse)
        assert judgement.ok, judgement.reason

    def test_offsets_do_not_overflow_32_bits(self):
        """Tokens whose elements lie more than 2^31 from the first."""
        problem = PrefillProblem(1, (64,), (1,), 64, ((300, 300),), behind=0)
        inputs = problem.inputs(torch.bfloat16, "cuda")
        wide = torch.empty(300, 8_000_000, dtype=torch.bfloat16, device="cuda")  # 2.4e9 elements
        far = [wide[:, 64 * i : 64 * i + 64][:, None] for i in range(3)]
        for target, source in zip(far, (inputs["queries"][0], inputs["keys"][0], inputs["v"]), strict=True):
            target.copy_(source)
        strided = inputs | {"queries": [far[0]], "keys": [far[1]], "v": far[2]}
        out, lse = call(problem, strided, backend="tilelang")
        judgement = judge(problem, inputs, out, lse)
        assert judgement.ok, judgement.reason

    def test_portable_kernel(self):
        """What runs on other GPUs, compiled for this one (whose matrix instructions are others)."""
        from mha2mla.kernels.attention_varlen.tiled import make_tiled
        from mha2mla.kernels.attention_varlen.warp_specialised import heads_at_a_time
        from mha2mla.kernels.devices import capability
        from mha2mla.kernels.machine import SMALL_PASS_CONFIGS, compile_for

        here = capability(torch.device("cuda", torch.cuda.current_device()))
        for problem in (ON_GPU[2], ON_GPU[4], ON_GPU[11], ON_GPU[12]):
            rows, keys = portable_tiling(problem.shape())
            function = make_tiled(problem.shape(), block_rows=rows, block_keys=keys)
            kernel = compile_for(function, here, SMALL_PASS_CONFIGS)
            inputs = problem.inputs(torch.bfloat16, "cuda")
            queries, parts = ((inputs[name] * 2)[:2] for name in ("queries", "keys"))
            out = torch.full(
                (queries[0].shape[0], problem.heads, problem.v_head_dim), torch.nan, dtype=torch.bfloat16, device="cuda"
            )
            lse = torch.full((problem.heads, out.shape[0]), torch.nan, device="cuda")
            kernel(
                *queries, *parts, inputs["v"], inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], out, lse,
                problem.softmax_scale, -(-problem.longest // rows), heads_at_a_time(problem.shape(), parts[0], 14),
                problem.window or 0, problem.sinks,
            )  # fmt: skip
            judgement = judge(problem, inputs, out, lse)
            assert judgement.ok, judgement.reason

    def test_unaligned_inputs_are_refused(self):
        x = torch.zeros(5, 4, 20, dtype=torch.bfloat16, device="cuda")[..., 4:]
        bounds = torch.tensor([0, 5], dtype=torch.int32, device="cuda")
        with pytest.raises(ValueError, match=r"q.stride\(1\) is 20; expected a positive multiple of 8"):
            attention_varlen(x, x, x, bounds, bounds, 5, softmax_scale=1.0)
