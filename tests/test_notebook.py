"""The notebooks run on a CPU, and are what their sources say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import browse

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
PICTURES = {"compare_latencies": 5, "convert_and_look_inside": 6, "kernel_explorer": 2}  # at least

jupytext = pytest.importorskip("jupytext", reason="extra `notebooks` is not installed")
nbformat = pytest.importorskip("nbformat", reason="extra `notebooks` is not installed")


def _cells(notebook) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source.strip()) for cell in notebook.cells]


def _outputs(notebook) -> list:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def _pictures(notebook) -> int:
    return sum("image/png" in output.get("data", {}) for output in _outputs(notebook))


def _printed(notebook) -> str:
    return "".join(output.get("text", "") for output in _outputs(notebook) if output.output_type == "stream")


@pytest.fixture
def environment(monkeypatch, tmp_path) -> Path:
    """Folder of temporary files of another process, which finds the package that this one finds."""
    monkeypatch.delenv("MHA2MLA_NOTEBOOK_MODEL", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")])))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    return scratch


def test_every_notebook_has_both_files():
    assert NAMES == sorted(PICTURES) == sorted(path.stem for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_its_source(name):
    """After a change of the .py: `make notebook`."""
    source, notebook = jupytext.read(FOLDER / f"{name}.py"), nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert _cells(notebook) == _cells(source)


@pytest.mark.parametrize("name", NAMES)
def test_saved_outputs_are_of_one_run(name):
    """They name no folder of the machine. Times of a CPU are said to be such."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert not any(output.output_type == "error" for output in _outputs(notebook))
    assert _pictures(notebook) >= PICTURES[name] and (FOLDER / f"{name}.ipynb").stat().st_size < 500_000
    assert not re.search(r"/(tmp|root|home|opt|usr|work)/", json.dumps([cell.outputs for cell in code]))
    if name != "convert_and_look_inside":
        assert "NVIDIA H200" in _printed(notebook), "the rows on record"
        timed = _printed(notebook).count("NVIDIA") > 2 or "mla_decode (tilelang)" in json.dumps(code[-1].outputs)
        assert timed or "No GPU" in _printed(notebook)


def test_rows_on_record_are_described():
    notebook = nbformat.read(FOLDER / "compare_latencies.ipynb", as_version=4)
    names = ("h200-latency-e2e", "h200-latency-e2e-contexts")
    files = [FOLDER.parent / "benchmarks" / "results" / f"{name}.json" for name in names]
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    rows = [row for row in rows if row["op"] == "generate"]
    (tokens,) = {row["new_tokens"] for row in rows}
    assert any(f"`generate` makes {tokens} tokens after each prompt" in cell.source for cell in notebook.cells)
    unchecked = sorted({(row["batch"], row["seqlen"]) for row in rows if row["status"] == "not checked"})
    said = ", ".join(f"{batch} × {seqlen:,} tokens" for batch, seqlen in unchecked)
    assert unchecked and f"not checked: {said}\n" in _printed(notebook)


def test_pictures_in_docs_are_the_notebooks_own(tmp_path, monkeypatch):
    """After new outputs: ``python benchmarks/browse.py --notebooks``."""
    pytest.importorskip("PIL", reason="pillow is not installed")
    from PIL import Image, ImageChops, ImageStat

    monkeypatch.setattr(browse, "ROOT", tmp_path)
    (tmp_path / "notebooks").symlink_to(FOLDER)
    (tmp_path / "docs").mkdir()
    browse.notebooks()
    for name in NAMES:
        drawn, shown = (Image.open(root / "docs" / f"{name}.png").convert("RGB") for root in (tmp_path, FOLDER.parent))
        assert drawn.size == shown.size and max(ImageStat.Stat(ImageChops.difference(drawn, shown)).mean) < 0.5, name


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name, tmp_path, environment):
    nbclient = pytest.importorskip("nbclient", reason="extra `notebooks` is not installed")
    pytest.importorskip("ipykernel", reason="extra `notebooks` is not installed")
    pytest.importorskip("matplotlib", reason="extra `notebooks` is not installed")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=170, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert _pictures(notebook) >= PICTURES[name]
    assert not list(environment.glob("mha2mla-*")), "checkpoints are left in the temporary folder"
    if name == "compare_latencies":
        assert torch.cuda.is_available() or "No GPU: plain PyTorch runs" in _printed(notebook)
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert {row["op"] for row in rows} == {"attention", "decode step", "generate"}
        assert all(row["implementation"] in ("source", "converted") for row in rows if row["op"] != "attention")


def test_kernel_explorer_has_sliders_where_ipywidgets_is(tmp_path, environment):
    stub = "def interact(call, **choices):\n    print('sliders:', sorted(choices))\n    call(**{**FIRST, 'batch': 2})\n"
    # ipywidgets refuses a tuple that holds no numbers
    stub += "    assert all(isinstance(one, list) or {*map(type, one)} == {int} for one in choices.values()), choices\n"
    first = "FIRST = dict(heads=8, kv_heads=1, layout='shared', kv_lora_rank=64, qk_rope_head_dim=8, length=64,"
    first += " gpu='h100-80gb')\n"
    for name, content in (("with", first + stub), ("without", "raise ImportError\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ipywidgets.py").write_text(content)
    shown = {}
    for name in ("with", "without"):
        path = os.pathsep.join([str(tmp_path / name), os.environ["PYTHONPATH"]])
        command = [sys.executable, str(FOLDER / "kernel_explorer.py")]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        shown[name] = done.stdout
    assert "sliders: ['batch', 'gpu', 'heads', 'kv_heads', 'kv_lora_rank'" in shown["with"]
    assert "2 sequences of 64 tokens on h100-80gb" in shown["with"]
    assert "ipywidgets is not installed" in shown["without"] and "64 sequences of 8,192 tokens" in shown["without"]
