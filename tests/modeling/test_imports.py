"""modeling meets kernels through their public names, and its modules import each other in one direction."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import mha2mla.modeling

FOLDER = Path(mha2mla.modeling.__file__).parent
MODULES = [path for path in FOLDER.glob("*.py") if path.stem != "__init__"]


def imported(path: Path) -> set[str]:
    """Modules that are imported anywhere in a file, under TYPE_CHECKING and inside functions too."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_nothing_inside_kernels_is_imported():
    inner = {path.name: [name for name in imported(path) if name.startswith("mha2mla.kernels.")] for path in MODULES}
    assert {name: found for name, found in inner.items() if found} == {}


def test_no_module_imports_one_that_imports_it():
    graph = {path.stem: {name.removeprefix("mha2mla.modeling.") for name in imported(path)} for path in MODULES}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
