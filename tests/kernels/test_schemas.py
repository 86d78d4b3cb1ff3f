"""Every op as torch sees it, in calls of the public functions: what schema and fake say, one compiled graph."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mha2mla.kernels import (
    RowQuantizer,
    append_codes,
    attention_combine,
    causal_attention,
    gqa_attention,
    mla_append,
    read_codes,
    rms_norm,
    silu_mul,
    skinny_linear,
)
from mha2mla.testing.prefill_problems import PrefillProblem
from mha2mla.testing.problems import (
    GQAProblem,
    KeyCodesProblem,
    LatentCodesProblem,
    LatentProblem,
    Problem,
    RowCodesProblem,
)
from tests.kernels.attention_varlen.problems import call as prefill
from tests.kernels.mixed_attention.problems import SCALE, WIDTHS, gqa_plan, gqa_problem
from tests.kernels.mixed_attention.problems import Problem as MixedProblem
from tests.kernels.problems import decode, empty_out
from tests.kernels.rope_append.problems import PAGE, PAGES, SHAPES, tensors

PAGED = {"lengths": (0, 1, 70), "page_size": 16, "seqlen_q": 2}
DECODED = [
    Problem(6, 3, 24, 8, **PAGED),
    Problem(6, 3, 32, 8, **PAGED, window=5, sinks=2),
    Problem(4, 2, 32, 8, **PAGED, codes=True),
    LatentProblem(6, 1, 24, 8, **PAGED, scaling=1.3),
    LatentProblem(6, 1, 32, 8, **PAGED, shuffled=True, codes=True),
    KeyCodesProblem(6, 1, 24, 16, **PAGED),
    RowCodesProblem(6, 1, 64, 8, **PAGED),
    LatentCodesProblem(6, 1, 64, 8, **PAGED),
    GQAProblem(6, 2, 24, 16, **PAGED),
]
PREFILLED = [
    PrefillProblem(9, (16,), (3,), 24, ((2, 3), (4, 4))),
    PrefillProblem(4, (16, 8), (4, 1), 24, ((2, 3), (4, 4)), window=2, sinks=1),
]
E4M3 = torch.float8_e4m3fn


class Made(TorchDispatchMode):
    """Calls of this package's ops: (op, arguments as they were before it wrote to them)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mha2mla":
            self.calls.append((func, [x.clone() if isinstance(x, torch.Tensor) else x for x in args]))
        return func(*args, **(kwargs or {}))


def decoded(problem):
    inputs = problem.inputs(torch.float32)
    inputs |= {name: inputs[name].nan_to_num() for name in ("latent_scale", "rope_scale") if name in inputs}
    plan = problem.plan(inputs)
    plan.splits.fill_(-7)
    plan.refresh(inputs["cache_seqlens"], inputs["cache_starts"])
    decode(problem, inputs, plan=plan, return_lse=True)
    if problem.window is None:  # which a plan says
        decode(problem, inputs), decode(problem, inputs, out=empty_out(problem, inputs))


def prefilled(problem):
    inputs = problem.inputs(torch.float32)
    out = torch.empty(len(inputs["queries"][0]), problem.heads, problem.v_head_dim)
    prefill(problem, inputs), prefill(problem, inputs, out=out)


def mixed():
    for widths in ("per group", "from the latent"):
        MixedProblem.make(WIDTHS[widths]).run()
    batch, query, keys, values = gqa_problem()
    gqa_attention(query, keys, values, gqa_plan(batch, keys, values), softmax_scale=SCALE)


def windows():
    q, k, v = (torch.randn(2, 6, 3, width, requires_grad=True) for width in (32, 32, 16))
    causal_attention(q, k, v, softmax_scale=0.3).sum().backward()


def appended():
    given = tensors(SHAPES[0])
    mla_append(**given)
    codes, scale = given["latent_cache"].to(E4M3), torch.zeros(PAGES, PAGE)
    mla_append(**given | {"latent_cache": codes, "latent_scale": scale})
    given |= {"k_pe": given["k_pe"][:, :1], "rope_cache": given["rope_cache"][:, :, :1].to(torch.int8)}
    mla_append(**given | {"inv_freq": given["inv_freq"][:1]}, rope_scale=scale)
    places, inv_freq = torch.arange(5).int(), torch.rand(4)
    torch.ops.mha2mla.rotate_keys(torch.randn(5, 8), places, inv_freq, 1.3, False)  # a GPU's, as the next
    torch.ops.mha2mla.rotary_keys(torch.randn(5, 16), torch.randn(8, 16), torch.randn(8), places, inv_freq, 1.3, False)


def coded():
    quantizer, latent, centers = RowQuantizer(4), torch.randn(11, 64), torch.randn(2, 64)
    quantizer.round(torch.randn(64, 11).T), quantizer.round(latent.double()[:, 32:], backend="reference")
    for each in (quantizer, RowQuantizer(8)):
        each.decode(each.encode(latent.view(11, 2, 32)).transpose(0, 1), 32)
    torch.ops.mha2mla.codes_of_chains(torch.randn(16, 5).T, 3, False)
    cache = torch.zeros(PAGES, PAGE, quantizer.bytes_per_row(64), dtype=torch.uint8)
    append_codes(latent, cache, torch.arange(11).int(), quantizer, centers)
    read_codes(cache, torch.arange(4).int().view(2, 2), 64, quantizer, centers, torch.float32)


def pointwise():
    x, weight = torch.randn(2, 5, 16)
    rms_norm(x, weight[0], 1e-5, residual=weight), rms_norm(x, weight[0], 1e-5), silu_mul(x, weight)
    for gated in (False, True):
        skinny_linear(x[:3, None], weight[:4], gated=gated)
    attention_combine(torch.randn(3, 2, 1, 2, 8), torch.randn(3, 2, 2, 1), torch.tensor([1, 3]).int())


CALLS = {
    **{f"{problem.op.name}-{i}": lambda problem=problem: decoded(problem) for i, problem in enumerate(DECODED)},
    **{f"prefill-{len(p.widths)}": lambda p=p: prefilled(p) for p in PREFILLED},
    **{call.__name__: call for call in (mixed, windows, appended, coded, pointwise)},
}


def made_by(name: str) -> list[tuple]:
    with Made() as made:
        CALLS[name]()
    return made.calls


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_what_schema_and_fake_say(name):
    for op, arguments in made_by(name):
        if "append" in op.name():  # torch compares no e4m3 numbers on a CPU
            arguments = [x.view(torch.uint8) if getattr(x, "dtype", None) == E4M3 else x for x in arguments]
        if "find_codes" in op.name():  # rows of NaN are coded as NaN, which is compared as different
            arguments = [x.nan_to_num() if isinstance(x, torch.Tensor) else x for x in arguments]
        compared = all(getattr(x, "dtype", None) != E4M3 for x in arguments)
        some = {} if compared else {"test_utils": ("test_faketensor", "test_autograd_registration")}
        torch.library.opcheck(op, arguments, **some)


def test_every_op_is_called():
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("mha2mla::")}
    registered = {name for name in registered if not name.startswith("mha2mla::test_")}  # other tests' own
    assert registered == {op.name() for name in CALLS for op, _ in made_by(name)}


@pytest.mark.parametrize("problem", DECODED, ids=lambda problem: problem.op.name)
def test_decode_compiles_into_one_graph(problem, fresh_dynamo):
    """With a plan that is refreshed in it, without one, and of GQA with one that is made in it."""
    inputs = problem.inputs(torch.float32)
    plan = problem.plan(inputs)

    def step(i):
        plan.refresh(i["cache_seqlens"], i["cache_starts"])
        plans = [plan, None, problem.plan(i)] if isinstance(problem, GQAProblem) else [plan, None]
        return [decode(problem, i, plan=each, return_lse=True) for each in plans]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs), step(inputs), rtol=0, atol=0, equal_nan=problem.window is not None)
