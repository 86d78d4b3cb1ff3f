"""Partials of split-KV decoding are float32, whatever the model's dtype."""

from __future__ import annotations

import pytest
import torch

from mha2mla.kernels import DecodePlan, plan_gqa_attention, plan_gqa_decode, plan_mla_attention, plan_mla_decode
from mha2mla.kernels.split_kv.op import PagedOp

DTYPES = [torch.bfloat16, torch.float16]
CTAS = 7


@pytest.fixture
def ctas(monkeypatch):
    """Plans as where there is a GPU: with blocks, and without anybody to run the planner."""
    monkeypatch.setattr(PagedOp, "num_ctas", lambda *_: CTAS)
    monkeypatch.setattr(DecodePlan, "refresh", lambda *_: None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plans_workspace_is_float32(ctas, dtype):
    q, rope, table = torch.zeros(2, 1, 4, 32, dtype=dtype), torch.zeros(3, 16, 2, 8, dtype=dtype), torch.zeros(2, 3)
    seqlens = torch.ones(2, dtype=torch.int32)
    table, lengths = table.int(), torch.tensor([[1, 1], [4, 4], [0, 0]], dtype=torch.int32)
    kv = torch.zeros(3, 16, 2, 32, dtype=dtype)
    plans = [
        plan_mla_decode(q, rope, table, seqlens, qk_rope_head_dim=8),
        plan_gqa_decode(q, kv, table, seqlens),
        plan_mla_decode(q, rope, table, seqlens, qk_rope_head_dim=8, latent_dtype=torch.float8_e4m3fn),
    ]
    for plan in plans:
        assert plan.partial_out.dtype == plan.partial_lse.dtype == torch.float32
        assert plan.partial_out.shape == (CTAS, 2, 1, 4, 32) and plan.partial_lse.shape == (CTAS, 2, 1, 4)
    latent = torch.zeros(3, 16, 32, dtype=dtype)
    widths = {"num_attention_heads": 4, "num_key_value_heads": 2, "qk_nope_head_dim": 8, "v_head_dim": 8}
    mixed = [
        plan_mla_attention(latent, rope, table, seqlens, lengths, **widths),
        plan_gqa_attention(kv, kv, table, seqlens, lengths, num_attention_heads=4),
    ]
    for plan in mixed:
        assert plan.workspace.dtype == torch.float32 and plan.workspace.numel() >= CTAS * 2 * 4 * 33


def dtypes_of(function) -> dict[str, str]:
    """Dtypes of a TileLang function's tensors, by name."""
    return {buffer.name: str(buffer.dtype) for buffer in function.buffer_map.values()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_write_and_merge_float32_partials(dtype):
    """All kernels of an op have one signature, but for the tensors of the op."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.gqa_decode.api import GQA
    from mha2mla.kernels.mla_decode.api import FP8, INT8_KEYS, LATENT, LATENT_FP8, MLA
    from mha2mla.kernels.split_kv.combine import SIZES, make_combine

    shapes = [(MLA, (64, 1, 128, 64)), (FP8, (64, 1, 128, 64)), (INT8_KEYS, (64, 1, 128, 64)), (GQA, (8, 2, 64, 64))]
    shapes += [(op, (64, 128, 64)) for op in (LATENT, LATENT_FP8)]
    made = [make_combine(64, 128, dtype, max(SIZES))]
    for op, sizes in shapes:
        shape = op.shape(*sizes, 64, 1, dtype)
        made.append(op.make_split(shape, op.select(shape, 90)))
    for function in made:
        found = dtypes_of(function)
        kinds = {tensor: found[tensor] for tensor in ("partial_out", "partial_lse", "lse", "out")}
        assert kinds == dict.fromkeys(("partial_out", "partial_lse", "lse"), "float32") | {"out": dtype}


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_splits_cost_no_digits(dtype):
    """One sequence in as many pieces as there are CTAs: rounded partials would show in the log-sum-exp and the sum."""
    from mha2mla.kernels import mla_decode
    from mha2mla.testing.problems import Problem
    from tests.kernels.problems import assert_right

    problem = Problem(32, 8, 512, 16, (64 * 500,))
    inputs = problem.inputs(dtype, "cuda")
    plan = problem.plan(inputs, "tilelang")
    assert plan.partial_out.dtype == plan.partial_lse.dtype == torch.float32
    out, lse = mla_decode(**inputs, plan=plan, return_lse=True, backend="tilelang")
    assert int(plan.splits[0, 0]) > 50
    assert_right(inputs, out, lse)
