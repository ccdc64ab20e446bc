"""What building says, in a line, when the machine lacks what it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("lacks", "line"),
    [
        ("PYTHON=no-such-python", "shoal needs Python >= 3.10 and found no 'no-such-python': install it"),
        ("PYTHON=/bin/false", "shoal needs Python >= 3.10 and '/bin/false' is older or does not start"),
        ("CXX=no-such-compiler", "shoal needs a C++20 compiler and 'no-such-compiler' is none: install g++"),
    ],
)
def test_make_names_what_is_missing_in_a_line(lacks: str, line: str, tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("src", "cpp"):
        (tmp_path / folder).mkdir()
    command = ["make", "--no-print-directory", lacks, ".venv/.done/venv"]
    if not lacks.startswith("PYTHON"):
        command.append(f"PYTHON={sys.executable}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    said, makes_own = result.stderr.splitlines()[-2:]
    assert said.startswith(line)
    assert makes_own.startswith("make: ***")


def test_cmake_names_a_missing_compiler(tmp_path: Path) -> None:
    tools = sysconfig.get_path("scripts")
    cmake, ninja = shutil.which("cmake", path=tools), shutil.which("ninja", path=tools)
    if cmake is None or ninja is None:
        pytest.skip("cmake and ninja are not beside this Python")
    only_ninja = tmp_path / "bin"
    only_ninja.mkdir()
    (only_ninja / "ninja").symlink_to(ninja)
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path / "build"), "-G", "Ninja"]
    result = subprocess.run(
        command, env={"PATH": str(only_ninja)}, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert result.returncode == 1
    said = " ".join(result.stderr.split())
    assert "shoal needs a C++20 compiler and found none: install g++ >= 11 or clang >= 13" in said
