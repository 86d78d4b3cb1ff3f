"""Kernels into TileLang's disk cache by parallel processes that launch nothing; and jobs in processes, under time-outs.

A process that compiles or launches a kernel can hang, or take CUDA down.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any

import torch

from mha2mla.environment import usable_cores
from mha2mla.kernels.gqa_decode.api import GQA
from mha2mla.kernels.mla_decode.api import FP8, INT8_KEYS, LATENT, LATENT_CODES, LATENT_FP8, MLA, ROW_CODES
from mha2mla.kernels.ops import argument_error, capability, num_sms
from mha2mla.kernels.split_kv.choice import KernelChoice
from mha2mla.kernels.split_kv.op import PagedOp
from mha2mla.terminal import progress_bar

OPS = {op.name: op for op in (MLA, FP8, INT8_KEYS, LATENT, LATENT_FP8, ROW_CODES, LATENT_CODES, GQA)}
COMPILE_TIMEOUT = 300.0  # seconds for one job
STARTUP = 180.0  # seconds for a process to start: it imports torch and TileLang, and starts CUDA
OUT_OF_TIME = "out of time: the run ended first"


@dataclass(frozen=True)
class CompileJob:
    """The kernels that some calls of one shape launch, compiled by one process.

    Attributes:
        op: name of the op.
        shape: static part of the calls.
        capability: compute capability, 90 for Hopper.
        launches: (kernel, CTAs of the plan, batch) of each call.
    """

    op: str
    shape: Any
    capability: int
    launches: tuple[tuple[KernelChoice, int, int], ...]


def compile_job(
    op: PagedOp, shape: Any, device: torch.device, calls: Iterable[tuple[int, Callable[[int], int]]]
) -> CompileJob:
    """The job of calls of one compiled ``shape``: of each its batch, and its CTAs as a function of the resident ones.

    Raises:
        ValueError: no kernel serves the shape.
    """
    choice = op.choose(shape, device)
    resident = choice.num_ctas(num_sms(device))
    launches = dict.fromkeys((choice, num_ctas(resident), batch) for batch, num_ctas in calls)
    return CompileJob(op.name, shape, capability(device), tuple(launches))


def compile_launches(job: CompileJob) -> None:
    """Compiles the kernels of a job, and the planner."""
    from mha2mla.kernels.split_kv.launch import compile_kernels
    from mha2mla.kernels.split_kv.plan_kernel import compile_planner

    logging.getLogger("tilelang").setLevel(logging.WARNING)  # importing TileLang sets a level that logs each kernel
    op, shape = OPS[job.op], job.shape
    width = shape.v_head_dim if op is GQA else shape.kv_lora_rank
    compile_planner(job.capability)
    for choice, num_ctas, batch in job.launches:
        compile_kernels(op, shape, choice, job.capability, batch, width, num_ctas)


def compile_in_processes(
    function: Callable[[Any], None], jobs: Iterable[Any], until: float | None = None
) -> dict[Any, str]:
    """Calls ``function(job)`` for every job, in as many processes as there are processors but two; ``until`` as in
    :func:`run_in_workers`.

    Returns:
        Job → reason, for the jobs that failed.
    """
    jobs = list(dict.fromkeys(jobs))
    workers = max(1, min(len(jobs), (os.cpu_count() or 2) - 2))
    outcomes = run_in_workers(function, jobs, workers=workers, timeout=COMPILE_TIMEOUT, until=until)
    return {outcome.job: f"not compiled: {outcome.failure}" for outcome in outcomes if outcome.failure is not None}


def compile_ahead(
    device: torch.device, call: Any, run: Callable[[], Any], later: Callable[[], Any] | None = None
) -> int:
    """Compiles the kernels that ``run()`` launches, in as many processes as there are cores, under a progress bar.

    TileLang's disk cache keeps them, and a note of ``call``: where that is found nothing is run. Kernels that a process
    could not compile are left to their first launch. ``MHA2MLA_COMPILE_PROCESSES`` takes another number; of 0 every
    kernel is left so.

    Args:
        device: that launches; of another type than CUDA nothing is done.
        call: all that decides which kernels ``run`` launches, but for this package and the GPU; its text counts.
        run: launches kernels over tensors of its own. It is called once, its kernels compute nothing, and outputs are
            what memory holds.
        later: called after ``run``, as it: whose kernels the processes compile too, while this one goes on. The first
            launch of one waits for all of them, and so does the next call of this function.

    Returns:
        The number of kernels that the disk cache lacked.
    """
    if device.type != "cuda" or not most_processes():
        return 0
    from mha2mla.kernels.machine import AWAITED, note, write_note

    for finish in set(AWAITED.values()):
        finish()
    done = sha256(repr((call, capability(device), num_sms(device), _sources())).encode()).hexdigest()
    if note(done).exists():
        return 0
    return compile_listed(run, later, partial(write_note, done))


def compile_listed(
    run: Callable[[], Any], later: Callable[[], Any] | None = None, whole: Callable[[], None] = lambda: None
) -> int:
    """:func:`compile_ahead`; ``whole`` is called when no kernel is missing any more."""
    with ExitStack() as held:
        compiler = held.enter_context(Compiler())  # imports while this process does, and lists
        import tilelang

        from mha2mla.kernels.machine import listing, note

        try:
            with listing() as kernels:
                run()
                soon = set(kernels)
                if later is not None:
                    later()
        except Exception as error:  # out of memory, for instance: what the caller is about may still succeed
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            warnings.warn(f"kernels are compiled by their first launches, one after another: {why}", stacklevel=3)
            return 0
        with _locked(note("lock")) as lock:  # ranks of a model, or programs side by side, share what one compiles
            missing = [kernel for kernel in dict.fromkeys(kernels) if not note(kernel.digest).exists()]
            if not missing:
                whole()
            if not missing or not tilelang.env.is_cache_enabled():
                return len(missing)
            soon &= set(missing)
            # The longest first, behind those that are waited for here.
            missing.sort(key=lambda kernel: (kernel not in soon, -kernel.size))
            compilation = _Compilation(compiler, missing, lock, whole)
        compilation.wait(len(soon))
        compilation.go_on(held.pop_all())
    return len(missing)


class _Compilation:
    """Kernels that processes compile, in this order.

    Args:
        lock: is theirs until all have ended.
        whole: is called at the end, if no kernel is missing then.
    """

    def __init__(
        self, compiler: Compiler, kernels: Sequence[Any], lock: IO[str] | None, whole: Callable[[], None]
    ) -> None:
        jobs = [(kernel.name, pickle.dumps(kernel.recipe)) for kernel in kernels]
        compiler.begin(compile_recipe, jobs, min(len(jobs), most_processes()), lock)
        self._outcomes, self._left = compiler.outcomes(), set(range(len(jobs)))
        self._kernels, self._whole = kernels, whole
        self._held, self._turn = ExitStack(), threading.Lock()

    def wait(self, first: int) -> None:
        """Waits for the ``first`` kernels."""
        wanted = sum(number < first for number in self._left)
        with progress_bar(total=wanted, desc="compiling kernels, once", unit="kernel", show=wanted > 0) as bar:
            while any(number < first for number in self._left):
                number, outcome = next(self._outcomes)
                self._left.remove(number)
                if outcome.failure is not None:
                    warnings.warn(f"{outcome.job[0]} was not compiled ahead: {outcome.failure}", stacklevel=4)
                bar.update(number < first)

    def go_on(self, held: ExitStack) -> None:
        """Leaves the rest to whoever launches it first; ``held`` is closed at the end."""
        from mha2mla.kernels.machine import AWAITED

        self._held = held
        atexit.register(held.close)
        AWAITED.update({self._kernels[number].digest: self.finish for number in self._left})
        if not self._left:
            self.finish()

    def finish(self) -> None:
        """Waits for all kernels; where that fails, their launches compile them."""
        from mha2mla.kernels.machine import AWAITED, note

        with self._turn:  # of threads that launch one at the same time
            try:
                self.wait(len(self._kernels))
                if all(note(kernel.digest).exists() for kernel in self._kernels):
                    self._whole()
            finally:
                self._left = set()
                for kernel in self._kernels:
                    AWAITED.pop(kernel.digest, None)
                atexit.unregister(self._held.close)
                self._held.close()


def most_processes() -> int:
    """Processes that compile at a time, by the environment or the cores that this one may use. Raises ValueError for
    another setting than a number of them."""
    asked = os.environ.get("MHA2MLA_COMPILE_PROCESSES")
    if asked is None:
        return usable_cores()
    if not asked.isdecimal():
        raise argument_error("MHA2MLA_COMPILE_PROCESSES", repr(asked), "a whole number of processes, or 0 for none")
    return int(asked)


def compile_recipe(job: tuple[str, bytes]) -> None:
    """Compiles into TileLang's disk cache what a :class:`~mha2mla.kernels.machine.Kernel` is made by.

    Args:
        job: the kernel's name, and its pickled recipe.
    """
    from mha2mla.kernels.machine import listing

    path, arguments, static = pickle.loads(job[1])
    logging.getLogger("tilelang").setLevel(logging.WARNING)  # importing TileLang sets a level that logs each kernel
    with listing() as kernels:
        resolve_name(path)(*arguments, **static)
    for kernel in kernels:
        kernel.build()  # loading it would link it a second time


@cache
def _sources() -> str:
    """Digest of the code that kernels are made by."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[IO[str] | None]:
    """A file locked until all who have it open close it or end; None where no file can be made."""
    with ExitStack() as held:
        file = None
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@dataclass(frozen=True)
class Outcome:
    """The end of a job: ``value`` returned by the function, or ``failure`` with the reason there is none."""

    job: Any
    value: Any = None
    failure: str | None = None
    seconds: float = 0.0


def run_in_workers(
    function: Callable[[Any], Any],
    jobs: Iterable[Any],
    *,
    workers: int = 1,
    timeout: float = 120.0,
    until: float | None = None,
    prepare: Callable[[], Any] | None = None,
    start_method: str = "spawn",
) -> Iterator[Outcome]:
    """Calls ``function(job)`` for every job in other processes; outcomes come in the order in which jobs end.

    A process whose job takes too long is killed ("hung: …"), one that dies is replaced ("crashed: …"), and so is one
    whose job raised ("ValueError: …"), since an error on a GPU stays with its process.

    Args:
        function: importable by name.
        jobs: picklable; drawn one at a time, after the outcomes so far were handed out: a generator may look at them.
        workers: processes at a time.
        timeout: seconds for one job.
        until: ``time.monotonic()`` from which on no job is begun; jobs in flight then are killed (:data:`OUT_OF_TIME`).
        prepare: called in every process before its first job, within ``STARTUP`` seconds that no job is charged for.
            With it the processes start before the first job is drawn.
        start_method: "spawn", or "fork" in a process of one thread that did not touch CUDA.
    """
    context, team, jobs = multiprocessing.get_context(start_method), [], iter(jobs)

    def start() -> _Worker:
        team.append(_Worker(context, function, timeout, prepare))
        return team[-1]

    if prepare is not None:
        for _ in range(workers):
            start()
    try:
        while True:
            while until is None or time.monotonic() < until:
                free = next((worker for worker in team if worker.job is _NONE), None)
                if free is None and len(team) == workers:
                    break
                job = next(jobs, _NONE)
                if job is _NONE:
                    break
                (free or start()).begin(job)
            busy = [worker for worker in team if worker.job is not _NONE]
            if not busy:
                return
            ends = min(worker.deadline for worker in busy)
            ends = ends if until is None else min(ends, until)
            wait([worker.connection for worker in busy], max(0.0, ends - time.monotonic()))
            late = until is not None and time.monotonic() >= until
            for worker in busy:
                outcome = worker.poll(late)
                if outcome is None:
                    continue
                if outcome.failure is not None:
                    worker.kill()
                    team.remove(worker)
                yield outcome
    finally:
        for worker in team:
            worker.kill()


_NONE = object()


class _Worker:
    """A process that serves one job at a time, once it is ready."""

    def __init__(
        self, context: Any, function: Callable[[Any], Any], timeout: float, prepare: Callable[[], Any] | None
    ) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function, prepare), daemon=True)
        # A Ctrl-C reaches every process of a terminal; the parent ends its children, without a traceback of theirs. The
        # tracker first: starting it, as the first process would, lets the signal through again.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self.process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()  # so that a process that dies ends the connection
        self.job: Any = _NONE
        self.timeout, self.ready = timeout, False
        self.started = time.monotonic()
        self.deadline = self.started + STARTUP

    def begin(self, job: Any) -> None:
        self.job = job
        if self.ready:
            self._clock()
        with suppress(OSError):  # the process died: poll() reports it
            self.connection.send(job)

    def _clock(self) -> None:
        self.started = time.monotonic()
        self.deadline = self.started + self.timeout

    def poll(self, late: bool) -> Outcome | None:
        """The outcome of the job, or None while it runs; with ``late`` never None."""
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


class Compiler:
    """A Python of its own that imports torch and TileLang once, at once, and forks a process for each job.

    It sees no GPU and has one thread, which is what makes forks safe. It imports no ``__main__``, so that a user's
    script needs no guard against being run by it. All its processes end with the context.
    """

    # By the command's name the package does not import transformers.
    CODE = (
        "import sys; sys.argv[0] = 'mha2mla'; from mha2mla.kernels import parallel_compilation as p; p.serve_jobs({})"
    )

    def __enter__(self) -> Compiler:
        self._connection, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.CODE.format(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C is the parent's
        )
        theirs.close()
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # nvcc too
        self._process.wait()
        self._connection.close()

    def begin(
        self, function: Callable[[Any], Any], jobs: Sequence[Any], workers: int, lock: IO[str] | None = None
    ) -> None:
        """Begins :func:`run_in_workers` there, once; the process has the open file ``lock``, too, until it ends."""
        self._jobs = list(jobs)
        with suppress(OSError):  # it died: outcomes say so
            self._connection.send((function, self._jobs, workers, lock is not None))
            if lock is not None:
                send_handle(self._connection, lock.fileno(), self._process.pid)

    def outcomes(self) -> Iterator[tuple[int, Outcome]]:
        """Numbers of the jobs and their outcomes, in the order in which they end."""
        failure, left = None, dict(enumerate(self._jobs))
        while left and failure is None:
            try:
                if self._connection.poll(STARTUP + COMPILE_TIMEOUT):
                    number, outcome = self._connection.recv()
                    yield number, replace(outcome, job=left.pop(number))
                else:
                    failure = "hung: the process that compiles does not answer"
            except (EOFError, OSError):
                failure = f"crashed: the process that compiles ended with exit code {self._process.wait()}"
        yield from ((number, Outcome(job, failure=failure)) for number, job in left.items())


def serve_jobs(number: int) -> None:
    """Main program of a :class:`Compiler`, over an inherited file descriptor; ends with its parent."""
    import mha2mla.kernels.machine  # noqa: F401  before forks need it

    connection = Connection(number)
    os.register_at_fork(after_in_child=connection.close)  # so that its end is this process's
    gc.collect()
    gc.freeze()  # forks share what was imported
    with suppress(EOFError, OSError):
        function, jobs, workers, has_lock = connection.recv()
        if has_lock:  # this process's alone: what outlives it must not hold the lock
            os.register_at_fork(after_in_child=partial(os.close, recv_handle(connection)))
        options = {"workers": workers, "timeout": COMPILE_TIMEOUT, "start_method": "fork"}
        for outcome in run_in_workers(lambda numbered: function(numbered[1]), enumerate(jobs), **options):
            # Short, since the parent may read it much later.
            connection.send((outcome.job[0], replace(outcome, job=None)))


def _serve(connection: Connection, function: Callable[[Any], Any], prepare: Callable[[], Any] | None) -> None:
    failure = None if prepare is None else _call(prepare)[1]
    gc.collect()
    gc.freeze()  # imports are not traversed again: compiling makes many Python objects
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
