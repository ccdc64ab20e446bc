"""The graph of what imports what in ``src/shoal``, read from the sources without importing them.

``python -m tools.imports`` prints the circles.  Imports inside functions and under ``TYPE_CHECKING`` count:
two files that name each other cannot be understood one after the other, even where Python can load them.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "shoal"

#: each module, and the modules that it imports
Graph = dict[str, set[str]]


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """The name under which a file is imported."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, package: Path = PACKAGE) -> Iterator[tuple[str, str]]:
    """What a file imports, wherever in it the statement stands: ``from a import b`` gives ``("a", "b")``.

    ``import a`` gives ``("a", "")``.  Names are absolute.
    """
    name = module_name(path, package)
    folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(module, folder) if node.level else module
            yield from ((base, alias.name) for alias in node.names)


def import_graph(package: Path = PACKAGE) -> Graph:
    """The modules of ``package``, each with those that it imports.

    ``from a import b`` is an arrow to ``a.b`` where that is a module, and else to ``a``.  The package's own
    ``__init__`` is left out: it shows names of every layer, and no module takes names from it.
    """
    files = {module_name(path, package): path for path in package.rglob("*.py")}
    graph: Graph = {}
    for name, path in files.items():
        pairs = imports(path, package)
        targets = {full if (full := f"{base}.{each}") in files else base for base, each in pairs}
        graph[name] = {target for target in targets if target in files and target not in (name, package.name)}
    del graph[package.name]
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The circles of a graph: for each knot of modules that import one another, one shortest way around."""
    found: list[list[str]] = []
    seen: set[str] = set()
    for start in sorted(graph):
        way = None if start in seen else _way_back(graph, start)
        if way is not None:
            found.append(way)
            seen.update(way)
    return found


def _way_back(graph: Mapping[str, set[str]], start: str) -> list[str] | None:
    """The shortest way from ``start`` along the arrows back to it."""
    came_from: dict[str, str] = {}
    queue = [start]
    for here in queue:
        for there in sorted(graph.get(here, ())):
            if there == start:
                way = [here]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if there not in came_from:
                came_from[there] = here
                queue.append(there)
    return None


if __name__ == "__main__":
    for circle in circles(import_graph()):
        print(" -> ".join([*circle, circle[0]]))
