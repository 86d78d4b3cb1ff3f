"""Decode problems of kernel tests: the numeric check as an assertion, random plans, compiled kernels by hand."""

from __future__ import annotations

import itertools
import random

import torch

from mha2mla.kernels import gqa_decode, mla_decode
from mha2mla.kernels.gqa_decode import selection as gqa_selection
from mha2mla.kernels.gqa_decode.api import GQA
from mha2mla.kernels.mla_decode import codes_selection
from mha2mla.kernels.mla_decode import selection as mla_selection
from mha2mla.kernels.mla_decode.api import LATENT_CODES, ROW_CODES
from mha2mla.kernels.split_kv.choice import FIELDS, KernelChoice
from mha2mla.kernels.split_kv.op import PagedOp
from mha2mla.kernels.split_kv.plan import LONGEST
from mha2mla.kernels.split_kv.reference import Fragment, attended_span, plan_fragments, write_schedule
from mha2mla.testing.kernel_check import schedule_error
from mha2mla.testing.numeric_check import errors
from mha2mla.testing.problems import UNUSED_PAGE, GQAProblem, PagedProblem, judge, with_keys


def assert_right(inputs: dict, out: torch.Tensor, lse: torch.Tensor | None, **visibility) -> None:
    judgement = judge(inputs, out, lse, **visibility)
    assert judgement.ok, judgement.reason


def name(problem: PagedProblem) -> str:
    return "-".join(f"{size}{number}" for size, number in problem.columns.items())


def decode(problem: PagedProblem, inputs: dict, **options):
    """The public op of the problem's call."""
    return (gqa_decode if isinstance(problem, GQAProblem) else mla_decode)(**inputs, **options)


def empty_out(problem: PagedProblem, inputs: dict) -> torch.Tensor:
    """An output of the problem's call, NaN."""
    q = inputs[problem.op.names[0]]
    width = problem.v_head_dim if isinstance(problem, GQAProblem) else problem.kv_lora_rank
    return q.new_full((*q.shape[:3], width), torch.nan)


def kernels_of(op: PagedOp, shape, capability: int) -> list[KernelChoice]:
    """Every configuration that could serve a shape, the rule's choice first."""
    if op is GQA:
        return gqa_selection.list_kernels(shape, capability)
    if op in (ROW_CODES, LATENT_CODES):
        return codes_selection.list_kernels(shape, capability, has_rope_cache=op is ROW_CODES)
    how = {"has_rope_cache": "rope_cache" in op.names}
    how |= {"codes": "latent_scale" in op.names, "key_codes": "rope_scale" in op.names}
    return mla_selection.list_kernels(shape, capability, **how)


def with_holes(inputs: dict, places: dict[tuple[int, int], int]) -> tuple[dict, dict]:
    """The call with table entries that are no page, and one with a page of zeros in each place: (row, entry) -> entry.

    Integer codes are dequantised in the second: no code is zero."""
    zeros = inputs if inputs.get("centers") is None else with_keys(inputs, inputs["q_latent"].dtype)
    holes, filled = inputs["block_table"].clone(), inputs["block_table"].clone()
    for number, (place, hole) in enumerate(places.items()):  # a page each: it belongs to one place
        holes[place], filled[place] = hole, len(inputs["latent_cache"]) + number
    names = ("latent_cache", "rope_cache", "rope_scale")
    caches = {name: zeros[name] for name in names if zeros.get(name) is not None}
    caches = {name: torch.cat((x, *[torch.zeros_like(x[:1])] * len(places))) for name, x in caches.items()}
    return inputs | {"block_table": holes}, zeros | caches | {"block_table": filled}


def poison_unseen_pages(problem: PagedProblem, inputs: dict) -> dict:
    """Also poisons table entries of pages that no query sees but that lie in a tile with a token that one sees."""
    table, storage = inputs["block_table"], getattr(problem, "storage", problem)
    seen = storage._seen(storage.capacity, table.device).view(*table.shape, problem.page_size).any(2)
    return inputs | {"block_table": torch.where(seen, table, UNUSED_PAGE)}


def random_work(tiles: list[int], num_ctas: int, draw: random.Random) -> list[list[Fragment]]:
    """A plan that no planner would make and every kernel must serve: sequences cut anywhere, fragments on any CTA in
    any order; only the slots of a sequence keep their rule (``schedule.splits_of``)."""
    work: list[list[Fragment]] = [[] for _ in range(num_ctas)]
    order, used = [b for b, n in enumerate(tiles) if n], 0  # CTAs whose even slot is taken
    draw.shuffle(order)
    last_odd = -1
    for b in order:
        odd = used > 0 and last_odd < used - 1 and draw.random() < 0.5  # begins in the second slot of the CTA before
        parts = min(tiles[b], draw.choice([1, 2, 3, tiles[b]]), num_ctas - used + odd)
        cuts = [0, *sorted(draw.sample(range(1, tiles[b]), max(0, parts - 1))), tiles[b]]
        if parts > 1:
            slots = [2 * (used - odd + k) + (odd and k == 0) for k in range(parts)]
            last_odd = used - 1 if odd else last_odd
            used += parts - odd
        for k, (first, stop) in enumerate(itertools.pairwise(cuts)):
            mine = work[draw.randrange(num_ctas)]
            mine.insert(
                draw.randint(0, len(mine)), Fragment(b, first, stop - first, -1 if len(cuts) == 2 else slots[k])
            )
    return work


def random_schedule_call(draw: random.Random) -> dict:
    """Arguments of a planner: lengths (many alike, many empty, far apart), starts, window, CTAs."""
    batch, longest = draw.randint(1, 150), draw.choice([1, 70, 300, 20000])
    lengths = [draw.choice([0, draw.randint(0, longest), draw.randint(0, longest)]) for _ in range(batch)]
    if draw.random() < 0.2:
        lengths = [draw.randint(1, longest)] * batch
    window = draw.choice([None, None, 1, 50, 64, 700])
    num_splits = draw.choice([0, 0, 0, 1, 2, 5, 40])
    return {
        "lengths": lengths,
        "starts": [draw.randint(0, max(1, length)) for length in lengths] if draw.random() < 0.3 else None,
        "num_ctas": batch * num_splits if num_splits else draw.choice([1, 2, 7, 33, 66, 132, 264]),
        "num_splits": num_splits,
        "capacity": draw.choice([20000, longest]),
        "seqlen_q": draw.choice([1, 1, 2, 8]),
        "causal": draw.random() < 0.7,
        "window": window,
        "sinks": draw.choice([0, 4, 64, 130]) if window else 0,
    }


def planner_error(planner, call: dict, device: str = "cpu") -> str:
    """The first difference of what a compiled planner writes from the oracle's."""
    lengths, starts, num_ctas = call["lengths"], call["starts"], call["num_ctas"]
    shared = [call[name] for name in ("capacity", "seqlen_q", "causal", "window", "sinks")]
    spans = [attended_span(length, starts[b] if starts else 0, *shared) for b, length in enumerate(lengths)]
    schedule = torch.full((num_ctas + len(lengths), FIELDS), -7, dtype=torch.int32, device=device)
    splits = torch.full((len(lengths), 2), -7, dtype=torch.int32, device=device)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    planner(
        seqlens, torch.tensor(starts, dtype=torch.int32, device=device) if starts else seqlens, schedule, splits,
        num_ctas, call["capacity"], call["seqlen_q"], int(call["causal"]), int(starts is not None),
        -1 if call["window"] is None else call["window"], call["sinks"], call["num_splits"],
    )  # fmt: skip
    return schedule_error(spans, num_ctas, call["num_splits"], schedule.cpu(), splits.cpu())


def run_kernels(
    problem: PagedProblem, split, merge, inputs: dict, num_ctas: int, work: list[list[Fragment]] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A compiled decode kernel and combine on one problem, every output and all workspace poisoned with NaN before.

    ``work`` None: what the planner makes of the lengths.
    """
    spans, out, tensors, last = problem.spans(), empty_out(problem, inputs), inputs, ()
    batch, seqlen_q, heads, width = out.shape
    if work is None:
        work = plan_fragments([span.tiles for span in spans], num_ctas)
    schedule, splits = (x.to(out.device) for x in write_schedule(spans, work, is_planned=False))
    sizes = ((num_ctas, 2, seqlen_q, heads, width), (num_ctas, 2, seqlen_q, heads), (batch, heads, seqlen_q))
    partial_out, partial_lse, lse = (out.new_full(size, torch.nan, dtype=torch.float32) for size in sizes)
    if (rope := inputs.get("rope")) is not None:
        offsets = inputs["block_table"] if rope.page_offsets is None else rope.page_offsets
        tensors = inputs | {
            "rope_weight": rope.weight, "rope_bias": rope.bias, "inv_freq": rope.inv_freq, "page_offsets": offsets,
        }  # fmt: skip
        last = float(rope.scaling), int(rope.page_offsets is not None)
    if inputs.get("rope_cache") is not None:
        tensors = tensors | {"rope_cache": inputs["rope_cache"].flatten(2)}
    if "centers" in inputs:
        tensors = tensors | {"latent_cache": inputs["latent_cache"].flatten(1)}
    split(
        *(tensors[name] for name in problem.op.names), inputs["block_table"], schedule, partial_out, partial_lse, out,
        lse, inputs["softmax_scale"], int(inputs["causal"]), LONGEST if problem.window is None else problem.window,
        problem.sinks, *last,
    )  # fmt: skip
    merge(splits, partial_out, partial_lse, out, lse)
    return out, lse


def per_head(tokens, heads, weights, inner, outer, dtype=torch.float32, device="cpu"):
    """x [tokens, heads, inner], part of a wider projection, and weights [weights, inner, outer]."""
    make = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, heads, inner + 16, generator=make).to(device, dtype)[..., 16:]
    return x, torch.randn(weights, inner, outer, generator=make).mul(inner**-0.5).to(device, dtype)


def assert_as_near_as_torch(out, plain, exact):
    """At most twice the error of ``plain``, torch's at the same dtype, against float64."""
    assert errors(out, exact)[0] <= 2 * errors(plain, exact)[0]
