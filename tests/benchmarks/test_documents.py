"""The text of packages to train on: prose of several kinds of files, without what stands in an evaluated text."""

import gzip
import shutil
import subprocess

import pytest

from benchmarks import documents

HELD_OUT = "a sentence of more than thirteen words that some text has which is to be evaluated later on"
KEPT = "Another sentence, long enough for a paragraph of a document, which stands in no other text that is evaluated."
OTHER = "A third one is written in a manual page and says what its command does with the files that are named to it."


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb on this machine")
def test_paragraphs_of_an_evaluated_text_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LEAST_DOCUMENT", 60)
    package = tmp_path / "package"
    pages, manual = package / "usr/share/doc/some/html", package / "usr/share/man/man1"
    for folder in (package / "DEBIAN", pages, manual):
        folder.mkdir(parents=True)
    fields = ("Package: some", "Version: 1", "Architecture: all", "Maintainer: a", "Description: b", "")
    (package / "DEBIAN/control").write_text("\n".join(fields))
    page = f"<html><head>No title</head><p>{KEPT}</p><p>So says {HELD_OUT}.</p><p>{KEPT}</p></html>"
    (pages / "index.html").write_text(page)
    (manual / "some.1.gz").write_bytes(gzip.compress(f".TH SOME 1\n.PP\n{OTHER}\n".encode()))
    archive = tmp_path / "some_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", package, archive], check=True, capture_output=True)
    (tmp_path / "evaluated.txt").write_text(f"It is {HELD_OUT}, and so on.")
    out = tmp_path / "documents.txt"
    documents.main([str(archive)], str(out), [str(tmp_path / "evaluated.txt")])
    assert sorted(out.read_text().split("\n\n")) == sorted([KEPT, OTHER])
    with pytest.raises(SystemExit, match="which exists; expected the path of a new file"):
        documents.main([str(archive)], str(out))


def test_a_page_without_an_end_of_its_head_has_text():
    page = f"<html><head><title>Some</title><style>p {{}}</style><body><nav>Next</nav><p>{KEPT}</p></html>"
    assert documents.page_text(page).split() == KEPT.split()
