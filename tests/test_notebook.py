"""The notebook runs, and is what its source says."""

import os
import re
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))

jupytext = pytest.importorskip("jupytext", reason="extra `notebooks` is not installed")
nbformat = pytest.importorskip("nbformat", reason="extra `notebooks` is not installed")


def cells(notebook) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source.strip()) for cell in notebook.cells]


def test_there_is_a_notebook():
    assert "compare_latencies" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_is_its_source(name):
    """After a change of the .py: `make notebook`."""
    source, notebook = jupytext.read(FOLDER / f"{name}.py"), nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert cells(notebook) == cells(source)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_one_run_on_a_gpu(name):
    """A picture of a CPU's times, or of half a run, says less than no picture. They name no folder of that machine."""
    code = [cell for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert not any(output.output_type == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    assert "NVIDIA" in text and not re.search(r"/(tmp|root|home|opt|usr)/", text)
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 300_000


# What the notebook chooses in its first cell -> what takes seconds.
SMALL = {
    'RECIPE = {"preset": "quick", "cache_ratio": 0.5}': (
        'RECIPE = {"preset": "minimal", "cache_ratio": 0.5, "calibration.tokens": 2048, "calibration.lengths": 64}'
    ),
    "else [64, 256, 1024]": "else [32, 64]",
    "else [1, 4]": "else [1, 2]",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_runs(name, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="extra `notebooks` is not installed")
    pytest.importorskip("ipykernel", reason="extra `notebooks` is not installed")
    pytest.importorskip("matplotlib", reason="extra `notebooks` is not installed")
    pytest.importorskip("pandas", reason="extra `notebooks` is not installed")
    monkeypatch.delenv("MHA2MLA_NOTEBOOK_MODEL", raising=False)
    # The kernel is another process in another folder: it finds what this one finds, installed or not.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")])))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    choices = next(cell for cell in notebook.cells if "RECIPE =" in cell.source)
    for chosen, small in SMALL.items():
        assert chosen in choices.source
        choices.source = choices.source.replace(chosen, small)
    nbclient.NotebookClient(notebook, timeout=290, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "a plot was drawn"
    text = "".join(output.get("text", "") for output in outputs if output.output_type == "stream")
    assert "MLA (converted):" in text
    assert torch.cuda.is_available() or "no kernel" in text
    assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert "us_p50" in (tmp_path / f"{name}.csv").read_text().splitlines()[0]
    assert not list(scratch.glob("mha2mla-*")), "checkpoints are left in the temporary folder"
