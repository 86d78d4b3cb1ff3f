"""Parametrisations of which every run takes a few cases, and ``-m exhaustive`` the others too."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def few(names: str, cases: Iterable[Any], count: int, **keywords: Any) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize(names, cases)`` whose cases behind the first ``count`` are marked exhaustive.

    For what costs much and differs little: order the cases so that the first ones fail where the others would.
    """
    single = "," not in names
    values = [(case,) if single else tuple(case) for case in cases]
    marked = [pytest.param(*value, marks=[pytest.mark.exhaustive] * (i >= count)) for i, value in enumerate(values)]
    return pytest.mark.parametrize(names, marked, **keywords)


def each(names: str, *axes: Iterable[Any], **keywords: Any) -> pytest.MarkDecorator:
    """The product of ``axes``, of which every run takes as few as have each value of every axis in one of them."""
    values: list[Sequence[Any]] = [list(axis) for axis in axes]
    count = max(map(len, values))
    first = [tuple(axis[i % len(axis)] for axis in values) for i in range(count)]
    others = [case for case in itertools.product(*values) if case not in first]
    return few(names, [*first, *others], count, **keywords)
