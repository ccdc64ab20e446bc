"""The import graph of ``src/shoal``, read from the sources without importing them.

``python -m tools.imports`` prints the import cycles. Imports inside functions count; those under
``TYPE_CHECKING`` do not, so that a part of an object can name the type of its owner.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "shoal"

#: the modules that each module imports
Graph = dict[str, set[str]]


def module_name(path: Path, package: Path = PACKAGE) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path: Path, package: Path = PACKAGE, *, types: bool = True) -> frozenset[tuple[str, str]]:
    """Return the imports of a file, with absolute names: ``("a", "b")`` for ``from a import b``.

    Args:
        types: whether to include those under ``TYPE_CHECKING``.
    """
    name = module_name(path, package)
    folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(), str(path))
    ignored: set[ast.AST] = set()
    if not types:
        branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
        for branch in branches:
            if ast.unparse(branch.test) == "TYPE_CHECKING":
                ignored.update(ast.walk(branch))
    found: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            found.update((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(module, folder) if node.level else module
            found.update((base, alias.name) for alias in node.names)
    return frozenset(found)


def import_graph(package: Path = PACKAGE, *, types: bool = True) -> Graph:
    """Return the modules of ``package`` with the modules that they import.

    ``from a import b`` is an edge to ``a.b`` if that is a module, else to ``a``. The package's ``__init__``
    is left out: it re-exports names of every layer, and no module imports from it.
    """
    files = {module_name(path, package): path for path in package.rglob("*.py")}
    graph: Graph = {}
    for name, path in files.items():
        pairs = imports(path, package, types=types)
        targets = {full if (full := f"{base}.{each}") in files else base for base, each in pairs}
        graph[name] = {target for target in targets if target in files and target not in (name, package.name)}
    del graph[package.name]
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the import cycles: a shortest cycle for each set of modules that import one another."""
    found: list[list[str]] = []
    seen: set[str] = set()
    for start in sorted(graph):
        way = None if start in seen else _way_back(graph, start)
        if way is not None:
            found.append(way)
            seen.update(way)
    return found


def _way_back(graph: Mapping[str, set[str]], start: str) -> list[str] | None:
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
    for circle in circles(import_graph(types=False)):
        print(" -> ".join([*circle, circle[0]]))
