"""Parametrisations of which every run takes a few cases, and ``-m exhaustive`` the others too."""

from __future__ import annotations

from collections.abc import Iterable
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
