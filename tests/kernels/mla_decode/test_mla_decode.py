"""The public decode op on any machine: reference against a plain loop, validation, library registration, plans."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mha2mla.geometry import MLAGeometry, code_bytes
from mha2mla.kernels import explain_mla_decode, mla_decode, plan_mla_decode
from mha2mla.kernels.mla_decode.api import _OPS, MLA
from mha2mla.kernels.mla_decode.selection import DecodeShape, list_kernels, select_kernel
from mha2mla.kernels.split_kv import op
from mha2mla.kernels.split_kv.choice import (
    FIELDS,
    MAX_BATCH,
    MAX_SPLITS,
    SEQLENS_Q,
    SHARED_MEMORY,
    shared_memory_limit,
    tile_rows,
)
from mha2mla.testing.problems import Problem
from tests.commands import python
from tests.kernels.problems import assert_right

BASE = Problem(6, 3, 24, 8, (0, 1, 70), page_size=16, seqlen_q=2)


def call(inputs: dict, **overrides):
    return mla_decode(**(inputs | overrides))


def make_plan(inputs: dict, **overrides):
    names = ("q_latent", "rope_cache", "block_table", "cache_seqlens", "cache_starts", "causal")
    return plan_mla_decode(**({name: inputs[name] for name in names} | {"qk_rope_head_dim": 8} | overrides))


def dense(problem: Problem, inputs: dict) -> torch.Tensor:
    """One query and head at a time, over the tokens that the definition lets it see."""
    out = torch.zeros_like(inputs["q_latent"])
    for b, length in enumerate(problem.lengths):
        start = problem.starts[b] if problem.starts else 0
        for s in range(problem.seqlen_q):
            position = length - 1 - (problem.seqlen_q - 1 - s) * problem.causal
            tokens = [
                t
                for t in range(start, position + 1)
                if problem.window is None or t > position - problem.window or t < start + problem.sinks
            ]
            if not tokens:
                continue
            pages = [int(inputs["block_table"][b, t // problem.page_size]) for t in tokens]
            rows = [t % problem.page_size for t in tokens]
            latent, k_pe = inputs["latent_cache"][pages, rows], inputs["rope_cache"][pages, rows]
            for h in range(problem.heads):
                group = h // (problem.heads // problem.num_rope_heads)
                score = latent @ inputs["q_latent"][b, s, h] + k_pe[:, group] @ inputs["q_pe"][b, s, h]
                out[b, s, h] = torch.softmax(score * problem.softmax_scale, 0) @ latent
    return out


@pytest.mark.parametrize("starts", [None, (0, 1, 30)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (1, 0), (5, 0), (20, 3), (2, 40), (500, 4)])
def test_windows_and_sinks_are_the_definition(window, sinks, causal, starts):
    problem = dataclasses.replace(
        BASE, seqlen_q=3, window=window, sinks=sinks, causal=causal, starts=starts, heads=2, num_rope_heads=1
    )
    inputs = problem.inputs(torch.float64)
    out, lse = call(inputs, plan=problem.plan(inputs), return_lse=True)
    torch.testing.assert_close(out, dense(problem, inputs), rtol=1e-12, atol=1e-13)
    assert_right(inputs, out, lse, **problem.visibility)


def test_lengths_beyond_the_table_are_clamped():
    inputs = dataclasses.replace(BASE, lengths=(16, 32, 48), slack=0).inputs(torch.float32)
    inputs["block_table"] = inputs["block_table"][:, :1].contiguous()
    longer = call(inputs)
    torch.testing.assert_close(longer, call(inputs, cache_seqlens=torch.full((3,), 16, dtype=torch.int32)))


BAD = {
    "latent_scale is given beside centers": lambda i: {"latent_scale": torch.ones(1), "centers": torch.ones(1)},
    "softmax_scale is 1e-28": lambda i: {"softmax_scale": 1e-28},
    r"q_latent is None; expected a tensor \[B S_q H d_c\]": lambda i: {"q_latent": None},
    "q_latent.shape": lambda i: {"q_latent": i["q_latent"][0]},
    "q_pe.shape": lambda i: {"q_pe": i["q_pe"][:, :1]},
    "latent_cache.shape": lambda i: {"latent_cache": i["latent_cache"][..., :8]},
    "latent_cache.dtype": lambda i: {"latent_cache": i["latent_cache"].double()},
    "rope_cache.shape": lambda i: {"rope_cache": i["rope_cache"][:-1]},
    r"rope_cache.shape is .* a divisor of 6": lambda i: {"rope_cache": torch.zeros(*i["rope_cache"].shape[:2], 4, 8)},
    r"rope_cache.stride\(2\)": lambda i: {"rope_cache": i["rope_cache"].transpose(1, 2).contiguous().transpose(1, 2)},
    r"q_latent.stride\(-1\)": lambda i: {"q_latent": i["q_latent"].mT.contiguous().mT},
    "block_table.dtype": lambda i: {"block_table": i["block_table"].long()},
    "block_table.shape": lambda i: {"block_table": i["block_table"][:1]},
    r"block_table.stride\(-1\)": lambda i: {"block_table": i["block_table"].T.contiguous().T},
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


def test_a_plan_refuses_other_shapes():
    inputs = BASE.inputs(torch.float32)
    plan = make_plan(inputs)
    assert (plan.shape, plan.capacity, plan.num_ctas) == ((3, 2, 6, 24), 96, 0)
    out = torch.full_like(inputs["q_latent"], torch.nan)
    assert call(inputs, plan=plan, out=out) is out
    assert torch.equal(out, call(inputs))
    others = {
        r"\[B, S_q, H, d\] = \(3, 2, 6, 24\)": dataclasses.replace(BASE, lengths=(4, 4)).inputs(torch.float32),
        r"max_pages \* page = 96; expected 112": dataclasses.replace(BASE, slack=2).inputs(torch.float32),
        "causal=True; expected False": inputs | {"causal": False},
    }
    for why, other in others.items():
        with pytest.raises(ValueError, match=f"plan was made for {why}"):
            call(other, plan=plan)
    with pytest.raises(ValueError, match="plan was made on cpu; expected meta"):
        plan.check(inputs["q_latent"].to("meta"), inputs["block_table"], 16, True)
    plan.check(inputs["q_latent"], inputs["block_table"], 16, True)


@pytest.mark.parametrize(("change", "by"), [("cache_seqlens", -1), ("cache_starts", 1)])
def test_a_plan_for_other_lengths_is_refused_by_the_reference(change, by):
    """A kernel attends over the plan's lengths: right here and wrong on a GPU is what a reference must not be."""
    inputs = dataclasses.replace(BASE, starts=(0, 1, 30)).inputs(torch.float32)
    plan = make_plan(inputs)
    expected = call(inputs, plan=plan)
    changed = inputs | {change: inputs[change] + torch.tensor([0, 0, by], dtype=torch.int32)}
    with pytest.raises(ValueError, match=r"plan was last refreshed for tokens .* of sequence 2; expected \["):
        call(changed, plan=plan)
    plan.refresh(changed["cache_seqlens"], changed["cache_starts"])
    assert torch.equal(call(changed, plan=plan), call(changed)) and not torch.equal(call(changed), expected)


def test_a_plan_that_was_never_refreshed_is_refused():
    inputs = BASE.inputs(torch.float32)
    plan = plan_mla_decode(inputs["q_latent"], inputs["rope_cache"], inputs["block_table"], None, qk_rope_head_dim=8)
    with pytest.raises(ValueError, match="plan was last refreshed for"):
        call(inputs, plan=plan)


def test_lengths_that_are_clamped_alike_are_the_same():
    inputs = BASE.inputs(torch.float32)
    table = inputs["block_table"].clone()
    table[0] = torch.arange(table.shape[1])  # for a length of more than the table's
    inputs |= {"block_table": table}
    plan = make_plan(inputs | {"cache_seqlens": torch.tensor([200, -3, 70], dtype=torch.int32)})
    call(inputs | {"cache_seqlens": torch.tensor([96, 0, 70], dtype=torch.int32)}, plan=plan)


BAD_PLANS = {
    r"q_latent.shape is \(2, 6, 24\); expected \[B, S_q, H, d_c\]": lambda i: {"q_latent": i["q_latent"][0]},
    r"block_table.shape is \(6,\); expected \[B, max_pages\]": lambda i: {"block_table": i["block_table"][0]},
    r"block_table.shape is \(2, 6\); expected \[3, max_pages\]": lambda i: {"block_table": i["block_table"][:2]},
    "window is 0": lambda i: {"window": 0},
    "window is -1": lambda i: {"window": -1},
    "sinks is 2 with window=None": lambda i: {"sinks": 2},
    "num_splits is 0 for 3 sequences; expected None or 1 to 512": lambda i: {"num_splits": 0},
    "num_splits is 513": lambda i: {"num_splits": 513},
    "sinks is -1 with window=4": lambda i: {"sinks": -1, "window": 4},
    r"cache_seqlens is \(2,\)": lambda i: {"cache_seqlens": i["cache_seqlens"][:2]},
    r"cache_seqlens is \(3,\) torch.int64": lambda i: {"cache_seqlens": i["cache_seqlens"].long()},
    r"cache_starts is \(3,\) torch.float32": lambda i: {"cache_starts": i["cache_seqlens"].float()},
    r"cache_starts is \(3,\) torch.int32 on meta": lambda i: {"cache_starts": i["cache_seqlens"].to("meta")},
    "refuses this call": lambda i: {"backend": "tilelang"},
}


@pytest.mark.parametrize("named", BAD_PLANS)
def test_bad_plan_is_named(named):
    inputs = BASE.inputs(torch.float32)
    with pytest.raises(ValueError, match=named):
        make_plan(inputs, **BAD_PLANS[named](inputs))


def test_a_window_of_more_tokens_than_32_bits_count_is_no_other():
    plan = make_plan(BASE.inputs(torch.float32), window=2**32 + 5, sinks=2**40)
    assert (plan.window, plan.sinks) == (2**30, 2**30)


@pytest.fixture
def an_h200(monkeypatch):
    """An H200 for dispatch and planning, on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(op, "capability", lambda device: 90)
    monkeypatch.setattr(op, "num_sms", lambda device: 132)
    op.dispatch.cache_clear()
    yield torch.device("cuda:7")  # of which there is none: nothing may touch it
    op.dispatch.cache_clear()


@pytest.mark.parametrize(
    "geometry",
    [(32, 32, 512, 16), (32, 1, 512, 64), (9, 3, 192, 64), (1, 1, 8, 8), (128, 1, 512, 64), (128, 128, 64, 8)],
)
@pytest.mark.parametrize("seqlen_q", [1, 2, 8])
def test_ctas_fit_the_combine(an_h200, geometry, seqlen_q):
    """A sequence may be in as many pieces as there are CTAs: no more than the combine has weights for."""
    ctas = MLA.num_ctas(None, *geometry, 64, seqlen_q, torch.bfloat16, an_h200)
    assert 1 <= ctas <= MAX_SPLITS


def test_plan_refuses_more_sequences_than_the_planner_holds(monkeypatch):
    q = torch.empty(MAX_BATCH + 1, 1, 1, 8, dtype=torch.bfloat16, device="meta")
    cache, table = torch.empty(1, 64, 1, 8, device="meta"), torch.empty(MAX_BATCH + 1, 1, device="meta")
    monkeypatch.setattr(op.PagedOp, "num_ctas", lambda *_: 132)
    with pytest.raises(ValueError, match=f"batch\\) is {MAX_BATCH + 1}; a plan takes at most {MAX_BATCH}"):
        plan_mla_decode(q, cache, table, None, qk_rope_head_dim=8)
    plan = plan_mla_decode(q[1:], cache, table[1:], None, qk_rope_head_dim=8)
    assert plan.schedule.shape == (132 + MAX_BATCH, FIELDS) and plan.num_ctas == 132


def test_addresses_of_the_reference_do_not_overflow_32_bits():
    """A cache of more than 2^31 elements, of which two pages exist: the others are views of nothing."""
    pages, page, width = 2**20, 16, 256
    storage = torch.randn(pages * page * width // 2**14)
    latent = storage.as_strided((pages, page, width), (0, width, 1))
    rope = storage.as_strided((pages, page, 1, 8), (0, 8, 8, 1))
    assert pages * page * width > 2**31
    table, length = torch.tensor([[pages - 1, 5]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    q = torch.randn(1, 1, 2, width)
    out = mla_decode(q, q[..., :8], latent, rope, table, length, softmax_scale=0.1)
    again = mla_decode(q, q[..., :8], latent[:1], rope[:1], torch.zeros_like(table), length, softmax_scale=0.1)
    assert torch.equal(out, again)


def test_explanations_name_the_limit():
    def why(dtype=torch.bfloat16, page=64, seqlen_q=1, device="cpu", **geometry):
        usual = {"num_attention_heads": 32, "num_rope_heads": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 16}
        return explain_mla_decode(MLAGeometry(**(usual | geometry)), page, dtype, device, seqlen_q)

    assert "float32" in why(dtype=torch.float32)
    assert "kv_lora_rank is 1032" in why(kv_lora_rank=1032)
    assert "kv_lora_rank is 12" in why(kv_lora_rank=12)
    assert "qk_rope_head_dim is 136" in why(qk_rope_head_dim=136)
    assert "num_attention_heads is 160" in why(num_attention_heads=160)
    assert "4096" in why(num_attention_heads=64, num_rope_heads=32, qk_rope_head_dim=128)
    assert "page_size is 48" in why(page=48)
    assert "seqlen_q is 9" in why(seqlen_q=9)
    assert "CUDA" in why()


@pytest.mark.parametrize("form", _OPS.values(), ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("size", "named"), [("H", "num_attention_heads"), ("d_c", "kv_lora_rank"), ("d_r", "qk_rope_head_dim")]
)
def test_no_kernel_is_chosen_for_nothing(form, size, named):
    """Kernels of no heads or columns divide by them while they are made; the reference serves such calls."""
    sizes = {"H": 4, "G": 1, "d_c": 64, "d_r": 16, "page": 64, "S_q": 1} | {size: 0}
    sizes["row"] = code_bytes(sizes["d_c"], 4)
    shape = form.shape(*[sizes[name] for name in form.static], "bfloat16")
    assert form.explain(shape, "cuda:0").startswith(f"{named} is 0; ")


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
    d_c=st.integers(1, 128).map(lambda n: 8 * n),
    d_r=st.integers(1, 16).map(lambda n: 8 * n),
    page=st.sampled_from((16, 32, 64, 256)),
    seqlen_q=st.sampled_from(SEQLENS_Q),
    capability=st.sampled_from((80, 86, 89, 90, 120)),
)
def test_every_geometry_in_the_contract_gets_a_kernel(groups, per_group, d_c, d_r, page, seqlen_q, capability):
    if groups * per_group > 128 or groups * d_r > 2048:
        return
    shape = DecodeShape(groups * per_group, groups, d_c, d_r, page, seqlen_q, "bfloat16")
    try:
        choice = select_kernel(shape, capability)
    except ValueError as error:
        assert capability != 90 and d_c > 512 and "bytes of shared memory a block; sm_" in str(error)
        return
    assert choice == list_kernels(shape, capability)[0]
    hopper = ("swap_ab_ws", "heads_on_m", *(("swap_ab_cluster",) if d_c > 512 else ()))
    assert choice.kernel in (hopper if capability == 90 else ("swap_ab",))
    assert 64 % choice.block_tokens == 0, "a step is a part of a tile of the schedule"
    used, limit = re.search(r"(\d+) bytes of shared memory.* of (\d+) on sm_", choice.reason).groups()
    assert int(used) <= int(limit) == SHARED_MEMORY[capability] == shared_memory_limit(capability)


def test_selection_needs_neither_torch_nor_tilelang():
    """The files themselves; the packages around them import torch."""
    code = (
        "import sys, types\n"
        "for name in ('mha2mla', 'mha2mla.kernels', 'mha2mla.kernels.mla_decode', 'mha2mla.kernels.split_kv'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    sys.modules[name].__path__ = [name.replace('.', '/')]\n"
        "from mha2mla.kernels.mla_decode.selection import DecodeShape, select_kernel\n"
        "select_kernel(DecodeShape(32, 8, 512, 16, 64, 1, 'bfloat16'), 90)\n"
        "assert not {'torch', 'tilelang'} & set(sys.modules)\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
