"""The GQA decode op on any machine: the reference is the formula, refusals name the argument, plans and schema hold."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
import torch

from mha2mla.kernels import explain_gqa_decode, gqa_decode, mla_decode, plan_gqa_decode
from mha2mla.kernels.gqa_decode.selection import GQAShape, select_kernel
from mha2mla.kernels.split_kv.choice import MAX_SPLITS, SEQLENS_Q, SHARED_MEMORY, shared_memory_limit, tile_rows
from mha2mla.testing.problems import GQAProblem

BASE = GQAProblem(6, 2, 24, 16, (0, 1, 70), page_size=16, seqlen_q=2)


def call(inputs: dict, **overrides):
    return gqa_decode(**(inputs | overrides))


def test_one_kv_head_whose_values_are_its_keys_is_mla():
    """Multi-query attention over the latent itself: what absorbed MLA is without rotary keys."""
    inputs = dataclasses.replace(BASE, num_kv_heads=1, qk_head_dim=16).inputs(torch.float64)
    inputs["v_cache"] = inputs["k_cache"]
    q_pe, rope_cache = (inputs[name].new_zeros(*inputs[name].shape[:3], 8) for name in ("q", "k_cache"))
    shared = {name: inputs[name] for name in ("block_table", "cache_seqlens", "softmax_scale")}
    mla = mla_decode(inputs["q"], q_pe, inputs["k_cache"][:, :, 0], rope_cache, **shared)
    torch.testing.assert_close(call(inputs), mla, rtol=1e-13, atol=1e-14)


def test_a_cache_without_pages_is_one_with_pages():
    """[slots, max_len, G, d] as the docstring says."""
    slots, max_len, page = 4, 48, 16
    k, v = torch.randn(slots, max_len, 2, 24), torch.randn(slots, max_len, 2, 16)
    slot, lengths = torch.tensor([2, 0]), torch.tensor([48, 17], dtype=torch.int32)
    table = (slot[:, None] * (max_len // page) + torch.arange(max_len // page)).int()
    q = torch.randn(2, 1, 6, 24)
    out = gqa_decode(q, k.view(-1, page, 2, 24), v.view(-1, page, 2, 16), table, lengths, softmax_scale=0.3)
    for b in range(2):
        mine = [x[slot[b], : lengths[b]].transpose(0, 1)[None] for x in (k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[b : b + 1].transpose(1, 2), *mine, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[b : b + 1], expected.transpose(1, 2))


def test_size_one_is_served():
    one = GQAProblem(1, 1, 1, 1, (1,), page_size=1, slack=0).inputs(torch.float32)
    torch.testing.assert_close(call(one).flatten(), one["v_cache"][one["block_table"][0, 0].long()].flatten())


BAD = {
    "q.shape": lambda i: {"q": i["q"][0]},
    "q.dtype": lambda i: {"q": i["q"].int()},
    "k_cache.shape": lambda i: {"k_cache": i["k_cache"][..., :8]},
    "k_cache.dtype": lambda i: {"k_cache": i["k_cache"].double()},
    "v_cache.shape": lambda i: {"v_cache": i["v_cache"][:-1]},
    r"k_cache.shape is .* a divisor of 6": lambda i: {
        name: i[name].repeat(1, 1, 2, 1) for name in ("k_cache", "v_cache")
    },
    r"q.stride\(-1\)": lambda i: {"q": i["q"].mT.contiguous().mT},
    "refuses this call": lambda i: {"backend": "tilelang"},
    "out.shape": lambda i: {"out": i["q"][..., :8].contiguous()},
}


@pytest.mark.parametrize("named", BAD)
def test_bad_input_is_named(named):
    inputs = BASE.inputs(torch.float32)
    with pytest.raises(ValueError, match=named):
        call(inputs, **BAD[named](inputs))


@pytest.mark.parametrize(("name", "dims"), [("q", r"\[B, S_q, H, d_qk\]"), ("k_cache", r"\[P, page, G, d_qk\]")])
def test_a_plan_of_other_dimensions_is_refused(name, dims):
    inputs = BASE.inputs(torch.float32)
    tensors = {key: inputs[key] for key in ("q", "k_cache", "block_table", "cache_seqlens")}
    with pytest.raises(ValueError, match=rf"{name}.shape is \(\d+, \d+, \d+\); expected {dims}"):
        plan_gqa_decode(**tensors | {name: tensors[name][0]})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"heads": 129, "num_kv_heads": 129}, "num_attention_heads is 129"),
        ({"heads": 0, "device": "cuda:0"}, "num_attention_heads is 0"),
        ({"qk_head_dim": 12}, "qk_head_dim is 12"),
        ({"v_head_dim": 264}, "v_head_dim is 264"),
        ({"num_kv_heads": 0}, "the number of kv heads is 0; expected a divisor of H=6"),
        ({"page_size": 8}, "page_size is 8"),
        ({"page_size": 48}, "page_size is 48"),
        ({"seqlen_q": 9}, "seqlen_q is 9"),
        ({"dtype": torch.float32}, "dtype is float32"),
        ({}, "device is cpu"),
    ],
)
def test_refusals_have_reasons(change, why):
    shape = {"heads": 6, "num_kv_heads": 3, "qk_head_dim": 64, "v_head_dim": 64, "page_size": 64, "seqlen_q": 1}
    assert why in explain_gqa_decode(**(shape | {"dtype": torch.bfloat16, "device": "cpu"} | change))


def test_every_shape_of_the_contract_is_served():
    draw = random.Random(0)
    for _ in range(400):
        heads = draw.choice([1, 7, 9, 14, 28, 32, 63, 126, 128, draw.randint(1, 128)])
        groups = draw.choice([g for g in range(1, heads + 1) if heads % g == 0])
        widths = [8 * draw.randint(1, 32) for _ in range(2)]
        shape = GQAShape(heads, groups, *widths, draw.choice([16, 64, 256]), draw.choice(SEQLENS_Q), "bfloat16")
        for capability in SHARED_MEMORY:
            choice = select_kernel(shape, capability)
            assert choice.kernel == ("streamed" if capability == 90 else "portable")
            used = int(re.search(r"(\d+) bytes of shared memory", choice.reason).group(1))
            assert used <= shared_memory_limit(capability)
            assert 1 <= choice.num_ctas(132) <= MAX_SPLITS


def test_packed_tiles_hold_every_row_once():
    for sizes in ((7, 1, 8, 64), (9, 3, 2, 8), (128, 1, 8, 16), (32, 32, 4, 32), (63, 1, 1, 64)):
        heads, groups, seqlen_q, max_rows = sizes
        tiling = tile_rows(heads, groups, seqlen_q, max_rows, 1, packed=True)
        assert tiling.groups_per_tile == 1 and tiling.rows <= max_rows and tiling.rows >= 8
        assert tiling.head_rows >= tiling.heads_per_tile and tiling.head_rows & (tiling.head_rows - 1) == 0
        rows = {
            (tiling.token(row), tiling.head(row))
            for row in range(tiling.rows)
            if tiling.head(row) < tiling.heads_per_tile and tiling.token(row) < tiling.tokens_per_tile
        }
        assert len(rows) == tiling.heads_per_tile * tiling.tokens_per_tile
        per_group = tiling.tiles_per_group * tiling.heads_per_tile
        assert per_group >= heads // groups and tiling.token_tiles * tiling.tokens_per_tile >= seqlen_q
