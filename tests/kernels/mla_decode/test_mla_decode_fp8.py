"""The fp8 latent cache: its number format, append, decode against float64, the kernel's operand maps and its gate."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.kernel_testing.problems import Problem, exact, judge
from mha2mla.kernels import (
    dequantize_latent,
    explain_mla_decode,
    mla_append,
    mla_decode,
    plan_mla_decode,
    quantize_latent,
)
from mha2mla.kernels.mla_decode.fp8_selection import column_of_code, select_fp8
from mha2mla.kernels.mla_decode.quantization import CODES, SMALLEST_SCALE
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.split_kv.limits import shared_memory_limit
from tests.few import few
from tests.kernels.problems import torch_at


def fp8_inputs(problem: Problem, dtype: torch.dtype, device="cpu") -> tuple[dict, dict]:
    """Arguments of ``mla_decode`` over fp8 latents, and over what the cache then holds: its latents are rounded to no
    16-bit type, so they are float64 here. What no query sees is NaN in codes and in scales."""
    inputs = problem.inputs(dtype, device)
    codes, scale = quantize_latent(inputs["latent_cache"])
    held = inputs | {"latent_cache": dequantize_latent(codes, scale, torch.float64)}
    del inputs["latent_cache"]
    return inputs | {"latent_cache": codes, "latent_scale": scale}, held


def judged(problem: Problem, inputs: dict, held: dict, out, lse, dtype):
    return judge(held, out, lse, **problem.visibility)


# --- the number format


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantisation_error_is_half_a_unit_of_e4m3(dtype):
    make = torch.Generator().manual_seed(0)
    latent = torch.randn(50, 80, generator=make).mul(torch.logspace(-3, 3, 50)[:, None]).to(dtype)
    codes, scale = quantize_latent(latent)
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == (50,)
    assert torch.equal(codes.float().abs().amax(1), torch.full((50,), 448.0))
    wide = latent.double()
    error = (dequantize_latent(codes, scale, torch.float64) - wide).abs()
    # 3 stored digits: half a unit is 2^-4 of the number, but no less than half the smallest subnormal, 2^-10 scales
    assert (error <= torch.maximum(wide.abs() * 2**-4, scale[:, None] * 2**-10) * (1 + 2**-20)).all()


def test_rows_that_are_zero_tiny_or_not_finite():
    latent = torch.ones(5, 16)
    latent[0] = 0
    latent[1] = 1e-30
    latent[2, 3] = torch.nan
    latent[3, 4] = -torch.inf
    codes, scale = quantize_latent(latent)
    back = dequantize_latent(codes, scale)
    assert scale[0] == 1 and not back[0].any()
    assert scale[1] == SMALLEST_SCALE and (back[1] - latent[1]).abs().max() < SMALLEST_SCALE
    assert back[2:4].isnan().all() and scale[2:4].isnan().all()
    assert torch.equal(back[4], latent[4])
    assert quantize_latent(latent[:0])[0].shape == (0, 16)


# --- append


def append_arguments(
    tokens=11, heads=9, groups=3, width=48, rope=16, page=4, pages=5, dtype=torch.float32, device="cpu"
):
    make = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=make).to(device, dtype)

    slots = torch.randperm(pages * page, generator=make)[:tokens].int()
    slots[::3] = torch.tensor([-1, pages * page, -7, 2**30])[: len(slots[::3])]
    return {
        "latent": normal(tokens, width),
        "k_pe": normal(tokens, groups, rope),
        "q_pe": normal(tokens, heads, rope),
        "latent_cache": torch.full((pages, page, width), 7.0).to(torch.float8_e4m3fn).to(device),
        "rope_cache": normal(pages, page, groups, rope),
        "positions": torch.randint(0, 1000, (tokens,), generator=make).int().to(device),
        "slots": slots.to(device),
        "inv_freq": torch.rand(groups, rope // 2, generator=make).to(device),
        "latent_scale": torch.full((pages, page), 3.0, device=device),
    }


def check_append(given: dict, **options) -> None:
    """Codes and scales are the reference's bit for bit; rope_cache and q_pe those of the unquantised op."""
    codes, scale = quantize_latent(given["latent"])
    expected_codes, expected_scale = given["latent_cache"].clone().view(torch.uint8), given["latent_scale"].clone()
    page = expected_scale.shape[1]
    for token, slot in enumerate(given["slots"].tolist()):
        if 0 <= slot < expected_scale.numel():
            expected_codes[slot // page, slot % page] = codes[token].view(torch.uint8)
            expected_scale[slot // page, slot % page] = scale[token]
    plain = {name: tensor.clone() for name, tensor in given.items() if name != "latent_scale"}
    plain["latent_cache"] = torch.zeros(plain["latent_cache"].shape, dtype=given["latent"].dtype).to(scale.device)
    expected = mla_append(**plain, **options)
    out = mla_append(**given, **options)
    assert torch.equal(out, expected)
    assert torch.equal(given["rope_cache"], plain["rope_cache"])
    assert torch.equal(given["latent_cache"].view(torch.uint8), expected_codes)
    assert torch.equal(given["latent_scale"].nan_to_num(-1), expected_scale.nan_to_num(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 11])
def test_append_quantises(tokens, dtype):
    check_append(append_arguments(tokens, dtype=dtype))


def test_append_of_rows_that_are_zero_or_not_finite():
    given = append_arguments()
    given["latent"][1] = 0
    given["latent"][2, 5] = torch.nan
    given["latent"][4, 0] = torch.inf
    check_append(given, interleaved=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_scale": None}, "latent_scale is None for a latent_cache of torch.float8_e4m3fn"),
        ({"latent_cache": torch.zeros(5, 4, 48)}, "latent_scale is given for a latent_cache of torch.float32"),
        ({"latent_scale": torch.zeros(5, 3)}, r"latent_scale.shape is \(5, 3\); expected \[5, 4\]"),
        ({"latent_scale": torch.zeros(5, 4).half()}, "latent_scale.dtype is torch.float16"),
        ({"latent_scale": torch.zeros(4, 5).mT}, r"latent_scale.stride\(-1\) is 5"),
    ],
)
def test_append_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        mla_append(**append_arguments() | change)


def test_append_opcheck():
    given = append_arguments()
    cache = given["latent_cache"].view(torch.uint8)  # torch compares no e4m3 numbers on a CPU
    arguments = (given["latent"], cache, given["latent_scale"], given["slots"], False)
    torch.library.opcheck(torch.ops.mha2mla.quantize_append.default, arguments)


@pytest.mark.parametrize("width", [48, 33, 1])
def test_quantising_kernel_on_the_cpu_target(width):
    """Quotients before they are rounded to e4m3, which the C target does not know."""
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.rope_append.quantize_kernel import make_quantize_rows

    function = make_quantize_rows(row_width=width, page_size=4, dtype="float32", code_dtype="float32", on_cpu=True)
    kernel = tilelang.compile(
        function, target="c", target_host="c", execution_backend="cython",
        pass_configs={"tirx.disable_vectorize": True},
    )  # fmt: skip
    for tokens in (1, 11):
        make = torch.Generator().manual_seed(tokens)
        rows = torch.randn(tokens, width, generator=make)
        rows[0] = 0
        if tokens > 2:
            rows[1, 0], rows[2, -1] = torch.inf, torch.nan
        slots = torch.randperm(20, generator=make)[:tokens].int()
        slots[3::4] = torch.tensor([-1, 20])[: len(slots[3::4])]
        cache, scales = torch.full((5, 4, width), 7.0), torch.full((5, 4), 3.0)
        kernel(rows, slots, cache, scales)
        _, scale = quantize_latent(rows)
        expected, expected_scales = torch.full_like(cache, 7.0), torch.full_like(scales, 3.0)
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < 20:
                expected[slot // 4, slot % 4], expected_scales[slot // 4, slot % 4] = (
                    rows[token] / scale[token],
                    scale[token],
                )
        assert torch.equal(scales.nan_to_num(-1), expected_scales.nan_to_num(-1))
        assert torch.allclose(cache, expected, rtol=2**-23, atol=0, equal_nan=True)


# --- decode: the op and its reference

SHAPES = [
    Problem(32, 1, 512, 64, (0, 1, 63, 64, 65, 700)),
    Problem(9, 3, 80, 16, (5, 130), page_size=16),
    Problem(8, 8, 64, 8, (3, 70, 66), seqlen_q=2),
    Problem(4, 2, 48, 16, (90, 70), starts=(3, 65)),
    Problem(4, 1, 64, 16, (500,), window=70, sinks=5),
]


@pytest.mark.parametrize("problem", SHAPES)
def test_reference_is_decode_over_the_dequantised_cache(problem):
    inputs, held = fp8_inputs(problem, torch.float64)
    plan = None
    if problem.window is not None:
        plan = plan_mla_decode(
            inputs["q_latent"], inputs["rope_cache"], inputs["block_table"], inputs["cache_seqlens"],
            qk_rope_head_dim=problem.qk_rope_head_dim, latent_dtype=CODES, **problem.visibility,
        )  # fmt: skip
    out, lse = mla_decode(**inputs, plan=plan, return_lse=True)
    expected, expected_lse = exact(held, **problem.visibility)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_empty_batch_and_no_pages():
    inputs, _ = fp8_inputs(Problem(4, 2, 32, 8, (5, 0)), torch.bfloat16)
    none = {name: inputs[name][:0] for name in ("q_latent", "q_pe", "block_table", "cache_seqlens")}
    assert mla_decode(**inputs | none).shape == (0, 1, 4, 32)
    empty = {name: inputs[name][:0] for name in ("latent_cache", "latent_scale", "rope_cache")}
    out, lse = mla_decode(**inputs | empty, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "triton"}, "backend is 'triton'"),
        ({"backend": "tilelang"}, "backend is 'tilelang', which refuses this call"),
        ({"softmax_scale": 0}, "softmax_scale is 0"),
        ({"q_pe": torch.zeros(1, 1, 3, 8)}, r"q_pe.shape is \(1, 1, 3, 8\)"),
        ({"latent_cache": torch.zeros(5, 64, 32)}, "latent_cache.dtype is torch.float32"),
        ({"latent_scale": torch.zeros(5, 64)}, r"latent_scale.shape is \(5, 64\)"),
        ({"rope_cache": torch.zeros(4, 64, 3, 8)}, r"rope_cache.shape\[2\] \(G\) is 3"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, r"block_table.shape is \(2, 1\)"),
        ({"cache_seqlens": torch.zeros(1)}, "cache_seqlens.dtype is torch.float32"),
        ({"q_latent": torch.zeros(1, 1, 4, 32, dtype=torch.int32)}, "q_latent.dtype is torch.int32"),
    ],
)
def test_refusals_name_the_argument(change, message):
    inputs, _ = fp8_inputs(Problem(4, 2, 32, 8, (5,)), torch.float32)
    with pytest.raises(ValueError, match=message):
        mla_decode(**inputs | change)


def test_a_misaligned_row_is_refused():
    inputs, _ = fp8_inputs(Problem(4, 2, 32, 8, (5,)), torch.bfloat16)
    shape = inputs["latent_cache"].shape
    wide = torch.zeros(*shape[:2], 40, dtype=torch.uint8).view(torch.float8_e4m3fn)[..., :32]
    with pytest.raises(ValueError, match=r"latent_cache.stride\(0\) is 2560|latent_cache.stride\(1\) is 40"):
        mla_decode(**inputs | {"latent_cache": wide})


def test_explain():
    assert "multiples of 16 bytes" in explain_mla_decode(
        MLAGeometry(4, 2, 40, 8), 64, torch.bfloat16, "cpu", latent_dtype=CODES
    )
    assert "page_size" in explain_mla_decode(MLAGeometry(4, 2, 48, 8), 48, torch.bfloat16, "cpu", latent_dtype=CODES)


def test_opcheck():
    inputs, _ = fp8_inputs(Problem(4, 2, 32, 8, (5, 70)), torch.bfloat16)
    names = ("q_latent", "q_pe", "latent_cache", "latent_scale", "rope_cache", "block_table", "cache_seqlens")
    arguments = (*(inputs[name].nan_to_num() if name == "latent_scale" else inputs[name] for name in names), None)
    fit = ("test_faketensor", "test_autograd_registration")  # the others compare e4m3 arguments, which torch cannot
    torch.library.opcheck(torch.ops.mha2mla.mla_decode_fp8.default, (*arguments, 0.1, True, None), test_utils=fit)


# --- the kernel's arithmetic, without a GPU


def test_columns_of_codes_are_a_permutation_of_each_sixteen():
    places = [column_of_code(d) for d in range(64)]
    for block in range(0, 64, 16):
        assert sorted(places[block : block + 16]) == list(range(block, block + 16))


def wgmma_places(lane: int) -> list[tuple[int, int]]:
    """(row, column) of the 8 numbers of a thread in a 16-bit register operand of 16 x 16 (PTX ISA, wgmma, matrix A)."""
    g, t = lane // 4, lane % 4
    return [(g + 8 * (r % 2), 2 * t + i + 8 * (r // 2)) for r in range(4) for i in range(2)]


def test_register_operand_of_the_scores_meets_the_permuted_queries():
    """ldmatrix and the order of conversions, acted out on a 16 x 16 block: C q^T comes out unpermuted."""
    make = torch.Generator().manual_seed(0)
    codes, query = torch.randn(16, 16, generator=make), torch.randn(16, generator=make)
    operand, permuted = torch.zeros(16, 16), torch.zeros(16)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        word = [codes[g, 4 * t : 4 * t + 4], codes[g + 8, 4 * t : 4 * t + 4]]  # ldmatrix: 4 bytes of rows g and g + 8
        a = [word[0][:2], word[1][:2], word[0][2:], word[1][2:]]
        for (row, column), value in zip(wgmma_places(lane), torch.cat(a), strict=True):
            operand[row, column] = value
    for d in range(16):
        permuted[column_of_code(d)] = query[d]
    assert torch.allclose(operand @ permuted, codes @ query)


def test_register_operand_of_the_output_is_the_transposed_block():
    """ldmatrix.trans and the byte permutation on 16 tokens x 16 columns: rows are columns 2g, then 2g + 1."""
    codes = torch.arange(256.0).view(16, 16)  # [token, column]
    operand = torch.zeros(16, 16)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        a = []
        for first in (0, 8):
            word = torch.cat([codes[first + 2 * t, 2 * g : 2 * g + 2], codes[first + 2 * t + 1, 2 * g : 2 * g + 2]])
            word = word[[0, 2, 1, 3]]
            a += [word[:2], word[2:]]
        for (row, column), value in zip(wgmma_places(lane), torch.cat(a), strict=True):
            operand[row, column] = value
    column_of_row = [2 * (r % 8) + r // 8 for r in range(16)]
    assert torch.equal(operand, codes.T[column_of_row])


GATED = [
    DecodeShape(32, 1, 512, 64, 64, 1, "bfloat16"),
    DecodeShape(32, 8, 512, 16, 16, 1, "bfloat16"),
    DecodeShape(9, 3, 80, 24, 64, 1, "float16"),
]


@few("shape", GATED, count=1, ids=lambda s: f"H{s.heads}-G{s.num_rope_heads}-c{s.kv_lora_rank}-p{s.page_size}")
def test_kernels_fit_a_hopper(shape):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernel_testing.compile_gate import compile_only, find_tool
    from mha2mla.kernels.compilation import SMALL_PASS_CONFIGS
    from mha2mla.kernels.mla_decode.fp8 import make_mla_decode_fp8
    from mha2mla.kernels.mla_decode.fp8_selection import shared_memory

    if find_tool("nvcc") is None:
        pytest.skip("there is no nvcc")
    choice = select_fp8(shape)
    (report,) = compile_only(make_mla_decode_fp8(shape, choice), "sm_90a", SMALL_PASS_CONFIGS)
    assert report.complaints(shared_memory_limit(90)) == [], choice.reason
    promised = shared_memory(
        choice.tiling, shape.kv_lora_rank, shape.qk_rope_head_dim, shape.page_size, choice.num_stages
    )
    assert promised - 1024 <= report.shared_bytes <= promised, choice.reason
    assert report.registers * 384 <= 65536
    if report.instructions is not None:
        assert report.instructions.get("HGMMA", 0) and report.instructions.get("UTMALDG", 0), report.instructions


@few("row_width", [80, 512], count=1)
def test_quantising_kernel_compiles_for_hopper(row_width):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernel_testing.compile_gate import compile_only, find_tool
    from mha2mla.kernels.compilation import EXACT_PASS_CONFIGS
    from mha2mla.kernels.rope_append.quantize_kernel import make_quantize_rows

    if find_tool("nvcc") is None:
        pytest.skip("there is no nvcc")
    function = make_quantize_rows(row_width=row_width, page_size=64, dtype="bfloat16")
    (report,) = compile_only(function, "sm_90a", EXACT_PASS_CONFIGS)
    assert not report.complaints(48 * 1024)


# --- on a GPU


def check(problem: Problem, dtype=torch.bfloat16, planned: bool = False) -> torch.Tensor:
    """The kernel on a problem, with NaN in all workspace and wherever nobody may look; torch's error at ``dtype`` is
    taken over the cache that holds the dequantised latents rounded to ``dtype``, float64's over those not rounded."""
    inputs, held = fp8_inputs(problem, dtype, "cuda")
    plan = None
    if planned or problem.window is not None:
        plan = plan_mla_decode(
            inputs["q_latent"], inputs["rope_cache"], inputs["block_table"], inputs["cache_seqlens"],
            qk_rope_head_dim=problem.qk_rope_head_dim, cache_starts=inputs["cache_starts"], causal=problem.causal,
            backend="tilelang", latent_dtype=CODES, **problem.visibility,
        )  # fmt: skip
        plan.partial_out.fill_(torch.nan)
        plan.partial_lse.fill_(torch.nan)
    out, lse = mla_decode(**inputs, plan=plan, return_lse=True, backend="tilelang")
    judgement = judged(problem, inputs, held, out, lse, dtype)
    assert judgement.ok, judgement.reason
    return out


GPU = [
    Problem(32, 1, 512, 64, (0, 1, 63, 64, 65, 127, 128, 129, 700, 2000)),
    Problem(32, 1, 512, 64, (0, 1, 15, 16, 17, 700), page_size=16),
    Problem(16, 1, 512, 64, (5, 300, 1000)),
    Problem(32, 8, 512, 16, (1, 4000)),
    Problem(9, 3, 80, 24, (5, 300), page_size=128),
    Problem(40, 40, 192, 8, (65, 300)),
    Problem(128, 1, 512, 64, (65, 300)),
    Problem(1, 1, 16, 8, (1, 300)),
    Problem(24, 24, 320, 16, (3, 190)),
]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "problem", GPU, ids=lambda p: f"H{p.heads}-G{p.num_rope_heads}-c{p.kv_lora_rank}-p{p.page_size}"
)
def test_no_shape_reads_poison_or_drops_heads_on_the_gpu(problem):
    out = check(problem)
    for _ in range(3):
        assert torch.equal(out, check(problem, planned=True))


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_float16_windows_starts_and_large_scores_on_the_gpu():
    problem = GPU[0]
    check(problem, torch.float16)
    for scale in (1e-4, 100.0, 4e5):  # float16 queries would overflow if they were only cast
        check(dataclasses.replace(problem, scale=scale))
    check(dataclasses.replace(problem, starts=(0, 1, 60, 64, 2, 100, 63, 64, 650, 1999)))
    for window, sinks in ((1, 0), (20, 4), (64, 64), (200, 70)):
        check(dataclasses.replace(problem, window=window, sinks=sinks))


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "problem",
    [
        Problem(16, 1, 512, 64, (0, 1, 2, 66, 200, 65, 130, 195), seqlen_q=2),
        Problem(6, 2, 64, 16, (0, 1, 3, 67, 200, 65, 130, 195), seqlen_q=3, starts=(0, 1, 0, 60, 190, 64, 7, 195)),
    ],
    ids=["H16", "H6"],
)
def test_several_new_tokens_are_aligned_bottom_right_on_the_gpu(problem):
    for causal in (True, False):
        check(dataclasses.replace(problem, causal=causal))


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_scales_far_apart_and_strided_caches_on_the_gpu():
    """Scales from 2^-30 to 2^20 in one sequence; codes and k_pe as views of larger pages."""
    problem = Problem(32, 1, 512, 64, (300, 70))
    inputs = problem.inputs(torch.bfloat16, "cuda")
    exponent = torch.randint(-30, 20, inputs["latent_cache"].shape[:2], device="cuda")
    exponent[:, ::2] = -3
    codes, scale = quantize_latent(inputs["latent_cache"].float() * torch.exp2(exponent.float())[..., None])
    held = inputs | {"latent_cache": dequantize_latent(codes, scale, torch.float64)}
    wide = torch.zeros(*codes.shape[:2], 640, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)[..., 64:576]
    wide.view(torch.uint8).copy_(codes.view(torch.uint8))
    scales = torch.full((len(scale), 128), torch.nan, device="cuda")[:, 64:]
    scales.copy_(scale)
    arguments = inputs | {"latent_cache": wide, "latent_scale": scales}
    out, lse = mla_decode(**arguments, return_lse=True, backend="tilelang")
    judgement = judge(held, out, lse)
    assert judgement.ok, judgement.reason


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_graph_replays_at_other_lengths():
    problem = Problem(32, 1, 512, 64, (2000, 1500, 700))
    inputs, held = fp8_inputs(problem, torch.bfloat16, "cuda")
    plan = plan_mla_decode(
        inputs["q_latent"], inputs["rope_cache"], inputs["block_table"], inputs["cache_seqlens"], qk_rope_head_dim=64,
        latent_dtype=CODES,
    )  # fmt: skip
    out = torch.empty_like(inputs["q_latent"])

    def step():
        plan.refresh(inputs["cache_seqlens"])
        mla_decode(**inputs, plan=plan, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ((2000, 1500, 700), (1, 0, 64), (0, 0, 0), (1999, 65, 3)):
        inputs["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        judgement = judge(held, out, None)
        assert judgement.ok, judgement.reason


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("width", "dtype"), [(512, torch.bfloat16), (80, torch.float16), (33, torch.float32)])
def test_append_on_the_gpu(width, dtype):
    for tokens in (0, 1, 11):
        given = append_arguments(tokens, width=width, dtype=dtype, device="cuda")
        if tokens > 4:
            given["latent"][1] = 0
            given["latent"][2, 5] = torch.nan
            given["latent"][4, 0] = torch.inf
        check_append(given)


def test_error_beside_the_original_cache():
    """What a user loses: against the unquantised cache, about the relative error of e4m3 (2^-5 on average)."""
    problem = Problem(8, 1, 128, 16, (300, 200))
    original = problem.inputs(torch.float64)
    inputs, _ = fp8_inputs(problem, torch.float64)
    expected, _ = exact(original)
    error = (mla_decode(**inputs) - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.06
    assert (torch_at(original, torch.float64) - expected).norm() / expected.norm() < 1e-12
