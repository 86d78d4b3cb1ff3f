"""The varlen attention ops: reference, errors, schema; the portable kernel's body on the CPU target; compile gates; the
kernels on a GPU against float64."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from mha2mla.kernel_testing.compile_gate import compile_only, find_tool
from mha2mla.kernel_testing.prefill_problems import PrefillProblem, judge
from mha2mla.kernels import attention_varlen, mla_prefill_varlen
from mha2mla.kernels.attention_varlen.tiling import (
    ROWS,
    VarlenShape,
    chunks,
    hopper_tiling,
    padded,
    portable_tiling,
    shared_bytes,
)
from tests.few import few

# Every boundary of a tile of 16, 64 and 128, both ways round; sequences without queries, without keys, without either.
MIXED = ((0, 0), (1, 1), (5, 0), (0, 7), (63, 64), (65, 17), (2, 130), (129, 128))
SMALL = [
    PrefillProblem(9, (80,), (3,), 80, MIXED),
    PrefillProblem(4, (64, 16), (4, 1), 64, MIXED),
    PrefillProblem(6, (24, 8), (2, 3), 40, MIXED, value_heads=6, combined=True),
    PrefillProblem(1, (8,), (1,), 8, MIXED, causal=False),
    PrefillProblem(3, (16,), (1,), 72, MIXED, causal=False),
    PrefillProblem(4, (64, 16), (4, 1), 64, MIXED, window=19, sinks=4),
    PrefillProblem(2, (16,), (1,), 24, MIXED, window=1),
    PrefillProblem(2, (16,), (2,), 24, MIXED, window=40, sinks=33),
]
WINDOWED = [problem for problem in SMALL if problem.window is not None]


def name(problem: PrefillProblem) -> str:
    widths, heads = ("+".join(map(str, x)) for x in (problem.widths, problem.key_heads))
    return f"H{problem.heads}-{widths}x{heads}-v{problem.v_head_dim}-{'causal' if problem.causal else 'full'}" + (
        "" if problem.window is None else f"-{problem.sinks}..{problem.window}"
    )


def call(problem: PrefillProblem, inputs: dict, **further):
    """The public op for the problem's parts, with lse."""
    operands = [x for pair in zip(inputs["queries"], strict=True) for x in pair] + inputs["keys"] + [inputs["v"]]
    op = mla_prefill_varlen if len(problem.widths) == 2 else attention_varlen
    further |= {"causal": problem.causal, "window": problem.window, "sinks": problem.sinks}
    further = {"softmax_scale": problem.softmax_scale} | further
    return op(
        *operands, inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], problem.longest, return_lse=True, **further
    )  # fmt: skip


def check(problem: PrefillProblem, dtype=torch.bfloat16, device="cpu", **further) -> torch.Tensor:
    inputs = problem.inputs(dtype, device)
    out, lse = call(problem, inputs, **further)
    judgement = judge(problem, inputs, out, lse)
    assert judgement.ok, judgement.reason
    return out


def naive(problem: PrefillProblem, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """One query, one head at a time, in float64."""
    out = torch.zeros(inputs["queries"][0].shape[0], problem.heads, problem.v_head_dim, dtype=torch.float64)
    lse = torch.full((problem.heads, out.shape[0]), -torch.inf, dtype=torch.float64)
    first_q = first_k = 0
    for queries, keys in problem.lengths:
        for i in range(queries):
            stop = max(0, keys - queries + i + 1) if problem.causal else keys
            first = 0 if problem.window is None else max(0, stop - problem.window)
            seen = [first_k + t for t in range(stop) if t >= first or t < problem.sinks]
            for h in range(problem.heads if seen else 0):
                score = torch.zeros(len(seen), dtype=torch.float64)
                for q, k in zip(inputs["queries"], inputs["keys"], strict=True):
                    key = k[seen, h * k.shape[1] // problem.heads]
                    score += key.double() @ q[first_q + i, h].double()
                score *= problem.softmax_scale
                value = inputs["v"][seen, h * inputs["v"].shape[1] // problem.heads]
                out[first_q + i, h] = torch.softmax(score, 0) @ value.double()
                lse[h, first_q + i] = torch.logsumexp(score, 0)
        first_q, first_k = first_q + queries, first_k + keys
    return out, lse


@pytest.mark.parametrize("problem", SMALL, ids=name)
def test_reference_is_the_formula(problem):
    """Rows behind the last sequence, and rows that see nothing, are 0 and -inf; NaN behind the keys stays there."""
    problem = dataclasses.replace(problem, lengths=((0, 0), (3, 5), (6, 2), (0, 4), (1, 0), (4, 4)))
    inputs = problem.inputs(torch.float64)
    out, lse = call(problem, inputs)
    expected, expected_lse = naive(problem, inputs)
    assert torch.allclose(out, expected, rtol=0, atol=1e-13)
    assert torch.allclose(lse, expected_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_at_other_dtypes(dtype):
    check(SMALL[1], dtype)


def test_parts_equal_their_concatenation():
    problem = PrefillProblem(4, (8, 16), (4, 4), 24, ((5, 9), (3, 3)))
    inputs = problem.inputs(torch.float64)
    whole = dataclasses.replace(problem, widths=(24,), key_heads=(4,))
    joined = inputs | {name: [torch.cat(inputs[name], -1)] for name in ("queries", "keys")}
    for found, expected in zip(call(problem, inputs), call(whole, joined), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def test_no_unrotated_part():
    problem = PrefillProblem(4, (16,), (2,), 24, ((5, 9), (3, 3)))
    inputs = problem.inputs(torch.float64)
    q, k, v = inputs["queries"][0], inputs["keys"][0], inputs["v"]
    bounds = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], problem.longest
    out = mla_prefill_varlen(q[..., :0], q, v[..., :0], k, v, *bounds, softmax_scale=0.09)
    assert torch.equal(out, attention_varlen(q, k, v, *bounds, softmax_scale=0.09))


def test_a_window_as_long_as_the_sequences_is_none():
    problem = dataclasses.replace(SMALL[1], behind=0)
    inputs = problem.inputs(torch.float64)
    for window, sinks in ((130, 0), (1, 130), (2**31 - 1, 0)):
        wide = dataclasses.replace(problem, window=window, sinks=sinks)
        for found, expected in zip(call(wide, inputs), call(problem, inputs), strict=True):
            assert torch.equal(found, expected)


def test_nan_outside_window_and_sinks_reaches_nobody():
    problem = PrefillProblem(2, (16,), (1,), 24, ((4, 40),), window=5, sinks=3, behind=0)
    inputs = problem.inputs(torch.float32)
    clean, clean_lse = call(problem, inputs)
    for x in (*inputs["keys"], inputs["v"]):
        x[3:32] = torch.nan
    out, lse = call(problem, inputs)
    assert torch.equal(out, clean) and torch.equal(lse, clean_lse)


def test_empty_and_single():
    """Sizes of zero and of one."""
    for lengths in ((), ((0, 0),), ((0, 3),), ((3, 0),), ((1, 1),)):
        for behind in (0, 2):
            check(PrefillProblem(1, (8,), (1,), 8, lengths, behind=behind), torch.float32)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("causal", [True, False])
def test_nan_does_not_cross_requests(causal, bad):
    """One sequence's values, keys or queries, or what lies behind the last one, must not reach the others."""
    q, k, v = (torch.randn(14, heads, width) for heads, width in ((4, 16), (2, 16), (2, 24)))
    bounds = torch.tensor([0, 5, 9, 12], dtype=torch.int32)
    clean, clean_lse = attention_varlen(q, k, v, bounds, bounds, 5, softmax_scale=0.3, causal=causal, return_lse=True)
    for name in "qkv":
        given = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        given[name][6:7] = bad
        given[name][12:] = bad
        out, lse = attention_varlen(
            **given, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=5, softmax_scale=0.3, causal=causal,
            return_lse=True,
        )  # fmt: skip
        others = [*range(5), *range(9, 12)] + ([5] if causal or name == "q" else [])
        torch.testing.assert_close(out[others], clean[others])
        torch.testing.assert_close(lse[:, others], clean_lse[:, others])
        assert not out[6].isfinite().all(), "the token that holds it sees it"


def test_infinite_values_are_what_the_sum_says():
    """As torch adds them up: an infinity wins, two of different signs are NaN, and only where they are seen."""
    q, k = torch.zeros(3, 1, 8), torch.zeros(3, 1, 8)
    v = torch.tensor([[1.0, torch.inf, 2.0], [torch.inf, -torch.inf, 3.0], [0.0, 1.0, torch.nan]])[:, None]
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    out = attention_varlen(q, k, v, bounds, bounds, 3, softmax_scale=1.0)[:, 0]
    expected = [[1.0, torch.inf, 2.0], [torch.inf, torch.nan, 2.5], [torch.inf, torch.nan, torch.nan]]
    torch.testing.assert_close(out, torch.tensor(expected), equal_nan=True)


def test_out_is_written():
    problem = SMALL[0]
    inputs = problem.inputs(torch.float32)
    out = torch.full((inputs["queries"][0].shape[0], 9, 80), torch.nan)
    found, _ = call(problem, inputs, out=out)
    assert found is out
    assert torch.equal(out, call(problem, inputs)[0])


def arguments(**changes):
    given = {
        "q": torch.zeros(5, 4, 16),
        "k": torch.zeros(7, 2, 16),
        "v": torch.zeros(7, 2, 24),
        "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 3, 7], dtype=torch.int32),
        "max_seqlen_q": 3,
        "softmax_scale": 0.1,
    }
    return given | changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "triton"}, "backend is 'triton'"),
        ({"backend": "tilelang"}, "backend is 'tilelang'.*CUDA"),
        ({"q": torch.zeros(5, 64)}, r"q.shape is \(5, 64\); expected \[T_q, H, d_qk\]"),
        ({"q": torch.zeros(5, 4, 16, dtype=torch.int32)}, "q.dtype is torch.int32"),
        ({"k": torch.zeros(7, 2, 16).half()}, "k.dtype is torch.float16; expected torch.float32, as q"),
        ({"k": torch.zeros(7, 3, 16)}, r"k.shape is \(7, 3, 16\); expected \[7, a divisor of 4, 16\]"),
        ({"k": torch.zeros(7, 2, 8)}, r"k.shape is \(7, 2, 8\); expected \[7, 2, 16\]"),
        ({"v": torch.zeros(6, 2, 24)}, r"v.shape is \(6, 2, 24\); expected \[7"),
        ({"v": torch.zeros(7, 2, 0)}, r"v.shape is \(7, 2, 0\); expected a width of at least 1"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 5])}, "cu_seqlens_q.dtype is torch.int64; expected torch.int32"),
        ({"cu_seqlens_k": torch.tensor([0, 7], dtype=torch.int32)}, r"cu_seqlens_k.shape is \(2,\); expected \[3\]"),
        ({"max_seqlen_q": -1}, "max_seqlen_q is -1"),
        ({"softmax_scale": 0.0}, "softmax_scale is 0.0; expected a positive finite number"),
        ({"softmax_scale": float("nan")}, "softmax_scale is nan"),
        ({"window": 0}, "window is 0; expected None or at least 1"),
        ({"sinks": 3}, "sinks is 3 with window=None"),
        ({"window": 4, "causal": False}, "causal is False with window=4; expected True"),
        ({"out": torch.zeros(5, 4, 16)}, r"out.shape is \(5, 4, 16\); expected \[5, 4, 24\]"),
        ({"out": torch.zeros(4, 5, 24).transpose(0, 1)}, r"out.stride\(1\) is 120; expected 24"),
    ],
)
def test_refusals_name_the_argument(change, message):
    with pytest.raises(ValueError, match=message):
        attention_varlen(**arguments(**change))


def test_refusals_of_two_parts():
    q, k, v = torch.zeros(3, 4, 16), torch.zeros(3, 2, 16), torch.zeros(3, 2, 8)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"k_pe.shape is \(3, 3, 16\); expected \[3, a divisor of 4"):
        mla_prefill_varlen(q, q, k, torch.zeros(3, 3, 16), v, bounds, bounds, 3, softmax_scale=1.0)
    with pytest.raises(ValueError, match=r"q_pe.shape is \(2, 4, 16\)"):
        mla_prefill_varlen(q, q[:2], k, k, v, bounds, bounds, 3, softmax_scale=1.0)
    with pytest.raises(ValueError, match=r"k_nope.shape is \(3, 2, 16\); expected \[T_k, h_kv, 0\]"):
        mla_prefill_varlen(q[..., :0], q, k, k, v, bounds, bounds, 3, softmax_scale=1.0)


@pytest.mark.parametrize("parts", [1, 2])
def test_schema_and_fake_do_not_drift(parts):
    problem = dataclasses.replace(SMALL[parts - 1], lengths=((2, 3), (4, 4)))
    inputs = problem.inputs(torch.float32)
    operands = [x for pair in zip((*inputs["queries"], None), (*inputs["keys"], None), strict=True) for x in pair]
    operands = (
        operands[0], operands[2], operands[1], operands[3], inputs["v"], inputs["cu_seqlens_q"],
        inputs["cu_seqlens_k"], 4, 0.1, True, 2, 1, False,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.mha2mla.attention_varlen.default, operands)
    out = torch.empty(11, problem.heads, problem.v_head_dim)
    torch.library.opcheck(torch.ops.mha2mla.attention_varlen_out.default, (*operands, out))


def test_it_breaks_no_compiled_graph():
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="eager")
    given = arguments(q=torch.randn(5, 4, 16), k=torch.randn(7, 2, 16), v=torch.randn(7, 2, 24))
    assert torch.equal(compiled(**given), attention_varlen(**given))


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
    launch = pytest.importorskip("mha2mla.kernels.attention_varlen.launch", reason="TileLang is not installed")
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


# --- the portable kernel's body on the CPU -----------------------------------------------------------------------


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
    @pytest.mark.parametrize("problem", SMALL, ids=name)
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


# --- compiled for GPUs that are not here --------------------------------------------------------------------------

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
        from mha2mla.kernels.compilation import SMALL_PASS_CONFIGS

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
        from mha2mla.kernels.compilation import SMALL_PASS_CONFIGS

        rows, keys = portable_tiling(shape)
        function = make_tiled(shape, block_rows=rows, block_keys=keys)
        (report,) = compile_only(function, "sm_80", SMALL_PASS_CONFIGS)
        assert report.complaints(101376) == []


# --- on a GPU ------------------------------------------------------------------------------------------------------

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
    @pytest.mark.parametrize("problem", ON_GPU, ids=name)
    def test_no_shape_reads_poison_or_drops_heads(self, problem):
        """Lengths around every boundary, NaN behind the tensors' last sequence, bit-equal when run again."""
        out = check(problem, device="cuda", backend="tilelang")
        inputs = problem.inputs(torch.bfloat16, "cuda")
        tokens = sum(queries for queries, _ in problem.lengths)
        for _ in range(5):
            assert torch.equal(out[:tokens], call(problem, inputs, backend="tilelang")[0][:tokens])

    @pytest.mark.parametrize("problem", [ON_GPU[0], ON_GPU[3]], ids=name)
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
        from mha2mla.kernels.attention_varlen.launch import compile_attention_varlen

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
        from mha2mla.kernels.attention_varlen.launch import heads_at_a_time
        from mha2mla.kernels.attention_varlen.tiled import make_tiled
        from mha2mla.kernels.compilation import SMALL_PASS_CONFIGS, compile_for
        from mha2mla.kernels.devices import capability

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
