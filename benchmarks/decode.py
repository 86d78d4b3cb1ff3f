"""Decode ops on a GPU: speeds of MLA and GQA beside other implementations and other caches; host time.

    python benchmarks/decode.py speed --json benchmarks/results/h200-decode-table.json
    python benchmarks/decode.py speed --only "H128"        # shapes.py has the names
    python benchmarks/decode.py gqa        # beside FlashAttention-3 on the same pages
    python benchmarks/decode.py latent     # the latent alone, beside stored rotary keys of as many bytes
    python benchmarks/decode.py keys       # the latent alone, beside rotary keys kept in 16 and in 8 bits
    python benchmarks/decode.py fp8        # e4m3 latents, beside bfloat16 over the same tokens
    python benchmarks/decode.py host

``runner.py`` says what the numbers of speeds are; ``ratio`` is the time over that of the cache beside it. Everything
that may hang runs in a process of its own, under a time-out. Errors over many geometries are ``mha2mla check
kernels``'. ``loss_and_time.py`` times what loses as much.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import decode_jobs, measure_beside, measure_decode
from benchmarks.peers import Peer, flash_attention_3_gqa, flash_attention_3_mha, mla_peers
from benchmarks.recording import Recording, command
from benchmarks.runner import Benchmark, speed_of
from benchmarks.shapes import (
    MLA_PEERS,
    SpeedCase,
    decode_case,
    decode_cases,
    fp8_cases,
    gqa_cases,
    key_cases,
    latent_cases,
    stored_form,
    with_kept_keys,
)
from mha2mla.kernels import gqa_decode, mla_decode
from mha2mla.kernels.parallel_compilation import CompileJob, compile_in_processes, compile_launches
from mha2mla.testing.problems import KeyCodesProblem, Problem


def peers_of(case: SpeedCase, inputs: dict[str, Any], expected: torch.Tensor) -> dict[str, Peer]:
    """Peers of the call itself, and the attention of the MHA model behind it."""
    problem = case.problem
    peers = mla_peers(problem, inputs, expected)
    if case.mha_head_dim is not None:
        batch, length = len(problem.lengths), problem.lengths[0]
        peers["FA3_MHA_us"] = flash_attention_3_mha(problem.heads, case.mha_head_dim, batch, length)
    return peers


def gqa_peers_of(case: SpeedCase, inputs: dict[str, Any], expected: torch.Tensor) -> dict[str, Peer]:
    return {"FA3_us": flash_attention_3_gqa(case.problem, inputs, expected)}


def jobs_beside(others: Mapping[str, Callable[[Any], Problem]], case: SpeedCase) -> list[CompileJob]:
    """Kernels of a case and of the calls beside it."""
    problems = [case.problem, *(other(case.problem) for other in others.values())]
    return [job for problem in problems for job in decode_jobs(decode_case(problem))]


STORED = {"stored_us": stored_form}
KEPT = {"kept_us": with_kept_keys, "kept8_us": partial(with_kept_keys, kind=KeyCodesProblem)}
IN_16_BITS = {"bf16_us": partial(replace, codes=False)}
measure_latent, measure_keys = partial(measure_beside, STORED), partial(measure_beside, KEPT)
measure_fp8 = partial(measure_beside, IN_16_BITS)
measure, measure_gqa = partial(measure_decode, mla_decode, peers_of), partial(measure_decode, gqa_decode, gqa_peers_of)
SPEED = Benchmark(
    kind="decode-speed",
    title="mla_decode, bfloat16, µs with cold L2",
    measure=measure,
    compile=compile_launches,
    jobs=decode_jobs,
    peers=(*MLA_PEERS, "FA3_MHA_us"),
)
GQA = replace(
    SPEED, kind="gqa-decode-speed", title="gqa_decode, bfloat16, page 64, µs with cold L2", measure=measure_gqa,
    peers=("FA3_us",),
)  # fmt: skip
LATENT = replace(
    SPEED, kind="latent-decode-speed", title="mla_decode of the latent alone beside stored k_pe, bfloat16, page 64",
    measure=measure_latent, jobs=partial(jobs_beside, STORED), peers=tuple(STORED),
)  # fmt: skip
KEYS = replace(
    SPEED, kind="rotary-keys", title="mla_decode of the latent alone beside kept rotary keys, bfloat16, page 64",
    measure=measure_keys, jobs=partial(jobs_beside, KEPT), peers=tuple(KEPT),
)  # fmt: skip
FP8_SPEED = replace(
    SPEED, kind="fp8-decode-speed", title="mla_decode over an fp8 latent cache beside bfloat16", measure=measure_fp8,
    jobs=partial(jobs_beside, IN_16_BITS), peers=tuple(IN_16_BITS),
)  # fmt: skip
speed = speed_of(SPEED, decode_cases)
gqa = speed_of(GQA, gqa_cases, "gqa")
latent, keys = speed_of(LATENT, latent_cases, "latent"), speed_of(KEYS, key_cases, "keys")
fp8 = speed_of(FP8_SPEED, fp8_cases, "fp8")


@torch.inference_mode()
def host(json: str | None = None, calls: int = 300) -> bool:
    """Host microseconds of an eager call, on inputs so small that the GPU is never what is waited for.

    Args:
        json: also write the rows to this file.
        calls: per row.
    """
    problems = [Problem(32, 32, 512, 16, (64,)), Problem(32, 1, 512, 64, (64,)), Problem(128, 1, 512, 64, (64,))]
    jobs = [job for problem in problems for job in decode_jobs(decode_case(problem))]
    if failed := compile_in_processes(compile_launches, jobs):
        raise RuntimeError(str(failed))
    table = Recording("decode-host", json, calls=calls)
    for problem in problems:
        inputs = problem.inputs(torch.bfloat16, "cuda")
        plan, out = problem.plan(inputs), torch.empty_like(inputs["q_latent"])
        ways: dict[str, Callable[[], Any]] = {
            "plan and out": lambda i=inputs, p=plan, o=out: mla_decode(**i, plan=p, out=o),
            "plan": lambda i=inputs, p=plan: mla_decode(**i, plan=p),
            "no plan": lambda i=inputs: mla_decode(**i),
            "refresh": lambda i=inputs, p=plan: p.refresh(i["cache_seqlens"], i["cache_starts"]),
        }
        row: dict[str, Any] = {"shape": decode_case(problem).name}
        for name, call in ways.items():
            row[name] = host_us(call, calls)
        launches, data = plan.memory.launches, tuple(inputs[name] for name in problem.op.names)
        kernels = next(iter(launches.values()))
        row["kernels alone"] = host_us(partial(kernels, data, inputs["block_table"], out, None), calls)
        for like, launch in launches.items():
            launches[like] = replace(launch, split=lambda *_: None, combine=lambda *_: None)
        row["without kernels"] = host_us(ways["plan and out"], calls)
        launches.update(dict.fromkeys(launches, kernels))
        table.add(row)
    return table.show("host µs per call, no synchronisation")


def repeat(call: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        call()


def host_us(call: Callable[[], Any], calls: int, rounds: int = 5) -> float:
    """Median over rounds of the host microseconds of one call; the queue is drained between rounds."""
    repeat(call, 20)
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        repeat(call, calls)
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(command(speed, gqa, latent, keys, fp8, host))
