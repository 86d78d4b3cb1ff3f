"""Probes that need far context, made here from words and a text: does a converted model find what its source finds?

Most are choices: a context of some length ends in a question whose answer stands far above, and the model prefers one
of several words by the probability of the first token that tells them apart. One is a difference: how much more likely
a span becomes because it was there before. Everything is drawn from a seed, and both models see the same tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mha2mla.eval.probe_questions import QUESTIONS, ProbeError, Question, Writer, depth_of
from mha2mla.predictions import Predictor, windows_at_once
from mha2mla.terminal import progress_bar

SPAN = 64  # tokens that are repeated
_LEAD = 32  # tokens before the first occurrence: what stands first in a window is attended to for its place
# A probe counts when the source's result would come by chance less often than this.
_SIGNIFICANCE = 0.01
_GAIN_ERRORS = 3.0  # standard errors that the source's gain must be away from zero

COLUMNS = {
    "probe": "probe",
    "length": "tokens",
    "measure": "measure",
    "chance": "chance",
    "source": "source",
    "converted": "converted",
    "retained": "retained",
    "nll_source": "NLL of the answer, source",
    "nll_converted": "converted",
    "num_items": "items",
    "text": "text",
    "counts": "counts",
}


@dataclass(frozen=True)
class ProbeSettings:
    """How much is probed.

    Attributes:
        lengths: tokens of the contexts that end in a question.
        gaps: tokens from one occurrence of a span to the next.
        items: of each probe at each length.
        seed: of everything drawn.
        text: what fills the contexts and where the spans come from; a name for :func:`mha2mla.texts.load_text`.
    """

    lengths: tuple[int, ...] = (512, 2048, 8192)
    gaps: tuple[int, ...] = (512, 2048, 4096)
    items: int = 20
    seed: int = 0
    text: str = "builtin:opticks"

    def __post_init__(self) -> None:
        if self.items < 1:
            raise ValueError(f"items is {self.items}; expected at least 1")
        for gap in self.gaps:
            if gap < SPAN:
                raise ValueError(f"gaps has {gap}; expected at least the {SPAN} tokens of a span")


@dataclass(frozen=True)
class ProbeRow:
    """One probe at one length, source beside converted.

    Attributes:
        probe: what is asked.
        length: tokens of the context, or of the gap between two occurrences.
        measure: "accuracy", the share of right choices, or "gain", nats per token of the repeated span.
        num_items: questions or spans; text, seed: what they were made of.
        chance: what guessing gives.
        source, converted: what the models reach.
        source_by_depth, converted_by_depth: the same for the first, middle and last third of the depths at which the
            answer stands; empty where there are fewer than three items or no depth.
        nll_source, nll_converted: mean negative log-likelihood of the right answer among all tokens, which moves before
            a choice changes; None for a gain.
        counts: whether the source is beyond chance; if not, the row says nothing of the conversion.
    """

    probe: str
    length: int
    measure: str
    num_items: int
    chance: float
    source: float
    converted: float
    counts: bool
    text: str
    seed: int
    source_by_depth: tuple[float, ...] = ()
    converted_by_depth: tuple[float, ...] = ()
    nll_source: float | None = None
    nll_converted: float | None = None

    @property
    def retained(self) -> float | None:
        """The converted model's distance from chance over the source's; None where the probe does not count."""
        return (self.converted - self.chance) / (self.source - self.chance) if self.counts else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"retained": self.retained}


@torch.inference_mode()
def run_probes(
    source: torch.nn.Module,
    converted: torch.nn.Module,
    tokenizer: Any,
    settings: ProbeSettings,
    *,
    longest: int | None = None,
    progress: bool = True,
) -> tuple[list[ProbeRow], list[str]]:
    """Puts the same probes to both models.

    Args:
        source, converted: loaded causal language models of one vocabulary.
        tokenizer: of both.
        longest: tokens that both models take; longer probes are left out.

    Returns:
        Rows, and why others are missing.

    Raises:
        ValueError: the text is unusable (``load_text``).
    """
    predictors = Predictor(source), Predictor(converted)
    writer = Writer(tokenizer, settings.text)
    rows, skipped = [], []
    most = math.inf if longest is None else longest
    lengths = [length for length in settings.lengths if length <= most]
    gaps = [gap for gap in settings.gaps if _LEAD + gap + SPAN <= most]
    missing = [f"probes of {length} tokens" for length in settings.lengths if length not in lengths]
    missing += [f"a span repeated after {gap} tokens" for gap in settings.gaps if gap not in gaps]
    skipped += [f"{what}: the models take at most {longest}" for what in missing]
    with progress_bar(total=len(lengths) * len(QUESTIONS) + len(gaps), desc="probes", show=progress) as bar:
        for name, ask in QUESTIONS.items():
            for length in lengths:
                # A string seeds alike in every process, and no probe changes with the others.
                draw = random.Random(f"{settings.seed} {name} {length}")
                try:
                    questions = [ask(writer, draw, length, depth_of(i, settings.items)) for i in range(settings.items)]
                except ProbeError as error:
                    skipped.append(f"{name} in {length} tokens: {error}")
                else:
                    rows.append(_choice_row(name, length, questions, predictors, settings))
                bar.update()
        for gap in gaps:
            try:
                contexts = _repetitions(gap, writer, random.Random(f"{settings.seed} {gap}"), settings.items)
            except ProbeError as error:
                skipped.append(f"{REPEATED} after {gap} tokens: {error}")
            else:
                rows.append(_gain_row(gap, *contexts, predictors, settings))
            bar.update()
    return rows, skipped


REPEATED = "repeated span"


def _choice_row(
    name: str,
    length: int,
    questions: Sequence[Question],
    predictors: Iterable[Predictor],
    settings: ProbeSettings,
) -> ProbeRow:
    ids = torch.tensor([question.ids for question in questions])
    candidates = torch.tensor([question.candidates for question in questions])
    answers = torch.tensor([question.answer for question in questions])
    right, nll = [], []
    for predictor in predictors:
        logs = torch.cat(
            [predictor.last_token(part).float().log_softmax(-1).cpu() for part in ids.split(windows_at_once(length))]
        )
        offered = logs.gather(1, candidates)
        right.append((offered.argmax(1) == answers).double())
        nll.append(-float(offered.gather(1, answers[:, None]).double().mean()))
    chance = 1 / candidates.shape[1]
    deep = [question.depth for question in questions]
    return ProbeRow(
        probe=name,
        length=length,
        measure="accuracy",
        num_items=len(questions),
        chance=chance,
        source=float(right[0].mean()),
        converted=float(right[1].mean()),
        source_by_depth=_thirds(right[0], deep),
        converted_by_depth=_thirds(right[1], deep),
        nll_source=nll[0],
        nll_converted=nll[1],
        counts=_by_chance(int(right[0].sum()), len(questions), chance) < _SIGNIFICANCE,
        text=settings.text,
        seed=settings.seed,
    )


def _thirds(right: torch.Tensor, depths: Sequence[float | None]) -> tuple[float, ...]:
    """Means of the items by where their answers stand."""
    if None in depths:
        return ()
    third = torch.tensor([min(2, int(3 * depth)) for depth in depths])
    parts = [right[third == part] for part in range(3)]
    return tuple(float(part.mean()) for part in parts) if all(map(len, parts)) else ()


def _by_chance(right: int, items: int, chance: float) -> float:
    """How often guessing is right at least so often."""
    return sum(math.comb(items, k) * chance**k * (1 - chance) ** (items - k) for k in range(right, items + 1))


def _repetitions(gap: int, writer: Writer, draw: random.Random, items: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Contexts int64 [items, length] that end in a span: other text stands ``gap`` tokens before it, or it itself."""
    other, again = [], []
    for _ in range(items):
        span, instead = writer.running_text(draw, SPAN), writer.running_text(draw, SPAN)
        lead, between = writer.running_text(draw, _LEAD), writer.running_text(draw, gap - SPAN)
        other.append(lead + instead + between + span)
        again.append(lead + span + between + span)
    return torch.tensor(other), torch.tensor(again)


def _gain_row(
    gap: int, other: torch.Tensor, again: torch.Tensor, predictors: Iterable[Predictor], settings: ProbeSettings
) -> ProbeRow:
    items = len(again)
    gains = []
    for predictor in predictors:
        first, second = (_span_losses(predictor, ids) for ids in (other, again))
        gains.append(first - second)
    error = float(gains[0].std()) / math.sqrt(items) if items > 1 else math.inf
    source, converted = (float(gain.mean()) for gain in gains)
    return ProbeRow(
        probe=REPEATED,
        length=gap,
        measure="gain",
        num_items=items,
        chance=0.0,
        source=source,
        converted=converted,
        counts=source > _GAIN_ERRORS * error,
        text=settings.text,
        seed=settings.seed,
    )


def _span_losses(predictor: Predictor, ids: torch.Tensor) -> torch.Tensor:
    """float64 [items] on the CPU: mean negative log-likelihood of the last ``SPAN`` tokens of ids [items, L]."""
    losses = []
    for part in ids.split(windows_at_once(ids.shape[1])):
        logits_of, predicted = predictor.next_tokens(part), ids.shape[1] - 1
        for row, tokens in enumerate(part):
            logits = logits_of(slice((row + 1) * predicted - SPAN, (row + 1) * predicted))
            targets = tokens[-SPAN:].to(logits.device)
            losses.append(torch.nn.functional.cross_entropy(logits.float(), targets).double().cpu())
    return torch.stack(losses)
