"""Progress bars: redrawn on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LINE_INTERVAL = 30.0  # seconds between the lines of a log; what ends sooner leaves none
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed}, {remaining} left, {rate_fmt}{postfix}"


class _Lines:
    """Standard error without carriage returns: every state of a bar is a line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            sys.stderr.write(line + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(items: Iterable[Any] | None = None, *, show: bool, **keywords: Any) -> tqdm:
    """``tqdm(items, **keywords)`` on standard error, nothing unless ``show``."""
    if not show or (sys.stderr is not None and sys.stderr.isatty()):
        return tqdm(items, disable=not show, **keywords)
    rarely = {"mininterval": LINE_INTERVAL, "delay": LINE_INTERVAL, "miniters": 1, "bar_format": _LINE}
    return tqdm(items, disable=sys.stderr is None, file=_Lines(), **rarely, **keywords)
