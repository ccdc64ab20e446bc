"""The pages of the API reference, one per topic, made from the names that the package exports.

Each public name must be on a page, or the site and the tests fail. The text is that of the docstrings, whose
Sphinx roles become Markdown here. ``tools/site.py`` adds the pages to the site, where mkdocstrings replaces
the directives ``::: shoal.name``.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "shoal"

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):`~?([^`]+)`")
_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+):( .*(?:\n\1 +.*)*)$", re.MULTILINE)
_TABLE = re.compile(r"^( *)(=+(?: +=+)+)\n(?:.*\n)+?\1\2\n(?:.*\n)+?\1\2$", re.MULTILINE)

#: file of the site -> title, description, and the modules with the page's names
TOPICS = {
    "groups": (
        "Groups",
        "Creation of groups, and operations of their members.",
        ["initialize", "group", "spec", "tracing"],
    ),
    "futures": (
        "Futures",
        "The result of every operation; see [Futures](../futures.md).",
        ["future"],
    ),
    "training": (
        "Training",
        "Modules, optimizers and contexts for [data-parallel training](../data-parallel.md).",
        ["parallel"],
    ),
    "elastic": (
        "Elastic training",
        "`shoal.elastic`; see [Elastic training](../elastic.md).",
        ["elastic"],
    ),
    "hooks": (
        "Communication hooks",
        "`shoal.parallel.hooks`; see [Communication hooks](../comm-hooks.md) for a comparison.",
        ["parallel.hooks"],
    ),
    "rpc": ("Calls", "`shoal.rpc`; see [Calls](../rpc.md).", ["rpc"]),
    "controller": (
        "Master and workers",
        "One script and its nodes; see [Master and workers](../controller.md).",
        ["controller"],
    ),
    "errors": ("Errors", "All exceptions; see [Errors](../errors.md) for their handling.", ["errors"]),
    "stores": (
        "Stores and meeting",
        "Key-value stores, and the [rendezvous](../rendezvous.md) of processes in them.",
        ["store", "rendezvous"],
    ),
    "backends": (
        "Backends",
        "Interfaces to implement [another backend](../backends.md).",
        ["backend.base", "backend.registry"],
    ),
    "torch": (
        "torch.distributed's functions",
        "`shoal.distributed`; the [table](../distributed.md) lists differences from torch.",
        ["distributed"],
    ),
    "testing": (
        "Testing",
        "`shoal.testing`; [Testing](../testing.md) has examples.",
        ["testing", "testing.conformance"],
    ),
}


def names() -> dict[str, list[str]]:
    """Return the full public names by exporting module: ``{"future": ["shoal.Future", ...], ...}``."""
    found = {module: [f"shoal.{name}" for name in names] for module, names in _top().items()}
    for module in (
        "parallel.hooks",
        "elastic",
        "distributed",
        "rpc",
        "controller",
        "testing",
        "testing.conformance",
    ):
        path = PACKAGE / module.replace(".", "/") / "__init__.py"
        above = found.get(module, [])
        found[module] = above + [
            f"shoal.{module}.{name}"
            for name in _assigned(path, "__all__")
            if name not in _taken_from_above(path) and f"shoal.{name}" not in above
        ]
    return found


def pages() -> dict[str, str]:
    """Return the pages of the reference, by their paths in the site."""
    public = names()
    missing = public.keys() - {module for _, _, modules in TOPICS.values() for module in modules}
    if missing:
        raise ValueError(f"tools/reference.py has no page for the names of {sorted(missing)}")
    return {
        f"api/{file}.md": "\n\n".join([f"# {title}", about, *_directives(public, modules)]) + "\n"
        for file, (title, about, modules) in TOPICS.items()
    }


def _directives(public: dict[str, list[str]], modules: list[str]) -> list[str]:
    return [f"::: {name}" for module in modules for name in public[module]]


def _assigned(path: Path, name: str) -> Any:
    """The literal that a module assigns to ``name``, read without importing the module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"{path} assigns nothing to {name}")


def _top() -> dict[str, list[str]]:
    """The names of the package itself, by exporting module; those of ``errors`` are all of its classes."""
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    errors = sorted(each.name for each in tree.body if isinstance(each, ast.ClassDef))
    public: dict[str, list[str]] = _assigned(PACKAGE / "__init__.py", "_PUBLIC")
    return {**public, "errors": [name for name in errors if not name.startswith("_")]}


def _taken_from_above(path: Path) -> set[str]:
    """The names that a module only re-exports; the reference has them at their origin."""
    public = {name for names in _top().values() for name in names}
    return {
        alias.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.level > 1
        for alias in node.names
        if alias.name in public
    }


# -- docstrings --------------------------------------------------------------------------------


def markdown(docstring: str) -> str:
    """Convert a docstring to Markdown: links to public names, other names as code, tables verbatim.

    Arguments with a common description, as in ``a, b: text``, are split.
    """
    text = _TABLE.sub(lambda table: f"{table[1]}```text\n{table[0]}\n{table[1]}```", docstring)
    text = _SEVERAL.sub(lambda args: "\n".join(f"{args[1]}{a}:{args[3]}" for a in args[2].split(", ")), text)
    return _ROLE.sub(lambda role: _link(role[1]), text)


def comment_above(source: str, line: int) -> str:
    """Return the text of the ``#:`` comment directly above a line (counted from 1)."""
    lines = source.splitlines()[: line - 1]
    found: list[str] = []
    while lines and lines[-1].lstrip().startswith("#:"):
        found.insert(0, lines.pop().lstrip().removeprefix("#:").strip())
    return " ".join(found)


@functools.cache
def _by_short_name() -> dict[str, str]:
    return {full.rpartition(".")[2]: full for each in names().values() for full in reversed(each)}


def _link(name: str) -> str:
    short = name.rpartition(".")[2]
    full = _by_short_name().get(short)
    return f"[`{short}`][{full}]" if full in (name, f"shoal.{name}") else f"`{short}`"
