"""What is promised outside the code: metadata, licence, and what an import may cost."""

import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import pytest

from tests.commands import ROOT, python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "Version 2.0, January 2004" in licence


def test_tilelang_is_pinned_exactly():
    assert any(re.match(r"tilelang==\d+\.\d+\.\d+\b", requirement) for requirement in PROJECT["dependencies"])


def test_installation_is_from_the_clone():
    """The package is in no index, so installing by its name cannot work."""
    texts = {path: path.read_text() for path in committed() if path.suffix in (".py", ".md")}
    assert not [path for path, text in texts.items() if re.search(r"pip install (-\w+ )*['\"]?mha2mla\b", text)]
    extras = {extra for text in texts.values() for extra in re.findall(r"pip install -e '\.\[(\w+)\]'", text)}
    assert {"eval", "plots", "dev"} <= extras <= set(PROJECT["optional-dependencies"])


def test_import_brings_no_kernel_compiler_and_no_cuda():
    code = (
        "import sys, torch, mha2mla\n"
        "brought = {'mha2mla.pipeline', 'mha2mla.eval', 'tilelang'} & set(sys.modules)\n"
        "assert not brought, f'exports that nobody asked for bring {brought}'\n"
        "assert not torch.cuda.is_initialized(), 'CUDA was initialised'\n"
        "import mha2mla.kernels, mha2mla.modeling\n"
        "oracles = [name for name in sys.modules if name.startswith('mha2mla') and name.endswith('.reference')]\n"
        "assert not oracles, f'a fast path brings an oracle: {oracles}'\n"
        "from transformers import CONFIG_MAPPING\n"
        "assert CONFIG_MAPPING['mha2mla'].model_type == 'mha2mla'\n"
    )
    done = python(code)
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
