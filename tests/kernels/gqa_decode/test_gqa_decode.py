"""GQA decode on any machine: the reference, validation, library registration, and the kernels' algebra on the CPU."""

from __future__ import annotations

import dataclasses
import random
import re
from functools import cache

import pytest
import torch

from mha2mla.kernel_testing.gqa_problems import GQAProblem
from mha2mla.kernel_testing.judgement import errors
from mha2mla.kernel_testing.problems import UNUSED_PAGE, judge
from mha2mla.kernels import explain_gqa_decode, gqa_decode, mla_decode
from mha2mla.kernels.gqa_decode.selection import (
    GQAShape,
    list_kernels,
    portable_shared_memory,
    select_kernel,
    streamed_shared_memory,
)
from mha2mla.kernels.split_kv.limits import MAX_SPLITS, SHARED_MEMORY, shared_memory_limit
from mha2mla.kernels.split_kv.tiling import SEQLENS_Q, tile_rows
from tests.few import few
from tests.kernels.problems import prepared, random_work, torch_at

BASE = GQAProblem(6, 2, 24, 16, (0, 1, 70), page_size=16, seqlen_q=2)


def assert_right(problem: GQAProblem, inputs: dict, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    judgement = judge(inputs, out, lse, **problem.visibility)
    assert judgement.ok, judgement.reason


def call(inputs: dict, **overrides):
    return gqa_decode(**(inputs | overrides))


# --- the reference and the public function ---


@pytest.mark.parametrize("starts", [None, (0, 1, 69)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_reference_is_the_formula(dtype, starts):
    problem = dataclasses.replace(BASE, starts=starts)
    inputs = problem.inputs(dtype)
    out, lse = call(inputs, return_lse=True)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_right(problem, inputs, out, lse)
    if dtype == torch.float64:  # against the independent loop, at the same precision
        assert errors(torch_at(inputs, torch.float64), out)[0] < 1e-14


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (1, 0), (20, 3), (2, 40), (500, 4)])
def test_windows_and_sinks_are_the_definition(window, sinks, causal):
    problem = dataclasses.replace(BASE, starts=(0, 1, 30), window=window, sinks=sinks, causal=causal)
    inputs = problem.inputs(torch.float64)
    out = call(inputs, plan=problem.plan(inputs))
    for b, length in enumerate(problem.lengths):
        for s in range(problem.seqlen_q):
            position = length - 1 - (problem.seqlen_q - 1 - s) * causal
            start = problem.starts[b]
            tokens = [
                t for t in range(start, position + 1) if window is None or t > position - window or t < start + sinks
            ]
            rows = [t % problem.page_size for t in tokens]
            pages = [int(inputs["block_table"][b, t // problem.page_size]) for t in tokens]
            k, v = inputs["k_cache"][pages, rows], inputs["v_cache"][pages, rows]
            for h in range(problem.heads):
                g = h // (problem.heads // problem.num_kv_heads)
                score = k[:, g] @ inputs["q"][b, s, h] * problem.softmax_scale
                expected = torch.softmax(score, 0) @ v[:, g] if tokens else torch.zeros_like(out[b, s, h])
                torch.testing.assert_close(out[b, s, h], expected, rtol=1e-12, atol=1e-13)


def test_one_kv_head_whose_values_are_its_keys_is_mla():
    """Multi-query attention over the latent itself: what absorbed MLA is without rotary keys."""
    inputs = dataclasses.replace(BASE, num_kv_heads=1, qk_head_dim=16).inputs(torch.float64)
    inputs["v_cache"] = inputs["k_cache"]
    zeros = {
        "q_pe": torch.zeros(3, 2, 6, 8).double(),
        "rope_cache": torch.zeros(*inputs["k_cache"].shape[:3], 8).double(),
    }
    shared = {name: inputs[name] for name in ("block_table", "cache_seqlens", "softmax_scale")}
    mla = mla_decode(inputs["q"], zeros["q_pe"], inputs["k_cache"][:, :, 0], zeros["rope_cache"], **shared)
    torch.testing.assert_close(call(inputs), mla, rtol=1e-13, atol=1e-14)


def test_lse_is_a_natural_log():
    inputs = dataclasses.replace(BASE, lengths=(5,), seqlen_q=1).inputs(torch.float64)
    k = inputs["k_cache"][inputs["block_table"][0, 0].long(), :5].repeat_interleave(3, 1)
    score = torch.einsum("hd,thd->ht", inputs["q"][0, 0], k) * inputs["softmax_scale"]
    torch.testing.assert_close(call(inputs, return_lse=True)[1][0, :, 0], torch.logsumexp(score, -1))


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


def test_lengths_beyond_the_table_are_clamped():
    inputs = dataclasses.replace(BASE, lengths=(16, 32, 48), slack=0).inputs(torch.float32)
    inputs["block_table"] = inputs["block_table"][:, :1].contiguous()
    torch.testing.assert_close(call(inputs), call(inputs, cache_seqlens=torch.full((3,), 16, dtype=torch.int32)))


def test_empty_batch_empty_cache_and_size_one_are_served():
    inputs = dataclasses.replace(BASE, lengths=(0, 0)).inputs(torch.float32)
    assert call(inputs).abs().sum() == 0
    none = {k: v[:0] if k in ("q", "block_table", "cache_seqlens") else v for k, v in inputs.items()}
    assert call(none).shape == (0, 2, 6, 16)
    out, lse = call(inputs | {k: inputs[k][:0] for k in ("k_cache", "v_cache")}, return_lse=True)
    assert out.abs().sum() == 0 and (lse == -torch.inf).all()
    one = GQAProblem(1, 1, 1, 1, (1,), page_size=1, slack=0).inputs(torch.float32)
    torch.testing.assert_close(call(one).flatten(), one["v_cache"][one["block_table"][0, 0].long()].flatten())


BAD = {
    "q.shape": lambda i: {"q": i["q"][0]},
    "q.dtype": lambda i: {"q": i["q"].int()},
    "k_cache.shape": lambda i: {"k_cache": i["k_cache"][..., :8]},
    "k_cache.dtype": lambda i: {"k_cache": i["k_cache"].double()},
    "v_cache.shape": lambda i: {"v_cache": i["v_cache"][:-1]},
    r"k_cache.shape\[2\]": lambda i: {name: i[name].repeat(1, 1, 2, 1) for name in ("k_cache", "v_cache")},
    r"q.stride\(-1\)": lambda i: {"q": i["q"].mT.contiguous().mT},
    "block_table.dtype": lambda i: {"block_table": i["block_table"].long()},
    "block_table.shape": lambda i: {"block_table": i["block_table"][:1]},
    r"block_table.stride\(-1\)": lambda i: {"block_table": i["block_table"].T.contiguous().T},
    "cache_seqlens.shape": lambda i: {"cache_seqlens": i["cache_seqlens"][:2]},
    "cache_starts.dtype": lambda i: {"cache_starts": i["cache_seqlens"].float()},
    "softmax_scale": lambda i: {"softmax_scale": float("nan")},
    "backend is": lambda i: {"backend": "triton"},
    "refuses this call": lambda i: {"backend": "tilelang"},
    "out.shape": lambda i: {"out": i["q"][..., :8].contiguous()},
    "block_table.device": lambda i: {"block_table": i["block_table"].to("meta")},
}


@pytest.mark.parametrize("named", BAD)
def test_bad_input_is_named(named):
    inputs = BASE.inputs(torch.float32)
    with pytest.raises(ValueError, match=named):
        call(inputs, **BAD[named](inputs))


def test_sixteen_byte_rows():
    inputs = BASE.inputs(torch.bfloat16)
    wide = torch.zeros(*inputs["k_cache"].shape[:3], 25, dtype=torch.bfloat16)[..., :24]
    with pytest.raises(ValueError, match=r"k_cache.stride\(1\) is 50; expected a multiple of 8"):
        call(inputs, k_cache=wide)


def test_a_plan_refuses_other_shapes():
    inputs = BASE.inputs(torch.float32)
    plan = BASE.plan(inputs)
    assert (plan.shape, plan.capacity, plan.num_ctas) == ((3, 2, 6, 16), 96, 0)
    out = torch.full((3, 2, 6, 16), torch.nan)
    assert call(inputs, plan=plan, out=out) is out
    assert torch.equal(out, call(inputs))
    with pytest.raises(ValueError, match=r"plan was made for \[B, S_q, H, d\] = \(3, 2, 6, 16\)"):
        call(dataclasses.replace(BASE, lengths=(4, 4)).inputs(torch.float32), plan=plan)
    with pytest.raises(ValueError, match="causal=True; expected False"):
        call(inputs, plan=plan, causal=False)


def test_a_plan_for_other_lengths_is_refused_by_the_reference():
    inputs = BASE.inputs(torch.float32)
    plan = BASE.plan(inputs)
    call(inputs, plan=plan)
    changed = inputs | {"cache_seqlens": inputs["cache_seqlens"] - 1}
    with pytest.raises(ValueError, match="plan was last refreshed for tokens .*; expected"):
        call(changed, plan=plan)
    plan.refresh(changed["cache_seqlens"], changed["cache_starts"])
    call(changed, plan=plan)


def test_schema_and_fake_do_not_drift():
    inputs = BASE.inputs(torch.float32)
    tensors = [inputs[name] for name in ("q", "k_cache", "v_cache", "block_table", "cache_seqlens", "cache_starts")]
    torch.library.opcheck(torch.ops.mha2mla.gqa_decode.default, (*tensors, 0.3, True, None))
    out, lse = torch.empty(3, 2, 6, 16), torch.empty(3, 6, 2)
    torch.library.opcheck(
        torch.ops.mha2mla.gqa_decode_out.default,
        (*tensors, 0.3, True, None, -1, 0, None, None, None, None, out, lse),
    )


def test_it_breaks_no_compiled_graph():
    inputs = BASE.inputs(torch.float32)

    def step(i):
        plan = BASE.plan(i)
        return gqa_decode(**i, plan=plan), gqa_decode(**i)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(inputs), step(inputs), strict=True):
        assert torch.equal(got, expected)


# --- selection ---


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


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"heads": 129, "num_kv_heads": 129}, "num_attention_heads is 129"),
        ({"qk_head_dim": 12}, "qk_head_dim is 12"),
        ({"v_head_dim": 264}, "v_head_dim is 264"),
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


def test_packed_tiles_hold_every_row_once():
    for heads, groups, seqlen_q, max_rows in [
        (7, 1, 8, 64),
        (9, 3, 2, 8),
        (128, 1, 8, 16),
        (32, 32, 4, 32),
        (63, 1, 1, 64),
    ]:
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


# --- the kernel body on TileLang's CPU target ---


@cache
def compiled_for_cpu(shape: GQAShape, max_rows: int, block_tokens: int, splits: int):
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.gqa_decode.build import make_split
    from mha2mla.kernels.split_kv.launch import make_merge

    tiling = tile_rows(shape.heads, shape.num_kv_heads, shape.seqlen_q, max_rows, 1, packed=True)
    choice = next(choice for choice in list_kernels(shape, 80) if choice.kernel == "portable")
    choice = dataclasses.replace(choice, tiling=tiling, block_tokens=block_tokens)
    merge = make_merge(shape.heads, shape.v_head_dim, "float32", splits, on_cpu=True)
    return [
        tilelang.compile(
            function, target="c", target_host="c", execution_backend="cython",
            pass_configs={"tirx.disable_vectorize": True},
        )
        for function in (make_split(shape, choice, dtype="float32", on_cpu=True), merge)
    ]  # fmt: skip


def run_kernels(problem: GQAProblem, split, merge, inputs: dict, num_ctas: int, work=None):
    """A compiled decode kernel and combine on one problem, every output and all workspace poisoned with NaN before.

    ``work`` None: what the planner makes of the lengths.
    """
    q = inputs["q"]
    shape = (*q.shape[:3], problem.v_head_dim)
    schedule, splits, partial_out, partial_lse, lse = prepared(problem.spans(), shape, num_ctas, work, q.device)
    out = q.new_full(shape, torch.nan)
    split(
        q, inputs["k_cache"], inputs["v_cache"], inputs["block_table"], schedule, partial_out, partial_lse, out, lse,
        inputs["softmax_scale"], int(inputs["causal"]), 2**30 if problem.window is None else problem.window,
        problem.sinks,
    )  # fmt: skip
    merge(splits, partial_out, partial_lse, out, lse)
    return out, lse


def poison_unseen_pages(problem: GQAProblem, inputs: dict) -> dict:
    """Also poisons table entries of pages that no query sees but that lie in a tile with a token that one sees."""
    table, storage = inputs["block_table"], problem.storage
    seen = storage._seen(storage.capacity, table.device).view(*table.shape, problem.page_size).any(2)
    return inputs | {"block_table": torch.where(seen, table, UNUSED_PAGE)}


def run_on_cpu(problem: GQAProblem, num_ctas: int, work=None, max_rows=32, block_tokens=64, splits=64, compiled_q=None):
    shape = problem.shape("float32", compiled_q)
    split, merge = compiled_for_cpu(shape, max_rows, block_tokens, splits)
    inputs = poison_unseen_pages(problem, problem.inputs(torch.float32))
    out, lse = run_kernels(problem, split, merge, inputs, num_ctas, work)
    assert_right(problem, inputs, out, lse)
    return out


CPU_SHAPES = [
    GQAProblem(9, 3, 64, 64, (1, 63, 64, 65, 200)),
    GQAProblem(14, 2, 80, 80, (130,)),
    GQAProblem(7, 1, 24, 88, (5, 70), page_size=16),
    GQAProblem(5, 5, 96, 64, (100, 64), page_size=32),
    GQAProblem(40, 2, 8, 8, (70,), page_size=128),
    GQAProblem(3, 1, 192, 128, (77,)),
    GQAProblem(1, 1, 8, 8, (64, 1)),
]


@pytest.mark.parametrize("problem", CPU_SHAPES, ids=lambda problem: problem.name)
def test_no_shape_reads_poison_or_drops_heads(problem):
    """Group ratios that are no power of two, odd widths, poisoned pages, one CTA and more CTAs than tiles."""
    for num_ctas in (1, 2, 12):
        run_on_cpu(problem, num_ctas)


@pytest.mark.parametrize("page_size", [16, 64])
def test_no_page_inside_a_length_reads_no_other_page(page_size):
    """Such tokens are zeros, whatever lies on the page that stands in for theirs."""
    problem = GQAProblem(4, 2, 16, 8, (70, 200), page_size=page_size)
    inputs = problem.inputs(torch.float32)
    split, merge = compiled_for_cpu(problem.shape("float32"), 32, 64, 64)
    filled, holes = inputs["block_table"].clone(), inputs["block_table"].clone()
    for (row, entry), hole in {(0, 0): -1, (1, 1): 10**6, (1, 64 // page_size + 1): -(2**31)}.items():
        holes[row, entry], filled[row, entry] = hole, len(inputs["k_cache"])
    caches = {name: inputs[name] for name in ("k_cache", "v_cache")}
    zeros = {name: torch.cat((cache, torch.zeros_like(cache[:1]))) for name, cache in caches.items()}
    for num_ctas in (1, 3):
        out, lse = run_kernels(problem, split, merge, inputs | {"block_table": holes}, num_ctas)
        assert_right(problem, inputs | zeros | {"block_table": filled}, out, lse)


@pytest.mark.parametrize("num_ctas", [1, 3, 17])
def test_any_number_of_ctas_serves_any_lengths(num_ctas):
    for lengths in [(0, 1, 64, 200, 321), (0, 0, 0, 0, 0), (0, 0, 900, 0, 0), (1, 1, 1, 1, 1)]:
        run_on_cpu(GQAProblem(4, 2, 16, 8, lengths), num_ctas)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seqlen_q", "max_rows"), [(2, 64), (4, 16), (8, 8)])
def test_causal_alignment_is_bottom_right(seqlen_q, max_rows, causal):
    """Bottom-right aligned; sequences shorter than the query leave rows that see nothing; windows and sinks too."""
    lengths = (0, 1, seqlen_q, 66, 129, 64 + seqlen_q - 1)
    problem = GQAProblem(6, 2, 16, 8, lengths, seqlen_q=seqlen_q, causal=causal)
    for num_ctas in (1, 9):
        run_on_cpu(problem, num_ctas, max_rows=max_rows)
        for window, sinks in ((1, 0), (3, 70), (64, 4)):
            run_on_cpu(dataclasses.replace(problem, window=window, sinks=sinks), num_ctas, max_rows=max_rows)


@pytest.mark.parametrize("block_tokens", [32, 64])
def test_random_plans(block_tokens):
    """Cuts at any tile, fragments on any CTA in any order, windows, starts: what a kernel may not take for granted."""
    for seed in range(20):
        draw = random.Random(seed)
        lengths = tuple(draw.choice([0, draw.randint(1, 500)]) for _ in range(draw.randint(1, 9)))
        window = draw.choice([None, draw.randint(1, 300)])
        problem = GQAProblem(
            3,
            1,
            24,
            8,
            lengths,
            page_size=16,
            starts=tuple(draw.randint(0, length) for length in lengths) if draw.random() < 0.4 else None,
            window=window,
            sinks=draw.choice([0, 3, 90]) if window else 0,
            seqlen_q=draw.choice([1, 2]),
            causal=draw.random() < 0.7,
            seed=seed,
        )
        num_ctas = draw.choice([1, 2, 5, 16, 33])
        work = random_work([span.tiles for span in problem.spans()], num_ctas, draw)
        run_on_cpu(problem, num_ctas, work, block_tokens=block_tokens, compiled_q=2)


def test_large_scores_are_not_taken_for_masked_ones():
    """A finite stand-in for -inf must lose against real scores of -3e5."""
    run_on_cpu(GQAProblem(4, 2, 16, 8, (65, 130), scale=1e5), 2)
    run_on_cpu(GQAProblem(4, 2, 16, 8, (65, 130), scale=1e5, window=20, sinks=3), 2)


# --- the compile gate ---

GATED = [
    GQAShape(28, 4, 192, 128, 16, 8, "float16"),
    GQAShape(32, 32, 128, 128, 64, 1, "bfloat16"),
    GQAShape(64, 1, 256, 256, 64, 1, "bfloat16"),
]


def gate(shape: GQAShape, choice, capability: int):
    from mha2mla.kernel_testing.compile_gate import compile_only, find_tool
    from mha2mla.kernels.compilation import PASS_CONFIGS
    from mha2mla.kernels.gqa_decode.build import make_split

    if find_tool("nvcc") is None:
        pytest.skip("nvcc is neither on PATH nor installed by pip")
    arch = "sm_90a" if capability == 90 else f"sm_{capability}"
    (report,) = compile_only(make_split(shape, choice), arch, PASS_CONFIGS)
    assert report.complaints(shared_memory_limit(capability)) == [], choice.reason
    memory = streamed_shared_memory if choice.kernel == "streamed" else portable_shared_memory
    depth = choice.num_stages if choice.kernel == "streamed" else choice.block_tokens
    promised = memory(choice.tiling, shape.qk_head_dim, shape.v_head_dim, depth)
    assert promised - 4096 <= report.shared_bytes <= promised, choice.reason
    assert report.registers * 160 * choice.ctas_per_sm <= 65536, choice.reason
    return report


@few("shape", GATED, count=1, ids=str)
def test_kernels_fit_a_hopper(shape):
    """The rule's choice: no spills, memory as computed, registers for so many CTAs on a multiprocessor."""
    report = gate(shape, select_kernel(shape, 90), 90)
    if report.instructions is not None:
        assert report.instructions.get("HGMMA", 0) and report.instructions.get("UTMALDG", 0), report.instructions


# Several new tokens of few heads: 24, 40 and 56 rows in tiles of 32 and 64. With 32 cached tokens a step, the warps
# that hold a row's scores are not those that hold its output.
ODD_ROWS = [
    GQAShape(40, 8, 96, 96, 32, 8, "float16"),
    GQAShape(9, 3, 64, 64, 64, 8, "bfloat16"),
    GQAShape(28, 4, 128, 128, 64, 8, "bfloat16"),
]


@pytest.mark.exhaustive  # the GPU runs both
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("shape", ODD_ROWS, ids=str)
def test_portable_kernel_of_odd_rows(shape, capability):
    choice = next(choice for choice in list_kernels(shape, capability) if choice.kernel == "portable")
    assert choice.tiling.rows > shape.heads // shape.num_kv_heads * shape.seqlen_q
    gate(shape, choice, capability)


@few("capability", [80, 89], count=1)
def test_before_hopper(capability):
    shape = GQAShape(14, 2, 80, 64, 16, 2, "bfloat16")
    report = gate(shape, select_kernel(shape, capability), capability)
    if report.instructions is not None:
        assert report.instructions.get("HMMA", 0), report.instructions
