"""Which torch is accepted, what another one is told, and which private parts of torch the sources use."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import shoal
from shoal.common import torch_release

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shoal"

REFUSED = "shoal needs torch>=2.11,<2.16, but torch {} is installed: pip install 'torch>=2.11,<2.16'"
UNTESTED = (
    "torch {} is newer than the releases that shoal was tested with (torch>=2.11,<2.16); if something fails, "
    "try: pip install 'torch>=2.11,<2.16'"
)

#: a torch of another release, which calls its backends at the end of its import, as the real one does
OTHER_TORCH = """
from importlib.metadata import EntryPoint
from .version import __version__
entry_point = {entry_point}
if entry_point:
    EntryPoint("shoal", entry_point, "torch.backends").load()()
"""


def _entry_point() -> str:
    (found,) = re.findall(
        r'^\[project.entry-points."torch.backends"\]\nshoal = "(.*)"$',
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    return str(found)


def _with_torch(
    folder: Path, version: str, program: str, *, calls_backends: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` where ``import torch`` gives an empty torch of this version."""
    package = folder / "torch"
    package.mkdir()
    entry_point = repr(_entry_point() if calls_backends else None)
    (package / "__init__.py").write_text(OTHER_TORCH.format(entry_point=entry_point))
    (package / "version.py").write_text(f"from typing import Optional\n\n__version__ = '{version}'\n")
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{Path(shoal.__file__).parent.parent}"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_an_older_torch_is_refused_at_import_in_one_sentence(tmp_path: Path) -> None:
    result = _with_torch(tmp_path, "2.10.0", "import shoal")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"ImportError: {REFUSED.format('2.10.0')}"


def test_an_older_torch_is_imported_with_a_warning_and_shoal_still_refused(tmp_path: Path) -> None:
    program = "import torch; print('torch is there'); import shoal.distributed"
    result = _with_torch(tmp_path, "2.10.0", program, calls_backends=True)
    assert result.stdout == "torch is there\n"
    assert result.stderr.splitlines()[-1] == f"ImportError: {REFUSED.format('2.10.0')}"
    assert result.stderr.splitlines()[0].endswith(REFUSED.format("2.10.0"))
    assert result.stderr.startswith("torch.distributed does not accept the backend 'shoal'")


def test_a_newer_torch_is_used_after_one_warning(tmp_path: Path) -> None:
    program = "import shoal; import shoal.errors; print(shoal.__version__)"
    result = _with_torch(tmp_path, "2.16.0", program)
    assert result.returncode == 0
    assert result.stdout == f"{shoal.__version__}\n"
    assert result.stderr.count("RuntimeWarning") == 1
    assert UNTESTED.format("2.16.0") in result.stderr


def test_a_newer_torch_itself_is_imported_without_the_warning(tmp_path: Path) -> None:
    program = "import torch; print('torch is there', flush=True); import shoal"
    result = _with_torch(tmp_path, "2.16.0", program, calls_backends=True)
    assert result.returncode == 0
    assert result.stdout == "torch is there\n"
    # An empty torch takes no backend, which is the other line.
    assert result.stderr.count("RuntimeWarning") == 1
    assert UNTESTED.format("2.16.0") in result.stderr


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.13.0a0+git1234567", "2.15.1", "2.15.0+cpu"])
def test_supported_releases_pass(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _torch(version))
    assert torch_release.problem() is None
    assert torch_release.untested() is None


@pytest.mark.parametrize("version", ["2.4.1", "1.13.1", "2.10.0+cu130", "unknown"])
def test_older_releases_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _torch(version))
    assert torch_release.problem() == REFUSED.format(version)


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20270101+cpu", "3.0.0"])
def test_newer_releases_are_untested_and_not_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _torch(version))
    assert torch_release.problem() is None
    assert torch_release.untested() == UNTESTED.format(version)


def _torch(version: str) -> ModuleType:
    module = ModuleType("torch")
    module.__version__ = version  # type: ignore[attr-defined]
    return module


def test_the_version_is_read_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert torch_release.installed() == str(torch.__version__)


def test_pip_is_told_the_same_bound() -> None:
    assert f'    "{torch_release.REQUIREMENT}",\n' in (ROOT / "pyproject.toml").read_text()


# -- private parts of torch --------------------------------------------------------------------------------


def _private_names(path: Path) -> set[str]:
    """What a file takes from torch that is private: ``torch.utils._pytree.tree_map``."""
    tree = ast.parse(path.read_text())
    local: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            local |= {
                a.asname or "torch": a.name if a.asname else "torch" for a in node.names if _of_torch(a.name)
            }
        elif isinstance(node, ast.ImportFrom) and not node.level and _of_torch(node.module or ""):
            importlib.import_module(node.module or "")  # so that _shortened knows it, whatever ran before
            local |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    names = set(local.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            first, _, rest = text.partition(".")
            if first in local and re.fullmatch(r"[\w.]+", text):
                names.add(f"{local[first]}.{rest}")
    return {_shortened(name) for name in names if any(map(_is_private, name.split(".")))}


def _of_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def _shortened(name: str) -> str:
    """``name`` up to its last private part, and to what is taken from that if it is a module."""
    parts = name.split(".")
    length = max(i for i, part in enumerate(parts) if _is_private(part)) + 1
    return ".".join(parts[: length + 1 if ".".join(parts[:length]) in sys.modules else length])


def test_the_page_on_torch_internals_lists_every_private_part_that_is_used() -> None:
    importlib.import_module("torch._C._dynamo.eval_frame")
    used = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in _private_names(path)
        if name not in sys.modules or name == "torch._C._dynamo.eval_frame"
    }
    assert {"torch._C._current_graph_task_id", "torch.utils._pytree.tree_map"} <= used
    page = (ROOT / "docs" / "torch-internals.md").read_text()
    assert not {name for name in used if f"`{name}`" not in page}
