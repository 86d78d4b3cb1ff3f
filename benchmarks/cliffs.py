"""Decode of random geometries in both layouts on a GPU, and the worst ten beside what limits them.

    python benchmarks/cliffs.py --seconds 150 --json cliffs.json
    python benchmarks/cliffs.py --seconds 150 --seed 0 --beside cliffs.json    # the same geometries as an earlier run

Issue 34's shapes come first, then geometries drawn from the seed, each of about 200 MB of cache. Of a layout that makes
rotary keys from the latent both ways are timed: keys computed, and kept beside as many tokens; of several new tokens
also the call with one; of some named shapes other kernels than the rule's (``of_rule``: their time over its). Each
result is checked against float64 on some of its sequences before it is timed.

``limit_us`` is the larger of bytes / R and products / 800 TFLOP/s, and ``binds`` says which; ``over`` is the time with
a dirty L2 over it, ``graph_over`` the time in a CUDA graph; ``of_one`` the time over that of one new token.
"""

from __future__ import annotations

import itertools
import json as json_files
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Row, read_rate, start_measuring
from benchmarks.recording import Recording, asks_for_cpu, command
from benchmarks.runner import PIPE_WIDTH
from benchmarks.shapes import decode_case, with_kept_keys
from mha2mla.eval.report import print_table
from mha2mla.kernels import DecodePlan, mla_decode
from mha2mla.kernels.mla_decode.api import LATENT
from mha2mla.kernels.mla_decode.cost import PRODUCTS, decode_seconds, kept_key_bits
from mha2mla.kernels.mla_decode.selection import list_kernels
from mha2mla.kernels.ops import num_sms
from mha2mla.kernels.parallel_compilation import (
    COMPILE_TIMEOUT,
    OUT_OF_TIME,
    CompileJob,
    compile_launches,
    run_in_workers,
)
from mha2mla.kernels.split_kv.choice import HOPPER, KernelChoice
from mha2mla.kernels.split_kv.op import compiled_shape
from mha2mla.testing.kernel_check import plan_for
from mha2mla.testing.problems import LatentProblem, Problem, judge
from mha2mla.testing.timing import time_callable

CACHE_BYTES = 200e6
COMPILING = 0.58  # of the seconds
WORST = 2.2  # times its limit that one new token may take, with at most 64 heads
MANY = 1.6  # times the call with one new token that several may take, with at most 64 rows (128 of stored keys)
# H, G (0: keys from the latent), d_c, d_r, page_size, S_q
NAMED = (
    (14, 0, 128, 64, 64, 1), (32, 0, 384, 64, 64, 1), (24, 0, 640, 64, 64, 1), (32, 0, 1000, 64, 64, 1),
    (9, 0, 176, 128, 64, 1), (64, 0, 512, 64, 32, 1), (40, 0, 448, 128, 64, 1), (28, 0, 512, 128, 64, 4),
    (28, 28, 384, 8, 64, 1), (48, 6, 264, 40, 32, 1), (24, 8, 576, 24, 64, 1), (32, 8, 960, 8, 64, 1),
    (10, 10, 168, 24, 64, 1), (64, 1, 768, 64, 64, 1), (36, 4, 1024, 32, 64, 1), (80, 8, 320, 16, 64, 1),
    (5, 5, 512, 64, 64, 5), (28, 0, 1024, 128, 64, 1), (40, 1, 512, 128, 64, 1), (28, 1, 512, 128, 64, 4),
    (9, 0, 192, 128, 64, 4), (7, 7, 960, 72, 64, 1), (60, 5, 640, 56, 32, 1), (28, 28, 1024, 16, 64, 1),
)  # fmt: skip
# Of these shapes also kernels that the rule does not choose: kernel, tiles of query rows, variant.
OTHERS = {
    (80, 8, 320, 16, 64, 1): (("swap_ab_ws", 3, ""), ("heads_on_m", 2, "lazy")),
    (5, 5, 512, 64, 64, 5): (("heads_on_m", 5, "lazy"),),
    (64, 1, 768, 64, 64, 1): tuple(("swap_ab_cluster", *way) for way in ((1, ""), (2, ""))),
    (36, 4, 1024, 32, 64, 1): tuple(("swap_ab_cluster", *way) for way in ((1, "narrow"), (2, ""))),
    (40, 1, 512, 128, 64, 1): (("swap_ab_cluster", 1, ""), ("swap_ab_cluster", 1, "narrow")),
    (28, 1, 512, 128, 64, 4): (("swap_ab_cluster", 2, ""),),
    (9, 0, 192, 128, 64, 4): (("latent_ws", 2, ""),),
    (7, 7, 960, 72, 64, 1): (("swap_ab_cluster", 4, ""),),
    (60, 5, 640, 56, 32, 1): (("swap_ab_cluster", 2, ""),),
    (28, 28, 1024, 16, 64, 1): (("swap_ab_cluster", 2, ""),),
}
COLUMNS = (
    "name", "kernel", "rows", "tiles", "ctas_per_sm", "MB", "us", "modelled_us", "graph_us", "limit_us", "binds",
    "over", "graph_over", "of_one", "of_computed", "of_rule", "before_us", "auto", "error", "status",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call to time, by the rule's choice or, where it is not None, by the first of ``kernel``, tiles and variant."""

    problem: Problem
    kernel: tuple[str, int, str] | None = None

    @property
    def name(self) -> str:
        return decode_case(self.problem).name + (" {} {} tiles {}".format(*self.kernel).rstrip() if self.kernel else "")

    def choice(self) -> KernelChoice:
        op, shape = self.problem.op, compiled_shape(self.problem.shape())
        if self.kernel is None:
            return op.select(shape, HOPPER)
        listed = list_kernels(shape, HOPPER, has_rope_cache=op is not LATENT)
        return next(
            choice for choice in listed if (choice.kernel, choice.tiling.num_tiles, choice.variant) == self.kernel
        )

    def job(self) -> CompileJob:
        """Its kernels, for this machine's GPU."""
        choice, batch = self.choice(), len(self.problem.lengths)
        launch = choice, choice.num_ctas(num_sms(torch.device("cuda", torch.cuda.current_device()))), batch
        return CompileJob(self.problem.op.name, compiled_shape(self.problem.shape()), HOPPER, (launch,))


def problem_of(
    heads: int, groups: int, d_c: int, d_r: int, page: int, seqlen_q: int, batch: int = 64, size: float = CACHE_BYTES
) -> Problem:
    """A call over ``size`` bytes; ``groups`` 0: keys are made from the latent."""
    made = LatentProblem if groups == 0 else Problem
    length = max(seqlen_q, round(size / (2 * (d_c + groups * d_r) * batch)))
    return made(heads, max(1, groups), d_c, d_r, (length,) * batch, page_size=page, seqlen_q=seqlen_q, slack=0)


def draw(seed: int, number: int, size: float = CACHE_BYTES) -> Problem:
    """Geometry ``number`` of a seed; one that kernels refuse by name is drawn again."""
    rng = random.Random(f"{seed}/{number}")
    while True:
        heads = rng.choice((*[rng.randint(1, 64)] * 5, rng.randint(65, 128)))
        divisors = [groups for groups in range(1, heads + 1) if heads % groups == 0]
        groups = rng.choice((0, 0, 0, heads, *[rng.choice(divisors)] * 2))
        d_c = 8 * rng.choice((rng.randint(8, 128), rng.randint(8, 64), 8 * rng.randint(1, 16)))
        d_r = 8 * rng.randint(1, max(1, min(16, 512 // max(1, groups) // 8)))
        d_r = rng.choice((32, 64, 128, d_r)) if groups <= 1 else d_r
        page, seqlen_q = rng.choice((16, 32, 64, 64, 128)), rng.choice((1, 1, 1, rng.randint(2, 8)))
        batch = rng.choice((1, 8, 32, 64, 64, 128))
        problem = problem_of(heads, groups, d_c, d_r, page, seqlen_q, batch, size)
        if all(call.problem.op.explain(call.problem.shape(), "cuda") is None for call in calls_of(problem)):
            return problem


def calls_of(problem: Problem) -> list[Call]:
    """What is timed of a geometry: keys computed and kept, of one new token and of all; then other kernels."""
    ways = [problem, with_kept_keys(problem)] if isinstance(problem, LatentProblem) else [problem]
    calls = [Call(replace(way, seqlen_q=tokens)) for tokens in dict.fromkeys((1, problem.seqlen_q)) for way in ways]
    groups = 0 if isinstance(problem, LatentProblem) else problem.num_rope_heads
    sizes = problem.heads, groups, problem.kv_lora_rank, problem.qk_rope_head_dim, problem.page_size, problem.seqlen_q
    return calls + [Call(problem, kernel) for kernel in OTHERS.get(sizes, ())]


def launched(call: Call, inputs: dict[str, Any], plan: DecodePlan, out: torch.Tensor) -> Callable[..., Any]:
    """The call by its own choice, after a first run; takes ``return_lse`` as the op does."""
    from mha2mla.kernels.split_kv.launch import launch

    op, choice, rope = call.problem.op, call.choice(), inputs.get("rope")
    plan = plan_for(plan, choice.num_ctas(num_sms(out.device)))
    plan.refresh(inputs["cache_seqlens"], inputs["cache_starts"])
    given = inputs
    if rope is not None:
        given = inputs | {"rope_weight": rope.weight, "rope_bias": rope.bias}
        given |= {"inv_freq": rope.inv_freq, "page_offsets": rope.page_offsets}
    data, table = tuple(given[name] for name in op.names), inputs["block_table"]
    window, sinks, *buffers = plan.buffers
    settings = inputs["softmax_scale"], inputs["causal"], window, sinks, *(() if rope is None else (rope.scaling,))
    batch, seqlen_q, heads, _ = out.shape
    lse = torch.empty(batch, heads, seqlen_q, device=out.device)
    made = launch(op, compiled_shape(call.problem.shape()), choice, data, table, settings, buffers, out, lse).kept()
    return lambda return_lse=False: (made(data, table, out, lse), (out, lse))[1]


def sampled(inputs: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """The same call of some of its sequences, over a cache of their pages."""
    table = inputs["block_table"][rows]
    used = table < inputs["latent_cache"].shape[0]
    pages, small = table[used].long(), table.clone()
    small[used] = torch.arange(len(pages), dtype=table.dtype, device=table.device)
    caches = {name: inputs[name][pages] for name in ("latent_cache", "rope_cache") if inputs[name] is not None}
    of_rows = {name: inputs[name][rows] for name in ("q_latent", "q_pe", "cache_seqlens")}
    return inputs | of_rows | caches | {"block_table": small}


@torch.inference_mode()
def measure(call: Call | None, seconds: float, device: str = "cuda:0") -> Row:
    """What a call's check and its timing found; for None the read rate R."""
    if call is None:
        return {"R": 4e9, "R_from": "no GPU"} if device == "cpu" else read_rate()
    problem = call.problem
    backend = "reference" if device == "cpu" else "tilelang"
    inputs = problem.inputs(torch.bfloat16, device)
    plan, out = problem.plan(inputs, backend), torch.full_like(inputs["q_latent"], torch.nan)
    ours = partial(mla_decode, **inputs, plan=plan, out=out, backend=backend)
    if call.kernel is not None and backend == "tilelang":
        ours = launched(call, inputs, plan, out)
    _, lse = ours(return_lse=True)
    rows = sorted({0, len(problem.lengths) // 2, len(problem.lengths) - 1})
    judgement = judge(sampled(inputs, rows), out[rows], lse[rows])
    found: Row = {"error": judgement.error, "status": "ok" if judgement.ok else f"wrong: {judgement.reason}"}
    if backend == "tilelang":
        choice = call.choice()
        found |= choice.configuration() | {"tiles": choice.tiling.num_tiles, "reason": choice.reason}
    if judgement.ok:
        timing = time_callable(ours, device, min_run_time=seconds)
        found |= {"us": timing.p50, "graph_us": timing.graph}
    return found


def complete(call: Call, found: Row, rate: float, others: dict[Call, Row], before: dict[str, float]) -> Row:
    """A call's row with its limit, and beside the calls it is compared with: ``others``, and an earlier run's."""
    problem = call.problem
    limits = {"bytes": problem.cache_bytes() / rate * 1e6, "products": problem.flops() / PRODUCTS * 1e6}
    binds = max(limits, key=limits.__getitem__)
    row: Row = {"name": call.name, **problem.columns, "B": len(problem.lengths), **found}
    row |= {"MB": problem.cache_bytes() / 1e6, "limit_us": limits[binds], "binds": binds}
    row |= {f"{name}_us": us for name, us in limits.items()}
    computed = LatentProblem(**{field.name: getattr(problem, field.name) for field in fields(Problem)})
    row["keys"] = "computed" if computed == problem else "stored"
    compared = {"of_one": Call(replace(problem, seqlen_q=1)), "of_computed": Call(computed)}
    compared = {"of_rule": Call(problem)} if call.kernel else compared
    for column, other in compared.items():
        if other != call and {"us"} <= others.get(other, {}).keys() & row.keys():
            row[column] = row["us"] / others[other]["us"]
    if call.kernel:
        row["auto"] = False
    elif computed == problem or Call(computed) in others:
        row["auto"] = bool(kept_key_bits((computed.geometry,))) == (computed != problem)
    if problem.seqlen_q == 1 and not call.kernel:
        row["modelled_us"] = decode_seconds(problem.geometry, problem.tokens_seen(), rate) * 1e6
    for column, of in (("over", "us"), ("graph_over", "graph_us")):
        row |= {column: row[of] / row["limit_us"]} if row.get(of) else {}
    row |= {"before_us": before[row["name"]]} if row["name"] in before else {}
    return row


def is_slow(row: Row) -> bool:
    """Above what issue 34 allows, where it sets a bound."""
    if row["S_q"] == 1:
        return row["H"] <= 64 and row.get("over", 0) > WORST
    return row["H"] * row["S_q"] <= {"computed": 64, "stored": 128}[row["keys"]] and row.get("of_one", 0) > MANY


def cliffs(
    seconds: float = 150.0,
    seed: int = 0,
    min_run_time: float = 0.1,
    named: bool = True,
    json: str | None = None,
    beside: str | None = None,
    size: float = CACHE_BYTES,
    device: str = "cuda:0",
) -> bool:
    """Times random geometries and prints those that are furthest above their limit.

    Args:
        seconds: for all; more than half of them compile.
        seed: of the geometries.
        min_run_time: seconds for each call, and again in a graph.
        named: issue 34's shapes first.
        json: also write every row to this file.
        beside: an earlier run's file, whose times of the same calls stand beside.
        size: bytes of cache of each call.
        device: that is timed; "cpu" runs the reference, to try the flow with a small ``size``.

    Returns:
        Whether every result is right.
    """
    began = time.monotonic()
    rows: dict[Call, Row] = {}
    earlier = [] if beside is None else json_files.loads(Path(beside).read_text())["rows"]
    before = {row["name"]: row["us"] for row in earlier if "us" in row}
    geometries: list[Problem] = []
    outcomes: dict[CompileJob, str | None] = {}

    def drawn() -> Iterator[Problem]:
        yield from (problem_of(*shape, size=size) for shape in NAMED if named)
        yield from (draw(seed, number, size) for number in itertools.count())

    def jobs() -> Iterator[CompileJob]:
        asked: set[CompileJob] = set()
        for problem in drawn():
            geometries.append(problem)
            for job in (call.job() for call in calls_of(problem)):
                if job not in asked:
                    asked.add(job)
                    yield job

    def calls() -> Iterator[Call | None]:
        if device == "cpu":
            yield None
            yield from (call for problem in drawn() for call in calls_of(problem))
        workers = max(1, (os.cpu_count() or 2) - 2)
        ended = run_in_workers(
            compile_launches, jobs(), workers=workers, timeout=COMPILE_TIMEOUT, until=began + COMPILING * seconds
        )
        outcomes.update((outcome.job, outcome.failure) for outcome in ended)
        yield None
        for problem in geometries:
            ready = [call for call in calls_of(problem) if outcomes.get(call.job(), OUT_OF_TIME) is None]
            yield from (call for call in ready if call not in rows)

    work, prepare = partial(measure, seconds=min_run_time, device=device), None if device == "cpu" else start_measuring
    table, rate = Recording("cliffs", json, seed=seed), None
    for outcome in run_in_workers(work, calls(), timeout=60.0, until=began + seconds, prepare=prepare):
        if outcome.job is None:
            rate = outcome.value or {"R": 4.3e12, "R_from": f"issue 34: {outcome.failure}"}
            table.fields |= rate | {"compile_seconds": time.monotonic() - began}
        elif outcome.failure != OUT_OF_TIME:
            found = outcome.value or {"status": outcome.failure}
            rows[outcome.job] = complete(outcome.job, found, rate["R"], rows, before)
            table.add(rows[outcome.job])
    failed = [why for why in outcomes.values() if why not in (None, OUT_OF_TIME)]
    for why in failed:
        print(f"not compiled: {why}")
    return report(table, f"R = {rate['R'] / 1e12:.2f} TB/s ({rate['R_from']})") and not failed


def report(table: Recording, rate: str) -> bool:
    """Prints the worst ten of each kind; whether every result is right."""
    timed = [row for row in table.rows if "over" in row]
    served = [row for row in timed if row.get("auto", True)]
    kinds = {
        "one new token": ("over", [row for row in served if row["S_q"] == 1]),
        "one new token, the way that auto does not take": (
            "over", [row for row in timed if row["S_q"] == 1 and not row.get("auto", True) and "of_rule" not in row]
        ),
        "other kernels, beside the rule's": ("of_rule", [row for row in timed if "of_rule" in row]),
        "several new tokens, beside one": ("of_one", [row for row in timed if "of_one" in row]),
    }  # fmt: skip
    for kind, (column, mine) in kinds.items():
        mine = sorted(mine, key=lambda row: -row[column])
        title = f"{kind}: worst ten of {len(mine)} calls by {column}; {rate}"
        print_table(mine[:10], title=title, columns=COLUMNS, console=Console(width=PIPE_WIDTH))
    wrong = [row for row in table.rows if row["status"] != "ok"]
    for row in wrong:
        print(f"{row['name']}: {row['status']}")
    slow = sum(map(is_slow, served))
    print(f"{len(timed)} calls timed, {len(wrong)} not right; {slow} of {len(served)} that auto takes above the bounds")
    return not wrong


if __name__ == "__main__":
    sys.exit(command(cliffs, cpu=asks_for_cpu()))
