"""The first C++ program of the page, built by CMake as users do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support.cpp_programs import installation

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300.0


def run(*command: str | Path, cwd: Path) -> str:
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, into: Path, *options: str) -> None:
    where = f"-Dshoal_DIR={installation() / 'cmake'}"
    run("cmake", "-G", "Ninja", "-S", source, "-B", into, where, *options, cwd=source)
    run("cmake", "--build", into, cwd=source)


def test_the_first_program_of_the_page_works(tmp_path: Path) -> None:
    page = (ROOT / "docs/cpp.md").read_text()
    for language, name in (("cpp", "hello.cc"), ("cmake", "CMakeLists.txt")):
        code = re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)
        assert code is not None
        assert name in code[1]
        (tmp_path / name).write_text(code[1])
    build(tmp_path, tmp_path / "build")
    lines = run(sys.executable, "-m", "shoal", "run", "-n", "2", "build/hello", cwd=tmp_path).splitlines()
    printed = re.findall(r"^(\[\d\] the sum.*)$", page, re.MULTILINE)
    assert sorted(lines) == printed
