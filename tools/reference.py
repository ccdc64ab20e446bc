"""The pages of the API reference, one a topic, made from the names that the package exports.

A name that becomes public therefore has its place in the reference at once, or the site and the tests fail.
The text is that of the docstrings, which name things as Sphinx does and become Markdown here.
``tools/site.py`` adds the pages to the site, where mkdocstrings replaces each directive ``::: shoal.name``.
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

#: file of the site -> title, what it is about, and the modules whose names it shows
TOPICS = {
    "groups": (
        "Groups",
        "Making a group, and what its members do together.",
        ["initialize", "group", "spec"],
    ),
    "futures": (
        "Futures",
        "What every operation returns; [Futures](../futures.md) says how to use it.",
        ["future"],
    ),
    "training": (
        "Training",
        "Modules, optimisers and contexts for [data-parallel training](../data-parallel.md).",
        ["parallel"],
    ),
    "elastic": (
        "Elastic training",
        "`shoal.elastic`; [Elastic training](../elastic.md) says how to use it.",
        ["elastic"],
    ),
    "hooks": (
        "Communication hooks",
        "`shoal.parallel.hooks`; [Communication hooks](../comm-hooks.md) compares them.",
        ["parallel.hooks"],
    ),
    "rpc": ("Calls", "`shoal.rpc`; [Calls](../rpc.md) says how to use it.", ["rpc"]),
    "controller": (
        "Master and workers",
        "One script and its nodes; [Master and workers](../controller.md) says how to use it.",
        ["controller"],
    ),
    "errors": ("Errors", "Every exception; [Errors](../errors.md) has the tree, and what to do.", ["errors"]),
    "stores": (
        "Stores and meeting",
        "Key-value stores, and how processes [meet](../rendezvous.md) in them.",
        ["store", "rendezvous"],
    ),
    "backends": (
        "Backends",
        "What to implement to [move tensors another way](../backends.md).",
        ["backend.base", "backend.registry"],
    ),
    "torch": (
        "torch.distributed's functions",
        "`shoal.distributed`; the [table](../distributed.md) says what differs from torch.",
        ["distributed"],
    ),
    "testing": ("Testing", "`shoal.testing`; [Testing](../testing.md) has examples.", ["testing"]),
}


def names() -> dict[str, list[str]]:
    """The full public names by the module that exports them: ``{"future": ["shoal.Future", ...], ...}``."""
    top: dict[str, list[str]] = _assigned(PACKAGE / "__init__.py", "_PUBLIC")
    found = {module: [f"shoal.{name}" for name in names] for module, names in top.items()}
    for module in ("parallel.hooks", "elastic", "distributed", "rpc", "controller", "testing"):
        path = PACKAGE / module.replace(".", "/") / "__init__.py"
        above = found.get(module, [])
        found[module] = above + [
            f"shoal.{module}.{name}"
            for name in _assigned(path, "__all__")
            if name not in _taken_from_above(path) and f"shoal.{name}" not in above
        ]
    return found


def pages() -> dict[str, str]:
    """Each page of the reference, by its path in the site."""
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
    """The literal that a module assigns to ``name``, read without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"{path} assigns nothing to {name}")


def _taken_from_above(path: Path) -> set[str]:
    """The names that a module only passes on: the reference has them where they come from."""
    top = _assigned(PACKAGE / "__init__.py", "_PUBLIC")
    public = {name for names in top.values() for name in names}
    return {
        alias.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.level > 1
        for alias in node.names
        if alias.name in public
    }


# -- docstrings --------------------------------------------------------------------------------


def markdown(docstring: str) -> str:
    """A docstring with links to public names, other names as code, and tables as they are.

    Arguments that share a description get it each: ``a, b: where to begin``.
    """
    text = _TABLE.sub(lambda table: f"{table[1]}```text\n{table[0]}\n{table[1]}```", docstring)
    text = _SEVERAL.sub(lambda args: "\n".join(f"{args[1]}{a}:{args[3]}" for a in args[2].split(", ")), text)
    return _ROLE.sub(lambda role: _link(role[1]), text)


def comment_above(source: str, line: int) -> str:
    """What the lines ``#: ...`` right above a line (counted from 1) say of the name that it assigns."""
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
