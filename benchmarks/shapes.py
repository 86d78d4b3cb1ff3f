"""What the decode benchmark measures, and what each shape has to reach. Numbers only, no GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mha2mla.kernel_testing.problems import Problem

PEERS = ("FlashMLA_us", "FA3_MLA_us", "Triton_us", "torch_us")  # the same attention; FA3_MHA_us is another model's


@dataclass(frozen=True)
class Target:
    """What a time has to reach; the strictest of what is given counts.

    Attributes:
        us: microseconds at most.
        share: of the read rate R at least, counting the cache that is seen once.
        tflops: at least.
        than: (name of another case, factor): at most so many times that case's time, scaled to equal bytes.
        peers: faster than every peer that ran.
    """

    us: float | None = None
    share: float | None = None
    tflops: float | None = None
    than: tuple[str, float] | None = None
    peers: bool = False


NO_TARGET = Target()


@dataclass(frozen=True)
class SpeedCase:
    """A shape to time. ``mha_head_dim``: head width of the MHA model behind it, to time that model's attention too."""

    problem: Problem
    target: Target = NO_TARGET
    mha_head_dim: int | None = None
    label: str | None = None

    @property
    def name(self) -> str:
        """Such as "H32 G8 c512 r16 64x4096"."""
        problem = self.problem
        lengths = set(problem.lengths)
        length = self.label or (str(lengths.pop()) if len(lengths) == 1 else "mixed")
        parts = [
            f"H{problem.heads} G{problem.num_rope_heads} c{problem.kv_lora_rank} r{problem.qk_rope_head_dim}",
            f"{len(problem.lengths)}x{length}",
        ]
        if problem.seqlen_q > 1:
            parts.append(f"q{problem.seqlen_q}")
        if problem.page_size != 64:
            parts.append(f"p{problem.page_size}")
        if problem.window is not None:
            parts.append(f"w{problem.window}+{problem.sinks}")
        return " ".join(parts)


def _problem(h: int, g: int, c: int, r: int, batch: int, length: int, **changes: Any) -> Problem:
    # One buffer for latent and k_pe where FlashMLA can read it, so that all implementations read the same memory.
    common = {"lengths": (length,) * batch, "combined": (g, c, r) == (1, 512, 64), "slack": 0}
    return Problem(h, g, c, r, **common | changes)


def mixed_lengths(batch: int = 64, low: int = 64, high: int = 16384, seed: int = 0) -> tuple[int, ...]:
    """Log-uniform lengths."""
    rng = random.Random(seed)
    return tuple(round(math.exp(rng.uniform(math.log(low), math.log(high)))) for _ in range(batch))


def speed_cases() -> list[SpeedCase]:
    """Every shape of the target table, and what relative targets refer to."""
    cases = []

    def add(
        *shape: int, target: Target = NO_TARGET, mha: int | None = None, label: str | None = None, **changes
    ) -> str:
        cases.append(SpeedCase(_problem(*shape, **changes), target, mha, label))
        return cases[-1].name

    llama, deepseek = (32, 32, 512, 16), (128, 1, 512, 64)
    add(*llama, 16, 16384, target=Target(us=131, share=0.93), mha=128)
    llama_2048 = add(*llama, 64, 2048, target=Target(us=72, share=0.85), mha=128)
    add(*llama, 8, 4096, target=Target(us=26), mha=128)
    add(*llama, 1, 32768, target=Target(us=30), mha=128)
    steps = {}
    for shape in ((32, 8, 512, 16), (16, 1, 512, 64), (32, 1, 512, 64)):
        steps[shape] = add(*shape, 64, 4096, target=Target(share=0.88))
        add(*shape, 64, 16384, target=Target(share=0.96))
    odd = [(9, 3, 256, 16), (14, 1, 128, 64), (14, 2, 128, 16)]
    odd += [(24, 8, 512, 16), (40, 40, 512, 16), (40, 8, 512, 16), (48, 8, 512, 16), (56, 8, 512, 16)]
    odd += [(32, 8, width, 16) for width in (80, 96, 144, 192, 320, 384, 448)]
    for h, g, c, r in odd:
        length = math.ceil(280e6 / (64 * (c + g * r) * 2) / 1024) * 1024
        add(h, g, c, r, 64, length, target=Target(share=0.80))
    add(64, 1, 512, 64, 64, 4096, target=Target(share=0.80))
    for width in (1024, 960):  # half the cache of Llama-3-8B and Qwen3-8B: 8 kv heads of 128
        for heads in (32, 16, 8, 64):
            for batch, length in ((64, 4096), (8, 2048)):
                share = Target(share=0.70) if (heads, batch) == (32, 64) else NO_TARGET
                add(heads, 1, width, 64, batch, length, target=share)
    add(*deepseek, 1, 8192, target=Target(us=22))
    add(*deepseek, 16, 8192, target=Target(peers=True))
    add(*deepseek, 128, 4096, target=Target(peers=True))
    add(*deepseek, 128, 8192, target=Target(peers=True, tflops=620))
    mixed = mixed_lengths()
    for shape in (llama, (32, 1, 512, 64)):
        equal = add(*shape, 64, round(sum(mixed) / 64), label="mean")
        add(*shape, 64, 0, lengths=mixed, target=Target(than=(equal, 1 / 0.9)))
    add(16, 1, 512, 64, 64, 4096, seqlen_q=4, target=Target(than=(steps[16, 1, 512, 64], 1.1)))
    add(32, 1, 512, 64, 64, 4096, seqlen_q=2, target=Target(than=(steps[32, 1, 512, 64], 1.1)))
    rows_128 = add(*deepseek, 64, 4096)
    add(32, 1, 512, 64, 64, 4096, seqlen_q=4, target=Target(than=(rows_128, 1.0)))
    add(64, 1, 512, 64, 64, 4096, seqlen_q=2, target=Target(than=(rows_128, 1.0)))
    add(*llama, 64, 2048, page_size=16, target=Target(than=(llama_2048, 1.03)))
    add(32, 1, 512, 64, 64, 4096, page_size=16, target=Target(than=(steps[32, 1, 512, 64], 1.03)))
    for shape in (llama, (32, 8, 512, 16)):
        add(*shape, 64, 1028)  # what the window leaves to read
        add(*shape, 64, 16384, window=1024, sinks=4)
    return cases


def choose(only: str | None) -> list[SpeedCase]:
    """Cases whose name contains ``only``, and those that their targets refer to.

    Raises:
        ValueError: there is none.
    """
    cases = speed_cases()
    wanted = {case.name for case in cases if only is None or only in case.name}
    if not wanted:
        raise ValueError(f"only is {only!r}; expected a part of one of {[case.name for case in cases]}")
    wanted |= {case.target.than[0] for case in cases if case.name in wanted and case.target.than}
    return [case for case in cases if case.name in wanted]


def target_us(case: SpeedCase, row: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]], rate: float | None):
    """Microseconds that a measured row has to reach, or None where nothing is asked or nothing to compare with ran.

    Args:
        case: what was measured.
        row: its numbers; peers are under keys that end in "_us".
        rows: name → row of all cases of the run.
        rate: R in bytes per second.
    """
    target, limits = case.target, []
    if target.us is not None:
        limits.append(target.us)
    if target.share is not None and rate is not None:
        limits.append(case.problem.cache_bytes() / (target.share * rate) * 1e6)
    if target.tflops is not None:
        limits.append(case.problem.flops() / target.tflops / 1e6)
    if target.than is not None and (other := rows.get(target.than[0], {})).get("us") is not None:
        limits.append(other["us"] * target.than[1] * case.problem.cache_bytes() / (other["MB"] * 1e6))
    if target.peers:
        limits += [row[key] for key in PEERS if isinstance(row.get(key), float)]
    return min(limits, default=None)
