"""Long evaluation texts that come with packages which this one requires: nothing to download, nothing to ship."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# What Apache TVM FFI, which TileLang requires, carries as a test file of libbacktrace: some 140k tokens.
_OPTICKS = Path("3rdparty/libbacktrace/Isaac.Newton-Opticks.txt")
_OPTICKS_SHA256 = "d4a9ac22462b35e7821a4f2706c211093da678620a8f9997989ee7cf8d507bbd"
# Between them GPL-3, Apache-2.0, MPL-2.0, PSF and many short ones; torch last, whose list changes most often.
_LICENSED = ("numpy", "ml_dtypes", "typing_extensions", "sympy", "networkx", "tqdm", "regex", "setuptools", "torch")
_LICENCE_FILE = re.compile(r"\.dist-info/.*(licen[cs]e|copying|notice)[^/]*$", re.IGNORECASE)
_PARAGRAPH = re.compile(r"\n\s*\n")
_LEAST_PARAGRAPH = 60  # letters and blanks


def opticks() -> str:
    """Newton's Opticks (fourth edition, 1730): 567 kB of reasoning prose in older English.

    Raises:
        ValueError: the file is not there, or is another one.
    """
    found = importlib.util.find_spec("tvm_ffi")  # finds, does not import
    paths = [Path(folder) / _OPTICKS for folder in (found.submodule_search_locations or ())] if found else []
    content = next((path.read_bytes() for path in paths if path.is_file()), None)
    if content is None:
        raise ValueError(
            f"text 'builtin:opticks' needs {_OPTICKS} of the package apache-tvm-ffi (tilelang 0.1.15 requires it), and"
            " it is not installed; expected another text"
        )
    if (digest := hashlib.sha256(content).hexdigest()) != _OPTICKS_SHA256:
        raise ValueError(f"text 'builtin:opticks' has SHA-256 {digest}; expected {_OPTICKS_SHA256}")
    return content.decode("utf-8")


def licences() -> str:
    """Licences of packages that this one requires, joined, each paragraph once: some 130 kB of legal prose.

    Raises:
        ValueError: no such package came with a licence file.
    """
    text = "\n\n".join(_distinct(paragraph for file in _licence_files() for paragraph in _PARAGRAPH.split(file)))
    if not text:
        raise ValueError(f"text 'builtin:licences' found no licence file of {', '.join(_LICENSED)}")
    return text


def _licence_files() -> Iterator[str]:
    for name in _LICENSED:
        try:
            files = metadata.distribution(name).files or []
        except metadata.PackageNotFoundError:
            continue
        for file in sorted(files, key=str):
            if _LICENCE_FILE.search(file.as_posix()):
                try:
                    yield Path(file.locate()).read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError):
                    continue


def _distinct(paragraphs: Iterator[str]) -> Iterator[str]:
    """Paragraphs of some length whose words were not there before: packages quote the same licences over and over."""
    seen: set[str] = set()
    for paragraph in paragraphs:
        words = " ".join(re.findall(r"\w+", paragraph.lower()))
        if len(words) >= _LEAST_PARAGRAPH and words not in seen:
            seen.add(words)
            yield paragraph.strip("\n")
