"""Atomic writes, and output paths of all verbs: no file of the user's is replaced, a bad path is refused at once."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mha2mla import files
from mha2mla.eval.plotting import Curve, Panel, Picture
from mha2mla.eval.report import write_json
from mha2mla.files import atomic_write, output_file, page, report_file
from tests.commands import run
from tests.folders import contents
from tests.ops import noted

OUTPUTS = {
    "convert": ("convert", "source", "made", "--json"),
    "eval quality": ("eval", "quality", "source", "converted", "--json"),
    "eval tasks": ("eval", "tasks", "source", "converted", "--json"),
    "eval latency": ("eval", "latency", "source", "converted", "--json"),
    "check kernels": ("check", "kernels", "--device", "cpu", "--json"),
    "generate": ("generate", "converted", "--prompt", "a", "--json"),
    "generate --output": ("generate", "converted", "--prompt", "a", "--output"),
    "heal": ("heal", "source", "converted", "made", "--json"),
    "heal --log": ("heal", "source", "converted", "made", "--log"),
    "demo": ("demo", "--model", "source", "--json"),
    "inspect": ("inspect", "converted", "--json"),
    "env": ("env", "--json"),
    "report": ("report", "report.json", "--output"),
    "report.md": ("report", "report.json", "-o"),
}
HOSTILE = {
    "notes{}": "which is there and no",
    "photo{}": "which is there and no",
    "other{}": "which is there and no",
    "folder{}": "names a folder",
    "new{}/": "names a folder",
    "fifo{}": "no regular file",
    "source/config{}": "in the checkpoint",
    "converted/new{}": "in the checkpoint",
    "converted/deep/new{}": "in the checkpoint",
    "elsewhere/new{}": "in the checkpoint",
    "link/new{}": "in the checkpoint",
    "converted/../source/new{}": "in the checkpoint",
    "~/source/new{}": "in the checkpoint",
    "linked{}": "in the checkpoint",
    "hard{}": "which is there and no",
    "notes.json/new{}": "cannot be written",
    "/proc/new{}": "cannot be written",
    "circle{}": "cannot be written",
    "n" * 260 + "{}": "cannot be written",
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder and home: checkpoints without weights in them, so that any work would fail, and files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, kind in (("source", "llama"), ("converted", "mha2mla"), ("elsewhere", "llama")):
        Path(name, "deep").mkdir(parents=True)
        Path(name, "config.json").write_text(json.dumps({"model_type": kind}))
        Path(name, "model.safetensors").write_bytes(b"weights")
    os.symlink("converted", "link")
    write_json("report.json", kind="anything", rows=[])
    for suffix in (".json", ".jsonl", ".html", ".md"):
        Path("notes" + suffix).write_text("milk, eggs")
        Path("photo" + suffix).write_bytes(b"\xff\xd8\xff\xe0 JFIF")
        Path("other" + suffix).write_text('{"schema": "mha2mla.report/1", "kind": "another", "rows": []}\n')
        Path("folder" + suffix).mkdir()
        os.mkfifo("fifo" + suffix)
        os.symlink("source/new" + suffix, "linked" + suffix)
        os.symlink("circle" + suffix, "circle" + suffix)
        os.link("source/model.safetensors", "hard" + suffix)
    return tmp_path


@pytest.mark.parametrize("output", OUTPUTS)
def test_hostile_output_paths_are_refused(output, folder, capsys):
    suffix = {"generate --output": ".jsonl", "report": ".html", "report.md": ".md"}.get(output, ".json")
    before = contents(folder)
    for path, reason in HOSTILE.items():
        assert run(*OUTPUTS[output], path.format(suffix)) == 2, path
        error = capsys.readouterr().err
        if (output, path) == ("generate --output", "other{}"):  # answers are told by their lines
            reason = "whose line 1 is no answer"
        lines = [line for line in error.splitlines() if not line.startswith("loading ")]  # said before slow imports
        assert reason in error and len(lines) == 1, (path, error)
        assert contents(folder) == before, path


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("convert", "source", "made", "--json", "made/model.safetensors"), "lies in 'made', a folder that is made"),
        (("convert", "source", "made", "--json", "made"), "lies in 'made', a folder that is made"),
        (("convert", "source", "made", "--json", "converted/conversion.json"), "in the checkpoint"),
        (("convert", "source", "made", "--recipe", "r.yaml", "--json", "r.yaml"), "which another argument names"),
        (
            ("report", "report.json", "-o", "report.json"),
            "output is 'report.json'; expected a name that ends in .html or",
        ),
        (("report", "report.json", "-o", "page"), "output is 'page'; expected a name that ends in"),
        (("report", "converted", "-o", "converted/model.safetensors"), "expected a name that ends in"),
        (("report", "converted", "-o", "converted/README.md"), "expected a file outside it, or one of report.md"),
        (("report", "a.html", "-o", "./a.html"), "another argument names"),
        (("generate", "converted", "--prompt", "a", "--output", "a", "--json", "./a"), "another argument names"),
        (("heal", "source", "converted", "made", "--log", "made/a.json"), "lies in 'made', a folder that is made"),
        (("heal", "source", "converted", "made", "--json", "a", "--log", "./a"), "another argument names"),
        (("generate", "converted", "--file", "p.jsonl", "--output", "~/p.jsonl"), "another argument names"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_outputs_are_no_inputs_and_no_other_outputs(argv, reason, folder, capsys):
    Path("r.yaml").touch()
    Path("p.jsonl").touch()
    before = contents(folder)
    assert run(*argv) == 2
    assert reason in capsys.readouterr().err and contents(folder) == before


def test_a_report_replaces_one_of_its_kind(folder):
    target = folder / "reports" / "env.json"
    os.symlink(target, "way")
    Path("empty.json").touch()
    for _ in range(2):
        assert run("env", "--json", "way") == 0
        assert run("env", "--json", "empty.json") == 0
    assert json.loads(target.read_text())["kind"] == "environment" and Path("way").is_symlink()
    assert [each.name for each in target.parent.iterdir()] == ["env.json"]


def test_reports_may_lie_in_a_checkpoint_by_name(folder):
    assert report_file("converted/quality.json", "quality", "converted") == folder / "converted" / "quality.json"
    target = folder / "converted" / "report.html"
    assert output_file("converted/report.html", page("report.html"), "converted", name="output") == target
    with pytest.raises(ValueError, match="expected a file outside it, or one of .*quality.json"):
        report_file("converted/mine.json", "quality")


def test_pictures_are_of_the_kind_that_they_are_named(tmp_path):
    drawn = Picture("", [Panel("", "layer", "error", [Curve("a", [(0, 0.1), (1, 0.2)])])])
    for name, head in (("a.png", b"\x89PNG"), ("a.SVG", b"<svg"), ("a.pdf", b"%PDF-")):
        for _ in range(2):  # the second replaces the first
            drawn.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(head)
    shutil.copy(tmp_path / "a.png", tmp_path / "b.svg")
    with pytest.raises(ValueError, match="no SVG picture"):
        drawn.save(tmp_path / "b.svg")
    with pytest.raises(ValueError, match="expected a name that ends in"):
        drawn.save(tmp_path / "a.jpg")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.SVG", "a.pdf", "a.png", "b.svg"]


def test_a_page_replaces_a_page_and_nothing_else(folder):
    write_json("q.json", kind="tasks", rows=[], source="a", converted="b")
    for name in ("a.html", "a.md"):
        for _ in range(2):
            assert run("report", "q.json", "-o", name) == 0
        Path(name).write_text("<!doctype html>\n<html lang='en'>mine")
        assert run("report", "q.json", "-o", name) == 2 and "mine" in Path(name).read_text()


def test_write_output_spares_a_file_that_appeared(tmp_path):
    path = report_file(tmp_path / "r.json", "quality")
    path.write_text("mine")
    with pytest.raises(ValueError, match="no report of kind 'quality'"):
        write_json(path, kind="quality", rows=[])
    assert path.read_text() == "mine"


def test_names_inside_are_no_names_of_a_checkpoint():
    from mha2mla.conversion.destination import is_written_by_conversion

    assert not any(map(is_written_by_conversion, files.INSIDE))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_files_and_folders_are_refused(tmp_path):
    path = write_json(tmp_path / "r.json", kind="quality", rows=[])
    path.chmod(0o400)
    with pytest.raises(ValueError, match="which is read-only"):
        report_file(path, "quality")
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ValueError, match="cannot be written: .*Permission denied"):
        report_file(tmp_path / "closed" / "r.json", "quality")


def test_atomic_write_is_synced_then_renamed(tmp_path, monkeypatch):
    """A power cut after the rename must not find an empty file; one during the write must not find half of it."""
    events: list = []
    noted(monkeypatch, os, "fsync", lambda handle: events.append(("sync", os.readlink(f"/proc/self/fd/{handle}"))))
    noted(monkeypatch, os, "replace", lambda source, _: events.append(("replace", str(source))))
    atomic_write(tmp_path / "file", lambda temporary: temporary.write_text("x"))
    (first, temporary), (second, replaced), (third, folder) = events
    assert (first, second, third) == ("sync", "replace", "sync") and temporary == replaced and folder == str(tmp_path)

    def fails(temporary):
        temporary.write_text("half")
        raise ValueError("full")

    with pytest.raises(ValueError):
        atomic_write(tmp_path / "file", fails)
    assert [each.name for each in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "x"
