"""README and docs/ hold: their Python runs, their command lines and recipes parse, and what they point at is there."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
from cyclopts import App, CycloptsError

import mha2mla
from benchmarks import pictures
from mha2mla.conversion.recipe import recipe_file
from tests.commands import VERBS, parse

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
LANGUAGES = ("python", "bash", "yaml", "")  # without a language: nothing that anybody types
# A call that converts: a folder or hub id, and its destination. SHORT makes it take seconds.
CONVERTS = re.compile(r'mha2mla\.convert\("([^"]+)", "([^"]+)"')
SHORT = ', {"preset": "minimal", "calibration.tokens": 256, "calibration.lengths": 64}'


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


BLOCKS = [
    Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])
    for page, text in TEXTS.items()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
]


def blocks(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


COMMANDS = [
    (block, shlex.split(line, comments=True))
    for block in blocks("bash")
    for line in block.text.splitlines()
    if shlex.split(line, comments=True)
]


def test_every_block_is_of_a_language_that_is_checked():
    assert {block.language for block in BLOCKS} <= set(LANGUAGES)
    fences = sum(len(re.findall(r"^\s*```", text, re.M)) for text in TEXTS.values())
    assert fences == 2 * len(BLOCKS), "a fence that is indented or never closed"


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_runs(block, tiny_source, tiny_converted, tmp_path, monkeypatch):
    """As it stands, with a tiny model under each source's name, converted under the names that pages load."""
    monkeypatch.chdir(tmp_path)
    converts = CONVERTS.search(block.text)
    source = Path(converts[1] if converts else "path/to/llama")
    source.parent.mkdir(parents=True)
    source.symlink_to(tiny_source, target_is_directory=True)
    if not converts:
        for name in ("path/to/llama-mla", "smollm2-mla"):
            Path(name).symlink_to(tiny_converted, target_is_directory=True)
    code = CONVERTS.sub(lambda call: call[0] + SHORT, block.text)
    exec(compile(code, str(block), "exec"), {})
    assert not converts or Path(converts[2], "model.safetensors").is_file()


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_recipe_is_read(block, tmp_path):
    (tmp_path / "recipe.yaml").write_text(block.text, encoding="utf-8")
    mha2mla.Recipe.from_dict(recipe_file(tmp_path / "recipe.yaml"))


class Captured(Exception):
    """Carries the parser of a script out of it, at the moment when it would have read its arguments."""


def parser_of(script: Path) -> App:
    def capture(self, *_, **__):
        raise Captured(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [str(script), "--help"])  # which no script refuses where there is no GPU
        patch.setattr(App, "__call__", capture)
        with pytest.raises(Captured) as caught:
            runpy.run_path(str(script), run_name="__main__")
    return caught.value.args[0]


def check(words: list[str]) -> None:
    """Refuses a command line that does not exist, or whose arguments its own parser does not take."""
    match words:
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        case ["mha2mla", *arguments]:
            parse(*arguments)
        case ["python", "-c", code, ">", _]:
            compile(code, "-c", "exec")
        case ["python", script, *arguments]:
            assert (ROOT / script).is_file()
            if "command(" in (ROOT / script).read_text(encoding="utf-8"):
                parser_of(ROOT / script).parse_args(arguments, exit_on_error=False, print_error=False)
            else:
                assert not arguments
        case ["torchrun", "--nproc-per-node", _, script, *arguments]:
            check(["python", script, *arguments])
        case ["pytest", *arguments]:
            assert all((ROOT / word).exists() for word in arguments if word.startswith("tests"))
        case ["source", ".venv/bin/activate"]:
            assert re.search(r"^VENV +\?= \.venv$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        case ["pip", "install", "-e", "."]:
            assert (ROOT / "pyproject.toml").is_file()
        case ["pip", "install", "-e", extra]:
            assert re.search(rf"^{extra[2:-1]} = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
        case ["pip", "install", "--no-deps" | "-r", _]:
            pass
        case ["vllm", "serve", "path/to/llama-mla"]:  # another package's command: without a flag, as the page says
            pass
        case ["compute-sanitizer", *options] if "python" in options:
            check(options[options.index("python") :])
        case _:
            pytest.fail(f"no check of {words[0]}")


@pytest.mark.parametrize(
    ("words", "block"), [(words, block) for block, words in COMMANDS], ids=[f"{b} {w[0]}" for b, w in COMMANDS]
)
def test_command_line_parses(words, block):
    try:
        check(words)
    except (SystemExit, CycloptsError) as refused:
        pytest.fail(f"{block}: {shlex.join(words)}: {refused}")


def test_every_verb_is_described():
    for verb in VERBS:
        assert f"mha2mla {' '.join(verb)}" in TEXTS["docs/command-line.md"]


def test_ci_runs_the_readmes_test_command():
    commands = [words[:2] for block, words in COMMANDS if block.page == "README.md"]
    assert ["make", "test"] in commands and ["make", "demo"] in commands
    assert re.search(r"^make test\b", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", TEXTS[page]):
        path, _, anchor = target.partition("#")
        there = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", TEXTS)
def test_files_and_names_that_are_mentioned_exist(page):
    for path in re.findall(r"`((?:mha2mla|tests|benchmarks|docs|notebooks)/[\w./-]*)[`\s]", TEXTS[page]):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(mha2mla(?:\.\w+)+)`", TEXTS[page]):
        parent, _, last = name.rpartition(".")
        module = importlib.import_module(parent)
        assert hasattr(module, last) or importlib.util.find_spec(name), name


def test_pages_that_code_refers_to_exist():
    """Comments and docstrings that leave the reasons to a page."""
    for folder in ("mha2mla", "benchmarks", "tests", "notebooks"):
        for file in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"[\w/]+/[\w-]+\.md\b", file.read_text(encoding="utf-8")):
                assert not page.startswith(("docs", "benchmarks")) or (ROOT / page).is_file(), f"{file}: {page}"


def test_the_site_has_every_page():
    listed = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(page.removeprefix("docs/") for page in TEXTS if page.startswith("docs/"))


def test_every_file_of_rows_is_explained():
    rows = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    named = {name for text in TEXTS.values() for name in re.findall(r"`benchmarks/results/([\w-]+\.json)`", text)}
    assert rows == named


def test_the_house_has_every_room():
    plan = next(block.text for block in BLOCKS if block.page == "docs/house.md" and not block.language)
    rooms = {path.name for path in (ROOT / "mha2mla").iterdir() if path.name not in ("__pycache__", "data")}
    rooms = {room for room in rooms if not room.startswith("__")}
    missing = sorted(room for room in rooms if not re.search(rf"(?<!\w){re.escape(room)}(?!\w)", plan))
    assert not missing, f"not in docs/house.md: {missing}"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_shows_the_recorded_rows(name):
    svg = (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8")
    drawn, found = pictures.PICTURES[name](), ElementTree.fromstring(svg)
    assert found.find("{http://www.w3.org/2000/svg}desc").text == drawn.description(), "python benchmarks/pictures.py"
    shown = {"".join(each.itertext()) for each in found.iter("{http://www.w3.org/2000/svg}text")}
    assert shown >= {curve.name for panel in drawn.panels for curve in panel.curves} and len(svg) < 60_000


def test_every_picture_is_drawn_and_shown():
    shown = {name for text in TEXTS.values() for name in re.findall(r"!\[[^\]]*\]\((?:[\w./]*/)?([\w-]+)\.svg\)", text)}
    assert shown == pictures.PICTURES.keys() == {path.stem for path in (ROOT / "docs").glob("*.svg")}
