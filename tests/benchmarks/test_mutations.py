"""The list of deliberate faults does not rot, and the run tells what is caught from what survives."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.faults import FAULTS, Fault
from benchmarks.mutations import put_in, run_faults

ROOT = Path(__file__).parents[2]


def test_every_fault_can_be_put_in():
    """Each snippet occurs exactly once in its file, which is still Python with the fault, and another program."""
    wrong = []
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        if text.count(fault.right) != 1:
            wrong.append(f"{fault.name}: {text.count(fault.right)} times in {fault.file}")
        elif ast.dump(ast.parse(put_in(fault, text))) == ast.dump(ast.parse(text)):
            wrong.append(f"{fault.name}: the program is the same")
    assert not wrong, "\n".join(wrong)


def test_every_fault_has_tests_that_exist():
    missing = {test for fault in FAULTS for test in fault.tests if not (ROOT / test.partition("::")[0]).is_file()}
    assert not missing
    assert all(fault.tests for fault in FAULTS)


def test_there_are_enough_of_them_and_each_has_its_own_name():
    assert len(FAULTS) >= 45
    assert Counter(fault.name for fault in FAULTS).most_common(1)[0][1] == 1
    places = Counter(fault.file.split("/")[1] for fault in FAULTS)
    assert all(places[part] >= 5 for part in ("kernels", "modeling", "conversion", "testing")), places


@pytest.fixture
def tree(tmp_path):
    """A package of one function, a test that looks at one of its two branches, and a test that fails always."""
    (tmp_path / "mha2mla").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = ['--import-mode=importlib']\n")
    (tmp_path / "mha2mla" / "__init__.py").write_text("def f(x):\n    return 1 if x else 2\n")
    (tmp_path / "tests" / "test_f.py").write_text(
        "from mha2mla import f\n\ndef test_true():\n    assert f(True) == 1\n\ndef test_red():\n    assert f(0) == 3\n"
    )
    return tmp_path


def test_a_run_tells_caught_from_survived_and_unsound(tree):
    caught = Fault("other branch", "mha2mla/__init__.py", "return 1", "return 5", ("tests/test_f.py",), "true")
    faults = [
        caught,
        replace(caught, name="unseen branch", right="else 2", wrong="else 7"),
        replace(caught, name="red before", only="red"),
    ]
    saved = []
    rows = run_faults(faults, tree, timeout=240, save=lambda rows: saved.append(len(rows)), workers=2)
    said = {row["fault"]: row["status"].partition(":")[0] for row in rows}
    assert said == {"other branch": "caught", "unseen branch": "survived", "red before": "unsound"}
    assert len(saved) == max(saved) == 3
    assert (tree / "mha2mla" / "__init__.py").read_text() == "def f(x):\n    return 1 if x else 2\n"
    assert run_faults(faults, tree, timeout=240, budget=-1) == []


def test_a_snippet_that_occurs_twice_is_refused():
    fault = Fault("twice", "file.py", "x", "y", ("tests",))
    with pytest.raises(ValueError, match="occurs 2 times in file.py"):
        put_in(fault, "x = x")
