"""Jobs in other processes, each under a time-out: what compiles or launches a kernel can hang, or take CUDA down."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

STARTUP = 180.0  # seconds that a process may take before its first job: it imports torch, TileLang, starts CUDA
OUT_OF_TIME = "out of time: the run ended first"


@dataclass(frozen=True)
class Outcome:
    """What became of a job: ``value`` is what the function returned, unless ``failure`` says why there is none."""

    job: Any
    value: Any = None
    failure: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Stage:
    """What a team of processes does to every job that reaches it.

    Attributes:
        function: importable by name; called as ``function(job)`` in a process that was spawned, not forked.
        workers: processes at a time.
        timeout: seconds for one job.
        prepare: called in every process before its first job, within ``STARTUP`` seconds that no job is charged for.
        then: the next stage's jobs from an outcome; drawn one at a time, each after the outcome of the one before was
            handed out: it may depend on that.
    """

    function: Callable[[Any], Any]
    workers: int = 1
    timeout: float = 120.0
    prepare: Callable[[], Any] | None = None
    then: Callable[[Outcome], Iterable[Any]] | None = None


def run_in_workers(
    function: Callable[[Any], Any],
    jobs: Iterable[Any],
    *,
    workers: int = 1,
    timeout: float = 120.0,
    until: float | None = None,
    prepare: Callable[[], Any] | None = None,
) -> Iterator[Outcome]:
    """Calls ``function(job)`` for every job in worker processes; outcomes come in the order in which jobs end.

    A worker whose job takes too long is killed ("hung: …"), one that dies is replaced ("crashed: …"), and so is one
    whose job raised ("ValueError: …"), since an error on a GPU stays with its process.

    Args:
        function, workers, timeout: as :class:`Stage` has them.
        prepare: too; with it the processes start before the first job is drawn, so that both may take their time: a
            generator may compile what its jobs are to launch.
        jobs: picklable; drawn one at a time, after the outcomes so far were handed out: a generator may look at them.
        until: ``time.monotonic()`` from which on no job is begun; jobs in flight then are killed (:data:`OUT_OF_TIME`).
    """
    for _, outcome in run_in_stages([Stage(function, workers, timeout, prepare)], jobs, until=until):
        yield outcome


def run_in_stages(
    stages: Sequence[Stage], jobs: Iterable[Any], *, until: float | None = None
) -> Iterator[tuple[int, Outcome]]:
    """Jobs through several teams of processes that work at the same time, as :func:`run_in_workers` does with one.

    Yields:
        (number of the stage, outcome), in the order in which jobs end.
    """
    teams = [_Team(stage) for stage in stages]
    for number, team in enumerate(teams):
        if number > 0 or stages[0].prepare is not None:
            team.fill()  # so that it is ready when the first job is
    queues: list[deque[Iterator[Any]]] = [deque() for _ in stages]
    queues[0].append(iter(jobs))
    try:
        while True:
            late = until is not None and time.monotonic() >= until
            for number, (team, queue) in enumerate(zip(teams, queues, strict=True)):
                while not late and team.has_room():
                    job, source = _draw(queue)
                    if job is _NONE:
                        break
                    if number == 0:
                        queue.append(source)
                    team.start(job, source)
            busy = [worker for team in teams for worker in team.busy()]
            if not busy:
                return
            first = min(worker.deadline for worker in busy)
            first = first if until is None else min(first, until)
            wait([worker.connection for worker in busy], max(0.0, first - time.monotonic()))
            late = until is not None and time.monotonic() >= until
            for number, team in enumerate(teams):
                for outcome, source in team.outcomes(late):
                    if stages[number].then is not None:
                        queues[number + 1].append(iter(stages[number].then(outcome)))
                    yield number, outcome
                    if number > 0:
                        queues[number].appendleft(source)
    finally:
        for team in teams:
            team.kill()


def _draw(queue: deque[Iterator[Any]]) -> tuple[Any, Iterator[Any] | None]:
    """The next job of the first iterator that has one, and that iterator, which leaves the queue."""
    while queue:
        source = queue.popleft()
        job = next(source, _NONE)
        if job is not _NONE:
            return job, source
    return _NONE, None


_NONE = object()


class _Team:
    """The processes of a stage; they are started when there is a job for them, or all at once."""

    def __init__(self, stage: Stage) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._stage = stage
        self._workers: list[_Worker] = []

    def _idle(self) -> _Worker | None:
        return next((worker for worker in self._workers if worker.job is _NONE), None)

    def fill(self) -> None:
        while len(self._workers) < self._stage.workers:
            self._workers.append(_Worker(self._context, self._stage))

    def has_room(self) -> bool:
        return self._idle() is not None or len(self._workers) < self._stage.workers

    def start(self, job: Any, source: Iterator[Any] | None) -> None:
        worker = self._idle()
        if worker is None:
            worker = _Worker(self._context, self._stage)
            self._workers.append(worker)
        worker.start(job)
        worker.source = source

    def busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.job is not _NONE]

    def outcomes(self, late: bool) -> Iterator[tuple[Outcome, Iterator[Any] | None]]:
        """Of the jobs that ended, and where they were drawn from; of all if it is ``late``."""
        for worker in self.busy():
            outcome = worker.poll(late)
            if outcome is None:
                continue
            if outcome.failure is not None:
                worker.kill()
                self._workers.remove(worker)
            yield outcome, worker.source

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()


class _Worker:
    """A process that serves one job at a time, once it has said that it is ready."""

    def __init__(self, context: Any, stage: Stage) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, stage.function, stage.prepare), daemon=True)
        # A Ctrl-C reaches every process of a terminal; this one's parent ends it, without a traceback of its own. The
        # tracker first: starting it, as the first process would, lets the signal through again.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self.process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()  # so that a process that dies ends the connection
        self.job: Any = _NONE
        self.source: Iterator[Any] | None = None  # of the job
        self.timeout, self.ready = stage.timeout, False
        self.started = time.monotonic()
        self.deadline = self.started + STARTUP

    def start(self, job: Any) -> None:
        self.job = job
        if self.ready:
            self._clock()
        with suppress(OSError):  # the process died: poll() will say so
            self.connection.send(job)

    def _clock(self) -> None:
        self.started = time.monotonic()
        self.deadline = self.started + self.timeout

    def poll(self, late: bool) -> Outcome | None:
        """The outcome of the job if it has one by now, the process being free for the next; if ``late``, any."""
        try:
            if not self.ready and self.connection.poll():
                failure = self.connection.recv()
                if failure is not None:
                    return self._end(None, failure)
                self.ready = True
                self._clock()
            if self.connection.poll():
                return self._end(*self.connection.recv())
        except (EOFError, OSError):
            self.process.join(10)
            return self._end(None, f"crashed: the process ended with exit code {self.process.exitcode}")
        if time.monotonic() >= self.deadline:
            what = f"no answer within {self.timeout:g} s" if self.ready else f"its process took {STARTUP:g} s to start"
            return self._end(None, f"hung: {what}")
        return self._end(None, OUT_OF_TIME) if late else None

    def _end(self, value: Any, failure: str | None) -> Outcome:
        job, self.job = self.job, _NONE
        return Outcome(job, value, failure, time.monotonic() - self.started)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.connection.close()


def _serve(connection: Connection, function: Callable[[Any], Any], prepare: Callable[[], Any] | None) -> None:
    failure = None
    if prepare is not None:
        _, failure = _call(prepare)
    gc.collect()
    gc.freeze()  # what the imports left is not looked through again and again: compiling makes many Python objects
    connection.send(failure)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(_call(function, job))


def _call(function: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    try:
        return function(*args), None
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[0]}"
