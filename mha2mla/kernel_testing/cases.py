"""Random calls of the decode op: any geometry that the kernels accept, and whatever a caller may do with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mha2mla.kernel_testing.latent_problems import LatentProblem
from mha2mla.kernel_testing.problems import Problem
from mha2mla.kernels.mla_decode.latent_selection import refusal_latent_fp8
from mha2mla.kernels.mla_decode.selection import (
    MAX_ROPE_PER_HEAD,
    MAX_ROPE_SHARED,
    MAX_ROPE_WIDTH,
    DecodeShape,
    refusal,
)
from mha2mla.kernels.split_kv.choice import KernelChoice
from mha2mla.kernels.split_kv.op import compiled_shape


@dataclass(frozen=True)
class Case:
    """One call to check.

    Attributes:
        group: number of the geometry; its cases share a compilation.
        problem: the call.
        dtype: "bfloat16" or "float16".
        share: of the CTAs that the device would plan for; None: all of them, the plan of every day.
        call: which of its geometry's calls it is.
    """

    group: int
    problem: Problem
    dtype: str
    share: float | None = None
    call: int = 0

    def shape(self) -> DecodeShape:
        """What is compiled for it."""
        return compiled_shape(self.problem.shape(self.dtype))

    def choice(self, device: torch.device) -> KernelChoice:
        """The kernel that it runs on a device."""
        return self.problem.op.choose(self.shape(), device)

    def num_ctas(self, planned: int) -> int:
        """CTAs that it plans for where the device would plan for ``planned``."""
        return planned if self.share is None else max(1, round(self.share * planned))


def draw_latent_geometry(rng: random.Random) -> tuple[LatentProblem, str]:
    """As :func:`draw_geometry`, of a cache of the latent alone; of e4m3 latents every third one."""
    drawn = (
        LatentProblem(
            rng.choice((1, 8, 9, 14, 16, 24, 32, 40, 64, 128, rng.randint(1, 128))),
            1,
            rng.choice((72, 120, 192, 256, 384, 512, 1024, *[8 * rng.randint(1, 64)] * 5, 8 * rng.randint(65, 128))),
            rng.choice((32, 64, 64, 96, 128, 8 * rng.randint(1, 16))),
            (),
            page_size=rng.choice((16, 32, 64, 64, 128)),
            seqlen_q=rng.choice((1, 1, 1, 2, 4, 8)),
            scaling=rng.choice((1.0, 1.3)),
        ),
        rng.choice(("bfloat16", "bfloat16", "float16")),
    )
    if rng.random() < 1 / 3:
        problem = replace(drawn[0], codes=True)
        if refusal_latent_fp8(problem.shape(drawn[1])) is None:
            return problem, drawn[1]
    return drawn


def draw_geometry(rng: random.Random) -> tuple[Problem, str]:
    """A problem without lengths, and a dtype: any geometry that the kernels accept by contract, popular ones often."""
    while True:
        heads = rng.choice((1, 3, 8, 9, 12, 14, 16, 24, 32, 40, 48, 56, 63, 64, 126, 128, *[rng.randint(1, 128)] * 8))
        divisors = [g for g in range(1, heads + 1) if heads % g == 0]
        groups = rng.choice((1, heads, rng.choice(divisors)))
        wide = (520, 576, 768, 960, 1024, 8 * rng.randint(65, 128))
        d_c = rng.choice((64, 80, 96, 128, 144, 192, 256, 320, 384, 448, 512, *[8 * rng.randint(1, 64)] * 8, *wide))
        widest = min(MAX_ROPE_SHARED if groups == 1 else MAX_ROPE_PER_HEAD, MAX_ROPE_WIDTH // groups // 8 * 8)
        d_r = min(widest, rng.choice((8, 16, 24, 32, 64, *[8 * rng.randint(1, widest // 8)] * 3)))
        problem = Problem(
            heads,
            groups,
            d_c,
            d_r,
            (),
            page_size=rng.choice((16, 32, 64, 64, 128)),
            seqlen_q=rng.choice((1, 1, 1, 2, 4, 8)),
        )
        dtype = rng.choice(("bfloat16", "bfloat16", "float16"))
        if refusal(problem.shape(dtype)) is None:
            return problem, dtype


def draw_call(rng: random.Random, geometry: Problem, longest: int, most_sequences: int) -> Problem:
    """Random dynamic arguments for a geometry: batch, lengths, starts, window, sinks, layout, table width, numbers."""
    page = geometry.page_size
    edges = (0, 1, page - 1, page, page + 1, 63, 64, 65, 127, 128, 130)

    def length() -> int:
        return rng.choice((rng.choice(edges), rng.randint(0, longest // 8), rng.randint(0, longest)))

    batch = rng.choice((1, 2, 3, rng.randint(1, most_sequences)))
    lengths = tuple(min(length(), longest) for _ in range(batch))
    windowed = rng.random() < 0.4
    if isinstance(geometry, LatentProblem):
        geometry = replace(
            geometry, first_position=rng.choice((0, 0, 131072, rng.randint(0, 2**17))), shuffled=rng.random() < 0.3
        )
    return replace(
        geometry,
        lengths=lengths,
        seqlen_q=rng.randint(geometry.seqlen_q // 2 + 1, geometry.seqlen_q),  # all of these run one compilation
        starts=tuple(rng.choice((0, rng.randint(0, n))) for n in lengths) if rng.random() < 0.4 else None,
        causal=rng.random() < 0.85,
        window=rng.choice((1, 64, rng.randint(1, 300), rng.randint(1, longest), 10**6)) if windowed else None,
        sinks=rng.choice((0, 4, rng.randint(1, 130))) if windowed else 0,
        combined=rng.random() < 0.3,
        slack=rng.randint(0, 5),
        scale=rng.choice((1.0, 1.0, 1.0, 30.0)),
        seed=rng.getrandbits(31),
    )


def draw_cases(
    count: int,
    seed: int,
    *,
    calls: int = 4,
    longest: int = 3000,
    most_sequences: int = 40,
    accepts: Callable[[Problem, str], bool] = lambda problem, dtype: True,
) -> list[Case]:
    """``count`` geometries times ``calls`` calls. The n-th geometry of a seed is the same whatever ``count`` is; every
    fourth one is of a cache of the latent alone.

    Args:
        count, seed, calls: as :func:`check_kernels`.
        longest: cached tokens of a sequence at most.
        most_sequences: in a batch at most.
        accepts: whether a geometry, with a dtype, can be checked here; others are drawn anew.
    """
    cases = []
    for group in range(count):
        rng = random.Random(f"{seed}/{group}")
        draw = draw_latent_geometry if group % 4 == 3 else draw_geometry
        geometry, dtype = draw(rng)
        while not accepts(geometry, dtype):
            geometry, dtype = draw(rng)
        for call in range(calls):
            problem = draw_call(rng, geometry, longest, most_sequences)
            cases.append(Case(group, problem, dtype, rng.random() if call % 2 else None, call))
    return cases
