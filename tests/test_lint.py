"""What `make lint` checks, one test a tool, so that a failure says at once which one complains."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

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
        pytest.param([_tool("clang-format"), "--dry-run", "-Werror", *CPP], id="clang-format"),
    ],
)
def test_the_sources_satisfy(command: list[str]) -> None:
    # The contract is about the checkout, not about an installation that may be older.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, f"{' '.join(command[:3])} failed:\n{result.stdout}{result.stderr}"
