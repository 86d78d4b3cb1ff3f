"""The combine op: the formula, any order and number of parts, poison behind -inf; the kernel on CPU target and GPU."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from mha2mla.kernels import attention_combine, mla_decode
from mha2mla.kernels.attention_combine import attention_combine_reference
from mha2mla.testing.numeric_check import errors
from mha2mla.testing.problems import Problem
from tests.few import few
from tests.kernels.compiled import for_cpu, gate

SPLITS = (1, 2, 3, 5, 17, 97, 160)
SHAPES = [(3, 1, 4, 64), (2, 2, 9, 80), (1, 3, 2, 200), (2, 1, 3, 512), (1, 1, 2, 576)]  # B, S_q, H, d_v


def parts(splits, shape, dtype=torch.float64, *, seed=0, device="cpu"):
    """Random parts; a third of them saw no key, and their outputs are NaN."""
    batch, seqlen_q, heads, _ = shape
    make = torch.Generator().manual_seed(seed)
    out = torch.randn(splits, *shape, generator=make, dtype=torch.float64)
    lse = 8 * torch.randn(splits, batch, heads, seqlen_q, generator=make, dtype=torch.float64)
    empty = torch.rand(lse.shape, generator=make) < 1 / 3
    lse[empty] = -torch.inf
    out[empty.transpose(2, 3)] = torch.nan
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return out.to(device, dtype), lse.to(device, wide)


def assert_right(found, given, num_splits=None):
    """Errors against float64 on the same rounded parts: at most twice those of torch at float32, plus the rounding of
    the output."""
    out, lse = (tensor.cpu() for tensor in found)
    wide = [tensor.double().cpu() for tensor in given]
    num_splits = None if num_splits is None else num_splits.cpu()
    expected, expected_lse = attention_combine_reference(*wide, num_splits)
    narrow = attention_combine_reference(*(tensor.float() for tensor in wide), num_splits, dtype=out.dtype)
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf) and not out.isnan().any()
    assert errors(out, expected)[0] <= 2 * errors(narrow[0], expected)[0] + torch.finfo(torch.float32).eps
    seen = expected_lse != -torch.inf
    difference = (lse.double() - expected_lse)[seen].abs()
    assert difference.numel() == 0 or difference.max() <= 4 * torch.finfo(torch.float32).eps * 40


@pytest.mark.parametrize("splits", SPLITS)
def test_parts_of_a_softmax_give_the_softmax(splits):
    """The identity that the op exists for."""
    make = torch.Generator().manual_seed(splits)
    score = 4 * torch.randn(2, 3, 2, 7 * splits, generator=make, dtype=torch.float64)  # [B, H, S_q, T]
    value = torch.randn(2, 7 * splits, 16, generator=make, dtype=torch.float64)
    pieces = zip(score.chunk(splits, -1), value.chunk(splits, 1), strict=True)
    done = [(torch.einsum("bhst,btd->bshd", s.softmax(-1), v), s.logsumexp(-1)) for s, v in pieces]
    out, lse = attention_combine(*(torch.stack(tensors) for tensors in zip(*done, strict=True)))
    assert torch.allclose(out, torch.einsum("bhst,btd->bshd", score.softmax(-1), value), rtol=0, atol=1e-13)
    assert torch.allclose(lse, score.logsumexp(-1), rtol=0, atol=1e-12)


def test_two_caches_of_one_sequence():
    """A shared prefix and each sequence's own rest, through mla_decode itself."""
    problem = Problem(6, 2, 32, 8, (128, 128), page_size=64)
    inputs = problem.inputs(torch.float64)
    whole = mla_decode(**inputs, return_lse=True)
    halves = []
    for half in (0, 1):
        table = inputs["block_table"][:, half : half + 1].contiguous()
        lengths = torch.full_like(inputs["cache_seqlens"], 64)
        mine = inputs | {"block_table": table, "cache_seqlens": lengths, "causal": False}
        halves.append(mla_decode(**mine, return_lse=True))
    out, lse = attention_combine(*(torch.stack(tensors) for tensors in zip(*halves, strict=True)))
    assert torch.allclose(out, whole[0], atol=1e-13) and torch.allclose(lse, whole[1], atol=1e-12)


def test_the_order_of_parts_does_not_matter():
    out, lse = parts(17, (2, 1, 3, 24))
    order = torch.randperm(17, generator=torch.Generator().manual_seed(1))
    for found, expected in zip(attention_combine(out[order], lse[order]), attention_combine(out, lse), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def test_parts_behind_a_sequences_own_are_not_read():
    out, lse = parts(5, (3, 1, 2, 8))
    count = torch.tensor([0, 2, 9], dtype=torch.int32)
    out[2:, 1], lse[2:, 1] = torch.nan, torch.nan
    found, found_lse = attention_combine(out, lse, count)
    assert not found[0].any() and (found_lse[0] == -torch.inf).all()
    for row, splits in ((1, 2), (2, 5)):
        expected, expected_lse = attention_combine(out[:splits, row : row + 1], lse[:splits, row : row + 1])
        assert torch.equal(found[row : row + 1], expected) and torch.equal(found_lse[row : row + 1], expected_lse)


def test_nobody_and_nothing():
    out, lse = attention_combine(torch.empty(0, 2, 1, 3, 8), torch.empty(0, 2, 3, 1))
    assert not out.any() and (lse == -torch.inf).all()
    assert attention_combine(torch.empty(4, 0, 1, 3, 8), torch.empty(4, 0, 3, 1))[0].shape == (0, 1, 3, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_outputs(dtype):
    given = parts(9, (2, 2, 3, 40), dtype)
    found = attention_combine(*given)
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    assert_right(found, given)
    assert attention_combine(*given, dtype=torch.float32)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "triton"}, "backend is 'triton'"),
        ({"backend": "tilelang"}, "backend is 'tilelang' for torch.float32 on cpu"),
        ({"partial_out": torch.zeros(2, 1, 3, 8)}, r"partial_out.shape is \(2, 1, 3, 8\)"),
        ({"partial_out": torch.zeros(2, 1, 1, 3, 8, dtype=torch.int32)}, "partial_out.dtype is torch.int32"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"partial_lse": torch.zeros(2, 1, 1, 3)}, r"partial_lse.shape is \(2, 1, 1, 3\); expected \[2, 1, 3, 1\]"),
        ({"partial_lse": torch.zeros(2, 1, 3, 1, dtype=torch.half)}, "partial_lse.dtype is torch.float16"),
        ({"num_splits": torch.zeros(2, dtype=torch.int32)}, r"num_splits.shape is \(2,\); expected \[1\]"),
        ({"num_splits": torch.zeros(1, dtype=torch.int64)}, "num_splits.dtype is torch.int64; expected torch.int32"),
    ],
)
def test_refusals_name_the_argument(change, message):
    arguments = {"partial_out": torch.zeros(2, 1, 1, 3, 8), "partial_lse": torch.zeros(2, 1, 3, 1)} | change
    with pytest.raises(ValueError, match=message):
        attention_combine(**arguments)


@cache
def compiled_for_cpu(v_head_dim):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.split_kv.combine import make_attention_combine

    return for_cpu(make_attention_combine(v_head_dim=v_head_dim, partial_dtype="float32", dtype="float32", on_cpu=True))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_part_that_is_not_finite_stays_visible(wrong):
    out, lse = torch.ones(3, 1, 1, 1, 8), torch.zeros(3, 1, 1, 1)
    lse[1] = wrong
    found, found_lse = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1)
    compiled_for_cpu(8)(out, lse, torch.tensor([3], dtype=torch.int32), found, found_lse)
    assert found.isnan().all() and not found_lse.isfinite().any()
    assert attention_combine(out, lse)[0].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("splits", SPLITS)
def test_kernel_on_the_cpu_target(shape, splits):
    kernel = compiled_for_cpu(shape[3])
    batch, seqlen_q, heads, _ = shape
    given = parts(splits, shape, torch.float32, seed=splits)
    count = torch.tensor([splits, 0, max(1, splits // 2)][:batch], dtype=torch.int32)
    out, lse = torch.full(shape, torch.nan), torch.full((batch, heads, seqlen_q), torch.nan)
    kernel(*given, count, out, lse)
    assert_right((out, lse), given, count)


@few("width", [576, 80, 512], count=1)
def test_kernel_compiles_for_hopper(width):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.machine import SMALL_PASS_CONFIGS
    from mha2mla.kernels.split_kv.combine import make_attention_combine

    function = make_attention_combine(v_head_dim=width, partial_dtype="float32", dtype="bfloat16")
    assert gate(function, SMALL_PASS_CONFIGS, limit=1024).registers <= 64


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_on_the_gpu(shape, dtype):
    for splits in SPLITS:
        given = parts(splits, shape, dtype, seed=splits, device="cuda")
        count = torch.tensor([splits, 0, max(1, splits // 2)][: shape[0]], dtype=torch.int32, device="cuda")
        assert_right(attention_combine(*given, count), given, count)


@pytest.mark.gpu
def test_more_tokens_than_a_grid_has_rows():
    """A prompt's partial results: two of a grid's dimensions end at 65535."""
    given = parts(2, (1, 70_000, 1, 128), torch.bfloat16, device="cuda")
    assert_right(attention_combine(*given), given)
