"""Output of a command: progress bars, and standard streams that survive a closed pipe or an ASCII terminal."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

LINE_INTERVAL = 30.0  # seconds between the lines of a log; what ends sooner leaves none
_WHOLE = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {left} left{postfix}"
_WHOLE_LINE = "{desc}: {percentage:.0f} %, {elapsed}, {left} left{postfix}"
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed}, {remaining} left, {rate_fmt}{postfix}"


def announce(*lines: str) -> None:
    """The first lines of a verb, before it imports torch; empty ones are left out."""
    for line in filter(None, lines):
        print(line, file=sys.stderr, flush=True)


class _Lines:
    """Standard error without carriage returns: every state of a bar is a line, once."""

    def __init__(self) -> None:
        self._last = ""

    def write(self, text: str) -> None:
        if (line := text.strip()) and line != self._last:
            self._last = line
            sys.stderr.write(line + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(items: Iterable[Any] | None = None, *, show: bool | Span, **keywords: Any) -> Any:
    """``tqdm(items, **keywords)`` on standard error, nothing unless ``show``; of a :class:`Span` its part of a bar."""
    if isinstance(show, Span):
        return _Part(show, items, **keywords)
    if not show or _on_terminal():
        return tqdm(items, disable=not show, **keywords)
    return tqdm(items, disable=sys.stderr is None, miniters=1, bar_format=_LINE, **_log_options(), **keywords)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class StagedBar(tqdm):
    """Bar over the stages of a job; the rest of the running stage is estimated from that stage's own speed."""

    def begin(self, place: float, stop: float) -> None:
        """Begins a stage at ``place``, which ends at ``stop``, without counting the way there as speed."""
        found = max(0.0, place - self.n)
        self.initial += found
        self.n += found
        self._moved = self._time()
        self._stage = self.n, self._moved, stop

    def update(self, n: float | None = 1) -> bool | None:
        self._moved = self._time()
        return super().update(n)

    @property
    def format_dict(self) -> dict[str, Any]:
        """Values of ``bar_format``; ``left`` is the time left, "?" before anything was done and beyond the estimate."""
        return {**super().format_dict, "left": self._left() if self.n > self.initial else "?"}

    def _left(self) -> str:
        start, started, stop = self._stage
        pace = (self._moved - self.start_t) / (self.n - self.initial)  # seconds per unit, of all stages so far
        own = (self._moved - started) / (self.n - start) if self.n > start else pace
        left = own * (stop - self.n) + pace * (self.total - stop) - (self._time() - self._moved)
        return "?" if left < 0 and round(self.n) < self.total else self.format_interval(max(0.0, left))


@dataclass(frozen=True)
class Span:
    """A part of one bar over a whole job, from ``start`` to ``stop`` percent."""

    bar: StagedBar
    start: float = 0.0
    stop: float = 100.0

    def skip(self, share: float = 1.0) -> None:
        """Begins this stage at ``share`` of it, without counting that as speed: what an earlier run had done."""
        self.bar.begin(self.start + (self.stop - self.start) * share, self.stop)

    def move(self, share: float, what: str) -> None:
        """Puts the bar where ``share`` of this span is done."""
        self.bar.set_postfix_str(what, refresh=False)
        self.bar.update(max(0.0, self.start + (self.stop - self.start) * min(share, 1.0) - self.bar.n))


def split(progress: bool | Span, *shares: float) -> list[bool] | list[Span]:
    """Parts of a span one behind another, in proportion to ``shares`` of the time; a bool for each where it is one."""
    if not isinstance(progress, Span):
        return [progress] * len(shares)
    width = (progress.stop - progress.start) / sum(shares)
    ends = [progress.start + width * sum(shares[:count]) for count in range(len(shares) + 1)]
    return [replace(progress, start=start, stop=stop) for start, stop in pairwise(ends)]


class _Part:
    """A stage's part of the whole job's bar, with the methods of tqdm that stages call."""

    def __init__(
        self, span: Span, items: Any = None, *, desc: str, unit: str, total: int | None = None, initial: int = 0
    ) -> None:
        self._span, self._items, self._done = span, items, initial
        self._total, self._what, self._more = total if items is None else len(items), f"{desc}, {unit}", ""
        span.skip(initial / max(1, self._total))

    def __iter__(self) -> Iterator[Any]:
        self.update(0)
        for item in self._items:
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        self._done += count
        self._span.move(self._done / max(1, self._total), f"{self._what} {self._done} of {self._total}{self._more}")

    def set_postfix(self, values: dict[str, Any], refresh: bool = False) -> None:
        self._more = "".join(f", {name} {value}" for name, value in values.items())

    def __enter__(self) -> _Part:
        self.update(0)
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def whole_bar(desc: str, *, show: bool) -> Iterator[Span | bool]:
    """One bar over a whole job, with the time left; False where nothing is shown."""
    if not show or sys.stderr is None:
        yield False
        return
    shape = _WHOLE if _on_terminal() else _WHOLE_LINE
    with StagedBar(total=100, desc=desc, bar_format=shape, miniters=0, **_log_options()) as bar:
        if bar.disable:  # by the environment's TQDM_DISABLE
            yield False
            return
        bar.begin(0.0, 100.0)
        with _refreshed(bar):
            yield Span(bar)
            bar.update(100 - bar.n)


@contextmanager
def waiting(desc: str, *, show: bool) -> Iterator[None]:
    """Shows a description and the elapsed time of work whose progress is not known."""
    show = show and sys.stderr is not None
    with tqdm(desc=desc, bar_format="{desc}: {elapsed}", disable=not show, **_log_options()) as bar, _refreshed(bar):
        yield


def _log_options() -> dict[str, Any]:
    """Options of a bar that is no terminal's."""
    return {} if _on_terminal() else {"mininterval": LINE_INTERVAL, "delay": LINE_INTERVAL, "file": _Lines()}


@contextmanager
def _refreshed(bar: tqdm) -> Iterator[None]:
    """Refreshes a bar by a thread: a single step may take minutes."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(1.0 if _on_terminal() else LINE_INTERVAL):
            if time.time() - bar.last_print_t >= bar.mininterval:
                bar.last_print_t = time.time()
                bar.refresh()

    beating = threading.Thread(target=beat, daemon=True)
    if not bar.disable:
        beating.start()
    try:
        yield
    finally:
        ended.set()
        if not bar.disable:
            beating.join()


class ForgivingStream:
    """A text stream that writes what its encoding lacks as ``?``, and drops what cannot be written at all.

    Attributes:
        failure: the first error that lost text, such as a full disk; not that nobody reads any more.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError) as error:  # a pipe without a reader, a full disk, a closed file
            self._note(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._note(error)

    def _note(self, error: OSError | ValueError) -> None:
        if isinstance(error, OSError) and error.errno not in (errno.EPIPE, errno.EBADF):
            self.failure = self.failure or error

    def checked(self, status: int) -> int:
        """``status``, or 2 and a line on standard error where what was written is lost."""
        self.flush()
        if self.failure is None:
            return status
        print(f"mha2mla: error: standard output cannot be written: {self.failure.strerror}", file=sys.stderr)
        return 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def forgiving_streams() -> Iterator[ForgivingStream]:
    """Redirects standard output, which it gives, and error so that neither writing nor leaving raises."""
    # Where one is closed, the next file that is opened, a checkpoint's perhaps, would take its number and get its text.
    for _ in range(3):
        number = os.open(os.devnull, os.O_RDWR)
        if number > 2:
            os.close(number)
            break
    with open(os.devnull, "w") as nowhere:
        streams = [ForgivingStream(nowhere if stream is None else stream) for stream in (sys.stdout, sys.stderr)]
        try:
            with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
                yield streams[0]
        finally:
            for stream in (sys.stdout, sys.stderr):
                _empty(stream, nowhere)


@contextmanager
def short_warnings() -> Iterator[None]:
    """Shows a warning of this package as one line, without the place in the code; others as they are."""
    own, usual = str(Path(__file__).parent), warnings.formatwarning

    def one_line(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        if filename.startswith(own) or category.__module__.startswith("mha2mla."):
            return f"mha2mla: warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = one_line
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _empty(stream: TextIO | None, nowhere: TextIO) -> None:
    """Flushes a stream, so that the interpreter cannot fail to at its end."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere.fileno(), stream.fileno())
