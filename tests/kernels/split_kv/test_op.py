"""Consequences of declaring a paged op, on one that nothing else uses: keys that are their own values."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from mha2mla.kernels.ops import Argument
from mha2mla.kernels.split_kv import launch as kernels
from mha2mla.kernels.split_kv import op as frame
from mha2mla.kernels.split_kv.op import PagedOp
from mha2mla.kernels.split_kv.plan import MOST_LAUNCHES, DecodePlan, allocate_plan


@dataclass(frozen=True)
class Shape:
    heads: int
    width: int
    page_size: int
    seqlen_q: int
    dtype: str


def own_values(q, cache, scale, block_table, cache_seqlens, *, softmax_scale, causal, cache_starts, window, sinks):
    """The oracle: the mean of all tokens, whatever the query."""
    length = int(cache_seqlens[0])
    mean = (cache * scale[..., None, None])[block_table[0].long()].flatten(0, 1)[:length].mean((0, 1))
    return mean.expand_as(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])


def select(shape, capability):
    if shape.width > 64:
        raise ValueError(f"width is {shape.width}; nothing fits")
    return SimpleNamespace(num_ctas=lambda sms: sms)


OP = PagedOp(
    name="test_own_values",
    arguments=(
        Argument("q", "B S_q H d"),
        Argument("cache", "P page (G|H d)"),
        Argument("scale", "P page", torch.float32),
    ),
    out=Argument("out", "B S_q H d"),
    shape=Shape,
    static=("H", "d", "page", "S_q"),
    refusal=lambda shape: "dtype is float32" if shape.dtype == "float32" else None,
    select=select,
    package="nowhere",
    reference=f"{__name__}:own_values",
)


def inputs(dtype: torch.dtype = torch.float32) -> dict:
    return {
        "data": (torch.randn(1, 2, 4, 8, dtype=dtype), torch.randn(3, 16, 2, 8, dtype=dtype), torch.full((3, 16), 2.0)),
        "block_table": torch.tensor([[2, 0]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([20], dtype=torch.int32),
    }


def call(data, block_table, cache_seqlens, backend=None, plan=None, out=None):
    return OP(data, block_table, cache_seqlens, None, 1.0, True, backend, plan, out, False)


def test_its_schemas_follow():
    tensors = "Tensor q, Tensor cache, Tensor scale, Tensor block_table, Tensor cache_seqlens, Tensor? cache_starts"
    schema = str(torch.ops.mha2mla.test_own_values.default._schema)
    assert schema.startswith(f"mha2mla::test_own_values({tensors}, float softmax_scale") and "-> (Tensor, T" in schema
    schema = str(torch.ops.mha2mla.test_own_values_out.default._schema)
    assert "Tensor(a!)? partial_out, Tensor(b!)? partial_lse, Tensor(c!) out, Tensor(d!) lse) -> ()" in schema


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[0], r"q.shape is \(2, 4, 8\); expected \[B, S_q, H, d\]"),
        (1, lambda x: x[..., :4], r"cache.shape is \(3, 16, 2, 4\); expected \[3, 16, 2, 8\]"),
        (
            1,
            lambda x: x[:, :, :1].expand(-1, -1, 3, -1).contiguous(),
            r"cache.shape is \(3, 16, 3, 8\); expected \[3, 16, a divisor of 4, 8\]",
        ),
        (1, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), r"cache.stride\(2\) is 128; expected 8"),
        (2, lambda x: x.double(), "scale.dtype is torch.float64; expected torch.float32"),
        (2, lambda x: x[:2], r"scale.shape is \(2, 16\); expected \[3, 16\]"),
    ],
)
def test_a_size_has_one_value_in_all_arguments(index, change, message):
    given = inputs()
    data = list(given.pop("data"))
    data[index] = change(data[index])
    with pytest.raises(ValueError, match=message):
        call(tuple(data), **given)


def test_rows_are_of_16_bytes_by_each_tensors_own_numbers():
    given = inputs(torch.bfloat16)
    q, cache, _ = given.pop("data")
    with pytest.raises(ValueError, match=r"scale.stride\(0\) is 18; expected a multiple of 4 elements \(16 bytes\)"):
        call((q, cache, torch.ones(3, 18)[:, :16]), **given)


def test_its_oracle_serves_where_no_kernel_does():
    given = inputs()
    q, cache, _ = given["data"]
    expected = 2 * torch.cat((cache[2], cache[0]))[:20].mean((0, 1)).expand_as(q)
    plan = OP.plan(
        {"B": 1, "S_q": 2, "H": 4, "d": 8, "page": 16}, q, given["block_table"], given["cache_seqlens"], None, True,
        None, 0, None,
    )  # fmt: skip
    assert plan.num_ctas == 0 and plan.shape == (1, 2, 4, 8)
    for made in (call(**given), call(**given, plan=plan), call(**given, out=torch.empty_like(q))):
        torch.testing.assert_close(made, expected)
    with pytest.raises(ValueError, match="which refuses this call: dtype is float32"):
        call(**given, backend="tilelang")


def test_what_select_says_is_the_reason(monkeypatch):
    monkeypatch.setattr(frame, "capability", lambda _: 90)
    shape = Shape(4, 8, 16, 3, "bfloat16")
    assert OP.explain(shape, "cpu") == "device is cpu; TileLang kernels run on CUDA devices"
    assert OP.explain(shape, "cuda:0") is None
    assert OP.explain(Shape(4, 72, 16, 1, "bfloat16"), "cuda:0") == "width is 72; nothing fits"
    assert frame.compiled_shape(shape).seqlen_q == 4


@pytest.fixture
def launched(monkeypatch):
    """Arguments of stand-in kernels, which refuse other dtypes and sizes as TileLang's host code does.
    The op is served by them on a CPU."""
    calls = []

    def split(*tensors):
        q, cache, scale, block_table, _, partials, _, out, *_ = tensors
        right = q.dtype == cache.dtype == out.dtype == torch.bfloat16 and scale.dtype == torch.float32
        same = q.shape == out.shape and q.shape[1] == partials.shape[2] and cache.shape[:2] == scale.shape
        if not right or not same or len(block_table) != len(q):
            raise RuntimeError("kernel violates packed ABI constraint")
        calls.append(("split", tensors))

    def chosen(*_):
        return split, lambda *tensors: calls.append(("merge", tensors))

    monkeypatch.setattr(frame, "dispatch", lambda op, backend, *call: (Shape(*call[:-2], "bfloat16"), None))
    monkeypatch.setattr(kernels, "compile_kernels", chosen)
    monkeypatch.setattr(kernels, "on_device", lambda _: nullcontext())
    return calls


def planned() -> DecodePlan:
    return allocate_plan((1, 2, 4, 8), 3, 32, True, None, 0, torch.device("cpu"))


def test_kernels_get_what_lies_side_by_side_as_one_dimension(launched):
    given = inputs(torch.bfloat16)
    plan = planned()
    for _ in range(2):  # checked, and remembered
        call(**given, plan=plan)
    (_, split), (_, merge), (_, again), (_, merge_again) = launched
    mine = [torch.from_dlpack(x) for x in (again[4], again[5], again[6], again[8], merge_again[0])]
    theirs = (plan.schedule, plan.partial_out, plan.partial_lse, plan.lse, plan.splits)
    assert [x.data_ptr() for x in mine] == [x.data_ptr() for x in theirs]
    assert [x.shape for x in split[:4]] == [(1, 2, 4, 8), (3, 16, 16), (3, 16), (1, 2)]
    assert split[4] is plan.schedule and split[8] is plan.lse and merge[0] is plan.splits
    assert again[9:] == split[9:] == (1.0, 1, 2**30, 0)
    assert [tuple(x.shape) for x in again[:9]] == [tuple(x.shape) for x in split[:9]]
    assert len(merge) == len(merge_again) == 5
    assert again[7] is merge_again[3] is not split[7]  # an output of its own


def test_a_plan_remembers_calls_and_checks_those_that_differ(launched):
    given = inputs(torch.bfloat16)
    q, cache, scale = given.pop("data")
    plan = planned()
    call((q, cache, scale), **given, plan=plan)
    call((q.clone(), cache.clone(), scale.clone()), **given, plan=plan)
    assert len(plan.memory.launches) == 1 and len(launched) == 4
    unaligned = torch.ones(65).bfloat16()[1:].view_as(q)
    for message, data in {
        r"plan was made for \[B, S_q, H, d\] = \(1, 2, 4, 8\); expected \(1, 1, 4, 8\)": (q[:, :1], cache, scale),
        "cache.dtype is torch.float16; expected torch.bfloat16": (q, cache.half(), scale),
        r"cache.stride\(2\) is 128; expected 8": (q, cache.transpose(1, 2).contiguous().transpose(1, 2), scale),
        r"cache.shape is \(3, 16, 4, 4\); expected \[3, 16, 4, 8\]": (q, cache.view(3, 16, 4, 4), scale),
        r"scale.shape is \(2, 16\); expected \[3, 16\]": (q, cache, scale[:2]),
        r"q.data_ptr\(\) is \d+; expected a multiple of 16": (unaligned, cache, scale),
    }.items():
        with pytest.raises(ValueError, match=message):
            call(data, **given, plan=plan)
    with pytest.raises(ValueError, match=r"out.shape is \(2, 2, 4, 8\); expected \[1, 2, 4, 8\]"):
        call((q, cache, scale), **given, plan=plan, out=torch.empty(2, 2, 4, 8).bfloat16())
    with pytest.raises(ValueError, match="cache_seqlens.dtype is torch.int64; expected torch.int32"):
        call((q, cache, scale), given["block_table"], given["cache_seqlens"].long(), plan=plan)
    with pytest.raises(ValueError, match=r"max_pages \* page = 32; expected 16"):
        call((q, cache, scale), given["block_table"][:, :1].contiguous(), given["cache_seqlens"], plan=plan)
    with pytest.raises(ValueError, match="plan was made for causal=True; expected False"):
        OP((q, cache, scale), *given.values(), None, 1.0, False, None, plan, None, False)
    with pytest.raises(ValueError, match="softmax_scale is -1.0; expected a positive"):
        OP((q, cache, scale), *given.values(), None, -1.0, True, None, plan, None, False)
    assert len(launched) == 4 and len(plan.memory.launches) == 1


def test_other_indices_are_checked_unless_they_lie_as_those_before(launched):
    given = inputs(torch.bfloat16)
    plan = planned()
    call(**given, plan=plan)
    call(**given | {"cache_seqlens": given["cache_seqlens"].clone()}, plan=plan)
    call(**given | {"block_table": given["block_table"].clone()}, plan=plan)
    assert len(plan.memory.launches) == 1 and len(launched) == 6
    OP(*given.values(), torch.zeros(1, dtype=torch.int32), 1.0, True, None, plan, None, False)  # cache_starts
    assert len(plan.memory.launches) == 1 and len(launched) == 8
    with pytest.raises(ValueError, match=r"cache_seqlens.shape is \(2,\); expected \[1\]"):
        call(**given | {"cache_seqlens": given["cache_seqlens"].repeat(2)}, plan=plan)


def test_a_call_that_asks_for_lse_keeps_it(launched):
    given = inputs(torch.bfloat16)
    plan = planned()
    _, mine = OP(*given.values(), None, 1.0, True, None, plan, None, True)
    call(**given, plan=plan)
    _, again = OP(*given.values(), None, 1.0, True, None, plan, None, True)
    first, second, third = [tensors[8] for name, tensors in launched if name == "split"]
    assert first is mine and third is again and again is not mine
    assert torch.from_dlpack(second).data_ptr() not in (mine.data_ptr(), again.data_ptr())


def test_a_copy_of_a_plan_remembers_nothing(launched):
    given = inputs(torch.bfloat16)
    plan = planned()
    for each in (plan, plan, copied := deepcopy(plan), copied):
        call(**given, plan=each)
    pointers = {torch.from_dlpack(tensors[4]).data_ptr() for name, tensors in launched if name == "split"}
    assert pointers == {plan.schedule.data_ptr(), copied.schedule.data_ptr()} and len(pointers) == 2


def test_a_cache_that_is_gone_is_not_kept(launched):
    given = inputs(torch.bfloat16)
    q, cache, scale = given.pop("data")
    plan, other = planned(), cache.clone()
    for each in (cache, cache, other, other):
        call((q, each, scale), **given, plan=plan)
    pointers = [tensors[1].data_ptr() for name, tensors in launched if name == "split"]
    assert pointers == [cache.data_ptr()] * 2 + [other.data_ptr()] * 2
    (launch,) = plan.memory.launches.values()
    assert len(launch.rows) == 2
    del other, each
    assert len(launch.rows) == 1


def test_an_output_is_dense_whatever_the_query_is(launched):
    given = inputs(torch.bfloat16)
    _, cache, scale = given.pop("data")
    query, plan = torch.randn(1, 4, 2, 8).bfloat16().transpose(1, 2), planned()
    for _ in range(2):
        out = call((query, cache, scale), **given, plan=plan)
        assert out.is_contiguous() and out.shape == query.shape and not query.is_contiguous()


def test_what_a_plan_remembers_is_bounded(launched):
    given = inputs(torch.bfloat16)
    plan = planned()
    for scale in range(1, 2 * MOST_LAUNCHES):
        OP(*given.values(), None, float(scale), True, None, plan, None, False)
        assert 1 <= len(plan.memory.launches) <= MOST_LAUNCHES
    assert [split[9] for name, split in launched if name == "split"] == [*range(1, 2 * MOST_LAUNCHES)]
