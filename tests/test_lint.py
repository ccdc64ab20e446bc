"""What `make lint` checks, one test a tool, so that a failure says at once which one complains."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tools.class_names import duplicates

ROOT = Path(__file__).resolve().parent.parent
CPP = sorted(
    str(path.relative_to(ROOT)) for pattern in ("*.cc", "*.h") for path in (ROOT / "cpp").rglob(pattern)
)


def _tool(name: str) -> str:
    return os.path.join(sysconfig.get_path("scripts"), name)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([_tool("ruff"), "check", "."], id="ruff-check"),
        pytest.param([_tool("ruff"), "format", "--check", "."], id="ruff-format"),
        pytest.param([sys.executable, "-m", "mypy"], id="mypy-strict"),
        pytest.param([_tool("lint-imports")], id="import-contract"),
        pytest.param([sys.executable, "-m", "tools.class_names"], id="class-names"),
        pytest.param([_tool("clang-format"), "--dry-run", "-Werror", *CPP], id="clang-format"),
    ],
)
def test_the_sources_satisfy(command: list[str]) -> None:
    # The contract is about the checkout, not about an installation that may be older.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, f"{' '.join(command[:3])} failed:\n{result.stdout}{result.stderr}"


def test_classes_of_one_name_are_found_in_all_folders(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("class Twice: pass\nclass Once: pass\n")
    (tmp_path / "inner" / "b.py").write_text("def f():\n    class Twice: pass\n")
    assert duplicates(tmp_path) == {"Twice": ["a.py:1", "inner/b.py:2"]}
