"""What is promised outside the code: metadata, licence, README, and what an import may cost."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import pytest

from mha2mla.cli import build_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def committed() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("no git checkout here")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_metadata():
    try:
        version("mha2mla")
    except PackageNotFoundError:
        pytest.skip("mha2mla is on the path but not installed")
    assert version("mha2mla") == PROJECT["version"]
    assert PROJECT["requires-python"] == ">=3.11"
    assert metadata("mha2mla")["License-Expression"] == "Apache-2.0"
    assert (
        "Apache License" in (ROOT / "LICENSE").read_text()
        and "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
    )


def test_tilelang_is_pinned_exactly():
    assert any(re.match(r"tilelang==\d+\.\d+\.\d+\b", requirement) for requirement in PROJECT["dependencies"])


def test_import_brings_no_kernel_compiler_and_no_cuda():
    code = (
        "import sys, torch, mha2mla\n"
        "assert 'tilelang' not in sys.modules, 'tilelang was imported'\n"
        "assert not torch.cuda.is_initialized(), 'CUDA was initialised'\n"
        "from transformers import CONFIG_MAPPING\n"
        "assert CONFIG_MAPPING['mha2mla'].model_type == 'mha2mla'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_no_file_names_this_machine_or_a_registry():
    paths = re.compile(r"/(?:home|root|work|Users)/\w")
    hosts = re.compile(r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|pypi\.nvidia\.com|index-url)\b")
    for path in committed():
        if path == Path(__file__).resolve():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for pattern in (paths, hosts):
            found = pattern.search(text)
            assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


def test_the_readmes_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for line in "\n".join(blocks("bash")).splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.M), line
        elif words and words[0] == "mha2mla":
            build_parser().parse_args(words[1:])


def test_every_verb_is_in_the_readme():
    verbs = build_parser()._subcommands_action._name_parser_map
    for verb in verbs:
        assert f"mha2mla {verb}" in README


def test_ci_runs_the_readmes_test_command():
    assert "make test" in blocks("bash")[0] and "make demo" in blocks("bash")[0]
    assert re.search(r"^make test\b", (ROOT / ".ci" / "run").read_text(), re.M)


def test_the_readmes_python_runs(tiny_source, tmp_path, monkeypatch, capsys):
    """Every block, in order, with a tiny model where the README says path/to/llama and a short calibration."""
    monkeypatch.chdir(tmp_path)
    Path("path/to").mkdir(parents=True)
    Path("path/to/llama").symlink_to(tiny_source, target_is_directory=True)
    python = blocks("python")
    assert len(python) >= 3
    for block in python:
        namespace: dict = {}
        block = block.replace("cache_ratio=0.5)", "cache_ratio=0.5, calibration_tokens=256, calibration_length=64)")
        exec(compile(block, "README.md", "exec"), namespace)
        if "out" in namespace:
            assert namespace["out"].shape == (2, 1, 9, 144)
    assert Path("path/to/llama-mla/model.safetensors").is_file()
