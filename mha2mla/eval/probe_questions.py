"""Contexts of exactly so many tokens whose end asks for what stands far above, made from words and a text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mha2mla.texts import load_text, plain_tokens, start_tokens

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
    """Evenly over the context."""
    return (item + 0.5) / items


class Writer:
    """Contexts of exactly so many tokens: facts at their depths in running text, and a question at the end."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._tokens, self._name = partial(plain_tokens, tokenizer), text
        self._start = start_tokens(tokenizer)
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
        shared = next(i for i in range(len(asked[0])) if len({tuple(ids[: i + 1]) for ids in asked}) > 1)
        candidates = [ids[shared] for ids in asked]
        if len(set(candidates)) < len(candidates):
            raise ProbeError(f"the tokenizer does not tell {', '.join(answers)} apart by one token")
        stated = [(place, self._tokens(f"\n\n{fact}\n\n")) for place, fact in sorted(facts)]
        room = length - len(self._start) - shared - sum(len(ids) for _, ids in stated)
        if room < 0:
            raise ProbeError(f"facts and question take {length - room} tokens")
        text = self.running_text(draw, room)
        ids, written = list(self._start), 0
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
    """Sums of one digit after eight solved ones, behind a long text: ten digits are offered."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10) if a + b < 10]
    *solved, (a, b) = draw.sample(pairs, _SHOTS + 1)
    shown = "".join(f"{x} + {y} = {x + y}\n" for x, y in solved)
    digits = [str(digit) for digit in range(10)]
    return writer.question(draw, length, [], f"{shown}{a} + {b} =", digits, a + b, None)


Ask = Callable[[Writer, random.Random, int, float], Question]
QUESTIONS: dict[str, Ask] = {
    "one key": _one_key,
    "several keys": _several_keys,
    "variable tracking": _chains,
    "arithmetic": _arithmetic,
}
