"""The decode op on a GPU: every kernel against float64, poisoned caches, graphs, streams, counts of compilations."""

from __future__ import annotations

import pytest
import torch

from mha2mla.kernels import mla_decode, plan_mla_decode
from tests.kernels.problems import Problem, assert_right, errors, exact, run_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPES = [
    Problem(32, 32, 512, 16, (0, 1, 63, 64, 65, 700)),
    Problem(32, 32, 512, 16, (0, 1, 15, 16, 17, 700), page_size=16),
    Problem(32, 8, 512, 16, (129, 4096), page_size=128),
    Problem(32, 1, 512, 64, (1, 64, 2000), combined=True),
    Problem(9, 3, 192, 64, (5, 300)),
    Problem(9, 9, 256, 16, (5, 300)),
    Problem(9, 3, 216, 24, (5, 300)),
    Problem(14, 2, 80, 8, (65, 300), page_size=32),
    Problem(14, 14, 88, 24, (65, 300)),
    Problem(12, 12, 144, 32, (65, 300), combined=True),
    Problem(24, 8, 320, 24, (65, 300)),
    Problem(24, 24, 384, 40, (65, 300)),
    Problem(40, 40, 448, 16, (65, 300)),
    Problem(40, 8, 512, 48, (65, 300)),
    Problem(3, 1, 512, 256, (65, 300)),
    Problem(1, 1, 8, 8, (1, 300)),
    Problem(63, 63, 128, 8, (65, 300)),
    Problem(126, 2, 512, 128, (65, 300)),
    Problem(128, 128, 512, 16, (65, 300)),
    Problem(128, 1, 512, 64, (65, 300)),
    Problem(64, 16, 192, 128, (65, 300)),
]


def name(problem: Problem) -> str:
    return (
        f"H{problem.heads}-G{problem.num_rope_heads}-c{problem.kv_lora_rank}-r{problem.qk_rope_head_dim}"
        f"-p{problem.page_size}-q{problem.seqlen_q}"
    )


def check(problem: Problem, dtype=torch.bfloat16, **overrides) -> torch.Tensor:
    inputs = problem.inputs(dtype, "cuda") | overrides
    out, lse = mla_decode(**inputs, return_lse=True, backend="tilelang")
    assert_right(inputs, out, lse, dtype)
    return out


@pytest.mark.parametrize("problem", SHAPES, ids=name)
def test_shapes_failures_2_3_6_7_20(problem):
    """Odd heads and widths over poisoned pages, in both dtypes of the cache, bit-equal when run again."""
    out = check(problem)
    for _ in range(5):
        again = mla_decode(**problem.inputs(torch.bfloat16, "cuda"), backend="tilelang")
        assert torch.equal(out, again)


@pytest.mark.parametrize("problem", [SHAPES[0], SHAPES[4], SHAPES[9]], ids=name)
def test_float16(problem):
    check(problem, torch.float16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q", [2, 3, 4, 8])
def test_several_new_tokens_failure_5(seqlen_q, causal):
    # 65, 130 and 195 end in a tile that the earlier queries do not see at all
    lengths = (0, 1, seqlen_q, 64 + seqlen_q, 200, 65, 130, 195)
    check(Problem(16, 16, 512, 16, lengths, seqlen_q=seqlen_q, causal=causal))
    check(Problem(6, 2, 64, 16, lengths, seqlen_q=seqlen_q, causal=causal, starts=(0, 1, 0, 70, 190, 64, 7, 195)))
    check(Problem(9, 3, 192, 64, lengths, seqlen_q=seqlen_q, causal=causal))


def test_left_padding_and_windows():
    check(Problem(32, 8, 512, 16, (70, 140, 64, 2000, 90), starts=(1, 64, 63, 1900, 90)))


def test_large_scores_failure_12():
    problem = Problem(32, 32, 512, 16, (65, 1000), scale=3e5)
    inputs = problem.inputs(torch.bfloat16, "cuda")
    out, lse = mla_decode(**inputs, return_lse=True, backend="tilelang")
    expected, expected_lse = exact(inputs)
    assert float(expected_lse.abs().max()) > 3e5
    assert not torch.isnan(out).any()
    assert errors(out, expected)[0] < 2e-2
    assert float(((lse - expected_lse) / expected_lse).abs().max()) < 1e-4


def test_strided_queries_failure_18():
    problem = SHAPES[2]
    inputs = problem.inputs(torch.bfloat16, "cuda")
    plain = mla_decode(**inputs, backend="tilelang")
    q = inputs["q_latent"].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = torch.cat([inputs["q_pe"], inputs["q_pe"]], -1)[..., : problem.qk_rope_head_dim]
    assert torch.equal(mla_decode(**(inputs | {"q_latent": q, "q_pe": wide}), backend="tilelang"), plain)
    assert q.stride() != inputs["q_latent"].stride()


def test_64_bit_addresses_failure_4():
    """Pages more than 2^31 elements into the cache."""
    page, d_c, d_r = 64, 512, 16
    pages = 2**31 // (page * d_c) + 8
    latent = torch.empty(pages, page, d_c, dtype=torch.bfloat16, device="cuda")
    rope = torch.empty(pages, page, 1, d_r, dtype=torch.bfloat16, device="cuda")
    few = Problem(32, 1, d_c, d_r, (130,)).inputs(torch.bfloat16, "cuda")
    used = few["block_table"][0, :3].long()
    far = torch.arange(pages - 3, pages, device="cuda")
    latent[far], rope[far] = few["latent_cache"][used], few["rope_cache"][used]
    table = far.int()[None].contiguous()
    far_away = mla_decode(
        **(few | {"latent_cache": latent, "rope_cache": rope, "block_table": table}), backend="tilelang"
    )
    near = mla_decode(**(few | {"block_table": used.int()[None].contiguous()}), backend="tilelang")
    assert torch.equal(far_away, near)


def test_graph_captured_at_one_length_replayed_at_others_failures_14_15():
    problem = Problem(32, 8, 512, 16, (100, 100, 100), slack=20)
    inputs = problem.inputs(torch.bfloat16, "cuda")
    inputs["latent_cache"], inputs["rope_cache"] = (
        torch.randn_like(inputs[name]).repeat(10, *([1] * (inputs[name].dim() - 1)))
        for name in ("latent_cache", "rope_cache")
    )
    pages = inputs["latent_cache"].shape[0]
    inputs["block_table"] = torch.randint(0, pages, inputs["block_table"].shape, dtype=torch.int32, device="cuda")
    plan = plan_mla_decode(inputs["q_latent"], inputs["rope_cache"], inputs["block_table"], 16)
    out = torch.empty_like(inputs["q_latent"])
    mla_decode(**inputs, plan=plan, out=out, backend="tilelang")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_decode(**inputs, plan=plan, out=out, backend="tilelang")
    for lengths in ((1, 0, 1400), (64, 65, 0), (0, 0, 0), (1400, 1399, 2)):
        inputs["cache_seqlens"].copy_(torch.tensor(lengths))
        plan.partial_out.fill_(torch.nan)
        plan.partial_lse.fill_(torch.nan)
        out.fill_(torch.nan)
        graph.replay()
        expected, _ = exact(inputs)
        assert not torch.isnan(out).any()
        assert errors(out, expected)[0] < 4e-3 or float(expected.norm()) == 0


def test_one_compilation_for_all_lengths_and_batches_failure_17():
    from mha2mla.kernels.mla_decode.launch import compile_mla_decode

    before = None
    for i in range(1, 51):
        mla_decode(**Problem(8, 2, 64, 16, (i * 7,) * (i % 5 + 1)).inputs(torch.bfloat16, "cuda"), backend="tilelang")
        before = before or compile_mla_decode.cache_info().misses
    assert compile_mla_decode.cache_info().misses == before


def test_current_stream_failure_16():
    """The kernel waits for what its own stream does before it, and for nothing else."""
    inputs = SHAPES[2].inputs(torch.bfloat16, "cuda")
    expected = mla_decode(**inputs, backend="tilelang")
    late = {**inputs, "q_latent": torch.zeros_like(inputs["q_latent"])}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late["q_latent"].copy_(inputs["q_latent"])
        out = mla_decode(**late, backend="tilelang")
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device on this machine")
def test_second_device_failure_16():
    inputs = SHAPES[2].inputs(torch.bfloat16, "cuda:1")
    out, lse = mla_decode(**inputs, return_lse=True, backend="tilelang")
    assert_right(inputs, out, lse, torch.bfloat16)


def test_compile_fullgraph_failure_22():
    inputs = SHAPES[2].inputs(torch.bfloat16, "cuda")
    compiled = torch.compile(lambda i: mla_decode(**i, backend="tilelang"), fullgraph=True)
    assert torch.equal(compiled(inputs), mla_decode(**inputs, backend="tilelang"))


def test_no_host_synchronisation_failure_14():
    inputs = SHAPES[2].inputs(torch.bfloat16, "cuda")
    mla_decode(**inputs, backend="tilelang")
    torch.cuda.set_sync_debug_mode("error")
    try:
        mla_decode(**inputs, backend="tilelang")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("seed", range(24))
def test_random_dynamic_arguments(seed):
    """One geometry, random batch, lengths, starts, table width and new tokens."""
    make = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=make))

    lengths = tuple(draw(0, 900) for _ in range(draw(1, 40)))
    starts = tuple(draw(0, length) for length in lengths) if seed % 2 else None
    check(
        Problem(12, 4, 128, 16, lengths, page_size=32, seqlen_q=draw(1, 2), starts=starts, slack=draw(0, 9), seed=seed)
    )


def draw_geometry(seed: int) -> Problem:
    """A random geometry within the contract, over short sequences."""
    make = torch.Generator().manual_seed(seed)

    def one_of(options) -> int:
        return options[int(torch.randint(len(options), (), generator=make))]

    groups = one_of((1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 32, 48, 96, 128))
    per_group = one_of([n for n in (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 40, 64, 128) if n * groups <= 128])
    widest = min(256 if groups == 1 else 128, 2048 // groups)
    seqlen_q = one_of((1, 1, 1, 2, 4, 8))
    return Problem(
        heads=groups * per_group,
        num_rope_heads=groups,
        kv_lora_rank=8 * one_of(range(1, 65)),
        qk_rope_head_dim=8 * one_of(range(1, widest // 8 + 1)),
        lengths=tuple(one_of((0, 1, 17, 63, 64, 65, 127, 130, 321)) for _ in range(4)),
        page_size=one_of((16, 32, 64, 128)),
        seqlen_q=seqlen_q,
        combined=bool(one_of((0, 1))),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(28))
def test_random_geometries(seed):
    """Any H, G, d_c, d_r, page and S_q of the contract."""
    check(draw_geometry(seed), torch.float16 if seed % 4 == 3 else torch.bfloat16)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(32, 8, 512, 16, (0, 1, 65, 300)),
        Problem(9, 3, 144, 64, (65, 300), page_size=16, seqlen_q=2),
        Problem(14, 14, 80, 24, (63, 130), page_size=32, starts=(3, 64)),
    ],
    ids=name,
)
@pytest.mark.parametrize("capability", [80, 89])
def test_the_portable_kernel_with_the_instructions_of_older_gpus(problem, capability):
    """What sm_80 and sm_89 would run (mma.sync, their shared memory), on this GPU: no wgmma, no TMA."""
    import tilelang

    from mha2mla.kernels.mla_decode.build import PASS_CONFIGS, make_merge, make_split
    from mha2mla.kernels.mla_decode.selection import select_kernel

    shape = problem.shape()
    choice = select_kernel(shape, capability)
    assert choice.kernel == "swap_ab"
    older = PASS_CONFIGS | {"tl.disable_wgmma": True, "tl.disable_tma_lower": True}
    major, minor = torch.cuda.get_device_capability()
    target = {"kind": "cuda", "arch": f"sm_{major}{minor}" + ("a" if major >= 9 else "")}
    split, merge = (
        tilelang.compile(function, target=target, pass_configs=older)
        for function in (make_split(shape, choice), make_merge(shape))
    )
    assert "wgmma" not in split.get_kernel_source()
    inputs = problem.inputs(torch.bfloat16, "cuda")
    for num_splits in (1, 3):
        out, lse = run_kernels(split, merge, inputs, num_splits)
        assert_right(inputs, out, lse, torch.bfloat16)
