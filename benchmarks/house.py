"""Print the size and shape of checkouts: lines, small files, the words of their prose, import circles.

    python benchmarks/house.py                    # the working directory
    python benchmarks/house.py ../before ../after # several, side by side
    python benchmarks/house.py --draw house.png   # its rooms and what imports what; circles in red

Consecutive comment lines are one text.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx
from rich.console import Console
from rich.table import Table

PACKAGE, SMALL = "mha2mla", 60  # lines of a small file
OPENERS = re.compile(r"(what|which|whether|of|as|how)\b", re.IGNORECASE)


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def comments(text: str) -> Iterator[str]:
    last = (-1, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            if last != (row - 1, column):
                yield token.string.lstrip("#: ")
            last = token.start


def imported(tree: ast.Module, package: str, modules: set[str], *, lazy: bool) -> set[str]:
    """Modules of the checkout that a module imports; ``lazy``: in functions and for type checkers too."""
    found: set[str] = set()

    def visit(nodes: list[ast.AST]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: 1 - node.level or None] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                found.update({f"{base}.{alias.name}" for alias in node.names} & modules or {base})
            elif lazy or not (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
            ):
                visit(list(ast.iter_child_nodes(node)))

    visit([tree])
    return found & modules


def import_graph(trees: dict[Path, ast.Module], checkout: Path, *, lazy: bool) -> networkx.DiGraph:
    """Modules of the package, by their dotted names, and an edge to each module that one imports."""
    names = {}
    for path in trees:
        parts = path.relative_to(checkout).with_suffix("").parts
        names[path] = ".".join(parts).removesuffix(".__init__")
    graph = networkx.DiGraph()
    for path, tree in trees.items():
        package = ".".join(path.relative_to(checkout).parts[:-1])
        targets = imported(tree, package, set(names.values()), lazy=lazy)
        graph.add_edges_from((names[path], target) for target in targets if target != PACKAGE)
    return graph


def rooms_of(graph: networkx.DiGraph) -> networkx.DiGraph:
    """Files and folders of the package, and what imports what, of its modules' graph."""
    arrows = {tuple(end.split(".")[1] for end in edge) for edge in graph.edges if PACKAGE not in edge}
    return networkx.DiGraph([(one, other) for one, other in arrows if one != other])


def draw(checkout: Path, picture: Path) -> None:
    """Writes a PNG of the rooms: who imports stands above, areas are lines of code, circles are red."""
    import matplotlib.pyplot as plt

    files = {path: path.read_text() for path in sorted((checkout / PACKAGE).rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    rooms = rooms_of(import_graph(trees, checkout, lazy=True))
    lines: Counter[str] = Counter()
    for path, text in files.items():
        lines[path.relative_to(checkout / PACKAGE).parts[0].removesuffix(".py")] += text.count("\n")
    whole = networkx.condensation(rooms)  # a circle stands on one floor
    places, group_of = {}, whole.graph["mapping"]
    for height, floor in enumerate(networkx.topological_generations(whole)):
        members = sorted(room for group in floor for room in whole.nodes[group]["members"])
        for index, room in enumerate(members):
            places[room] = ((index + 0.5) / len(members) + 0.02 * (height % 2), -height)
    figure, axes = plt.subplots(figsize=(10, 1 + 0.75 * (1 - min(y for _, y in places.values()))), dpi=80)
    in_circle = [group_of[one] == group_of[other] for one, other in rooms.edges]
    networkx.draw_networkx_edges(
        rooms, places, ax=axes, edge_color=["crimson" if each else "0.75" for each in in_circle], arrowsize=7, width=0.7
    )
    networkx.draw_networkx_nodes(
        rooms, places, ax=axes, node_color="#cfe3f5", node_size=[60 + lines[room] / 4 for room in rooms]
    )
    networkx.draw_networkx_labels(
        rooms, places, {room: f"{room}\n{lines[room]:,}" for room in rooms}, font_size=7, ax=axes
    )
    circles = sum(len(members) > 1 for _, members in whole.nodes(data="members"))
    axes.set_title(
        f"{len(rooms)} rooms, {len(rooms.edges)} arrows, {circles} circles of rooms, {sum(lines.values()):,} lines",
        fontsize=9,
    )
    axes.axis("off")
    figure.savefig(picture, bbox_inches="tight")


def measures(checkout: Path) -> dict[str, str]:
    """Name → figure."""
    files = {path: path.read_text() for path in sorted((checkout / PACKAGE).rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    lines = {path: text.count("\n") for path, text in files.items()}
    documented = [text for tree in trees.values() for text in docstrings(tree) if text]
    prose = documented + [comment for text in files.values() for comment in comments(text)]
    tests = [path.read_text().count("\n") for path in (checkout / "tests").rglob("*.py")]
    by_folder: Counter[str] = Counter()
    for path, count in lines.items():
        by_folder["/".join(path.parent.relative_to(checkout).parts[:3])] += count
    found = {
        f"{PACKAGE}: lines · files": f"{sum(lines.values()):,} · {len(lines)}",
        "lines of docstrings": f"{sum(text.count(chr(10)) + 1 for text in documented):,}",
        f"files under {SMALL} lines": str(sum(count < SMALL for count in lines.values())),
        "tests: lines · files": f"{sum(tests):,} · {len(tests)}",
        "prose that opens with What/Which/Whether/Of/As/How": (
            f"{sum(OPENERS.match(text) is not None for text in prose)} of {len(prose):,}"
        ),
        "files that mention rope_from_latent": str(sum("rope_from_latent" in text for text in files.values())),
    }
    for name, lazy in (("when imported", False), ("in functions and for type checkers too", True)):
        graph = import_graph(trees, checkout, lazy=lazy)
        groups = [group for group in networkx.strongly_connected_components(graph) if len(group) > 1]
        found[f"modules in import circles, {name}"] = f"{sum(map(len, groups))} in {len(groups)}"
    rooms = rooms_of(graph)
    found["rooms (files and folders of the package) · arrows"] = f"{len(rooms)} · {len(rooms.edges)}"
    return found | {f"  {folder}": f"{count:,}" for folder, count in sorted(by_folder.items())}


def main(checkouts: list[str]) -> None:
    if checkouts[:1] == ["--draw"]:
        return draw(Path(*checkouts[2:]).resolve(), Path(checkouts[1]))
    found = {name: measures(Path(name).resolve()) for name in checkouts or ["."]}
    table = Table("measure", *found)
    for key in dict.fromkeys(key for each in found.values() for key in each):
        table.add_row(key, *(each.get(key, "–") for each in found.values()))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
