"""Output of a command: progress bars, and standard streams that survive a closed pipe or an ASCII terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

from tqdm import tqdm

LINE_INTERVAL = 30.0  # seconds between the lines of a log; what ends sooner leaves none
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed}, {remaining} left, {rate_fmt}{postfix}"


def announce(*lines: str) -> None:
    """The first lines of a verb, before it imports torch; empty ones are left out."""
    for line in filter(None, lines):
        print(line, file=sys.stderr, flush=True)


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


class ForgivingStream:
    """A text stream that writes what its encoding lacks as ``?``, and drops what cannot be written at all."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):  # a pipe without a reader, a full disk, a closed file
            pass
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def forgiving_streams() -> Iterator[None]:
    """Redirects standard output and error so that neither writing nor leaving raises."""
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
                yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                _empty(stream, nowhere)


def _empty(stream: TextIO | None, nowhere: TextIO) -> None:
    """Flushes a stream, so that the interpreter cannot fail to at its end."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere.fileno(), stream.fileno())
