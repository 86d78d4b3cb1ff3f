"""The rate that a conversion takes: half of the largest at which a first step of the optimizer hardly harms it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mha2mla.conversion.calibration.blocks import TokenBlocks
from mha2mla.conversion.fit.repeatable import deterministic
from mha2mla.healing.distillation import Distillation, warm_up
from mha2mla.healing.optimizer import first_directions
from mha2mla.healing.settings import Settings
from mha2mla.healing.training import passes

RATES = tuple(1e-2 * 2.0**-halvings for halvings in range(20))  # tried from the largest on, down to 2e-8
MAX_MEASURED = 1 << 15  # tokens
HARM = 1 / 20  # of the KL: what a first step may add to it; 1 % is noise
SHARE = 1 / 2  # of the rate of that step: others follow


@deterministic(warn_only=True)  # the mode of train: in another one layers are compiled again
def first_steps(
    distillation: Distillation,
    blocks: TokenBlocks,
    held_out: TokenBlocks,
    settings: Settings,
    *,
    weights: Tensor | None = None,
    held_out_weights: Tensor | None = None,
    rates: Sequence[float] = RATES,
    try_all: bool = False,
) -> list[dict[str, float]]:
    """KL on held-out windows after one step from the weights as they are, which they are again afterwards.

    A step is the optimizer's first, of AdamW -rate · g / (|g| + 1e-8), with the gradient g of the tokens of one step.

    Args:
        held_out: of it as many tokens count as a step has, at most :data:`MAX_MEASURED`, at least a block of each
            length.
        weights: [blocks, size] of the losses of the gradient's tokens; None: ones.
        held_out_weights: the same of the held-out tokens; blocks without a token that counts are left out.
        rates: in the order in which they are tried.
        try_all: rates after the first one that does little harm are tried, too.

    Returns:
        Rows of ``rate`` and ``held_out_kl``; the first has rate 0, before any step.
    """
    device, per_pass = distillation.student.device, settings.pass_tokens // blocks.size
    counts = min(settings.step_tokens, MAX_MEASURED) // blocks.size // len(held_out.window_lengths)
    by_length = [list(held_out.of_length(length)) for length in held_out.window_lengths]
    if held_out_weights is not None:
        by_length = [[block for block in same if held_out_weights[block].any()] for same in by_length]
    measured = [block for same in by_length for block in same[: max(1, counts)]]
    if held_out_weights is not None:
        held_out_weights = held_out_weights / held_out_weights[measured].mean()

    def loss(part: TokenBlocks, chosen: list[int], weights: Tensor | None = None) -> Tensor:
        lengths = [part.lengths[block] for block in chosen]
        weights = None if weights is None else weights[chosen].to(device)
        return distillation(part.tokens[chosen].to(device), lengths, weights)["loss"]

    @torch.no_grad()
    def divergence() -> float:
        distillation.eval()
        return sum(loss(held_out, [block], held_out_weights).item() for block in measured) / len(measured)

    rows = [{"rate": 0.0, "held_out_kl": divergence()}]
    if distillation.compiled:
        warm_up(distillation, blocks, per_pass)
    distillation.train()
    order = passes(blocks.lengths, per_pass, settings.accumulation * per_pass, settings.seed)
    for start in range(0, len(order), per_pass):
        (loss(blocks, order[start : start + per_pass], weights) / settings.accumulation).backward()
    with torch.no_grad():
        moved = [(*each, each[0].detach().clone()) for each in first_directions(distillation.student, settings)]
    distillation.zero_grad()
    try:
        for rate in rates:
            with torch.no_grad():
                for weight, direction, old in moved:
                    weight.copy_(old - rate * direction)
            rows.append({"rate": rate, "held_out_kl": divergence()})
            if not try_all and _harm(rows, rows[-1]) <= HARM:
                break
    finally:
        with torch.no_grad():
            for weight, _, old in moved:
                weight.copy_(old)
    return rows


def _harm(rows: Sequence[dict[str, float]], row: dict[str, float]) -> float:
    """Share of the KL that a step adds to it; of a KL that is no number infinite."""
    before, after = rows[0]["held_out_kl"], row["held_out_kl"]
    return after / before - 1 if math.isfinite(after) and before > 0 else math.inf


def said_of(rows: Sequence[dict[str, float]]) -> str:
    """Why :func:`measured_rate` is the rate that it is, behind its number."""
    if _harm(rows, rows[-1]) <= HARM:
        return "half of the largest at which a first step adds at most a twentieth to the held-out KL"
    return "half of the smallest that was tried: a first step at any adds more than a twentieth to the held-out KL"


def measured_rate(rows: Sequence[dict[str, float]]) -> float:
    """:data:`SHARE` of the largest rate whose step adds at most the share :data:`HARM` to the KL; between two that were
    tried by the harm's line over the rate's logarithm, and the smallest that was tried where every step adds more.

    Args:
        rows: of :func:`first_steps`, rates falling.
    """
    before, larger = math.inf, None
    for row in rows[1:]:
        harm = _harm(rows, row)
        if harm <= HARM:
            part = (HARM - harm) / (before - harm)  # 0 where the rate above has no number
            return SHARE * row["rate"] * (1.0 if larger is None else (larger / row["rate"]) ** part)
        before, larger = harm, row["rate"]
    return SHARE * rows[-1]["rate"]
