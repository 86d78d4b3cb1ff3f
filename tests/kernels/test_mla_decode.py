"""The public decode op on any machine: reference against a plain loop, validation, library registration, plans."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mha2mla.geometry import MLAGeometry
from mha2mla.kernels import explain_mla_decode, mla_decode, plan_mla_decode
from mha2mla.kernels.mla_decode.api import MAX_SPLITS, choose_num_splits
from mha2mla.kernels.mla_decode.selection import DecodeShape, select_kernel, shared_memory_limit
from mha2mla.kernels.mla_decode.tiling import SEQLENS_Q, tile_rows
from tests.kernels.problems import Problem, assert_right, errors, torch_at

BASE = Problem(6, 3, 24, 8, (0, 1, 70), page_size=16, seqlen_q=2)


def call(inputs: dict, **overrides):
    return mla_decode(**(inputs | overrides))


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("starts", [None, (0, 1, 69)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_reference_is_the_formula(dtype, starts, combined):
    problem = dataclasses.replace(BASE, starts=starts, combined=combined)
    inputs = problem.inputs(dtype)
    out, lse = call(inputs, return_lse=True)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_right(inputs, out, lse, dtype)
    if dtype == torch.float64:  # against the independent loop, at the same precision
        assert errors(torch_at(inputs, torch.float64), out)[0] < 1e-14


def test_lse_is_a_natural_log_failure_10():
    inputs = dataclasses.replace(BASE, lengths=(5,), seqlen_q=1).inputs(torch.float64)
    page = inputs["block_table"][0, 0].long()
    latent, k_pe = inputs["latent_cache"][page, :5], inputs["rope_cache"][page, :5]
    score = torch.einsum("hd,td->ht", inputs["q_latent"][0, 0], latent)
    score += torch.einsum("hd,thd->ht", inputs["q_pe"][0, 0], k_pe.repeat_interleave(2, 1))
    _, lse = call(inputs, return_lse=True)
    torch.testing.assert_close(lse[0, :, 0], torch.logsumexp(score * inputs["softmax_scale"], -1))


def test_lengths_beyond_the_table_are_clamped():
    inputs = dataclasses.replace(BASE, lengths=(16, 32, 48), slack=0).inputs(torch.float32)
    inputs["block_table"] = inputs["block_table"][:, :1].contiguous()
    longer = call(inputs)
    torch.testing.assert_close(longer, call(inputs, cache_seqlens=torch.full((3,), 16, dtype=torch.int32)))


def test_empty_batch_and_empty_cache_failure_18():
    inputs = dataclasses.replace(BASE, lengths=(0, 0)).inputs(torch.float32)
    assert call(inputs).abs().sum() == 0
    none = {k: v[:0] if k in ("q_latent", "q_pe", "block_table", "cache_seqlens") else v for k, v in inputs.items()}
    assert call(none).shape == (0, 2, 6, 24)
    no_pages = inputs | {k: inputs[k][:0] for k in ("latent_cache", "rope_cache")}
    out, lse = call(no_pages, return_lse=True)
    assert out.abs().sum() == 0
    assert (lse == -torch.inf).all()


BAD = {
    "q_latent.shape": lambda i: {"q_latent": i["q_latent"][0]},
    "q_pe.shape": lambda i: {"q_pe": i["q_pe"][:, :1]},
    "latent_cache.shape": lambda i: {"latent_cache": i["latent_cache"][..., :8]},
    "latent_cache.dtype": lambda i: {"latent_cache": i["latent_cache"].double()},
    "rope_cache.shape": lambda i: {"rope_cache": i["rope_cache"][:-1]},
    r"rope_cache.shape\[2\]": lambda i: {"rope_cache": torch.zeros(*i["rope_cache"].shape[:2], 4, 8)},
    r"rope_cache.stride\(2\)": lambda i: {"rope_cache": i["rope_cache"].transpose(1, 2).contiguous().transpose(1, 2)},
    r"q_latent.stride\(-1\)": lambda i: {"q_latent": i["q_latent"].mT.contiguous().mT},
    "block_table.dtype": lambda i: {"block_table": i["block_table"].long()},
    "block_table.shape": lambda i: {"block_table": i["block_table"][:1]},
    r"block_table.stride\(\)": lambda i: {"block_table": i["block_table"].T.contiguous().T},
    "cache_seqlens.shape": lambda i: {"cache_seqlens": i["cache_seqlens"][:2]},
    "cache_seqlens.dtype": lambda i: {"cache_seqlens": i["cache_seqlens"].float()},
    "cache_starts.shape": lambda i: {"cache_starts": i["cache_seqlens"][:1]},
    "softmax_scale": lambda i: {"softmax_scale": float("nan")},
    "backend is": lambda i: {"backend": "triton"},
    "refuses this call": lambda i: {"backend": "tilelang"},
    "out.shape": lambda i: {"out": i["q_latent"][..., :8].contiguous()},
    "out.dtype": lambda i: {"out": i["q_latent"].double()},
    "block_table.device": lambda i: {"block_table": i["block_table"].to("meta")},
}


@pytest.mark.parametrize("named", BAD)
def test_bad_input_is_named(named):
    inputs = BASE.inputs(torch.float32)
    with pytest.raises(ValueError, match=named):
        call(inputs, **BAD[named](inputs))


def test_sixteen_byte_rows():
    inputs = dataclasses.replace(BASE, kv_lora_rank=20).inputs(torch.bfloat16)
    with pytest.raises(ValueError, match=r"q_latent.stride\(2\) is 20; expected a multiple of 8"):
        call(inputs)


def test_opcheck_and_fullgraph_failure_22():
    inputs = BASE.inputs(torch.float32)
    tensors = ("q_latent", "q_pe", "latent_cache", "rope_cache", "block_table", "cache_seqlens", "cache_starts")
    arguments = [inputs[name] for name in tensors] + [inputs["softmax_scale"], True, "reference"]
    torch.library.opcheck(torch.ops.mha2mla.mla_decode.default, arguments)
    plan = plan_mla_decode(inputs["q_latent"], inputs["rope_cache"], inputs["block_table"], 8)
    lse = torch.empty(3, 6, 2)
    outs = [plan.num_splits, plan.partial_out, plan.partial_lse, torch.empty_like(inputs["q_latent"]), lse]
    torch.library.opcheck(torch.ops.mha2mla.mla_decode_out.default, arguments + outs)
    compiled = torch.compile(lambda i: mla_decode(**i, return_lse=True), fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(inputs), mla_decode(**inputs, return_lse=True), strict=True):
        assert torch.equal(got, expected)


def test_plan_knows_its_shape_failure_21():
    inputs = BASE.inputs(torch.float32)
    plan = plan_mla_decode(inputs["q_latent"], inputs["rope_cache"], inputs["block_table"], 8)
    out = torch.full_like(inputs["q_latent"], torch.nan)
    assert call(inputs, plan=plan, out=out) is out
    assert torch.equal(out, call(inputs))
    other = dataclasses.replace(BASE, lengths=(4, 4)).inputs(torch.float32)
    with pytest.raises(ValueError, match="plan was made for"):
        call(other, plan=plan)


def test_reference_addresses_64_bits_failure_4():
    """A cache of more than 2^31 elements, of which two pages exist: the others are views of nothing."""
    pages, page, width = 2**20, 16, 256
    storage = torch.randn(pages * page * width // 2**14)
    latent = storage.as_strided((pages, page, width), (0, width, 1))
    rope = storage.as_strided((pages, page, 1, 8), (0, 8, 8, 1))
    assert pages * page * width > 2**31
    table = torch.tensor([[pages - 1, 5]], dtype=torch.int32)
    q = torch.randn(1, 1, 2, width)
    out = mla_decode(q, q[..., :8], latent, rope, table, torch.tensor([20], dtype=torch.int32), softmax_scale=0.1)
    again = mla_decode(
        q,
        q[..., :8],
        latent[:1],
        rope[:1],
        torch.zeros_like(table),
        torch.tensor([20], dtype=torch.int32),
        softmax_scale=0.1,
    )
    assert torch.equal(out, again)


def test_explanations_name_the_limit():
    def why(dtype=torch.bfloat16, page=64, seqlen_q=1, device="cpu", **geometry):
        usual = {"num_attention_heads": 32, "num_rope_heads": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 16}
        return explain_mla_decode(MLAGeometry(**(usual | geometry)), page, dtype, device, seqlen_q)

    assert "float32" in why(dtype=torch.float32)
    assert "kv_lora_rank is 520" in why(kv_lora_rank=520)
    assert "kv_lora_rank is 12" in why(kv_lora_rank=12)
    assert "qk_rope_head_dim is 136" in why(qk_rope_head_dim=136)
    assert "num_attention_heads is 160" in why(num_attention_heads=160)
    assert "4096" in why(num_attention_heads=64, num_rope_heads=32, qk_rope_head_dim=128)
    assert "page_size is 48" in why(page=48)
    assert "seqlen_q is 9" in why(seqlen_q=9)
    assert "CUDA" in why()


@settings(max_examples=300, deadline=None)
@given(
    groups=st.integers(1, 128),
    per_group=st.integers(1, 128),
    seqlen_q=st.sampled_from(SEQLENS_Q),
    max_rows=st.sampled_from((16, 32, 64)),
    max_groups=st.integers(1, 128),
)
def test_tiles_cover_every_head_once(groups, per_group, seqlen_q, max_rows, max_groups):
    heads = groups * per_group
    tiling = tile_rows(heads, groups, seqlen_q, max_rows, max_groups)
    assert tiling.rows <= max_rows
    assert tiling.tokens_per_tile * tiling.head_rows <= tiling.rows
    assert tiling.token_tiles * tiling.tokens_per_tile >= seqlen_q
    seen = []
    for tile in range(tiling.head_tiles):
        group, part = tile // tiling.tiles_per_group, tile % tiling.tiles_per_group
        first = group * tiling.groups_per_tile * per_group + part * tiling.heads_per_tile
        stop = min(first + tiling.heads_per_tile, heads if tiling.tiles_per_group == 1 else (group + 1) * per_group)
        seen += range(first, stop)
        assert len({head // per_group for head in range(first, stop)}) <= tiling.groups_per_tile
    assert seen == list(range(heads))


@settings(max_examples=200, deadline=None)
@given(
    groups=st.sampled_from((1, 2, 3, 5, 8, 16, 32, 64, 128)),
    per_group=st.sampled_from((1, 2, 3, 4, 7, 8, 16, 32)),
    d_c=st.integers(1, 64).map(lambda n: 8 * n),
    d_r=st.integers(1, 16).map(lambda n: 8 * n),
    page=st.sampled_from((16, 32, 64, 256)),
    seqlen_q=st.sampled_from(SEQLENS_Q),
    capability=st.sampled_from((80, 86, 89, 90, 120)),
)
def test_every_geometry_in_the_contract_gets_a_kernel(groups, per_group, d_c, d_r, page, seqlen_q, capability):
    if groups * per_group > 128 or groups * d_r > 2048:
        return
    choice = select_kernel(DecodeShape(groups * per_group, groups, d_c, d_r, page, seqlen_q, "bfloat16"), capability)
    assert choice.kernel == ("swap_ab_ws" if capability == 90 else choice.kernel)
    assert int(choice.reason.rsplit(" bytes", 1)[0].rsplit(" ", 1)[1]) == shared_memory_limit(capability)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4096), st.integers(1, 64), st.integers(0, 200_000), st.integers(1, 160))
def test_number_of_splits_is_sane(batch, tiles, tokens, sms):
    splits = choose_num_splits(batch, tiles, tokens, sms)
    assert 1 <= splits <= min(MAX_SPLITS, max(1, -(-tokens // 64)))
    if batch * tiles >= 64 * sms:
        assert splits <= 2, "a full machine needs no splits"
    if batch * tiles == 1 and tokens >= 64 * sms:
        assert splits > sms // 3, "one sequence must reach most of the machine"
