"""The varlen attention ops on any machine: the reference is the formula, errors name the argument, the schema holds."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mha2mla.kernels import attention_varlen, mla_prefill_varlen
from mha2mla.testing.prefill_problems import PrefillProblem, sequences
from tests.kernels.attention_varlen.problems import SMALL, call, check, name_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("problem", SMALL, ids=name_of)
def test_reference_is_the_formula(problem, dtype):
    """Rows behind the last sequence, and rows that see nothing, are 0 and -inf; NaN behind the keys stays there."""
    problem = dataclasses.replace(problem, lengths=((0, 0), (3, 5), (6, 2), (0, 4), (1, 0), (4, 4)))
    inputs = problem.inputs(dtype)
    out, lse = call(problem, inputs)
    assert torch.equal(check(problem, dtype), out)
    assert not out[14:].any() and (lse[:, 14:] == -torch.inf).all()
    if dtype == torch.float64:
        alone = [(sequence.attend(), sequence.lse()) for sequence in sequences(problem, inputs)]
        torch.testing.assert_close(out[:14], torch.cat([one for one, _ in alone]), rtol=0, atol=1e-13)
        torch.testing.assert_close(lse[:, :14], torch.cat([one for _, one in alone], 1), rtol=0, atol=1e-12)


def test_no_unrotated_part():
    problem = PrefillProblem(4, (16,), (2,), 24, ((5, 9), (3, 3)))
    inputs = problem.inputs(torch.float64)
    q, k, v = inputs["queries"][0], inputs["keys"][0], inputs["v"]
    bounds = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], problem.longest
    out = mla_prefill_varlen(q[..., :0], q, v[..., :0], k, v, *bounds, softmax_scale=0.09)
    assert torch.equal(out, attention_varlen(q, k, v, *bounds, softmax_scale=0.09))


def test_a_window_of_all_keys_is_none():
    problem = dataclasses.replace(SMALL[1], behind=0)
    inputs = problem.inputs(torch.float64)
    for window, sinks in ((130, 0), (1, 130), (2**31 - 1, 0)):
        wide = dataclasses.replace(problem, window=window, sinks=sinks)
        for found, expected in zip(call(wide, inputs), call(problem, inputs), strict=True):
            assert torch.equal(found, expected)


def test_nan_outside_window_and_sinks_is_not_used():
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


def test_infinite_values_add_up_as_in_torch():
    """Sums are torch's: an infinity wins, two of different signs are NaN, and only where they are seen."""
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


def bounds(of: str, *numbers: int) -> dict[str, torch.Tensor]:
    return {f"cu_seqlens_{of}": torch.tensor(numbers, dtype=torch.int32)}


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
        ({"max_seqlen_q": 2}, "max_seqlen_q is 2; expected at least 3, queries of the longest sequence"),
        (bounds("q", 0, 2, 6), r"cu_seqlens_q\[2\] is 6; expected a number from 2 to 5"),
        (bounds("q", 0, 6, 5), r"cu_seqlens_q\[1\] is 6; expected a number from 0 to 5"),
        (bounds("k", 0, 4, 3), r"cu_seqlens_k\[2\] is 3; expected a number from 4 to 7"),
        (bounds("k", -1, 3, 7), r"cu_seqlens_k\[0\] is -1; expected a number from 0 to 7"),
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


def test_compiles_into_one_graph():
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="eager")
    given = arguments(q=torch.randn(5, 4, 16), k=torch.randn(7, 2, 16), v=torch.randn(7, 2, 24))
    assert torch.equal(compiled(**given), attention_varlen(**given))
