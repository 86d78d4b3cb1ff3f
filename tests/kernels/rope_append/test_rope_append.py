"""The append ops: rotation, slots, untouched pages, views; the kernel on CPU target and GPU."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from mha2mla.kernels import append_and_map, gqa_append, mla_append, quantize_latent, rope_rotate, slots_of
from mha2mla.kernels.rope_append.api import MAX_SLOTS
from mha2mla.kernels.rope_append.reference import rotate_reference
from tests.few import few

# H, G, d_c, d_r, rows of inv_freq
SHAPES = [(9, 3, 48, 16, 3), (9, 3, 80, 16, 1), (8, 8, 64, 8, 8), (4, 1, 64, 64, 1), (14, 2, 88, 24, 2)]
PAGE, PAGES = 4, 5


def tensors(shape, tokens=11, dtype=torch.float32, device="cpu", combined=False, seed=0):
    """Arguments of mla_append; slots are distinct, and every third token has none."""
    heads, groups, width, rope, tables = shape
    make = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=make).to(device, dtype)

    if combined:
        buffer = normal(PAGES, PAGE, width + groups * rope)
        caches = buffer[..., :width], buffer[..., width:].unflatten(-1, (groups, rope))
    else:
        caches = normal(PAGES, PAGE, width), normal(PAGES, PAGE, groups, rope)
    slots = torch.randperm(PAGES * PAGE, generator=make)[:tokens].int()
    slots[::3] = torch.tensor([-1, PAGES * PAGE, -7, 2**30])[: len(slots[::3])]
    inv_freq = 10000.0 ** -torch.rand(tables, rope // 2, generator=make)
    inv_freq[:, -1:] = 0
    return {
        "latent": normal(tokens, width),
        "k_pe": normal(tokens, groups, rope),
        "q_pe": normal(tokens, heads, rope),
        "latent_cache": caches[0],
        "rope_cache": caches[1],
        "positions": torch.randint(0, 100_000, (tokens,), generator=make).int().to(device),
        "slots": slots.to(device),
        "inv_freq": inv_freq.to(device),
    }


def rotated(x, positions, inv_freq, scaling, interleaved):
    """RoPE as complex numbers, float64, from float32 angles."""
    angle = (positions.float()[:, None, None] * inv_freq.float()).double()
    factor = torch.where(inv_freq == 0, 1.0, scaling).double()
    turn = torch.polar(factor.expand_as(angle), angle).repeat_interleave(x.shape[1] // len(inv_freq), 1)
    wide = x.double()
    pair = wide.unflatten(-1, (-1, 2)) if interleaved else torch.stack(wide.chunk(2, -1), -1)
    made = torch.view_as_real(torch.view_as_complex(pair.contiguous()) * turn)
    return made.flatten(-2) if interleaved else torch.cat(made.unbind(-1), -1)


def expected_caches(given, scaling, interleaved):
    latent, rope = given["latent_cache"].clone(), given["rope_cache"].clone().double()
    keys = rotated(given["k_pe"], given["positions"], given["inv_freq"], scaling, interleaved)
    for token, slot in enumerate(given["slots"].tolist()):
        if 0 <= slot < PAGES * PAGE:
            latent[slot // PAGE, slot % PAGE] = given["latent"][token]
            rope[slot // PAGE, slot % PAGE] = keys[token]
    return latent, rope


def assert_one_rounding(found, expected, scale):
    """Float32 arithmetic on the pair, then one rounding to the dtype."""
    eps = torch.finfo(found.dtype).eps / 2 if found.dtype != torch.float64 else 0
    bound = eps * expected.abs() + 4 * torch.finfo(torch.float32).eps * scale
    assert ((found.double() - expected).abs() <= bound).all()


def assert_right(before, given, out, scaling=1.0, interleaved=False):
    latent, rope = expected_caches(before, scaling, interleaved)
    assert torch.equal(given["latent_cache"], latent)
    largest = max((float(x.abs().max()) for x in (before["k_pe"], before["q_pe"]) if x.numel()), default=0.0)
    scale = 2 * scaling * largest
    assert_one_rounding(given["rope_cache"], rope, scale)
    untouched = torch.ones(PAGES * PAGE, dtype=torch.bool)
    slots = before["slots"].cpu()
    untouched[slots[(slots >= 0) & (slots < PAGES * PAGE)].long()] = False
    for name in ("latent_cache", "rope_cache"):
        kept, was = given[name].flatten(0, 1).cpu()[untouched], before[name].flatten(0, 1).cpu()[untouched]
        assert torch.equal(kept, was)
    assert_one_rounding(
        out, rotated(before["q_pe"], before["positions"], before["inv_freq"], scaling, interleaved), scale
    )


def copied(given):
    return {name: tensor.clone() for name, tensor in given.items()}


@pytest.mark.parametrize(("combined", "interleaved", "scaling"), [(False, False, 1.0), (True, True, 1.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_mla_append(shape, dtype, combined, interleaved, scaling):
    given = tensors(shape, dtype=dtype, combined=combined)
    before = copied(given)
    out = mla_append(**given, attention_scaling=scaling, interleaved=interleaved)
    assert_right(before, given, out, scaling, interleaved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_where_nothing_rotary_is_cached_one_row_is_written(device, dtype):
    """Queries turn all the same; e4m3 latents too."""
    given = tensors(SHAPES[3], dtype=dtype, device=device)
    both = copied(given)
    expected = mla_append(**both)
    alone = {**copied(given), "k_pe": None, "rope_cache": None}
    assert torch.equal(mla_append(**alone), expected)
    assert torch.equal(alone["latent_cache"], both["latent_cache"])
    codes, scale = quantize_latent(given["latent_cache"])
    eight = {**alone, "latent_cache": codes, "latent_scale": scale}
    assert torch.equal(mla_append(**eight), expected)
    wanted, wanted_scale = quantize_latent(both["latent_cache"])
    written = given["slots"][(given["slots"] >= 0) & (given["slots"] < PAGES * PAGE)].long()
    assert torch.equal(codes.float().flatten(0, 1)[written], wanted.float().flatten(0, 1)[written])
    assert torch.equal(scale.flatten()[written], wanted_scale.flatten()[written])
    for missing in ("k_pe", "rope_cache"):
        with pytest.raises(ValueError, match=f"{missing} is None; expected both k_pe and rope_cache, or neither"):
            mla_append(**{**given, missing: None})


def test_no_token_with_a_slot_leaves_the_cache_alone():
    given = tensors(SHAPES[0])
    given["slots"].fill_(-1)
    before = copied(given)
    mla_append(**given)
    assert torch.equal(given["latent_cache"], before["latent_cache"])
    assert torch.equal(given["rope_cache"], before["rope_cache"])


def test_no_tokens_and_no_pages():
    given = tensors(SHAPES[0], tokens=0)
    before = copied(given)
    assert_right(before, given, mla_append(**given))
    given = tensors(SHAPES[0])
    given |= {"latent_cache": torch.empty(0, PAGE, 48), "rope_cache": torch.empty(0, PAGE, 3, 16)}
    assert mla_append(**given).shape == (11, 9, 16)


# Layouts that store no rotary keys, or none at all: no rope heads, no rotary width, and neither.
WITHOUT_KEYS = [(4, 0, 48, 16, 1), (4, 2, 48, 0, 2), (4, 0, 80, 0, 1), (0, 0, 48, 16, 1)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("shape", WITHOUT_KEYS)
def test_latents_are_kept_where_there_are_no_rotary_keys(shape, combined, device):
    for tokens in (1, 11):
        given = tensors(shape, tokens, combined=combined)
        before = copied(given)
        given = {name: tensor.to(device) for name, tensor in given.items()}
        out = mla_append(**given)
        assert_right(before, {name: tensor.cpu() for name, tensor in given.items()}, out.cpu())
        assert tokens == 1 or not torch.equal(given["latent_cache"].cpu(), before["latent_cache"])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", WITHOUT_KEYS)
def test_eight_bit_latents_are_kept_where_there_are_no_rotary_keys(shape, device):
    given = {name: tensor.to(device) for name, tensor in tensors(shape).items()}
    given["latent_cache"] = torch.zeros(PAGES, PAGE, shape[2], device=device).to(torch.float8_e4m3fn)
    given["latent_scale"] = torch.zeros(PAGES, PAGE, device=device)
    out = mla_append(**given)
    assert out.shape == given["q_pe"].shape
    slots = given["slots"].cpu()
    live = ((slots >= 0) & (slots < PAGES * PAGE)).nonzero().flatten()
    codes, scale = quantize_latent(given["latent"].cpu())
    found = given["latent_cache"].cpu().float().flatten(0, 1)[slots[live].long()]
    assert torch.equal(found, codes.float()[live])
    assert torch.equal(given["latent_scale"].cpu().flatten()[slots[live].long()], scale[live])


def test_a_table_of_no_frequencies_is_refused():
    given = tensors(SHAPES[0])
    with pytest.raises(ValueError, match=r"inv_freq.shape is \(0, 8\); expected \[a divisor of 9"):
        mla_append(**given | {"inv_freq": given["inv_freq"][:0]})


def test_scores_depend_on_the_distance_alone():
    """The identity that RoPE exists for."""
    inv_freq = torch.tensor([[1.0, 0.1, 0.01]])
    q, k = torch.randn(2, 1, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    at = lambda x, p: rope_rotate(x, torch.tensor([p], dtype=torch.int32), inv_freq)  # noqa: E731
    scores = [(at(q, 7 + shift) * at(k, 3 + shift)).sum() for shift in (0, 20, 300)]
    assert torch.allclose(torch.stack(scores), scores[0], rtol=0, atol=1e-6)


def test_gqa_append_writes_keys_and_values():
    make = torch.Generator().manual_seed(1)
    query, key = torch.randn(6, 4, 16, generator=make), torch.randn(6, 2, 16, generator=make)
    value = torch.randn(6, 2, 24, generator=make)
    key_cache, value_cache = torch.zeros(PAGES, PAGE, 2, 16), torch.zeros(PAGES, PAGE, 2, 24)
    positions, slots = torch.arange(6).int(), torch.tensor([0, 5, 19, -1, 7, 8]).int()
    inv_freq = 10000.0 ** -torch.rand(1, 8, generator=make)
    out = gqa_append(query, key, value, key_cache, value_cache, positions, slots, inv_freq)
    turned = rotate_reference(key, positions, inv_freq)
    assert torch.equal(out, rotate_reference(query, positions, inv_freq))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(key_cache.view(-1, 2, 16)[slot], turned[token])
            assert torch.equal(value_cache.view(-1, 2, 24)[slot], value[token])
    assert (value_cache.abs().sum((2, 3)) > 0).sum() == 5


def test_slots_of_a_block_table():
    table = torch.tensor([[3, 1, -1], [0, -1, -1]], dtype=torch.int32)
    sequences = torch.tensor([0, 0, 0, 1, 1, -1, 0], dtype=torch.int32)
    positions = torch.tensor([0, 5, 9, 3, 4, 0, 12], dtype=torch.int32)
    assert slots_of(table, sequences, positions, 4).tolist() == [12, 5, -1, 3, -1, -1, -1]
    assert slots_of(table[:, :0], sequences, positions, 4).tolist() == [-1] * 7


def test_slots_do_not_wrap():
    """A slot that int32 does not hold is none; computed in 32 bits it would be one of the first pages."""
    table = torch.tensor([[2**25 - 1, 2**25, 2**26, 2**26 + 3, 2**31 - 1]], dtype=torch.int32)
    positions = torch.tensor([62, 64, 128, 192, 256], dtype=torch.int32)
    found = slots_of(table, torch.zeros(5, dtype=torch.int32), positions, 64)
    assert found.dtype == torch.int32 and found.tolist() == [MAX_SLOTS - 1, -1, -1, -1, -1]


def test_a_cache_beyond_int32_slots_is_refused():
    given = tensors((1, 1, 8, 8, 1))
    huge = torch.zeros(8).as_strided((2**25, 64, 8), (0, 0, 1))
    with pytest.raises(
        ValueError, match=r"latent_cache.shape is \(33554432, 64, 8\); expected at most 2147483647 tokens"
    ):
        mla_append(**given | {"latent_cache": huge, "rope_cache": huge[:, :, None]})


ODD = (("q_pe", (11, 9)), ("k_pe", (11, 3)), ("rope_cache", (5, 4, 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "triton"}, "backend is 'triton'"),
        ({"backend": "tilelang"}, "backend is 'tilelang' for torch.float32 on cpu"),
        ({"q_pe": torch.zeros(11, 9, 18)}, r"k_pe.shape is \(11, 3, 16\); expected \[11, 3, 18\]"),
        ({name: torch.zeros(*shape, 15) for name, shape in ODD}, r"q_pe.shape is \(11, 9, 15\); expected .* even d_r"),
        ({"q_pe": torch.zeros(11, 8, 16)}, r"q_pe.shape is \(11, 8, 16\)|inv_freq.shape"),
        ({"q_pe": torch.zeros(11, 9, 16, dtype=torch.int32)}, "q_pe.dtype is torch.int32"),
        ({"k_pe": torch.zeros(11, 3, 16, dtype=torch.half)}, "k_pe.dtype is torch.float16"),
        ({"latent": torch.zeros(10, 48)}, r"latent.shape is \(10, 48\)"),
        ({"latent": torch.zeros(11, 40)}, r"latent_cache.shape is \(5, 4, 48\); expected \[5, 4, 40\]"),
        ({"rope_cache": torch.zeros(5, 4, 3, 8)}, r"rope_cache.shape is \(5, 4, 3, 8\)"),
        ({"rope_cache": torch.zeros(5, 4, 16, 3).mT}, "rope_cache.stride"),
        ({"latent_cache": torch.zeros(5, 4, 48, dtype=torch.half)}, "latent_cache.dtype is torch.float16"),
        ({"positions": torch.zeros(11, dtype=torch.int64)}, "positions.dtype is torch.int64"),
        ({"slots": torch.zeros(10, dtype=torch.int32)}, r"slots.shape is \(10,\); expected \[11\]"),
        ({"inv_freq": torch.zeros(2, 8)}, r"inv_freq.shape is \(2, 8\)"),
        ({"inv_freq": torch.zeros(3, 8, dtype=torch.half)}, "inv_freq.dtype is torch.float16"),
    ],
)
def test_refusals_name_the_argument(change, message):
    with pytest.raises(ValueError, match=message):
        mla_append(**tensors(SHAPES[0]) | change)


def test_opcheck():
    given = tensors(SHAPES[0])
    arguments = (given["latent"], given["k_pe"], given["q_pe"], *list(given.values())[3:], 1.0, False, False)
    torch.library.opcheck(torch.ops.mha2mla.rope_append.default, arguments)


@cache
def compiled_for_cpu(shape, interleaved, vector):
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.rope_append.kernel import make_rope_append

    function = make_rope_append(**static(shape), dtype="float32", interleaved=interleaved, vector=vector, on_cpu=True)
    configs = {"tirx.disable_vectorize": True}
    return tilelang.compile(function, target="c", target_host="c", execution_backend="cython", pass_configs=configs)


def static(shape):
    heads, groups, width, rope, tables = shape
    return {
        "heads": heads,
        "num_rope_heads": groups,
        "row_width": width,
        "qk_rope_head_dim": rope,
        "num_tables": tables,
        "page_size": PAGE,
    }


@few(
    "shape, interleaved, vector",
    [(SHAPES[0], True, 8), (SHAPES[2], False, 4), (WITHOUT_KEYS[0], False, 4), (SHAPES[1], True, 1)]
    + [(SHAPES[4], False, 8), *itertools.product(SHAPES[:3], (False, True), (1,))],
    count=4,
)
def test_kernel_on_the_cpu_target(shape, interleaved, vector):
    kernel = compiled_for_cpu(shape, interleaved, vector)
    for tokens in (1, 4, 11):
        given = tensors(shape, tokens)
        before, out = copied(given), torch.full_like(given["q_pe"], torch.nan)
        keys, rope_cache = given["k_pe"], given["rope_cache"].flatten(2)
        if not shape[1]:  # what is left out is passed as anything
            keys, rope_cache = given["q_pe"][:, :1].contiguous(), torch.zeros(PAGES, PAGE, shape[3])
        kernel(
            given["latent"], keys, *(given[name] for name in ("q_pe", "positions", "slots", "inv_freq")),
            given["latent_cache"], rope_cache, out, 1.3,
        )  # fmt: skip
        assert_right(before, given, out, 1.3, interleaved)


@few(
    "shape, interleaved",
    [((32, 32, 512, 16, 32), False), (SHAPES[0], True), ((0, 0, 80, 8, 1), False), ((128, 1, 512, 64, 1), False)]
    + [((9, 0, 0, 16, 3), True), ((4, 0, 48, 16, 1), False), *((shape, True) for shape in SHAPES[1:])],
    count=3,
)
def test_kernel_compiles_for_hopper(shape, interleaved):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernel_testing.compile_gate import compile_only, find_tool
    from mha2mla.kernels.compilation import EXACT_PASS_CONFIGS
    from mha2mla.kernels.rope_append.kernel import make_rope_append

    if find_tool("nvcc") is None:
        pytest.skip("there is no nvcc")
    alone = shape[4] == 32  # as launched with a table a head
    function = make_rope_append(
        **static(shape),
        dtype="bfloat16",
        interleaved=interleaved,
        vector=8,
        block_tokens=1 if alone else 4,
        dependent=alone,
    )
    (report,) = compile_only(function, "sm_90a", EXACT_PASS_CONFIGS)
    assert not report.complaints(48 * 1024)


@pytest.mark.gpu
@pytest.mark.parametrize(("combined", "interleaved", "scaling"), [(False, False, 1.0), (True, True, 1.3)])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    # Not every pair: the CPU target runs them all, and each takes two compilations a layout.
    list(zip(SHAPES, (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16, torch.bfloat16), strict=True)),
)
def test_kernel_on_the_gpu(shape, dtype, combined, interleaved, scaling):
    for tokens in (0, 1, 11):
        given = tensors(shape, tokens, dtype, combined=combined)
        before = copied(given)
        moved = {name: tensor.cuda() for name, tensor in given.items()}
        if combined:
            moved |= {
                name: tensors(shape, tokens, dtype, "cuda", True)[name] for name in ("latent_cache", "rope_cache")
            }
        out = mla_append(**moved, attention_scaling=scaling, interleaved=interleaved)
        after = {name: tensor.cpu() for name, tensor in moved.items()}
        assert_right(before, after, out.cpu(), scaling, interleaved)
        alone = rope_rotate(
            moved["q_pe"], moved["positions"], moved["inv_freq"], attention_scaling=scaling, interleaved=interleaved
        )
        assert torch.equal(alone, out)


@pytest.mark.parametrize(
    ("shape", "device"),
    [(shape, "cpu") for shape in SHAPES] + [pytest.param(SHAPES[i], "cuda", marks=pytest.mark.gpu) for i in (0, 3, 4)],
)
def test_parts_of_one_projection_are_read_where_they_lie(shape, device):
    """latent and k_pe beside each other in a row, and q_pe behind the un-rotated part of each head."""
    _, groups, width, rope, _ = shape
    given = {name: tensor.to(device) for name, tensor in tensors(shape, 11, torch.bfloat16).items()}
    before = copied({name: tensor.cpu() for name, tensor in given.items()})
    encoded = torch.cat((given["latent"], given["k_pe"].flatten(1)), dim=1)
    query = torch.cat((torch.full_like(given["q_pe"], torch.nan), given["q_pe"]), dim=2)
    given["latent"], k_pe = encoded.split((width, groups * rope), dim=1)
    given |= {"k_pe": k_pe.unflatten(1, (groups, rope)), "q_pe": query[..., rope:]}
    assert not given["q_pe"].is_contiguous()
    out = mla_append(**given)
    assert_right(before, {name: tensor.cpu() for name, tensor in given.items()}, out.cpu())


# The same, then columns of q_nope, and maps.
MAPPED = [((32, 32, 512, 16, 32), 112, 32), ((32, 1, 448, 64, 1), 64, 8), ((9, 3, 80, 16, 1), 24, 3)]


def queries(shape, tokens, inner, maps, device):
    """q_nope, part of a wider projection, and W_UK."""
    make = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, shape[0], inner + 16, generator=make).to(device, torch.bfloat16)
    return wide[..., :inner], torch.randn(maps, inner, shape[2], generator=make).to(device, torch.bfloat16)


@torch.no_grad()
def test_no_kernel_maps_beside_the_append_where_there_is_none():
    given = tensors(SHAPES[1], dtype=torch.bfloat16)
    before = copied(given)
    assert append_and_map(**given, q_nope=torch.zeros(11, 9, 24).bfloat16(), k_up=None) is None
    query, maps = queries(SHAPES[1], 11, 24, 3, "cpu")
    assert append_and_map(**given, q_nope=query, k_up=maps) is None
    assert torch.equal(given["latent_cache"], before["latent_cache"])


@few("shape, inner, maps", MAPPED, count=1)
def test_append_and_map_compiles_for_hopper(shape, inner, maps):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernel_testing.compile_gate import compile_only, find_tool
    from mha2mla.kernels.compilation import EXACT_PASS_CONFIGS
    from mha2mla.kernels.rope_append.with_maps import make_append_and_map

    if find_tool("nvcc") is None:
        pytest.skip("there is no nvcc")
    function = make_append_and_map(**static(shape), maps=maps, inner=inner, dtype="bfloat16", vector=8)
    (report,) = compile_only(function, "sm_90a", EXACT_PASS_CONFIGS)
    assert report.complaints(232_448) == [] and report.spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "inner", "maps"), MAPPED)
@torch.no_grad()
def test_append_and_map_is_both_to_the_bit(shape, inner, maps):
    """Also with positions that the kernel before writes, without rotary keys, and twice."""
    from mha2mla.kernels.skinny_linear.api import skinny_maps

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("there is no dependent launch before sm_90")
    for tokens, keys in ((1, True), (8, True), (12, True), (3, False)):
        given = {name: each.cuda() for name, each in tensors(shape, tokens, torch.bfloat16).items()}
        if not keys:
            given |= {"k_pe": None, "rope_cache": None}
        query, up = queries(shape, tokens, inner, maps, "cuda")
        plain = {name: each if each is None else each.clone() for name, each in given.items()}
        expected = mla_append(**plain), skinny_maps(query, up, backend="tilelang")
        for _ in range(2):
            given["positions"] = plain["positions"] + torch.zeros_like(plain["positions"])
            out = append_and_map(**given, q_nope=query, k_up=up)
            assert all(torch.equal(*pair) for pair in zip(out, expected, strict=True))
            assert torch.equal(given["latent_cache"], plain["latent_cache"])
            assert not keys or torch.equal(given["rope_cache"], plain["rope_cache"])
