"""Documents of Debian packages as one text to train on, without what stands in a text to be evaluated.

    apt-get download anarchism perl-doc postgresql-doc-15
    python benchmarks/documents.py *.deb --out documents.txt --without handbook.txt

Paragraphs of HTML, manual pages, dictionaries, plain files and R's data; each stands once. One that shares a run of
thirteen words with a text of ``--without`` or with a built-in one is left out. Documents come in random order, of a
package at most ``--limit`` characters. Needs ``dpkg-deb``.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import itertools
import lzma
import random
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

from mha2mla.conversion.calibration.texts import BUILTINS, load_text
from mha2mla.files import atomic_write

RUN = 13  # words
LEAST_PARAGRAPH = 60  # characters
LEAST_DOCUMENT = 600  # characters
PART = 100_000  # characters: a dictionary is many documents
_SKIPPED = {"changelog", "copyright", "news", "authors", "thanks", "license", "licence"}
_BLOCKS = {"p", "li", "dd", "dt", "td", "th", "div", "h1", "h2", "h3", "h4", "h5", "pre", "blockquote", "section", "br"}
_HIDDEN = {"script", "style", "nav", "head", "header", "footer"}


class _Paragraphs(HTMLParser):
    """Text of a page; blocks become paragraphs."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden = 0 if tag == "body" else self._hidden + (tag in _HIDDEN)  # </head> may be left out
        if tag in _BLOCKS:
            self.pieces.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in _HIDDEN))
        if tag in _BLOCKS:
            self.pieces.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.pieces.append(data)


def page_text(page: str) -> str:
    parser = _Paragraphs()
    parser.feed(page)
    return "".join(parser.pieces)


def manual_text(page: str) -> str:
    """A manual page's sentences, without its requests and fonts."""
    page = re.sub(r"\\f[A-Z]|\\f\(..|\\f\[[^]]*\]|\\&|\\/|\\,", "", page)
    page = re.sub(r"^\.(PP|P|LP|TP|IP|SH|SS|Pp|It|Sh|sp)\b.*$", "\n", page, flags=re.MULTILINE)
    page = re.sub(r"^\.(B|I|BR|IR|RB|RI|BI|IB|Nm|Ar|Fl|Xr|Em)\s+", "", page, flags=re.MULTILINE)
    page = re.sub(r"^[.'].*$", "", page, flags=re.MULTILINE)
    return page.replace("\\-", "-").replace("\\(aq", "'").replace("\\(cq", "'").replace("\\e", "\\").replace("\\ ", " ")


def pod_text(page: str) -> str:
    page = re.sub(r"[A-Z]<+\s?([^<>]*?)\s?>+", r"\1", page)
    return re.sub(r"^=\w+", "\n", page, flags=re.MULTILINE)


def r_text(data: bytes) -> str:
    """Lines of the character vectors in R's lazily loaded data (``r-cran-janeaustenr``)."""
    lines: list[str] = []
    for found in re.finditer(rb"x\x9c", data):
        try:
            values = zlib.decompressobj().decompress(data[found.start() :])
        except zlib.error:  # two bytes in the middle of a stream
            continue
        for size, line in re.findall(rb"\x00\x04\x00\x09(.{4})([^\x00]*)", values, re.DOTALL):
            lines.append(line[: int.from_bytes(size, "big")].decode("utf-8", "replace"))
    return "\n".join(lines)


def document_text(path: Path) -> str:
    """A file's text, or "" where it is none."""
    data = path.read_bytes()
    name = path.name
    if name.endswith(".rdb"):
        return r_text(data)
    if name.endswith((".gz", ".dz")):
        data, name = gzip.decompress(data), name[:-3]
    elif name.endswith(".xz"):
        data, name = lzma.decompress(data), name[:-3]
    if b"\0" in data[:4096] or Path(name).stem.split(".")[0].lower() in _SKIPPED:
        return ""
    text = data.decode("utf-8", "replace")
    kind = name.rsplit(".", 1)[-1].lower()
    if kind in ("html", "htm", "xhtml", "xml", "page", "docbook", "xhp"):
        return page_text(text)
    if kind in ("pod", "pm"):
        return pod_text(text)
    if re.fullmatch(r"[1-9]\w*", kind) and "man" in path.parts:
        return manual_text(text)
    plain = kind in ("txt", "dict", "text", "md", "rst", "info") or "fortunes" in path.parts
    return html.unescape(text) if plain else ""


def paragraphs(text: str) -> Iterator[str]:
    """Of running words: at least two thirds of the characters are letters and blanks."""
    for each in re.split(r"\n\s*\n|\n%\n", text):
        each = re.sub(r"[ \t\r\f\x0b]*\n[ \t]*", "\n", each.strip())
        each = re.sub(r"[ \t]+", " ", each)
        if len(each) < LEAST_PARAGRAPH or "\ufffd" in each:
            continue
        if sum(c.isalpha() or c.isspace() for c in each) * 3 >= len(each) * 2 and each.count(" ") * 15 >= len(each):
            yield each


def runs(text: str) -> Iterator[int]:
    words = re.findall(r"\w+", text.lower())
    for i in range(len(words) - RUN + 1):
        yield hash(tuple(words[i : i + RUN]))


def documents(archive: Path, limit: int, seen: set[bytes], held_out: set[int]) -> list[str]:
    """Texts of an archive's files in random order, at most ``limit`` characters of them."""
    texts: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink())
        random.Random(0).shuffle(files)
        for path in files:
            kept = []
            for each in paragraphs(document_text(path)):
                digest = hashlib.blake2b(each.lower().encode(), digest_size=8).digest()
                if digest in seen:
                    continue
                seen.add(digest)
                if held_out.isdisjoint(runs(each)):
                    kept.append(each)
            whole = "\n\n".join(kept)
            texts += [whole[start : start + PART] for start in range(0, len(whole), PART)]
            if sum(map(len, texts)) >= 4 * limit:
                break
    random.Random(0).shuffle(texts)
    total = list(itertools.accumulate(map(len, texts)))
    return [text for text, until in zip(texts, total, strict=True) if until <= limit and len(text) >= LEAST_DOCUMENT]


def main(archives: Iterable[str], out: str, without: Iterable[str] = (), limit: int = 3_000_000) -> None:
    if Path(out).exists():
        raise SystemExit(f"out is {out!r}, which exists; expected the path of a new file")
    held_out: set[int] = set()
    for name in (*BUILTINS, *without):
        held_out.update(runs(load_text(name)))
    seen: set[bytes] = set()
    texts: list[str] = []
    for archive in archives:
        found = documents(Path(archive), limit, seen, held_out)
        print(f"{Path(archive).name.split('_')[0]}: {sum(map(len, found)):,} characters", file=sys.stderr)
        texts += found
    random.Random(0).shuffle(texts)
    atomic_write(Path(out), lambda path: path.write_text("\n\n".join(texts), encoding="utf-8"))
    print(f"{out}: {len(texts):,} documents, {sum(map(len, texts)):,} characters", file=sys.stderr)


if __name__ == "__main__":
    from cyclopts import run

    run(main)
