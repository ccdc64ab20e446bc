"""Only torch_features asks which features the installed torch has, and nothing compares its version."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.common import torch_features

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "shoal"
#: the module for differences between releases, and the one that checks the release
ALLOWED = {
    PACKAGE / "common" / "torch_features.py",
    PACKAGE / "common" / "torch_release.py",
    PACKAGE / "tools" / "doctor" / "probes.py",  # it reports versions, and decides nothing
}


def _torch_names(tree: ast.AST) -> set[str]:
    """Names that imports bind to torch, its modules and their members."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "torch":
                    names.add(each.asname or "torch")
        elif isinstance(node, ast.ImportFrom) and f"{'.' * node.level}{node.module}.".startswith("torch."):
            names.update(each.asname or each.name for each in node.names)
    return names


def _root(node: ast.AST) -> str | None:
    """The name at the beginning of ``a.b.c``; None: the expression is something else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_version(node: ast.AST, torch_names: set[str]) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("__version__", "version", "git_version")
        and _root(node) in torch_names
    )


def queries(source: str) -> Iterator[str]:
    """Lines of a module that ask torch for a feature or use its version outside the text of a message."""
    tree = ast.parse(source)
    torch_names = _torch_names(tree)
    in_messages = {
        id(node)
        for message in ast.walk(tree)
        if isinstance(message, ast.JoinedStr)
        for node in ast.walk(message)
    }
    for node in ast.walk(tree):
        found = False
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            about_torch = _root(node.args[0]) in torch_names
            if node.func.id in ("hasattr", "getattr"):  # a name in a variable is a look-up, not a question
                found = about_torch and isinstance(node.args[1], ast.Constant)
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant):
            found = any(_lists_names(each, torch_names) for each in node.comparators)
        elif isinstance(node, ast.Try):
            expected = {_root(name) for handler in node.handlers for name in _classes(handler)}
            found = bool(expected & {"ImportError", "ModuleNotFoundError", "AttributeError"}) and bool(
                _torch_names(ast.Module(node.body, []))
            )
        else:
            found = _is_version(node, torch_names) and id(node) not in in_messages
        if found:
            yield f"{node.lineno}: {ast.unparse(node).splitlines()[0]}"  # type: ignore[attr-defined]


def _lists_names(node: ast.AST, torch_names: set[str]) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "dir"
        and _root(node.args[0]) in torch_names
    )


def _classes(handler: ast.ExceptHandler) -> list[ast.expr]:
    if isinstance(handler.type, ast.Tuple):
        return handler.type.elts
    return [] if handler.type is None else [handler.type]


def test_only_one_module_asks_torch_for_features() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if path not in ALLOWED and (lines := list(queries(path.read_text())))
    }
    assert not found, "ask in common/torch_features.py instead"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nhasattr(torch, 'x')",
        "import torch\ngetattr(torch.ops.aten, 'x', None)",
        "import torch.distributed as dist\nhasattr(dist.ProcessGroup, 'x')",
        "from torch._C import _distributed_c10d as c10d\nc = getattr(c10d, 'x', None)",
        "from torch.nn import Module\nif hasattr(Module, 'x'): pass",
        "import torch\n'x' in dir(torch.ops)",
        "import torch\ntorch.__version__ >= '2.14'",
        "import torch\nf(torch.__version__)",
        "import torch\ntorch.version.cuda",
        "from torch import version\nx = version.__version__",
        "try:\n    from torch.x import y\nexcept ImportError:\n    y = None",
    ],
)
def test_questions_are_found(source: str) -> None:
    assert list(queries(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ngetattr(torch, name)",
        "import torch\nraise ValueError(f'torch {torch.__version__} has no such dtype')",
        "x = getattr(opts, 'timeout', None)",
        "import torch\n'ours' in vars(torch.Tensor)",
        "import torch\nnames = [name for name in vars(torch) if name.isupper()]",
        "import numpy as np\nhasattr(np, 'x')",
    ],
)
def test_other_code_is_not(source: str) -> None:
    assert not list(queries(source))


@pytest.mark.parametrize(("release", "library"), [("13.0", "libcudart.so.13"), (None, None)])
def test_the_library_of_cuda_is_named_by_the_release(
    monkeypatch: pytest.MonkeyPatch, release: str | None, library: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", release)
    assert torch_features.cuda_runtime_library() == library
