"""The public names: loaded when used, exported once, the same for type checkers as at run time."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).resolve().parent.parent


def _errors() -> list[str]:
    tree = ast.parse(Path(shoal.errors.__file__).read_text())
    return [each.name for each in tree.body if isinstance(each, ast.ClassDef) and each.name[0] != "_"]


def _names_for_type_checkers() -> dict[str, list[str]]:
    tree = ast.parse(Path(shoal.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    found: dict[str, list[str]] = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        for alias in statement.names:
            if alias.name == "*":
                found[statement.module or ""] = _errors()
                continue
            assert alias.asname == alias.name
            found.setdefault(statement.module or "", []).append(alias.name)
    return found


def test_type_checkers_see_the_names_that_there_are() -> None:
    seen = {module: sorted(names) for module, names in _names_for_type_checkers().items()}
    assert seen == {
        **{module: sorted(names) for module, names in shoal._PUBLIC.items()},
        "": sorted(shoal._SUBMODULES),
    }


def test_every_public_module_is_there_after_import_shoal() -> None:
    program = (
        "import shoal, types\n"
        "listed = [name for name in shoal._SUBMODULES if name not in dir(shoal)]\n"
        "assert not listed, listed\n"
        "for name in shoal._SUBMODULES:\n"
        "    assert isinstance(getattr(shoal, name), types.ModuleType), name\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_every_module_that_a_page_names_is_public() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    modules = {path.stem if path.is_file() else path.name for path in (ROOT / "src" / "shoal").iterdir()}
    named = {
        name
        for page in pages
        for name in re.findall(r"\bshoal\.([a-z][a-z_]*)\b", page.read_text())
        if name in modules
    }
    assert {"distributed", "errors", "testing"} <= named
    assert named <= set(shoal._SUBMODULES)


def test_no_name_is_exported_by_two_modules() -> None:
    names = [name for names in shoal._PUBLIC.values() for name in names]
    assert len(names) == len(set(names))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'all_reduce_everything'"):
        shoal.all_reduce_everything  # noqa: B018


def test_the_version_is_the_one_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(rf'^version = "{re.escape(shoal.__version__)}"$', text, re.MULTILINE)
