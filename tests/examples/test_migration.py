"""The script before and after: the page shows how they differ, and they train alike."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.load import EXAMPLES
from tests.support.quick_launcher import QuickLauncher
from tests.support.stage import ROOT

MOVED = ("backend", "wrapper", "functional", "native")


def _code(name: str) -> list[str]:
    """The lines of a script without its docstring."""
    source = (EXAMPLES / "migration" / f"{name}.py").read_text()
    end = ast.parse(source).body[0].end_lineno
    return source.splitlines()[end:]


@pytest.mark.parametrize(
    ("name", "changed"), [("backend", 1), ("wrapper", 2), ("functional", 5), ("native", 9)]
)
def test_the_page_shows_what_changes(name: str, changed: int) -> None:
    shown = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "migration.md").read_text(), re.DOTALL)
    lines = [line for line in difflib.ndiff(_code("gloo"), _code(name)) if line[0] in "+-" and line[2:]]
    diff = "".join(f"{line[0]}{line[2:]}\n" for line in lines)
    assert diff in shown, f"docs/migration.md should have:\n{diff}"
    assert sum(line.startswith("-") for line in lines) == changed


def test_all_of_them_train_alike(launcher: QuickLauncher, tmp_path: Path) -> None:
    """What they print is the same, digit for digit, and what they keep bit for bit."""
    found: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for name in ("gloo", *MOVED):
        checkpoint = tmp_path / f"{name}.pt"
        script = str(EXAMPLES / "migration" / f"{name}.py")
        runner = [str(Path(__file__).with_name("dropped_reducer.py"))] if name == "gloo" else []
        options = ["--epochs", "2", "--checkpoint", str(checkpoint)]
        code, out, err = launcher.run(2, *runner, script, *options)
        assert (code, err) == (0, ""), (name, code, out, err)
        lines = [line.removeprefix("[0] ") for line in out.splitlines()]
        found[name] = lines, torch.load(checkpoint, weights_only=True)
    lines, kept = found["gloo"]
    assert len(lines) == 2
    for other_lines, other in (found[name] for name in MOVED):
        assert other_lines == lines
        assert other["epochs"] == kept["epochs"]
        for name, value in kept["model"].items():
            assert torch.equal(other["model"][name], value), name
        for number, moments in kept["optimizer"]["state"].items():
            for name, value in moments.items():
                assert torch.equal(other["optimizer"]["state"][number][name], value), (number, name)
