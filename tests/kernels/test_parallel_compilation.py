"""Compile jobs, and worker processes under time-outs and a Ctrl-C, which a terminal sends to all of them."""

from __future__ import annotations

import fcntl
import importlib
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from mha2mla.kernels import parallel_compilation
from mha2mla.kernels.gqa_decode import api as gqa_api
from mha2mla.kernels.mla_decode import api as mla_api
from mha2mla.kernels.mla_decode.selection import select_kernel
from mha2mla.kernels.parallel_compilation import OPS, CompileJob, compile_job, compile_launches, run_in_workers
from mha2mla.kernels.split_kv.op import PagedOp
from mha2mla.testing.problems import Problem
from tests.kernels.compile_gate import find_tool

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys, time
sys.path.insert(0, {folder!r})
from jobs import work

def run():
    from mha2mla.kernels.parallel_compilation import run_in_workers
    for _ in run_in_workers(work, [1, 2], workers=2):
        pass

if __name__ == "__main__":
    import types
    fake = types.ModuleType("mha2mla.cli.verbs")
    fake.main = run
    sys.modules["mha2mla.cli.verbs"] = fake
    from mha2mla.__main__ import main
    sys.exit(main())
"""
JOBS = """
import os, signal

def work(job):
    masked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    print("masked" if masked else "open", os.getpid(), flush=True)
    while True:
        signal.pause()
"""


NORMS = """
import sys
import torch
from mha2mla.kernels import parallel_compilation
from mha2mla.kernels.pointwise.kernel import launch_rms_norm

def norm(width):
    x = torch.ones(4, width, dtype=torch.bfloat16)
    launch_rms_norm(x, None, x[0].clone(), 1e-5, torch.empty_like(x), torch.empty_like(x))

for _ in range(2):
    whole = []
    missing = parallel_compilation.compile_listed(lambda: norm(64), lambda: norm(128), lambda: whole.append(1))
    from mha2mla.kernels.machine import AWAITED
    for finish in set(AWAITED.values()):  # none if the other kernel was the first
        finish()
    print(missing, len(AWAITED), whole, end=" ")
"""


def test_a_ctrl_c_showed_the_traceback_of_every_worker(tmp_path):
    (tmp_path / "jobs.py").write_text(JOBS)
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=str(tmp_path)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, before)
    masks, workers = zip(*(process.stdout.readline().split() for _ in range(2)), strict=True)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert masks == ("masked", "masked")
    assert process.returncode == 130 and output == "mha2mla: interrupted\n"
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_only_combine_kernels_that_are_launched_are_compiled(monkeypatch):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.split_kv.combine import combine_splits

    monkeypatch.setattr(parallel_compilation, "num_sms", lambda _: 132)
    problem = Problem(4, 1, 32, 8, (70,))

    def merges(*calls):
        job = compile_job(problem.op, problem.shape(), torch.device("cpu"), calls)
        return {combine_splits(num_ctas, batch) for _, num_ctas, batch in job.launches}

    assert merges((64, lambda resident: resident)) == {4}
    assert merges((64, lambda resident: resident), (1, lambda _: 1), (1, lambda resident: resident)) == {4, 64}


def test_jobs_of_all_decode_ops_compile():
    ops = [each for module in (mla_api, gqa_api) for each in vars(module).values() if isinstance(each, PagedOp)]
    assert len(ops) > 6 and all(OPS[each.name] is each for each in ops)


def test_everything_a_call_launches_is_compiled_beforehand(monkeypatch):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.split_kv import combine, launch, plan_kernel

    compiled = []
    # Caches of its own: what another test compiled counts for nothing here, nor this test's stand-ins for others.
    cached = ((combine, "compile_combine"), (plan_kernel, "compile_planner"))
    for module, name in ((launch, "compile_kernels"), (launch, "compile_choice"), *cached):
        monkeypatch.setattr(module, "compile_for", lambda function, *_: compiled.append(function))
        fresh = cache(getattr(module, name).__wrapped__)
        for holder in {module, launch} if hasattr(launch, name) else {module}:
            monkeypatch.setattr(holder, name, fresh)
    shape = Problem(7, 1, 72, 8, ()).shape()
    compile_launches(CompileJob("mla_decode", shape, 90, ((select_kernel(shape, 90), 132, 64),)))
    names = {function.attrs["global_symbol"] for function in compiled}
    assert names >= {"mla_decode_plan", "mla_decode_combine"}
    assert len(names) == 3


@pytest.mark.usefixtures("forked")
def test_a_job_that_hangs_is_killed_and_the_others_run():
    outcomes = list(run_in_workers(time.sleep, [0, 1000, 0.01], timeout=2))
    assert [outcome.job for outcome in outcomes] == [0, 1000, 0.01]
    assert [outcome.failure for outcome in outcomes] == [None, "hung: no answer within 2 s", None]


@pytest.mark.usefixtures("forked")
def test_a_process_that_dies_or_raises_is_replaced():
    assert [o.failure for o in run_in_workers(os._exit, [3])] == ["crashed: the process ended with exit code 3"]
    outcomes = {o.job: o for o in run_in_workers(int, ["1", "x", "2"], workers=2)}
    assert (outcomes["1"].value, outcomes["2"].value) == (1, 2)
    assert outcomes["x"].failure.startswith("ValueError: invalid literal")


@pytest.mark.usefixtures("forked")
def test_later_jobs_may_depend_on_earlier_outcomes():
    seen = []

    def jobs():
        yield "x"
        if not seen:
            yield "1"

    for outcome in run_in_workers(int, jobs()):
        seen.append(outcome.job)
    assert seen == ["x"]


@pytest.mark.usefixtures("forked")
def test_processes_start_while_the_first_job_is_made(tmp_path):
    def jobs():
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        yield -1

    (outcome,) = run_in_workers(abs, jobs(), prepare=partial(os.mkdir, tmp_path / "ready"))
    assert outcome.value == 1


def fail_to_start():
    raise OSError("no device")


@pytest.mark.usefixtures("forked")
def test_a_process_that_cannot_start_says_why():
    assert [o.failure for o in run_in_workers(abs, [1], prepare=fail_to_start)] == ["OSError: no device"]


def norms(*widths):
    from mha2mla.kernels.pointwise.kernel import launch_rms_norm

    for width in widths:
        x = torch.ones(4, width, dtype=torch.bfloat16)
        launch_rms_norm(x, None, x[0].clone(), 1e-5, torch.empty_like(x), torch.empty_like(x))


def test_a_script_without_a_guard_compiles_once(tmp_path):
    """Processes import no __main__, see no GPU, and leave what they compile where the next run finds it."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    if find_tool("nvcc") is None:
        pytest.skip("nvcc is neither on PATH nor installed by pip")
    (tmp_path / "script.py").write_text(NORMS)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TILELANG_CACHE_DIR": str(tmp_path / "cache")}
    script = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout == "2 0 [1] 0 0 [1] ", done.stderr
    assert len(list((tmp_path / "cache").glob("*/*/kernels/*"))) == 2


def test_a_listing_compiles_nothing_and_forgets(monkeypatch, tmp_path):
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels import machine

    made, compiled = [], []
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tilelang, "compile", lambda function, **_: compiled.append(function) or 1 / 0)
    monkeypatch.setattr(machine, "check_arguments", made.append)
    monkeypatch.setattr(machine, "_MADE", {})
    with machine.listing() as kernels:
        norms(72, 136, 72)
    assert [kernel.name for kernel in kernels] == ["rms_norm"] * 2 and compiled == []
    assert len({kernel.digest for kernel in kernels}) == 2
    with pytest.raises(ZeroDivisionError):
        norms(72)
    with pytest.raises(ZeroDivisionError):  # a launch that was kept, of another thread perhaps, compiles
        kernels[0](None)
    assert len(compiled) == 2 and len(made) == 2  # none is made a second time
    assert compiled[0] is compiled[1]


def test_what_was_listed_is_launched(monkeypatch):
    """As functions return it: a kernel, or several and numbers beside them; once, and then as before a listing."""
    machine = pytest.importorskip("mha2mla.kernels.machine", reason="TileLang is not installed")
    calls, kernel = [], partial(machine.Kernel, "", "", 0, ("", (), {}), None)
    monkeypatch.setattr(machine, "_KEPT", [])
    monkeypatch.setattr(machine, "_MADE", {})

    @machine.compiled_once
    def compile_two(width, *, dtype):
        calls.append((width, dtype))
        return (kernel(lambda: "first"), (kernel(lambda: "other"), 16)) if len(calls) == 1 else "compiled"

    with machine.listing():
        compile_two(8, dtype="half")
        compile_two(8, dtype="half")
    assert [compile_two(8, dtype="half") for _ in range(2)] == [("first", ("other", 16))] * 2
    assert compile_two(8, dtype="float") == "compiled" and calls == [(8, "half"), (8, "float")]


def test_a_noted_call_is_not_run_again(monkeypatch, tmp_path):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    ran = []
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parallel_compilation, "num_sms", lambda _: 132)
    gpu, run = torch.device("cuda"), lambda: ran.append(1)

    def compile_listed(run, later, whole):
        run()
        if len(ran) == 2:
            whole()
        return 2

    monkeypatch.setattr(parallel_compilation, "compile_listed", compile_listed)
    # One kernel was left over, so that the second call looks again.
    assert [parallel_compilation.compile_ahead(gpu, "call", run) for _ in range(3)] == [2, 2, 0]
    assert parallel_compilation.compile_ahead(torch.device("cpu"), "another", run) == 0
    monkeypatch.setenv("MHA2MLA_COMPILE_PROCESSES", "0")
    assert parallel_compilation.compile_ahead(gpu, "another", run) == 0
    assert len(ran) == 2


@pytest.mark.parametrize("asked", ["-1", "two", "", "2.5"])
def test_no_number_of_processes_is_named(monkeypatch, asked):
    """Of -1 every kernel had a process of its own."""
    monkeypatch.setenv("MHA2MLA_COMPILE_PROCESSES", asked)
    with pytest.raises(ValueError, match=f"MHA2MLA_COMPILE_PROCESSES is '{asked}'; expected a whole number"):
        parallel_compilation.most_processes()


def test_kernels_that_fail_are_left_to_their_launch(monkeypatch, tmp_path):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.machine import listing

    given, whole = [], []
    with listing() as kernels:
        norms(1024, 2048, 512)
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parallel_compilation, "Compiler", partial(FakeCompiler, kernels, given, hangs=0))
    monkeypatch.setenv("MHA2MLA_COMPILE_PROCESSES", "2")
    for expected in (3, 1):
        with pytest.warns(UserWarning, match="rms_norm was not compiled ahead: hung"):
            run = partial(norms, 1024, 2048, 512)
            assert parallel_compilation.compile_listed(run, whole=lambda: whole.append(1)) == expected
    assert given == [(3, 2), (1, 1)] and not whole


class FakeCompiler:
    """Compiles nothing, and notes all kernels but the job numbered ``hangs`` when their outcomes are asked for."""

    def __init__(self, kernels, given, hangs=None):
        self.digests = {pickle.dumps(kernel.recipe): kernel.digest for kernel in kernels}
        self.given, self.hangs = given, hangs

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.hangs is None:
            self.given.append("ended")

    def begin(self, function, jobs, workers, lock):
        assert lock is not None
        self.jobs = jobs
        self.given.append((len(jobs), workers))

    def outcomes(self):
        from mha2mla.kernels.machine import write_note

        for number, job in enumerate(self.jobs):
            hangs = number == self.hangs
            if not hangs:
                write_note(self.digests[job[1]])
            yield number, parallel_compilation.Outcome(job, failure="hung: it took too long" if hangs else None)


def test_kernels_that_are_wanted_later_are_waited_for_by_their_launch(monkeypatch, tmp_path):
    """Or by the next call; this one goes on once it has its own."""
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels import machine

    given, whole, compiled = [], [], []
    with machine.listing() as kernels:
        norms(1024, 2048, 512)
    noted = lambda: [machine.note(kernel.digest).exists() for kernel in kernels]  # noqa: E731
    monkeypatch.setattr(parallel_compilation, "num_sms", lambda _: 132)
    monkeypatch.setattr(parallel_compilation, "Compiler", partial(FakeCompiler, kernels, given))
    monkeypatch.setenv("MHA2MLA_COMPILE_PROCESSES", "2")
    call = partial(parallel_compilation.compile_listed, partial(norms, 2048), partial(norms, 2048, 1024, 512))
    another = partial(parallel_compilation.compile_ahead, torch.device("cuda"), "another")
    monkeypatch.setattr(machine, "_MADE", {})
    monkeypatch.setattr(tilelang, "compile", lambda function, **_: compiled.append(noted()) or 1 / 0)
    for way in ("launch", "call"):
        monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / way))
        assert another(lambda: None) == 0  # and is noted
        assert call(partial(whole.append, way)) == 3
        assert noted() == [False, True, False] and len(machine.AWAITED) == 2 and way not in whole
        if way == "launch":
            with pytest.raises(ZeroDivisionError):
                norms(1024)
        else:
            assert another(None) == 0
        assert noted() == [True] * 3 and not machine.AWAITED and whole[-1] == way
        assert given == ["ended", (3, 2), "ended"]
        given.clear()
    assert compiled == [[True] * 3]


def test_a_compiler_imports_once_and_forks():
    """One thread, no GPU, no transformers; what dies is replaced, and nothing outlives the context."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    looks = ("os.getpid()", "os.getppid()", "len(os.listdir('/proc/self/task'))", "os.environ['CUDA_VISIBLE_DEVICES']")
    looks += ("'tilelang' in sys.modules", "'transformers' in sys.modules", "os._exit(3)", "1")
    jobs = [f"[{look} for os, sys in [(__import__('os'), __import__('sys'))]][0]" for look in looks]
    with parallel_compilation.Compiler() as compiler:
        compiler.begin(eval, jobs, 1)
        numbers, outcomes = zip(*compiler.outcomes(), strict=True)
        assert numbers == tuple(range(8)) and outcomes[1].value == compiler._process.pid
    assert [outcome.job for outcome in outcomes] == jobs
    assert [outcome.value for outcome in outcomes[2:]] == [1, "", True, False, None, 1]
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    assert failures == ["crashed: the process ended with exit code 3"]
    assert not any(Path(f"/proc/{outcome.value}").exists() for outcome in outcomes[:2])


def test_a_compiler_that_dies_leaves_its_jobs():
    with parallel_compilation.Compiler() as compiler:
        compiler._process.kill()
        compiler.begin(abs, [1, 2], 2)
        outcomes = list(compiler.outcomes())
    failure = "crashed: the process that compiles ended with exit code -9"
    assert outcomes == [(number, parallel_compilation.Outcome(number + 1, failure=failure)) for number in (0, 1)]


def test_a_compiler_holds_a_lock_to_its_end(tmp_path):
    """Not the process that began it, which may read of the end much later, or never."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    path = tmp_path / "cache" / "lock"
    with parallel_compilation.Compiler() as compiler:
        with parallel_compilation._locked(path) as lock:
            compiler.begin(time.sleep, [1.0], 1, lock)
        began = time.monotonic()
        with path.open("a") as other:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_EX)
        assert compiler._process.wait(60) == 0 and time.monotonic() - began < 60
        assert [(number, outcome.failure) for number, outcome in compiler.outcomes()] == [(0, None)]


def test_a_lock_goes_with_what_compiles(tmp_path):
    """Its own processes may live on for a while when it is killed."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    started, path = tmp_path / "started", tmp_path / "lock"
    with parallel_compilation.Compiler() as compiler:
        with parallel_compilation._locked(path) as lock:
            job = f"[__import__('pathlib').Path({str(started)!r}).touch(), __import__('time').sleep(100)]"
            compiler.begin(eval, [job], 1, lock)
        while not started.exists():
            time.sleep(0.02)
        compiler._process.kill()
        with path.open("a") as other:
            fcntl.flock(other, fcntl.LOCK_EX)  # hangs, if the process that sleeps has it


def test_what_compiles_kernels_is_found_by_its_name():
    """As processes look it up."""
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    import mha2mla.kernels
    from mha2mla.kernels import machine

    for module in pkgutil.walk_packages(mha2mla.kernels.__path__, "mha2mla.kernels."):
        importlib.import_module(module.name)
    assert len(machine._KEPT) >= 18
    for kept in machine._KEPT:
        assert pkgutil.resolve_name(f"{kept.__module__}:{kept.__qualname__}") is kept


def test_a_run_that_fails_leaves_kernels_to_their_launch():
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from mha2mla.kernels.machine import listing

    def run():
        norms(72)
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    with pytest.warns(UserWarning, match="one after another: OutOfMemoryError: CUDA out of memory$"):
        assert parallel_compilation.compile_listed(run, whole=lambda: 1 / 0) == 0
    with listing() as kernels:
        norms(72)
    assert len(kernels) == 1
