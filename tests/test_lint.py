"""What `make lint` checks, one test a tool, so that a failure says at once which one complains."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tools import prose
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
        pytest.param([sys.executable, "-m", "tools.prose"], id="prose"),
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


def test_words_that_must_be_read_twice_are_found_in_docstrings_comments_messages_and_pages(
    tmp_path: Path,
) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        '"""What a thread waits at."""\n'
        "# the peer is gone\n"
        'raise ValueError("so many ranks shall wait")\n'
        "x = 'gone'  # the key `gone` and the word 'gone' are code\n"
    )
    found = [problem.partition("module.py:")[2] for problem in prose.problems(source)]
    assert [each.split(": ")[:2] for each in found] == [
        ["1", "begins with 'What'"],
        ["3", "'so many'"],
        ["3", "'shall'"],
        ["2", "'gone'"],
    ]
    header = tmp_path / "part.h"
    header.write_text('// Let go of it.\nint x = f("the rank is told");  // fine\n')
    assert [problem.split(": ")[1] for problem in prose.problems(header)] == ["'Let go'", "'is told'"]
    page = tmp_path / "page.md"
    page.write_text(
        "A line " + "of prose " * 13 + "\n```\n" + "code " * 30 + "\n```\n| " + "cell " * 30 + "|\n"
    )
    assert ["124 columns" in problem for problem in prose.problems(page)] == [True]
