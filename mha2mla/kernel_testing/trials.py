"""What tuning times: the configurations that may serve a shape, and which of those that were timed is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mha2mla.geometry import MLAGeometry
from mha2mla.kernel_testing.problems import Problem
from mha2mla.kernels import explain_mla_decode
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.split_kv.choice import KernelChoice
from mha2mla.kernels.split_kv.op import compiled_shape

Geometry = tuple[int, ...]  # H, G, d_c, d_r and, if it is not 1, S_q

FINALISTS = 3  # that are timed again in turn, beside the rule's choice
MARGIN = 0.01  # the rule's choice is kept where nothing else is faster by more
CACHE_BYTES = 280e6  # of a shape whose length nobody gives: many times an L2, so that reading it is what is timed
SMALL_CACHE_BYTES = 67e6  # the same for fewer than 16 sequences


@dataclass(frozen=True)
class Candidate:
    """A configuration of a shape. ``num_ctas``: of the plan, per tile of query rows. ``rule``: whether it is the rule's
    choice."""

    choice: KernelChoice
    num_ctas: int
    rule: bool


@dataclass(frozen=True)
class Trial:
    """What a worker measures at a time: one candidate that is checked first, or (the final) several, in turn."""

    problem: Problem
    dtype: str
    candidates: tuple[Candidate, ...]
    final: bool = False

    @property
    def shape(self) -> DecodeShape:
        return self.problem.shape(self.dtype)


def parse_geometry(text: str) -> Geometry:
    """ "H,G,d_c,d_r" or "H,G,d_c,d_r,S_q" as numbers.

    Raises:
        ValueError: it is neither.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) not in (4, 5):
        raise ValueError(f"geometry is {text!r}; expected H,G,d_c,d_r or H,G,d_c,d_r,S_q, such as 32,8,512,16")
    return numbers


def make_problem(
    geometry: Geometry, batch: int, seqlen: int | None, page_size: int, dtype: str, device: torch.device
) -> Problem:
    """The call that a geometry is timed with; S_q is what is compiled for it.

    Raises:
        ValueError: no kernel serves it.
    """
    if len(geometry) not in (4, 5):
        raise ValueError(f"geometry is {geometry}; expected (H, G, d_c, d_r) or (H, G, d_c, d_r, S_q)")
    mla, seqlen_q = MLAGeometry(*geometry[:4]), geometry[4] if len(geometry) == 5 else 1
    why = explain_mla_decode(mla, page_size, getattr(torch, dtype), device, seqlen_q)
    if why is not None:
        raise ValueError(f"geometry {','.join(map(str, geometry))}: {why}")
    seqlen_q = compiled_shape(DecodeShape.of(mla, page_size, dtype, seqlen_q)).seqlen_q
    if seqlen is None:
        size = CACHE_BYTES if batch >= 16 else SMALL_CACHE_BYTES
        seqlen = max(1, math.ceil(size / (batch * mla.cache_bytes_per_token(2)) / 1024)) * 1024
    return Problem(*geometry[:4], (seqlen,) * batch, page_size=page_size, seqlen_q=seqlen_q, slack=0)


def choose_candidates(choices: Sequence[KernelChoice], count: int) -> list[KernelChoice]:
    """The rule's choice, the best of each family by the rule (kernel, warpgroups, rows, CTAs a multiprocessor) and of
    each variant, then what the rule likes best of the others: ``count`` in all, or as many as those are."""
    families: dict[tuple[Any, ...], KernelChoice] = {}
    for choice in choices:
        family = (choice.kernel, choice.warpgroups, choice.tiling.rows, choice.ctas_per_sm)
        families.setdefault(family, choice)
        families.setdefault((choice.kernel, choice.variant), choice)
    best = list(dict.fromkeys(families.values()))
    others = [choice for choice in choices if choice not in best]
    return best + others[: max(0, count - len(best))]


def choose_finalists(trials: Sequence[Trial], results: dict[Trial, dict[str, Any]]) -> Trial | None:
    """The fastest right ones of a shape and the rule's choice if it is right, to be timed in turn; None if there are
    none."""
    right = sorted((trial for trial in trials if results[trial]["status"] == "ok"), key=lambda t: results[t]["us"][0])
    if not right:
        return None
    last = right[:FINALISTS] + [trial for trial in right[FINALISTS:] if trial.candidates[0].rule]
    return Trial(right[0].problem, right[0].dtype, tuple(trial.candidates[0] for trial in last), final=True)


def choose_winner(final: Trial, us: Sequence[float]) -> int:
    """Place of the fastest candidate; of the rule's choice if that is slower by no more than :data:`MARGIN`."""
    fastest = min(range(len(us)), key=us.__getitem__)
    rule = next((place for place, candidate in enumerate(final.candidates) if candidate.rule), fastest)
    return rule if us[rule] <= us[fastest] * (1 + MARGIN) else fastest


def table_row(final: Trial, us: Sequence[float]) -> dict[str, Any]:
    """A row of the table, without the GPU and where the numbers come from."""
    winner = choose_winner(final, us)
    rule = next((time for candidate, time in zip(final.candidates, us, strict=True) if candidate.rule), None)
    return {
        **asdict(final.shape),
        **final.candidates[winner].choice.configuration(),
        "us": round(us[winner], 2),
        "rule_us": None if rule is None else round(rule, 2),
        "batch": len(final.problem.lengths),
        "seqlen": final.problem.lengths[0],
    }
