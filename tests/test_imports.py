"""Imports go one way: rooms know only those below them, and meet kernels through their public names."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mha2mla

ROOT = Path(mha2mla.__file__).parent
# What the rooms of the house that others stand on may import.
BELOW = {
    "geometry": set(),
    "kernels": {"geometry", "environment", "terminal"},
    "testing": {"geometry", "kernels", "environment", "terminal"},
    "modeling": {"geometry", "kernels", "checkpoints"},
    "loop": {"kernels", "modeling", "prompts", "terminal"},
    "conversion": {"geometry", "modeling", "checkpoints", "environment", "terminal", "files"},
}


def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports, under TYPE_CHECKING and inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name for name in names if name.startswith("mha2mla")}


def modules(room: str) -> list[Path]:
    return [path for path in (ROOT / room).rglob("*.py") if path.stem != "__init__"] or [ROOT / f"{room}.py"]


ROOMS = sorted({path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")} - {"__init__"})
GRAPH = {
    room: {name.split(".")[1] for path in modules(room) for name in imported(path) if "." in name} - {room}
    for room in ROOMS
}


@pytest.mark.parametrize("room", BELOW)
def test_a_room_knows_those_below_it_alone(room):
    assert GRAPH[room] <= BELOW[room]


def test_no_room_imports_one_that_imports_it():
    list(TopologicalSorter(GRAPH).static_order())  # raises CycleError, which names the circle


def test_nothing_but_the_command_line_knows_what_serves():
    assert {room for room in ROOMS if "serving" in GRAPH[room]} == {"cli"}


def test_modeling_imports_nothing_inside_kernels():
    inner = {path.name: [name for name in imported(path) if "mha2mla.kernels." in name] for path in modules("modeling")}
    assert {name: found for name, found in inner.items() if found} == {}


@pytest.mark.parametrize("room", [room for room in ROOMS if (ROOT / room).is_dir()])
def test_no_module_imports_one_of_its_room_that_imports_it(room):
    names = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in modules(room)}
    graph = {name: imported(path) & set(names) for name, path in names.items()}
    list(TopologicalSorter(graph).static_order())


def test_few_files_know_how_a_layout_without_rotary_cache_is_written():
    """Others ask ``has_rope_cache`` of the geometry or config."""
    mentioned = [path for path in ROOT.rglob("*.py") if "rope_from_latent" in path.read_text(encoding="utf-8")]
    assert len(mentioned) <= 10, mentioned
