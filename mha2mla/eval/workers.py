"""Jobs in other processes, each under a time-out: what compiles or launches a kernel can hang, or take CUDA down."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

STARTUP = 180.0  # seconds that the first job of a process may take longer: it imports torch and TileLang


@dataclass(frozen=True)
class Outcome:
    """What became of a job: ``value`` is what the function returned, unless ``failure`` says why there is none."""

    job: Any
    value: Any = None
    failure: str | None = None
    seconds: float = 0.0


def run_in_workers(
    function: Callable[[Any], Any], jobs: Iterable[Any], *, workers: int = 1, timeout: float = 120.0
) -> Iterator[Outcome]:
    """Calls ``function(job)`` for every job in worker processes; outcomes come in the order in which jobs end.

    A worker whose job takes too long is killed ("hung: …"), one that dies is replaced ("crashed: …"), and so is one
    whose job raised ("ValueError: …"), since an error on a GPU stays with its process.

    Args:
        function: importable by name; called in a process that was spawned, not forked.
        jobs: picklable; drawn one at a time, after the outcomes so far were handed out: a generator may look at them.
        workers: processes at a time.
        timeout: seconds for one job.
    """
    context = multiprocessing.get_context("spawn")
    pending = iter(jobs)
    exhausted = False
    team: list[_Worker] = []
    try:
        while True:
            while not exhausted:
                idle = next((worker for worker in team if worker.job is _NONE), None)
                if idle is None and len(team) == workers:
                    break
                job = next(pending, _NONE)
                if job is _NONE:
                    exhausted = True
                    break
                if idle is None:
                    idle = _Worker(context, function)
                    team.append(idle)
                idle.start(job, timeout)
            busy = [worker for worker in team if worker.job is not _NONE]
            if not busy:
                return
            first = min(worker.deadline for worker in busy)
            wait([worker.connection for worker in busy], max(0.0, first - time.monotonic()))
            for worker in busy:
                outcome = worker.poll(timeout)
                if outcome is None:
                    continue
                if outcome.failure is not None:
                    worker.kill()
                    team.remove(worker)
                yield outcome
    finally:
        for worker in team:
            worker.kill()


def progress_bar(items: Iterable[Any], total: int, what: str, progress: bool) -> Iterable[Any]:
    """The items, such as outcomes, behind a bar on standard error; none if ``progress`` is False or nobody watches."""
    from tqdm import tqdm

    return tqdm(items, total=total, desc=what, disable=None if progress else True)


_NONE = object()


class _Worker:
    """A process that serves one job at a time."""

    def __init__(self, context: Any, function: Callable[[Any], Any]) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()  # so that a process that dies ends the connection
        self.job: Any = _NONE
        self.started = self.deadline = 0.0
        self.fresh = True

    def start(self, job: Any, timeout: float) -> None:
        self.job, self.started = job, time.monotonic()
        self.deadline = self.started + timeout + STARTUP * self.fresh
        self.fresh = False
        with suppress(OSError):  # the process died: poll() will say so
            self.connection.send(job)

    def poll(self, timeout: float) -> Outcome | None:
        """The outcome of the job if it has one by now, the process being free for the next."""
        job, seconds = self.job, time.monotonic() - self.started
        if self.connection.poll():
            try:
                value, failure = self.connection.recv()
            except (EOFError, OSError):
                self.process.join(10)
                value, failure = None, f"crashed: the process ended with exit code {self.process.exitcode}"
        elif time.monotonic() >= self.deadline:
            value, failure = None, f"hung: no answer within {timeout:g} s"
        else:
            return None
        self.job = _NONE
        return Outcome(job, value, failure, seconds)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.connection.close()


def _serve(connection: Connection, function: Callable[[Any], Any]) -> None:
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            answer = (function(job), None)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            answer = (None, f"{type(error).__name__}: {lines[0]}")
        connection.send(answer)
