"""What a value from outside may be: in words for its refusal, and as a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What a field may be: in words, and as a function of its value."""

    expected: str
    allows: Callable[[Any], bool]

    def or_none(self) -> Rule:
        return Rule(f"{self.expected}, or null", lambda value: value is None or self.allows(value))


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)


def int_from(least: int, most: int) -> Rule:
    return Rule(f"an int from {least} to {most}", lambda value: is_int(value) and least <= value <= most)


def positive(most: float) -> Rule:
    return Rule(f"a number above 0, at most {most:g}", lambda value: is_number(value) and 0 < value <= most)


def each_is(rule: Rule) -> Rule:
    return Rule(
        f"a list of which each is {rule.expected}",
        lambda value: isinstance(value, list | tuple) and len(value) <= 1 << 16 and all(map(rule.allows, value)),
    )


def one_of(*choices: Any) -> Rule:
    return Rule(
        f"one of {', '.join(map(repr, choices))}",
        lambda value: any(value is each or (isinstance(each, str) and value == each) for each in choices),
    )


BOOL = Rule("true or false", lambda value: isinstance(value, bool))
