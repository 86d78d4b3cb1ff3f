"""Probes that need far context, made from words and a text: does a converted model find what its source finds?

Most are choices: a context of some length ends in a question whose answer stands far above, and the model prefers one
of several words by the probability of the first token that tells them apart. One is a difference: how much more likely
a span becomes because it was there before. Everything is drawn from a seed, and both models see the same tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from mha2mla.conversion.calibration.texts import load_text, plain_tokens, start_tokens
from mha2mla.conversion.predictions import Predictor, windows_at_once
from mha2mla.eval.quantized_caches import ComparedCache
from mha2mla.terminal import progress_bar

SPAN = 64  # tokens that are repeated
_LEAD = 32  # tokens before the first occurrence: what stands first in a window is attended to for its place
# A probe counts when the source's result would come by chance less often than this.
_SIGNIFICANCE = 0.01
_GAIN_ERRORS = 3.0  # standard errors that the source's gain must be away from zero

NAMES = (
    *("Alice", "Brian", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "James", "Karen", "Louis"),
    *("Maria", "Nathan", "Olivia", "Peter", "Rachel", "Simon", "Thomas", "Victor", "William"),
)
# No two of the words, nor of the names, begin alike: their first letters tell them apart where tokens are letters.
WORDS = (
    *("apple", "bridge", "candle", "dragon", "engine", "forest", "garden", "hammer", "island", "jacket", "kitchen"),
    *("lemon", "mountain", "needle", "orange", "pencil", "queen", "river", "silver", "tiger", "umbrella", "violin"),
    *("window", "yellow"),
)
_KEYS = 8
_CHAINS = 4
_SHOTS = 8
REPEATED = "repeated span"

COLUMNS = {
    "probe": "probe",
    "cache": "cache",
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
    """Amount of probing.

    Attributes:
        lengths: tokens of the contexts that end in a question.
        gaps: tokens from one occurrence of a span to the next.
        items: of each probe at each length.
        text: what fills the contexts and where the spans come from; a name for ``calibration.texts.load_text``.
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
        cache: of the converted model, as in :class:`~mha2mla.eval.quality.QualityRow`.
        length: tokens of the context, or of the gap between two occurrences.
        measure: "accuracy", the share of right choices, or "gain", nats per token of the repeated span.
        num_items: questions or spans; text, seed: sources of them.
        chance: result of guessing.
        source_by_depth, converted_by_depth: the same for the first, middle and last third of the depths at which the
            answer stands; empty where there are fewer than three items or no depth.
        nll_source, nll_converted: mean negative log-likelihood of the right answer among all tokens, which moves before
            a choice changes; None for a gain.
        counts: the source is beyond chance; if not, the row says nothing about the conversion.
    """

    probe: str
    cache: str
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
        """The converted model's distance from chance, divided by the source's; None where the probe does not count."""
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
    caches: Sequence[Callable[[], ComparedCache]] = (),
    longest: int | None = None,
    progress: bool = True,
) -> tuple[list[ProbeRow], list[str]]:
    """Runs the same probes on both models.

    Args:
        source, converted: loaded causal language models of one vocabulary.
        caches: makers of models over other caches, which are compared with the source as ``converted`` is.
        longest: tokens that both models take; longer probes are left out.

    Returns:
        Rows, and why others are missing.

    Raises:
        ValueError: the text is unusable (``load_text``).
    """
    compared = [ComparedCache(converted), *(make() for make in caches)]
    predictors = [Predictor(source), *(Predictor(each.model, each.run) for each in compared)]
    names = [each.name for each in compared]
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
                    rows += _choice_rows(name, length, questions, names, predictors, settings)
                bar.update()
        for gap in gaps:
            try:
                contexts = _repetitions(gap, writer, random.Random(f"{settings.seed} {gap}"), settings.items)
            except ProbeError as error:
                skipped.append(f"{REPEATED} after {gap} tokens: {error}")
            else:
                rows += _gain_rows(gap, *contexts, names, predictors, settings)
            bar.update()
    return rows, skipped


def _choice_rows(
    name: str,
    length: int,
    questions: Sequence[Question],
    caches: Sequence[str],
    predictors: Iterable[Predictor],
    settings: ProbeSettings,
) -> Iterator[ProbeRow]:
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
    chance, depths = 1 / candidates.shape[1], [question.depth for question in questions]
    by_depth = [_thirds(each, depths) for each in right]
    counts = _by_chance(int(right[0].sum()), len(questions), chance) < _SIGNIFICANCE
    for each, cache in enumerate(caches, start=1):
        yield ProbeRow(
            probe=name,
            cache=cache,
            length=length,
            measure="accuracy",
            num_items=len(questions),
            chance=chance,
            source=float(right[0].mean()),
            converted=float(right[each].mean()),
            source_by_depth=by_depth[0],
            converted_by_depth=by_depth[each],
            nll_source=nll[0],
            nll_converted=nll[each],
            counts=counts,
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
    """Probability that guessing gives at least ``right`` right answers."""
    return sum(math.comb(items, k) * chance**k * (1 - chance) ** (items - k) for k in range(right, items + 1))


def _repetitions(gap: int, writer: Writer, draw: random.Random, items: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Contexts int64 [items, length] that end in a span: other text stands ``gap`` tokens before it, or it itself."""
    other, again = [], []
    for _ in range(items):
        span, instead = writer.running_text(draw, SPAN), writer.running_text(draw, SPAN)
        lead = writer.start + writer.running_text(draw, _LEAD - len(writer.start))
        between = writer.running_text(draw, gap - SPAN)
        other.append(lead + instead + between + span)
        again.append(lead + span + between + span)
    return torch.tensor(other), torch.tensor(again)


def _gain_rows(
    gap: int,
    other: torch.Tensor,
    again: torch.Tensor,
    caches: Sequence[str],
    predictors: Iterable[Predictor],
    settings: ProbeSettings,
) -> Iterator[ProbeRow]:
    items = len(again)
    gains = []
    for predictor in predictors:
        first, second = (_span_losses(predictor, ids) for ids in (other, again))
        gains.append(first - second)
    error = float(gains[0].std()) / math.sqrt(items) if items > 1 else math.inf
    source, *others = (float(gain.mean()) for gain in gains)
    for cache, converted in zip(caches, others, strict=True):
        yield ProbeRow(
            probe=REPEATED,
            cache=cache,
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


@dataclass(frozen=True)
class Question:
    """A context with a choice at its end.

    Attributes:
        ids: tokens up to where the answers part.
        candidates: the token that each answer goes on with, all different; ``answer``: index of the right one.
        depth: where the answer stands, 0 at the beginning and 1 at the end; None where the context does not hold it.
    """

    ids: list[int]
    candidates: list[int]
    answer: int
    depth: float | None


class ProbeError(ValueError):
    """A probe cannot be made of so many tokens of this text with this tokenizer; the message says why."""


def depth_of(item: int, items: int) -> float:
    """Relative depth of an item, evenly spaced over the context."""
    return (item + 0.5) / items


class Writer:
    """Contexts of exactly so many tokens: facts at their depths in running text, and a question at the end.

    Attributes:
        start: tokens that the tokenizer puts before a text.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._tokens, self._name = partial(plain_tokens, tokenizer), text
        self.start = start_tokens(tokenizer)
        self._text = self._tokens(load_text(text))

    def running_text(self, draw: random.Random, length: int) -> list[int]:
        """``length`` tokens from anywhere in the text.

        Raises:
            ProbeError: the text is shorter.
        """
        if length > len(self._text):
            raise ProbeError(f"text {self._name!r} has {len(self._text)} tokens; expected at least {length}")
        first = draw.randint(0, len(self._text) - length)
        return self._text[first : first + length]

    def question(
        self,
        draw: random.Random,
        length: int,
        facts: Sequence[tuple[float, str]],
        question: str,
        answers: Sequence[str],
        answer: int,
        depth: float | None,
    ) -> Question:
        """A context of ``length`` tokens with each (depth, fact) in it, and ``question`` at its end.

        Raises:
            ProbeError: facts and question alone are longer, or the answers' tokens are not told apart.
        """
        asked = [self._tokens(f"\n\n{question} {word}") for word in answers]
        shared = next((i for i, tokens in enumerate(zip(*asked, strict=False)) if len(set(tokens)) > 1), None)
        candidates = [] if shared is None else [ids[shared] for ids in asked]
        if len(set(candidates)) < len(answers):
            raise ProbeError(f"the tokenizer does not tell {', '.join(answers)} apart by one token")
        stated = [(place, self._tokens(f"\n\n{fact}\n\n")) for place, fact in sorted(facts)]
        room = length - len(self.start) - shared - sum(len(ids) for _, ids in stated)
        if room < 0:
            raise ProbeError(f"facts and question take {length - room} tokens")
        text = self.running_text(draw, room)
        ids, written = list(self.start), 0
        for place, fact in stated:
            ids += text[written : int(place * room)] + fact
            written = int(place * room)
        return Question(ids + text[written:] + asked[0][:shared], candidates, answer, depth)


def _one_key(writer: Writer, draw: random.Random, length: int, depth: float) -> Question:
    """One word is stated; it and seven others that are not are offered."""
    name, words, answer = draw.choice(NAMES), draw.sample(WORDS, _KEYS), draw.randrange(_KEYS)
    fact = f"The secret word of {name} is {words[answer]}."
    return writer.question(draw, length, [(depth, fact)], f"The secret word of {name} is", words, answer, depth)


def _several_keys(writer: Writer, draw: random.Random, length: int, depth: float) -> Question:
    """Eight names have a word each, at even depths; all eight words are offered."""
    names, words = draw.sample(NAMES, _KEYS), draw.sample(WORDS, _KEYS)
    answer = min(_KEYS - 1, int(depth * _KEYS))
    facts = [
        (depth_of(i, _KEYS), f"The secret word of {name} is {word}.")
        for i, (name, word) in enumerate(zip(names, words, strict=True))
    ]
    asked = f"The secret word of {names[answer]} is"
    return writer.question(draw, length, facts, asked, words, answer, facts[answer][0])


def _chains(writer: Writer, draw: random.Random, length: int, depth: float) -> Question:
    """Four names have a word each, and four others have the word of one of them; one of the others is asked for."""
    names, words = draw.sample(NAMES, 2 * _CHAINS), draw.sample(WORDS, _CHAINS)
    answer = min(_CHAINS - 1, int(depth * _CHAINS))
    facts = []
    for i, (name, other, word) in enumerate(zip(names[:_CHAINS], names[_CHAINS:], words, strict=True)):
        fact = f"The secret word of {name} is {word}. {other} has the same secret word as {name}."
        facts.append((depth_of(i, _CHAINS), fact))
    asked = f"The secret word of {names[_CHAINS + answer]} is"
    return writer.question(draw, length, facts, asked, words, answer, facts[answer][0])


def _arithmetic(writer: Writer, draw: random.Random, length: int, depth: float) -> Question:
    """Sums from 2 to 9, all as likely, after eight other solved ones and behind a long text: these are offered."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10) if a + b < 10]
    right = draw.randint(2, 9)
    a, b = draw.choice([pair for pair in pairs if sum(pair) == right])
    solved = draw.sample([pair for pair in pairs if {*pair} != {a, b}], _SHOTS)
    shown = "".join(f"{x} + {y} = {x + y}\n" for x, y in solved)
    digits = [str(digit) for digit in range(2, 10)]
    return writer.question(draw, length, [], f"{shown}{a} + {b} =", digits, right - 2, None)


Ask = Callable[[Writer, random.Random, int, float], Question]
QUESTIONS: dict[str, Ask] = {
    "one key": _one_key,
    "several keys": _several_keys,
    "variable tracking": _chains,
    "arithmetic": _arithmetic,
}
