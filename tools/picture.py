"""Draw docs/architecture.svg: the packages in layers, with their imports.

``python -m tools.picture`` updates it; a test fails if the committed picture is outdated. A box is a package
or module of ``src/shoal`` or a folder of ``cpp``, so the picture changes with the structure only. Arrows that
follow from others are left out, as are arrows to the lowest layer, which all use, and arrows within the core.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from tools.imports import circles, import_graph

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"

Graph = Mapping[str, set[str]]

#: in pixels
_WIDTH, _LEFT, _HEIGHT, _BETWEEN, _GAP = 960, 150, 34, 50, 18
_STYLE = """
text { font: 14px sans-serif; fill: #1f2933; text-anchor: middle }
.row { font-size: 12px; fill: #64748b; text-anchor: start }
rect { fill: #e8f1fb; stroke: #5b8bb8; rx: 6 }
.core { fill: #fdf0e3; stroke: #c08a4e }
.arrow { fill: none; stroke: #8a99a8; stroke-width: 1.3; marker-end: url(#tip) }
"""


def python_rows() -> list[list[str]]:
    """Return the layers of the import contract in pyproject.toml, from the top."""
    block = re.search(r"\nlayers = \[\n(.*?)\n\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    assert block is not None
    rows = [re.findall(r"\w+", line) for line in block[1].splitlines()]
    return [[name for name in row if name != "__main__"] for row in rows]


def python_graph() -> dict[str, set[str]]:
    """Return the imports between the packages and modules of ``src/shoal``."""
    pairs = [(a.split(".")[1], b.split(".")[1]) for a, to in import_graph().items() for b in to]
    return _coarse((a, b) for a, b in pairs if a != "__main__")


def core_folders() -> list[str]:
    """Return the folders of ``cpp`` without its tests, as "cpp/NAME"."""
    return sorted(
        f"cpp/{path.name}" for path in (ROOT / "cpp").iterdir() if path.is_dir() and path.name != "tests"
    )


def _coarse(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for a, b in pairs:
        graph.setdefault(b, set())
        graph.setdefault(a, set()).update({b} - {a})
    return graph


def without_implied(graph: Graph) -> dict[str, set[str]]:
    """Return the transitive reduction of a graph; raises ``ValueError`` if it has a cycle."""
    if ways := circles(graph):
        raise ValueError("a circle cannot be drawn in layers: " + " -> ".join([*ways[0], ways[0][0]]))
    return {
        a: {b for b in to if not any(b in reached(graph, other) for other in to - {b})}
        for a, to in graph.items()
    }


def reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    queue = [start]
    for here in queue:
        queue += [there for there in graph.get(here, ()) if there not in found]
        found.update(graph.get(here, ()))
    return found


def draw() -> str:
    layers = python_rows()
    used_by_all = set(layers[-1])
    imports = {a: to - used_by_all for a, to in python_graph().items() if a not in used_by_all}
    core = core_folders()
    arrows = without_implied(imports)
    for name in ("backend", "parallel"):
        arrows[name] = arrows[name] | {"cpp/python"}
    rows = [*layers, core]
    titles = [f"layer {number}" for number in range(len(layers) - 1, -1, -1)]
    titles[-1] = "layer 0: all use it"
    titles.append("the core: cpp/")
    places = _places(rows, arrows)
    body = [
        *(_arrow(places[a], places[b]) for a in sorted(arrows) for b in sorted(arrows[a])),
        *(_box(name, places[name], "core" if name in core else "") for row in rows for name in row),
        *(
            f'<text class="row" x="12" y="{_top(number) + 21}">{escape(title)}</text>'
            for number, title in enumerate(titles)
        ),
    ]
    height = _top(len(rows)) - _BETWEEN + 20
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
            "<title>The packages of shoal, in layers; an arrow leads to what a package uses</title>",
            f'<defs>{tip} orient="auto">',
            '<path d="M0,0 L8,4 L0,8 z" style="fill:#8a99a8;stroke:none"/></marker></defs>',
            f"<style>{_STYLE}</style>",
            f'<rect width="{_WIDTH}" height="{height}" style="fill:#ffffff;stroke:none"/>',
            *body,
            "</svg>\n",
        ]
    )


def _top(row: int) -> int:
    return 30 + row * (_HEIGHT + _BETWEEN)


def _label(name: str) -> str:
    return name.removeprefix("cpp/")


def _length(name: str) -> int:
    return 9 * len(_label(name)) + 26


def _places(rows: list[list[str]], arrows: Graph) -> dict[str, tuple[int, int, int]]:
    """Left edge, top and width of each box; rows are sorted by the positions of their importers."""
    places: dict[str, tuple[int, int, int]] = {}
    for number, row in enumerate(rows):

        def wish(name: str) -> float:
            above = [places[a] for a in places if name in arrows.get(a, ())]
            return sum(left + width / 2 for left, _, width in above) / len(above) if above else _WIDTH / 2

        ordered = sorted(row, key=lambda name: (wish(name), name))
        free = _WIDTH - _LEFT - sum(map(_length, ordered))
        gap = free // (len(ordered) + 1)
        left = _LEFT + gap
        for name in ordered:
            places[name] = (left, _top(number), _length(name))
            left += _length(name) + gap
    return places


def _box(name: str, place: tuple[int, int, int], kind: str) -> str:
    left, top, width = place
    return (
        f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{_HEIGHT}"/>'
        f'<text x="{left + width // 2}" y="{top + 22}">{escape(_label(name))}</text>'
    )


def _arrow(start: tuple[int, int, int], end: tuple[int, int, int]) -> str:
    x, y = start[0] + start[2] // 2, start[1] + _HEIGHT
    u, v = end[0] + end[2] // 2, end[1]
    if start[1] == end[1]:  # in one row: drawn above the boxes between
        y, over = start[1], start[1] - _BETWEEN // 2
        return f'<path class="arrow" d="M{x},{y} C{x},{over} {u},{over} {u},{v}"/>'
    middle = (y + v) // 2
    return f'<path class="arrow" d="M{x},{y} C{x},{middle} {u},{middle} {u},{v}"/>'


if __name__ == "__main__":
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}\n")
    PICTURE.write_text(draw())
