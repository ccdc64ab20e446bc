"""Check that class names of ``src/shoal`` are unique: ``python -m tools.class_names``, in ``make lint``."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def duplicates(package: Path = ROOT / "src" / "shoal") -> dict[str, list[str]]:
    """Return each class name that is defined more than once, with ``path:line`` of each definition."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(package)}:{node.lineno}")
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


if __name__ == "__main__":
    shared = duplicates()
    for class_name, found in shared.items():
        print(f"the class name {class_name} is used more than once: {', '.join(found)}", file=sys.stderr)
    sys.exit(1 if shared else 0)
