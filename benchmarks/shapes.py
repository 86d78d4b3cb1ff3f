"""Cases of the speed benchmarks, and the target of each. Numbers only, no GPU: a new row is a line."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mha2mla.testing.prefill_problems import PrefillProblem
from mha2mla.testing.problems import GQAProblem, LatentProblem, Problem

MLA_PEERS = ("FlashMLA_us", "FA3_MLA_us", "Triton_us", "torch_us")  # the same attention; FA3_MHA_us is another model's
FA3_PREFILL = ("FA3_varlen_us", "FA3_batch_us")


@dataclass(frozen=True)
class Target:
    """Target of a time; the strictest of what is given counts.

    Attributes:
        us: microseconds at most.
        share: of the read rate R at least, counting the cache that is seen once.
        tflops: at least.
        than: (name of another case, factor): at most so many times that case's time, scaled to equal bytes.
        peers: (columns, factor): at most so many times the time of the fastest of these implementations that ran.
    """

    us: float | None = None
    share: float | None = None
    tflops: float | None = None
    than: tuple[str, float] | None = None
    peers: tuple[tuple[str, ...], float] | None = None


NO_TARGET = Target()


@dataclass(frozen=True)
class SpeedCase:
    """A call to time.

    Attributes:
        name: such as "H32 G8 c512 r16 64x4096"; with it, ``--only`` chooses.
        problem: the call: a :class:`Problem`, :class:`GQAProblem` or :class:`PrefillProblem`.
        target: what its time has to reach.
        mha_head_dim: head width of the MHA model behind it, to time that model's attention too.
    """

    name: str
    problem: Any
    target: Target = NO_TARGET
    mha_head_dim: int | None = None


def decode_case(problem: Problem | GQAProblem, target: Target = NO_TARGET, label: str = "", **more: Any) -> SpeedCase:
    """A case named after its problem; ``label`` in place of the length."""
    if isinstance(problem, GQAProblem):
        widths = {problem.qk_head_dim: ""}.get(problem.v_head_dim, f"/{problem.v_head_dim}")
        name = f"H{problem.heads} G{problem.num_kv_heads} d{problem.qk_head_dim}{widths}"
    else:
        latent = ""
        if isinstance(problem, LatentProblem):
            latent = " latent fp8" if problem.codes else " latent"
        name = f"H{problem.heads} G{problem.num_rope_heads} c{problem.kv_lora_rank} r{problem.qk_rope_head_dim}{latent}"
    length = label or (str(problem.lengths[0]) if len(set(problem.lengths)) == 1 else "mixed")
    name += f" {len(problem.lengths)}x{length}"
    name += f" q{problem.seqlen_q}" * (problem.seqlen_q > 1) + f" p{problem.page_size}" * (problem.page_size != 64)
    name += f" w{problem.window}+{problem.sinks}" * (problem.window is not None)
    return SpeedCase(name, problem, target, **more)


def _problem(h: int, g: int, c: int, r: int, batch: int, length: int, kind: type = Problem, **changes: Any) -> Problem:
    # One buffer for latent and k_pe where FlashMLA can read it, so that all implementations read the same memory.
    combined = kind is Problem and (g, c, r) == (1, 512, 64)
    return kind(h, g, c, r, **{"lengths": (length,) * batch, "combined": combined, "slack": 0} | changes)


def mixed_lengths(batch: int = 64, low: int = 64, high: int = 16384) -> tuple[int, ...]:
    """Log-uniform lengths."""
    rng = random.Random(0)
    return tuple(round(math.exp(rng.uniform(math.log(low), math.log(high)))) for _ in range(batch))


def decode_cases() -> list[SpeedCase]:
    """Every shape of the target table, and what relative targets refer to."""
    cases = []

    def add(*shape: int, target: Target = NO_TARGET, mha: int | None = None, label: str = "", **changes: Any) -> str:
        cases.append(decode_case(_problem(*shape, **changes), target, label, mha_head_dim=mha))
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
    for share, lengths in ((0.60, (1024, 1600, 1792)), (0.70, (1856, 2944, 3264))):  # 130 and 240 MB
        for shape, length in zip((llama, (32, 8, 512, 16), (32, 1, 512, 64)), lengths, strict=True):
            add(*shape, 64, length, target=Target(share=share))
    add(40, 8, 512, 16, 64, 2944, target=Target(share=0.70))
    for width in (1024, 960):  # half the cache of Llama-3-8B and Qwen3-8B: 8 kv heads of 128
        for heads in (32, 16, 8, 64):
            for batch, length in ((64, 4096), (8, 2048)):
                share = Target(share=0.70) if (heads, batch) == (32, 64) else NO_TARGET
                add(heads, 1, width, 64, batch, length, target=share)
    add(*deepseek, 1, 8192, target=Target(us=22))
    add(*deepseek, 16, 8192, target=Target(peers=(MLA_PEERS, 1.0)))
    add(*deepseek, 128, 4096, target=Target(peers=(MLA_PEERS, 1.0)))
    add(*deepseek, 128, 8192, target=Target(peers=(MLA_PEERS, 1.0), tflops=620))
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
        add(*shape, 64, 1028)  # the part of the window
        add(*shape, 64, 16384, window=1024, sinks=4)
    return cases


# H, d_c, d_r, tokens of each of 64 sequences (256 MB and more), times the stored form's time at most, or of R at least
LATENT_ALONE = (
    (32, 512, 64, 4096, 1.15),
    (32, 512, 64, 16384, 1.15),
    (64, 512, 64, 4096, 1.6),
    (9, 192, 128, 12288, 1.2),  # SmolLM2 at half its cache
    (9, 120, 128, 18432, 1.2),
    (16, 192, 64, 12288, 1.2),
    (16, 256, 64, 8192, 1.2),
    (16, 384, 96, 6144, 1.2),
    (32, 1024, 32, 4096, 0.55),  # 8 kv heads of 128 at half their cache
    (32, 1024, 64, 4096, 0.55),
    (32, 1024, 128, 4096, 0.55),
    (32, 512, 128, 4096, 1.15),
)


def latent_cases() -> list[SpeedCase]:
    """A cache of the latent alone; :func:`stored_form` is its peer."""
    return [
        decode_case(
            _problem(h, 1, d_c, d_r, 64, length, kind=LatentProblem),
            Target(share=limit) if limit < 1 else Target(peers=(("stored_us",), limit)),
        )
        for h, d_c, d_r, length, limit in LATENT_ALONE
    ]


def stored_form(problem: LatentProblem) -> Problem:
    """The call over stored rotary keys that reads as many bytes, up to a third of them keys."""
    kept = min(problem.qk_rope_head_dim, problem.kv_lora_rank // 24 * 8)
    return Problem(problem.heads, 1, problem.kv_lora_rank - kept, kept, problem.lengths, slack=0)


def key_cases() -> list[SpeedCase]:
    """A cache of the latent alone of 64 sequences, whole pages, with :func:`with_kept_keys` of 300 MB."""
    widths = ((512, 64), (1024, 64), (512, 128), (192, 128))
    return [
        decode_case(_problem(h, 1, d_c, d_r, 64, int(300e6 / (128 * (d_c + d_r)) / 64) * 64, kind=LatentProblem))
        for d_c, d_r in widths
        for h in (9, 28, 40)
    ]


def with_kept_keys(problem: LatentProblem, kind: type[Problem] = Problem) -> Problem:
    """The same call over stored keys."""
    return kind(**{each.name: getattr(problem, each.name) for each in fields(Problem)})


def fp8_cases() -> list[SpeedCase]:
    """e4m3 latents, beside rotary keys and alone; bfloat16 over the same tokens is their peer."""
    shapes = [(32, 1, 512, 64, 64, 16384), (32, 1, 512, 64, 64, 4096), (32, 1, 512, 64, 8, 4096)]
    shapes += [(32, 1, 512, 64, 1, 32768), (16, 1, 512, 64, 64, 4096), (32, 8, 512, 16, 64, 4096)]
    shapes += [(9, 3, 256, 16, 64, 8192), (128, 1, 512, 64, 64, 4096)]
    gain = Target(peers=(("bf16_us",), 1 / 1.6))
    coded = {"codes": True, "combined": False}
    kept = [decode_case(_problem(*shape, **coded), NO_TARGET if index else gain) for index, shape in enumerate(shapes)]
    return kept + [
        decode_case(_problem(h, 1, d_c, d_r, 64, length, kind=LatentProblem, **coded))
        for h, d_c, d_r, length, _ in LATENT_ALONE
        if d_c % 16 == 0 and d_c <= 512 and d_r * d_c < 36864
    ]


def gqa_cases() -> list[SpeedCase]:
    """Decode of MHA and GQA models."""
    shapes = (  # H, G, d_qk, d_v, batch, length, S_q
        (32, 32, 128, 128, 64, 4096, 1),
        (32, 32, 128, 128, 16, 16384, 1),
        (32, 8, 128, 128, 64, 4096, 1),
        (32, 8, 128, 128, 64, 4096, 4),
        (28, 4, 128, 128, 64, 4096, 1),
        (28, 4, 128, 128, 1, 32768, 1),
        (14, 2, 64, 64, 64, 4096, 1),
        (9, 3, 64, 64, 64, 4096, 1),
        (32, 32, 80, 80, 64, 4096, 1),
        (24, 8, 96, 96, 64, 4096, 1),
        (16, 16, 192, 128, 64, 4096, 1),
    )
    return [
        decode_case(GQAProblem(*widths, (length,) * batch, seqlen_q=q, slack=0), Target(peers=(("FA3_us",), 1.1)))
        for *widths, batch, length, q in shapes
    ]


def prefill_cases() -> list[SpeedCase]:
    """Varlen prefill; targets are shares of FlashAttention-3's speed."""
    cases = []

    def add(name: str, heads, widths, key_heads, d_v, lengths, share=None, masks=(True,), **limits: int) -> None:
        target = NO_TARGET if share is None else Target(peers=(FA3_PREFILL, 1 / share))
        for causal in masks:
            problem = PrefillProblem(heads, widths, key_heads, d_v, lengths, causal=causal, behind=0, **limits)
            kind = f"w{problem.window}+{problem.sinks}" if limits else "causal" if causal else "full"
            cases.append(SpeedCase(f"{name} {kind}", problem, target))

    long, both = ((8192, 8192),), (True, False)
    various = tuple((length, length) for length in mixed_lengths(16, 64, 8192))
    add("H32 128/128 1x8192", 32, (128,), (32,), 128, long, 0.85, both)
    add("H32 192/128 1x8192", 32, (192,), (32,), 128, long, 0.75, both)
    add("H32 128+64/128 G1 1x8192", 32, (128, 64), (32, 1), 128, long, 0.75, both)
    add("H32 128/128 4x2048", 32, (128,), (32,), 128, ((2048, 2048),) * 4)
    add("H32/8 128/128 1x8192", 32, (128,), (8,), 128, long)
    add("H32/8 128/128 16 mixed 64-8192", 32, (128,), (8,), 128, various)
    add("H32/8 128/128 1024 of 9216", 32, (128,), (8,), 128, ((1024, 9216),))
    add("H128 128+64/128 G1 1x4096", 128, (128, 64), (128, 1), 128, ((4096, 4096),))
    add("H32 112+16/128 G32 1x8192", 32, (112, 16), (32, 32), 128, long)
    add("H9 48+16/64 G3 4x2048", 9, (48, 16), (3, 3), 64, ((2048, 2048),) * 4)
    add("H32 64/64 1x8192", 32, (64,), (32,), 64, long)
    add("H32 80/80 1x8192", 32, (80,), (32,), 80, long)
    add("H32 96/96 1x8192", 32, (96,), (32,), 96, long)
    add("H16 256/256 1x8192", 16, (256,), (16,), 256, long)
    for window, sinks in ((1024, 4), (8192, 0)):  # the second sees all: what a mask in question costs
        add("H32/8 128/128 1x8192", 32, (128,), (8,), 128, long, window=window, sinks=sinks)
    return cases


def choose(cases: list[SpeedCase], only: str | None) -> list[SpeedCase]:
    """Cases whose name contains ``only``, or one of the texts between its commas, and what their targets refer to.

    Raises:
        ValueError: there is none.
    """
    wanted = {case.name for case in cases if only is None or any(part in case.name for part in only.split(","))}
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
    if target.peers is not None:
        columns, factor = target.peers
        limits += [row[key] * factor for key in columns if isinstance(row.get(key), float)]
    return min(limits, default=None)
