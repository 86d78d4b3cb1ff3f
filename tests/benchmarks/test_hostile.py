"""The benchmark of damaged files, over few cases; and what it would say of verbs that do worse."""

import io
import os
import signal
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout

import pytest

from benchmarks import hostile


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    at = tmp_path_factory.mktemp("hostile") / "files"
    at.mkdir()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        hostile.prepare(at)
        return at, hostile.expectations(at)


def test_damaged_files_are_refused_in_a_sentence(files):
    at, expected = files
    cases = [case for case in hostile.all_cases(at) if case.verb not in ("convert", "eval latency")]
    rows = list(hostile.run_cases(hostile.choose(cases, 30, seed=5), at, expected))
    bad = [row for row in rows if row["outcome"] not in ("right", "other", "refused") or row["characters"] > 600]
    assert not bad and len(rows) == 30 and all(row["named"] for row in rows)
    outcomes = Counter(row["outcome"] for row in rows)
    assert outcomes["refused"] > 10 and outcomes["other"] < 5


def test_cases_of_a_seed_are_the_same_and_of_every_verb(files):
    cases = hostile.all_cases(files[0])
    chosen = hostile.choose(cases, 200, seed=1)
    assert chosen == hostile.choose(cases, 200, seed=1) != hostile.choose(cases, 200, seed=2)
    assert {case.verb for case in chosen} == set(hostile.VERBS) and len(set(chosen)) == 200


def test_a_crash_costs_its_own_case_alone(files):
    at, expected = files
    good = next(case for case in hostile.all_cases(at) if case.verb == "inspect" and "missing" in case.what)
    deadly = hostile.Case("inspect", "converted", "kills", (), lambda folder: os.kill(os.getpid(), signal.SIGSEGV))
    wrong = hostile.Case("inspect", "converted", "raises", (), lambda folder: None)
    rows = list(hostile.run_cases([good, deadly, good, wrong], at, {**expected, ("inspect", "converted"): None}))
    assert [row["outcome"] for row in rows] == ["refused", "crash", "refused", "other"]
    assert hostile.counts(rows)[-1] | {"crash": 1, "refused": 2, "runs": 4, "other": 1} == hostile.counts(rows)[-1]
