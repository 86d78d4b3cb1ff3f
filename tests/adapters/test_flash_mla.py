"""FlashMLA's interface over our ops: equal to the ops, to formulas, and on a GPU host to FlashMLA itself."""

from __future__ import annotations

import inspect

import pytest
import torch

from mha2mla.adapters.flash_mla import flash_mla_varlen_func, flash_mla_with_kvcache, get_mla_metadata
from mha2mla.kernel_testing.problems import Problem, exact, judge


def combined(inputs: dict) -> dict:
    """FlashMLA's arguments for a problem whose latents and k_pe are views of one buffer."""
    latent, width = inputs["latent_cache"], inputs["latent_cache"].stride(1)
    return {
        "q": torch.cat([inputs["q_latent"], inputs["q_pe"]], -1),
        "k_cache": latent.as_strided((*latent.shape[:2], 1, width), (*latent.stride()[:2], width, 1)),
        "block_table": inputs["block_table"],
        "cache_seqlens": inputs["cache_seqlens"],
        "head_dim_v": latent.shape[2],
        "softmax_scale": inputs["softmax_scale"],
        "causal": inputs["causal"],
    }


@pytest.mark.parametrize("seqlen_q", [1, 2])
def test_decode_is_the_op(seqlen_q):
    problem = Problem(4, 1, 32, 16, (0, 5, 130), seqlen_q=seqlen_q, combined=True)
    inputs = problem.inputs(torch.float64)
    metadata, splits = get_mla_metadata(inputs["cache_seqlens"], 4 * seqlen_q, 1)
    expected, expected_lse = exact(inputs)
    for _ in range(2):  # two layers
        out, lse = flash_mla_with_kvcache(**combined(inputs), tile_scheduler_metadata=metadata, num_splits=splits)
        assert torch.allclose(out, expected) and torch.allclose(lse, expected_lse)
    assert (lse[0] == -torch.inf).all() and not out[0].any()


def metadata_for(problem: Problem, device: str = "cpu", dtype: torch.dtype = torch.float64):
    """Metadata that a first call has planned, the call, and the problem's inputs with lengths that may be changed."""
    inputs = problem.inputs(dtype, device)
    call = combined(inputs) | {"tile_scheduler_metadata": get_mla_metadata()[0]}
    flash_mla_with_kvcache(**call)
    return call, inputs


@pytest.mark.parametrize("how", ["in place", "another tensor", "inference mode"])
def test_metadata_that_outlives_its_lengths_is_planned_again(how):
    problem = Problem(4, 1, 32, 16, (9, 70, 130), combined=True)
    with torch.inference_mode(how == "inference mode"):
        call, inputs = metadata_for(problem)
        shorter = inputs["cache_seqlens"] - torch.tensor([3, 0, 70], dtype=torch.int32)
        lengths = shorter if how == "another tensor" else inputs["cache_seqlens"].copy_(shorter)
        plan = call["tile_scheduler_metadata"].plan
        out, lse = flash_mla_with_kvcache(**call | {"cache_seqlens": lengths})
        expected, expected_lse = exact(inputs | {"cache_seqlens": shorter})
        assert torch.allclose(out, expected) and torch.allclose(lse, expected_lse)
        assert call["tile_scheduler_metadata"].plan is plan


def test_metadata_is_planned_once_for_all_layers(monkeypatch):
    call, _ = metadata_for(Problem(4, 1, 32, 16, (9, 70), combined=True))
    monkeypatch.setattr(type(call["tile_scheduler_metadata"].plan), "refresh", None)
    flash_mla_with_kvcache(**call)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_metadata_that_outlives_its_lengths_is_planned_again_on_the_gpu():
    """Where a stale plan would give the attention of the old lengths."""
    problem = Problem(32, 1, 512, 64, (64, 700, 2000), combined=True)
    call, inputs = metadata_for(problem, "cuda", torch.bfloat16)
    inputs["cache_seqlens"].sub_(torch.tensor([3, 600, 1], dtype=torch.int32, device="cuda"))
    out, lse = flash_mla_with_kvcache(**call)
    judgement = judge(inputs, out, lse)
    assert judgement.ok, judgement.reason


def test_default_scale_is_flash_mlas():
    inputs = Problem(4, 1, 32, 16, (5, 70), combined=True).inputs(torch.float64)
    call = combined(inputs) | {"softmax_scale": None, "tile_scheduler_metadata": get_mla_metadata()[0]}
    assert torch.allclose(flash_mla_with_kvcache(**call)[0], exact(inputs | {"softmax_scale": 48**-0.5})[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_fp8_kvcache": True}, "is_fp8_kvcache is given"),
        ({"indices": torch.zeros(1)}, "indices is given"),
        ({"attn_sink": torch.zeros(4)}, "attn_sink is given"),
        ({"k_cache": torch.zeros(3, 64, 2, 48)}, r"k_cache.shape is \(3, 64, 2, 48\)"),
    ],
)
def test_refusals(change, message):
    inputs = Problem(4, 1, 32, 16, (5,), combined=True).inputs(torch.float64)
    call = combined(inputs) | {"tile_scheduler_metadata": get_mla_metadata()[0]} | change
    with pytest.raises(ValueError, match=message):
        flash_mla_with_kvcache(**call)


def test_parameters_are_flash_mlas_in_order():
    """As of FlashMLA 02fe0d0; further ones are keywords that it passes None."""
    names = (
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal"
        " is_fp8_kvcache"
    )
    assert " ".join(inspect.signature(flash_mla_with_kvcache).parameters).startswith(names)
    names = (
        "q k v cu_seqlens_qo cu_seqlens_kv max_seqlen_qo max_seqlen_kv dropout_p softmax_scale causal deterministic"
        " is_varlen"
    )
    assert " ".join(inspect.signature(flash_mla_varlen_func).parameters) == names


@pytest.mark.parametrize("causal", [True, False])
def test_varlen(causal):
    make = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, h, d, generator=make, dtype=torch.float64) for n, h, d in ((9, 4, 24), (12, 2, 24), (12, 2, 16))
    )
    starts_q, starts_k = torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
    out, lse = flash_mla_varlen_func(q, k, v, starts_q, starts_k, 6, 7, causal=causal)
    assert out.shape == (9, 4, 16) and lse.shape == (9, 4)
    for (i, j), (a, b) in (((0, 3), (0, 5)), ((3, 9), (5, 12))):
        keys, values = (x[a:b].repeat_interleave(2, 1) for x in (k, v))
        score = torch.einsum("qhd,khd->hqk", q[i:j], keys) * 24**-0.5
        if causal:
            hidden = torch.arange(b - a) > torch.arange(j - i)[:, None] + (b - a) - (j - i)
            score = score.masked_fill(hidden, -torch.inf)
        assert torch.allclose(out[i:j], torch.einsum("hqk,khd->qhd", score.softmax(-1), values))
        assert torch.allclose(lse[i:j], score.logsumexp(-1).T)
    with pytest.raises(ValueError, match="dropout_p is 0.1"):
        flash_mla_varlen_func(q, k, v, starts_q, starts_k, 6, 7, dropout_p=0.1)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seqlen_q", [1, 2])
def test_against_flash_mla_on_the_gpu(seqlen_q):
    """The compiled op behind FlashMLA's function, at its one shape; the same numbers as ours up to rounding."""
    from benchmarks.peers import load_peer

    problem = Problem(128, 1, 512, 64, (1, 64, 700, 2000), seqlen_q=seqlen_q, combined=True)
    inputs = problem.inputs(torch.bfloat16, "cuda")
    call = combined(inputs)
    out, lse = flash_mla_with_kvcache(**call, tile_scheduler_metadata=get_mla_metadata()[0])
    judgement = judge(inputs, out, lse)
    assert judgement.ok, judgement.reason
    if why := load_peer("_flashmla_C", "dense_decode_fwd"):
        pytest.skip(why)
    cache, table = call["k_cache"].nan_to_num(), call["block_table"].clone()
    table.masked_fill_(table >= len(cache), 0)
    theirs, their_lse, *_ = torch.ops._flashmla_C.dense_decode_fwd(
        call["q"], cache, 512, call["cache_seqlens"], table, call["softmax_scale"], True, None, None, None
    )
    expected, expected_lse = exact(inputs)
    seen = expected_lse != -torch.inf
    assert (their_lse[seen].double() - lse[seen].double()).abs().max() < 1e-3
    assert (theirs.double() - out.double()).norm() <= 3 * (theirs.double() - expected).norm() + 3 * (
        out.double() - expected
    ).norm()
