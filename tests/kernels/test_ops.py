"""Addresses and page tables as kernels need them: refused by name before a launch, and read by every reference."""

from __future__ import annotations

import pytest
import torch

from mha2mla.kernels import (
    attention_varlen,
    gqa_decode,
    mla_decode,
    mla_prefill_varlen,
    plan_gqa_decode,
    plan_mla_decode,
    quantize_latent,
)
from mha2mla.kernels.attention_varlen import api as varlen_api
from mha2mla.kernels.ops import aligned, check_aligned
from mha2mla.kernels.split_kv import op as split_kv_op
from mha2mla.testing.problems import GQAProblem, Problem

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.timeout(300)])]


def odd(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, contiguous, two bytes behind a multiple of 16 (four of float32)."""
    room = tensor.new_empty(tensor.numel() + 16 // tensor.element_size())
    assert room.data_ptr() % 16 == 0
    return room[1 : 1 + tensor.numel()].view(tensor.shape).copy_(tensor)


def mla(device: str) -> tuple:
    given = Problem(16, 2, 64, 32, (5, 70)).inputs(torch.bfloat16, device)
    given.pop("cache_starts")
    return mla_decode, given, ("q_latent", "q_pe", "latent_cache", "rope_cache")


def gqa(device: str) -> tuple:
    given = GQAProblem(8, 2, 64, 64, (5, 70)).inputs(torch.bfloat16, device)
    given.pop("cache_starts")
    return gqa_decode, given, ("q", "k_cache", "v_cache")


def fp8(device: str) -> tuple:
    _, given, _ = mla(device)
    given["latent_cache"], given["latent_scale"] = quantize_latent(given["latent_cache"])
    return mla_decode, given, ("q_latent", "q_pe", "latent_cache", "latent_scale", "rope_cache")


def varlen(device: str) -> tuple:
    def normal(heads: int, width: int) -> torch.Tensor:
        return torch.randn(9, heads, width, device=device).bfloat16()

    bounds = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    given = {"q": normal(4, 64), "k": normal(2, 64), "v": normal(2, 64)}
    given |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 5, "softmax_scale": 0.125}
    return attention_varlen, given, ("q", "k", "v")


def prefill(device: str) -> tuple:
    _, given, _ = varlen(device)
    given |= {"q_nope": given.pop("q"), "k_nope": given.pop("k")}
    given |= {"q_pe": given["q_nope"][..., :16].clone(), "k_pe": given["k_nope"][..., :16].clone()}
    return mla_prefill_varlen, given, ("q_nope", "q_pe", "k_nope", "k_pe", "v")


OPS = {"mla_decode": mla, "gqa_decode": gqa, "fp8": fp8, "attention_varlen": varlen, "prefill": prefill}
NAMES = [(name, argument) for name, make in OPS.items() for argument in (*make("cpu")[2], "out")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "argument"), NAMES)
def test_a_view_at_an_odd_offset_does_not_reach_a_kernel(monkeypatch, name, argument, device):
    if device == "cpu":  # dispatch as where there is a GPU, so that a call comes as far as the kernel's own checks
        monkeypatch.setattr(split_kv_op, "dispatch", lambda *_: (object(), None))
        monkeypatch.setattr(varlen_api, "_check_call_once", lambda *_: True)
    op, given, _ = OPS[name](device)
    if argument == "out":
        values = next(given[key] for key in ("v", "v_cache", "latent_cache") if key in given)
        query = next(given[key] for key in ("q", "q_nope", "q_latent") if key in given)
        given["out"] = query.new_empty(*query.shape[:-1], values.shape[-1])
    given[argument] = odd(given[argument])
    with pytest.raises(ValueError, match=rf"{argument}.data_ptr\(\) is \d+; expected a multiple of 16 bytes"):
        op(**given)


@pytest.mark.parametrize("name", OPS)
def test_references_read_views_at_any_offset(name):
    op, given, arguments = OPS[name]("cpu")
    moved = given | {argument: odd(given[argument]) for argument in arguments}
    assert torch.equal(op(**moved, backend="reference"), op(**given, backend="reference"))


def test_what_is_empty_lies_nowhere():
    numbers = torch.zeros(9, dtype=torch.bfloat16)
    check_aligned(a=numbers, b=None, c=numbers[1:1], d=numbers[8:])
    with pytest.raises(ValueError, match=r"^b.data_ptr\(\) is"):
        check_aligned(a=numbers, b=numbers[1:])
    assert aligned(numbers) is numbers
    copied = aligned(numbers[1:])
    assert copied.data_ptr() % 16 == 0 and torch.equal(copied, numbers[1:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["mla_decode", "gqa_decode", "fp8"])
def test_a_block_table_without_columns_is_contiguous(name, device):
    """[B, 0]: no sequence has a page. Its strides are whatever made it, and say nothing."""
    op, given, _ = OPS[name](device)
    table = given["block_table"]
    for empty in (table.new_empty(2, 0), table[:, :0], table.new_empty(0, 2).T):
        out, lse = op(**given | {"block_table": empty}, return_lse=True)
        assert not out.any() and (lse == -torch.inf).all()


def with_a_hole(name: str, device: str) -> tuple:
    """An op, its arguments with the second page of the longest sequence missing, and the same with a page of zeros."""
    op, given, _ = OPS[name](device)
    caches = [key for key in ("latent_cache", "latent_scale", "rope_cache", "k_cache", "v_cache") if key in given]
    for key in caches:  # finite and large, so that reading another sequence's page shows
        given[key] = torch.where(given[key].float().isnan(), 3.0, given[key].float()).to(given[key].dtype)
    zeros = given | {key: torch.cat((given[key], torch.zeros_like(given[key][:1]))) for key in caches}
    filled, holes = given["block_table"].clone(), given["block_table"].clone()
    filled[1, 1] = len(given[caches[0]])
    holes[1, 1] = -1
    return op, given | {"block_table": holes}, zeros | {"block_table": filled}


@pytest.mark.parametrize("name", ["mla_decode", "gqa_decode", "fp8"])
def test_no_page_inside_a_length_is_refused_by_references(name):
    """The index -1 is another sequence's page."""
    op, holes, _ = with_a_hole(name, "cpu")
    with pytest.raises(
        ValueError, match=r"block_table\[1, 1\] is -1, and token 64 of the sequence is visible; expected"
    ):
        op(**holes)
    beyond = holes["block_table"].clamp_min(0)
    beyond[1, 1] = 10**6
    with pytest.raises(ValueError, match=r"block_table\[1, 1\] is 1000000"):
        op(**holes | {"block_table": beyond})
    holes["cache_seqlens"][1] = 60  # now the entry lies behind the length
    assert op(**holes).isfinite().all()


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["tilelang", "reference"])
@pytest.mark.parametrize("name", ["mla_decode", "gqa_decode", "fp8"])
def test_no_page_inside_a_length_reads_no_other_page_on_the_gpu(name, backend):
    """Nobody waits to look at the table there: such tokens are zeros, as TMA reads them outside a tensor."""
    op, holes, zeros = with_a_hole(name, "cuda")
    out, lse = op(**holes, backend=backend, return_lse=True)
    expected, expected_lse = op(**zeros, backend=backend, return_lse=True)
    assert out.isfinite().all() and torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_over_a_block_table_without_columns(device):
    for make, name in ((plan_mla_decode, "mla_decode"), (plan_gqa_decode, "gqa_decode")):
        op, given, _ = OPS[name](device)
        given["block_table"] = given["block_table"][:, :0]
        query, cache = (given[key] for key in (("q_latent", "rope_cache") if "q_pe" in given else ("q", "k_cache")))
        width = {"qk_rope_head_dim": cache.shape[3]} if "q_pe" in given else {}
        plan = make(query, cache, given["block_table"], given["cache_seqlens"], **width)
        assert not op(**given, plan=plan).any()
